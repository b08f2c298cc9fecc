"""How many updates lie between the weights that drew a token and those that are trained on it."""

from __future__ import annotations

import numpy as np

from kl_term.diagnosis.conditions.policies import LARGEST_MISMATCH_KL, MOST_REPEATED, SAME_POLICY
from kl_term.diagnosis.schema import Evidence, Measured, Rollouts, Settings, Shown
from kl_term.diagnosis.statistics import sampled_kl
from kl_term.diagnosis.units import codes, hashed, where_least

#: Fewer tokens behind are the end of a rollout, or one late answer.
LEAST_BEHIND = 0.05
#: Share of a step's completions that stood at an earlier one; a cut batch loses a few.
RETURNED = 0.9
#: Nats: the log-prob of a completion that hardly could be another moves by less than is written.
CERTAIN = -1.0


def updates_behind(rollouts: Rollouts) -> np.ndarray | None:
    """[N], updates since the weights that drew each token; None where no column says so.

    A column of versions is subtracted from the step, times the steps that lie between two of them:
    engines count what they were sent, once for all steps on a rollout. Where trainer and engine
    begin to count is not known, so the freshest token counts as fresh.
    """
    if rollouts.lag is not None:
        return rollouts.lag
    if rollouts.version is None or rollouts.step is None:
        return None
    behind = rollouts.step - steps_of_a_version(rollouts) * rollouts.version.astype(np.int64)
    return behind - behind.min()


def steps_of_a_version(rollouts: Rollouts) -> int:
    """Usual number of steps from the first token of one version to the first of the next."""
    if rollouts.version is None or rollouts.step is None:
        return 1
    steps, index = np.unique(rollouts.step, return_inverse=True)
    newest = np.full(len(steps), np.iinfo(np.int64).min)
    np.maximum.at(newest, index, rollouts.version)
    at = np.flatnonzero(np.diff(np.maximum.accumulate(newest)) > 0) + 1
    if len(at) < 2:
        return 1
    rises = np.diff(newest[at])
    return max(1, round(float(np.median(np.diff(steps[at]) / np.maximum(rises, 1)))))


def measure_lags(rollouts: Rollouts, settings: Settings) -> dict[str, float]:
    """Share of the tokens that are further behind than the steps on one rollout explain.

    And ``mismatch_kl_ahead``, the KL of sampler to old policy over the others, in nats.
    """
    behind = updates_behind(rollouts)
    if behind is None:
        return {}
    late = _late(behind, rollouts, settings)
    found = {"behind_share": float(late.mean())}
    if rollouts.sampler_logp is not None and not late.all():
        move = np.minimum(rollouts.old_logp - rollouts.sampler_logp, 50.0)[~late]
        found["mismatch_kl_ahead"] = sampled_kl(move)
    return found


def rescored_steps(rollouts: Rollouts) -> dict[str, float]:
    """Steps at which an earlier batch is trained on again, and those where old_logp is new there.

    By groups and tokens, since an old_logp that moves tells nothing of what was drawn anew. All
    completions of such a step stood at earlier ones: not by chance, unless the sampler is greedy.
    The ratio of a completion is one at all its tokens, and not for their certainty.

    Returns:
        ``returning_steps``; ``rescored_steps``, those of them in which it is one for a fifth of the
        completions; ``rescored_share``, of all completions of such steps.
    """
    group, token, step = rollouts.group, rollouts.token, rollouts.step
    if group is None or token is None or step is None or not rollouts.has_old_logp:
        return {}
    first = rollouts.first
    alike = codes(rollouts.lengths, group[first], hashed(token, rollouts))
    index = codes(step[first])
    begin = index[where_least(alike, index)]
    moved = rollouts.sums((np.abs(rollouts.logp - rollouts.old_logp) >= SAME_POLICY) * 1.0)
    same = (moved == 0) & (rollouts.sums(rollouts.old_logp) < CERTAIN)
    size = np.bincount(index)
    again = np.bincount(index, weights=index > begin[alike]) >= RETURNED * size
    equal = np.bincount(index, weights=same)
    return {
        "returning_steps": float(again.sum()),
        "rescored_steps": float((again & (equal >= MOST_REPEATED * size)).sum()),
        "rescored_share": float(equal[again].sum() / max(1, size[again].sum())),
    }


def _late(behind: np.ndarray, rollouts: Rollouts, settings: Settings) -> np.ndarray:
    own = 1 if rollouts.lag is not None else steps_of_a_version(rollouts)
    return behind > max(settings.rollout_steps, own) - 1


def weights_behind(m: Measured) -> Shown | None:
    """Steps on one rollout lie behind by design: what counts is beyond those of the settings.

    Where ``old_logp`` is a later policy's, its ratio corrects nothing of what lies before.
    """
    behind = updates_behind(m.rollouts)
    if behind is None:
        return None
    late = _late(behind, m.rollouts, m.settings)
    if late.mean() < LEAST_BEHIND:
        return None
    moved = m.rollouts.logp - m.rollouts.behaviour_logp
    evidence: Evidence = {
        "share of tokens that are behind": float(late.mean()),
        "mean updates behind": float(behind.mean()),
        "counted from": "zero" if m.rollouts.lag is not None else "the freshest token",
        "KL of sampler to policy, tokens behind": sampled_kl(moved[late]),
    }
    if not late.all():
        evidence["KL of sampler to policy, others"] = sampled_kl(moved[~late])
    kl = m.settings.kl
    unweighted = kl is not None and kl.placement == "loss" and kl.weighting == "none"
    case = "unknown" if kl is None else "unweighted" if unweighted else "weighted"
    words = {"updates": str(int(behind.max()))}
    apart = m.numbers.get("mismatch_kl", 0.0)
    if apart > LARGEST_MISMATCH_KL:
        evidence["KL of sampler to old policy"] = apart
        return Shown(evidence, "warning", words=words, case="later")
    return Shown(evidence, "warning" if unweighted else "note", words=words, case=case)
