"""A KL penalty in the advantages, found beside the rewards from which they were made."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np

from kl_term.diagnosis.schema import Floats, Measured, Rollouts, Shown
from kl_term.diagnosis.statistics import centred

#: A group of four has one member left after its mean, its rewards and its penalties; and one
#: coefficient of two groups may be chance.
FEWEST_MEMBERS, FEWEST_GROUPS = 4, 3
#: Advantages that follow the rewards to this share of their variance hold nothing else.
FOLLOWED = 1e-6
#: Rewards and penalties of a group that are nearly proportional cannot be told apart.
ONE_LINE = 1e-6
#: Of what rewards leave of the variance, rounded log-probs leave less with the penalty beside them;
#: by chance a group of five has that little with a probability of a tenth.
EXPLAINED = 1e-2
#: All groups but those whose rewards were clipped or shaped after they were logged.
MOST_GROUPS = 0.8
#: One run has one coefficient: the usual distance of a group's from the median, over it.
ONE_COEFFICIENT = 0.1


def measure_penalty(
    rollouts: Rollouts, group: np.ndarray, advantage: Floats, reward: Floats
) -> dict[str, float]:
    r"""The coefficient of a penalty on a sequence's KL within advantages of groups.

    .. math:: A_i - \bar A = c_g \big((r_i - \bar r) - \beta (K_i - \bar K)\big), \qquad
        K_i = \sum_t \log \frac{\pi_{old}(y_t)}{\pi_{ref}(y_t)}

    exact in every group, with a scale :math:`c_g` of its own; or K the mean over tokens. By least
    squares, where rewards alone do not explain the advantages and one :math:`\beta` does.

    Args:
        rollouts: their old and reference log-probs.
        group, advantage, reward: [S], of each sequence; the groups are numbered from 0.
    """
    gap = rollouts.old_logp - rollouts.ref_logp
    for penalty in (rollouts.means(gap) * rollouts.lengths, rollouts.means(gap)):
        coefficient, explained = _fits(group, advantage, reward, penalty)
        if len(coefficient) < FEWEST_GROUPS:
            continue
        beta = float(np.median(coefficient))
        apart = float(np.median(np.abs(coefficient - beta)))
        if explained.mean() >= MOST_GROUPS and apart < ONE_COEFFICIENT * abs(beta):
            return {"penalty_coefficient": beta, "penalty_groups": float(explained.mean())}
    return {}


def _fits(group: np.ndarray, *columns: Floats) -> tuple[Floats, np.ndarray]:
    """Of each group with something to explain: its coefficient, and does it explain that?

    Two normal equations a group; those whose rewards and penalties are of one line are left out.

    Args:
        group: [S], numbers from 0.
        columns: advantages, rewards and penalties, [S] each.
    """
    size = np.bincount(group)
    left = [centred(values, group) for values in columns]
    aa, ar, ap, rr, rp, pp = (  # of advantages, rewards and penalties
        np.bincount(group, weights=one * other)
        for one, other in combinations_with_replacement(left, 2)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        area = rr * pp - rp**2
        scale, slope = (ar * pp - ap * rp) / area, (ap * rr - ar * rp) / area
        alone = 1 - ar**2 / (rr * aa)
        both = 1 - (scale * ar + slope * ap) / aa
        told = (size >= FEWEST_MEMBERS) & (area > ONE_LINE * rr * pp) & (alone > FOLLOWED)
        coefficient = -slope / scale
    return coefficient[told], ((both < EXPLAINED * alone) & (scale > 0))[told]


def penalised_twice(m: Measured) -> Shown | None:
    beta, kl = m.numbers.get("penalty_coefficient"), m.settings.kl
    if beta is None or (kl is not None and kl.placement == "reward"):
        return None
    known = kl is not None and kl.estimator != "none"
    return Shown(
        {
            "coefficient of the KL in the reward": beta,
            "share of groups that it explains": m.numbers["penalty_groups"],
        },
        "error" if known else "note",
        case="twice" if known else "once",
    )
