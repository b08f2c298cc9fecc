"""Claims on surrogate objectives: the dropped state ratio, and what the PPO clip bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import drifted_logits, random_tables
from analysis.experiments.chapters.sequence_ratios import clip_curves, random_returns, slope
from analysis.experiments.chapters.sequences import EXACT, SPREAD, flat_error, quantile
from analysis.experiments.claims import Finding, decides, settle
from analysis.kl.credit import advantage_table
from analysis.kl.ratio_objectives import (
    performance_difference,
    ratio_objective_gradient,
    token_surrogate,
)
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    sequence_probability,
    state_visits,
)

SIZES = (0.005, 0.01, 0.02, 0.04)  #: steps over which an order is measured
ORDER = 0.1  #: how near a measured slope must come to a whole order


def _advantages(logits: Tensor, sequences: Sequences, returns: Tensor) -> Tensor:
    whole = returns[:, None].expand(sequences.mask.shape)
    return advantage_table(whole, logits, sequences)


@decides("S4-46")
def token_ratio_surrogate() -> Finding:
    """The surrogate with dropped state ratio against the exact improvement, on full supports.

    The referee is the difference of two mean returns; the performance-difference lemma, which
    keeps the state ratio, is checked beside it.
    """
    sequences, one_token = enumerate_sequences(3, 4, eos=2), enumerate_sequences(3, 1)
    value, gradient = [], []
    lemma = single = largest = 0.0
    for size in (*SIZES, 0.5):
        values, gradients = [], []
        for index, old in enumerate(random_tables(sequences, 3, 8, spread=SPREAD, seed=121).logits):
            returns = random_returns(sequences, seed=index)
            logits = drifted_logits(old, torch.tensor([size]), seed=index)[0]
            gain, promised, kept, error = _improvement(logits, old, sequences, returns)
            values.append(abs(promised - gain))
            gradients.append(error)
            lemma = max(lemma, abs(kept - gain))
            if size == 0.5:
                largest = max(largest, abs(promised - gain) / abs(gain))
            bandit = _improvement(logits[:1], old[:1], one_token, returns[:3])
            single = max(single, abs(bandit[1] - bandit[0]))
        value.append(quantile(values))
        gradient.append(quantile(gradients))
    figures = {
        "lemma_error": lemma,
        "one_token_error": single,
        "value_order": slope(SIZES, value[:-1]),
        "gradient_order": slope(SIZES, gradient[:-1]),
        "gradient_error": gradient[-1],
        "largest_value_error": largest,
    }
    referee_agrees = max(lemma, single) < EXACT
    biased = figures["gradient_error"] > EXACT and abs(figures["value_order"] - 2) < ORDER
    return Finding("fails" if referee_agrees and biased else "holds", figures)


def _improvement(
    logits: Tensor, old: Tensor, sequences: Sequences, returns: Tensor
) -> tuple[float, float, float, float]:
    """Exact gain, gain promised by the surrogate and by the lemma, error of the gradient."""
    change = sequence_probability(logits, sequences) - sequence_probability(old, sequences)
    advantages = _advantages(old, sequences, returns)
    leaf = logits.clone().requires_grad_(True)
    promised = token_surrogate(leaf, old, sequences, advantages)
    (gradient,) = torch.autograd.grad(promised, leaf)
    exact = ratio_objective_gradient(logits, old, sequences, returns)
    kept = performance_difference(logits, old, sequences, advantages)
    return (
        (change @ returns).item(),
        promised.item(),
        kept.item(),
        flat_error(gradient, exact),
    )


@decides("S4-xd")
def two_approximations() -> Finding:
    """Orders at which state distribution and advantages leave the sampler's, and their depth."""
    sequences = enumerate_sequences(2, 7)
    depth = torch.zeros(sequences.num_states, dtype=torch.long)
    depth[sequences.states] = torch.arange(7).expand(sequences.states.shape)
    tables = random_tables(sequences, 2, 8, spread=SPREAD, seed=131)
    state, advantage, shallow, deep = [], [], [], []
    for size in SIZES:
        states, advantages = [], []
        for index, old in enumerate(tables.logits):
            returns = random_returns(sequences, seed=index)
            logits = drifted_logits(old, torch.tensor([size]), seed=index)[0]
            visits, moved_visits = (state_visits(x, sequences) for x in (old, logits))
            gap = (moved_visits - visits).abs()
            states.append(gap.sum().item())
            shallow.append(gap[depth == 1].sum().item())
            deep.append(gap[depth == 6].sum().item())
            before, after = (_advantages(x, sequences, returns) for x in (old, logits))
            advantages.append((after - before).norm().item())
        state.append(quantile(states))
        advantage.append(quantile(advantages))
    figures = {
        "state_order": slope(SIZES, state),
        "advantage_order": slope(SIZES, advantage),
        "depth_growth": sum(deep) / sum(shallow),
    }
    first_order = all(abs(figures[f"{k}_order"] - 1) < ORDER for k in ("state", "advantage"))
    uniform = figures["depth_growth"] < 1 + ORDER
    return Finding(settle(first_order and uniform, first_order), figures)


@decides("S4-48")
def ppo_clip() -> Finding:
    """Slope of the clipped objective in all four corners, and where one ascent step ends.

    The slope is autograd through the loss; the step is taken on a policy over eight tokens.
    """
    ratios = torch.tensor([0.5, 1.5, 100.0], dtype=torch.float64)
    good, bad = (clip_curves(sign, ratios).coefficient.tolist() for sign in (1.0, -1.0))
    ratio_after = _ratio_after_a_step(step=5.0)
    figures = {
        "good_above": good[1],
        "bad_below": bad[0],
        "good_below": good[0],
        "bad_above": bad[1],
        "bad_far_above": bad[2],
        "ratio_after_a_step": ratio_after[0],
        "pull_back": ratio_after[1],
    }
    incentive_ends = figures["good_above"] == figures["bad_below"] == 0.0
    bounded = abs(figures["bad_far_above"]) <= 1.2 and figures["ratio_after_a_step"] <= 1.2
    return Finding(settle(incentive_ends and bounded, incentive_ends), figures)


def _ratio_after_a_step(step: float) -> tuple[float, float]:
    """Ratio of one token with positive advantage after one ascent step, and the slope there."""
    logits = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)[0]
    (gradient,) = torch.autograd.grad((logp - logp.detach()).exp(), logits)
    moved = (logits + step * gradient).detach().log_softmax(-1)[0]
    ratio = (moved - logp.detach()).exp()
    return ratio.item(), clip_curves(1.0, ratio[None]).coefficient.item()


@decides("S1-xt")
def ratio_alone_limits_nothing() -> Finding:
    """Slope of the unclipped ratio objective by the log-prob, at the sampler and far from it.

    A limit would make it fall as the ratio grows; it is the ratio times the advantage.
    """
    ratios = torch.tensor([1.0, 3.0], dtype=torch.float64)
    clipped = clip_curves(1.0, ratios, epsilon=1.0).coefficient.tolist()  # to [0, 2]
    unlimited = ratios.log().requires_grad_(True)
    (slopes,) = torch.autograd.grad(unlimited.exp().sum(), unlimited)
    figures = {
        "slope_at_one": clipped[0],
        "slope_at_three": slopes[1].item(),
        "slope_at_three_clipped": clipped[1],
    }
    limits = figures["slope_at_three"] <= figures["slope_at_one"]
    return Finding("holds" if limits else "fails", figures)
