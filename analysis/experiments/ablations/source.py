"""Which source a run's numbers came from."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import analysis
from analysis.experiments.language_models.config import LanguageConfig
from analysis.training.config import TrainConfig

_ROOT = Path(analysis.__path__[0])
#: Where a run on the tiny policy begins, and one on a pretrained model.
_TRAINER = "training/trainer.py"
_LANGUAGE = "experiments/ablations/settings.py"


def source_of(config: TrainConfig | LanguageConfig) -> str:
    """Hash of the source that runs of this configuration depend on."""
    return source_sha256(sources_of(config))


def sources_of(config: TrainConfig | LanguageConfig) -> tuple[str, ...]:
    """The files of the package that such a run imports; a change elsewhere leaves it fresh."""
    starts = (_TRAINER,) if isinstance(config, TrainConfig) else (_TRAINER, _LANGUAGE)
    return _imported(starts)


def source_sha256(sources: Sequence[str]) -> str:
    """Hash of the package source that a run's numbers depend on, whatever its comments say."""
    digest = hashlib.sha256()
    for name in sources:
        code = code_alone((_ROOT / name).read_text(encoding="utf-8"))
        digest.update(f"{name}\0{code}\0".encode())
    return digest.hexdigest()


@cache
def _imported(starts: tuple[str, ...]) -> tuple[str, ...]:
    """Files of the package that these import, themselves included, sorted."""
    found, pending = set(), [*starts]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += _imports((_ROOT / name).read_text(encoding="utf-8"))
    return tuple(sorted(found))


def _imports(source: str) -> list[str]:
    """Files of the package that a module imports by name."""
    files = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("analysis"):
            inside = Path(*node.module.split(".")[1:])
            within = [inside / alias.name for alias in node.names]
            files += [f"{path}.py" for path in (inside, *within) if (_ROOT / f"{path}.py").exists()]
    return files


def code_alone(source: str) -> str:
    """Python source without comments, docstrings and layout: the same text on every Python.

    (``ast.unparse`` and ``ast.dump`` change their spelling from version to version.)
    """
    return repr(_spelt(ast.parse(source)))


def _spelt(part: Any) -> Any:
    """A node as nested lists: its type and the fields that hold something."""
    if isinstance(part, ast.JoinedStr):  # whose parts may be empty texts, or are left out
        return ["JoinedStr", *(_spelt(value) for value in part.values if not _is_empty(value))]
    if isinstance(part, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(part) if name != "kind"]
        held = [[name, _spelt(value)] for name, value in fields if value is not None]
        return [type(part).__name__, *(field for field in held if field[1] != [])]
    if isinstance(part, list):
        return [_spelt(each) for each in part if not _is_text(each)]
    return repr(part)


def _is_empty(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and part.value == ""


def _is_text(part: Any) -> bool:
    """A statement that is a text and does nothing."""
    return (
        isinstance(part, ast.Expr)
        and isinstance(part.value, ast.Constant)
        and isinstance(part.value.value, str)
    )
