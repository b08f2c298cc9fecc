"""What recorded runs on stale and mismatched samples say, and bandits behind experts.

The bandits are trained here, through a mixture of experts whose sampler routes a little otherwise:
the inference engine's router sees other rounding than the trainer's, so near a tie it picks another
expert. Either the trainer replays the experts that sampled, or it routes again by itself.
"""

from __future__ import annotations

import pandas as pd

from analysis.evidence.recorded import recorded
from analysis.evidence.routed_bandits import ROUTINGS
from analysis.evidence.stale_training import final_within
from analysis.records.summaries import paired

# --- The recorded runs and what they are called -----------------------------------------------

RUNS = (
    "staleness",
    "stale_coefficients",
    "stale_weighted_k3",
    "three_ways",
    "three_ways_half_step",
    "three_ways_on_policy",
    "stale_masking",
    "mismatch",
    "partial_rollouts",
    "stale_starts",
)
#: The losses that the figure of ages is about.
TOLD_OF_AGE = ("none", "k2", "exact")
#: Age of the oldest samples of ``staleness``, in updates; beta of most comparisons.
OLDEST, BETA = 16, 0.3


# --- What the recorded runs cost --------------------------------------------------------------


def budgets() -> pd.DataFrame:
    """Partial rollouts less whole ones in accuracy, at equal ``updates`` and decoding ``steps``."""
    run = recorded("partial_rollouts")
    config = run.preset.config
    # Decoding steps of an update that follow one another.
    each = {v.name: v.sampler.budget or config.task.completion_length for v in run.preset.variants}
    ended = run.curves["update"] + config.log_every
    curves = run.curves.assign(steps=ended * run.curves["variant"].map(each))
    parts = []
    for budget in (8, 4):
        every, last = f"budget_{budget}_all", f"budget_{budget}_current"
        whole = [(every, "whole", "accuracy")]
        kept = curves[curves["variant"].isin((every, "whole"))]
        within = final_within(kept, "steps", budget * config.updates)
        at_updates = paired(run.finals, [*whole, (last, every, "accuracy")])
        parts += [at_updates.assign(at="updates"), paired(within, whole).assign(at="steps")]
    return pd.concat(parts, ignore_index=True)


# --- Bandits behind a mixture of experts ------------------------------------------------------


def gains_of_replay(curves: pd.DataFrame, *, last: int = 10) -> pd.DataFrame:
    """Replayed less recomputed reward over the ``last`` updates, by noise of the sampler's router.

    Of :func:`~analysis.evidence.routed_bandits.train_bandits`, all noises and both routings.
    One row per ``noise``: the columns of
    :func:`analysis.records.summaries.paired`, and of the recomputed runs ``flipped`` and
    ``ess``.
    """
    late = curves[curves["update"] > curves["update"].max() - last]
    ends = late.groupby(["noise", "variant", "seed"], as_index=False).mean()
    rows = []
    for noise, own in ends.groupby("noise"):
        means = own.loc[own["variant"] == "recomputed", ["flipped", "ess"]].mean()
        found = paired(own, [(*ROUTINGS, "reward")])
        rows.append(found.assign(noise=noise, **means))
    return pd.concat(rows, ignore_index=True)
