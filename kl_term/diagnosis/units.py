"""What was drawn anew: which rows are one completion, and which completions answer one prompt.

A completion that is trained on at eight steps stands in a dump eight times, and is one observation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from kl_term.diagnosis.schema import Rollouts


class Units(NamedTuple):
    """By sequence of a dump, [S]; codes from 0."""

    completion: np.ndarray  #: equal for rows of one completion, at several steps
    prompt: np.ndarray  #: equal for completions drawn for one prompt; else as ``completion``
    fresh: np.ndarray  #: is it the first row of its completion, before it was trained on?


def find_units(rollouts: Rollouts) -> Units:
    """The units of a dump: by its columns of groups, tokens, steps and the sampler's log-probs.

    Rows are one completion if they agree in group, tokens and the log-probs of what sampled them,
    at different steps; where old_logp is logp itself, which moves, in group and tokens. Where the
    same numbers of groups return with every rollout, they are taken
    for numbers within it: completions of one group at other steps are of another prompt.
    """
    first = rollouts.first
    step = of_first(rollouts.step, rollouts)
    keys = [rollouts.lengths]
    keys += [] if rollouts.group is None else [rollouts.group[first]]
    keys += [] if rollouts.token is None else [hashed(rollouts.token, rollouts)]
    named = rollouts.group is not None and rollouts.token is not None
    again = rollouts.sampler_logp is None and np.array_equal(rollouts.old_logp, rollouts.logp)
    if not (named and again):
        keys.append(hashed(rollouts.behaviour_logp.view(np.int64), rollouts))
    alike = codes(*keys)
    completion = codes(alike, _rank(codes(alike, step)))
    begin = where_least(completion, step)
    fresh = np.zeros(len(first), bool)
    fresh[begin] = True
    if rollouts.group is None:
        return Units(completion, completion, fresh)
    group, rollout = rollouts.group[first], step[begin][completion]
    if _renumbered(group[fresh], rollout[fresh]):
        group = codes(group, rollout)
    return Units(completion, codes(group), fresh)


def codes(*columns: np.ndarray) -> np.ndarray:
    """[S]: numbers from 0 of the distinct rows of columns [S], in ascending order."""
    values = np.stack(columns)
    order = np.lexsort(values[::-1])
    sorted_values = values[:, order]
    changes = (np.diff(sorted_values) != 0).any(0)
    found = np.empty(values.shape[1], np.int64)
    found[order] = np.concatenate([[0], np.cumsum(changes)])
    return found


def where_least(code: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Where the least value of each code stands; the codes run from 0, and none is missing."""
    order = np.lexsort((values, code))
    return order[np.diff(code[order], prepend=-1) > 0]


def of_first(column: np.ndarray | None, rollouts: Rollouts) -> np.ndarray:
    """[S], a column at each sequence's first token; zeros where it is not dumped."""
    if column is None:
        return np.zeros(rollouts.sequences, np.int64)
    return column[rollouts.first].astype(np.int64)


def hashed(values: np.ndarray, rollouts: Rollouts) -> np.ndarray:
    """[S]: sums of values times a power of an odd number that the place in the sequence gives."""
    place = np.arange(rollouts.tokens) - np.repeat(rollouts.first, rollouts.lengths)
    factor = np.cumprod(np.full(int(rollouts.lengths.max()), 6364136223846793005, np.uint64))
    with np.errstate(over="ignore"):
        products = (values.astype(np.int64).view(np.uint64) >> np.uint64(3)) * factor[place]
        products ^= products >> np.uint64(29)
        return np.add.reduceat(products, rollouts.first).view(np.int64)


def _rank(batch: np.ndarray) -> np.ndarray:
    """[S]: how many rows of the same batch stand before each."""
    order = np.argsort(batch, kind="stable")
    size = np.bincount(batch)
    rank = np.empty(len(batch), np.int64)
    rank[order] = np.arange(len(batch)) - np.repeat(np.cumsum(size) - size, size)
    return rank


def _renumbered(group: np.ndarray, rollout: np.ndarray) -> bool:
    """Do all of several rollouts have the same numbers of groups?"""
    pairs = np.unique(np.stack([rollout, group]), axis=1)
    rollouts, numbers = len(np.unique(rollout)), len(np.unique(group))
    return rollouts > 1 and pairs.shape[1] == rollouts * numbers
