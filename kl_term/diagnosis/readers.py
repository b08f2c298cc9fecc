"""Dumps of rollouts: a file, whose ending says its format, or a folder of them and its settings.

What reads each format lies in :mod:`kl_term.diagnosis.formats`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from kl_term.diagnosis.budgets import check_bytes, said_once
from kl_term.diagnosis.formats.csv_rows import read_csv
from kl_term.diagnosis.formats.json_rows import read_json_lines
from kl_term.diagnosis.formats.parquet import read_parquet
from kl_term.diagnosis.formats.tensors import TENSORS, read_tensors
from kl_term.diagnosis.names import OPTIONAL
from kl_term.diagnosis.schema import Rollouts, Settings
from kl_term.errors import UserError, first_problem
from kl_term.files import replace_file

#: How a name ends, of a file that a folder may hold, and what reads it.
FORMATS: dict[str, Callable[[Path], Rollouts]] = {
    ".csv": read_csv,
    ".csv.gz": read_csv,
    ".jsonl": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".parquet": read_parquet,
}
_REQUIRED = ("logp", "old_logp", "ref_logp", "position")
#: What the trainer did, beside the files of its processes.
SETTINGS = "settings.json"
#: What a trainer or a logger writes of a run's means.
_LOGS = ("trainer_state.json", "log_history.json", "wandb-summary.json", "wandb-history.jsonl")


def read_rollouts(path: str | Path) -> Rollouts:
    """The rollouts of a file, whose ending says the format, or of all such files in a folder.

    Raises:
        UserError: no such file, another format, an unreadable or empty file, or a bad row: one line
            naming file, row and column. Rows are numbered as lines of the file.
    """
    path = Path(path)
    name = path.name.lower()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.lower().endswith((*FORMATS,)))
        if not files:
            raise UserError(f"{path}: holds no dump; give one of {', '.join(FORMATS)}")
        return _join({file: read_rollouts(file) for file in files})
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if not path.stat().st_size:
        raise UserError(f"{path}: is empty; dump at least one sequence")
    read = next((FORMATS[ending] for ending in FORMATS if name.endswith(ending)), None)
    if read is not None:
        try:
            return read(path)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            first, *_ = str(error).splitlines()
            raise UserError(f"{path}: cannot be read ({first})") from None
    if name.endswith(TENSORS):
        return read_tensors(path)
    if name in _LOGS or name.endswith((".wandb", ".json")) or "tfevents" in name:
        raise UserError(
            f"{path}: a log holds means of steps, and a diagnosis needs the log-probs of tokens: "
            "dump them (kl-term diagnose --how-to-dump plain)"
        )
    raise UserError(f"{path}: unknown format; give one of {', '.join((*FORMATS, *TENSORS))}")


def record_settings(folder: str | Path, settings: Settings) -> None:
    """Say what the trainer does, for the diagnosis of the folder."""
    text = settings.model_dump_json(exclude_defaults=True) + "\n"
    replace_file(Path(folder) / SETTINGS, text.encode())


def recorded_settings(path: Path) -> Settings:
    """What the trainer did, if the folder says so.

    Raises:
        UserError: the file does not hold settings.
    """
    file = path / SETTINGS
    if not file.is_file():
        return Settings()
    check_bytes(file.stat().st_size, str(file))
    try:
        said = json.loads(file.read_bytes(), object_pairs_hook=said_once)
        return Settings.model_validate_json(json.dumps(said))
    except ValidationError as error:
        raise UserError(f"{file}: {first_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: {error}") from None


def _join(parts: dict[Path, Rollouts]) -> Rollouts:
    """All files as one; sequences are named by their file too.

    Raises:
        UserError: a file has a column that another lacks.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    for column in (*OPTIONAL, "old_logp"):
        having = [file for file, part in parts.items() if _has(part, column)]
        lacking = [file for file in parts if file not in having]
        if having and lacking:
            raise UserError(
                f"{lacking[0]}: column {column} is missing, but {having[0].name} has it"
            )
    named = [
        f"{name} of {file.name}" for file, part in parts.items() for name in part.sequence_names
    ]
    every = list(parts.values())
    begins = np.cumsum([0, *(part.sequences for part in every)])
    columns = [name for name in (*_REQUIRED, *OPTIONAL) if getattr(every[0], name) is not None]
    return replace(
        every[0],
        sequence=np.concatenate(
            [part.sequence + np.int32(begin) for part, begin in zip(every, begins, strict=False)]
        ),
        # One at a time, each dropped from its parts: the dump is not held twice.
        **{n: np.concatenate([vars(part).pop(n) for part in every]) for n in columns},
        rows=sum(part.rows for part in every),
        unscored=sum(part.unscored for part in every),
        filled=sum(part.filled for part in every),
        filler=max(every, key=lambda part: part.filled).filler,
        sequence_names=tuple(named),
        ignored={name: near for part in every for name, near in part.ignored.items()},
    )


def _has(part: Rollouts, column: str) -> bool:
    return part.has_old_logp if column == "old_logp" else getattr(part, column) is not None
