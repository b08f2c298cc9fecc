"""A throwaway project, and a papermill that runs no kernel."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from analysis.report.notebooks import execution, runs
from analysis.report.notebooks.jobs import Job, Limits, plan
from analysis.report.notebooks.runs import run_jobs
from analysis.report.project import Project, select_notebooks

DEFAULTS = 'n: int = 1\nrate: float = 0.5\nlabel: str = "a"\nprofile: str = "quick"'


def make_notebook(*code: str, parameters: str | None = DEFAULTS, prose: str = "# Title") -> Any:
    """A notebook with prose, a parameters cell (unless None) and code cells."""
    cells = [nbformat.v4.new_markdown_cell(prose)]
    if parameters is not None:
        cells.append(nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells += [nbformat.v4.new_code_cell(source) for source in code]
    return nbformat.v4.new_notebook(cells=cells)


Change = Callable[["Workspace"], object]


def edit(path: str, old: str, new: str) -> Change:
    """Replace text in a file of the project."""

    def change(workspace: Workspace) -> None:
        file = workspace.project.root / path
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return change


def remove(path: str) -> Change:
    return lambda workspace: (workspace.project.root / path).unlink()


class Workspace:
    """A project in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.project = Project(root)
        for folder in ("notebooks", "analysis", "kl_term/kl", "results", "book"):
            (root / folder).mkdir(parents=True)
        (root / "pyproject.toml").touch()
        (root / "requirements.lock").write_text("tqdm==1\n")
        (root / "analysis" / "__init__.py").write_text("value = 1\n")
        (root / "kl_term" / "kl" / "terms.py").write_text("value = 1\n")

    def notebook(self, name: str, *code: str, **options: Any) -> Path:
        path = self.project.notebooks / f"{name}.ipynb"
        nbformat.write(make_notebook(*code, **options), path)
        return path

    def plan(self, *names: str, directory: Path | None = None, **options: Any) -> list[Job]:
        sources = select_notebooks(self.project, names)
        return plan(self.project, sources, directory=directory or self.project.runs, **options)

    def run(self, *names: str, limits: Limits | None = None, **options: Any) -> None:
        run_jobs(self.project, self.plan(*names, **options), limits or Limits(jobs=2))

    def executed(self, name: str) -> Any:
        return json.loads((self.project.runs / f"{name}.ipynb").read_text())


@pytest.fixture
def real_workspace(tmp_path: Path) -> Workspace:
    """A project whose notebooks run in kernels."""
    return Workspace(tmp_path / "a project")


@pytest.fixture
def workspace(real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A project whose notebooks run no kernel."""
    monkeypatch.setattr(execution, "PAPERMILL", "tests.pipeline.stubs:papermill")
    monkeypatch.setattr(runs, "WORTH_A_SERVER", math.inf)
    return real_workspace
