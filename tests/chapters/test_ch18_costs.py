"""What thresholds cost, on curves and configurations small enough to count by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from analysis.chapters import ch18_distillation as costs
from analysis.experiments.preset import NO_KL, Preset
from analysis.kl.term import KLTerm
from analysis.training.config import TeacherConfig, TrainConfig
from analysis.training.counting import forward_flops, run_update
from analysis.training.tiny.policy import PolicyConfig
from analysis.training.variants import Distillation, Objective, Sampler, Variant

LARGE = PolicyConfig(width=64)
TAUGHT = Variant(label="taught", distillation=Distillation())
CONFIG = TrainConfig(updates=40, log_every=10, teacher=TeacherConfig(policy=LARGE))


def curves(values: dict[tuple[str, int], list[float]]) -> pd.DataFrame:
    return pd.DataFrame(
        {"variant": variant, "seed": seed, "update": 10 * place, "accuracy": value}
        for (variant, seed), row in values.items()
        for place, value in enumerate(row)
    )


@pytest.fixture
def spent() -> pd.DataFrame:
    preset = Preset(name="p", config=CONFIG, variants=(NO_KL, TAUGHT), seeds=(0, 1), predictions=())
    table = curves(
        {
            ("none", 0): [0.1, 0.2, 0.4, 0.5],
            ("none", 1): [0.1, 0.1, 0.1, 0.1],
            ("taught", 0): [0.1, 0.5, 0.6, 0.7],
            ("taught", 1): [0.3, 0.2, 0.2, 0.2],
        }
    )
    return costs.crossings(table, preset, "accuracy", 0.3)


def test_a_broken_line_is_crossed_between_its_points():
    places = np.array([5.0, 15.0, 25.0])
    assert costs.first_crossing(places, np.array([0.0, 0.25, 0.5]), 0.4) == pytest.approx(21.0)
    assert costs.first_crossing(places, np.array([0.9, 0.1, 0.9]), 0.4) == 5.0
    assert costs.first_crossing(places, np.array([0.0, 0.4, 0.2]), 0.4) == pytest.approx(15.0)
    assert math.isinf(costs.first_crossing(places, np.array([0.0, 0.1, 0.2]), 0.4))


def test_runs_are_charged_until_they_get_there_or_for_the_whole_run(spent):
    assert spent["updates"].tolist() == pytest.approx([20.0, 40.0, 10.0, 5.0])
    assert spent["reached"].tolist() == [True, False, True, True]


def test_ratios_are_taken_seed_by_seed(spent):
    ratio = costs.cost_ratio(spent, "none", "taught", "updates")
    assert ratio.mean == pytest.approx(math.sqrt(20 / 10 * 40 / 5))
    assert ratio.high == math.inf, "one side never got there: what it would cost is not known"
    assert (ratio.missed, ratio.other_missed, ratio.seeds) == (1, 0, 2)
    with pytest.raises(ValueError, match="unit"):
        costs.cost_ratio(spent, "none", "taught", "seconds")
    with pytest.raises(ValueError, match="no variant 'x'"):
        costs.cost_ratio(spent, "x", "taught", "updates")


def test_each_variant_is_charged_with_the_passes_that_it_needs():
    own = forward_flops(CONFIG)
    large = forward_flops(CONFIG.model_copy(update={"policy": LARGE}))
    assert own == 12 * 2 * (2 * (8192 * 56 + 64 * (36 + 6 * 100)) + 32 * 16 * 48)  # by hand
    assert run_update(CONFIG).flops == 4 * own

    def flops(**parts):
        return costs.update_flops(CONFIG, Variant(**({"kl": KLTerm(estimator="none")} | parts)))

    assert flops() == 3 * own  # sampling, and a backward pass of two
    assert flops(distillation=Distillation()) == 3 * own + large
    cloning = Distillation(kl=KLTerm(estimator="cross_entropy"))
    assert flops(sampler=Sampler(by="teacher"), distillation=cloning) == 3 * own + large
    assert flops(objective=Objective(kind="dpo")) == 4 * own
    assert flops(kl=KLTerm(estimator="k2"), beta=0.1) == 4 * own
    assert flops(sampler=Sampler(staleness=2)) == 4 * own


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="needs a teacher"):
        costs.update_flops(TrainConfig(), TAUGHT)
    with pytest.raises(ValueError, match="num_iterations"):
        costs.update_flops(TrainConfig(num_iterations=2), NO_KL)
