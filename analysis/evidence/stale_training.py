"""Training on stale samples: ways to use a batch at an equal cost, and the weight on k3.

Several steps on a batch beside one on a larger batch; weighted beside plain k3 along equal KL.
"""

from __future__ import annotations

import pandas as pd

from analysis.evidence.names.off_policy import LARGE_BATCH
from analysis.evidence.recorded import difference, recorded, recorded_runs
from analysis.records import designs
from analysis.records.config import RunConfig
from analysis.records.recording import Recording
from analysis.records.statistics import Interval
from analysis.records.tidy import final

#: Of both ways.
BETA = 0.3


def passes_per_completion(num_iterations: int) -> int:
    r"""Forward-equivalents of an update per completion that it draws.

    .. math:: \underbrace{1}_{\text{sampling}} + \underbrace{1}_{\text{reference}} +
        \underbrace{2}_{\text{first step}} + 3\, (K - 1)

    The first of :math:`K` steps goes back through the activations that sampling kept; each later
    one computes its own. A backward pass costs two forward ones; reading a KL off the logits is
    counted as nothing.

    Raises:
        ValueError: there is no step.
    """
    if num_iterations < 1:
        raise ValueError(f"num_iterations must be at least 1, got {num_iterations}")
    return 4 + 3 * (num_iterations - 1)


def with_costs(curves: pd.DataFrame, config: RunConfig) -> pd.DataFrame:
    """Curves with what each window had cost at its end.

    Two columns more: ``completions``; ``passes``, forward passes over one completion or their
    equivalents (:func:`passes_per_completion`).
    """
    updates = (curves["update"] + config.log_every).clip(upper=config.updates)
    completions = updates * config.num_prompts * config.group_size
    passes = completions * passes_per_completion(config.num_iterations)
    return curves.assign(completions=completions, passes=passes)


def final_within(
    curves: pd.DataFrame, cost: str, limit: float, *, share: float = 0.2
) -> pd.DataFrame:
    """One row per run: ``final`` of the windows that end within a cost, variant by variant.

    Variants may have windows of unequal length and cost.

    Raises:
        ValueError: no window of a variant does.
    """
    parts = []
    for (variant, beta), own in curves.groupby(["variant", "beta"], sort=False):
        within = own[own[cost] <= limit]
        if within.empty:
            raise ValueError(
                f"variant {variant!r} at beta={beta:g} has no window within {cost}={limit:g}: "
                f"its first ends at {own[cost].min():g}"
            )
        parts.append(final(within, share=share))
    return pd.concat(parts, ignore_index=True)


def at_equal_cost(several: Recording, large: Recording, cost: str) -> pd.DataFrame:
    """One row per run at :data:`BETA`: where each way stands when the cheapest has ended.

    Of several steps a rollout the unweighted k2 is left out; that of large batches is called
    :data:`LARGE_BATCH`. The cost is ``completions`` or ``passes``.
    """
    steps, batches = (with_costs(run.curves, run.preset.config) for run in (several, large))
    batches = batches[batches["variant"] == "k2_loss"].assign(variant=LARGE_BATCH)
    ways = pd.concat([steps[steps["variant"] != "k2_loss"], batches])
    ways = ways[ways["beta"] == BETA]
    return final_within(ways, cost, ways.groupby("variant")[cost].max().min())


def less_large_batches(variant: str, cost: str) -> Interval:
    """At the better step size: a variant less k2 on large batches in accuracy, at an equal cost."""
    ended = at_equal_cost(recorded("three_ways_half_step"), recorded("three_ways_on_policy"), cost)
    return difference(ended, variant, LARGE_BATCH, "accuracy")


def weighted_at_equal_kl() -> dict[str, float]:
    """Weighted less plain k3 in own accuracy at equal KL, by the loss that has weighted k3's
    gradient sample by sample: k2 under the detached ratio. Chosen after the runs."""
    run = recorded_runs("stale_coefficients")
    terms = ("k2_detached_loss", "k3_loss")
    fit = designs.at_equal_kl(run.finals, *terms, designs.starts_of(run.preset), "own_accuracy")
    return fit.difference(run.preset.design.margin)
