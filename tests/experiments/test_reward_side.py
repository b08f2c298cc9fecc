"""The numbers of chapter 8, and referees that could have said otherwise."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.experiments.chapters import group_orders, reward_side
from analysis.experiments.chapters.gradients import random_policies, random_tables
from analysis.kl.ascent import expected_ascent
from analysis.kl.enumeration import relative_error, reverse_kl_gradient
from analysis.kl.fixed_points import reverse_kl_optimum
from analysis.kl.sequences import enumerate_sequences


@pytest.fixture(scope="module")
def prompts():
    return group_orders.random_prompts(8, 4, distance=1.0, seed=1)


def exact_gradient(prompts, beta):
    policy = prompts.logits.softmax(-1)
    centred = prompts.rewards - (policy * prompts.rewards).sum(-1, keepdim=True)
    return policy * centred - beta * reverse_kl_gradient(prompts.logits, prompts.ref_logits)


@pytest.mark.parametrize("group_size", [2, 4])
def test_leave_one_out_is_exact_for_every_group_size(prompts, group_size):
    mean = group_orders.order_moments(
        prompts, "kl_then_leave_one_out", beta=0.3, group_size=group_size
    ).mean
    assert relative_error(mean, exact_gradient(prompts, 0.3)).max() < 1e-12
    assert relative_error(mean, exact_gradient(prompts, 0.0)).min() > 0.01


def test_population_limits_in_units_of_the_reward(prompts):
    """Times the spread of what was standardised, each limit is a sum of two exact gradients."""
    policy = prompts.logits.softmax(-1)
    kl = prompts.logits.log_softmax(-1) - prompts.ref_logits.log_softmax(-1)

    def spread(x):
        mean = (policy * x).sum(-1, keepdim=True)
        return (policy * (x - mean).square()).sum(-1, keepdim=True).sqrt()

    first = group_orders.population_gradient(prompts, "kl_then_normalise", beta=0.3)
    scaled = first * spread(prompts.rewards - 0.3 * kl)
    assert relative_error(scaled, exact_gradient(prompts, 0.3)).max() < 1e-12
    after = group_orders.population_gradient(prompts, "normalise_then_kl", beta=0.3)
    std = spread(prompts.rewards)
    effective = exact_gradient(prompts, 0.0) - 0.3 * std * reverse_kl_gradient(
        prompts.logits, prompts.ref_logits
    )
    assert relative_error(after * std, effective).max() < 1e-12
    assert relative_error(after * std, exact_gradient(prompts, 0.3)).median() > 0.01


def test_the_limits_need_a_spread_that_is_not_zero(prompts):
    optimum = reverse_kl_optimum(prompts.rewards, prompts.ref_logits, beta=0.3)
    solved = prompts._replace(logits=optimum)
    first = group_orders.population_gradient(solved, "kl_then_normalise", beta=0.3)
    assert not (first.norm(dim=-1) < 1e-3).all()  # rounding over rounding, or 0 / 0
    equal = prompts._replace(rewards=torch.zeros_like(prompts.rewards))
    second = group_orders.population_gradient(equal, "normalise_then_kl", beta=0.3)
    assert second.isnan().all()
    third = group_orders.population_gradient(equal, "kl_then_leave_one_out", beta=0.3)
    assert relative_error(third, exact_gradient(equal, 0.3)).max() < 1e-12
    at_optimum = group_orders.population_gradient(solved, "kl_then_leave_one_out", beta=0.3)
    assert at_optimum.abs().max() < 1e-12


def test_large_groups_approach_the_population_limit():
    prompts = group_orders.random_prompts(4, 2, distance=0.5, seed=2)
    for order in ("kl_then_normalise", "normalise_then_kl"):
        limit = group_orders.population_gradient(prompts, order, beta=0.3)
        errors = [
            relative_error(
                group_orders.order_moments(prompts, order, beta=0.3, group_size=size).mean, limit
            ).max()
            for size in (2, 12)
        ]
        assert errors[1] < 0.5 * errors[0]


def test_effective_beta_follows_the_spread_only_when_the_kl_comes_last(prompts):
    table = group_orders.order_table(prompts, (0.1, 1.0), beta=0.04, group_size=4)
    effective = table.set_index(["order", "scale"]).effective_beta
    ratio = {order: effective[order, 1.0] / effective[order, 0.1] for order in group_orders.ORDERS}
    assert ratio["normalise_then_kl"] == pytest.approx(10, rel=0.05)
    assert ratio["kl_then_leave_one_out"] == pytest.approx(1, abs=1e-9)
    assert 0.2 < ratio["kl_then_normalise"] < 5
    gain = table.set_index(["order", "scale"]).gain
    assert gain["normalise_then_kl", 1.0] == pytest.approx(1, abs=1e-9)
    assert gain["kl_then_normalise", 0.1] > 2 * gain["kl_then_normalise", 1.0]


def test_equal_rewards_blow_up_the_kl_in_one_order_only():
    curves = group_orders.equal_reward_curves(
        torch.tensor([0.05], dtype=torch.float64),
        count=8, vocab_size=4, beta=0.04, group_size=4, seed=3,
    ).set_index("order")  # fmt: skip
    assert curves.norm["kl_then_normalise"] > 50 * curves.norm["exact"]
    for order in ("normalise_then_kl", "kl_then_leave_one_out"):
        assert curves.norm[order] == pytest.approx(curves.norm["exact"], rel=1e-9)


def test_force_on_two_tokens_is_restoring_for_k1_alone():
    log_odds = torch.tensor([-3.0, math.log(0.3 / 0.7), 0.0, 3.0], dtype=torch.float64)
    force = reward_side.penalty_force(log_odds, 0.3)
    by_name = {name: rows.force.tolist() for name, rows in force.groupby("estimator")}
    for _, at_ref, near, _ in by_name.values():
        assert at_ref == pytest.approx(0, abs=1e-12)
        assert near < 0
    assert by_name["k1"][0] > 0 > by_name["k1"][3]
    for name in ("k2", "k3"):  # far away on either side the push is outwards
        assert by_name[name][0] < 0 < by_name[name][3]


def test_k2_has_a_second_equilibrium_where_the_masses_swap():
    swapped = torch.tensor([math.log(0.7 / 0.3)], dtype=torch.float64)
    force = reward_side.penalty_force(swapped, 0.3).set_index("estimator").force
    assert force["k2"] == pytest.approx(0, abs=1e-12)
    assert abs(force["k3"]) > 0.01


def test_where_training_on_the_penalty_alone_ends():
    starts = group_orders.random_prompts(60, 5, distance=1.0, seed=4)
    table = reward_side.flow_table(starts, ("k1", "k2", "k3"), steps=300, step_size=0.5)
    table = table.set_index("estimator")
    assert table.share_returned["k1"] == 1
    assert table.share_collapsed["k1"] == 0
    assert table.share_collapsed[["k2", "k3"]].min() > 0.9
    assert table.survivors.max() < 1e-6
    assert table.fewest_rising.min() >= 1


def test_on_the_logits_k3_goes_on_to_one_token_and_k2_does_not():
    starts = group_orders.random_prompts(60, 5, distance=1.0, seed=4)
    left = {}
    for name in ("k2", "k3"):
        end = expected_ascent(
            starts.logits,
            torch.zeros_like(starts.rewards),
            starts.ref_logits,
            beta=1.0,
            estimator=name,
            placement="reward",
            steps=4000,
            step_size=0.5,
            geometry="plain",
        )
        left[name] = (end - starts.ref_logits.log_softmax(-1) > math.log(0.01)).sum(-1)
    assert (left["k3"] == 1).double().mean() > 0.95
    assert (left["k2"] > 1).double().mean() > 0.5


def test_one_sample_at_a_time_a_positive_k1_still_returns():
    starts = group_orders.random_prompts(100, 6, distance=1.0, seed=3)
    table = reward_side.sample_table(starts, shift=5.0, steps=2000, step_size=0.02, seed=1)
    table = table.set_index("penalty")
    assert table.smallest[["k1 + shift", "k2", "k3"]].min() >= 0 > table.smallest["k1"]
    assert table.kl_end["k1"] < table.kl_end["k1 + shift"] < 0.5 * table.kl_start["k1 + shift"]
    assert table.kl_end[["k2", "k3"]].min() > 1.2 * table.kl_start["k2"]
    assert table.share_low["k1 + shift"] < 0.2 < table.share_low[["k2", "k3"]].min()


def test_mirror_steps_converge_up_to_twice_one_over_beta():
    prompts = group_orders.random_prompts(10, 5, distance=1.0, seed=5)
    curves = reward_side.surrogate_curves(prompts, (0.5, 1.0, 2.5), beta=0.3, iterations=8)
    last = curves[curves.iteration == 8].set_index("product").kl
    assert last[0.5] < 1e-3
    assert abs(last[1.0]) < 1e-12
    assert last[2.5] > 1


def test_only_a_reward_at_the_end_is_counted_once():
    tree = enumerate_sequences(3, 3, eos=2)
    tables = random_tables(tree, 3, 5, spread=1.0, seed=6)
    rewards, _ = random_policies(5, len(tree.tokens), spread=1.0, seed=7)
    error = reward_side.folded_return_table(*tables, rewards, tree, beta=0.2)
    error = error.set_index("credit").error
    assert error["last token, to go"] < 1e-12
    assert error["own token only"] > 0.01
    assert error["every token, to go"] > 0.3
