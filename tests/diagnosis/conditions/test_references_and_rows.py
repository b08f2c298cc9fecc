"""References that are reset, weights that are behind and rows that are packed, as they are said."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kl_term.diagnosis import lags, packed, resets
from tests.measured import measured, rollouts, said

RESET = {"resets": 2.0, "reset_step": 40.0, "reset_from": 0.25, "reset_to": 0.001}
SHOWN = {
    "steps at which they fall": 2.0,
    "the first": 40.0,
    "mean size of a log-ratio in the step before": 0.25,
    "in that step": 0.001,
}


def renamed(first: str) -> dict[str, float]:
    """As shown, but for what the step is called."""
    return {(first if name == "the first" else name): value for name, value in SHOWN.items()}


@pytest.mark.parametrize(
    ("numbers", "severity", "title", "evidence"),
    [
        ({}, "note", "The reference was set to the policy during the run", SHOWN),
        (
            {"reset_then": 0.0625},
            "note",
            "The reference was set to the policy during the run",
            SHOWN | {"in the next": 0.0625},
        ),
        (
            {"reset_copied": 1.0},
            "warning",
            "The reference's log-probs of a step are the policy's own",
            renamed("the first without a new start"),
        ),
        (
            {"reset_kept": 5.0},
            "warning",
            "From one step on the reference is the policy itself",
            renamed("the last") | {"steps at the end that are the policy itself": 5.0},
        ),
    ],
)
def test_what_a_reference_that_falls_to_the_policy_says(numbers, severity, title, evidence):
    found = said(resets.reference_reset, measured(RESET | numbers))
    assert (found.severity, found.title, found.evidence) == (severity, title, evidence)
    assert resets.reference_reset(measured()) is None


@pytest.mark.parametrize(
    ("share", "behind", "found"),
    [(0.2, 0.5, True), (0.19, 0.5, False), (0.2, 0.49, False), (None, None, False)],
)
def test_a_row_of_several_sequences_has_ends_inside(share, behind, found):
    numbers = {"several_advantages_share": share, "changes_behind_an_end": behind}
    given = measured({} if share is None else numbers)
    assert (packed.packed_rows(given) is not None) is found
    if found:
        says = said(packed.packed_rows, given)
        assert says.severity == "note"
        assert says.evidence == {
            "share of rows with several advantages": 0.2,
            "share of the changes that stand behind the usual end token": 0.5,
        }


def lagging(late: int, **columns):
    """Of 200 tokens so many are three updates behind, and moved by a factor of two."""
    behind = np.where(np.arange(200) < late, 3, 0)
    logp = np.where(behind > 0, -2.0 + math.log(2), -2.0)
    return rollouts(lag=behind, logp=logp, old_logp=-2.0, **columns)


@pytest.mark.parametrize(
    ("late", "rollout_steps", "found"),
    [(10, 1, True), (9, 1, False), (10, 3, True), (10, 4, False)],
)
def test_a_twentieth_of_the_tokens_is_behind(late, rollout_steps, found):
    given = measured(of=lagging(late), rollout_steps=rollout_steps)
    assert (lags.weights_behind(given) is not None) is found
    assert lags.weights_behind(measured()) is None


@pytest.mark.parametrize(
    ("kl", "severity", "advice"),
    [
        (None, "note", "Meant, in asynchronous training; say by --estimator"),
        ({}, "warning", "The KL term has no weight, so it follows the sampler"),
        ({"weighting": "attached"}, "note", "Meant, in asynchronous training. Is the ratio"),
        ({"estimator": "k1", "placement": "reward"}, "note", "Meant, in asynchronous training. Is"),
    ],
)
def test_weights_that_are_behind_matter_to_a_term_without_a_weight(kl, severity, advice):
    found = said(lags.weights_behind, measured(of=lagging(50), kl=kl))
    assert found.title == "The weights that sampled are up to 3 updates behind"
    assert found.severity == severity and found.advice.startswith(advice)
    assert found.evidence == {
        "share of tokens that are behind": 0.25,
        "mean updates behind": 0.75,
        "counted from": "zero",
        "KL of sampler to policy, tokens behind": pytest.approx(2 - 1 - math.log(2), rel=1e-12),
        "KL of sampler to policy, others": 0.0,
    }


def test_versions_are_counted_from_the_freshest_token():
    step = np.repeat([5, 6], 100)
    of = rollouts(step=step, version=step - 2 - (np.arange(200) < 50))
    found = said(lags.weights_behind, measured(of=of))
    assert found.evidence["counted from"] == "the freshest token"
    assert found.evidence["mean updates behind"] == 0.25
    assert found.title == "The weights that sampled are up to 1 updates behind"
    every = said(lags.weights_behind, measured(of=lagging(200)))
    assert "KL of sampler to policy, others" not in every.evidence


def test_steps_on_the_tokens_of_one_version_are_no_lag_unless_a_column_says_so():
    """Two steps on each version: tokens of the second are one step behind, by design."""
    step = np.repeat([4, 5, 6, 7, 8, 9], 50)
    columns = {"sequences": 30, "length": 10, "step": step, "version": step // 2}
    assert lags.weights_behind(measured(of=rollouts(**columns))) is None
    said_so = rollouts(**columns, lag=step % 2)
    assert lags.weights_behind(measured(of=said_so)) is not None
