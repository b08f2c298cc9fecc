"""Rows that hold several sequences one after another, dumped without saying where each ends."""

from __future__ import annotations

import numpy as np

from kl_term.diagnosis.schema import Measured, Rollouts, Shown

#: Share of the rows with several advantages, and of the changes that stand behind an end token.
#: Advantages of tokens change everywhere, and completions that were cut have no end.
MOST_PACKED, BEHIND_AN_END = 0.2, 0.5
#: Fewer changes are chance.
FEWEST_CHANGES = 3


def measure_packed(rollouts: Rollouts) -> dict[str, float]:
    """Share of the rows whose advantage changes inside, and of the changes behind an end token.

    The end is the token in which most rows end.
    """
    if rollouts.token is None or rollouts.advantage is None:
        return {}
    values, times = np.unique(rollouts.token[rollouts.last], return_counts=True)
    end = values[times.argmax()]
    changes = (np.diff(rollouts.sequence) == 0) & (np.diff(rollouts.advantage) != 0)
    count = int(changes.sum())
    if count < FEWEST_CHANGES:
        return {}
    rows = len(np.unique(rollouts.sequence[1:][changes]))
    return {
        "several_advantages_share": rows / rollouts.sequences,
        "changes_behind_an_end": float((rollouts.token[:-1][changes] == end).mean()),
    }


def packed_rows(m: Measured) -> Shown | None:
    """A note: turns that are credited one by one look alike."""
    share, behind = (
        m.numbers.get(name, 0.0) for name in ("several_advantages_share", "changes_behind_an_end")
    )
    if share < MOST_PACKED or behind < BEHIND_AN_END:
        return None
    return Shown(
        {
            "share of rows with several advantages": share,
            "share of the changes that stand behind the usual end token": behind,
        }
    )
