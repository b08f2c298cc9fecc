"""A run that dumped a file per process: its files as one set of rollouts, and its settings."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from analysis.errors import Refused, first_problem
from analysis.experiments.diagnosis.schema import Rollouts, Settings

#: Columns that a file may lack, but not beside others that have them.
OPTIONAL = ("sampler_logp", "entropy", "advantage", "reward", "step")
REQUIRED = ("logp", "old_logp", "ref_logp", "position")


#: What the trainer did, beside the files of its processes.
SETTINGS = "settings.json"


def record_settings(folder: Path, settings: Settings) -> None:
    """Say what the trainer does, for the diagnosis of the folder."""
    (folder / SETTINGS).write_text(settings.model_dump_json(exclude_defaults=True) + "\n")


def recorded_settings(path: Path) -> Settings:
    """What the trainer did, if the folder says so.

    Raises:
        Refused: the file does not hold settings.
    """
    file = path / SETTINGS
    if not file.is_file():
        return Settings()
    try:
        return Settings.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise Refused(f"{file}: {first_problem(error)}") from None


def join(parts: dict[Path, Rollouts]) -> Rollouts:
    """All files as one; sequences are named by their file too.

    Raises:
        Refused: a file has a column that another lacks.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    first, *others = parts
    for other in others:
        for name in (*OPTIONAL, "has_old_logp"):
            present = [_has(parts[file], name) for file in (first, other)]
            if present[0] != present[1]:
                with_it, without = (first, other) if present[0] else (other, first)
                column = name.removeprefix("has_")
                raise Refused(f"{without}: column {column} is missing, but {with_it.name} has it")
    return reduce(_both, (_named(part, file.name) for file, part in parts.items()))


def _has(part: Rollouts, name: str) -> bool:
    value = getattr(part, name)
    return value is not None and value is not False


def _named(part: Rollouts, file: str) -> Rollouts:
    names = tuple(f"{name} of {file}" for name in part.sequence_names)
    return replace(part, sequence_names=names)


def _both(one: Rollouts, other: Rollouts) -> Rollouts:
    columns = [name for name in (*REQUIRED, *OPTIONAL) if getattr(one, name) is not None]
    return replace(
        one,
        **{n: np.concatenate([getattr(one, n), getattr(other, n)]) for n in columns},
        sequence=np.concatenate([one.sequence, other.sequence + one.sequences]),
        rows=one.rows + other.rows,
        has_mask=one.has_mask and other.has_mask,
        sequence_names=one.sequence_names + other.sequence_names,
        ignored=one.ignored | other.ignored,
    )
