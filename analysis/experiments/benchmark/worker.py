"""One process of a contender: ``python -m analysis.experiments.benchmark.worker SPEC``."""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from analysis.experiments.ablations.presets import NO_KL, kl_arms
from analysis.experiments.benchmark.contenders import Contender
from analysis.experiments.benchmark.machine import measure_rates
from analysis.experiments.benchmark.plain import PlainTrainer
from analysis.training.config import Member
from analysis.training.trainer import PopulationTrainer

WARM_UP = 2

#: Phase -> functions (file, name) in which its time is spent, whatever they call.
PHASES = {
    "rollout": (("trainer.py", "rollout"),),
    "reference": (("step.py", "make_batch"),),
    "forward": (("trainer.py", "losses"),),
    "backward": (("__init__.py", "grad"),),
    "optimizer": (("optimizer.py", "clip_rows"), ("optimizer.py", "step")),
    "metrics": (("metrics.py", "policy_metrics"),),
}
#: Phases inside others, whose time is taken from them.
INSIDE = {"metrics": "forward"}


def population(contender: Contender) -> PopulationTrainer:
    """The population of a contender."""
    return PopulationTrainer(contender.config, members_in_turn(contender.members))


def members_in_turn(count: int) -> list[Member]:
    """Every arm in turn, as in an ablation; a new seed when all have had one."""
    arms = (NO_KL, *kl_arms(0.3))
    return [Member(arm=arms[i % len(arms)], seed=i // len(arms)) for i in range(count)]


def job(contender: Contender) -> Callable[[], dict[str, Any]]:
    """What the process does when it is told to."""
    if contender.kind == "machine":
        return lambda: measure_rates()._asdict()
    if contender.kind == "population":
        trainer = population(contender)
        return timed(trainer.advance, contender.updates)
    return timed(PlainTrainer(contender.config, seed=0).update, contender.updates)


def timed(update: Callable[[], None], updates: int) -> Callable[[], dict[str, Any]]:
    """Some updates, and the seconds they took."""
    for _ in range(WARM_UP):
        update()

    def turn() -> dict[str, Any]:
        started = time.perf_counter()
        for _ in range(updates):
            update()
        return {"seconds": time.perf_counter() - started}

    return turn


def phase_shares(trainer: PopulationTrainer, updates: int) -> dict[str, float]:
    """The share of an update's time in each of ``PHASES``, and in nothing of them (``other``)."""
    profile = cProfile.Profile()
    started = time.perf_counter()
    profile.enable()
    for _ in range(updates):
        trainer.advance()
    profile.disable()
    total = time.perf_counter() - started
    spent: dict[tuple[str, str], float] = {}
    for (file, _, name), (*_, cumulative, _) in pstats.Stats(profile).stats.items():
        key = (file.rpartition("/")[2], name)
        spent[key] = spent.get(key, 0.0) + cumulative
    shares = {
        phase: sum(spent.get(function, 0.0) for function in functions) / total
        for phase, functions in PHASES.items()
    }
    for inner, outer in INSIDE.items():
        shares[outer] -= shares[inner]
    return shares | {"other": 1.0 - sum(shares.values())}


def main() -> None:
    """Say ``ready``, then answer each line."""
    contender = Contender.model_validate_json(sys.argv[1])
    torch.set_num_threads(contender.threads)
    turn = job(contender)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn()), flush=True)


if __name__ == "__main__":
    main()
