"""Adapters on a language model: the population beside transformers, in turns, in one process.

A turn is one logging window of updates, so the population also measures what it logs; the yardstick
measures nothing. The device is the machine's first; threads are those of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd
import torch

from analysis.experiments.ablations.settings import setting_of
from analysis.experiments.ablations.stamp import Stamp, current_stamp
from analysis.experiments.benchmark.device import seconds_of
from analysis.experiments.benchmark.measure import median_interval
from analysis.experiments.benchmark.plain_llama import PlainLlamaTrainer
from analysis.experiments.benchmark.worker import members_in_turn
from analysis.experiments.language_models.checkpoints import folder_of, needed
from analysis.experiments.language_models.config import LanguageConfig
from analysis.training.trainer import PopulationTrainer

PLAIN = "transformers"


class LanguageBenchmark(NamedTuple):
    """What the rounds gave."""

    config: LanguageConfig
    rounds: pd.DataFrame  #: round, contender, members, seconds (per member-update)
    stamp: Stamp
    transformers: str  #: the version


def run(
    config: LanguageConfig,
    device: torch.device,
    members: Sequence[int],
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> LanguageBenchmark:
    """Time populations of so many members, and one run on transformers.

    Raises:
        ValueError: the model or a package cannot be had.
    """
    transformers = needed("transformers", "lm")
    stamp, setting = current_stamp(config, device), setting_of(config, device)
    folder = folder_of(config.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=config.dtype)
    plain = PlainLlamaTrainer(model.to(device), config, setting.task, seed=0)
    contenders = {(PLAIN, 1): plain.update}
    for count in members:
        trainer = PopulationTrainer(config, members_in_turn(count), setting)
        contenders["population", count] = trainer.advance
    rows = []
    for number in range(-1, rounds):  # the first does not count
        for (name, count), update in contenders.items():
            say(f"{name}, {count} members: {'warm-up' if number < 0 else f'round {number + 1}'}")
            updates = 1 if number < 0 else config.log_every
            seconds = seconds_of(update, updates, device) / (count * updates)
            row = {"round": number, "contender": name, "members": count, "seconds": seconds}
            rows += [row] if number >= 0 else []
    return LanguageBenchmark(config, pd.DataFrame(rows), stamp, transformers.__version__)


def summary(benchmark: LanguageBenchmark) -> pd.DataFrame:
    """One row per contender and number of members: ``seconds`` per member-update, and ``ratio``,
    how many times as long transformers take, by round, with its 95% interval ``low`` to ``high``.
    """
    wide = benchmark.rounds.pivot(index="round", columns=["contender", "members"], values="seconds")
    rows = []
    for name, count in wide.columns:
        low, ratio, high = median_interval((wide[PLAIN, 1] / wide[name, count]).to_numpy())
        row = {"contender": name, "members": count, "seconds": wide[name, count].median()}
        rows.append(row | {"ratio": ratio, "low": low, "high": high})
    return pd.DataFrame(rows)
