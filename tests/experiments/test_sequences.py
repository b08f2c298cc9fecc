"""The curves of chapter 6 start, end and order themselves as the theorems say."""

from __future__ import annotations

import pytest
import torch

from analysis.experiments.chapters import sequence_ratios as ratios
from analysis.experiments.chapters import sequences as study
from analysis.experiments.chapters.gradients import Policies, random_tables
from analysis.kl.credit import credit_moments, state_average
from analysis.kl.ratio_objectives import ratio_objective_gradient
from analysis.kl.sequences import enumerate_sequences, sequence_kl_gradient, token_logp
from analysis.objectives.advantages import reward_to_go
from analysis.objectives.gae import generalised_advantage


@pytest.fixture(scope="module")
def ragged():
    return enumerate_sequences(3, 4, eos=2)


@pytest.fixture(scope="module")
def policies(ragged):
    return random_tables(ragged, 3, 6, spread=1.2, seed=3)


def test_gae_curves_vanish_exactly_where_the_theorem_says(policies, ragged):
    curves = study.gae_curves(policies, ragged, [0.0, 0.5, 1.0], [1.0, 0.9])
    assert len(curves) == 16  # the scaled critic has no row at lambda = 1
    for row in curves.itertuples():
        undiscounted = row.gamma == 1.0 and (row.critic == "exact" or row.lam == 1.0)
        exact = undiscounted or row.critic == "scaled"
        assert (row.p90 < study.EXACT) == exact, row
        assert row.p10 <= row.median <= row.p90


@pytest.mark.parametrize("gamma", [1.0, 0.8, 0.0])
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_bias_of_a_wrong_critic_is_the_one_of_the_theorem(policies, ragged, gamma, lam):
    logits, ref_logits = (x[0] for x in policies)
    costs = token_logp(logits, ragged) - token_logp(ref_logits, ragged)
    exact = state_average(reward_to_go(costs), logits, ragged)
    critic = torch.randn(
        len(exact), generator=torch.Generator().manual_seed(8), dtype=torch.float64
    )
    credit = generalised_advantage(costs, critic[ragged.states], ragged.mask, gamma=gamma, lam=lam)
    error = gamma * (1 - lam) * critic - (1 - gamma * lam) * exact
    later = torch.where(ragged.mask, error[ragged.states], 0.0)[:, 1:]
    later = reward_to_go(torch.nn.functional.pad(later, (0, 1)), gamma=gamma * lam)
    bias = credit_moments(logits, ragged, later).mean
    found = credit_moments(logits, ragged, credit).mean
    referee = sequence_kl_gradient(logits, ref_logits, ragged)
    torch.testing.assert_close(found, referee + bias, rtol=0, atol=1e-12)
    if gamma * lam < 1:
        assert (found - referee + bias).abs().max() > 1e-2


def test_one_token_has_no_future_and_sticky_policies_a_long_one():
    options = {"drift": 0.5, "seed": 1}
    fast = study.length_curves([1, 32], 6, 8, **options)
    sticky = study.length_curves([1, 32], 6, 8, stickiness=5.0, **options)
    assert fast["median"][0] < study.EXACT > sticky["median"][0]
    assert study.EXACT < fast["median"][1] < sticky["median"][1]
    assert sticky.cosine[1] < 0.999


def test_full_vocabulary_lowers_the_noise_and_not_the_error(policies, ragged):
    table = study.sampling_table(policies, ragged).set_index(["vocabulary", "credit"]).sort_index()
    for credit in ("immediate", "to_go"):
        sampled, full = table.loc[("sampled", credit)], table.loc[("full", credit)]
        assert full.samples < sampled.samples
        assert full.error == pytest.approx(sampled.error, abs=1e-9)
    assert table.error["full", "to_go"] < study.EXACT < table.error["full", "immediate"]


def test_slopes_are_those_of_powers():
    sizes = [0.1, 0.2, 0.4]
    assert ratios.slope(sizes, [3 * s**2 for s in sizes]) == pytest.approx(2)
    assert ratios.slope(sizes, [0.5 * s for s in sizes]) == pytest.approx(1)


def test_order_curves(policies, ragged):
    curves = ratios.order_curves(policies.logits, ragged, [0.005, 0.01, 0.02], seed=1)
    linear = curves[curves.objective == "linear"]
    assert ratios.slope(linear["size"], linear.change) == pytest.approx(2, abs=0.1)
    assert ratios.slope(linear["size"], linear.gradient) == pytest.approx(1, abs=0.1)
    for other in ("token_mean", "geometric"):
        assert curves[curves.objective == other].gradient.min() > 0.05


def test_spread_curves_start_together_and_part():
    old, moved = torch.tensor([[0.0, 1.0, 0.3], [0.2, 0.9, 0.2]], dtype=torch.float64)
    curves = ratios.spread_curves(moved, old, [1, 10, 1000]).set_index("length")
    assert curves["product"][1] == pytest.approx(curves.token[1])
    assert curves.geometric[1] == pytest.approx(curves.token[1])
    assert curves["product"][1000] > curves.token[1000] > curves.geometric[1000]
    assert curves.log_std[1000] == pytest.approx(10 * curves.log_std[10])
    doubled = ratios.doubling_length(curves.token[1] ** 2)
    assert (1 + curves.token[1] ** 2) ** doubled == pytest.approx(2)


def test_only_the_whole_ratio_is_unbiased(policies, ragged):
    stale = Policies(policies.logits + 0.4 * policies.ref_logits, policies.logits)
    table = ratios.weight_table(stale, ragged, seed=2).set_index("weight")
    assert table.index.tolist() == list(ratios.WEIGHTS)
    assert (table.bias.drop("sequence") > 0.01).all()
    assert table.bias["sequence"] < study.EXACT
    assert table.noise["grpo"] < table.noise["sequence"]


def test_clipped_weights_by_hand(policies, ragged):
    old, logits = policies.logits[0], policies.logits[0] + 0.5 * policies.ref_logits[0]
    returns = ratios.random_returns(ragged, seed=4)
    ratio = (token_logp(logits, ragged) - token_logp(old, ragged)).exp()
    gain = returns[:, None].expand_as(ratio)
    silent = ((gain > 0) & (ratio > 1.2)) | ((gain < 0) & (ratio < 0.8))
    assert silent[ragged.mask].any()
    weights = ratios.gradient_weights(logits, old, ragged, returns, weight="grpo")
    expected = torch.where(silent, 0.0, ratio * gain)
    torch.testing.assert_close(weights[ragged.mask], expected[ragged.mask])


def test_mismatch_by_temperature(policies, ragged):
    curves = ratios.mismatch_curves(
        policies.logits, ragged, [0.8, 1.0], staleness=0.05, seed=5
    ).set_index(["weight", "temperature"])
    error = curves.error.sort_index()
    product, per_token, dropped = (
        "both factors, product",
        "both factors, per token",
        "first factor dropped",
    )
    assert error[product].max() < study.EXACT
    assert error[dropped, 0.8] > error[per_token, 0.8] > error[per_token, 1.0] > study.EXACT
    assert error[dropped, 1.0] == pytest.approx(error[per_token, 1.0])


def test_mismatch_product_is_the_exact_gradient(policies, ragged):
    logits, old = policies.logits[0], policies.ref_logits[0]
    sampler = policies.logits[1]
    returns = ratios.random_returns(ragged, seed=6)
    found = ratios.mismatch_gradients(logits, old, sampler, ragged, returns)
    exact = ratio_objective_gradient(logits, logits, ragged, returns)
    torch.testing.assert_close(found["both factors, product"], exact, rtol=0, atol=1e-12)


def test_clip_curves_by_hand():
    grid = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)
    good, bad = (ratios.clip_curves(sign, grid) for sign in (1.0, -1.0))
    assert good.objective.tolist() == pytest.approx([0.5, 1.0, 1.2])
    assert bad.objective.tolist() == pytest.approx([-0.8, -1.0, -1.5])
    assert good.coefficient.tolist() == pytest.approx([0.5, 1.0, 0.0])
    assert bad.coefficient.tolist() == pytest.approx([0.0, -1.0, -1.5])
