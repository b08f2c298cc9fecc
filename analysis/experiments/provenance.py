"""Under what a run was computed: everything but its configuration that its bits may depend on."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from analysis.experiments.environment import PopulationConfig
from analysis.freshness import ROOT, code_sha256, import_closure, processor_name
from analysis.training.config import TrainConfig
from kl_term.files import sha256_bytes
from kl_term.schema import Schema

#: Where a run on the tiny policy begins, and one on a pretrained model.
_TRAINER = "analysis/training/trainer.py"
_LANGUAGE = "analysis/experiments/environment.py"
#: Of recordings from before it was written down, and of a checkout that git does not know.
UNKNOWN = "unknown"


class Provenance(Schema):
    """Source, device and versions of a run, and where to find them again."""

    #: Hash of the package source that training imports.
    source: str
    device: str
    versions: dict[str, str]
    #: Of the checkout: see :func:`commit_of`.
    commit: str = UNKNOWN
    #: Hash of the names and versions of all installed packages: see :func:`packages_sha256`.
    packages: str = UNKNOWN

    def gives_bits_of(self, other: Provenance) -> bool:
        """Do equal runs come out equal to the bit? What merely lies beside them does not count."""
        return self.model_copy(update=other.model_dump(include=_BESIDE)) == other


#: Fields that no bit depends on, given the others.
_BESIDE = {"commit", "packages"}


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


def merged(provenances: Sequence[Provenance]) -> Provenance:
    """One for runs of one source that were computed in several places."""

    def joined(values: Sequence[str]) -> str:
        return "; ".join(dict.fromkeys(values))

    first = provenances[0]
    return Provenance(
        source=first.source,
        device=joined([provenance.device for provenance in provenances]),
        versions={name: joined([s.versions[name] for s in provenances]) for name in first.versions},
        commit=joined([provenance.commit for provenance in provenances]),
        packages=joined([provenance.packages for provenance in provenances]),
    )


def source_of(config: PopulationConfig) -> str:
    """Hash of the source that runs of this configuration depend on."""
    return code_sha256(sources_of(config))


def sources_of(config: PopulationConfig) -> tuple[str, ...]:
    """The files that such a run imports; a change elsewhere leaves it fresh."""
    starts = (_TRAINER,) if isinstance(config, TrainConfig) else (_TRAINER, _LANGUAGE)
    return import_closure(starts)
