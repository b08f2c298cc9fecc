"""What a worker does with a shard: lock its runs, train those that are missing, store them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from analysis.records.language import PopulationConfig
from analysis.sweeps.checkpoints import Checkpoints
from analysis.sweeps.provenance import provenance_here
from analysis.sweeps.store import Shard, Store, stored_runs
from analysis.training.environment import Environment
from analysis.training.environment_of import environment_of
from analysis.training.trainer import PopulationTrainer
from kl_term.errors import UserError

#: Of each worker: sums in another order end in other digits, and idle threads that spin cost much.
THREADS = 1
#: A kill costs no more than this, or one update where that takes longer.
LOSS_SECONDS = 60.0
#: Before a shard that another process computes is tried again.
BUSY_SECONDS = 0.2

#: Told what to say to the user, or how many run-updates of the shard are done.
Report = Callable[[str | int], None]


def complete_shard(
    shard: Shard,
    device: str,
    report: Report,
    *,
    folder: Path,
    source: str,
    checkpoint_every: int,
    graphs: bool = False,
) -> bool:
    """Train and store the runs of a shard that are not yet stored.

    Args:
        device: where to train.
        report: called with the number of finished run-updates at the start and after each update.
        folder: of the store.
        source: hash of the source that trains.
        checkpoint_every: most updates between checkpoints; there are more where these take long.
        graphs: launch each phase of an update as a whole: see :mod:`analysis.training.graphs`.

    Returns:
        Whether all its runs are stored now; if not, another process computes some of them.

    Raises:
        ValueError: a model or an optional package cannot be had.
    """
    store = Store(folder)
    with store.lock(shard) as locked:
        if not locked:
            time.sleep(BUSY_SECONDS)
            return False
        missing = store.missing(shard, source, report)
        if missing:
            try:
                part = shard.model_copy(update={"runs": missing})
                _train(part, store, device, report, source, checkpoint_every, graphs)
            except RuntimeError as error:
                if not graphs:
                    raise
                reason = str(error).strip().partition("\n")[0]
                raise UserError(
                    f"with CUDA graphs: {reason}; go on without --graphs, what is stored stays"
                ) from None
    return True


def _train(
    shard: Shard,
    store: Store,
    device: str,
    report: Report,
    source: str,
    checkpoint_every: int,
    graphs: bool,
) -> None:
    size, updates = len(shard.runs), shard.config.updates
    provenance = provenance_here(source, torch.device(device), THREADS)
    checkpoints = Checkpoints(store.checkpoints, shard)
    environment = _environment(shard.config, device)
    trainer = PopulationTrainer(shard.config, shard.runs, environment, graphs=graphs)
    checkpoints.restore(trainer, provenance, store.quarantine, report)
    if trainer.done:
        report(f"{size} runs go on from update {trainer.done} of {updates}")
    report(size * trainer.done)
    saved = time.monotonic()
    while trainer.done < updates:
        trainer.advance()
        due = trainer.done % checkpoint_every == 0 or time.monotonic() > saved + LOSS_SECONDS
        if due and trainer.done < updates:
            checkpoints.save(trainer.state(), provenance)
            saved = time.monotonic()
        report(size * trainer.done)
    for stored in stored_runs(trainer.record(), provenance):
        store.write(stored)
    checkpoints.discard()


@lru_cache(maxsize=1)
def _environment(config: PopulationConfig, device: str) -> Environment:
    """Kept from shard to shard: a model is loaded, or a start trained, once in a process."""
    return environment_of(config, device)
