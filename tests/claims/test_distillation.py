"""Claims about teachers: simulations beside the exact values, and bands beside their rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.experiments.ablations.costs import Ratio
from analysis.experiments.chapters.imitation import steps_ratio
from analysis.experiments.claims import distillation as claims
from analysis.experiments.claims.recorded import recorded
from analysis.experiments.statistics import Interval
from analysis.objectives.imitation import imitation_cost


def mean_over_seeds(preset: str, arm: str, metric: str) -> float:
    """A cruder statistic than the claim's: the plain mean of the last two windows."""
    curves = recorded(preset).curves
    last = sorted(curves["update"].unique())[-2:]
    chosen = curves[(curves["arm"] == arm) & curves["update"].isin(last)]
    return float(chosen[metric].mean())


def test_compounding_errors():
    found = claims.compounding_errors()
    assert found.verdict == "holds if"
    generator = torch.Generator().manual_seed(0)
    off, cost = torch.zeros(200_000), torch.zeros(200_000)
    for _ in range(20):
        errs = (torch.rand(off.shape, generator=generator) < 0.02).float()
        off = torch.where(off > 0, off, errs)
        cost = cost + off
    assert cost.mean().item() == pytest.approx(imitation_cost(0.02, 20, 0.0), rel=0.02)
    crude = [mean_over_seeds("distillation", a, "own_accuracy") for a in ("supervised", "k2_loss")]
    assert found.figures["trained"] == pytest.approx(crude[0] - crude[1], abs=0.01)


def test_annealing_and_masking():
    found = claims.annealing_and_masking()
    assert found.figures["decomposition_error"] < 1e-12
    assert found.figures["cosine_with_full_kl"] < 0.9
    assert found.verdict == "holds if"
    for name in ("masked", "annealed"):
        arms = (f"kdrl_{name}", "kdrl_k2")
        crude = [mean_over_seeds("kdrl_fresh", arm, "own_length") for arm in arms]
        assert found.figures[f"{name}_length"] == pytest.approx(crude[0] - crude[1], abs=0.1)


@pytest.mark.parametrize(
    ("length", "accuracy", "expected"),
    [
        (Interval(-0.3, -0.5, -0.1), Interval(0.02, 0.0, 0.04), True),
        (Interval(-0.3, -0.7, 0.1), Interval(0.02, 0.0, 0.04), False),  # not surely shorter
        (Interval(-0.3, -0.5, -0.1), Interval(-0.1, -0.15, -0.05), False),  # bought with accuracy
        (Interval(0.3, 0.1, 0.5), Interval(0.02, 0.0, 0.04), False),
    ],
)
def test_shorter_at_equal_accuracy_is_read_off_whole_bands(length, accuracy, expected):
    assert claims.shorter_at_equal_accuracy(length, accuracy) is expected


def test_distillation_speed():
    found = claims.distillation_speed()
    assert found.figures["steps_ratio_length_1"] < found.figures["steps_ratio_length_4"]
    assert steps_ratio(3, vocab_size=4) > steps_ratio(2, vocab_size=4)
    assert found.verdict == "holds if"
    assert found.figures["easy"] < found.figures["sparse"]
    # a teacher of equal size makes four passes of three
    assert found.figures["easy_flops"] == pytest.approx(0.75 * found.figures["easy"])


def test_a_factor_is_reached_when_the_band_or_the_bound_allows_it():
    assert not claims.reaches(Ratio(1.2, 1.0, 1.4, 0, 0, 10), 7.0)
    assert claims.reaches(Ratio(5.0, 3.0, 8.0, 0, 0, 10), 7.0)
    assert claims.reaches(Ratio(5.0, 4.0, 6.0, 6, 0, 10), 7.0)  # most seeds: only a lower bound


@pytest.mark.parametrize("name", ["distillation", "distillation_sparse", "kdrl"])
def test_seeds_are_enough_and_those_that_decide_are_other_ones(name):
    first, fresh = recorded(name), recorded(f"{name}_fresh")
    seeds = [np.unique(part.finals["seed"]) for part in (first, fresh)]
    assert all(len(part) >= 10 and part.min() >= 3000 for part in seeds)
    assert not set(seeds[0]) & set(seeds[1])
    same = first.preset.model_copy(update={"seeds": fresh.preset.seeds})
    assert fresh.preset == same, "nothing but the seeds differs"
