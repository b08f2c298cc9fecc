"""Populations on one device, and what the device does at best: for GPUs, in one process.

Everything is timed between synchronisations. The same code runs on the CPU, where its figures say
less than those of :mod:`benchmarks.measure`: there is no second process to take
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
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from analysis.chapters.ch12_performance import of_width
from analysis.freshness import code_sha256
from analysis.records.language import PopulationConfig
from analysis.records.provenance import Provenance
from analysis.sweeps.provenance import provenance_here, sources_of
from analysis.training import graphs
from analysis.training.environment import Environment
from analysis.training.environment_of import environment_of
from analysis.training.optimizer import clip_rows
from analysis.training.trainer import PopulationTrainer
from benchmarks.worker import runs_in_turn

#: Rows of a product and bytes of a copy that keep a GPU busy; a CPU has enough with less.
SIZES = {"cuda": (8192, 2**30), "cpu": (1024, 2**27)}


class Load(NamedTuple):
    """One population to be timed."""

    name: str
    config: PopulationConfig
    runs: int
    updates: int


class NotRecorded(Exception):
    """Graphs failed and the population went on without."""


class DeviceBenchmark(NamedTuple):
    """What a device did. All tables are tidy."""

    populations: pd.DataFrame  #: name, runs, graphs, ms, tokens, gigabytes
    phases: pd.DataFrame  #: name, runs, phase, ms
    machine: pd.DataFrame  #: see :func:`machine_rates`


def tiny_loads(
    runs: Sequence[int] = (24, 128, 512), widths: Sequence[int] = (32, 64), updates: int = 20
) -> list[Load]:
    """Populations of the tiny policy, untrained: time does not depend on what it has learned."""
    return [
        Load(f"tiny, width {width}", of_width(width), size, updates)
        for width in widths
        for size in runs
    ]


def run(
    loads: Sequence[Load],
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
) -> DeviceBenchmark:
    """Time every load, on CUDA also with its launches in graphs, then the machine.

    What does not fit into memory is said and left out.

    Raises:
        ValueError: a model of a load cannot be had.
    """
    populations, phases = [], []
    ways = (False, True) if device.type in graphs.RECORDERS else (False,)
    for load in loads:
        environment = environment_of(load.config, device)
        spent: dict[str, float] = {}
        for graphed in ways:
            said = f"{load.name}, {load.runs} runs{', graphs' if graphed else ''}"
            say(said)
            try:
                row = _row(load, environment, None if graphed else spent, graphed=graphed)
                populations.append(row)
            except (torch.OutOfMemoryError, NotRecorded) as error:
                say(f"{said}: left out, {type(error).__name__}")
        phases += [
            {"name": load.name, "runs": load.runs, "phase": phase, "ms": 1e3 * sec / load.updates}
            for phase, sec in spent.items()
        ]
    return DeviceBenchmark(pd.DataFrame(populations), pd.DataFrame(phases), machine_rates(device))


def profiled(load: Load, environment: Environment) -> dict[str, object]:
    """One update without graphs, and its gradient alone.

    Columns: name, runs, kernels and busy_ms (their time) of an update, ms (its time), gradient_ms,
    and gradient_flops, the arithmetic of its products.
    """
    device = environment.start.device
    trainer = PopulationTrainer(load.config, runs_in_turn(load.runs), environment)
    for _ in range(2):
        trainer.advance()
    seconds = seconds_of(trainer.advance, 1, device)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        trainer.advance()
        _synchronise(device)
    kernels = [e for e in seen.events() if e.device_type.name == device.type.upper()]
    busy = [e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in kernels]
    batch = trainer.batch(trainer.rollout(trainer.done), trainer.done)
    with FlopCounterMode(display=False) as counter:
        trainer.gradient(batch)
    return {
        "name": load.name,
        "runs": load.runs,
        "kernels": len(kernels),
        "busy_ms": sum(busy) / 1e3,
        "ms": 1e3 * seconds,
        "gradient_ms": 1e3 * _mean_seconds(partial(trainer.gradient, batch), device),
        "gradient_flops": counter.get_total_flops(),
    }


def provenance_of(loads: Sequence[Load], device: torch.device) -> Provenance:
    """That of a benchmark of these loads, of the source that any of them depends on."""
    sources = {file for load in loads for file in sources_of(load.config)}
    return provenance_here(code_sha256(sorted(sources)), device)


def machine_rates(
    device: torch.device, size: int | None = None, copied: int | None = None
) -> pd.DataFrame:
    """The rate of a square product of random numbers, and of a copy, read and written.

    Columns: precision (float32, bfloat16, on CUDA tf32), flops_per_second, bytes_per_second,
    seconds_per_launch (of the smallest operation), seconds_per_node (the same in a graph).
    """
    usual = SIZES[device.type]
    size, copied = size or usual[0], copied or usual[1]
    rows = []
    ways = [("float32", torch.float32, False), ("bfloat16", torch.bfloat16, False)]
    if device.type == "cuda":
        ways.insert(1, ("tf32", torch.float32, True))
    before = torch.backends.cuda.matmul.allow_tf32
    for name, dtype, tf32 in ways:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = tf32
        seconds = _mean_seconds(partial(torch.matmul, left, right), device)
        rows.append({"precision": name, "flops_per_second": 2 * size**3 / seconds})
    torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.randint(0, 255, (copied,), dtype=torch.uint8, device=device)
    seconds = _mean_seconds(partial(torch.empty_like(source).copy_, source), device)
    launch, node = _seconds_of_launches(device)
    return pd.DataFrame(rows).assign(
        bytes_per_second=2 * copied / seconds, seconds_per_launch=launch, seconds_per_node=node
    )


def _seconds_of_launches(device: torch.device, launches: int = 1000) -> tuple[float, float]:
    """Of an operation on little, launched by itself and in a graph; NaN where there is none."""
    little = torch.randn(64, device=device)

    def launch() -> None:
        for _ in range(launches):
            little.mul_(1.0)

    alone = _mean_seconds(launch, device) / launches
    if device.type not in graphs.RECORDERS:
        return alone, math.nan
    _, replay = graphs.RECORDERS[device.type]().record(launch, passing=False)
    return alone, _mean_seconds(replay, device) / launches


def _row(
    load: Load, environment: Environment, phases: dict[str, float] | None, *, graphed: bool
) -> dict[str, object]:
    """A population timed; seconds in each of its phases go to ``phases``."""
    device, config = environment.start.device, load.config
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of a population that did not fit
    trainer = PopulationTrainer(config, runs_in_turn(load.runs), environment, graphs=graphed)
    # The graph of an update that is measured is recorded in the last of these.
    for _ in range(graphs.WARM_UP * (config.log_every if graphed else 1) + 1):
        trainer.advance()
    if graphed and trainer.launch.refused:
        raise NotRecorded
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    total = seconds_of(trainer.advance, load.updates, device) / load.updates
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else math.nan
    if phases is not None:
        _phases(trainer, load, device, phases)
    completions = config.num_prompts * config.group_size * load.runs
    return {
        "name": load.name,
        "runs": load.runs,
        "graphs": graphed,
        "ms": 1e3 * total / load.runs,
        "tokens": completions * environment.task.completion_length / total,
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
            output = trainer.losses(batch, caches=drawn.caches)
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
