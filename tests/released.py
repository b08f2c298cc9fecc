"""Functions of released packages, from their own files, without their other dependencies."""

from __future__ import annotations

import ast
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.chapters.ch14_frameworks.trainers import SOURCES


def source_of(package: str, path: str) -> Path:
    """A file of an installed package; the test is skipped where that is not installed."""
    try:
        return Path(metadata.distribution(package).locate_file(path))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: make test-full compares with its own code")


def functions_of(package: str, path: str, *names: str, **namespace: Any) -> list[Any]:
    return functions_in(source_of(package, path), *names, **namespace)


def functions_in(file: Path, *names: str, **namespace: Any) -> list[Any]:
    """These functions and classes of a file, in a namespace of torch and what is given."""
    wanted = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
            node.decorator_list = []
            wanted.append(node)
    assert {node.name for node in wanted} == set(names), f"{file} has changed"
    module = {"torch": torch, **namespace}
    code = ast.Module([ast.parse("from __future__ import annotations").body[0], *wanted], [])
    exec(compile(code, str(file), "exec"), module)
    return [module[name] for name in names]


def checkout(framework: str) -> Path:
    """Where a framework without a release lies, at the commit that was read; skips without one."""
    source = next(source for source in SOURCES if source.framework == framework)
    folder = source.repository.partition("/")[2]
    if "FRAMEWORK_SOURCES" not in os.environ:
        pytest.skip(
            f"set FRAMEWORK_SOURCES to a folder that holds {folder} at {source.version} "
            "to compare with its own code"
        )
    return Path(os.environ["FRAMEWORK_SOURCES"], folder)
