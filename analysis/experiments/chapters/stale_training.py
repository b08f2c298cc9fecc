"""What recorded runs on stale samples say: costs, peaks, and arms at equal cost."""

from __future__ import annotations

import pandas as pd

from analysis.experiments.ablations.ablation import MEMBER_COLUMNS, final
from analysis.experiments.ablations.recording import Recorded
from analysis.training.config import RunConfig

#: A backward pass costs two forward ones.
BACKWARD = 2
#: What the on-policy k2 of a large batch is called beside the other ways.
LARGE_BATCH = "large_batch"


def passes_per_completion(num_iterations: int, *, replay: bool = True) -> int:
    r"""Forward-equivalents of an update per completion that it draws.

    .. math:: \underbrace{1}_{\text{sampling}} + \underbrace{1}_{\text{reference}} +
        \underbrace{2}_{\text{first step}} + 3\, (K - 1)

    The first of :math:`K` steps goes back through the activations that sampling kept; each later
    one computes its own. Without ``replay``, as in trainers that sample with another engine, the
    first one does too, and costs 3. Reading a KL off the logits is counted as nothing.

    Raises:
        ValueError: there is no step.
    """
    if num_iterations < 1:
        raise ValueError(f"num_iterations must be at least 1, got {num_iterations}")
    return 2 + (1 + BACKWARD) * num_iterations - int(replay)


def with_costs(curves: pd.DataFrame, config: RunConfig) -> pd.DataFrame:
    """Curves with what each window had cost at its end.

    Three columns more: ``completions``; ``passes``, forward passes over one completion or their
    equivalents; ``recomputed``, those of a trainer without replay (:func:`passes_per_completion`).
    """
    updates = (curves["update"] + config.log_every).clip(upper=config.updates)
    completions = updates * config.num_prompts * config.group_size
    costs = {
        name: completions * passes_per_completion(config.num_iterations, replay=replay)
        for name, replay in (("passes", True), ("recomputed", False))
    }
    return curves.assign(completions=completions, **costs)


def final_within(
    curves: pd.DataFrame, cost: str, limit: float, *, share: float = 0.2
) -> pd.DataFrame:
    """One row per member: :func:`final` of the windows that end within a cost, arm by arm.

    Arms may have windows of unequal length and cost.

    Raises:
        ValueError: no window of an arm does.
    """
    parts = []
    for (arm, beta), own in curves.groupby(["arm", "beta"], sort=False):
        within = own[own[cost] <= limit]
        if within.empty:
            raise ValueError(
                f"arm {arm!r} at beta={beta:g} has no window within {cost}={limit:g}: "
                f"its first ends at {own[cost].min():g}"
            )
        parts.append(final(within, share=share))
    return pd.concat(parts, ignore_index=True)


def costed_ways(several: Recorded, large: Recorded) -> pd.DataFrame:
    """Curves of the three ways with their costs, the large batches under a name of their own.

    Args:
        several: several optimizer steps a rollout; its own unweighted k2 is left out.
        large: one step on large batches; its runs without a KL term are left out.
    """
    steps, batches = (with_costs(run.curves, run.preset.config) for run in (several, large))
    steps = steps[steps["arm"] != "k2_loss"]
    batches = batches[batches["arm"] == "k2_loss"].assign(arm=LARGE_BATCH)
    return pd.concat([steps, batches], ignore_index=True)


def at_equal_cost(ways: pd.DataFrame, cost: str, beta: float) -> pd.DataFrame:
    """One row per member of one beta: where each way stands when the cheapest run has ended.

    Args:
        ways: of :func:`costed_ways`.
        cost: ``completions``, ``passes`` or ``recomputed``.
        beta: the KL coefficient.
    """
    at_beta = ways[ways["beta"] == beta]
    limit = at_beta.groupby("arm")[cost].max().min()
    return final_within(at_beta, cost, limit)


def peaks(curves: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One row per member: the largest value of a metric in any of its logging windows."""
    return curves.groupby([*MEMBER_COLUMNS], sort=False, as_index=False)[metric].max()
