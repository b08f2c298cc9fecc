"""The designs on worked sums: what they share, what is asked of whom, and which start they take."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from analysis.records.variants import Sampler, Variant
from analysis.studies.language import start
from analysis.studies.presets import make_preset
from analysis.studies.presets.worked_sums import BOUNDS, LAG
from kl_term.errors import UserError
from tests.packaged import needs_packaged_weights

FRESH, STALE = (make_preset(f"smollm2_worked_sums{name}", {}) for name in ("", "_stale"))


def terms(variants: tuple[Variant, ...]) -> set[tuple[str, float]]:
    return {(variant.name, variant.beta) for variant in variants}


def test_the_two_designs_differ_in_samples_terms_and_seeds_alone():
    assert FRESH.config == STALE.config and not {*FRESH.seeds} & {*STALE.seeds}
    assert {v.sampler for v in FRESH.variants} == {Sampler()}
    assert {v.sampler for v in STALE.variants} == {Sampler(staleness=LAG)}
    bounded = [v for v in STALE.variants if v.truncation is not None]
    assert {v.truncation for v in bounded} == {BOUNDS} and len(bounded) == 2
    names = {name for name, _ in terms(FRESH.variants)}
    assert names == {
        *("none", "exact_loss", "k2_loss", "k3_loss", "k1_reward", "k3_loss_attached_prefix")
    }
    assert len(FRESH.runs) == len(STALE.runs) == 110
    longer = make_preset("smollm2_worked_sums", {"start_updates": 50})
    assert longer.config.start.updates == 50 and longer.design == FRESH.design


def test_a_start_is_chosen_by_what_it_answers():
    def chosen(*accuracies: float) -> int:
        return start.chosen(pd.DataFrame({"updates": [25, 50, 100], "accuracy": accuracies}))

    assert chosen(0.1, 0.35, 0.6) == 50
    assert chosen(0.3, 0.5, 0.7) == 25, "the shorter of two that are as near"
    assert chosen(0.0, 0.0, 0.7) == 100
    with pytest.raises(UserError, match=r"0\.15 to 0\.75 \(0\.00 after 25, 0\.10 after 50, 0\.76"):
        chosen(0.0, 0.1, 0.76)


@needs_packaged_weights
@pytest.mark.slow
def test_no_question_is_in_two_places_and_right_answers_fit():
    from analysis.training.pretrained.folders import folder_of
    from analysis.training.pretrained.questions import arithmetic_task, drawn_questions

    task, examples = FRESH.config.task, FRESH.config.start.examples
    parts = drawn_questions(task, examples)
    lefts = [{question.text for question in part} for part in parts]
    assert sum(map(len, lefts)) == len(set.union(*lefts)) == sum(map(len, parts))
    assert [len(part) for part in parts] == [task.pool, task.held_out, examples]
    made = arithmetic_task(task, folder_of(FRESH.config.model), examples)
    longest = made.examples().completions.shape[1]
    assert 64 <= longest < task.completion_length <= 256
    asked = FRESH.config.updates * FRESH.config.num_prompts
    assert asked < task.pool, "training seldom asks a question twice"
    assert math.ceil(FRESH.config.final_answers / FRESH.config.group_size) < task.held_out
