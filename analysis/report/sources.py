"""Where things are defined in the checkout, read as text."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from analysis.report.project import Project


def definitions(path: Path) -> dict[str, int]:
    """Line of each function, class and method of a module, by its bare name; empty for no file."""
    return _definitions(path, path.stat().st_mtime_ns) if path.is_file() else {}


@cache
def _definitions(path: Path, changed: int) -> dict[str, int]:
    return {
        node.name: node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


def function_place(project: Project, name: str) -> tuple[str, int] | None:
    """File, relative to the root, and line of a function named with its module, if it exists."""
    module, _, function = name.rpartition(".")
    path = project.root.joinpath(*module.split(".")).with_suffix(".py")
    line = definitions(path).get(function)
    return None if line is None else (project.relative(path), line)
