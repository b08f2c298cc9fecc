"""The first cell away from a checkout: it fetches and installs there, and does nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import nbformat
import pytest

from analysis.report.project import Project
from analysis.report.setup_cell import setup_source, with_setup

#: Stands in for pip: installing from the index is not what is tested.
PIP = """
import json, pathlib, sys
said = pathlib.Path({log!r})
calls = json.loads(said.read_text()) if said.exists() else []
said.write_text(json.dumps([*calls, sys.argv[1:]]))
"""
USE = "\nimport analysis\nprint(analysis.where, os.path.basename(os.getcwd()))\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of a package of one line."""
    folder = tmp_path / "repository"
    (folder / "analysis").mkdir(parents=True)
    (folder / "analysis/__init__.py").write_text('where = "from the clone"\n')
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for step in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run([*git, *step], check=True)
    return folder


def test_in_an_empty_environment_it_clones_installs_and_imports(
    tmp_path: Path, repository: Path
) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty/bin/python"
    (site,) = (tmp_path / "empty/lib").glob("*/site-packages")
    log = tmp_path / "pip.json"
    (site / "pip.py").write_text(PIP.format(log=str(log)))
    cell = setup_source(repository.as_uri(), "main")
    colab = tmp_path / "colab"
    colab.mkdir()
    run = lambda: subprocess.run(
        [python, "-I", "-c", cell + USE], cwd=colab, capture_output=True, text=True, check=True
    )
    assert run().stdout == "from the clone kl-term\n"
    assert json.loads(log.read_text()) == [["install", "--quiet", "--editable", "./kl-term[book]"]]
    assert run().stdout == "from the clone kl-term\n"  # the clone is there already


def test_where_the_package_is_installed_it_does_nothing(tmp_path: Path) -> None:
    cell = setup_source("https://unreachable.invalid/x.git", "main")
    done = subprocess.run(
        [sys.executable, "-c", cell], cwd=Path(__file__).parents[2], capture_output=True, check=True
    )
    assert done.stdout == b""


def notebook() -> dict[str, Any]:
    return dict(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title")]))


def test_notebooks_get_the_cell_once_where_a_repository_is_named(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert len(with_setup(notebook(), project)["cells"]) == 1
    project.address.write_text("repository: https://example.org/x\nbranch: trunk\n")
    once = with_setup(notebook(), project)
    assert [c["cell_type"] for c in once["cells"]] == ["code", "markdown"]
    assert "".join(once["cells"][0]["source"]) == setup_source("https://example.org/x", "trunk")
    assert '"trunk"' in setup_source("https://example.org/x", "trunk")
    assert with_setup(once, project) == once
    nbformat.validate(nbformat.from_dict(once))
    project.address.write_text("site: https://example.org\n")
    assert len(with_setup(once, project)["cells"]) == 1
