"""Claims about whose samples a method compares with, trains on or routes by."""

from __future__ import annotations

import math

import pandas as pd
import torch

from analysis.experiments.chapters import projection, routing_training
from analysis.experiments.chapters.imitation import steps_ratio
from analysis.experiments.chapters.preference import gradient_of
from analysis.experiments.chapters.routing import routing_drift
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import Band, difference
from analysis.kl.enumeration import cosine, reverse_kl_gradient
from analysis.kl.sequences import enumerate_sequences, sequence_probability
from analysis.objectives.gae import generalised_advantage
from analysis.objectives.guidance import annealed, low_reward_mask
from analysis.objectives.imitation import imitation_cost

EXACT = 1e-12


@decides("S1-4")
def ppo_compares_with_a_critic() -> Finding:
    """GAE with an exact critic against Q - V, and against the return of a reference's answers."""
    sequences = enumerate_sequences(2, 3)
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 7, 2, generator=generator, dtype=torch.float64)
    rewards = torch.rand(8, generator=generator, dtype=torch.float64)
    probability = sequence_probability(logits, sequences)
    reference = sequence_probability(ref_logits, sequences) @ rewards
    # values by brute force: conditional means over the sequences that share a prefix
    values, action_values = (
        torch.stack([_conditional_mean(sequences, probability, rewards, t, o) for t in range(3)], 1)
        for o in (0, 1)
    )
    per_token = torch.zeros(8, 3, dtype=torch.float64)
    per_token[:, -1] = rewards
    sampled = generalised_advantage(per_token, values, sequences.mask, lam=1.0)
    mean_at_first = _grouped(sequences.tokens[:, 0], probability, sampled[:, 0])
    exact = _grouped(sequences.tokens[:, 0], probability, (action_values - values)[:, 0])
    figures = {
        "gae_error": (mean_at_first - exact).abs().max().item(),
        "mean_advantage": (probability @ sampled[:, 0]).abs().item(),
        "mean_against_reference": (probability @ (rewards - reference)).item(),
    }
    is_critic = max(figures["gae_error"], figures["mean_advantage"]) < EXACT
    is_reference = abs(figures["mean_against_reference"]) < EXACT
    return Finding(settle(is_reference, not is_critic), figures)


@decides("S3-12")
def compounding_errors() -> Finding:
    """Growth exponent of the exact cost from T = 64 to 128, with and without a way back."""
    error = 1e-4

    def exponent(recovery: float) -> float:
        costs = [imitation_cost(error, horizon, recovery) for horizon in (64, 128)]
        return math.log2(costs[1] / costs[0])

    figures = {
        "exponent_no_way_back": exponent(0.0),
        "exponent_own_states": exponent(1 - error),
        "exponent_half_recovers": exponent(0.5),
        "cost_no_error": imitation_cost(0.0, 128, 0.0),
    }
    quadratic = [figures["exponent_no_way_back"] > 1.9, figures["exponent_half_recovers"] > 1.9]
    return Finding(settle(all(quadratic), any(quadratic)), figures)


@decides("S3-14")
def covering_and_seeking() -> Finding:
    """One Gaussian fitted to two bumps and to two that overlap, in both directions."""
    apart, near = projection.Mixture(), projection.Mixture(means=(-0.4, 0.4))
    forward = projection.fit_gaussian(apart, "forward", 0.0)
    left, right = (projection.fit_gaussian(apart, "reverse", start) for start in (-2.0, 2.0))
    close = [projection.fit_gaussian(near, d, 0.0)["mean"] for d in ("reverse", "forward")]
    figures = {
        "forward_mean": forward["mean"],
        "forward_std": forward["std"],
        "reverse_mean": left["mean"],
        "reverse_std": left["std"],
        "reverse_kl": left["kl"],
        "reverse_other_minimum": right["kl"],
        "overlapping_mean_gap": abs(close[0] - close[1]),
    }
    covers = abs(figures["forward_mean"] + 0.8) < 1e-3 and figures["forward_std"] > 1.5
    seeks = abs(figures["reverse_mean"] + 2) < 0.01 and figures["reverse_std"] < 0.6
    seeks_always = figures["overlapping_mean_gap"] > 0.1
    return Finding(settle(covers and seeks and seeks_always, covers and seeks), figures)


@decides("S3-16")
def annealing_and_masking() -> Finding:
    """The schedule, and what a mask on rewards does to the expected distillation gradient."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    policy, log_ratio = logits.softmax(-1), logits.log_softmax(-1) - teacher.log_softmax(-1)
    mask = low_reward_mask(rewards, 0.5).to(torch.float64)
    scores = torch.eye(6, dtype=torch.float64) - policy
    masked = (policy * mask * log_ratio) @ scores
    masked_value = gradient_of(lambda z: _masked_divergence(z, teacher, mask), logits)
    failing = gradient_of(lambda z: (z.softmax(-1) * mask).sum(), logits)
    figures = {
        "schedule_middle": annealed(5, 10, start=1.0, end=0.0),
        "cosine_with_full_kl": cosine(masked, reverse_kl_gradient(logits, teacher)).item(),
        "decomposition_error": (masked + failing - masked_value).abs().max().item(),
    }
    return Finding("open", figures)


@decides("S3-18")
def distillation_speed() -> Finding:
    """Exact-gradient steps to a success of 0.9, sparse reward over dense teacher, by length."""
    ratios = {length: steps_ratio(length, vocab_size=4) for length in (1, 2, 4)}
    return Finding("open", {f"steps_ratio_length_{n}": ratio for n, ratio in ratios.items()})


@decides("S3-32")
def keep_routing() -> Finding:
    """A tiny top-1 mixture of experts, perturbed: log-probs by replayed and by new routing; and
    bandits trained through one, exact reward, where the sampler's router is noisy or is not."""
    table = routing_drift([1e-4, 1e-3, 1e-2], seeds=4).set_index("size")
    figures = {
        "replayed_at_1e4": table.replayed[1e-4],
        "replayed_at_1e2": table.replayed[1e-2],
        "recomputed_at_1e2": table.recomputed[1e-2],
        "replayed_growth": table.replayed[1e-2] / table.replayed[1e-4],
        "flipped_at_1e2": table.flipped[1e-2],
    }
    for name, noise in (("trained_noisy", 0.3), ("trained_same_router", 0.0)):
        figures |= _gain_of_replay(noise).figures(name)
    linear = 80 < figures["replayed_growth"] < 125
    jumps = figures["recomputed_at_1e2"] > 10 * figures["replayed_at_1e2"]
    return Finding(settle(linear and jumps, False), figures)


def _gain_of_replay(noise: float) -> Band:
    """Exact reward of bandits at the end, replayed minus recomputed, over bandits."""
    options = {"noise": noise, "seeds": range(200, 220), "updates": 24, "states": 16}
    ends = [
        routing_training.train(routing, **options).query("update >= 16")
        for routing in routing_training.ROUTINGS
    ]
    means = pd.concat(ends).groupby(["routing", "seed"], as_index=False)["reward"].mean()
    finals = means.assign(arm=means["routing"], beta=0.0)
    return difference(finals, *routing_training.ROUTINGS, "reward")


def _masked_divergence(logits: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor):
    """Share of the reverse KL on the masked-in outcomes."""
    log_ratio = logits.log_softmax(-1) - teacher.log_softmax(-1)
    return (logits.softmax(-1) * mask * log_ratio).sum()


def _conditional_mean(sequences, probability, rewards, position, own):
    """[N] mean reward over the sequences that share the first ``position + own`` tokens."""
    keep = position + own
    prefix = sequences.tokens[:, :keep]
    same = (prefix[:, None, :] == prefix[None, :, :]).all(-1).to(probability.dtype)
    return (same @ (probability * rewards)) / (same @ probability)


def _grouped(tokens, probability, values):
    """[V] mean of per-sequence values given the first token."""
    member = torch.nn.functional.one_hot(tokens).to(probability.dtype)
    return member.T @ (probability * values) / (member.T @ probability)
