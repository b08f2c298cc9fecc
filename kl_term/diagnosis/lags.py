"""How many updates lie between the weights that drew a token and those that are trained on it."""

from __future__ import annotations

import numpy as np

from kl_term.diagnosis.schema import Measured, Rollouts, Settings, Shown

#: Fewer tokens behind are the end of a rollout, or one late answer.
LEAST_BEHIND = 0.05


def updates_behind(rollouts: Rollouts) -> np.ndarray | None:
    """[N], updates since the weights that drew each token; None where no column says so.

    A column of versions is subtracted from the step. Where trainer and engine begin to count is
    not known, so the freshest token counts as fresh.
    """
    if rollouts.lag is not None:
        return rollouts.lag
    if rollouts.version is None or rollouts.step is None:
        return None
    behind = rollouts.step.astype(np.int64) - rollouts.version
    return behind - behind.min()


def measure_lags(rollouts: Rollouts, settings: Settings) -> dict[str, float]:
    """Share of the tokens that are further behind than the steps on one rollout explain."""
    behind = updates_behind(rollouts)
    return {} if behind is None else {"behind_share": float(_late(behind, settings).mean())}


def _late(behind: np.ndarray, settings: Settings) -> np.ndarray:
    return behind > settings.rollout_steps - 1


def weights_behind(m: Measured) -> Shown | None:
    """Steps on one rollout lie behind by design: what counts is beyond those of the settings."""
    behind = updates_behind(m.rollouts)
    if behind is None:
        return None
    late = _late(behind, m.settings)
    if late.mean() < LEAST_BEHIND:
        return None
    evidence: dict[str, float | int | str] = {
        "share of tokens that are behind": float(late.mean()),
        "mean updates behind": float(behind.mean()),
        "counted from": "zero" if m.rollouts.lag is not None else "the freshest token",
        "KL of sampler to policy, tokens behind": _divergence(m.rollouts, late),
    }
    if not late.all():
        evidence["KL of sampler to policy, others"] = _divergence(m.rollouts, ~late)
    kl = m.settings.kl
    unweighted = kl is not None and kl.placement == "loss" and kl.weighting == "none"
    case = "unknown" if kl is None else "unweighted" if unweighted else "weighted"
    words = {"updates": str(int(behind.max()))}
    return Shown(evidence, "warning" if unweighted else "note", words=words, case=case)


def _divergence(rollouts: Rollouts, chosen: np.ndarray) -> float:
    """Mean of exp(d) - 1 - d with d = log(policy/sampler), over some of the tokens, in nats."""
    moved = (rollouts.logp - rollouts.behaviour_logp)[chosen]
    return float((np.expm1(moved) - moved).mean())
