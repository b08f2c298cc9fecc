"""What members of a preset do before the first update, sampled on many prompts.

The first logging window of a recorded run is no such sample: its mean is over several updates, and
over arms that have begun to part. Starts and teachers are trained, and another processor's rounding
trains slightly other ones, so the book quotes a recorded table, which is made in a minute by::

    python -c "from analysis.experiments.ablations import untrained; untrained.record()"
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from analysis.checks import check_choice
from analysis.experiments.ablations import recording
from analysis.experiments.ablations.folders import read_manifest, read_table, write_folder
from analysis.experiments.ablations.presets import FULL, NO_KL, Preset
from analysis.experiments.ablations.stamp import current_stamp
from analysis.training.arms import Arm, Sampler
from analysis.training.config import Member
from analysis.training.metrics import rollout_metrics
from analysis.training.trainer import PopulationTrainer

RECORDED = recording.RESULTS / "untrained_cpu"
TABLE = "untrained.csv"

#: The teacher samples: its rollout says how good it is.
BY_TEACHER = Arm(label="teacher", sampler=Sampler(by="teacher"))

#: The recorded presets of which a page quotes the start.
QUOTED = (
    "full",
    "starts",
    "near_ties",
    "length_growth",
    "distillation",
    "distillation_sparse",
    "weak_teacher",
    "kdrl",
    "long_to_short",
)
#: Prompts for each start and each teacher.
NUM_PROMPTS = 1000


def untrained(
    preset: Preset, members: Sequence[Member], *, num_prompts: int = NUM_PROMPTS
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


def starts(preset: Preset, *, num_prompts: int = NUM_PROMPTS) -> pd.DataFrame:
    """The starts of a preset, one for each seed where they differ, and its teacher if it has one.

    Returns:
        :func:`untrained` with ``who`` (``start`` or ``teacher``), ``seed`` and ``completions``,
        the number of them that were sampled.
    """
    config = preset.config
    seeds = preset.seeds if config.start.count > 1 else preset.seeds[:1]
    members = {"start": [Member(arm=NO_KL, seed=seed) for seed in seeds]}
    if config.teacher is not None:
        members["teacher"] = [Member(arm=BY_TEACHER, seed=seeds[0])]
    tables = [
        untrained(preset, those, num_prompts=num_prompts).assign(
            who=who, seed=[member.seed for member in those]
        )
        for who, those in members.items()
    ]
    together = pd.concat(tables, ignore_index=True)
    return together.assign(completions=num_prompts * config.group_size)


def record() -> None:
    """Measure the presets of ``QUOTED`` as they were recorded, on one thread; seal the table."""
    torch.set_num_threads(1)
    stamp = current_stamp(FULL.config)
    presets = {name: recording.load(recording.folder_of(name)).preset for name in QUOTED}
    tables = [starts(preset).assign(preset=name) for name, preset in presets.items()]
    fields = {
        "preset": "untrained",
        "seeds": [],
        "device": stamp.device,
        "versions": stamp.versions,
        "source": stamp.source,
    }
    write_folder(RECORDED, {TABLE: pd.concat(tables, ignore_index=True)}, fields)


def recorded(preset: str) -> pd.DataFrame:
    """Recorded rows of :func:`starts` of a preset, after checking them against their manifest.

    Raises:
        ValueError: the table is damaged, or does not hold the preset.
    """
    check_choice("preset", preset, QUOTED)
    read_manifest(RECORDED)
    table = read_table(RECORDED / TABLE)
    return table[table["preset"] == preset].drop(columns="preset").reset_index(drop=True)
