"""A shard of a sweep: the members that one worker trains together, from claim to stored files."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.settings import PopulationConfig, setting_of
from analysis.experiments.ablations.stamp import Stamp
from analysis.experiments.sweeps.checkpoints import Checkpoints, Population
from analysis.experiments.sweeps.store import MemberSpec, Store, member_records
from analysis.training.config import Member
from analysis.training.setting import Setting
from analysis.training.trainer import PopulationTrainer


class Shard(NamedTuple):
    """Members of a preset that are trained together; results do not depend on which they are."""

    config: PopulationConfig
    members: tuple[Member, ...]

    @property
    def specs(self) -> tuple[MemberSpec, ...]:
        return tuple(MemberSpec(config=self.config, member=member) for member in self.members)


#: A kill costs no more than this, or one update where that takes longer.
LOSS_SECONDS = 60.0


class Outcome(Enum):
    """How an attempt at a shard ended."""

    FINISHED = "finished"  #: all its members are stored
    BUSY = "busy"  #: another process computes some of its members


class Job(NamedTuple):
    """What is common to the shards of a sweep."""

    store: Path
    stamp: Stamp
    device: str
    #: Most updates between checkpoints; there are more where these take long.
    checkpoint_every: int
    graphs: bool = False  #: see :mod:`analysis.training.graphs`


def shards_of(preset: Preset, size: int) -> list[Shard]:
    """The members of a preset in their order, ``size`` to a shard."""
    members = preset.members
    firsts = range(0, len(members), size)
    return [Shard(preset.config, members[first : first + size]) for first in firsts]


def complete(
    shard: Shard, job: Job, *, say: Callable[[str], None], advanced: Callable[[int, int], None]
) -> Outcome:
    """Train and store the members of a shard that are not yet stored.

    Args:
        say: hears of damaged files and of what is resumed.
        advanced: called with the number of members in training and of their finished updates, at
            the start and after each update.
    """
    store = Store(job.store)
    with store.claim(shard.specs) as claimed:
        if not claimed:
            return Outcome.BUSY
        missing = missing_members(shard, store, job.stamp.source, say)
        if missing:
            _train(Population(config=shard.config, members=missing), store, job, say, advanced)
    return Outcome.FINISHED


def missing_members(
    shard: Shard, store: Store, source: str, say: Callable[[str], None]
) -> tuple[Member, ...]:
    """Those of a claimed shard that are not stored; ``say`` hears of damaged files."""
    return tuple(spec.member for spec in shard.specs if store.salvage(spec, source, say) is None)


def _train(
    population: Population,
    store: Store,
    job: Job,
    say: Callable[[str], None],
    advanced: Callable[[int, int], None],
) -> None:
    size, updates = len(population.members), population.config.updates
    checkpoints = Checkpoints(store.checkpoints, population, job.stamp)
    setting = _setting(population.config, job.device)
    trainer = PopulationTrainer(population.config, population.members, setting, graphs=job.graphs)
    checkpoints.restore(trainer, store.quarantine, say)
    if trainer.done:
        say(f"{size} members go on from update {trainer.done} of {updates}")
    advanced(size, trainer.done)
    saved = time.monotonic()
    while trainer.done < updates:
        trainer.advance()
        due = trainer.done % job.checkpoint_every == 0 or time.monotonic() > saved + LOSS_SECONDS
        if due and trainer.done < updates:
            checkpoints.save(trainer.state())
            saved = time.monotonic()
        advanced(size, trainer.done)
    for record in member_records(trainer.record(), job.stamp):
        store.write(record)
    checkpoints.discard()


@lru_cache(maxsize=1)
def _setting(config: PopulationConfig, device: str) -> Setting:
    """Kept from shard to shard: a model is loaded, or a start trained, once in a process."""
    return setting_of(config, device)
