"""A sweep: every member of a preset trained once and stored, whatever happens on the way.

It may be killed at any instant and started again, or run several times at once in one folder: what
is stored is kept, unfinished populations go on from their checkpoint, and the numbers are to the
bit those of an undisturbed run.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from analysis.errors import Refused
from analysis.experiments.ablations.ablation import Ablation, tidy
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.source import source_of
from analysis.experiments.ablations.stamp import merged
from analysis.experiments.sweeps.checkpoints import populations
from analysis.experiments.sweeps.crew import Advanced, Crew, Died, Failed, Order, Place, Said
from analysis.experiments.sweeps.progress import Progress
from analysis.experiments.sweeps.shards import Outcome, Shard, shards_of
from analysis.experiments.sweeps.store import MemberRecord, MemberSpec, Store, population_record
from analysis.files import require_writable

#: Members trained at once: more are slower on a CPU, and lose more when killed.
MEMBERS_PER_SHARD = 24
CHECKPOINT_EVERY = 50
#: How often one shard may lose its worker.
MAX_DEATHS = 3


class Plan(NamedTuple):
    """What a sweep has to do."""

    shards: list[Shard]  #: those with a member that is not stored
    missing: list[int]  #: for each of them, how many
    stale: int  #: missing members that an older source has computed


def run_sweep(
    preset: Preset,
    store: Store,
    progress: Progress,
    place: Place,
    *,
    members_per_shard: int = MEMBERS_PER_SHARD,
    checkpoint_every: int = CHECKPOINT_EVERY,
    graphs: bool = False,
) -> list[MemberRecord]:
    """Compute what is missing of a preset and return all its members, in the preset's order.

    Args:
        place: :class:`~analysis.experiments.sweeps.workers.ThisMachine` or
            :class:`~analysis.experiments.sweeps.ray_cluster.RayCluster`.
        graphs: launch each phase of an update as a whole: see :mod:`analysis.training.graphs`.

    Raises:
        Refused: the store cannot be written, or a shard ended its worker ``MAX_DEATHS`` times.
    """
    for name, value in (
        ("members_per_shard", members_per_shard),
        ("checkpoint_every", checkpoint_every),
    ):
        if value < 1:
            raise Refused(f"{name} must be at least 1, not {value}")
    require_writable(store.root / "members")
    source = source_of(preset.config)
    plan = make_plan(preset, store, source, members_per_shard)
    progress.begin(len(preset.members), plan.missing, preset.config.updates)
    if plan.stale:
        progress.say(f"{plan.stale} members of an older source are kept as stale, computed anew")
    if plan.shards:
        shards = len(plan.shards)
        order = Order(store.root, preset.config, source, checkpoint_every, shards, graphs)
        _compute(plan.shards, place.crew(order), progress)
    records = finished_members(preset, store, source)
    _discard_orphans(store, source)
    return records


def shard_size(members: int, workers: int) -> int:
    """``MEMBERS_PER_SHARD``, or fewer where workers would idle."""
    return min(MEMBERS_PER_SHARD, math.ceil(members / workers))


def make_plan(preset: Preset, store: Store, source: str, members_per_shard: int) -> Plan:
    """Which shards have members that are not stored under ``source``."""
    shards, missing, stale = [], [], 0
    for shard in shards_of(preset, members_per_shard):
        specs = [spec for spec in shard.specs if not store.is_finished(spec, source)]
        if specs:
            shards.append(shard)
            missing.append(len(specs))
            stale += sum(store.has_other(spec, source) for spec in specs)
    return Plan(shards, missing, stale)


def finished_members(preset: Preset, store: Store, source: str) -> list[MemberRecord]:
    """The stored members of a preset, in its order.

    Raises:
        Refused: some are not stored under ``source``.
    """
    specs = [MemberSpec(config=preset.config, member=member) for member in preset.members]
    records = [store.read(spec, source) for spec in specs]
    found = [record for record in records if record is not None]
    if len(found) < len(specs):
        raise Refused(
            f"{store.root}: {len(specs) - len(found)} of {len(specs)} members of {preset.name!r} "
            "are missing: run the sweep"
        )
    return found


def as_ablation(preset: Preset, records: Sequence[MemberRecord]) -> Ablation:
    """A finished sweep as what :func:`~analysis.experiments.ablations.ablation.run` returns."""
    run, stamp = population_record(records), merged([record.stamp for record in records])
    return Ablation(preset, tidy(run), run.failures, run.wall_seconds, stamp)


def _discard_orphans(store: Store, source: str) -> None:
    """Remove the checkpoints of members that were finished in other shards than they began in."""
    for folder, population in populations(store.checkpoints):
        specs = [MemberSpec(config=population.config, member=m) for m in population.members]
        if all(store.is_finished(spec, source) for spec in specs):
            shutil.rmtree(folder, ignore_errors=True)


def _compute(shards: list[Shard], crew: Crew, progress: Progress) -> None:
    """Let a crew finish the shards; one whose worker died is tried again."""
    pending = deque(range(len(shards)))
    deaths: Counter[int] = Counter()
    try:
        while pending or crew.busy:
            while pending and crew.idle:
                number = pending.popleft()
                crew.start(number, shards[number])
            for number, event in crew.hear():
                match event:
                    case Said(text):
                        progress.say(text)
                    case Advanced(members, updates):
                        progress.shard_at(number, members * updates)
                    case Failed(reason):
                        raise Refused(reason)
                    case Died(how):
                        deaths[number] += 1
                        progress.shard_lost(number)
                        _check_deaths(shards[number], deaths[number], how, progress)
                        pending.append(number)
                    case Outcome.BUSY:
                        pending.append(number)
                    case Outcome.FINISHED:
                        progress.shard_finished(number)
    finally:
        crew.stop()


def _check_deaths(shard: Shard, deaths: int, how: str, progress: Progress) -> None:
    if deaths >= MAX_DEATHS:
        raise Refused(
            f"{len(shard.members)} members from {shard.members[0].arm.name} on ended their worker "
            f"{deaths} times ({how}): give it more memory or fewer members per shard"
        )
    progress.say(f"a worker ended by {how}; its {len(shard.members)} members are tried again")
