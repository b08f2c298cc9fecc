"""Populations trained in this process, and what was computed here as a recorded folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from analysis.records.config import Run
from analysis.records.language import PopulationConfig
from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.records.run_record import RunRecord
from analysis.sweeps.memory import runs_that_fit
from analysis.sweeps.provenance import current_provenance
from analysis.sweeps.record import of_records
from analysis.training.environment import Environment
from analysis.training.environment_of import environment_of
from analysis.training.trainer import PopulationTrainer

#: Most runs trained at once. Results do not depend on it; memory and cache use do.
CHUNK = 24


def run(preset: Preset, *, device: torch.device | str = "cpu", progress: bool = False) -> Recording:
    """Train the population of a preset in this process, as many runs at a time as memory holds.

    Raises:
        ValueError: a pretrained model or an optional package of the preset cannot be had.
    """
    provenance = current_provenance(preset.config, device)
    environment = environment_of(preset.config, device)
    records = train(preset.config, preset.runs, environment, progress=progress)
    return of_records(preset, records, provenance)


def train(
    config: PopulationConfig, runs: Sequence[Run], setting: Environment, *, progress: bool = False
) -> list[RunRecord]:
    """Train runs, ``CHUNK`` at a time or as many as memory holds.

    Returns:
        One record per chunk, in the order of ``runs``; its failures name runs by their place
        in the whole.
    """
    chunk = min(CHUNK, runs_that_fit(config, str(setting.start.device)))
    records = []
    for first in range(0, len(runs), chunk):
        trainer = PopulationTrainer(config, runs[first : first + chunk], setting)
        record = trainer.run(progress=progress)
        failures = tuple(f._replace(run=f.run + first) for f in record.failures)
        records.append(record._replace(failures=failures))
    return records
