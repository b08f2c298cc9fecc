"""``analysis sweep``: every member of a preset trained once and stored, whatever happens."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro

from analysis.errors import Refused
from analysis.experiments.ablations import catalogue, recording
from analysis.experiments.ablations.catalogue import make_preset
from analysis.experiments.ablations.folders import check_target
from analysis.experiments.ablations.memory import members_that_fit
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.sweeps.crew import Place
from analysis.experiments.sweeps.inventory import damage, inventory
from analysis.experiments.sweeps.progress import Progress
from analysis.experiments.sweeps.ray_cluster import RayCluster
from analysis.experiments.sweeps.store import MemberRecord, Store
from analysis.experiments.sweeps.sweep import as_ablation, run_sweep, shard_size
from analysis.experiments.sweeps.workers import ThisMachine, devices_of
from analysis.report.parameters import from_text, parse_assignments
from analysis.report.processes import available_cores

STORE = Path("sweeps")


def sweep(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET]")] = "",
    /,
    override: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(aliases=["-o"], metavar="NAME=VALUE"),
    ] = (),
    store: Path = STORE,
    device: Literal["cpu", "cuda"] = "cpu",
    members_per_shard: int | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    gpus_per_shard: float | None = None,
    graphs: tyro.conf.FlagCreatePairsOff[bool] = False,
    list: tyro.conf.FlagCreatePairsOff[bool] = False,
    record: Path | None = None,
) -> None:
    """Train the members of a preset that are not stored yet.

    It may be stopped at any time, started again, and run several times at once in one folder: each
    member is computed once, to the same bits.

    Args:
        preset: its name; without one, their names are listed.
        override: a parameter of the preset as name=value; may be repeated.
        store: the folder of finished members.
        device: cpu or cuda.
        members_per_shard: members trained together by one worker; results do not depend on it. By
            default at most 24, and fewer where workers would idle or memory is short.
        workers: processes; by default one a core, or one a GPU. On Ray: shards at a time; by
            default as many as the cluster has room for.
        ray_address: compute on a Ray cluster: local (a new one here), auto (that of this machine),
            host:port, or ray://host:port (from outside). Nothing need be shared with it.
        gpus_per_shard: of each shard on Ray, at most 1; by default 1 on cuda.
        graphs: on cuda, launch each phase of an update as one CUDA graph: faster for small models.
            Results do not depend on it.
        list: show what is stored, of the preset or of all, and compute nothing.
        record: a folder to write the finished sweep to, as the book's recorded results.
    """
    if graphs and device != "cuda":
        raise Refused("--graphs records CUDA graphs: give it with --device cuda")
    folder = Store(store)
    chosen = _preset(preset, parse_assignments(override, "-o")) if preset else None
    if list:
        _show(folder, chosen)
    elif chosen is None:
        raise Refused(f"name a preset: {', '.join(catalogue.CATALOGUE)}")
    else:
        if record is not None:
            check_target(record)
        with _place(device, workers, ray_address, gpus_per_shard) as place:
            if members_per_shard is None:
                members_per_shard = _shard_size(chosen, place)
            progress = Progress()
            try:
                records = run_sweep(
                    chosen,
                    folder,
                    progress,
                    place,
                    members_per_shard=members_per_shard,
                    graphs=graphs,
                )
            finally:
                progress.close()
        _summarise(chosen, records)
        if record is not None:
            recording.save(as_ablation(chosen, records), record)
            print(f"recorded in {record}", file=sys.stderr)


@contextmanager
def _place(
    device: str, workers: int | None, ray_address: str | None, gpus_per_shard: float | None
) -> Iterator[Place]:
    if ray_address is not None:
        with RayCluster(
            ray_address, device=device, gpus_per_shard=gpus_per_shard, workers=workers
        ) as cluster:
            yield cluster
        return
    if gpus_per_shard is not None:
        raise Refused("--gpus-per-shard is for --ray-address: here a GPU has one worker by default")
    if workers is None:
        workers = available_cores() if device == "cpu" else max(len(devices_of(device)), 1)
    yield ThisMachine(device, workers)


def _shard_size(preset: Preset, place: Place) -> int:
    """What memory allows is known of this machine only, not of a cluster's."""
    size = shard_size(len(preset.members), place.workers)
    if not isinstance(place, ThisMachine):
        return size
    on_each = math.ceil(place.workers / len(place.devices))
    try:
        fitting = members_that_fit(preset.config, place.devices[0], on_each)
    except ValueError as error:
        raise Refused(str(error)) from None
    return size if fitting is None else min(size, fitting)


def _preset(name: str, texts: Mapping[str, str]) -> Preset:
    values = {parameter: from_text(text, "") for parameter, text in texts.items()}
    try:
        return make_preset(name, values)
    except ValueError as error:
        raise Refused(str(error)) from None


def _show(store: Store, preset: Preset | None) -> None:
    table = inventory(store, preset)
    print(f"{store.root}: nothing is stored" if table.empty else table.to_string(index=False))
    for line in damage(store):
        print(f"damaged: {line}")


def _summarise(preset: Preset, records: Iterable[MemberRecord]) -> None:
    """Diverged members by name, then what is finished."""
    diverged = [record for record in records if record.failure is not None]
    for record in diverged:
        member, failure = record.spec.member, record.failure
        print(
            f"diverged: {member.arm.name} beta={member.arm.beta} seed={member.seed} "
            f"at update {failure.update}, {failure.tensor} not finite",
            file=sys.stderr,
        )
    print(
        f"{preset.name}: {len(preset.members)} members finished, {len(diverged)} diverged",
        file=sys.stderr,
    )
