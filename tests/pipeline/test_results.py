"""Recorded results are what their manifest says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.errors import Refused
from analysis.files import sha256_file
from analysis.report.results import REQUIRED, verify_results
from tests.pipeline.conftest import Workspace


@pytest.fixture
def recorded(workspace: Workspace) -> Workspace:
    folder = workspace.project.results / "gpu"
    (folder / "parts").mkdir(parents=True)
    (folder / "table.csv").write_text("a,b\n")
    (folder / "parts" / "0.csv").write_text("1,2\n")
    manifest = {
        "preset": "full",
        "seeds": [0, 1],
        "device": "GPU",
        "versions": {"torch": "2"},
        "source": "abc",
        "files": {name: sha256_file(folder / name) for name in ("table.csv", "parts/0.csv")},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (workspace.project.results / "README.md").write_text("what this is")
    verify_results(workspace.project)
    return workspace


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "parts" / "0.csv").read_bytes())
    content[0] ^= 1
    (folder / "parts" / "0.csv").write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_a_bit, "results/gpu/parts/0.csv changed"),
        (
            lambda folder: (folder / "table.csv").unlink(),
            "results/gpu/table.csv is in the manifest",
        ),
        (lambda folder: (folder / "new.csv").touch(), "results/gpu/new.csv is not in the manifest"),
        (
            lambda folder: (folder / "manifest.json").unlink(),
            "results/gpu/manifest.json is missing",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is no JSON"),
        (lambda folder: (folder.parent / "loose.csv").touch(), "results/loose.csv: move it"),
    ],
)
def test_change_is_named(
    recorded: Workspace, change: Callable[[Path], object], message: str
) -> None:
    change(recorded.project.results / "gpu")
    with pytest.raises(Refused, match=message):
        verify_results(recorded.project)


@pytest.mark.parametrize("field", REQUIRED)
def test_manifest_without_a_field_is_refused(recorded: Workspace, field: str) -> None:
    path = recorded.project.results / "gpu" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest[field]
    path.write_text(json.dumps(manifest))
    with pytest.raises(Refused, match=f"lacks '{field}'"):
        verify_results(recorded.project)
