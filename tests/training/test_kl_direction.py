"""Which way each KL term pushes the exact reverse KL when nothing else pushes."""

from __future__ import annotations

import pytest
import torch

from analysis.kl.term import KLTerm
from analysis.training.config import Run, TrainConfig, Variant
from analysis.training.tiny.policy import PolicyConfig
from analysis.training.tiny.tasks import SortTask
from analysis.training.trainer import PopulationTrainer

BETA = 2.0
UPDATES = 40


@pytest.fixture(scope="module")
def change():
    """(variant name, sign of beta) -> relative change of the KL, perturbed start, no reward."""
    config = TrainConfig(
        task=SortTask(num_digits=8),
        policy=PolicyConfig(width=16, num_layers=1, num_heads=2),
        start=TrainConfig().start.model_copy(update={"updates": 0}),
        learning_rate=1e-3,
        num_prompts=6,
        group_size=8,
    )
    variants = [
        Variant(kl=KLTerm(estimator=estimator, placement=placement), beta=sign * BETA)
        for estimator, placement in [
            ("exact", "loss"),
            ("k1", "loss"),
            ("k2", "loss"),
            ("k3", "loss"),
            ("k1", "reward"),
        ]
        for sign in (1, -1)
    ]
    trainer = PopulationTrainer(config, [Run(variant=variant, seed=0) for variant in variants])
    noise = torch.randn(trainer.weights.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trainer.weights += 0.2 * noise
    logged = [trainer.update(update) for update in range(UPDATES)]
    assert all((metrics["reward"] == 0).all() for metrics in logged), "some completion was right"
    kl = torch.stack([metrics["reverse_kl"] for metrics in logged])
    assert kl[0].min() > 0.1
    keys = [(variant.name, int(variant.beta / BETA)) for variant in variants]
    return dict(zip(keys, ((kl[-1] - kl[0]) / kl[0]).tolist(), strict=True))


@pytest.mark.parametrize("variant", ["exact_loss", "k2_loss", "k3_loss", "k1_reward"])
def test_a_kl_term_pulls_back_to_the_reference_and_its_flipped_sign_pushes_away(change, variant):
    assert change[variant, 1] < -0.3
    assert change[variant, -1] > 0.3


def test_k1_as_a_loss_does_not_pull_back(change):
    """Its expected gradient is zero: what is left is noise."""
    assert change["k1_loss", 1] > -0.1
