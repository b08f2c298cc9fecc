"""A reference that is set to the policy during a run, and one that was copied by mistake.

In the first step after a reset the log-ratios to the reference are rounding, and they grow again
from there. Where the reference's log-probs of one step are the policy's own by a fault, the next
step is where the one before was.
"""

from __future__ import annotations

import numpy as np

from kl_term.diagnosis.schema import Evidence, Measured, Rollouts, Shown

#: Nats: a usual log-ratio before the fall, above what two passes in bfloat16 differ by.
SMALLEST_BEFORE = 0.03
#: By so much the mean size falls from one step to the next. An update moves it by far less, and
#: passes in bfloat16 leave a few thousandths.
SMALLEST_FALL = 10.0
#: Tokens of a step: the mean size of so many does not fall tenfold by chance.
FEWEST_TOKENS = 50
#: The next step over the one before the fall: a policy that starts over is below half of it.
RETURNED = 0.5


def measure_resets(rollouts: Rollouts) -> dict[str, float]:
    """The first step at which the log-ratios to the reference vanish, and where they go next."""
    if rollouts.step is None:
        return {}
    steps, index = np.unique(rollouts.step, return_inverse=True)
    count = np.bincount(index)
    size = np.bincount(index, weights=np.abs(rollouts.logp - rollouts.ref_logp)) / count
    before, after = size[:-1], size[1:]
    fell = (before >= SMALLEST_BEFORE) & (after * SMALLEST_FALL <= before)
    fell &= np.minimum(count[:-1], count[1:]) >= FEWEST_TOKENS
    if not fell.any():
        return {}
    at = int(fell.argmax()) + 1
    found = {"reset_step": float(steps[at]), "reset_from": size[at - 1], "reset_to": size[at]}
    found["resets"] = float(fell.sum())
    later = np.flatnonzero(size[at + 1 :] * SMALLEST_FALL > size[at - 1])
    if len(later):
        found["reset_then"] = float(size[at + 1 + later[0]])
    return {name: float(value) for name, value in found.items()}


def reference_reset(m: Measured) -> Shown | None:
    """One that returns at once to where it was is no reset: a policy starts over from zero."""
    if "reset_step" not in m.numbers:
        return None
    names = {
        "resets": "steps at which they fall",
        "reset_step": "the first",
        "reset_from": "mean size of a log-ratio in the step before",
        "reset_to": "in that step",
        "reset_then": "in the next",
    }
    there = [name for name in names if name in m.numbers]
    evidence: Evidence = {names[name]: m.numbers[name] for name in there}
    then = m.numbers.get("reset_then", 0.0)
    copied = then > RETURNED * m.numbers["reset_from"]
    return Shown(evidence, "warning" if copied else "note", case="copied" if copied else "reset")
