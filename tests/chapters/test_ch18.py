"""Chapter 18: simulations beside exact values, bands beside their rules, costs by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.chapters import ch18_distillation as study
from analysis.chapters.ch18_distillation import Ratio
from analysis.evidence.recorded import recorded
from analysis.evidence.steps_to_success import steps_ratio
from analysis.records.config import END, FILLER, PolicyConfig, TeacherConfig, TrainConfig
from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.records.statistics import Interval
from analysis.records.variants import Distillation, Objective, Sampler, Variant
from analysis.studies.presets import make_preset
from analysis.studies.presets.parts import NO_KL
from analysis.training.counting import forward_flops, run_update
from kl_term.kl import enumeration
from kl_term.kl.term import KLTerm
from kl_term.objectives.imitation import imitation_cost
from tests.experiments.tiny import two_digits


def mean_over_seeds(preset: str, variant: str, metric: str) -> float:
    """A cruder statistic than the claim's: the plain mean of the last two windows."""
    curves = recorded(preset).curves
    last = sorted(curves["update"].unique())[-2:]
    chosen = curves[(curves["variant"] == variant) & curves["update"].isin(last)]
    return float(chosen[metric].mean())


def test_compounding_errors():
    found = study.compounding_errors()
    assert found.verdict == "holds if"
    generator = torch.Generator().manual_seed(0)
    off, cost = torch.zeros(200_000), torch.zeros(200_000)
    for _ in range(20):
        errs = (torch.rand(off.shape, generator=generator) < 0.02).float()
        off = torch.where(off > 0, off, errs)
        cost = cost + off
    assert cost.mean().item() == pytest.approx(imitation_cost(0.02, 20, 0.0), rel=0.02)
    crude = [mean_over_seeds("distillation", a, "own_accuracy") for a in ("supervised", "k2_loss")]
    assert found.figures["trained"] == pytest.approx(crude[0] - crude[1], abs=0.01)


def test_a_wrong_k2_changes_what_kdrl_is_told(monkeypatch):
    assert study.kdrl_prefers_k2().verdict == "holds if"
    right = enumeration.kl_loss
    monkeypatch.setattr(enumeration, "kl_loss", lambda *x, **kind: -right(*x, **kind))
    assert study.kdrl_prefers_k2().verdict == "fails"


def test_annealing_and_masking():
    found = study.annealing_and_masking()
    assert found.figures["decomposition_error"] < 1e-12
    assert found.figures["cosine_with_full_kl"] < 0.9
    assert found.verdict == "holds if"
    for name in ("masked", "annealed"):
        variants = (f"kdrl_{name}", "kdrl_k2")
        crude = [mean_over_seeds("kdrl", variant, "own_length") for variant in variants]
        assert found.figures[f"{name}_length"] == pytest.approx(crude[0] - crude[1], abs=0.1)


@pytest.mark.parametrize(
    ("length", "accuracy", "expected"),
    [
        (Interval(-0.3, -0.5, -0.1), Interval(0.02, 0.0, 0.04), True),
        (Interval(-0.3, -0.7, 0.1), Interval(0.02, 0.0, 0.04), False),  # not surely shorter
        (Interval(-0.3, -0.5, -0.1), Interval(-0.1, -0.15, -0.05), False),  # bought with accuracy
        (Interval(0.3, 0.1, 0.5), Interval(0.02, 0.0, 0.04), False),
    ],
)
def test_shorter_at_equal_accuracy_is_read_off_whole_bands(length, accuracy, expected):
    assert study.shorter_at_equal_accuracy(length, accuracy) is expected


def test_distillation_speed():
    found = study.distillation_speed()
    assert found.figures["steps_ratio_length_1"] < found.figures["steps_ratio_length_4"]
    assert steps_ratio(3, vocab_size=4) > steps_ratio(2, vocab_size=4)
    assert found.verdict == "holds if"
    assert found.figures["easy"] < found.figures["sparse"]
    # a teacher of equal size makes four passes of three
    assert found.figures["easy_flops"] == pytest.approx(0.75 * found.figures["easy"])


def test_a_factor_is_reached_when_the_band_or_the_bound_allows_it():
    assert not study.reaches(Ratio(1.2, 1.0, 1.4, 0, 0, 10), 7.0)
    assert study.reaches(Ratio(5.0, 3.0, 8.0, 0, 0, 10), 7.0)
    assert study.reaches(Ratio(5.0, 4.0, 6.0, 6, 0, 10), 7.0)  # most seeds: only a lower bound


def test_completions_are_of_the_variants_asked_for_and_on_the_same_prompts():
    table = study.completions_after(two_digits(60), ("k2_loss", "supervised"), updates=2, prompts=4)
    assert table["variant"].tolist() == ["k2_loss"] * 4 + ["supervised"] * 4
    assert table["prompt"].tolist()[:4] == table["prompt"].tolist()[4:]
    assert [sorted(p) for p in table["prompt"]] == [list(s[:-1]) for s in table["sorted"]]
    assert table["sorted"].str.endswith(".").all() and (table["completion"].str.len() == 5).all()


def test_tokens_as_text():
    assert study.as_text(torch.tensor([FILLER, 0, 9, 14, END])) == "_09?."


def test_costs_by_threshold():
    rows = [
        {"variant": variant, "seed": seed, "update": update, "own_accuracy": value}
        for variant, speed in (("grpo", 0.01), ("k2_loss", 0.02))
        for seed in (0, 1)
        for update, value in [(0, 0.0), (20, 20 * speed), (40, 40 * speed)]
    ]
    two_digits = make_preset("distillation", {"num_seeds": 2})
    run = Recording(two_digits, pd.DataFrame(rows), pd.DataFrame(), {})
    table = study.cost_table(run, "grpo", ["k2_loss"], [0.2]).set_index("unit")
    # crossed 20 updates after the first window's middle (10), against 10: 30 over 20
    assert table.loc["updates", "mean"] == pytest.approx(1.5)
    assert table.loc["flops", "mean"] == pytest.approx(1.5 * 3 / 4)


LARGE = PolicyConfig(width=64)
TAUGHT = Variant(label="taught", distillation=Distillation())
CONFIG = TrainConfig(updates=40, log_every=10, teacher=TeacherConfig(policy=LARGE))


def curves(values: dict[tuple[str, int], list[float]]) -> pd.DataFrame:
    return pd.DataFrame(
        {"variant": variant, "seed": seed, "update": 10 * place, "accuracy": value}
        for (variant, seed), row in values.items()
        for place, value in enumerate(row)
    )


@pytest.fixture
def spent() -> pd.DataFrame:
    preset = Preset(name="p", config=CONFIG, variants=(NO_KL, TAUGHT), seeds=(0, 1), predictions=())
    table = curves(
        {
            ("none", 0): [0.1, 0.2, 0.4, 0.5],
            ("none", 1): [0.1, 0.1, 0.1, 0.1],
            ("taught", 0): [0.1, 0.5, 0.6, 0.7],
            ("taught", 1): [0.3, 0.2, 0.2, 0.2],
        }
    )
    return study.crossings(table, preset, "accuracy", 0.3)


def test_a_broken_line_is_crossed_between_its_points():
    places = np.array([5.0, 15.0, 25.0])
    assert study.first_crossing(places, np.array([0.0, 0.25, 0.5]), 0.4) == pytest.approx(21.0)
    assert study.first_crossing(places, np.array([0.9, 0.1, 0.9]), 0.4) == 5.0
    assert study.first_crossing(places, np.array([0.0, 0.4, 0.2]), 0.4) == pytest.approx(15.0)
    assert math.isinf(study.first_crossing(places, np.array([0.0, 0.1, 0.2]), 0.4))


def test_runs_are_charged_until_they_get_there_or_for_the_whole_run(spent):
    assert spent["updates"].tolist() == pytest.approx([20.0, 40.0, 10.0, 5.0])
    assert spent["reached"].tolist() == [True, False, True, True]


def test_ratios_are_taken_seed_by_seed(spent):
    ratio = study.cost_ratio(spent, "none", "taught", "updates")
    assert ratio.mean == pytest.approx(math.sqrt(20 / 10 * 40 / 5))
    assert ratio.high == math.inf, "one side never got there: what it would cost is not known"
    assert (ratio.missed, ratio.other_missed, ratio.seeds) == (1, 0, 2)
    with pytest.raises(ValueError, match="unit"):
        study.cost_ratio(spent, "none", "taught", "seconds")
    with pytest.raises(ValueError, match="no variant 'x'"):
        study.cost_ratio(spent, "x", "taught", "updates")


def test_each_variant_is_charged_with_the_passes_that_it_needs():
    own = forward_flops(CONFIG)
    large = forward_flops(CONFIG.model_copy(update={"policy": LARGE}))
    assert own == 12 * 2 * (2 * (8192 * 56 + 64 * (36 + 6 * 100)) + 32 * 16 * 48)  # by hand
    assert run_update(CONFIG).flops == 4 * own

    def flops(**parts):
        return study.update_flops(CONFIG, Variant(**({"kl": KLTerm(estimator="none")} | parts)))

    assert flops() == 3 * own  # sampling, and a backward pass of two
    assert flops(distillation=Distillation()) == 3 * own + large
    cloning = Distillation(kl=KLTerm(estimator="cross_entropy"))
    assert flops(sampler=Sampler(by="teacher"), distillation=cloning) == 3 * own + large
    assert flops(objective=Objective(kind="dpo")) == 4 * own
    assert flops(kl=KLTerm(estimator="k2"), beta=0.1) == 4 * own
    assert flops(sampler=Sampler(staleness=2)) == 4 * own


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="needs a teacher"):
        study.update_flops(TrainConfig(), TAUGHT)
    with pytest.raises(ValueError, match="num_iterations"):
        study.update_flops(TrainConfig(num_iterations=2), NO_KL)
