"""What a straight-through loss trains as."""

from __future__ import annotations

import torch

from analysis.records.config import Run
from analysis.studies.presets import make_preset
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm


def shown_is_trained(updates: int) -> bool:
    """Does k2 that is logged as k3 end at the weights of plain k2, to the bit?"""
    preset = make_preset("kl_axes", {})
    first = preset.config.start.model_copy(update={"count": 1})  # that of seed 0, and no other
    shown = next(each for each in preset.variants if each.name == "k2_loss_shows_k3")
    plain = shown.model_copy(update={"label": "", "kl": KLTerm(estimator="k2")})
    runs = [Run(variant=variant, seed=0) for variant in (shown, plain)]
    trainer = PopulationTrainer(preset.config.model_copy(update={"start": first}), runs)
    for _ in range(updates):
        trainer.advance()
    return torch.equal(trainer.weights[0], trainer.weights[1])
