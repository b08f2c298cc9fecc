"""The initial policy of a preset's runs, and its teacher, sampled on many prompts.

The first logging window of a recorded run is no such sample: its mean is over several updates, and
over variants that have begun to part. Starts and teachers are trained, and another processor's
rounding trains slightly other ones, so the book quotes a recorded table, which is made in a minute
by::

    python -c "from analysis.experiments import initial_policy; initial_policy.record()"
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from analysis.checks import check_choice
from analysis.experiments import recording
from analysis.experiments.manifests import write_folder
from analysis.experiments.preset import NO_KL, Preset
from analysis.experiments.provenance import current_provenance
from analysis.experiments.recording import recorded_table
from analysis.training.config import Run
from analysis.training.metrics import rollout_metrics
from analysis.training.trainer import PopulationTrainer
from analysis.training.variants import Sampler, Variant

RECORDED = recording.RESULTS / "untrained_cpu"
TABLE = "untrained.csv"

#: The teacher samples: its rollout says how good it is.
BY_TEACHER = Variant(label="teacher", sampler=Sampler(by="teacher"))

#: Prompts for each start and each teacher.
NUM_PROMPTS = 1000


def sampled(preset: Preset, runs: Sequence[Run], *, num_prompts: int = NUM_PROMPTS) -> pd.DataFrame:
    """The initial policy, as each run's sampler draws from it; of the tiny policy.

    Returns:
        One row per run, in their order: ``accuracy``, ``length`` and the other metrics of
        :func:`~analysis.training.metrics.rollout_metrics`.
    """
    config = preset.config.model_copy(update={"num_prompts": num_prompts, "num_minibatches": 1})
    drawn = PopulationTrainer(config, runs).rollout(0)
    measured = rollout_metrics(drawn.rollout.mask, drawn.scores, drawn.done)
    return pd.DataFrame({name: values.numpy() for name, values in measured.items()})


def starts(preset: Preset, *, num_prompts: int = NUM_PROMPTS) -> pd.DataFrame:
    """The starts of a preset, each by one seed, and its teacher if it has one.

    Returns:
        :func:`sampled` with ``who`` (``start`` or ``teacher``), ``seed`` and ``completions``,
        the number of them that were sampled.
    """
    config = preset.config
    seeds = preset.seeds[: config.start.count]
    runs = {"start": [Run(variant=NO_KL, seed=seed) for seed in seeds]}
    if config.teacher is not None:
        runs["teacher"] = [Run(variant=BY_TEACHER, seed=seeds[0])]
    tables = [
        sampled(preset, those, num_prompts=num_prompts).assign(
            who=who, seed=[run.seed for run in those]
        )
        for who, those in runs.items()
    ]
    together = pd.concat(tables, ignore_index=True)
    return together.assign(completions=num_prompts * config.group_size)


def record(names: Sequence[str] = ()) -> None:
    """Measure recorded presets on one thread and record the table; by default those it holds."""
    torch.set_num_threads(1)
    names = names or list(_table()["preset"].unique())
    presets = {name: recording.load(recording.folder_of(name)).preset for name in names}
    provenance = current_provenance(presets[names[0]].config)
    tables = [starts(preset).assign(preset=name) for name, preset in presets.items()]
    fields = {"preset": "untrained", "seeds": [], **provenance.model_dump()}
    write_folder(RECORDED, {TABLE: pd.concat(tables, ignore_index=True)}, fields)


def recorded(preset: str) -> pd.DataFrame:
    """Recorded rows of :func:`starts` of a preset, after checking them against their manifest.

    Raises:
        ValueError: the table is damaged, or does not hold the preset.
    """
    table = _table()
    check_choice("preset", preset, table["preset"].unique())
    return table[table["preset"] == preset].drop(columns="preset").reset_index(drop=True)


def _table() -> pd.DataFrame:
    return recorded_table(RECORDED, TABLE)
