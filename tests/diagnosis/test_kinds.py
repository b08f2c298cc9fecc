"""Kinds of faults that public threads report, each planted small, and their sound neighbours."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.diagnosis.chains import Population, sample
from benchmarks.diagnosis.healthy import as_rollouts
from kl_term.diagnosis.causes import find
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.generate import FIRST_STEP, Run, simulate
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.schema import Finding, Settings
from kl_term.errors import UserError
from kl_term.kl.term import KLTerm

K3 = KLTerm(estimator="k3", weighting="attached")


def found(frame, **settings) -> dict[str, Finding]:
    rollouts = frame if not isinstance(frame, pd.DataFrame) else assemble(frame, "simulated")
    return {f.code: f for f in find(measure(rollouts, Settings(resamples=200, **settings)))}


def loud(frame, **settings) -> list[str]:
    return [code for code, f in found(frame, **settings).items() if f.severity != "note"]


@pytest.fixture(scope="module")
def sound() -> pd.DataFrame:
    """With the column of its term, k3 times policy/old."""
    frame = simulate(Run(sequences=120, growth=3.0), 7)
    l = frame.logp - frame.ref_logp
    weight = np.exp(frame.logp - frame.old_logp)
    return frame.assign(kl_term=0.05 * weight * (np.expm1(-l) + l))


def test_a_sound_term_is_silent(sound):
    assert loud(sound, kl=K3) == [] == loud(sound)
    rounded = sound.assign(kl_term=sound.kl_term * (1 + 0.02 * np.sin(np.arange(len(sound)))))
    assert "other-term" not in loud(rounded, kl=K3), "low precision"


PARTS = {
    "the second half of the run": lambda f: f.step > FIRST_STEP + 2,
    "one step": lambda f: f.step == FIRST_STEP + 3,
    "every fourth token": lambda f: f.position % 4 == 0,
    "the second half of completions": lambda f: f.position > 20,
    "negative advantages": lambda f: f.advantage < 0,
    "a policy above its reference": lambda f: f.logp > f.ref_logp,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_term_that_some_tokens_lack(sound, part):
    """Also where one token holds all squares but a thousandth, so that they do not see it."""
    left_out = PARTS[part](sound)
    for huge in (False, True):
        frame = sound.assign(kl_term=sound.kl_term.mask(left_out, 0.0))
        if huge:
            at = frame.index[~left_out][5]
            frame.loc[at, ["logp", "old_logp", "sampler_logp", "ref_logp"]] = -6, -6, -6, -1
            frame.loc[at, "kl_term"] = 0.05 * (np.expm1(5.0) - 5.0)
        assert "other-term" in loud(frame, kl=K3), huge
    measured = measure(assemble(frame, "here"), Settings(resamples=100, kl=K3))
    assert measured.numbers["term_is_k3 times policy/old"] > 0.999, "what squares say of it"


def test_where_it_is_lacking_is_said(sound):
    frame = sound.assign(kl_term=sound.kl_term.mask(sound.advantage < 0, 0.0))
    evidence = found(frame, kl=K3)["other-term"].evidence
    assert evidence["share without, negative advantages"] == pytest.approx(1.0)


def test_a_coefficient_that_falls_while_the_kl_grows(sound):
    scale = 0.6 ** (sound.step - FIRST_STEP)
    frame = sound.assign(kl_term=sound.kl_term * scale)
    finding = found(frame, kl=K3)["other-term"]
    assert "runs against the KL" in finding.title and finding.severity == "warning"
    assert found(frame, kl=K3, adaptive=True)["other-term"].severity == "note"
    rising = sound.assign(kl_term=sound.kl_term / scale)
    assert "other-term" not in found(rising, kl=K3), "a controller does that"


def starting(frame) -> pd.DataFrame:
    """As a run's first steps: at the first one the policy is its reference."""
    first = frame.step == FIRST_STEP
    moved = {name: frame[name].mask(first, frame.ref_logp) for name in ("logp", "old_logp")}
    return frame.assign(step=frame.step - FIRST_STEP, **moved).drop(columns="sampler_logp")


def test_two_scores_of_one_policy_differ_for_any_framework(sound):
    frame = starting(sound).drop(columns="kl_term")
    noise = 0.08 * np.random.default_rng(0).standard_normal(len(frame))
    scored_again = frame.assign(old_logp=np.minimum(frame.logp + noise, 0.0))
    for framework in ("verl", "openrlhf", "unknown"):
        assert loud(scored_again, framework=framework)[0] == "scored-twice"
        assert "scored-twice" not in loud(frame, framework=framework)


def test_a_reference_in_low_precision_is_a_floor_under_the_kl(sound):
    frame = starting(sound).drop(columns="kl_term")
    size = 2.0 ** (np.floor(np.log2(frame.ref_logp.abs().clip(lower=1e-30))) - 8)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, len(frame)) * size * 4
    noisy = found(frame.assign(ref_logp=np.minimum(frame.ref_logp + noise, 0.0)))
    assert "not scored alike" in noisy["starts-away"].title
    assert noisy["starts-away"].severity == "note" and "starts-away" not in found(frame)


@pytest.mark.parametrize("filler", [-9999.0, -1e4, -1000.0, -1e9, -np.inf, 0.0])
def test_an_engines_filler_is_named(sound, filler):
    missing = np.random.default_rng(0).random(len(sound)) < 0.05
    missing &= sound.old_logp < -1.0
    finding = found(sound.assign(sampler_logp=sound.sampler_logp.mask(missing, filler)))
    assert next(iter(finding)) == "sampler-filled"
    assert f"{filler:g}" in finding["sampler-filled"].title or filler == 0.0
    assert "train-inference-mismatch" not in finding, "a filler's ratio is no ratio"


@pytest.mark.parametrize("nothing", [None, np.nan])
def test_what_the_engine_left_empty_is_no_filler(sound, nothing):
    column = sound.sampler_logp.astype(object)
    column[np.arange(len(sound)) % 20 == 0] = nothing
    assert loud(sound.assign(sampler_logp=column)) == []


@pytest.mark.parametrize("filler", [-9999.0, -1e4, -1000.0])
@pytest.mark.parametrize("column", ["logp", "old_logp", "ref_logp"])
def test_a_filler_in_a_trainers_column_is_refused(sound, column, filler):
    with pytest.raises(UserError, match="fill value"):
        assemble(sound.assign(**{column: sound[column].mask(sound.position == 3, filler)}), "here")


def test_a_truncated_sampler_is_named_by_its_sign(sound):
    kept = np.random.default_rng(0).uniform(0.9, 1.0, len(sound))
    truncated = sound.assign(sampler_logp=np.minimum(sound.old_logp - np.log(kept), 0.0))
    finding = found(truncated)["train-inference-mismatch"]
    assert "truncates" in finding.title and "Do not weigh" in finding.advice
    noisy = sound.assign(sampler_logp=np.minimum(sound.old_logp + np.log(kept * 1.05), 0.0))
    assert "train-inference-mismatch" not in found(noisy)


def updates(**changes) -> pd.DataFrame:
    """Four updates on each of 64 completions."""
    dump = as_rollouts(sample(Population(move=0.1), 0, prompts=8, group=8, updates=4))
    names = ("step", "sequence", "position", "logp", "old_logp", "ref_logp", "advantage", "reward",
             "group", "token", "entropy")  # fmt: skip
    return pd.DataFrame({name: getattr(dump, name) for name in names}).assign(**changes)


def test_a_ratio_that_is_one_at_every_update():
    frame = updates()
    assert "ratio-is-one" not in found(frame)
    assert "ratio-is-one" in loud(frame.assign(old_logp=frame.logp))
    once = frame[frame.step == frame.step.min()]
    assert "ratio-is-one" not in found(once.assign(old_logp=once.logp)), "on policy it is one"


def test_groups_on_another_scale():
    frame = updates()
    apart = frame.assign(advantage=frame.advantage * np.where(frame.group == 3, 60.0, 1.0))
    assert loud(apart) == ["groups-apart"] and "groups-apart" not in found(frame)
    centred = frame.groupby(["step", "group"]).reward.transform("mean")
    scale = np.where(frame.group == 3, 60.0, 1.0)
    unequal = frame.assign(reward=frame.reward * scale, advantage=(frame.reward - centred) * scale)
    assert "groups-apart" not in found(unequal), "rewards of another scale, centred alone"


def test_a_clamp_that_nobody_spoke_of(sound):
    frame = sound.assign(ref_logp=sound.ref_logp.mask(sound.index % 300 == 7, sound.logp - 12))
    frame = frame.assign(logp=frame.logp.where(sound.index % 300 != 9, frame.ref_logp - 3.5))
    frame = frame.drop(columns=["kl_term", "sampler_logp"])
    assert found(frame)["dead-zone"].severity == "note"
    assert "dead-zone" not in found(frame, framework="plain")
    assert (
        found(frame, framework="verl", kl=KLTerm(estimator="k3"))["dead-zone"].severity == "error"
    )


def test_alike_entropies_are_not_misaligned_by_chance():
    """A fifth is no margin where two correlations near zero are of three hundred tokens."""
    for seed in range(30):
        dump = as_rollouts(sample(Population(), seed, prompts=8, group=4))
        assert "misaligned" not in found(dump), seed
