"""What readings and clips do to the KL of stale samples at one state, enumerated: chapter 7."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import random_policies
from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import exact_kl_gradient, expected_gradient, relative_error
from analysis.kl.scores import expected_score
from analysis.kl.truncation import keep_top, masked_logits
from analysis.objectives.merged import kl_coefficient_kept, merged_loss

NO_CLIP = {"epsilon_low": 1.0, "epsilon_high": math.inf}


class StaleStates(NamedTuple):
    """Independent states, one a row: policy, reference, sampler and advantages."""

    logits: Tensor  #: [N, V], the trained policy
    ref_logits: Tensor  #: [N, V], its reference
    old_logits: Tensor  #: [N, V], the policy that sampled
    advantages: Tensor  #: [N, V], of each token: mean 0, variance 1 under the sampler


def stale_states(
    count: int, vocab_size: int, distance: float, *, seed: int, along_advantage: bool = False
) -> StaleStates:
    """Samplers near random references, and policies that have moved on from their samplers.

    Args:
        count: number of states.
        vocab_size: tokens.
        distance: standard deviation of the move on the logits, from the sampler to the policy.
        seed: of references, samplers, rewards and moves.
        along_advantage: move by ``distance`` times the advantage (what maximising the reward
            does) instead of in a random direction.
    """
    ref_logits, shift = random_policies(count, vocab_size, spread=1.0, seed=seed)
    old_logits = ref_logits + shift
    rewards, direction = random_policies(count, vocab_size, spread=1.0, seed=seed + 1)
    advantages = standardised(rewards, old_logits.softmax(-1))
    moved = old_logits + distance * (advantages if along_advantage else direction)
    return StaleStates(moved, ref_logits, old_logits, advantages)


def standardised(values: Tensor, probability: Tensor) -> Tensor:
    """Values minus their mean over their standard deviation, under the probabilities given."""
    mean = (probability * values).sum(-1, keepdim=True)
    variance = (probability * (values - mean).square()).sum(-1, keepdim=True)
    return (values - mean) / variance.sqrt()


def merged_gradient(states: StaleStates, *, beta: float, reading: str, **options) -> Tensor:
    """[N, V]: exact expected *ascent* direction of the merged objective, by autograd.

    ``options`` are those of :func:`analysis.objectives.merged.merged_loss`.
    """
    sampler = states.old_logits.softmax(-1)
    with torch.enable_grad():
        leaf = states.logits.clone().requires_grad_(True)
        loss = merged_loss(
            leaf.log_softmax(-1),
            states.ref_logits.log_softmax(-1),
            states.old_logits.log_softmax(-1),
            states.advantages,
            torch.ones_like(leaf, dtype=torch.bool),
            beta=beta,
            reading=reading,
            **options,
        )
        (gradient,) = torch.autograd.grad((sampler * loss).sum(), leaf)
    return -gradient


def merged_kl_gradient(states: StaleStates, *, reading: str, penalty: str = "k1") -> Tensor:
    """[N, V]: the KL part of the merged objective without clip, as a descent direction."""
    alone = states._replace(advantages=torch.zeros_like(states.advantages))
    return -merged_gradient(alone, beta=1.0, reading=reading, penalty=penalty, **NO_CLIP)


def regularised_gradient(states: StaleStates, *, beta: float) -> Tensor:
    """[N, V]: exact gradient of expected advantage minus beta times the reverse KL, closed form."""
    policy = states.logits.softmax(-1)
    reward = expected_score(states.logits, policy * states.advantages)
    kl = exact_kl_gradient(states.logits, states.ref_logits, direction="reverse")
    return reward - beta * kl


def clipped_kl_gradient(states: StaleStates, *, beta: float, epsilon: float) -> Tensor:
    """[N, V]: what the clip leaves of the KL part of the detached reading."""
    kept = _kept_coefficient(states, beta, epsilon)
    return expected_score(states.logits, states.old_logits.softmax(-1) * kept)


def silenced_mass(states: StaleStates, *, beta: float, epsilon: float) -> pd.DataFrame:
    """Share of the KL's force that the clip removes, for each state.

    A token's force is the probability it is sampled with times the size of its coefficient.
    ``silenced`` is the share at clipped tokens; ``opposing`` the part of it that pointed against
    the token's move since it was sampled, where the KL was pulling back.
    """
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in states[:3])
    force = logp.exp() * (logp - ref_logp)
    lost = (_kept_coefficient(states, beta, epsilon) == 0) & (force != 0)
    against = lost & (force * (logp - old_logp) > 0)
    size = force.abs()
    share = {
        name: (torch.where(where, size, 0.0).sum(-1) / size.sum(-1)).numpy()
        for name, where in (("silenced", lost), ("opposing", against))
    }
    return pd.DataFrame(share)


def _kept_coefficient(states: StaleStates, beta: float, epsilon: float) -> Tensor:
    logits, ref_logits, old_logits, advantages = states
    return kl_coefficient_kept(
        logits.log_softmax(-1),
        ref_logits.log_softmax(-1),
        old_logits.log_softmax(-1),
        advantages,
        torch.ones_like(logits, dtype=torch.bool),
        beta=beta,
        epsilon_low=epsilon,
        epsilon_high=epsilon,
    )


#: The readings of the merged KL: name, reading, penalty.
READINGS = (
    ("old", "old", "k1"),
    ("detached", "detached", "k1"),
    ("attached", "attached", "k1"),
    ("old k3", "old", "k3"),
    ("detached k3", "detached", "k3"),
    ("attached k3", "attached", "k3"),
)


def reading_table(states: StaleStates) -> pd.DataFrame:
    """Median relative error of each reading's KL part against both exact KL gradients, no clip."""
    exact = {
        d: exact_kl_gradient(states.logits, states.ref_logits, direction=d)
        for d in ("reverse", "forward")
    }
    rows = []
    for name, reading, penalty in READINGS:
        gradient = merged_kl_gradient(states, reading=reading, penalty=penalty)
        errors = {
            f"error_{d}": relative_error(gradient, g).median().item() for d, g in exact.items()
        }
        norm = (gradient.norm(dim=-1) / exact["reverse"].norm(dim=-1)).median().item()
        rows.append({"name": name, "reading": reading, "penalty": penalty, **errors, "norm": norm})
    return pd.DataFrame(rows)


def reading_curves(
    distances: Tensor, *, count: int, vocab_size: int, beta: float, epsilon: float, seed: int
) -> pd.DataFrame:
    """Relative error of the KL part against the reverse KL's gradient, as samples age.

    Three readings without clip, and ``clipped``: the detached reading inside the clip, the
    policy moving along the advantage. Staleness is the median KL of sampler from policy (nats).
    """
    rows = []
    for distance in distances.tolist():
        for name in ("old", "detached", "attached", "clipped"):
            states = stale_states(
                count, vocab_size, distance, seed=seed, along_advantage=name == "clipped"
            )
            if name == "clipped":
                gradient = clipped_kl_gradient(states, beta=beta, epsilon=epsilon)
            else:
                gradient = merged_kl_gradient(states, reading=name)
            exact = exact_kl_gradient(states.logits, states.ref_logits, direction="reverse")
            error = relative_error(gradient, exact)
            low, mid, high = (error.quantile(q).item() for q in (0.1, 0.5, 0.9))
            rows.append(
                {"name": name, "staleness": _staleness(states), "p10": low, "median": mid}
                | {"p90": high}
            )
    return pd.DataFrame(rows)


def silenced_curves(
    distances: Tensor,
    betas: tuple[float, ...],
    *,
    count: int,
    vocab_size: int,
    epsilon: float,
    seed: int,
) -> pd.DataFrame:
    """Silenced and opposing share of the KL's force against staleness, moving either way."""
    rows = []
    for along in (True, False):
        for distance in distances.tolist():
            states = stale_states(count, vocab_size, distance, seed=seed, along_advantage=along)
            for beta in betas:
                share = silenced_mass(states, beta=beta, epsilon=epsilon)
                rows.append(
                    {"move": "along the advantage" if along else "random", "beta": beta}
                    | {"staleness": _staleness(states)}
                    | {f"{k}_{q}": share[k].quantile(q / 100) for k in share for q in (10, 50, 90)}
                )
    return pd.DataFrame(rows)


def cut_curves(
    top_ps: Iterable[float], *, count: int, vocab_size: int, distance: float, seed: int
) -> pd.DataFrame:
    """Error of weighted KL terms against the reverse KL's gradient when the sampler cuts its tail.

    The policy is its reference moved by ``distance`` and samples its likeliest tokens only; the
    weight is the true ratio to that sampler. Returns, by ``top_p``, the median ``missing`` mass and
    the 10th, 50th and 90th percentile of the relative error of each term over ``count`` states.
    """
    ref_logits, shift = random_policies(count, vocab_size, spread=1.0, seed=seed)
    logits = ref_logits + distance * shift
    exact = exact_kl_gradient(logits, ref_logits, direction="reverse")
    rows = []
    for top_p in top_ps:
        keep = keep_top(logits, top_p=top_p)
        sampler = masked_logits(logits, keep)
        penalty = torch.where(keep, sampler.log_softmax(-1) - ref_logits.log_softmax(-1), 0.0)
        centred = penalty - (sampler.softmax(-1) * penalty).sum(-1, keepdim=True)
        gradients = {
            estimator: expected_gradient(
                logits, ref_logits, sampler, estimator=estimator, weighting="attached"
            )
            for estimator in ("k1", "k3")
        }
        kept = torch.where(keep, logits.softmax(-1), 0.0)
        gradients["reward"] = expected_score(logits, kept * penalty)
        gradients["baseline"] = expected_score(logits, kept * centred)
        missing = (1 - kept.sum(-1)).median().item()
        for name, gradient in gradients.items():
            error = relative_error(gradient, exact)
            low, median, high = (error.quantile(q).item() for q in (0.1, 0.5, 0.9))
            rows.append(
                {"top_p": top_p, "missing": missing, "name": name}
                | {"p10": low, "median": median, "p90": high}
            )
    return pd.DataFrame(rows)


def _staleness(states: StaleStates) -> float:
    return reverse_kl(states.old_logits, states.logits).median().item()
