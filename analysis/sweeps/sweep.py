"""A sweep: every run of a preset trained once and stored, whatever happens on the way.

It may be killed at any instant and started again, or run several times at once in one folder: what
is stored is kept, unfinished shards go on from their checkpoint, and the numbers are to the bit
those of an undisturbed run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from analysis.records.preset import Preset
from analysis.sweeps.checkpoints import unfinished
from analysis.sweeps.memory import fitting_shard
from analysis.sweeps.pools import Pool, finish_shards
from analysis.sweeps.progress import Progress
from analysis.sweeps.provenance import source_of
from analysis.sweeps.record import record_sweep
from analysis.sweeps.shard import complete_shard
from analysis.sweeps.store import Store, StoredRun, finished_runs, shards_of
from kl_term.errors import UserError
from kl_term.files import require_writable

CHECKPOINT_EVERY = 50


def complete(
    preset: Preset,
    store: Store,
    pool: Pool,
    *,
    runs_per_shard: int | None = None,
    graphs: bool = False,
    record: Path | None = None,
) -> None:
    """Compute what is missing of a preset, say what came out, and record it in a folder if asked.

    Args: as of :func:`run_sweep`.
    """
    progress = Progress()
    try:
        sizes = {"runs_per_shard": runs_per_shard, "graphs": graphs}
        stored = run_sweep(preset, store, progress, pool, **sizes)
    finally:
        progress.close()
    progress.finished(preset, stored)
    if record is not None:
        record_sweep(preset, stored, record)


def run_sweep(
    preset: Preset,
    store: Store,
    progress: Progress,
    pool: Pool,
    *,
    runs_per_shard: int | None = None,
    checkpoint_every: int = CHECKPOINT_EVERY,
    graphs: bool = False,
) -> list[StoredRun]:
    """Compute what is missing of a preset and return all its runs, in the preset's order.

    Args:
        runs_per_shard: runs trained at once; by default as many as serve the workers and fit.
        pool: :class:`~analysis.sweeps.pools.LocalPool` or
            :func:`~analysis.sweeps.ray_pool.ray_pool`.
        graphs: launch each phase of an update as a whole: see :mod:`analysis.training.graphs`.
    """
    if runs_per_shard is None:
        runs_per_shard = fitting_shard(preset, pool, graphs=graphs)
    sizes = {"runs_per_shard": runs_per_shard, "checkpoint_every": checkpoint_every}
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    require_writable(store.root / "runs")
    source = source_of(preset.config)
    every = shards_of(preset, runs_per_shard)
    missing = [(shard, runs) for shard in every if (runs := store.missing(shard, source))]
    stale = sum(store.stale(preset.config, runs, source) for _, runs in missing)
    counts = [len(runs) for _, runs in missing]
    progress.begin(len(preset.runs), counts, preset.config.updates, stale=stale)
    task = partial(
        complete_shard,
        folder=store.root,
        source=source,
        checkpoint_every=checkpoint_every,
        graphs=graphs,
    )
    finish_shards(task, [shard for shard, _ in missing], pool, progress)
    stored = finished_runs(preset, store, source)
    for checkpoints in unfinished(store.checkpoints):
        if not store.missing(checkpoints.shard, source):
            checkpoints.discard()  # its runs were finished in other shards than they began in
    return stored
