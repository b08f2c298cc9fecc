"""What members of a preset do before the first update, sampled on many prompts.

The first logging window of a recorded run is no such sample: its mean is over several updates, and
over arms that have begun to part.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.experiments.ablations.presets import NO_KL, Preset
from analysis.training.config import Member
from analysis.training.metrics import rollout_metrics
from analysis.training.trainer import PopulationTrainer


def untrained(
    preset: Preset, members: Sequence[Member], *, num_prompts: int = 1000
) -> pd.DataFrame:
    """The untrained policy, as each member's sampler draws from it; of the tiny policy.

    Returns:
        One row per member, in their order: ``accuracy``, ``length`` and the other metrics of
        :func:`~analysis.training.metrics.rollout_metrics`.
    """
    config = preset.config.model_copy(update={"num_prompts": num_prompts, "num_minibatches": 1})
    drawn = PopulationTrainer(config, members).rollout(0)
    measured = rollout_metrics(drawn.rollout.mask, drawn.scores, drawn.done)
    return pd.DataFrame({name: values.numpy() for name, values in measured.items()})


def starts(preset: Preset, *, num_prompts: int = 1000) -> pd.DataFrame:
    """:func:`untrained` for each seed of a preset, whose starts may differ."""
    members = [Member(arm=NO_KL, seed=seed) for seed in preset.seeds]
    return untrained(preset, members, num_prompts=num_prompts).assign(seed=preset.seeds)
