"""What a run was made from: the hash of every input, beside the output it explains.

Everything that the book publishes is a function of its *inputs*: the notebook, its parameters, the
code that it imports, the locked environment, and the files that it opened. A result whose inputs
changed is stale. A record is sealed by its own hash, which notices any edit; it is no signature, so
whoever edits a result, its record and the hashes is believed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from analysis.freshness import (
    changed_read,
    code_sha256,
    import_closure,
    imported_files,
    reads_sha256,
)
from analysis.report.project import Project
from kl_term.errors import UserError
from kl_term.files import read_json, replace_file, sealed, sha256_bytes, sha256_file, unsealed
from kl_term.schema import Schema

VERSIONS = ("torch", "numpy", "papermill")
_CHANGED = {
    "notebook": "the notebook changed since the run",
    "parameters": "other parameters are asked for",
    "code": "the code that it imports changed since the run",
    "environment": "requirements.lock or torch changed since the run",
}
_VOLATILE_METADATA = {"execution", "papermill", "ExecuteTime"}


class Provenance(Schema):
    """One finished run."""

    version: Literal[3] = 3
    notebook: str  #: its source, relative to the root
    parameters: dict[str, Any]  #: every parameter with the value it had
    inputs: dict[str, str]  #: hash of the notebook, its parameters, its code and the environment
    reads: dict[str, str]  #: hash of every file of the project that it opened
    output: str  #: hash of the executed notebook
    device: str  #: where tensors were computed
    threads: int  #: that the numerical libraries were pinned to
    versions: dict[str, str]  #: of python and the main libraries
    platform: str
    wall_seconds: float  #: from start to published
    finished_at: datetime

    @property
    def profile(self) -> str:
        return str(self.parameters.get("profile", "quick"))


class RunFiles:
    """The files of one notebook's run in a folder."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.output = directory / f"{name}.ipynb"
        self.provenance = directory / f"{name}.json"
        self.failed = directory / "failed" / f"{name}.ipynb"
        self.failure = directory / "failed" / f"{name}.json"
        self.lock = directory / ".locks" / f"{name}.lock"


def read_notebook(path: Path, label: str) -> dict[str, Any]:
    """The parsed JSON of a notebook."""
    notebook = read_json(path, label)
    try:
        if notebook["nbformat"] != 4:
            raise ValueError("another format")
        notebook["metadata"].items()
        for cell in notebook["cells"]:
            "".join(cell["source"]).encode(), cell["cell_type"]
            if not isinstance(cell["metadata"].get("tags", []), list):
                raise ValueError("no tags")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise UserError(
            f"{label}: no valid notebook; open it in Jupyter and save it again"
        ) from None
    return notebook


def hash_json(value: Any) -> str:
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def hash_source(notebook: Mapping[str, Any]) -> str:
    """Digest of what a notebook says and does, without the outputs stored in it."""
    cells = [
        {
            "type": cell["cell_type"],
            "source": "".join(cell["source"]),
            "metadata": {
                key: value
                for key, value in cell["metadata"].items()
                if key not in _VOLATILE_METADATA
            },
            "attachments": cell.get("attachments", {}),
        }
        for cell in notebook["cells"]
    ]
    return hash_json({"cells": cells, "mystnb": notebook["metadata"].get("mystnb", {})})


def environment_sha256(project: Project) -> str:
    """Digest of the locked packages and the version of torch, which is outside the lock."""
    lock = sha256_file(project.lock) if project.lock.is_file() else "absent"
    return hash_json([lock, installed_version("torch")])


def installed_version(distribution: str) -> str:
    """The installed version of a distribution without its local suffix, or ``absent``."""
    try:
        return importlib.metadata.version(distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def versions() -> dict[str, str]:
    """Of Python and the libraries that a run's digits may depend on."""
    return {"python": platform.python_version()} | {n: installed_version(n) for n in VERSIONS}


def inputs_of(
    project: Project, notebook: Mapping[str, Any], parameters: Mapping[str, Any], label: str
) -> dict[str, str]:
    """The hash of everything that is known of a run's inputs before it runs."""
    return {
        "notebook": hash_source(notebook),
        "parameters": hash_json(parameters),
        "code": closure_sha256(project, modules_of(project, notebook, label)),
        "environment": environment_sha256(project),
    }


def modules_of(project: Project, notebook: Mapping[str, Any], label: str) -> set[str]:
    """The modules of the project that a notebook imports by name."""
    files: set[str] = set()
    for index, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] == "code":
            try:
                files.update(imported_files(_python("".join(cell["source"])), project.root))
            except SyntaxError:
                raise UserError(f"{label}: cell {index} is no Python") from None
    return files


def closure_sha256(project: Project, files: Iterable[str]) -> str:
    """Hash of the code of some modules and of all that they import."""
    try:
        return code_sha256(import_closure(files, project.root), project.root)
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: no Python ({error.msg})") from None


def _python(source: str) -> str:
    """A cell without the lines that only IPython understands."""
    try:
        ast.parse(source)
    except SyntaxError:
        lines = source.split("\n")
        return "\n".join("" if line.lstrip()[:1] in ("%", "!") else line for line in lines)
    return source


def write_provenance(path: Path, provenance: Provenance) -> None:
    replace_file(path, sealed(provenance.model_dump(mode="json")))


def read_provenance(path: Path) -> Provenance | None:
    """The provenance at ``path``; None where it is absent, edited or of another version."""
    try:
        content = unsealed(path.read_bytes())
        return Provenance.model_validate_json(json.dumps(content))
    except (OSError, ValueError):
        return None


def why_stale(project: Project, files: RunFiles, inputs: Mapping[str, str]) -> str | None:
    """Why the run in ``files`` may not stand for ``inputs``, what it should have been made from;
    None when it may. Parts left out are not compared."""
    if failure := _failure(files):
        return f"its last run failed: {failure}"
    if not files.output.is_file():
        return "it was never run"
    provenance = read_provenance(files.provenance)
    if provenance is None:
        return "its run has no readable provenance"
    for key, value in inputs.items():
        if provenance.inputs.get(key) != value:
            return _CHANGED[key]
    if changed := changed_read(provenance.reads, project.root):
        return f"{changed} changed since the run"
    if sha256_file(files.output) != provenance.output:
        return "the executed notebook was edited after the run"
    return None


def _failure(files: RunFiles) -> str | None:
    if not files.failure.exists():
        return None
    try:
        return str(read_json(files.failure, "")["reason"])
    except (UserError, KeyError, TypeError):
        return "for an unknown reason"


def store_ledger(project: Project, problems: Mapping[str, str], reads: Iterable[str]) -> None:
    """Keep which claims disagreed, and how, when the whole ledger was recomputed, with the hash of
    what it was made from: ``reads`` are the files that were opened."""
    content = {
        "inputs": _ledger_inputs(project),
        "reads": reads_sha256(reads, project.root),
        "problems": dict(problems),
    }
    project.runs.mkdir(parents=True, exist_ok=True)
    replace_file(project.runs / "claims.json", sealed(content))


def ledger_problems(project: Project) -> list[str]:
    """What keeps the ledger from being published, one line each."""
    if not project.claims.is_file():
        return []
    try:
        stored = unsealed((project.runs / "claims.json").read_bytes())
        inputs, reads, problems = stored["inputs"], dict(stored["reads"]), dict(stored["problems"])
    except (OSError, KeyError, TypeError, ValueError):
        return ["book/claims.yaml: never recomputed; run: analysis claims"]
    if inputs != _ledger_inputs(project) or changed_read(reads, project.root):
        return ["book/claims.yaml or its evidence changed since; run: analysis claims"]
    return [f"book/claims.yaml: {claim}: {problem}" for claim, problem in problems.items()]


def _ledger_inputs(project: Project) -> dict[str, str]:
    """The rows, the code of every module that may decide a claim, and the environment."""
    deciding = [
        path.relative_to(project.root).as_posix()
        for path in (project.package / "chapters").rglob("*.py")
    ]
    return {
        "rows": sha256_file(project.claims),
        "code": closure_sha256(project, deciding),
        "environment": environment_sha256(project),
    }
