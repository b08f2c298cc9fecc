"""Faults that no example shows, settings, thresholds and the order of findings."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.diagnosis.chains import Population, sample
from benchmarks.diagnosis.healthy import as_rollouts
from kl_term.diagnosis import integrity
from kl_term.diagnosis.causes import CAUSES, find, matching
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.conditions import columns, estimates, policies, updates
from kl_term.diagnosis.generate import EXAMPLES, FIRST_STEP, Run, example, simulate
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.reports import report
from kl_term.diagnosis.schema import SEVERITIES, Finding, Interval, Report, Settings
from kl_term.errors import UserError
from kl_term.kl.estimators import k2, k3
from kl_term.kl.term import KLTerm

ROOT = Path(__file__).parents[2]
BIGGER = Run(sequences=80)


def found(frame, *, kl=None, **settings) -> list[Finding]:
    """``kl`` holds what is known of the term."""
    if kl is not None:
        settings["kl"] = KLTerm(**kl)
    return find(measure(assemble(frame, "simulated"), Settings(resamples=200, **settings)))


def codes(frame, **settings) -> list[str]:
    return [finding.code for finding in found(frame, **settings)]


@pytest.fixture(scope="module")
def healthy():
    return simulate(BIGGER, 7)


def test_the_healthy_frame_is_healthy(healthy):
    assert codes(healthy) == []


def with_prompt(frame):
    prompt = frame.position < 2
    columns = ("logp", "old_logp", "sampler_logp")
    return frame.assign(**{name: frame[name] - 30 * prompt for name in columns})


def with_constant_ends(frame):
    columns = ("logp", "old_logp", "ref_logp")
    return frame.assign(**{name: frame[name].mask(frame.position > 30, 0.0) for name in columns})


def with_masked_padding(frame):
    """As a scoring pass leaves it whose mask is right, where the loss counts one token more."""
    pads = frame.groupby("sequence").tail(1)
    pads = pads.assign(position=pads.position + 1, logp=-6.0, old_logp=0.0, ref_logp=0.0)
    return pd.concat([frame, pads]).drop(columns="sampler_logp")


@pytest.mark.parametrize(
    ("code", "plant"),
    [
        (
            "misaligned",
            lambda f: f.assign(old_logp=f.groupby("sequence").old_logp.shift(1).fillna(-2.0)),
        ),
        (
            "other-tokens",
            lambda f: f.assign(ref_logp=f.sample(frac=1, random_state=0).ref_logp.to_numpy()),
        ),
        ("counted-padding", with_constant_ends),
        ("masked-when-scored", with_masked_padding),
        ("advantage-sign", lambda f: f.assign(advantage=-f.advantage)),
        ("no-signal", lambda f: f.assign(advantage=f.advantage.where(f.sequence % 3 == 0, 0.0))),
    ],
)
def test_a_planted_fault_heads_the_report(healthy, code, plant):
    assert codes(plant(healthy))[0] == code


def test_a_fault_may_stand_behind_what_follows_from_it(healthy):
    assert "ratio-mean" in codes(healthy.assign(ref_logp=0.7 * healthy.ref_logp))
    assert "impossible-tokens" in codes(with_prompt(healthy))


def test_a_reference_that_is_the_policy(healthy):
    same = healthy.assign(ref_logp=healthy.logp)
    assert codes(same)[0] == "identical-reference"
    (first, *_) = found(same.assign(step=1))
    assert (first.code, first.severity) == ("identical-reference", "note"), "nothing has moved yet"
    assert found(same)[0].severity == "error"


def test_in_a_runs_first_rollout_the_old_policy_is_the_reference(healthy):
    first = healthy.assign(old_logp=healthy.ref_logp, step=healthy.step - FIRST_STEP)
    first = first.drop(columns="sampler_logp")
    for steps, severity in ((8, "note"), (1, "error")):
        reported = {f.code: f.severity for f in found(first, rollout_steps=steps)}
        assert reported["identical-reference"] == severity


def test_a_sampler_column_at_another_temperature(healthy):
    hotter = healthy.assign(sampler_logp=0.8 * healthy.sampler_logp)
    assert {"train-inference-mismatch", "ratio-mean"} & set(codes(hotter))


def test_an_inverted_mask():
    """Counts the padding, and only that, where a batch was padded to one length."""
    frame = example("counted_padding").assign(mask=0)
    lengths = example("healthy").query("mask == 1").groupby("sequence").position.max()
    inverted = frame.assign(mask=(frame.position > frame.sequence.map(lengths)).astype(int))
    assert codes(inverted)[0] == "counted-padding"


def test_text_may_end_in_a_few_certain_tokens(healthy):
    last = healthy.groupby("sequence").position.transform("max")
    ends = healthy.position > last - 5
    certain = {name: healthy[name].mask(ends, 0.0) for name in ("logp", "old_logp", "ref_logp")}
    assert "counted-padding" not in codes(healthy.assign(**certain, sampler_logp=certain["logp"]))


def test_log_ratios_dumped_after_a_clamp():
    frame = simulate(Run(sequences=80, lost=1.0, loss_depth=12.0, sharpness=3.0), 0)
    ratio = (frame.logp - frame.ref_logp).clip(-1.0, 1.0) * 10
    dumped = frame.assign(ref_logp=np.minimum(frame.logp - ratio, 0.0))
    assert "clamped-values" in codes(dumped)


def test_a_kl_that_is_rewarded(healthy):
    kl = (healthy.old_logp - healthy.ref_logp).groupby(healthy.sequence).transform("sum")
    right = healthy.assign(advantage=healthy.reward - 0.5 - 0.3 * kl)
    wrong = healthy.assign(advantage=healthy.reward - 0.5 + 0.3 * kl)
    assert "kl-rewarded" not in codes(right)
    assert "kl-rewarded" in codes(wrong)


def test_one_sequence_with_most_of_the_kl(healthy):
    loop = healthy.sequence == 11
    frame = healthy.assign(ref_logp=healthy.ref_logp - 4.0 * loop)
    finding = next(f for f in found(frame) if f.code == "concentrated")
    assert finding.evidence["first"] == f"11 (step {FIRST_STEP})"


def test_a_kl_that_grows_for_nothing():
    rising = Run(sequences=120, pull=0.0, growth=12.0, drift=0.8)
    frame = simulate(rising, 0)
    flat = frame.assign(reward=(frame.sequence % 2).astype(float) - 0.1 * frame.step)
    flat["advantage"] = flat.groupby("step").reward.transform(lambda r: r - r.mean())
    assert "kl-without-reward" in codes(flat)
    note = next(f for f in found(flat.drop(columns="reward")) if f.code == "kl-without-reward")
    assert note.severity == "note"
    assert "kl-without-reward" not in codes(simulate(rising._replace(gain=0.6), 0))
    assert "kl-without-reward" not in codes(flat.drop(columns="step"))


def test_an_overflow_of_k3(healthy):
    lost = healthy.assign(logp=healthy.logp.where(healthy.index != 100, -95.0))
    finding = next(f for f in found(lost, kl={"estimator": "k3"}) if f.code == "overflow")
    assert finding.evidence["tokens"] == 1
    assert "overflow" not in codes(
        healthy.assign(logp=healthy.logp.where(healthy.index != 100, -85))
    )


def test_few_sequences(healthy):
    assert "few-sequences" in codes(healthy[healthy.sequence < 19])
    assert "few-sequences" not in codes(healthy[healthy.sequence < 20])


def test_a_policy_far_away_is_only_noted():
    frame = simulate(Run(sequences=80, sharpness=1.0, drift=1.5, growth=1.0), 0)
    notes = [f for f in found(frame, kl={"estimator": "k2"}) if f.code == "far-from-reference"]
    assert [note.severity for note in notes] == ["note"]


@pytest.mark.parametrize(
    ("kl", "code", "expected"),
    [
        ({"estimator": "k1"}, "k1-in-loss", True),
        ({"estimator": "k1", "weighting": "attached"}, "k1-in-loss", False),
        ({"estimator": "k1", "placement": "reward"}, "k1-in-loss", False),
        ({"estimator": "k3", "placement": "reward"}, "penalty-in-reward", True),
        ({"estimator": "k1", "placement": "reward"}, "penalty-in-reward", False),
        ({"estimator": "k3", "placement": "loss"}, "penalty-in-reward", False),
    ],
)
def test_what_settings_alone_decide(healthy, kl, code, expected):
    assert (code in codes(healthy, kl=kl)) is expected


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({}, "note"),  # nobody said that it clamps
        ({"framework": "plain"}, None),
        ({"framework": "verl"}, "error"),
        ({"framework": "openrlhf", "kl": {"estimator": "k3"}}, "error"),
        ({"framework": "trl"}, None),
        ({"framework": "verl", "kl": {"estimator": "k2"}}, None),
        ({"framework": "verl", "kl": {"placement": "reward"}}, None),
    ],
)
def test_a_dead_zone_is_the_frameworks(settings, severity):
    dead = [f.severity for f in found(example("dead_zone"), **settings) if f.code == "dead-zone"]
    assert dead == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("framework", "kl", "severity"),
    [
        ("openrlhf", {"estimator": "k2"}, "error"),
        ("unknown", {"estimator": "k2"}, "note"),
        ("verl", {"estimator": "k2"}, None),  # mse
        ("verl", {"estimator": "k2", "value": "k3"}, None),  # low_var_kl+
        ("openrlhf", {"estimator": "k2", "weighting": "detached", "value": "k3"}, None),
        ("openrlhf", {"estimator": "k2", "weighting": "detached"}, None),  # unbiased_gradient
        ("openrlhf", {"estimator": "k3", "weighting": "attached"}, None),  # by this book's patch
        ("verl", {"estimator": "k3", "weighting": "attached"}, None),  # registered
    ],
)
def test_no_dead_zone_where_the_gradient_is_not_clamped(framework, kl, severity):
    frame = simulate(Run(lost=1.0, loss_depth=7.0, sharpness=4.0), 0)
    dead = [f for f in found(frame, kl=kl, framework=framework) if f.code == "dead-zone"]
    assert [f.severity for f in dead] == ([severity] if severity else [])
    assert not any("verl and" in f.title for f in dead)  # verl clamps k3 alone


def test_where_the_policy_is_ahead_k2_has_the_nearer_dead_zone():
    """Old advice: use k2 instead of k3, as its dead zone begins farther out. On one side only."""
    l = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    alive = {k: l[estimator(l, 0 * l) <= 10] for k, estimator in (("k2", k2), ("k3", k3))}
    assert alive["k2"].min() < alive["k3"].min()
    assert alive["k2"].max() < 5 < 10 < alive["k3"].max()


def test_stale_threshold_follows_the_clip():
    frame = simulate(Run(sequences=60, update=0.25), 0)
    assert "stale-samples" in codes(frame)
    assert "stale-samples" not in codes(frame, epsilon_low=0.5, epsilon_high=0.6)


def test_pulling_is_not_pushing():
    """The findings about signs fail when the sign is right, however strong the term."""
    for pull in (0.25, 0.1, 0.0):
        assert "kl-maximised" not in codes(simulate(Run(sequences=80, pull=pull, growth=12.0), 1))
    assert "kl-maximised" in codes(
        simulate(Run(sequences=80, pull=-0.1, growth=12.0, drift=0.6), 1)
    )
    for push in (0.0, -0.08):
        assert "uniform-push" not in codes(simulate(Run(sequences=80, push=push), 1))


def test_a_token_that_became_certain_late_in_a_run_was_not_masked(healthy):
    """Of a dump that begins late, as every check but the first of a callback."""
    certain = healthy.drop(columns="sampler_logp")
    certain.loc[certain.position == 3, ["logp", "old_logp"]] = 0.0
    certain.loc[certain.position == 3, "ref_logp"] = -2.0
    late = certain.assign(step=certain.step + 100)
    assert "masked-when-scored" not in codes(late)
    assert "masked-when-scored" in codes(certain.assign(step=certain.step - certain.step.min()))


@pytest.mark.parametrize(
    ("strength", "low", "high", "severity"),
    [
        (0.4, 0.1, 0.3, "note"),  # an update that repeats the last ones, which the reward drives
        (0.12, -0.2, 0.1, "note"),  # a fall that may be none accuses nobody
        (0.2, -0.2, 0.1, "note"),
        (0.4, -0.2, 0.1, "error"),
        (0.12, -0.3, -0.1, "note"),  # one check in forty sees that of a reward that stays
        (0.12, -0.3, -0.2, "error"),
    ],
)
def test_a_push_that_the_reward_may_explain(strength, low, high, severity):
    frame = simulate(Run(sequences=80, pull=-0.1, growth=12.0, drift=0.6), 1)
    measured = measure(assemble(frame, "simulated"), Settings(resamples=200))
    intervals = {
        "pull_strength": Interval(value=strength, low=0.05, high=0.5),
        "reward_growth": Interval(value=(low + high) / 2, low=low, high=high),
    }
    without = intervals | {"reward_growth": None}  # nobody can tell
    for given, expected in ((intervals, severity), (without, "note")):
        shown = updates.kl_maximised(measured._replace(intervals=measured.intervals | given))
        assert shown.severity == expected


def test_a_falling_reward_is_an_error_where_the_kl_does_not_multiply():
    frame = simulate(Run(sequences=80, pull=-0.1, growth=12.0, drift=0.6), 1)
    measured = measure(assemble(frame, "simulated"), Settings(resamples=200))
    falling = {"reward_growth": Interval(value=-0.2, low=-0.25, high=-0.15)}
    measured = measured._replace(
        intervals=measured.intervals | falling, numbers=measured.numbers | {"kl_growth": 1.2}
    )
    assert updates.kl_maximised(measured).severity == "error"


def test_a_rising_reward_is_no_error_however_hard_it_pushes():
    sound = simulate(Run(sequences=150, pull=-0.25, growth=12.0, drift=0.6, gain=0.6), 1)
    (finding,) = [f for f in found(sound) if f.code == "kl-maximised"]
    assert finding.severity == "note"


def test_growth_of_the_reward_by_the_rewards_of_sequences():
    frame = simulate(Run(sequences=120, gain=0.6), 3)
    growth = measure(assemble(frame, "simulated")).intervals["reward_growth"]
    by_sequence = frame.groupby("sequence")[["step", "reward"]].first()
    thirds = np.array_split(sorted(by_sequence["step"].unique()), 3)
    first, last = (
        by_sequence[by_sequence["step"].isin(t)]["reward"] for t in (thirds[0], thirds[2])
    )
    assert growth.value == pytest.approx(last.mean() - first.mean())
    error = np.hypot(first.std() / len(first) ** 0.5, last.std() / len(last) ** 0.5)
    assert growth.high - growth.low == pytest.approx(2 * 1.96 * error, rel=0.2)
    assert growth.low > 0


def test_completions_of_one_prompt_are_no_independent_rewards():
    frame = simulate(Run(sequences=120, gain=0.6), 3)

    def growth(groups):
        dump = assemble(frame.assign(group=groups), "simulated")
        return measure(dump).intervals.get("reward_growth")

    alone, sixes = growth(frame["sequence"]), growth(frame["sequence"] // 6)
    assert sixes.value == pytest.approx(alone.value)
    assert growth(frame["sequence"] // 20) is None, "two prompts on either side are an anecdote"


def test_updates_against_the_advantages(healthy):
    """These faults look alike: a loss with the wrong sign, and columns that are exchanged."""
    renamed = healthy.assign(logp=healthy.ref_logp, ref_logp=healthy.logp)
    first = found(renamed)[0]
    assert first.code == "advantage-opposed"
    assert "exchanged with old_logp or ref_logp" in first.advice
    frame = healthy.drop(columns="sampler_logp")
    exchanged = frame.assign(logp=frame.old_logp, old_logp=frame.logp)
    assert "advantage-opposed" in codes(exchanged)
    assert "advantage-opposed" not in codes(frame)
    flipped = simulate(Run(sequences=80, learning=-0.05), 7)
    assert codes(flipped)[0] == "advantage-opposed"


def test_a_term_in_the_reward_may_be_credited_in_any_way_that_is_not_ruled_out(healthy):
    l = healthy.old_logp - healthy.ref_logp
    own, of_completion = 0.05 * l, l.groupby(healthy.sequence)
    owed = {
        "immediate": own,
        "whole": 0.05 * of_completion.transform("sum"),
        "to_go": 0.05 * (of_completion.transform("sum") - of_completion.cumsum()) + own,
    }
    k1 = {"estimator": "k1", "placement": "reward"}
    for credit, term in owed.items():
        frame = healthy.assign(kl_term=term)
        assert "other-term" not in codes(frame, kl=k1)
        assert "other-term" in codes(frame, kl=k1 | {"estimator": "k3"})
        for said in owed:
            assert ("other-term" in codes(frame, kl=k1 | {"credit": said})) == (said != credit)


def test_a_term_that_is_left_out_is_not_another_one_too(healthy):
    found_codes = codes(healthy.assign(kl_term=0.0), kl={"estimator": "k3"})
    assert "kl-left-out" in found_codes and "other-term" not in found_codes


@pytest.mark.parametrize("left_out", ["half of each completion", "where it is large", "nothing"])
def test_a_term_that_is_no_estimator_of_each_token(healthy, left_out):
    l = healthy.logp - healthy.ref_logp
    term = 0.05 * (np.expm1(-l) + l)
    kept = {
        "half of each completion": healthy.position < 15,
        "where it is large": l.abs() < 0.1,
        "nothing": l == l,
    }[left_out]
    found_codes = codes(healthy.assign(kl_term=term * kept), kl={"estimator": "k3"})
    assert ("other-term" in found_codes) == (left_out != "nothing")


def test_a_policy_that_collapsed_was_not_masked(healthy):
    """Its tokens are certain, to the last bit, and improbable under the reference."""
    frame = healthy.drop(columns="sampler_logp")
    late = frame.assign(
        step=frame.step + 100, sequence=frame.sequence + 1000, logp=0.0, ref_logp=-5.0
    )
    late.loc[late.position > 3, "old_logp"] = 0.0
    found_codes = codes(pd.concat([frame, late]))
    assert not {"masked-when-scored", "other-tokens", "misaligned"} & set(found_codes)
    assert "masked-when-scored" in codes(late)


def test_mass_of_the_reference_that_no_sample_stands_for(healthy):
    frame = simulate(Run(sequences=80, lost=1.0, loss_depth=1.0, loss_spread=4.0), 1)
    (finding,) = [f for f in found(frame) if f.code == "unseen-mass"]
    missing, by_k3, by_k1 = finding.evidence.values()
    assert missing == pytest.approx(1 - np.exp(frame.ref_logp - frame.sampler_logp).mean())
    assert by_k1 - by_k3 == pytest.approx(1 - np.exp(frame.ref_logp - frame.logp).mean())
    assert by_k1 - by_k3 > 0.1 * by_k1
    assert "unseen-mass" not in codes(healthy)
    assert "unseen-mass" not in codes(example("heavy_tail")), "that finding says it already"
    light = simulate(Run(sequences=80, lost=1.0, loss_depth=1.0, loss_spread=2.0), 1)
    assert "unseen-mass" not in codes(light)


def test_a_tail_of_the_update_alone_is_a_note_where_the_ratio_corrects_it(healthy):
    """The update pushed some tokens far down: they are the old policy's, whose k1 and k3 agree."""
    generator = np.random.default_rng(2)
    depth = 9 * generator.exponential(1.0, len(healthy)) * (generator.random(len(healthy)) < 0.02)
    stale = healthy.assign(logp=healthy.logp - depth)
    severity = {}
    for weighting in ("none", "attached"):
        kl = {"estimator": "k3", "weighting": weighting}
        severity[weighting] = {f.code: f.severity for f in found(stale, kl=kl)}["heavy-tail"]
    assert severity == {"none": "warning", "attached": "note"}
    of_samples = {f.code: f.severity for f in found(example("heavy_tail"), kl=kl)}
    assert of_samples["heavy-tail"] == "warning", "its own samples have the tail"


@pytest.mark.parametrize(("largest", "said"), [(0.01, False), (2.0, True)])
def test_weights_near_one_have_no_tail_worth_the_name(healthy, largest, said):
    """One step on fresh samples: a few certain tokens move by thousandths, the rest by nothing."""
    moved = np.random.default_rng(0).pareto(1.0, len(healthy))
    moved *= largest / moved.max()
    frame = healthy.drop(columns=["sampler_logp", "advantage", "reward"])
    frame = frame.assign(logp=frame.old_logp, old_logp=frame.old_logp - moved)
    assert ("heavy-weights" in codes(frame)) == said


def test_errors_come_before_warnings_and_data_before_training():
    frame = example("stale_samples")
    codes_in_order = [cause.code for cause in CAUSES]
    order = [(SEVERITIES.index(f.severity), codes_in_order.index(f.code)) for f in found(frame)]
    assert len(order) > 1 and order == sorted(order)


def test_wrong_columns_silence_what_follows_from_them():
    assert "heavy-tail" not in codes(example("counted_padding"))
    assert "dead-zone" not in codes(example("shifted_reference"))


def test_matching_by_code_and_severity():
    all_found = found(example("stale_samples"))
    assert [f.code for f in matching(all_found, ("stale-samples",))] == ["stale-samples"]
    assert {f.severity for f in matching(all_found, ("error", "note"))} == {"error", "note"}
    assert matching(all_found, ("misaligned",)) == []
    with pytest.raises(UserError, match="did you mean stale-samples"):
        matching([], ("stale-sample",))


def anchors(notebook: str) -> set[str]:
    """What a link into a built chapter can name: theorems, exercises, figures and sections."""
    found = set()
    for cell in json.loads((ROOT / f"notebooks/{notebook}.ipynb").read_text())["cells"]:
        text = "".join(cell["source"])
        found.add(cell["metadata"].get("mystnb", {}).get("figure", {}).get("name"))
        if cell["cell_type"] == "markdown":
            found |= set(re.findall(r"^:label: ((?:thm|prop|ex)-\S+)$", text, re.M))
            found |= set(re.findall(r"^\((sec-\S+)\)=$", text, re.M))
            sections = re.findall(r"^##+ (.+)$", text, re.M)
            found |= {re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in sections}
    return found


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.code)
def test_every_cause_leads_to_a_place_that_exists(cause):
    notebook, _, label = cause.chapter.partition("#")
    assert label in anchors(notebook)


def test_every_condition_is_a_cause_and_no_code_stands_twice():
    for conditions in (columns, policies, updates, estimates):
        here = [c.when for c in CAUSES if c.when.__module__ == conditions.__name__]
        named = {when.__name__ for when in here}
        public = {name for name, item in vars(conditions).items() if inspect.isfunction(item)}
        own = {n for n in public if getattr(conditions, n).__module__ == conditions.__name__}
        assert {name for name in own if not name.startswith("_")} == named
    assert len({cause.code for cause in CAUSES}) == len(CAUSES) >= 43


def test_clipped_sequences_are_not_held_against_their_tokens():
    """GSPO's clip is a thousand times narrower, and of the mean log-ratio of a sequence."""
    frame = simulate(Run(sequences=80, update=0.1), 3)
    gspo = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
    assert "stale-samples" in codes(frame, **gspo)
    assert "stale-samples" not in codes(frame, ratio_level="sequence", **gspo)
    assert "stale-samples" in codes(simulate(Run(update=0.7), 3), ratio_level="sequence", **gspo)


def test_the_clip_of_a_sequence_is_on_its_mean_log_ratio():
    frame = simulate(Run(sequences=30, update=0.1), 3).drop(columns="advantage")
    settings = Settings(ratio_level="sequence", epsilon_low=0.01, epsilon_high=0.01)
    clipped = measure(assemble(frame, "x"), settings).numbers["clip_fraction"]
    moved = (frame.logp - frame.old_logp).groupby(frame.sequence).transform("mean")
    assert clipped == pytest.approx(((moved > np.log(1.01)) | (moved < np.log(0.99))).mean())


def test_a_policy_far_away_is_not_misaligned():
    """Its log-probs no longer correlate with the reference's; those of other tokens explode."""
    far = simulate(Run(sequences=80, sharpness=1.0, drift=8.0, growth=1.0), 0)
    assert np.corrcoef(far.logp, far.ref_logp)[0, 1] < columns.UNRELATED
    assert not {"misaligned", "other-tokens"} & set(codes(far.drop(columns="step")))
    assert "far-from-reference" in codes(far)
    near = simulate(BIGGER, 7)
    shuffled = near.assign(ref_logp=np.random.default_rng(0).permutation(near.ref_logp))
    assert codes(shuffled)[0] == "other-tokens"


def test_a_rare_token_does_not_make_a_reference_that_of_other_tokens():
    """A few steps late in a run: the mean ratio of a policy far away rests on one token."""
    far = simulate(Run(sequences=80, sharpness=1.0, drift=8.0, growth=1.0), 0)
    far.loc[far.index[7], "ref_logp"] = -0.1
    far.loc[far.index[7], ["logp", "old_logp"]] = -9.0
    assert np.exp(far.ref_logp - far.logp).mean() > columns.UNRELATED_RATIO
    assert "other-tokens" not in codes(far.drop(columns="step"))


def test_alignment_is_judged_where_the_policies_have_not_parted(healthy):
    """A run that ends far away, with columns that were shifted from the start."""
    early, late = healthy, simulate(Run(sequences=200, sharpness=1.0, drift=8.0, growth=1.0), 0)
    run = pd.concat([early, late.assign(step=late.step + 100, sequence=late.sequence + 1000)])
    assert "misaligned" not in codes(run)
    shifted = run.assign(ref_logp=run.groupby("sequence").ref_logp.shift(-1).fillna(-2.0))
    assert "misaligned" in codes(shifted)


def test_rewards_that_are_all_equal_head_the_report(healthy):
    """Nothing moves the policy, so that its reference stays the policy itself: a symptom."""
    frozen = healthy.assign(advantage=0.0, reward=1.0, ref_logp=healthy.logp)
    frozen = frozen.assign(old_logp=frozen.logp).drop(columns="sampler_logp")
    (first, *others) = found(frozen)
    assert (first.code, first.severity) == ("no-signal", "error")
    assert [(f.code, f.severity) for f in others] == [("identical-reference", "note")]


def test_exchanged_columns_far_away_are_a_negative_kl():
    """k3 of exchanged columns explodes, so that no share of it measures a negative k1."""
    far = simulate(Run(sequences=80, sharpness=3.0, drift=3.0, growth=1.0), 0)
    swapped = far.assign(ref_logp=far.old_logp, logp=far.ref_logp, old_logp=far.ref_logp)
    swapped = swapped.drop(columns=["sampler_logp", "step"])
    l = swapped.logp - swapped.ref_logp
    assert -l.mean() < 0.1 * (np.expm1(-l) + l).mean(), "a tenth of k3 would hide it"
    assert "negative-kl" in codes(swapped)


def test_a_token_after_the_end(healthy):
    frame = healthy.drop(columns="sampler_logp")
    noise = np.random.default_rng(0).normal(0, 0.3, size=frame.sequence.nunique())
    pads = frame.groupby("sequence").tail(1)
    pads = pads.assign(
        position=pads.position + 1, logp=-12 + noise, old_logp=-12 + noise, ref_logp=-12 - noise
    )
    assert codes(pd.concat([frame, pads]))[0] == "unsampled-end"
    likely = pads.assign(
        logp=pads.logp + 10, old_logp=pads.old_logp + 10, ref_logp=pads.ref_logp + 10
    )
    assert "unsampled-end" not in codes(pd.concat([frame, likely]))


def test_old_log_probs_of_an_earlier_policy():
    """Tokens of the trained policy beside the log-probs of one that it has left."""
    frame = simulate(Run(sequences=80, update=0.5), 7).drop(columns="sampler_logp")
    exchanged = frame.assign(old_logp=frame.logp, logp=frame.old_logp)
    assert "old-not-sampler" in codes(exchanged)
    assert "old-not-sampler" not in codes(frame)


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize(
    "columns", [("ref_logp",), ("old_logp",), ("logp",), ("logp", "old_logp")], ids="+".join
)
def test_columns_to_another_base_are_named(healthy, base, columns):
    frame = healthy.drop(columns="sampler_logp")
    first = found(frame.assign(**{c: frame[c] / np.log(base) for c in columns}))[0]
    assert first.code == "other-base"
    assert first.title.startswith(f"{' and '.join(columns)}: logarithms to base {base},")


def test_a_reference_at_a_temperature_is_not_of_another_base():
    """Its log-probs are a multiple less a normaliser: improbable tokens alone look alike."""
    drawn = sample(Population(kl=1e-4), 0, prompts=16, group=8)
    dump = as_rollouts(drawn)
    assert "base_ref" not in integrity.bases(dump)
    multiple = replace(dump, ref_logp=dump.logp / np.log(2))
    assert integrity.bases(multiple)["base_ref"] == 2
    inverted = replace(dump, ref_logp=dump.logp * np.log(2))
    assert integrity.bases(inverted)["base_ref"] == -2
    hotter = replace(dump, ref_logp=dump.logp / np.log(2) + 0.3)
    assert "base_ref" not in integrity.bases(hotter)


def test_another_reference_than_the_start(healthy):
    early = healthy.assign(step=healthy.step - healthy.step.min())
    assert "starts-away" in codes(early)
    same = early.step == 0
    together = early.assign(ref_logp=early.ref_logp.where(~same, early.old_logp))
    assert "starts-away" not in codes(together)


@pytest.mark.parametrize("credit", ["immediate", "to_go"])
def test_a_kl_that_is_added_to_the_advantages_of_tokens(healthy, credit):
    frame = healthy.sort_values(["sequence", "position"])
    kl = frame.old_logp - frame.ref_logp
    if credit == "to_go":
        kl = kl[::-1].groupby(frame.sequence).cumsum()[::-1]
    assert "kl-rewarded" in codes(frame.assign(advantage=frame.advantage + 0.1 * kl))
    assert "kl-rewarded" not in codes(frame.assign(advantage=frame.advantage - 0.1 * kl))


def nearly_the_reference(temperature: float) -> pd.DataFrame:
    """Policy and reference are nearly one, so that no ratio tells who sampled."""
    generator = np.random.default_rng(0)
    logits = 2 * generator.standard_normal((4000, 30))
    drawn = np.argmax(logits / temperature + generator.gumbel(size=logits.shape), axis=1)
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    taken = logp[np.arange(len(logp)), drawn]
    return pd.DataFrame(
        {
            "sequence": np.arange(len(logp)) // 40,
            "logp": taken,
            "ref_logp": taken - 1e-3 * generator.random(len(logp)),
            "entropy": -(np.exp(logp) * logp).sum(1),
        }
    )


@pytest.mark.parametrize(("temperature", "word"), [(0.8, "colder"), (1.0, None), (1.25, "hotter")])
def test_a_sampler_at_another_temperature_than_the_entropy_says(temperature, word):
    frame = nearly_the_reference(temperature)
    titles = [f.title for f in found(frame) if f.code == "other-sampler"]
    assert len(titles) == (word is not None)
    assert word is None or word in titles[0]


@pytest.mark.parametrize(("base", "said"), [(2, "another base than e"), (10, "base 10")])
def test_log_probs_to_another_base_than_the_entropy_have_it_named(base, said):
    frame = nearly_the_reference(1.0)
    frame[["logp", "ref_logp"]] /= np.log(base)
    (advice,) = [f.advice for f in found(frame) if f.code == "other-sampler"]
    assert said in advice


@pytest.mark.parametrize("estimator", ["none", "exact", "minimax01", "k3_clip"])
def test_findings_about_k3_are_for_those_who_use_it(estimator):
    for name in ("dead_zone", "heavy_tail"):
        assert {"dead-zone", "k3-gradient"} & set(codes(example(name)))
        assert not {"dead-zone", "k3-gradient"} & set(
            codes(example(name), kl={"estimator": estimator})
        )


def test_k3_with_its_ratio_attached_has_the_gradient_of_the_reverse_kl():
    far = next(n for n in EXAMPLES if "k3-gradient" in codes(example(n), kl={"estimator": "k3"}))
    attached = {"estimator": "k3", "weighting": "attached"}
    assert "k3-gradient" not in codes(example(far), kl=attached)


def test_the_report_survives_json():
    frame = example("heavy_tail")
    measured = measure(assemble(frame, "x"), Settings())
    first = report(measured, source="x")
    assert Report.model_validate_json(first.model_dump_json()) == first
