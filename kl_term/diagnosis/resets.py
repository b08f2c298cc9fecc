"""A reference that is set to the policy during a run, and one that was copied by mistake.

In the first step after a reset the log-ratios to the reference are rounding, and they grow again
from there. Where the reference's log-probs of one step are the policy's own by a fault, the next
step is where the one before was. Where they are the policy's own from there on, nothing grows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kl_term.diagnosis.schema import Evidence, Floats, Measured, Rollouts, Shown

#: Nats: a usual log-ratio before the fall, above what two passes in bfloat16 differ by.
SMALLEST_BEFORE = 0.03
#: By so much the mean size falls from one step to the next. An update moves it by far less, and
#: passes in bfloat16 leave a few thousandths.
SMALLEST_FALL = 10.0
#: Tokens of a step: the mean size of so many does not fall tenfold by chance.
FEWEST_TOKENS = 50
#: The next step over the one before the fall: a policy that starts over is below it, if it had so
#: many steps to get there. One that had fewer may be as far again after one.
RETURNED, FEWEST_STEPS = 0.75, 3
#: Steps whose reference is the policy to every digit, the last of the dump among them. After a
#: reset the next update makes it another.
FEWEST_SAME = 3


class Fall(NamedTuple):
    """A step at which the log-ratios vanish. Mean sizes of a log-ratio, in nats."""

    at: int  #: place of the step
    before: float  #: in the step before
    within: float  #: in this one
    after: float | None  #: in the first step in which they no longer are; None = in none
    steps: float  #: since they vanished the last time; infinite where the dump does not show it

    @property
    def copied(self) -> bool:
        """Does it return at once to where it was? A policy starts over from zero."""
        back = self.after is not None and self.after > RETURNED * self.before
        return back and self.steps >= FEWEST_STEPS


def measure_resets(rollouts: Rollouts) -> dict[str, float]:
    """The first step at which the log-ratios to the reference vanish, and where they go next.

    A step that no reset explains comes before one that a reset does.
    """
    if rollouts.step is None:
        return {}
    steps, index = np.unique(rollouts.step, return_inverse=True)
    count = np.bincount(index)
    apart = np.abs(rollouts.logp - rollouts.ref_logp)
    size = np.bincount(index, weights=apart) / count
    falls = _falls(size, count)
    if not falls:
        return {}
    same = np.bincount(index, weights=apart == 0) == count
    kept = len(same) - int(np.append(np.flatnonzero(~same), -1).max()) - 1  # at the end
    stuck = falls[-1].after is None and kept >= FEWEST_SAME
    copied = next((fall for fall in falls if fall.copied), None)
    told = copied or (falls[-1] if stuck else falls[0])
    found = {"resets": len(falls), "reset_step": steps[told.at]}
    found |= {"reset_from": told.before, "reset_to": told.within}
    if told.after is not None:
        found["reset_then"] = told.after
    if copied is not None:
        found["reset_copied"] = 1.0
    elif stuck:
        found["reset_kept"] = kept
    return {name: float(value) for name, value in found.items()}


def _falls(size: Floats, count: np.ndarray) -> list[Fall]:
    """Of the mean sizes [steps], of so many tokens each."""
    fell = (size[:-1] >= SMALLEST_BEFORE) & (size[1:] * SMALLEST_FALL <= size[:-1])
    fell &= np.minimum(count[:-1], count[1:]) >= FEWEST_TOKENS
    places = np.flatnonzero(fell) + 1
    spaces = np.diff(places)
    falls = []
    for number, at in enumerate(places):
        gone = size * SMALLEST_FALL <= size[at - 1]
        earlier = np.flatnonzero(gone[:at])
        later = np.flatnonzero(~gone[at:])
        if len(earlier):
            steps = float(at - 1 - earlier[-1])
        else:  # a dump that begins between two resets
            steps = float(spaces[number] - 1) if number < len(spaces) else np.inf
        after = float(size[at + later[0]]) if len(later) else None
        falls.append(Fall(int(at), float(size[at - 1]), float(size[at]), after, steps))
    return falls


def reference_reset(m: Measured) -> Shown | None:
    """A reset is a note; what no reset explains is a warning."""
    if "reset_step" not in m.numbers:
        return None
    names = {
        "resets": "steps at which they fall",
        "reset_step": "the first",
        "reset_from": "mean size of a log-ratio in the step before",
        "reset_to": "in that step",
        "reset_then": "in the next",
        "reset_kept": "steps at the end that are the policy itself",
    }
    case = "reset"
    if "reset_copied" in m.numbers:
        case, names["reset_step"] = "copied", "the first without a new start"
    elif "reset_kept" in m.numbers:
        case, names["reset_step"] = "kept", "the last"
    evidence: Evidence = {
        words: m.numbers[name] for name, words in names.items() if name in m.numbers
    }
    return Shown(evidence, "note" if case == "reset" else "warning", case=case)
