"""What the importance weight is worth to k3 on stale samples, along equal KL."""

from __future__ import annotations

from analysis.evidence.recorded import recorded_runs
from analysis.records import designs


def weighted_at_equal_kl() -> dict[str, float]:
    """Weighted less plain k3 in own accuracy at equal KL, by the loss that has weighted k3's
    gradient sample by sample: k2 under the detached ratio. Chosen after the runs."""
    run = recorded_runs("stale_coefficients")
    terms = ("k2_detached_loss", "k3_loss")
    fit = designs.at_equal_kl(run.finals, *terms, designs.starts_of(run.preset), "own_accuracy")
    return fit.difference(run.preset.design.margin)
