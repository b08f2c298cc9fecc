"""The KL to the reference by every estimator, and the ratios of the policies that it involves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kl_term.diagnosis.schema import (
    Floats,
    Identity,
    Interval,
    KLEstimate,
    Rollouts,
    SequenceShare,
    Settings,
)
from kl_term.diagnosis.statistics import BLOCK, sampled_kl, token_means
from kl_term.diagnosis.units import codes
from kl_term.diagnosis.writable import tensor_of
from kl_term.kl.estimators import k2, k3
from kl_term.kl.surrogates import ESTIMATORS, gradient_coefficient

#: verl, OpenRLHF, NeMo-RL and slime clamp the estimator's value here at the snapshots read.
VALUE_CLAMP = 10.0
#: verl and NeMo-RL clamp the log-ratio here before that.
LOG_RATIO_CLAMP = 20.0
#: As many sequences are named in the report.
NAMED_SEQUENCES = 10


def kl_estimates(rollouts: Rollouts, settings: Settings) -> list[KLEstimate]:
    r"""The KL to the reference by every estimator, from up to three readings of the samples.

    ``logged`` averages :math:`k(\pi_\theta / \pi_{\mathrm{ref}})` over the tokens as a trainer
    does; ``sampling`` is the KL of the policy that sampled; ``reweighted`` weighs the tokens with
    :math:`\pi_\theta / \mu` (self-normalised), so that they stand for :math:`\pi_\theta` at the
    visited states.
    """
    readings = {"logged": rollouts.logp}
    if not np.array_equal(rollouts.old_logp, rollouts.logp):
        readings["sampling"] = rollouts.old_logp
    if not np.array_equal(rollouts.behaviour_logp, rollouts.logp):
        readings["reweighted"] = rollouts.logp
    found = []
    for samples, logp in readings.items():
        pair = tensor_of(logp), tensor_of(rollouts.ref_logp)
        means = token_means(
            {name: partial(_values, make, *pair) for name, make in ESTIMATORS.items()},
            rollouts.by_prompt,
            weight=_weight(rollouts) if samples == "reweighted" else None,
            **settings.bootstrap,
        )
        found += [
            KLEstimate(estimator=name, samples=samples, interval=interval)
            for name, interval in means.items()
        ]
    return found


def _values(estimator: Callable[..., Tensor], policy: Tensor, ref: Tensor, block: slice) -> Floats:
    return estimator(policy[block], ref[block]).numpy()


def _weight(rollouts: Rollouts) -> Floats:
    """[N]: policy over sampler, with one for the largest."""
    weight = rollouts.logp - rollouts.behaviour_logp
    weight -= weight.max()
    return np.exp(weight, out=weight)


def coefficient_gap(rollouts: Rollouts) -> dict[str, float]:
    r"""How far k3's gradient coefficients lie from the reverse KL's, over the sampled tokens.

    .. math:: g = \frac{\mathrm{sd}_w(c_3 - c_2)}{\mathrm{sd}_w(c_2)}
        = \frac{\mathrm{sd}_w(k_3)}{\mathrm{sd}_w(k_1)}, \qquad
        c_2 = l, \quad c_3 = 1 - r, \quad w = \pi_\theta / \mu

    Since :math:`c_2 - c_3 = k_3`, the gap is the spread of k3 beside that of k1. Deviations, not
    raw sizes: a constant in a coefficient does not change the expected gradient. It is the relative
    error of the gradient itself only where the score vectors of different tokens are orthogonal and
    equally long; their true geometry needs the model.

    Equation: ``coefficient_gap``

    Returns:
        ``k3_gradient_gap``, ``k3_gradient_correlation`` (of c3 with c2), and
        ``k3_top_percent_share``: how much of the summed squared c3 the top 1% of tokens carry.
    """
    policy, ref = tensor_of(rollouts.logp), tensor_of(rollouts.ref_logp)
    reverse = gradient_coefficient(policy, ref, estimator="k2").numpy()
    forward = gradient_coefficient(policy, ref, estimator="k3").numpy()
    weight = _weight(rollouts)
    weight /= weight.sum()
    with np.errstate(over="ignore", invalid="ignore"):
        reverse = reverse - weight @ reverse
        forward = forward - weight @ forward
        variance = weight @ reverse**2
        if not variance > 0:
            return {}
        squares = weight * forward**2
        total = squares.sum()
        top = max(1, len(squares) // 100)
        found = {
            "k3_gradient_correlation": weight @ (reverse * forward) / np.sqrt(variance * total),
            "k3_top_percent_share": np.partition(squares, -top)[-top:].sum() / total,
        }
        gap = float(np.sqrt(weight @ (forward - reverse) ** 2 / variance))
    return {"k3_gradient_gap": gap} | {
        name: float(value) if total > 0 else 0.0 for name, value in found.items()
    }


def dead_zones(rollouts: Rollouts) -> dict[str, float]:
    """Tokens that a clamp of the estimator's value at 10 leaves without gradient.

    Returns:
        For k2 and k3, ``dead_share_*``: the share of tokens; ``dead_force_*``: the share of the
        summed absolute coefficient that they would have had. ``largest_ratio_over_mean`` of r.
    """
    sampled = rollouts.logp - rollouts.ref_logp
    found = {"largest_ratio_over_mean": len(sampled) / float(np.exp(sampled.min() - sampled).sum())}
    for name, estimator in (("k2", k2), ("k3", k3)):
        share, force, total = 0, 0.0, 0.0
        for start in range(0, len(sampled), BLOCK):
            log_ratio = tensor_of(sampled[start : start + BLOCK])
            zero = torch.zeros_like(log_ratio)
            free = gradient_coefficient(log_ratio, zero, estimator=name).abs()
            dead = (estimator(log_ratio, zero) > VALUE_CLAMP) | (log_ratio.abs() > LOG_RATIO_CLAMP)
            share += dead.sum().item()
            force += free[dead].sum().item()
            total += free.sum().item()
        found[f"dead_share_{name}"] = share / len(sampled)
        found[f"dead_force_{name}"] = force / total if total > 0 else 0.0
    return found


def sequence_shares(rollouts: Rollouts) -> tuple[list[SequenceShare], dict[str, float]]:
    """The sequences with the largest summed k3; shares of the top 1% and of the largest token."""
    policy, ref = tensor_of(rollouts.logp), tensor_of(rollouts.ref_logp)
    values = k3(policy, ref).numpy()
    sums = rollouts.sums(values)
    total = sums.sum()
    if not (np.isfinite(total) and total > 0):
        return [], {}
    order = np.argsort(-sums, kind="stable")
    top = max(1, len(sums) // 100)
    named = [
        SequenceShare(
            sequence=rollouts.sequence_names[i],
            tokens=int(rollouts.lengths[i]),
            kl_sum=float(sums[i]),
            share=float(sums[i] / total),
        )
        for i in order[:NAMED_SEQUENCES]
    ]
    return named, {
        "top_percent_sequences_share": float(sums[order[:top]].sum() / total),
        "k3_largest_token_share": float(values.max() / total),
    }


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
        sums = rollouts.sums(log_ratio)
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
    means = token_means(columns, rollouts.by_completion, **settings.bootstrap)
    return [Identity(ratio=name, mean=mean) for name, mean in means.items()]


def surprise_gap(rollouts: Rollouts, settings: Settings) -> dict[str, Interval]:
    r"""How much more surprising the tokens are than the policy's entropy says (nats).

    .. math:: \mathbb{E}_{a \sim \mu}\Big[\frac{\pi_\theta(a)}{\mu(a)}
        \big(-\log \pi_\theta(a) - H(\pi_\theta)\big)\Big] = 0

    Above zero the sampler was hotter than :math:`\mu` is said to be, below zero it was colder or
    truncated: seen where policy and reference are one, and no ratio shows anything. Of each
    completion its first row counts: later policies were trained on it, and the mean is not zero.

    ``entropy_slope``, that of :math:`-\log \pi_\theta(a)` on H over the same tokens, is one if H is
    the entropy at their states, for given a state the mean of the former is H; it is zero if H is
    that of others, whose mean may be the same. ``first_surprise_gap``: of first
    tokens.
    """
    if rollouts.entropy is None:
        return {}
    fresh = rollouts.units.fresh[rollouts.sequence]
    surprise, entropy = -rollouts.logp[fresh], rollouts.entropy[fresh]
    weight = _ratio((rollouts.logp - rollouts.behaviour_logp)[fresh])
    unit = rollouts.by_completion[fresh]
    found = token_means(
        {"surprise_gap": surprise - entropy}, unit, weight=weight, **settings.bootstrap
    )
    found |= _first_surprise(surprise - entropy, weight, rollouts, settings)
    away = entropy - entropy.mean()
    squares = weight * away**2
    del weight
    if not (np.isfinite(squares).all() and squares.any()):
        return found
    surprise -= entropy.mean()
    del entropy
    slope = np.divide(surprise, away, out=np.zeros_like(away), where=away != 0)
    del surprise, away  # of a million tokens each is eight megabytes
    return found | token_means({"entropy_slope": slope}, unit, weight=squares, **settings.bootstrap)


def _first_surprise(
    gap: Floats, weight: Floats, rollouts: Rollouts, settings: Settings
) -> dict[str, Interval]:
    """The gap over the first tokens alone: what stands before them is the prompt, or should be."""
    fresh = rollouts.units.fresh
    lengths, unit = rollouts.lengths[fresh], codes(rollouts.by_prompt[rollouts.first[fresh]])
    first = np.cumsum(lengths) - lengths
    gaps = {"first_surprise_gap": gap[first]}
    return token_means(gaps, unit, weight=weight[first], **settings.bootstrap)


def _ratio(log_ratio: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.exp(log_ratio)


def _pair(name: str, sampled_from: Floats, other: Floats) -> dict[str, float]:
    log_ratio = other - sampled_from
    return {
        f"{name}_largest": float(max(log_ratio.max(), -log_ratio.min())),
        f"{name}_ess": _ess(log_ratio),
        f"{name}_kl": sampled_kl(log_ratio),
    }


def _ess(log_weights: Floats) -> float:
    """Effective share of the samples."""
    weight = np.exp(log_weights - log_weights.max())
    return float(weight.sum() ** 2 / (len(weight) * (weight @ weight)))


def _clip_fraction(rollouts: Rollouts, settings: Settings) -> float:
    """Share of tokens whose policy gradient the clip removes; both sides without advantages."""
    log_ratio = rollouts.logp - rollouts.old_logp
    if settings.ratio_level == "sequence":
        log_ratio = rollouts.means(log_ratio)[rollouts.sequence]
    high = log_ratio > np.log1p(settings.epsilon_high)
    low = log_ratio < np.log1p(-settings.epsilon_low)
    if rollouts.advantage is not None:
        high &= rollouts.advantage > 0
        low &= rollouts.advantage < 0
    return float((high | low).mean())
