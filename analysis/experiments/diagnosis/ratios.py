"""Three policies that should be one: the sampler, the trainer's old policy, the trained policy."""

from __future__ import annotations

import numpy as np
import torch

from analysis.experiments.diagnosis.bootstrap import token_means
from analysis.experiments.diagnosis.schema import Floats, Identity, Interval, Rollouts, Settings
from analysis.kl.estimators import k3
from analysis.kl.importance import effective_sample_size


def off_policy(rollouts: Rollouts, settings: Settings) -> dict[str, float]:
    r"""Staleness (old policy to trained policy) and train-inference gap (sampler to old policy).

    Each is given as a KL per token, :math:`\mathrm{KL}(a \Vert b)` by k3 from a's samples, as an
    effective share of tokens, and as the largest log-ratio. ``sequence_log_ratio_std`` is that of
    the whole sequences' log-ratio to what sampled them: it decides whether a sequence-level weight
    can be used at all.
    """
    found = {}
    if rollouts.has_old_logp:
        found |= _pair("staleness", rollouts.old_logp, rollouts.logp)
        found["clip_fraction"] = _clip_fraction(rollouts, settings)
        found["old_over_policy_mean"] = float(_ratio(rollouts.old_logp - rollouts.logp).mean())
    if rollouts.sampler_logp is not None:
        found |= _pair("mismatch", rollouts.sampler_logp, rollouts.old_logp)
        found |= _pair("total", rollouts.sampler_logp, rollouts.logp)
    log_ratio = rollouts.logp - rollouts.behaviour_logp
    if log_ratio.any() and rollouts.sequences > 1:
        sums = np.bincount(rollouts.sequence, weights=log_ratio)
        found["sequence_log_ratio_std"] = float(sums.std())
        found["sequence_ess"] = _ess(sums)
    return found


def identities(rollouts: Rollouts, settings: Settings) -> list[Identity]:
    r"""Means that are one if the tokens were drawn from the sampler's full distribution.

    .. math:: \mathbb{E}_{a \sim \mu}\big[\pi_{\mathrm{ref}}(a)/\mu(a)\big]
        = \mathbb{E}_{a \sim \mu}\big[\pi_{\mathrm{old}}(a)/\mu(a)\big] = 1

    Below one if the sampler truncates (top-p, top-k). The trained policy's own ratio is one only
    to first order, for it was trained on these very tokens.
    """
    behaviour = rollouts.behaviour_logp
    columns = {"reference/sampler": _ratio(rollouts.ref_logp - behaviour)}
    if rollouts.sampler_logp is not None and (rollouts.old_logp != behaviour).any():
        columns["old/sampler"] = _ratio(rollouts.old_logp - behaviour)
    if rollouts.has_old_logp and (rollouts.logp != rollouts.old_logp).any():
        columns["policy/old"] = _ratio(rollouts.logp - rollouts.old_logp)
    means = token_means(
        columns, rollouts.sequence, resamples=settings.resamples, seed=settings.seed
    )
    return [Identity(ratio=name, mean=mean) for name, mean in means.items()]


def surprise_gap(rollouts: Rollouts, settings: Settings) -> dict[str, Interval]:
    r"""How much more surprising the tokens are than the policy's entropy says (nats).

    .. math:: \mathbb{E}_{a \sim \mu}\Big[\frac{\pi_\theta(a)}{\mu(a)}
        \big(-\log \pi_\theta(a) - H(\pi_\theta)\big)\Big] = 0

    Above zero the sampler was hotter than :math:`\mu` is said to be, below zero it was colder or
    truncated: seen where policy and reference are one, and no ratio shows anything.
    """
    if rollouts.entropy is None:
        return {}
    return token_means(
        {"surprise_gap": -rollouts.logp - rollouts.entropy},
        rollouts.sequence,
        resamples=settings.resamples,
        seed=settings.seed,
        weight=_ratio(rollouts.logp - rollouts.behaviour_logp),
    )


def _ratio(log_ratio: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.exp(log_ratio)


def _pair(name: str, sampled_from: Floats, other: Floats) -> dict[str, float]:
    first, second = torch.from_numpy(sampled_from), torch.from_numpy(other)
    everything = torch.ones_like(first, dtype=torch.bool)
    return {
        f"{name}_kl": k3(first, second).mean().item(),
        f"{name}_ess": effective_sample_size(second, first, everything).item(),
        f"{name}_largest": (second - first).abs().max().item(),
    }


def _ess(log_weights: Floats) -> float:
    weights = torch.from_numpy(log_weights)
    return effective_sample_size(
        weights, torch.zeros_like(weights), torch.ones_like(weights, dtype=torch.bool)
    ).item()


def _clip_fraction(rollouts: Rollouts, settings: Settings) -> float:
    """Share of tokens whose policy gradient the clip removes; both sides without advantages."""
    log_ratio = rollouts.logp - rollouts.old_logp
    high = log_ratio > np.log1p(settings.epsilon_high)
    low = log_ratio < np.log1p(-settings.epsilon_low)
    if rollouts.advantage is not None:
        high &= rollouts.advantage > 0
        low &= rollouts.advantage < 0
    return float((high | low).mean())
