"""Measured numbers against hand computation and against exact expectations."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest

from kl_term.diagnosis import divergence, integrity, statistics, updates
from kl_term.diagnosis.conditions.columns import MOST_IMPOSSIBLE
from kl_term.diagnosis.generate import Run, simulate
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.schema import Rollouts, Settings
from kl_term.diagnosis.statistics import MOST_UNITS, token_means
from kl_term.diagnosis.writable import tensor_of

FAST = Settings(resamples=200)


def rollouts(logp, ref_logp, old_logp=None, sequence=None, **columns) -> Rollouts:
    logp, ref_logp = np.array(logp, float), np.array(ref_logp, float)
    sequence = np.zeros(len(logp), int) if sequence is None else np.array(sequence)
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    return Rollouts(
        logp=logp,
        old_logp=logp if old_logp is None else np.array(old_logp, float),
        ref_logp=ref_logp,
        sequence=sequence,
        position=np.arange(len(logp)) - starts[sequence],
        rows=len(logp),
        has_old_logp=old_logp is not None,
        sequence_names=tuple(str(i) for i in range(sequence.max() + 1)),
        **columns,
    )


def test_estimates_of_three_tokens_by_hand():
    """log-ratios 0.5, -0.2, 1.0; weights 2, 1, 1 on reweighting."""
    l = np.array([0.5, -0.2, 1.0])
    logp = np.array([-1.0, -1.0, -2.0])
    dump = rollouts(logp, logp - l, logp - np.log([2.0, 1.0, 1.0]))
    found = {
        (e.estimator, e.samples): e.interval.value for e in divergence.kl_estimates(dump, FAST)
    }
    k3 = np.exp(-l) - 1 + l
    assert found["k1", "logged"] == pytest.approx(1.3 / 3, rel=1e-12)
    assert found["k2", "logged"] == pytest.approx((0.25 + 0.04 + 1.0) / 6, rel=1e-12)
    assert found["k3", "logged"] == pytest.approx(k3.mean(), rel=1e-12)
    assert found["k1", "sampling"] == pytest.approx((1.3 - math.log(2)) / 3, rel=1e-12)
    assert found["k1", "reweighted"] == pytest.approx((1.0 - 0.2 + 1.0) / 4, rel=1e-12)
    assert found["k3", "reweighted"] == pytest.approx((2 * k3[0] + k3[1] + k3[2]) / 4, rel=1e-12)


def test_coefficient_gap_is_the_spread_of_k3_over_that_of_k1():
    l = np.array([0.5, -0.7, 1.0, 0.1])
    found = divergence.coefficient_gap(rollouts(-2 + l, np.full(4, -2.0)))
    k3 = np.expm1(-l) + l
    assert found["k3_gradient_gap"] == pytest.approx(k3.std() / l.std(), rel=1e-12)
    correlation = np.corrcoef(l, 1 - np.exp(-l))[0, 1]
    assert found["k3_gradient_correlation"] == pytest.approx(correlation, rel=1e-12)


@pytest.mark.parametrize(("sharpness", "sign"), [(0.5, -1), (2.0, 1)])
def test_k1_as_a_loss_pushes_rare_tokens_most(sharpness, sign):
    """Old statement: k1 as a loss gives s = 0. One exact step a token: where the policy is sharper
    than its reference s is positive, as of a wrong sign, and where flatter negative, as of a pull.
    """
    draw = np.random.default_rng(0)
    ref = draw.standard_normal((3000, 6))
    ref -= np.log(np.exp(ref).sum(1, keepdims=True))
    old = sharpness * ref
    old -= np.log(np.exp(old).sum(1, keepdims=True))
    token = (np.exp(old).cumsum(1) > draw.random((3000, 1))).argmax(1)
    rows = np.arange(3000)
    new = old + 0.1 * np.exp(old)
    new[rows, token] -= 0.1
    new -= np.log(np.exp(new).sum(1, keepdims=True))
    columns = (x[rows, token] for x in (new, ref, old))
    found = updates.update_response(rollouts(*columns, sequence=rows // 10), FAST)
    assert found["push"].high < 0
    assert (sign * found["pull"].low > 0) and (sign * found["pull"].high > 0)
    assert abs(found["pull_strength"].value) > 0.2


def test_dead_zones_by_hand():
    """k3 = 10 at log r = 2.61; k2 = 10 at 4.47."""
    l = np.array([-2.5, -2.7, 4.4, 4.5])
    found = divergence.dead_zones(rollouts(np.full(4, -5.0), -5 - l))
    c3, c2 = np.abs(1 - np.exp(-l)), np.abs(l)
    assert found["dead_share_k3"] == 0.25
    assert found["dead_force_k3"] == pytest.approx(c3[1] / c3.sum(), rel=1e-12)
    assert found["dead_share_k2"] == 0.25
    assert found["dead_force_k2"] == pytest.approx(c2[3] / c2.sum(), rel=1e-12)


def test_off_policy_numbers_by_hand():
    rho = np.array([2.0, 0.5, 1.1, 1.0])
    old = np.full(4, -1.0)
    dump = rollouts(old + np.log(rho), old, old, advantage=np.array([1.0, 1.0, 1.0, -1.0]))
    found = divergence.off_policy(dump, Settings())
    assert found["staleness_kl"] == pytest.approx((rho - 1 - np.log(rho)).mean(), rel=1e-12)
    assert found["staleness_ess"] == pytest.approx(rho.sum() ** 2 / (4 * (rho**2).sum()), rel=1e-12)
    assert found["clip_fraction"] == 0.25  # 0.5 is below 0.8, but its advantage is positive
    assert "mismatch_kl" not in found


def test_gaps_split_by_whose_policy_moved():
    frame = simulate(Run(sequences=200, mismatch=0.2, update=0.4), 0)
    sampler = np.array(frame.sampler_logp)
    dump = rollouts(
        frame.logp, frame.ref_logp, frame.old_logp, frame.sequence, sampler_logp=sampler
    )
    found = divergence.off_policy(dump, Settings())
    # variance of the logits' noise over two bounds the KL; both are seen, in the right order
    assert 0.2 * 0.04 / 2 < found["mismatch_kl"] < 0.04 / 2
    assert 0.2 * 0.16 / 2 < found["staleness_kl"] < 0.19 / 2
    assert found["total_kl"] > max(found["mismatch_kl"], found["staleness_kl"])


def test_intervals_resample_sequences_not_tokens():
    """Tokens of a sequence that are copies of one another carry no further information."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal(400)
    once = token_means({"x": values}, np.arange(400), resamples=1000, seed=0)["x"]
    copies = token_means(
        {"x": np.repeat(values, 25)}, np.repeat(np.arange(400), 25), resamples=1000, seed=0
    )["x"]
    assert copies.model_dump() == pytest.approx(once.model_dump(), rel=1e-9)
    naive = token_means({"x": np.repeat(values, 25)}, np.arange(10_000), resamples=1000, seed=0)
    assert naive["x"].high - naive["x"].low < 0.3 * (once.high - once.low)
    assert once.high - once.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)


def test_bags_of_sequences_have_the_same_spread():
    values = np.random.default_rng(1).standard_exponential(20 * MOST_UNITS)
    found = token_means({"x": values}, np.arange(len(values)), resamples=1000, seed=0)["x"]
    expected = 2 * 1.96 * values.std() / math.sqrt(len(values))
    assert found.high - found.low == pytest.approx(expected, rel=0.1)


def test_intervals_cover_the_exact_kl():
    """95% intervals of k1 over fresh dumps, against the mean of 400 of them: at least 85%."""
    run = Run(sequences=40, drift=0.5, growth=1.0, steps=1)
    every = [simulate(run, 1000 + seed) for seed in range(60)]
    truth = np.mean([(f.old_logp - f.ref_logp).mean() for f in every])
    inside = 0
    for frame in every:
        l = (frame.old_logp - frame.ref_logp).to_numpy()
        sequence = frame.sequence.to_numpy()
        found = token_means({"l": l}, sequence, resamples=400, seed=0)["l"]
        inside += found.low <= truth <= found.high
    assert inside >= 51


def test_nan_stays_visible_and_a_weight_of_zero_counts_nothing():
    columns = {"a": np.array([1.0, np.nan]), "b": np.array([1.0, np.inf]), "c": np.ones(2)}
    how = {"unit": np.array([0, 1]), "resamples": 100, "seed": 0}
    means = token_means(columns, **how)
    assert np.isnan(means["a"].value) and means["b"].value == np.inf and means["c"].value == 1.0
    means = token_means(columns, weight=np.array([1.0, 0.0]), **how)
    assert [mean.value for mean in means.values()] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("column", "message"),
    [(np.zeros(3), "ref_logp has shape"), (np.array([0.0, np.nan]), "ref_logp holds NaN")],
)
def test_rollouts_hold_columns_of_one_length_without_nan(column, message):
    logp, index = np.zeros(2), np.arange(2)
    with pytest.raises(ValueError, match=message):
        Rollouts(logp, logp, column, index, index)


def test_an_infinite_value_makes_the_mean_infinite_and_only_that():
    values = np.r_[np.inf, np.ones(99)]
    columns = {"infinite": values, "finite": np.ones(100)}
    found = token_means(columns, np.arange(100) // 5, resamples=200, seed=0)
    assert found["infinite"].value == found["infinite"].high == np.inf
    assert found["infinite"].low == 1.0
    assert found["finite"].model_dump() == {"value": 1.0, "low": 1.0, "high": 1.0}


@pytest.mark.parametrize("k", [0.2, 0.5, 0.8, 1.25])
def test_tail_index_of_a_pareto(k):
    log_weights = k * np.random.default_rng(0).standard_exponential(100_000)
    assert statistics.tail_index("r", log_weights).k == pytest.approx(k, abs=0.12)


@pytest.mark.peers
def test_the_tail_index_is_that_of_arviz():
    arviz = pytest.importorskip("arviz_stats.base", reason="arviz-stats: make test-full")
    generator = np.random.default_rng(3)
    for size in (100, 500, 20_000):
        for scale in (0.01, 0.3, 1.0, 3.0):
            for sign in (1.0, -1.0):
                log_weights = sign * scale * generator.standard_exponential(size)
                _, theirs = arviz.array_stats.psislw(-log_weights)
                found = statistics.tail_index("r", log_weights).k
                assert found == pytest.approx(float(theirs), abs=1e-9)


def test_an_atom_or_a_handful_has_no_tail():
    assert statistics.tail_index("r", np.zeros(1000)).k is None
    assert statistics.tail_index("r", np.random.default_rng(0).standard_normal(20)).k is None


def test_grids():
    generator = np.random.default_rng(0)
    fine = -generator.standard_exponential(5000)
    assert max(integrity.grid_shares(fine).values()) < 0.1
    size = 2.0 ** (np.floor(np.log2(-fine)) - 7)
    assert integrity.grid_shares(np.round(fine / size) * size)["bfloat16"] == 1
    assert integrity.grid_shares(np.round(fine, 2) - 1)["2 decimals"] == 1


def test_rounding_noise_of_bfloat16():
    generator = np.random.default_rng(0)
    fine = -generator.uniform(1, 2, size=200_000)
    step = 2.0**-7
    error = np.round(fine / step) * step - fine
    assert integrity.rounding_noise(fine, "bfloat16") == pytest.approx((error**2).mean(), rel=0.02)


def test_constant_ends():
    logp = [-1.0, -2.0, -3.0, -3.0, -3.0, -3.0, -1.0, -1.0]
    dump = rollouts(logp, logp, sequence=[0, 0, 0, 0, 0, 0, 1, 1])
    assert integrity.constant_ends(dump)["constant_end_share"] == 4 / 8
    interior = rollouts([*logp[:6], -4.0], [*logp[:6], -4.0])
    assert integrity.constant_ends(interior)["constant_end_share"] == 0


def test_update_response_recovers_the_parts_of_an_update():
    generator = np.random.default_rng(0)
    n = 20_000
    log_ratio, advantage = generator.standard_normal((2, n))
    move = -0.01 - 0.03 * log_ratio + 0.02 * advantage + 0.01 * generator.standard_normal(n)
    old = np.full(n, -3.0)
    dump = rollouts(
        old + np.log1p(move), old - log_ratio, old, np.arange(n) // 50, advantage=advantage
    )
    found = updates.update_response(dump, FAST)
    assert found["pull"].value == pytest.approx(-0.03, abs=0.001)
    assert found["advantage_response"].value == pytest.approx(0.02, abs=0.001)
    assert found["push"].value == pytest.approx(-0.01 / move.std(), rel=0.05)
    assert found["pull"].high < 0 and found["push"].high < 0


def test_identities_hold_for_a_run_that_samples_from_what_it_says():
    frame = simulate(Run(sequences=600, drift=0.6, mismatch=0.2), 0)
    dump = rollouts(
        frame.logp,
        frame.ref_logp,
        frame.old_logp,
        frame.sequence,
        sampler_logp=np.array(frame.sampler_logp),
    )
    found = {i.ratio: i.mean for i in divergence.identities(dump, FAST)}
    assert all(
        found[name].low <= 1 <= found[name].high for name in ("reference/sampler", "old/sampler")
    )
    colder = rollouts(frame.logp * 1.5, frame.ref_logp, frame.old_logp * 1.5, frame.sequence)
    assert {i.ratio: i.mean for i in divergence.identities(colder, FAST)}[
        "reference/sampler"
    ].low > 1.1


def test_steps_are_pooled_and_keep_their_tokens():
    frame = simulate(Run(sequences=300, steps=100), 0)
    dump = rollouts(frame.logp, frame.ref_logp, sequence=frame.sequence, step=frame.step.to_numpy())
    steps = updates.kl_by_step(dump)
    assert len(steps) == updates.MOST_STEPS
    assert sum(step.tokens for step in steps) == len(frame)
    assert [step.step for step in steps] == sorted(step.step for step in steps)


def test_one_token_can_be_measured():
    found = measure(rollouts([-1.0], [-2.0]), FAST)
    assert found.estimate("k1").value == 1.0 and found.numbers["masked_share"] == 0


def test_means_of_ratios_are_the_mass_that_the_sampler_covers():
    """Old statement: the mean of reference over sampler is one, whatever the policies."""
    policy, ref = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.3, 0.2])
    cut = np.array([0.6, 0.3, 0.0]) / 0.9
    tokens = np.repeat([0, 1], [200, 100])  # as often as the cut sampler draws them
    dump = rollouts(*(np.log(x[tokens]) for x in (policy, ref)), sequence=np.arange(300) // 10)
    dump = dataclasses.replace(dump, sampler_logp=np.log(cut[tokens]))
    means = {i.ratio: i.mean.value for i in divergence.identities(dump, FAST)}
    assert means["reference/sampler"] == pytest.approx(0.8, rel=1e-12)
    assert means["old/sampler"] == pytest.approx(0.9, rel=1e-12)


def test_a_flat_tail_draws_tokens_below_twenty_five_nats():
    """Old statement: such a token cannot have been drawn. Nearly all of the largest vocabulary at
    just below the bound has the whole of its probability, once in three hundred thousand tokens."""
    tail = integrity.LARGEST_VOCABULARY - 1
    drawn = tail * np.exp(integrity.IMPOSSIBLE - 1e-6)
    bound = integrity.LARGEST_VOCABULARY * np.exp(integrity.IMPOSSIBLE)
    assert 1 / 300_000 < drawn < bound < MOST_IMPOSSIBLE / 25


def test_a_column_that_must_not_be_written_is_read_without_a_warning():
    column = np.arange(3.0)
    column.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tensor_of(column).tolist() == [0.0, 1.0, 2.0]
