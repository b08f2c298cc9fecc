"""A population with KL terms over the likeliest tokens."""

from __future__ import annotations

import torch

from analysis.records.variants import Variant
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of


def test_a_population_trains_it(small_config) -> None:
    """Over all tokens to the rounding of the full term, over two not."""
    config = small_config.model_copy(update={"precision": "float64", "updates": 3})
    sizes = {name: {"top_k": k} for name, k in (("all", 16), ("two", 2))}
    variants = [
        Variant(label=name, kl=KLTerm(estimator="exact", **size), beta=2.0)
        for name, size in ({"full": {}} | sizes).items()
    ]
    trainer = PopulationTrainer(config, runs_of(variants))
    trainer.run()
    full, whole, two = trainer.weights
    torch.testing.assert_close(full, whole, rtol=0, atol=1e-9)
    assert (full - two).abs().max() > 1e-4
