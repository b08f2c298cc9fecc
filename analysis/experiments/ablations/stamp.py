"""Under what a run was computed: everything but its configuration that its bits may depend on."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from analysis.experiments.ablations.settings import PopulationConfig
from analysis.experiments.ablations.source import source_of
from analysis.schema import Schema


class Stamp(Schema):
    """Source, device and versions of a run."""

    #: Hash of the package source that training imports.
    source: str
    device: str
    versions: dict[str, str]


def current_stamp(
    config: PopulationConfig, device: torch.device | str = "cpu", threads: int | None = None
) -> Stamp:
    """That of a run started now.

    Args:
        config: what its members share.
        device: where it runs.
        threads: of the process that computes it; by default this one.
    """
    return stamp_here(source_of(config), device, threads)


def stamp_here(
    source: str, device: torch.device | str = "cpu", threads: int | None = None
) -> Stamp:
    """That of a run of a known source on this machine, otherwise as :func:`current_stamp`."""
    return Stamp(
        source=source,
        device=device_name(torch.device(device), threads or torch.get_num_threads()),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    )


def device_name(device: torch.device, threads: int) -> str:
    """The hardware; on the CPU all that chooses kernels: processor, vector instructions, threads.

    Two makes of processor with the same vector instructions do not sum in the same order.
    """
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    vectors = torch.backends.cpu.get_cpu_capability()
    where = f"{platform.machine()} {vectors}, {processor_name()}"
    return f"{device.type}, {where}, {threads} thread(s)"


@cache
def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the system names it; where it names none, ``unnamed processor``."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.processor() or "unnamed processor"


def merged(stamps: Sequence[Stamp]) -> Stamp:
    """One for runs of one source that were computed in several places."""

    def joined(values: Sequence[str]) -> str:
        return "; ".join(dict.fromkeys(values))

    first = stamps[0]
    return Stamp(
        source=first.source,
        device=joined([stamp.device for stamp in stamps]),
        versions={name: joined([s.versions[name] for s in stamps]) for name in first.versions},
    )
