"""The hand-written pages: their examples run, their works are real, their copies are current."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
import torch
from pybtex.database import Entry, parse_file

from analysis.report import run_figures
from analysis.report.style import COLOURS

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
WORKS = parse_file(str(BOOK / "references.bib")).entries


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_example_for_trainers_runs_and_does_what_the_text_says() -> None:
    namespace: dict[str, object] = {}
    examples = blocks(BOOK / "reproduce.md", "python")
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "book/reproduce.md", "exec"), namespace)
    gradient, mask = namespace["logp"].grad, namespace["mask"]
    assert torch.isfinite(gradient).all()
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).any()


def test_the_commands_set_parameters_that_the_notebook_has() -> None:
    lines = "".join(blocks(BOOK / "reproduce.md", "sh")).splitlines()
    commands = [line for line in lines if " -p " in line]
    assert len(commands) == 3
    for command in commands:
        number = re.search(r"\b(\d\d)(_\w+)?", command)[1]
        (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        (source,) = (
            cell.source
            for cell in nbformat.read(path, as_version=4).cells
            if "parameters" in cell.metadata.get("tags", [])
        )
        names = re.findall(r" -p (\w+)", command)
        assert names and set(names) <= set(re.findall(r"^(\w+):", source, re.MULTILINE)), command


@pytest.mark.parametrize("work", WORKS.values(), ids=list(WORKS))
def test_every_work_can_be_found_by_its_reader(work: Entry) -> None:
    assert work.persons["author"]
    assert work.fields["title"]
    assert "eprint" in work.fields or work.fields["url"].startswith("http")


@pytest.mark.parametrize(
    "work", [w for w in WORKS.values() if "eprint" in w.fields], ids=lambda work: work.key
)
def test_the_year_of_a_preprint_is_that_of_its_number(work: Entry) -> None:
    number = re.fullmatch(r"(\d\d)(0[1-9]|1[0-2])\.\d{4,5}", work.fields["eprint"])
    assert number, work.fields["eprint"]
    assert work.fields["year"] == f"20{number[1]}"


def test_no_preprint_is_listed_twice() -> None:
    numbers = [work.fields["eprint"] for work in WORKS.values() if "eprint" in work.fields]
    assert len(numbers) == len(set(numbers))


def test_notation_lists_every_estimator_that_figures_draw() -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", (BOOK / "notation.md").read_text()))
    assert set(COLOURS) - {"none", "exact", "reverse", "forward"} <= named


def test_copies_of_figures_are_those_of_the_committed_notebooks(tmp_path: Path) -> None:
    copies = sorted((BOOK / "_static/figures").glob("fig-*.png"))
    for copy in copies:
        (tmp_path / copy.name).write_bytes(copy.read_bytes())
    stale = run_figures.refresh_copies(tmp_path, ROOT / "notebooks")
    assert [path.name for path in stale] == []
    shown = set(
        re.findall(r"book/_static/figures/(fig-[\w-]+\.png)", (ROOT / "README.md").read_text())
    )
    assert shown == {copy.name for copy in copies}


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_no_caption_cites(path: Path) -> None:
    """A citation in a figure caption is a moving argument that LaTeX cannot carry."""
    for cell in nbformat.read(path, as_version=4).cells:
        caption = cell.metadata.get("mystnb", {}).get("figure", {}).get("caption", "")
        assert "{cite" not in caption
