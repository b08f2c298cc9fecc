from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.records.config import TrainConfig
from analysis.records.metrics import METRICS
from analysis.records.variants import Variant
from analysis.training.metrics import run_mean
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of


def test_run_mean_ignores_what_masked_positions_hold():
    values = torch.tensor([[1.0, 3.0, torch.nan]])
    assert run_mean(values, torch.tensor([[True, True, False]])).tolist() == [2.0]


def test_a_run_logs_every_metric_of_the_glossary_and_no_other(small_config):
    record = PopulationTrainer(small_config, runs_of([Variant()])).run()
    assert set(record.metrics) == set(METRICS)
    assert record.updates.tolist() == [0, 2, 4]
    assert all(values.shape == (3, 1) for values in record.metrics.values())


def test_the_first_update_is_at_the_reference_and_later_ones_are_not(small_config):
    runs = runs_of([Variant(kl=KLTerm(estimator="k3"), beta=0.1)], range(3))
    metrics = PopulationTrainer(small_config, runs).run().metrics
    for name in ("reverse_kl", "forward_kl", "k1", "k2", "k3"):
        np.testing.assert_allclose(metrics[name][0], 0.0, atol=1e-6)
    assert (metrics["reverse_kl"][-1] > 1e-4).all()
    assert (metrics["forward_kl"][-1] > 1e-4).all()
    assert (metrics["length"] <= 4).all() and (metrics["length"] >= 1).all()


def test_on_policy_ratios_are_one_and_stale_ones_are_not(small_config):
    runs = runs_of([Variant()], range(3))
    fresh = PopulationTrainer(small_config, runs).run().metrics
    np.testing.assert_allclose(fresh["ratio_ess"], 1.0, atol=1e-5)
    assert (fresh["clip_fraction"] == 0).all()
    stale_config = small_config.model_copy(update={"num_iterations": 8, "learning_rate": 3e-3})
    stale = PopulationTrainer(stale_config, runs).run().metrics
    assert (stale["ratio_ess"] < 0.999).all()
    assert stale["clip_fraction"].max() > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": "1e-3"}, "learning_rate"),
        ({"group_size": 1}, "group_size"),
        ({"cosine_every": 7}, "cosine_every=7 must be a multiple of log_every=5"),
        ({"num_minibatches": 5}, "num_minibatches=5 must divide num_prompts=12"),
        ({"typo": 1}, "typo"),
        ({"policy": {"width": 32, "num_heads": 3}}, "num_heads=3 must divide width=32"),
    ],
)
def test_a_bad_configuration_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**fields)
