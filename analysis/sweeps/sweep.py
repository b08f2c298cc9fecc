"""A sweep: every run of a preset trained once and stored, whatever happens on the way.

It may be killed at any instant and started again, or run several times at once in one folder: what
is stored is kept, unfinished shards go on from their checkpoint, and the numbers are to the bit
those of an undisturbed run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from analysis.records.preset import Preset
from analysis.sweeps.checkpoints import unfinished
from analysis.sweeps.pools import Pool, Task, WorkerLost
from analysis.sweeps.progress import Progress
from analysis.sweeps.provenance import source_of
from analysis.sweeps.shard import complete_shard
from analysis.sweeps.store import Shard, Store, StoredRun
from kl_term.errors import UserError
from kl_term.files import require_writable

#: Runs trained at once: more are slower on a CPU, and lose more when killed.
RUNS_PER_SHARD = 24
#: A GPU has room for more, and an update of them takes little longer than one of 24.
RUNS_PER_GPU_SHARD = 512
CHECKPOINT_EVERY = 50
#: How often one shard may lose its worker.
MAX_DEATHS = 3
#: How often the sweep looks for news.
POLL_SECONDS = 0.2


def run_sweep(
    preset: Preset,
    store: Store,
    progress: Progress,
    pool: Pool,
    *,
    runs_per_shard: int = RUNS_PER_SHARD,
    checkpoint_every: int = CHECKPOINT_EVERY,
    graphs: bool = False,
) -> list[StoredRun]:
    """Compute what is missing of a preset and return all its runs, in the preset's order.

    Args:
        pool: :class:`~analysis.sweeps.pools.LocalPool` or
            :func:`~analysis.sweeps.ray_pool.ray_pool`.
        graphs: launch each phase of an update as a whole: see :mod:`analysis.training.graphs`.
    """
    sizes = {"runs_per_shard": runs_per_shard, "checkpoint_every": checkpoint_every}
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    require_writable(store.root / "runs")
    source = source_of(preset.config)
    every = shards_of(preset, runs_per_shard)
    missing = [(shard, runs) for shard in every if (runs := store.missing(shard, source))]
    progress.begin(len(preset.runs), [len(runs) for _, runs in missing], preset.config.updates)
    if stale := sum(store.stale(preset.config, runs, source) for _, runs in missing):
        progress.say(f"{stale} runs of an older source are kept as stale, computed anew")
    task = partial(
        complete_shard,
        folder=store.root,
        source=source,
        checkpoint_every=checkpoint_every,
        graphs=graphs,
    )
    _map(task, [shard for shard, _ in missing], pool, progress)
    stored = finished_runs(preset, store, source)
    for checkpoints in unfinished(store.checkpoints):
        if not store.missing(checkpoints.shard, source):
            checkpoints.discard()  # its runs were finished in other shards than they began in
    return stored


def shards_of(preset: Preset, size: int) -> list[Shard]:
    """The runs of a preset in their order, ``size`` to a shard."""
    runs = preset.runs
    firsts = range(0, len(runs), size)
    return [Shard(config=preset.config, runs=runs[first : first + size]) for first in firsts]


def shard_size(runs: int, workers: int, most: int = RUNS_PER_SHARD) -> int:
    """``most``, or fewer where workers would idle."""
    return min(most, math.ceil(runs / workers))


def finished_runs(preset: Preset, store: Store, source: str) -> list[StoredRun]:
    """The stored runs of a preset, in its order."""
    stored = [store.read(preset.config, run, source) for run in preset.runs]
    found = [run for run in stored if run is not None]
    if len(found) < len(stored):
        raise UserError(
            f"{store.root}: {len(stored) - len(found)} of {len(stored)} runs of {preset.name!r} "
            "are missing: run the sweep"
        )
    return found


def _map(task: Task, shards: list[Shard], pool: Pool, progress: Progress) -> None:
    """Let the workers of a pool finish the shards; one whose worker died is tried again."""
    pending = deque(range(len(shards)))
    running: dict[Future, int] = {}
    deaths: Counter[int] = Counter()
    try:
        while pending or running:
            while pending and len(running) < pool.workers:
                number = pending.popleft()
                running[pool.submit(task, number, shards[number])] = number
            ended, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for number, report in pool.reports():
                if isinstance(report, str):
                    progress.say(report)
                else:
                    progress.shard_at(number, report)
            for future in ended:
                number = running.pop(future)
                try:
                    if pool.result(future):
                        progress.shard_finished(number)
                    else:
                        pending.append(number)
                except WorkerLost as death:
                    deaths[number] += 1
                    progress.shard_lost(number)
                    _try_again(shards[number], deaths[number], death, progress)
                    pending.append(number)
    finally:
        pool.close()


def _try_again(shard: Shard, deaths: int, death: WorkerLost, progress: Progress) -> None:
    if deaths >= MAX_DEATHS:
        raise UserError(
            f"{len(shard.runs)} runs from {shard.runs[0].variant.name} on ended their worker "
            f"{deaths} times ({death}): give it more memory or fewer runs per shard"
        )
    progress.say(f"a worker ended by {death}; its {len(shard.runs)} runs are tried again")
