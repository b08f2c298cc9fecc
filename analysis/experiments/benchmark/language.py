"""Adapters on a language model: the population beside transformers, in turns, in one process.

A turn is one logging window of updates, so the population also measures what it logs; the yardstick
measures nothing. The device is the machine's first; threads are those of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch

from analysis.experiments.ablations.settings import setting_of
from analysis.experiments.ablations.stamp import Stamp, current_stamp
from analysis.experiments.benchmark.device import seconds_of
from analysis.experiments.benchmark.journal import Journal, Unwritten
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
    journal: Journal | None = None,
) -> LanguageBenchmark:
    """Time populations of so many members, and one run on transformers.

    Args:
        config: of a member.
        device: all run on it.
        members: one population each.
        rounds: turns of each contender.
        say: hears of each turn.
        journal: keeps each finished round; rounds that it holds are not measured again.

    Raises:
        ValueError: the model or a package cannot be had.
    """
    journal = Unwritten() if journal is None else journal
    transformers = needed("transformers", "lm")
    stamp = current_stamp(config, device)
    journal.begin(stamp, (config, tuple(members), transformers.__version__))
    names = [f"round {number + 1}" for number in range(rounds)]
    updates: dict[tuple[str, int], Callable[[], object]] = {}
    if any(not journal.holds(name) for name in names):
        updates = _contenders(config, device, members)
        _turns(updates, 1, device, partial(_heard, say, "warm-up"))
    rows = []
    for number, name in enumerate(names):
        if journal.holds(name):
            say(f"{name} (kept)")
        turns = partial(_turns, updates, config.log_every, device, partial(_heard, say, name))
        rows += [{"round": number} | row for row in journal.part(name, turns)]
    return LanguageBenchmark(config, pd.DataFrame(rows), stamp, transformers.__version__)


def _contenders(
    config: LanguageConfig, device: torch.device, members: Sequence[int]
) -> dict[tuple[str, int], Callable[[], object]]:
    """By name and number of members, what trains one update."""
    setting = setting_of(config, device)
    transformers = needed("transformers", "lm")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder_of(config.model), dtype=config.dtype
    )
    plain = PlainLlamaTrainer(model.to(device), config, setting.task, seed=0)
    populations = {
        ("population", count): PopulationTrainer(config, members_in_turn(count), setting).advance
        for count in members
    }
    return {(PLAIN, 1): plain.update, **populations}


def _turns(
    updates: dict[tuple[str, int], Callable[[], object]],
    count: int,
    device: torch.device,
    say: Callable[[str], None],
) -> list[dict[str, object]]:
    """Everyone's turn of so many updates."""
    rows = []
    for (name, members), update in updates.items():
        say(f"{name}, {members} members")
        seconds = seconds_of(update, count, device) / (members * count)
        rows.append({"contender": name, "members": members, "seconds": seconds})
    return rows


def _heard(say: Callable[[str], None], turn: str, text: str) -> None:
    say(f"{text}: {turn}")


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
