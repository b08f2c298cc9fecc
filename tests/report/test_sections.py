"""Sections open with a sentence; the main line is read to the end: few words, fewer numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.report.provenance import read_notebook
from analysis.report.sections import unopened, words_and_numbers

ROOT = Path(__file__).resolve().parents[2]


def main_line() -> list[str]:
    parts = yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"]
    files = [
        chapter["file"]
        for part in parts
        for chapter in part["chapters"]
        if part["caption"].startswith("The main line")
    ]
    return ["21_guide", *(Path(file).name for file in files)]


def notebook(name: str) -> dict[str, Any]:
    return read_notebook(ROOT / f"notebooks/{name}.ipynb", name)


def of(*cells: str | dict[str, Any]) -> dict[str, Any]:
    return {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": cell}
            if isinstance(cell, str)
            else {"cell_type": "code", "source": "draw()", "metadata": cell}
            for cell in cells
        ]
    }


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb")))
def test_each_section_opens_with_the_sentence_that_says_what_it_means(name: str) -> None:
    assert unopened(notebook(name)) == []


def test_no_cell_unfolds_by_two_lines_one_below_the_other() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in notebook(path.stem)["cells"]:
            assert not {"hide-input", "hide-output"} <= {*cell["metadata"].get("tags", ())}, path


def test_the_main_line_is_read_to_the_end() -> None:
    counts = {name: words_and_numbers(notebook(name)) for name in main_line()}
    assert len(counts) > 8
    assert min(words for words, _ in counts.values()) > 1_000
    assert sum(words for words, _ in counts.values()) < 30_000
    for name, (words, numbers) in counts.items():
        assert numbers <= 3 * words / 100, name


@pytest.mark.parametrize(
    "opening",
    [
        "```{note}\nIt holds.\n```",
        "```{math}\n:label: a\nx. \n```",
        "$$ x $$",
        "- It holds.",
        "| a |\n|---|\n| It holds. |",
        "Below, every advantage is a coin flip.",
        "For any weights $w$,\n\n$$ x $$",
        "The losses that follow:",
        "### Another title\n\nIt holds.",
        "",
    ],
)
def test_what_is_no_sentence_opens_no_section(opening: str) -> None:
    assert unopened(of(f"# Page\n\nIt holds.\n\n## Part $k_1$\n\n{opening}")) == ["Part _"]


def test_a_figure_opens_no_section_and_a_hidden_cell_is_not_there() -> None:
    figure = {"mystnb": {"figure": {"caption": "**It holds.** So it does."}}}
    assert unopened(of("## Part", figure, "It holds.")) == ["Part"]
    assert unopened(of("## Part", {"tags": ["remove-cell"]}, "It holds.")) == []


def test_targets_numbers_and_formulas_may_stand_in_the_sentence() -> None:
    page = of(
        "(sec-a)=\n## Part\n\nAt {glue:text}`x` nats $k_1$ holds, as {doc}`a` says: yes.\n\n- b"
    )
    assert unopened(page) == []
    assert unopened(of("## Exercises\n\n```{exercise}\nWhy?\n```")) == []


def test_words_are_those_before_the_appendix_that_are_not_folded() -> None:
    page = of(
        "## Part\n\nFour words are here, {glue:text}`x` of 2.5 nats.",
        "```{prf:theorem} It\n:label: a\n\nholds $x = 12$.\n```",
        "```{dropdown} More\nNot seen.\n```",
        {"mystnb": {"figure": {"caption": "A caption of `code`."}}},
        "| word | {given}`7` |\n|---|---|\n| word | 8 |",
        "## Appendix\n\nNot read.",
    )
    words = (
        "Part",
        "Four words are here, of nats",
        "It holds",
        "More",
        "A caption of",
        "word word",
    )
    assert words_and_numbers(page) == (len(" ".join(words).split()), 2)
