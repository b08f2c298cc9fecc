"""How long the answers of a preset's starts are, sampled before any training and recorded.

Starts are trained, and another processor's rounding trains slightly other ones, so the book quotes
a recorded table, which is made in a minute by::

    python -c "from analysis.experiments import start_lengths; start_lengths.record()"
"""

from __future__ import annotations

import pandas as pd
import torch

from analysis.experiments import recording
from analysis.experiments.preset import NO_KL, Preset
from analysis.experiments.presets.designed import aggregation_length
from analysis.experiments.recording import record_tables, recorded_table
from analysis.training.config import Run
from analysis.training.trainer import PopulationTrainer

RECORDED = recording.RESULTS / "start_lengths_cpu"
TABLE = "lengths.csv"
#: Prompts of each start.
NUM_PROMPTS = 1000


def sampled(preset: Preset, *, num_prompts: int = NUM_PROMPTS) -> pd.DataFrame:
    """One row per start and length that occurs: ``start``, ``length``, ``completions``."""
    config = preset.config.model_copy(update={"num_prompts": num_prompts, "num_minibatches": 1})
    count = config.start.count
    runs = [Run(variant=NO_KL, seed=number) for number in range(count)]
    lengths = PopulationTrainer(config, runs).rollout(0).rollout.mask.sum(dim=-1).flatten(1)
    rows = [
        {"start": start, "length": length, "completions": times}
        for start in range(count)
        for length, times in enumerate(torch.bincount(lengths[start]).tolist())
        if times
    ]
    return pd.DataFrame(rows)


def record() -> None:
    """Sample the starts of ``aggregation_length`` on one thread and record the table."""
    torch.set_num_threads(1)
    preset = aggregation_length()
    tables = {TABLE: sampled(preset)}
    record_tables(RECORDED, tables, preset.config, preset="start_lengths", of=preset.name)


def recorded() -> pd.DataFrame:
    """Rows of :func:`sampled` as recorded."""
    return recorded_table(RECORDED, TABLE)
