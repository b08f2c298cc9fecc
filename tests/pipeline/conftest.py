"""A throwaway project, and a child program that runs no kernel."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from analysis.report.jobs import plan
from analysis.report.notebooks import Limits, run_jobs
from analysis.report.project import Project, select_notebooks

DEFAULTS = 'n: int = 1\nrate: float = 0.5\nlabel: str = "a"\nprofile: str = "quick"'

# Speaks the protocol of analysis.report.runner, but only copies the notebook.
STUB = """
import json, pathlib, sys, time
request = json.loads(sys.stdin.readline())
notebook = json.loads(pathlib.Path(request["source"]).read_text())
def send(**event):
    print(json.dumps(event), flush=True)
for index, cell in enumerate(notebook["cells"], 1):
    source = "".join(cell["source"])
    send(event="cell", index=index, count=len(notebook["cells"]), line=source)
    if source.startswith("stub: "):
        exec(source.removeprefix("stub: "))
    if cell["cell_type"] == "code":
        cell["execution_count"] = index
notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
text = json.dumps(notebook)
pathlib.Path(request["output"]).write_text(text)
send(event="done", device="cpu")
"""


def stub_command() -> list[str]:
    return [sys.executable, "-I", "-c", STUB]


def make_notebook(*code: str, parameters: str | None = DEFAULTS, prose: str = "# Title") -> Any:
    """A notebook with prose, a parameters cell (unless None) and code cells."""
    cells = [nbformat.v4.new_markdown_cell(prose)]
    if parameters is not None:
        cells.append(nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells += [nbformat.v4.new_code_cell(source) for source in code]
    return nbformat.v4.new_notebook(cells=cells)


class Workspace:
    """A project in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.project = Project(root)
        for folder in ("notebooks", "analysis", "results", "book"):
            (root / folder).mkdir(parents=True)
        (root / "pyproject.toml").touch()
        (root / "requirements.lock").write_text("tqdm==1\n")
        (root / "analysis" / "__init__.py").write_text("value = 1\n")

    def notebook(self, name: str, *code: str, **options: Any) -> Path:
        path = self.project.notebooks / f"{name}.ipynb"
        nbformat.write(make_notebook(*code, **options), path)
        return path

    def plan(self, *names: str, directory: Path | None = None, **options: Any) -> list[Any]:
        sources = select_notebooks(self.project, names)
        return plan(self.project, sources, directory=directory or self.project.runs, **options)

    def run(
        self,
        *names: str,
        command: Callable[[], list[str]] | None = stub_command,
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        jobs = self.plan(*names, **options)
        run_jobs(self.project, jobs, limits or Limits(jobs=2), command=command)

    def executed(self, name: str) -> Any:
        return json.loads((self.project.runs / f"{name}.ipynb").read_text())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "a project")
