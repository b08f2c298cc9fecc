"""One process of a case: ``python -m benchmarks.worker SPEC``."""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from analysis.chapters.ch12_performance import of_width
from analysis.chapters.plain_grpo import PlainTrainer
from analysis.records.config import Run
from analysis.studies.presets.parts import NO_KL, kl_variants
from analysis.training.cpu import fast_products
from analysis.training.trainer import PopulationTrainer
from benchmarks.processes import Case

WARM_UP = 2

#: [batch, rows, inner, columns] of the products tried; the best counts.
PRODUCTS = ((1, 512, 512, 512), (1, 1024, 1024, 1024), (8, 744, 64, 256))
COPIED_BYTES = 128 * 2**20

#: Phase -> functions (file, name) in which its time is spent, whatever they call.
PHASES = {
    "rollout": (("trainer.py", "rollout"),),
    "reference": (("loss.py", "make_batch"),),
    "forward": (("trainer.py", "losses"),),
    "backward": (("__init__.py", "grad"),),
    "optimizer": (("optimizer.py", "clip_rows"), ("optimizer.py", "step")),
    "metrics": (("metrics.py", "policy_metrics"),),
}
#: Phases inside others, whose time is taken from them.
INSIDE = {"metrics": "forward"}


def population(case: Case) -> PopulationTrainer:
    """The population of a case."""
    return PopulationTrainer(of_width(case.width), runs_in_turn(case.runs))


def runs_in_turn(count: int) -> list[Run]:
    """Every variant in turn, as in an ablation; a new seed when all have had one."""
    variants = (NO_KL, *kl_variants(0.3))
    return [Run(variant=variants[i % len(variants)], seed=i // len(variants)) for i in range(count)]


def job(case: Case) -> Callable[[], dict[str, Any]]:
    """What the process does when it is told to."""
    if case.kind == "machine":
        return lambda: measure_rates()._asdict()
    if case.kind == "population":
        trainer = population(case)
        return timed(trainer.advance, case.updates)
    return timed(PlainTrainer(of_width(case.width), seed=0).update, case.updates)


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


class Rates(NamedTuple):
    """Of one process."""

    flops_per_second: float
    bytes_per_second: float  #: read and written


def measure_rates(seconds: float = 0.05) -> Rates:
    """The best of some products, with either library, and copies larger than any cache.

    Each is repeated for ``seconds`` and counts with its mean, so that a machine shared with others
    is measured as it is.
    """
    products = []
    for batch, rows, inner, columns in PRODUCTS:
        left, right = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
        out = torch.bmm(left, right)
        work = 2 * out.numel() * inner
        product = partial(torch.bmm, left, right, out=out)
        products.append(work / mean_seconds(product, seconds))
        with fast_products(torch.device("cpu"), work):
            products.append(work / mean_seconds(product, seconds))
    source = torch.ones(COPIED_BYTES // 4)
    copy = partial(torch.empty_like(source).copy_, source)
    return Rates(max(products), 2 * COPIED_BYTES / mean_seconds(copy, seconds))


def mean_seconds(call: Callable[[], object], at_least: float) -> float:
    """A call, as a mean over so many that they take a while; one more before warms up."""
    call()
    started, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < at_least:
        call()
        calls += 1
    return passed / calls


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
    """Write ``ready``, then answer each line."""
    case = Case.model_validate_json(sys.argv[1])
    torch.set_num_threads(case.threads)
    turn = job(case)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn()), flush=True)


if __name__ == "__main__":
    main()
