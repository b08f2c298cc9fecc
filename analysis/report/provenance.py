"""What a run was made from: the hash of every input, beside the output it explains."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from analysis.errors import Refused
from analysis.files import replace_file, sha256_bytes, sha256_file, sha256_tree
from analysis.report.project import Project

SCHEMA = 1

_CHANGED = {
    "notebook": "the notebook changed since the run",
    "parameters": "other parameters are asked for",
    "package": "the source of analysis/ changed since the run",
    "results": "the recorded results changed since the run",
    "environment": "requirements.lock or torch changed since the run",
}
_VOLATILE_METADATA = {"execution", "papermill", "ExecuteTime"}


@dataclass(frozen=True)
class Provenance:
    """One finished run.

    Attributes:
        notebook: its source, relative to the root.
        parameters: every parameter with the value it had.
        inputs: sha256 of the notebook's source, parameters, package, results and environment.
        output: sha256 of the executed notebook.
        device: where tensors were computed.
        threads: the number of threads the numerical libraries were pinned to.
        versions: of python and the main libraries.
        wall_seconds: from start to published.
        finished_at: UTC, ISO 8601.
    """

    schema: int
    notebook: str
    parameters: dict[str, Any]
    inputs: dict[str, str]
    output: str
    device: str
    threads: int
    versions: dict[str, str]
    platform: str
    wall_seconds: float
    finished_at: str

    @property
    def profile(self) -> str:
        return str(self.parameters.get("profile", "quick"))


@dataclass(frozen=True)
class RunFiles:
    """The files of one notebook's run in a folder."""

    directory: Path
    name: str

    @property
    def output(self) -> Path:
        return self.directory / f"{self.name}.ipynb"

    @property
    def provenance(self) -> Path:
        return self.directory / f"{self.name}.json"

    @property
    def failed(self) -> Path:
        return self.directory / "failed" / f"{self.name}.ipynb"

    @property
    def failure(self) -> Path:
        return self.directory / "failed" / f"{self.name}.json"

    @property
    def lock(self) -> Path:
        return self.directory / ".locks" / f"{self.name}.lock"


def read_notebook(path: Path, label: str) -> dict[str, Any]:
    """The parsed JSON of a notebook.

    Raises:
        Refused: it cannot be read or is no notebook.
    """
    try:
        notebook = json.loads(path.read_bytes())
        if not {"cells", "metadata"} <= notebook.keys():
            raise ValueError("no notebook")
    except OSError as error:
        raise Refused(f"{label}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError):
        raise Refused(f"{label}: no valid notebook; open it in Jupyter and save it again") from None
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
                for key, value in cell.get("metadata", {}).items()
                if key not in _VOLATILE_METADATA
            },
            "attachments": cell.get("attachments", {}),
        }
        for cell in notebook["cells"]
    ]
    return hash_json({"cells": cells, "mystnb": notebook["metadata"].get("mystnb", {})})


def installed_version(distribution: str) -> str:
    """The installed version of a distribution without its local suffix, or ``absent``."""
    try:
        return importlib.metadata.version(distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def shared_inputs(project: Project) -> dict[str, str]:
    """The hashes that all runs of a checkout share."""
    lock = sha256_file(project.lock) if project.lock.is_file() else "absent"
    return {
        "package": sha256_tree(project.package, "**/*.py"),
        "results": sha256_tree(project.results),
        "environment": hash_json([lock, installed_version("torch")]),
    }


def inputs_of(
    notebook: Mapping[str, Any], parameters: Mapping[str, Any], shared: Mapping[str, str]
) -> dict[str, str]:
    """The hash of everything a run is a function of."""
    return {
        "notebook": hash_source(notebook),
        "parameters": hash_json(parameters),
        **shared,
    }


def write_provenance(path: Path, provenance: Provenance) -> None:
    replace_file(path, (json.dumps(asdict(provenance), indent=2) + "\n").encode())


def read_provenance(path: Path) -> Provenance | None:
    """The provenance at ``path``; None where it is absent, damaged or of another schema."""
    try:
        content = json.loads(path.read_bytes())
        if content["schema"] != SCHEMA or set(content) != {f.name for f in fields(Provenance)}:
            return None
        provenance = Provenance(**content)
        if provenance.inputs["parameters"] != hash_json(provenance.parameters):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return provenance


def why_not_current(files: RunFiles, inputs: Mapping[str, str]) -> str | None:
    """Why the run in ``files`` may not stand for ``inputs``; None when it may.

    Args:
        inputs: what the run should have been made from; parts left out are not compared.
    """
    if not files.output.is_file():
        failure = _failure(files)
        return f"its last run failed: {failure}" if failure else "it was never run"
    if failure := _failure(files):
        return f"its last run failed: {failure}"
    provenance = read_provenance(files.provenance)
    if provenance is None:
        return "its run has no readable provenance"
    for key, value in inputs.items():
        if provenance.inputs.get(key) != value:
            return _CHANGED[key]
    if sha256_file(files.output) != provenance.output:
        return "the executed notebook was edited after the run"
    return None


def _failure(files: RunFiles) -> str | None:
    try:
        return str(json.loads(files.failure.read_bytes())["reason"])
    except OSError:
        return None
    except (ValueError, KeyError, TypeError):
        return "for an unknown reason"
