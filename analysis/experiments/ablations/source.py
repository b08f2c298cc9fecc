"""Which source a run's numbers came from."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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
    """Python source without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
