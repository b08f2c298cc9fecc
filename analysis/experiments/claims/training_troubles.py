"""What GRPO is said to suffer from, decided by recorded runs of the tiny policy."""

from __future__ import annotations

import pandas as pd
import torch

from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import difference, recorded
from analysis.experiments.statistics import Interval, interval
from analysis.objectives.advantages import group_normalise

#: Below this share of what a start had, entropy counts as collapsed.
COLLAPSED = 0.5


def over_training(curves: pd.DataFrame, arm: str, metric: str, *, ratio: bool = False) -> Interval:
    """Last logging window less the first, or over it, of one arm: per seed, then the interval."""
    wide = curves[curves["arm"] == arm].pivot(index="seed", columns="update", values=metric)
    first, last = wide.iloc[:, 0], wide.iloc[:, -1]
    change = last / first if ratio else last - first
    return Interval(*map(float, interval(change.to_numpy())))


@decides("S1-13")
def instabilities() -> Finding:
    """Recorded runs: entropy left with the plain clip, what reward noise costs, what collapses.

    What needs no training beside it: how far noise alone drives a group in which nothing differs.
    """
    generator = torch.Generator().manual_seed(0)
    noise = 1e-3 * torch.randn(4096, 8, generator=generator, dtype=torch.float64)
    right_and_wrong = (torch.rand(4096, 8, generator=generator) < 0.5).to(torch.float64)
    clips, ties = recorded("clip_higher"), recorded("near_ties")
    entropy = over_training(clips.curves, "symmetric", "entropy", ratio=True)
    plain = over_training(ties.curves, "group_std", "accuracy")
    noisy = over_training(ties.curves, "group_std_noisy", "accuracy")
    cost = difference(ties.finals, "group_std_noisy", "group_std", "accuracy")
    floored = difference(ties.finals, "std_min_noisy", "std_min", "accuracy")
    figures = {
        "advantage_of_noise": group_normalise(1 + noise).abs().mean().item(),
        "advantage_of_signal": group_normalise(right_and_wrong).abs().mean().item(),
        "advantage_of_noise_clipped": group_normalise(1 + noise, std_min=0.1).abs().mean().item(),
        **entropy.figures("entropy_left"),
        **cost.figures("noise_cost"),
        **floored.figures("noise_cost_floored"),
        **plain.figures("accuracy_change"),
        **noisy.figures("accuracy_change_noisy"),
    }
    collapses, suffers = entropy.high < COLLAPSED, cost.below
    always_unstable, unstable_with_noise = plain.below, noisy.below
    return Finding(
        settle(
            collapses and suffers and always_unstable, collapses or suffers or unstable_with_noise
        ),
        figures,
    )
