"""A changed line makes stale the chapters that it is about, and no others.

Counted as the build counts: by the hash of all code that a notebook imports.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from analysis import freshness
from analysis.freshness import ROOT, code_sha256, import_closure
from analysis.report.project import Project
from analysis.report.provenance import modules_of, read_notebook

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: Chapters that train something while they run.
TRAINING = {"04_grpo_ablation", "18_distillation"}
#: Chapters whose numbers come from enumeration and sampling alone.
WITHOUT_RECORDINGS = {"00", "03", "13", "14"}


@cache
def imported(path: Path) -> tuple[str, ...]:
    """The modules that a notebook names."""
    return modules_of(Project(ROOT), read_notebook(path, path.name), path.name)


@cache
def closures() -> dict[str, tuple[str, ...]]:
    """All modules that each notebook depends on."""
    return {path.stem: import_closure(imported(path)) for path in NOTEBOOKS}


@cache
def as_they_are() -> dict[str, str]:
    """The hash of each notebook's modules."""
    return {notebook: code_sha256(files) for notebook, files in closures().items()}


def stale_after_a_change(name: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    before = as_they_are()
    read = freshness._read

    def changed(path: Path) -> freshness._Module:
        module = read(path)
        return module._replace(code=module.code + "+") if path == ROOT / name else module

    assert (ROOT / name).is_file()
    with monkeypatch.context() as patch:
        patch.setattr(freshness, "_read", changed)
        after = {notebook: code_sha256(files) for notebook, files in closures().items()}
    return {notebook for notebook in before if before[notebook] != after[notebook]}


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("analysis/training/pretrained/lora.py", 4),
        ("analysis/training/loss.py", 5),
        ("kl_term/objectives/losses.py", 12),
        ("kl_term/kl/estimators.py", len(NOTEBOOKS)),
    ],
)
def test_how_many_notebooks_a_changed_line_makes_stale(name, most, monkeypatch):
    stale = stale_after_a_change(name, monkeypatch)
    assert 0 < len(stale) <= most, sorted(stale)


def test_the_trainer_is_loaded_where_something_is_trained():
    loading = {n for n, files in closures().items() if "analysis/training/trainer.py" in files}
    assert loading == TRAINING


def test_chapters_without_recordings_load_no_floor_of_the_runs():
    found = {name for name in closures() if name[:2] in WITHOUT_RECORDINGS}
    assert len(found) == len(WITHOUT_RECORDINGS)
    floors = ("analysis/training/", "analysis/sweeps/", "analysis/studies/")
    for name in found:
        assert not [file for file in closures()[name] if file.startswith(floors)], name


def test_the_median_notebook_depends_on_few_modules():
    assert statistics.median(len(files) for files in closures().values()) < 40


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_no_other_chapter(notebook):
    chapters = {file.partition("/chapters/ch")[2] for file in imported(notebook)} - {""}
    assert {chapter[:2] for chapter in chapters} == {notebook.name[:2]}
