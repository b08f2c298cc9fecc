"""Which source a run's numbers came from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import analysis

#: The files of the package that training imports, itself included. A run depends on these and on
#: its configuration; a change elsewhere in the package does not make it stale.
SOURCES = (
    "checks.py",
    "shapes.py",
    "kl/divergences.py",
    "kl/estimators.py",
    "kl/importance.py",
    "kl/surrogates.py",
    "objectives/advantages.py",
    "objectives/aggregation.py",
    "objectives/credit.py",
    "objectives/groups.py",
    "objectives/losses.py",
    "training/config.py",
    "training/kl_term.py",
    "training/metrics.py",
    "training/optimizer.py",
    "training/policy.py",
    "training/randomness.py",
    "training/rollout.py",
    "training/schema.py",
    "training/start.py",
    "training/step.py",
    "training/tasks.py",
    "training/trainer.py",
)


def source_sha256() -> str:
    """Hash of the package source that a run's numbers depend on."""
    root = Path(analysis.__path__[0])
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(f"{name}\0".encode())
        digest.update((root / name).read_bytes() + b"\0")
    return digest.hexdigest()
