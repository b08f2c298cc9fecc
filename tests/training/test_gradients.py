"""The gradient from the activations that sampling kept, and when the KL's cosine is measured."""

from __future__ import annotations

import pytest
import torch

from analysis.records.variants import Variant
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of


def test_the_kl_cosine_is_measured_when_asked_for_and_away_from_the_reference(small_config):
    config = small_config.model_copy(update={"precision": "float64", "cosine_every": 2})
    variants = [Variant(), *(Variant(kl=KLTerm(estimator=e), beta=0.7) for e in ("exact", "k1"))]
    trainer = PopulationTrainer(config, runs_of(variants, [3]))
    assert trainer.update(0)["kl_cosine"].isnan().all(), "the policy is the reference"
    assert trainer.update(1)["kl_cosine"].isnan().all(), "not asked for"
    none, exact, k1 = trainer.update(2)["kl_cosine"].tolist()
    assert none != none and exact == pytest.approx(1.0) and abs(k1) < 0.999


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_gradient_from_sampling_is_that_of_a_forward_pass(
    small_config, all_variants, precision
):
    config = small_config.model_copy(update={"precision": precision, "temperature": 0.8})
    trainer = PopulationTrainer(config, runs_of(all_variants, [3]))
    trainer.update(0)
    sampled = trainer.rollout(1)
    batch = trainer.batch(sampled)
    kept, fresh = (
        torch.autograd.grad(trainer.losses(batch, caches=caches).losses.sum(), trainer.weights)[0]
        for caches in (sampled.caches, None)
    )
    assert kept.abs().max() > 1e-3
    atol = {"float32": 1e-5, "float64": 1e-12}[precision]
    assert torch.allclose(kept, fresh, rtol=0, atol=atol)
