"""``analysis check`` names whatever departs, and says of the rest what it covers."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from analysis.cli.check import check
from analysis.records.manifests import write_folder
from analysis.report.checking import check_project
from analysis.report.notebooks.stored import refresh_notebooks
from analysis.report.provenance import RunFiles
from kl_term.errors import UserError
from tests.pipeline.conftest import Workspace
from tests.pipeline.test_build import CONFIG, TOC

FIELDS = {"preset": "quick", "seeds": [0], "device": "cpu", "versions": {}, "source": "a"}


@pytest.fixture
def made(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A checkout with a recording, a run and its stored outputs."""
    root = workspace.project.root
    (root / "_toc.yml").write_text(TOC)
    (root / "_config.yml").write_text(CONFIG)
    write_folder(workspace.project.results / "quick_cpu", {"t.csv": pd.DataFrame()}, FIELDS)
    workspace.notebook("01_a", "x = 1")
    workspace.run()
    refresh_notebooks(workspace.project)
    workspace.run()
    monkeypatch.chdir(root)
    return workspace


def problems_of(workspace: Workspace) -> dict[str, tuple[str, ...]]:
    return {checked.kind: checked.problems for checked in check_project(workspace.project)}


def test_a_sound_checkout_is_told_by_kind(
    made: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    check()
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said[:4]] == [
        ["results", "ok"],
        ["runs", "ok"],
        ["outputs", "ok"],
        ["claims", "absent"],
    ]
    assert "1 of them equal to their run" in said[2]
    assert said[4].startswith("not checked")


def change_output(path: Path) -> None:
    notebook = json.loads(path.read_text())
    notebook["cells"][-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "2"}]
    path.write_text(json.dumps(notebook))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("results", "t.csv changed since it was recorded"),
        ("outputs", "stores other outputs than its run"),
        ("runs", "the executed notebook was edited after the run"),
        ("claims", "never recomputed"),
    ],
)
def test_what_departs_is_named_under_its_kind(made: Workspace, kind: str, said: str) -> None:
    project = made.project
    if kind == "results":
        (project.results / "quick_cpu" / "t.csv").write_text("a\n")
    elif kind == "outputs":
        change_output(project.notebooks / "01_a.ipynb")
    elif kind == "runs":
        change_output(RunFiles(project.runs, "01_a").output)
    else:
        project.claims.write_text("[]")
        (project.runs / "claims.json").write_text("{}")
    found = problems_of(made)
    assert [name for name, problems in found.items() if problems] == [kind]
    assert said in found[kind][0]
    with pytest.raises(UserError, match=said):
        check()


def test_a_fresh_clone_says_what_it_lacks(made: Workspace) -> None:
    for file in made.project.runs.iterdir():
        if file.is_file():
            file.unlink()
    checked = {found.kind: found for found in check_project(made.project)}
    assert checked["runs"].absent and checked["claims"].absent
    assert not any(found.problems for found in checked.values())
