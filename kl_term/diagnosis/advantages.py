"""Advantages of the completions of one prompt, beside each other and beside their rewards.

What is measured from the columns ``group``, ``advantage`` and ``reward``. When it is a fault is
decided in :mod:`kl_term.diagnosis.groups`.
"""

from __future__ import annotations

import numpy as np

from kl_term.diagnosis.groups import CLEAR, FEWEST_GROUPS, FEWEST_SEQUENCES
from kl_term.diagnosis.penalties import measure_penalty
from kl_term.diagnosis.schema import Floats, Rollouts, Settings
from kl_term.diagnosis.statistics import centred, group_means, medians
from kl_term.diagnosis.units import codes, of_first

#: Times the usual group's spread of advantages, and times its ratio to the spread of the rewards:
#: normalised groups agree in the first, centred ones in the second.
APART = 8.0
#: Correlation of an affine function. Rewards that are shaped after they were logged break it, and
#: in groups of two or three may turn the order.
AFFINE, FEWEST_TURNED = 0.99, 4
#: Advantages nearer to the rewards than this, everywhere, are the rewards.
SAME_AS_REWARD = 1e-3
#: Rounding, over the largest of the values, or over one.
ROUNDING = 1e-6


def measure_advantages(rollouts: Rollouts, settings: Settings) -> dict[str, float]:
    """What advantages say that are one a completion; nothing without groups.

    And ``left_out_share``: of the rows that groups of one size would have, those that are missing.
    """
    if rollouts.group is None:
        return {}
    group = groups_of(rollouts)
    rows = np.bincount(group)
    sizes = rows / _times(rollouts, group)
    size = settings.group_size or float(sizes.max())
    missing = (-rows) % int(size)
    found = {"left_out_share": float(missing.sum() / (missing.sum() + rollouts.sequences))}
    if rollouts.advantage is None or settings.in_reward:
        return found
    advantage = rollouts.means(rollouts.advantage)
    if np.abs(rollouts.advantage - advantage[rollouts.sequence]).max() > _rounding(advantage):
        return found  # tokens have advantages of their own
    complete = size <= sizes
    if not complete.any() and (sizes == sizes[0]).all():
        complete = ~complete  # nothing was left out: these are the groups, or what stands for them
    found |= _offsets(advantage, rollouts.lengths, group, complete[group])
    if rollouts.reward is not None:
        reward = rollouts.means(rollouts.reward)
        found |= _beside_rewards(rollouts, group, advantage, reward)
        found |= measure_penalty(rollouts, group, advantage, reward)
    return found


def groups_of(rollouts: Rollouts) -> np.ndarray:
    """[S], the group of each sequence; of groups that return at every step, each step's."""
    group = of_first(rollouts.group, rollouts)
    batch = codes(group, of_first(rollouts.step, rollouts))
    sizes = np.bincount(batch)
    return batch if sizes[0] > 1 and (sizes == sizes[0]).all() else codes(group)


def _times(rollouts: Rollouts, group: np.ndarray) -> Floats:
    """How often each completion of a group returns at later steps; the median of each group."""
    sums = np.round(rollouts.sums(rollouts.old_logp), 3)
    completion = codes(group, rollouts.lengths, sums)
    times = np.bincount(completion)[completion]
    return -medians(-times, group, group.max() + 1)  # the lower one of an even number


def _offsets(
    advantage: Floats, lengths: np.ndarray, group: np.ndarray, kept: np.ndarray
) -> dict[str, float]:
    """The spread of the groups' means, over that of the advantages; and the mean of all.

    And the offset of advantages times the length of their completions, and over it: none where
    advantages that sum to zero were divided by it, or multiplied.
    """
    if kept.sum() < FEWEST_SEQUENCES:
        return {}
    spread, found = _size(advantage), {}
    group, advantage, lengths = codes(group[kept]), advantage[kept], lengths[kept]
    if spread > 0:
        found["group_offset"] = _size(group_means(advantage, group)) / spread
        found["mean_advantage"] = float(advantage.mean() / spread)
    for name, whole in (("by", advantage * lengths), ("over", advantage / lengths)):
        if (spread := _size(whole)) > 0:
            found[f"group_offset_{name}_length"] = _size(group_means(whole, group)) / spread
    return found


def _beside_rewards(
    rollouts: Rollouts, group: np.ndarray, advantage: Floats, reward: Floats
) -> dict[str, float]:
    """How the advantages of each group follow its rewards."""
    ours, theirs = (_standardised(values, group) for values in (advantage, reward))
    found = _scales(advantage, reward, group, rollouts.units.fresh, ours * theirs)
    found["advantage_is_reward"] = float(np.abs(advantage - reward).max() < SAME_AS_REWARD)
    both = (ours != 0) & (theirs != 0)
    if both.sum() >= FEWEST_SEQUENCES:
        ours, theirs, step = ours[both], theirs[both], of_first(rollouts.step, rollouts)[both]
        found["group_correlation"] = float(np.corrcoef(ours, theirs)[0, 1])
        found["group_correlation_sequences"] = float(both.sum())
        found |= _lowest(ours, theirs, step)
    return found


def _standardised(values: Floats, group: np.ndarray) -> Floats:
    """Centred in each group and over its spread; zero where a group has none."""
    spread = _spreads(values, group)[group]
    left = centred(values, group)
    return np.divide(left, spread, out=np.zeros_like(left), where=spread > _rounding(values))


def _lowest(ours: Floats, theirs: Floats, step: np.ndarray) -> dict[str, float]:
    """Their correlation at the step where it is lowest for so many sequences; of means zero."""
    steps, index = np.unique(step, return_inverse=True)
    both, one, other = (
        np.bincount(index, weights=values) for values in (ours * theirs, ours**2, theirs**2)
    )
    low, count = both / np.sqrt(one * other), np.bincount(index)
    bound = np.where(count < FEWEST_SEQUENCES, np.inf, low + CLEAR / np.sqrt(count))
    at = bound.argmin()
    if np.isinf(bound[at]):
        return {}
    return {
        "group_correlation_lowest": float(low[at]),
        "group_correlation_lowest_bound": float(bound[at]),
        "group_correlation_lowest_step": float(steps[at]),
    }


def _scales(
    advantage: Floats, reward: Floats, group: np.ndarray, fresh: np.ndarray, products: Floats
) -> dict[str, float]:
    """Groups whose spread of advantages is far from the usual one, and so over its rewards'.

    Of those that are silenced, or whose advantages are a falling affine function of the rewards,
    each counts once, however many updates see it.

    Args:
        products: of advantages and rewards, standardised.
    """
    ours, theirs = (_spreads(values, group) for values in (advantage, reward))
    told = theirs > _rounding(reward)
    loud = (ours > 0) & told
    if loud.sum() < 2 * FEWEST_GROUPS:
        return {}
    once = np.bincount(group, weights=fresh) > 0
    silent = told & once & (group_means(np.abs(advantage), group) == 0)
    affine = loud & once & (np.bincount(group) >= FEWEST_TURNED)
    correlation = group_means(products, group)[affine]
    spread, slope = (
        values / np.median(values) for values in (ours[loud], ours[loud] / theirs[loud])
    )
    apart = (np.minimum(spread, slope) > APART) | (np.maximum(spread, slope) * APART < 1)
    return {
        "groups_silenced": float(silent.sum()),
        "groups_silenced_share": float(silent.sum() / (told & once).sum()),
        "groups_reversed": float((correlation < -AFFINE).sum()),
        "groups_following": float((correlation > AFFINE).sum()),
        "groups_apart": float(apart.sum()),
        "groups_apart_share": float(apart.mean()),
    }


def _spreads(values: Floats, group: np.ndarray) -> Floats:
    """The standard deviation of each group."""
    return np.sqrt(group_means(centred(values, group) ** 2, group))


def _size(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _rounding(values: Floats) -> float:
    return ROUNDING * max(1.0, float(np.abs(values).max()))
