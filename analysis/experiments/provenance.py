"""Under what a run was computed: everything but its configuration that its bits may depend on."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import numpy as np
import torch

from analysis.experiments.environment import PopulationConfig
from analysis.freshness import code_sha256, import_closure, processor_name
from analysis.training.config import TrainConfig
from kl_term.schema import Schema

#: Where a run on the tiny policy begins, and one on a pretrained model.
_TRAINER = "analysis/training/trainer.py"
_LANGUAGE = "analysis/experiments/environment.py"


class Provenance(Schema):
    """Source, device and versions of a run."""

    #: Hash of the package source that training imports.
    source: str
    device: str
    versions: dict[str, str]


def current_provenance(
    config: PopulationConfig, device: torch.device | str = "cpu", threads: int | None = None
) -> Provenance:
    """That of a run started now, with the threads of this process by default."""
    return provenance_here(source_of(config), device, threads)


def provenance_here(
    source: str, device: torch.device | str = "cpu", threads: int | None = None
) -> Provenance:
    """That of a run of a known source on this machine, otherwise as :func:`current_provenance`."""
    return Provenance(
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


def merged(provenances: Sequence[Provenance]) -> Provenance:
    """One for runs of one source that were computed in several places."""

    def joined(values: Sequence[str]) -> str:
        return "; ".join(dict.fromkeys(values))

    first = provenances[0]
    return Provenance(
        source=first.source,
        device=joined([provenance.device for provenance in provenances]),
        versions={name: joined([s.versions[name] for s in provenances]) for name in first.versions},
    )


def source_of(config: PopulationConfig) -> str:
    """Hash of the source that runs of this configuration depend on."""
    return code_sha256(sources_of(config))


def sources_of(config: PopulationConfig) -> tuple[str, ...]:
    """The files that such a run imports; a change elsewhere leaves it fresh."""
    starts = (_TRAINER,) if isinstance(config, TrainConfig) else (_TRAINER, _LANGUAGE)
    return import_closure(starts)
