"""No number typed by hand, no quotation of what was never recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.report.prose import prose_problems, readme_problems, records_of, typed_numbers
from tests.pipeline.conftest import Workspace, make_notebook


def numbers(text: str, *, maths: bool = False) -> list[tuple[int, str]]:
    return list(typed_numbers(text, maths=maths))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a gap of 0.25 nats", "0.25"),
        ("a gap of .5", ".5"),
        ("falls to -1.5e-3.", "1.5e-3"),
        ("about 12% of tokens", "12%"),
        ("about 12.5 % of", "12.5 %"),
        ("about 12 percent", "12 percent"),
        ("at 1e-3", "1e-3"),
        ("24 seeds", "24"),
        ("about 1,000 tokens", "1,000"),
        ("of 2000 policies", "2000"),
        ("groups of 16, each", "16"),
        ("$x = 0.5$", "0.5"),
        ("{math}`x = 0.5`", "0.5"),
        ("version 1.0.4", "1.0"),
        ("[a gap of 0.25](page.md)", "0.25"),
        ("# Title 0.25", "0.25"),
    ],
)
def test_typed_number_is_found(text: str, found: str) -> None:
    assert numbers(f"First line.\n\n{text}\n") == [(3, found)]


@pytest.mark.parametrize(
    "text",
    [
        "8 variants, in 2026-11-20, a 32B model, the top-10, A100, 10th",
        "Liu et al. (2025), July 2026, since 1997",
        "chapter 14, equation 29, Figure 12, tables 10",
        "`beta = 0.04` and ``x`0.1``",
        "{glue:text}`path::gap:.2f` and {given}`0.04`",
        "{cite}`schulman2.0` {eq}`k3` {numref}`Figure 1.2 <x>`",
        "[text](https://a.org/1.5/x) <https://a.org/1.5> https://a.org/v1.5",
        "[ref]: https://a.org/1.5",
        "<!-- 0.25 -->",
        "% 0.25 in a comment",
        '<img style="width: 0.5em">',
        "arXiv:2402.03300",
        "```python\nx = 0.25\n```",
        "```{code-block} python\n:emphasize: 0.5\nx = 0.25\n```",
        "```{figure} a-0.25.png\n:width: 80.5%\nA caption.\n```",
        "---\nversion: 0.25\n---",
        "end of 3.\nNext",
    ],
)
def test_what_is_no_typed_number_is_left_alone(text: str) -> None:
    assert numbers(text) == []


@pytest.mark.parametrize(
    "text", ["$x = 0.5$", "$$\nx = 0.5\n$$", "{math}`0.5`", "```{math}\n:label: a\n0.5\n```"]
)
def test_formulas_may_hold_numbers_in_notebooks_only(text: str) -> None:
    assert numbers(text, maths=True) == []
    assert [number for _, number in numbers(text, maths=False)] == ["0.5"]


@pytest.mark.parametrize(
    "opening",
    ["```{note}", ":::{admonition} Title", "```{prf:theorem} T\n:label: 0.5-thm", ":::{figure} a"],
)
def test_directive_bodies_are_prose(opening: str) -> None:
    fence = opening[:3]
    text = f"{opening}\nA gap of 0.25.\n{fence}\n\nAfter 0.75.\n"
    assert [number for _, number in numbers(text)] == ["0.25", "0.75"]


def test_nested_directives_and_code_end_where_they_end() -> None:
    text = "::::{note}\n:::{tip}\n0.1\n:::\n```python\n0.2\n```\n0.3\n::::\n0.4\n"
    assert [number for _, number in numbers(text)] == ["0.1", "0.3", "0.4"]


def record(key: str, text: str) -> dict[str, Any]:
    return {
        "output_type": "display_data",
        "data": {"application/papermill.record/text/plain": repr(text)},
        "metadata": {"scrapbook": {"name": key, "mime_prefix": "application/papermill.record/"}},
    }


@pytest.fixture
def book(workspace: Workspace) -> Workspace:
    """A run that recorded ``gap`` as 0.25."""
    workspace.notebook("01_a", "record")
    notebook = json.loads(json.dumps(make_notebook("record")))
    notebook["cells"][2]["outputs"] = [record("gap", "0.25")]
    workspace.project.runs.mkdir(parents=True)
    workspace.project.toc.write_text("root: book/index")
    (workspace.project.runs / "01_a.ipynb").write_text(json.dumps(notebook))
    return workspace


def test_records_are_read_as_text() -> None:
    notebook = {"cells": [{"outputs": [record("gap", "0.25"), record("it's", "∞'")]}]}
    assert records_of(notebook) == {"gap": "0.25", "it's": "∞'"}


def test_a_typed_number_names_page_and_line(book: Workspace) -> None:
    (book.project.book / "index.md").write_text("a\n0.25")
    (problem,) = prose_problems(book.project)
    assert problem.startswith("book/index.md:2: the number 0.25 is typed by hand")


def test_notebook_prose_and_captions_are_linted(book: Workspace) -> None:
    source = book.project.notebooks / "01_a.ipynb"
    notebook = make_notebook("figure", prose="# T\n\n0.25 $0.5$ {glue:text}`gap`")
    notebook.cells[2].metadata["mystnb"] = {"figure": {"caption": "With 50 % of it."}}
    source.write_text(json.dumps(notebook))
    book.project.toc.write_text("root: book/_run/01_a")
    found = prose_problems(book.project)
    assert [problem.split(" is ")[0] for problem in found] == [
        "notebooks/01_a.ipynb:cell 1:3: the number 0.25",
        "notebooks/01_a.ipynb:cell 3 caption:1: the number 50 %",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- glue: 01_a::gap -->0.25<!-- /glue -->", None),
        (
            "x\n<!-- glue: 01_a::gap -->0.26<!-- /glue -->",
            "README.md:2: 01_a::gap is 0.25, not '0.26'",
        ),
        ("<!-- glue: 01_a::gp -->0.25<!-- /glue -->", "README.md:1: 01_a records no 'gp'"),
        ("<!-- glue: 09_z::gap -->0.25<!-- /glue -->", "README.md:1: 09_z records no 'gap'"),
        ("<!-- glue: 01_a::gap -->0.25", "README.md: close each"),
    ],
)
def test_readme_quotes_the_runs(book: Workspace, text: str, message: str | None) -> None:
    Path(book.project.readme).write_text(text)
    found = readme_problems(book.project)
    assert found == [] if message is None else found[0].startswith(message)
