"""``analysis sweep``: every run of a preset trained once and stored, whatever happens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Literal

import tyro

from analysis.records.manifests import check_target
from analysis.records.preset import Preset
from analysis.report.parameters import from_text, parse_assignments
from analysis.report.processes import available_cores
from analysis.studies.presets import PRESETS, make_preset
from analysis.sweeps.pools import LocalPool, Pool, devices_of
from analysis.sweeps.ray_pool import ray_pool
from analysis.sweeps.store import Store, stored_table
from analysis.sweeps.sweep import complete
from kl_term.errors import UserError

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
    runs_per_shard: int | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    gpus_per_shard: float | None = None,
    graphs: tyro.conf.FlagCreatePairsOff[bool] = False,
    list: tyro.conf.FlagCreatePairsOff[bool] = False,
    record: Path | None = None,
) -> None:
    """Train the runs of a preset that are not stored yet.

    It may be stopped at any time, started again, and run several times at once in one folder: each
    run is computed once, to the same bits.

    Args:
        preset: its name; without one, their names are listed.
        override: a parameter of the preset as name=value; may be repeated.
        store: the folder of finished runs.
        device: cpu or cuda.
        runs_per_shard: runs trained together by one worker; results do not depend on it. By
            default at most 24, on a GPU of this machine 512, and fewer where workers would idle or
            memory is short.
        workers: processes; by default one a core, or one a GPU. On Ray: shards at a time; by
            default as many as the cluster has room for.
        ray_address: compute on a Ray cluster: local (a new one here), auto (that of this machine),
            host:port, or ray://host:port (from outside). Nothing need be shared with it.
        gpus_per_shard: of each shard on Ray, at most 1; by default 1 on cuda.
        graphs: on cuda, launch each phase of an update as one CUDA graph: faster for small models.
            Results do not depend on it.
        list: show how many runs of each variant are stored, and compute nothing.
        record: a folder to write the finished sweep to, as the book's recorded results.
    """
    if graphs and device != "cuda":
        raise UserError("--graphs records CUDA graphs: give it with --device cuda")
    folder = Store(store)
    chosen = _preset(preset, parse_assignments(override, "-o")) if preset else None
    if chosen is None:
        raise UserError(f"name a preset: {', '.join(PRESETS)}")
    elif list:
        print(stored_table(chosen, folder).to_string(index=False))
    else:
        if record is not None:
            check_target(record)
        with _pool(device, workers, ray_address, gpus_per_shard) as pool:
            sizes = {"runs_per_shard": runs_per_shard, "graphs": graphs}
            complete(chosen, folder, pool, **sizes, record=record)


def _pool(
    device: str, workers: int | None, ray_address: str | None, gpus_per_shard: float | None
) -> AbstractContextManager[Pool]:
    if ray_address is not None:
        return ray_pool(ray_address, device=device, gpus_per_shard=gpus_per_shard, workers=workers)
    if gpus_per_shard is not None:
        raise UserError(
            "--gpus-per-shard is for --ray-address: here a GPU has one worker by default"
        )
    if workers is None:
        workers = available_cores() if device == "cpu" else max(len(devices_of(device)), 1)
    return nullcontext(LocalPool(device, workers))


def _preset(name: str, texts: Mapping[str, str]) -> Preset:
    values = {parameter: from_text(text, "") for parameter, text in texts.items()}
    try:
        return make_preset(name, values)
    except ValueError as error:
        raise UserError(str(error)) from None
