"""Under what a run started here is computed."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from analysis.freshness import ROOT, code_sha256, import_closure, processor_name
from analysis.records.config import TrainConfig
from analysis.records.language import PopulationConfig
from analysis.records.provenance import UNKNOWN, Provenance
from kl_term.files import sha256_bytes

#: Where a run on the tiny policy begins, and one on a pretrained model.
_TRAINER = "analysis/training/trainer.py"
_LANGUAGE = "analysis/training/environment_of.py"


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
        commit=commit_of(ROOT),
        packages=packages_sha256(),
    )


@cache
def commit_of(root: Path) -> str:
    """The commit of a checkout, ``with changes`` where a tracked file differs from it.

    ``unknown`` where ``root`` is not the top of a checkout, or there is no git.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", root, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return UNKNOWN
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return f"{commit} with changes" if changes else commit


@cache
def packages_sha256() -> str:
    """Hash of what ``pip list`` says: a line ``name==version`` of each package, by name."""
    found = {(one.name.lower(), one.version) for one in metadata.distributions()}
    return sha256_bytes("".join(f"{name}=={version}\n" for name, version in sorted(found)).encode())


def device_name(device: torch.device, threads: int) -> str:
    """The hardware; on the CPU all that chooses kernels: processor, vector instructions, threads.

    Two makes of processor with the same vector instructions do not sum in the same order.
    """
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    vectors = torch.backends.cpu.get_cpu_capability()
    where = f"{platform.machine()} {vectors}, {processor_name()}"
    return f"{device.type}, {where}, {threads} thread(s)"


def source_of(config: PopulationConfig) -> str:
    """Hash of the source that runs of this configuration depend on."""
    files = sources_of(config)
    return code_sha256(files)


def sources_of(config: PopulationConfig) -> tuple[str, ...]:
    """The files that such a run imports; a change elsewhere leaves it fresh."""
    starts = (_TRAINER,) if isinstance(config, TrainConfig) else (_TRAINER, _LANGUAGE)
    return import_closure(starts)
