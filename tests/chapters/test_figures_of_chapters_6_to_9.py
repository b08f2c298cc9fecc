"""Figures of chapters 6 to 9 draw the numbers of their labels; notebooks compare the rest."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.chapters import (
    ch07_off_policy,
    ch07_stale_sequences,
    ch07_supports,
    ch08_reward_side,
    ch09_advantages,
    ch09_process_rewards,
)
from analysis.chapters.policies import random_tables
from analysis.kl.sequences import enumerate_sequences

TREE = enumerate_sequences(3, 3, eos=2)
PAIRS = random_tables(TREE, 3, 3, spread=1.0, seed=1)
FEW = torch.tensor([0.0, 0.5], dtype=torch.float64)
STATES = {"count": 5, "vocab_size": 6, "seed": 2}
PROMPTS = ch08_reward_side.random_prompts(3, 3, distance=1.0, seed=3)
CHAIN = ch09_process_rewards.fixed_length_chain(4, 2, right=0.6, spread=0.5)


def lines(figure, panel=0):
    found = {x.get_label(): np.asarray(x.get_ydata()) for x in figure.axes[panel].lines}
    return found


def test_lines_carry_the_data_of_their_labels():
    force = ch08_reward_side.penalty_force(torch.tensor([-3.0, 0.0]).double(), 0.3)
    drawn = lines(ch08_reward_side.draw_forces(force, 0.3))
    by_name = force.groupby("estimator").force.apply(list)
    assert drawn["$k_1$"].tolist() == by_name["k1"] != by_name["k3"]


def test_panels_carry_the_data_of_their_titles():
    silenced = ch07_off_policy.silenced_curves(FEW + 0.3, (0.04, 1.0), epsilon=0.2, **STATES)
    drawn = lines(ch07_off_policy.draw_silenced(silenced))
    at = silenced[(silenced.move == "along the advantage") & (silenced.beta == 0.04)]
    np.testing.assert_array_equal(drawn[r"$\beta$ = 0.04"], at.silenced_50)
    cuts = ch07_supports.cut_curves([1.0, 0.8], distance=0.3, **STATES).assign(distance=0.3)
    far = ch07_supports.cut_curves([1.0, 0.8], distance=1.0, **STATES).assign(distance=1.0)
    drawn = lines(ch07_supports.draw_cut(pd.concat([cuts, far])), panel=1)
    np.testing.assert_array_equal(drawn[r"$\rho\, k_3$"], far[far.name == "k3"]["median"])


def test_tables_become_curves():
    masks = ch07_stale_sequences.mask_table(TREE, 3, (np.inf, 0.0), count=3, distance=0.7, seed=1)
    drawn = lines(ch07_stale_sequences.draw_masking(masks))
    strict = masks[masks.delta == 0].iloc[0]
    assert drawn[r"$\delta$ = 0"][0] == pytest.approx(strict.bias + strict.variance)
    success = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    curves = ch09_advantages.difficulty_curves(success, [4], eps=0.0)
    drawn = lines(ch09_advantages.draw_difficulty(curves))
    np.testing.assert_array_equal(drawn["$G = 4$"], curves[curves.group_size == 4].weight)
    orders = ch08_reward_side.order_table(PROMPTS, (0.1, 1.0), beta=0.1, group_size=2)
    drawn = lines(ch08_reward_side.draw_effective_beta(orders))
    np.testing.assert_allclose(drawn["KL, then\nleave one out"], 1.0)
    prices = torch.tensor([0.001, 0.1], dtype=torch.float64)
    tokens = torch.tensor([400.0, 100.0], dtype=torch.float64)
    right = ch09_advantages.length_curves(torch.ones(2).double(), tokens, prices)
    drawn = lines(ch09_advantages.draw_lengths({"all right": right, "again": right}))
    assert (drawn["right, 400 tokens"] < 0).all()
    credit = ch09_process_rewards.credit_table(CHAIN, seed=1)
    figure = ch09_process_rewards.draw_prm_credit(credit)
    assert figure.axes[0].get_yticklabels()[0].get_text() == "outcome"
    best = ch09_process_rewards.best_of_n_curves(CHAIN, [1, 4], noise=0.0, seeds=1)
    drawn = lines(ch09_process_rewards.draw_best_of_n({"perfect": best, "again": best}))
    np.testing.assert_array_equal(drawn["last"], best[best.how == "last"].accuracy)
