"""Which source a run's numbers came from."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path

import analysis
from analysis.experiments.language_models.config import LanguageConfig
from analysis.training.config import TrainConfig

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
    "training/kl_cosine.py",
    "training/kl_term.py",
    "training/memory.py",
    "training/metrics.py",
    "training/optimizer.py",
    "training/packing.py",
    "training/policy.py",
    "training/products.py",
    "training/randomness.py",
    "training/rollout.py",
    "training/schema.py",
    "training/setting.py",
    "training/start.py",
    "training/step.py",
    "training/tasks.py",
    "training/trainer.py",
    "training/transformer.py",
)

#: Those that a run on a pretrained model depends on besides.
LANGUAGE_SOURCES = (
    *SOURCES,
    "experiments/language_models/checkpoints.py",
    "experiments/language_models/config.py",
    "experiments/language_models/questions.py",
    "experiments/ablations/settings.py",
    "training/pretrained/attention.py",
    "training/pretrained/config.py",
    "training/pretrained/frozen.py",
    "training/pretrained/llama.py",
    "training/pretrained/lora.py",
    "training/pretrained/rotary.py",
    "training/pretrained/setting.py",
    "training/pretrained/tasks.py",
    "training/pretrained/weights.py",
)


def source_of(config: TrainConfig | LanguageConfig) -> str:
    """Hash of the source that runs of this configuration depend on."""
    return source_sha256(SOURCES if isinstance(config, TrainConfig) else LANGUAGE_SOURCES)


def source_sha256(sources: Sequence[str] = SOURCES) -> str:
    """Hash of the package source that a run's numbers depend on, whatever its comments say."""
    root = Path(analysis.__path__[0])
    digest = hashlib.sha256()
    for name in sources:
        code = code_alone((root / name).read_text(encoding="utf-8"))
        digest.update(f"{name}\0{code}\0".encode())
    return digest.hexdigest()


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
