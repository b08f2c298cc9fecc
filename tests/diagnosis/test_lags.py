"""Weights that are updates behind: by a column of lags, or of versions beside the steps."""

from __future__ import annotations

import numpy as np
import pytest

from kl_term.diagnosis.causes import find
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.generate import Run, simulate
from kl_term.diagnosis.lags import updates_behind, weights_behind
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.reports import not_measured
from kl_term.diagnosis.schema import Settings
from kl_term.kl.choice import KLChoice

FRAME = simulate(Run(sequences=80), 5)
LAG = np.asarray(FRAME.sequence) % 4


def finding(frame, **settings):
    measured = measure(assemble(frame, "x"), Settings(**settings))
    return next((f for f in find(measured) if f.code == "weights-behind"), None)


def test_a_column_of_lags_is_said_with_how_many_updates():
    found = finding(FRAME.assign(lag=LAG))
    assert found.title == "The weights that sampled are up to 3 updates behind"
    assert found.severity == "note"
    assert found.evidence["mean updates behind"] == pytest.approx(LAG.mean())
    assert found.evidence["share of tokens that are behind"] == pytest.approx((LAG > 0).mean())
    assert finding(FRAME) is None
    assert finding(FRAME.assign(lag=0)) is None


@pytest.mark.parametrize("began", [0, 7])
def test_versions_are_counted_from_the_freshest_token(began):
    step = np.asarray(FRAME.sequence) // 8
    frame = FRAME.assign(step=step, version=step - LAG + began)
    found = finding(frame)
    assert "up to 3 updates" in found.title
    assert found.evidence["counted from"] == "the freshest token"
    assert finding(frame.drop(columns="step")) is None, "a version alone is no distance"
    np.testing.assert_array_equal(np.sort(updates_behind(assemble(frame, "x"))), np.sort(LAG))


def test_steps_on_one_rollout_are_behind_by_design():
    assert finding(FRAME.assign(lag=LAG), rollout_steps=4) is None
    assert finding(FRAME.assign(lag=LAG), rollout_steps=3) is not None


@pytest.mark.parametrize(("weighting", "severity"), [("none", "warning"), ("attached", "note")])
def test_without_a_weight_it_is_a_warning(weighting, severity):
    kl = KLChoice(weighting=weighting)
    assert finding(FRAME.assign(lag=LAG), kl=kl).severity == severity


def test_how_far_the_policy_moved_is_measured_on_both_kinds_of_tokens():
    moved = np.where(LAG > 0, 0.3, 0.0)
    frame = FRAME.assign(lag=LAG, old_logp=FRAME.logp - moved).drop(columns="sampler_logp")
    evidence = weights_behind(measure(assemble(frame, "x"), Settings())).evidence
    assert evidence["KL of sampler to policy, tokens behind"] == pytest.approx(np.expm1(0.3) - 0.3)
    assert evidence["KL of sampler to policy, others"] == pytest.approx(0.0, abs=1e-12)


def test_without_the_columns_the_report_says_what_it_cannot():
    said = "how many updates the sampler's weights are behind"
    assert said in not_measured(assemble(FRAME, "x"))
    assert said not in not_measured(assemble(FRAME.assign(lag=LAG), "x"))


def test_areal_calls_them_versions():
    frame = FRAME.assign(step=9, versions=9 - LAG)
    assert "up to 3 updates" in finding(frame).title


def test_a_report_says_which_faults_no_dump_of_sampled_tokens_shows():
    said = not_measured(assemble(FRAME.assign(lag=LAG), "x"))
    for about in ("a sampler that forbids", "one completion"):
        assert any(name.startswith(about) for name in said), about


def test_an_old_policy_later_than_the_weights_that_sampled_is_said_with_what_corrects_it():
    """The engine drew the tokens with older weights, as a column says; old_logp came later."""
    moved = np.where(LAG > 0, 0.3, 0.0)
    frame = FRAME.assign(lag=LAG, old_logp=FRAME.logp, sampler_logp=FRAME.logp - moved)
    found = finding(frame)
    assert found.severity == "warning" and found.advice.startswith("old_logp is that of a later")
    assert found.evidence["KL of sampler to old policy"] == pytest.approx(
        (np.expm1(moved) - moved).mean()
    )
    assert "vllm_importance_sampling_correction" in found.settings["TRL"]
    numbers = measure(assemble(frame, "x")).numbers
    assert numbers["mismatch_kl_ahead"] == pytest.approx(0.0, abs=1e-12)
    assert numbers["behind_share"] == pytest.approx((LAG > 0).mean())
