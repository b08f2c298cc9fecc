"""A KL penalty in the advantages, found beside the rewards from which they were made."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kl_term.diagnosis.groups import FEWEST_GROUPS, Sequences, by_sequence, varies
from kl_term.diagnosis.schema import Floats, Measured, Rollouts, Settings, Shown

#: A group of four has one member left after its mean, its rewards and its penalties.
FEWEST_MEMBERS = 4
#: Advantages that follow the rewards to this share of their variance hold nothing else.
FOLLOWED = 1e-6
#: Of what rewards leave of the variance, rounded log-probs leave less with the penalty beside them;
#: by chance a group of five has that little with a probability of a tenth.
EXPLAINED = 1e-2
#: All groups but those whose rewards were clipped or shaped after they were logged.
MOST_GROUPS = 0.8
#: One run has one coefficient: the usual distance of a group's from the median, over it.
ONE_COEFFICIENT = 0.1


def measure_penalty(rollouts: Rollouts, settings: Settings) -> dict[str, float]:
    r"""The coefficient of a penalty on a sequence's KL within advantages of groups.

    .. math:: A_i - \bar A = c_g \big((r_i - \bar r) - \beta (K_i - \bar K)\big), \qquad
        K_i = \sum_t \log \frac{\pi_{old}(y_t)}{\pi_{ref}(y_t)}

    exact in every group, with a scale :math:`c_g` of its own; or K the mean over tokens. By least
    squares, where rewards alone do not explain the advantages and one :math:`\beta` does.
    """
    rows = by_sequence(rollouts)
    if (
        rollouts.group is None
        or settings.in_reward
        or rows.advantage is None
        or rows.reward is None
    ):
        return {}
    if varies(rollouts, rows):
        return {}
    gap = rollouts.old_logp - rollouts.ref_logp
    for penalty in (rollouts.means(gap) * rollouts.lengths, rollouts.means(gap)):
        fitted = np.array(list(_fits(rows, penalty)))
        if len(fitted) < FEWEST_GROUPS:
            continue
        coefficient, explained = fitted.T
        beta = float(np.median(coefficient))
        apart = float(np.median(np.abs(coefficient - beta)))
        if explained.mean() >= MOST_GROUPS and apart < ONE_COEFFICIENT * abs(beta):
            return {"penalty_coefficient": beta, "penalty_groups": float(explained.mean())}
    return {}


def _fits(rows: Sequences, penalty: Floats) -> Iterator[tuple[float, bool]]:
    """Of each group with something to explain: its coefficient, and does it explain that?"""
    order = np.argsort(rows.group, kind="stable")
    ends = np.cumsum(np.bincount(rows.group))[:-1]
    for members in np.split(order, ends):
        if len(members) < FEWEST_MEMBERS:
            continue
        advantage, reward, paid = (
            values[members] - values[members].mean()
            for values in (rows.advantage, rows.reward, penalty)
        )
        if not (advantage.any() and reward.any() and paid.any()):
            continue
        alone = _left(advantage, reward[:, None])
        if alone < FOLLOWED:
            continue
        both = np.stack([reward, paid], axis=1)
        scale, slope = np.linalg.lstsq(both, advantage, rcond=None)[0]
        yield -slope / scale, scale > 0 and _left(advantage, both) < EXPLAINED * alone


def _left(values: Floats, columns: Floats) -> float:
    """Share of the square that least squares on ``columns`` leave."""
    rest = values - columns @ np.linalg.lstsq(columns, values, rcond=None)[0]
    return float(rest @ rest / (values @ values))


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
