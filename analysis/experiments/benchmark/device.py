"""Populations on one device, and what the device does at best: for GPUs, in one process.

Everything is timed between synchronisations. The same code runs on the CPU, where its figures say
less than those of :mod:`analysis.experiments.benchmark.measure`: there is no second process to take
turns with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch

from analysis.experiments.ablations.settings import PopulationConfig, setting_of
from analysis.experiments.ablations.source import source_sha256, sources_of
from analysis.experiments.ablations.stamp import Stamp, stamp_here
from analysis.experiments.benchmark.contenders import of_width
from analysis.experiments.benchmark.journal import Journal, Unwritten
from analysis.experiments.benchmark.worker import members_in_turn
from analysis.training import graphs
from analysis.training.optimizer import clip_rows
from analysis.training.setting import Setting
from analysis.training.trainer import PopulationTrainer

PRODUCT_SIZE = 8192
COPIED_BYTES = 2**30


class Load(NamedTuple):
    """One population to be timed."""

    name: str
    config: PopulationConfig
    members: int
    updates: int


class DeviceBenchmark(NamedTuple):
    """What a device did. All tables are tidy."""

    populations: pd.DataFrame  #: name, members, graphs, ms, tokens, gigabytes
    phases: pd.DataFrame  #: name, members, phase, ms
    machine: pd.DataFrame  #: precision, flops_per_second; bytes_per_second of a copy
    stamp: Stamp


def tiny_loads(
    members: Sequence[int] = (24, 128, 512), widths: Sequence[int] = (32, 64), updates: int = 20
) -> list[Load]:
    """Populations of the tiny policy, untrained: time does not depend on what it has learned."""
    loads = []
    for width in widths:
        config = of_width(width)
        loads += [Load(f"tiny, width {width}", config, size, updates) for size in members]
    return loads


def run(
    loads: Sequence[Load],
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    journal: Journal | None = None,
) -> DeviceBenchmark:
    """Time the machine, then every load, on CUDA also with its launches in graphs.

    Args:
        loads: populations.
        device: all run on it.
        say: hears of each load.
        journal: keeps each finished load; those that it holds are not timed again.

    Raises:
        ValueError: a model of a load cannot be had.
    """
    journal = Unwritten() if journal is None else journal
    stamp = stamp_of(loads, device)
    journal.begin(stamp, loads)
    populations, phases = [], []
    for load in loads:
        name = f"{load.name}, {load.members} members"
        say(f"{name}{' (kept)' if journal.holds(name) else ''}")
        timed = journal.part(name, partial(_timed, load, device))
        populations += timed["populations"]
        phases += timed["phases"]
    machine = journal.part("machine", lambda: machine_rates(device).to_dict("records"))
    tables = (pd.DataFrame(rows) for rows in (populations, phases, machine))
    return DeviceBenchmark(*tables, stamp)


def stamp_of(loads: Sequence[Load], device: torch.device) -> Stamp:
    """That of a benchmark of these loads, of the source that any of them depends on."""
    sources = {file for load in loads for file in sources_of(load.config)}
    return stamp_here(source_sha256(sorted(sources)), device)


def machine_rates(
    device: torch.device, size: int = PRODUCT_SIZE, copied: int = COPIED_BYTES
) -> pd.DataFrame:
    """The rate of a square product in float32 and bfloat16, and of a copy, read and written."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.ones(size, size, dtype=dtype, device=device)
        seconds = _mean_seconds(partial(torch.matmul, left, left), device)
        name = str(dtype).removeprefix("torch.")
        rows.append({"precision": name, "flops_per_second": 2 * size**3 / seconds})
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    seconds = _mean_seconds(partial(torch.empty_like(source).copy_, source), device)
    return pd.DataFrame(rows).assign(bytes_per_second=2 * copied / seconds)


def _timed(load: Load, device: torch.device) -> dict[str, list[dict[str, object]]]:
    """Of a whole update, called directly and from graphs, and milliseconds of its phases."""
    setting = setting_of(load.config, device)
    spent: dict[str, float] = {}
    populations = [_row(load, setting, spent, graphed=False)]
    if device.type in graphs.RECORDERS:
        populations.append(_row(load, setting, None, graphed=True))
    fields = {"name": load.name, "members": load.members}
    phases = [
        {**fields, "phase": phase, "ms": 1e3 * seconds / load.updates}
        for phase, seconds in spent.items()
    ]
    return {"populations": populations, "phases": phases}


def _row(
    load: Load, setting: Setting, phases: dict[str, float] | None, *, graphed: bool
) -> dict[str, object]:
    """A population timed; seconds in each of its phases go to ``phases``."""
    device, config = setting.start.device, load.config
    trainer = PopulationTrainer(config, members_in_turn(load.members), setting, graphs=graphed)
    # The graph of an update that is measured is recorded in the last of these.
    for _ in range(graphs.WARM_UP * (config.log_every if graphed else 1) + 1):
        trainer.advance()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    total = seconds_of(trainer.advance, load.updates, device) / load.updates
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else math.nan
    if phases is not None:
        _phases(trainer, load, device, phases)
    completions = config.num_prompts * config.group_size * load.members
    return {
        "name": load.name,
        "members": load.members,
        "graphs": graphed,
        "ms": 1e3 * total / load.members,
        "tokens": completions * setting.task.completion_length / total,
        "gigabytes": peak,
    }


def _phases(
    trainer: PopulationTrainer, load: Load, device: torch.device, spent: dict[str, float]
) -> None:
    """Seconds in each phase of the updates that follow, synchronised between phases."""
    for update in range(trainer.done, trainer.done + load.updates):
        with _clock(device, spent, "rollout"):
            drawn = trainer.rollout(update)
        with _clock(device, spent, "reference"):
            batch = trainer.batch(drawn, update)
        with _clock(device, spent, "forward"):
            output = trainer.losses(batch, pasts=drawn.pasts)
        with _clock(device, spent, "backward"):
            (gradient,) = torch.autograd.grad(output.losses.sum(), trainer.weights)
        with _clock(device, spent, "optimizer"):
            clipped = clip_rows(gradient, trainer.config.max_grad_norm).gradient
            trainer.optimizer.step(clipped, trainer.frozen)


@contextmanager
def _clock(device: torch.device, spent: dict[str, float], phase: str) -> Iterator[None]:
    _synchronise(device)
    started = time.perf_counter()
    yield
    _synchronise(device)
    spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - started


def seconds_of(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """What so many calls take, from a device that is done to a device that is done."""
    spent: dict[str, float] = {}
    with _clock(device, spent, "calls"):
        for _ in range(calls):
            call()
    return spent["calls"]


def _mean_seconds(call: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    call()
    return seconds_of(call, calls, device) / calls


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
