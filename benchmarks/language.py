"""Adapters on a language model: the population beside transformers, in turns, in one process.

A turn is one logging window of updates, so the population also measures what it logs; the baseline
measures nothing. The device is the machine's first; threads are those of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
import torch

from analysis.chapters.ch12_performance import TRANSFORMERS
from analysis.records.language import LanguageConfig
from analysis.training.environment_of import environment_of
from analysis.training.precision import dtype_of
from analysis.training.pretrained.folders import folder_of, needed
from analysis.training.trainer import PopulationTrainer
from benchmarks.device import seconds_of
from benchmarks.plain_transformers import PlainLlamaTrainer
from benchmarks.worker import runs_in_turn


def run(
    config: LanguageConfig,
    device: torch.device,
    runs: Sequence[int],
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """Time populations of so many ``runs``, and one run on transformers; each turn is said.

    One row a turn: round, trainer, runs, seconds (per run-update).

    Raises:
        ValueError: the model or a package cannot be had.
    """
    updates = _updates(config, device, runs)
    rows = []
    for number in range(-1, rounds):  # the first warms up, with one update each
        say(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
        for (name, count), update in updates.items():
            say(f"{name}, {count} runs")
            calls = config.log_every if number >= 0 else 1
            seconds = seconds_of(update, calls, device) / (count * calls)
            rows.append({"round": number, "trainer": name, "runs": count, "seconds": seconds})
    return pd.DataFrame(rows).query("round >= 0").reset_index(drop=True)


def _updates(
    config: LanguageConfig, device: torch.device, runs: Sequence[int]
) -> dict[tuple[str, int], Callable[[], object]]:
    """By name and number of runs, what trains one update."""
    setting = environment_of(config, device)
    transformers = needed("transformers", "lm")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder_of(config.model), dtype=dtype_of(config)
    )
    plain = PlainLlamaTrainer(model.to(device), config, setting.task, seed=0)
    populations = {
        ("population", count): PopulationTrainer(config, runs_in_turn(count), setting).advance
        for count in runs
    }
    return {(TRANSFORMERS, 1): plain.update, **populations}
