"""Claims about whose samples a method compares with, trains on or routes by."""

from __future__ import annotations

import pandas as pd
import torch

from analysis.experiments.chapters import projection, routing_training
from analysis.experiments.chapters.routing import routing_drift
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import difference
from analysis.experiments.statistics import Interval
from analysis.kl.sequences import enumerate_sequences, sequence_probability
from analysis.objectives.gae import generalised_advantage

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


def _gain_of_replay(noise: float) -> Interval:
    """Exact reward of bandits at the end, replayed minus recomputed, over bandits."""
    options = {"noise": noise, "seeds": range(200, 220), "updates": 24, "states": 16}
    ends = [
        routing_training.train(routing, **options).query("update >= 16")
        for routing in routing_training.ROUTINGS
    ]
    means = pd.concat(ends).groupby(["routing", "seed"], as_index=False)["reward"].mean()
    finals = means.assign(arm=means["routing"], beta=0.0)
    return difference(finals, *routing_training.ROUTINGS, "reward")


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
