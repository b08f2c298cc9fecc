"""The initial policy of a preset's runs, and its teacher, sampled on many prompts.

The first logging window of a recorded run is no such sample: its mean is over several updates, and
over variants that have begun to part. Starts and teachers are trained, and another processor's
rounding trains slightly other ones, so the book quotes recorded tables, which are made in a minute
by::

    python -c "from analysis.studies import initial_policy; initial_policy.record()"
    python -c "from analysis.studies import initial_policy; initial_policy.record_lengths()"
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from analysis.records import recording
from analysis.records.config import Run
from analysis.records.initial_policy import LENGTHS, RECORDED, TABLE, presets_of_table
from analysis.records.preset import Preset
from analysis.records.variants import Sampler, Variant
from analysis.studies.presets.designed import aggregation_length
from analysis.studies.presets.parts import NO_KL
from analysis.sweeps.record import record_tables
from analysis.training.metrics import rollout_metrics
from analysis.training.sampling import SampledBatch
from analysis.training.trainer import PopulationTrainer

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
    drawn = _drawn(preset, runs, num_prompts)
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
    names = names or presets_of_table()
    presets = {name: recording.load(recording.folder_of(name)).preset for name in names}
    tables = [starts(preset).assign(preset=name) for name, preset in presets.items()]
    table = pd.concat(tables, ignore_index=True)
    record_tables(RECORDED, {TABLE: table}, presets[names[0]].config, preset="untrained")


def lengths(preset: Preset, *, num_prompts: int = NUM_PROMPTS) -> pd.DataFrame:
    """One row per start and length that occurs: ``start``, ``length``, ``completions``."""
    runs = [Run(variant=NO_KL, seed=start) for start in range(preset.config.start.count)]
    drawn = _drawn(preset, runs, num_prompts).rollout.mask.sum(dim=-1).flatten(1)
    rows = [
        {"start": start, "length": length, "completions": times}
        for start, row in enumerate(drawn)
        for length, times in enumerate(torch.bincount(row).tolist())
        if times
    ]
    return pd.DataFrame(rows)


def record_lengths() -> None:
    """Sample the starts of ``aggregation_length`` on one thread and record their lengths."""
    torch.set_num_threads(1)
    preset = aggregation_length()
    tables = {"lengths.csv": lengths(preset)}
    record_tables(LENGTHS, tables, preset.config, preset="start_lengths", of=preset.name)


def _drawn(preset: Preset, runs: Sequence[Run], num_prompts: int) -> SampledBatch:
    """What the runs sample before any training."""
    config = preset.config.model_copy(update={"num_prompts": num_prompts, "num_minibatches": 1})
    return PopulationTrainer(config, runs).rollout(0)
