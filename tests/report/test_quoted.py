"""What a notebook records is quoted on a page, or the notebook says why not."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from analysis.report import session
from analysis.report.quoted import unquoted_problems

ROOT = Path(__file__).resolve().parents[2]


def notebook(folder: Path, name: str, prose: str, code: str, *records: str) -> Path:
    outputs = [
        new_output("display_data", {"text/plain": "'1'"}, metadata={"scrapbook": {"name": key}})
        for key in records
    ]
    cells = [new_markdown_cell(prose), new_code_cell(code, outputs=outputs)]
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_a_record_that_stands_nowhere_is_named(tmp_path: Path) -> None:
    prose = "{glue:text}`here`, {math}`a` and {glue:text}`formatted:.2f`"
    found = notebook(tmp_path, "01_a", prose, "", "here", "formatted", "lost", "here_too")
    assert unquoted_problems([found], []) == [
        f"01_a: {key} is recorded and quoted nowhere: quote or delete it"
        for key in ("here_too", "lost")
    ]


def test_other_pages_quote_too(tmp_path: Path) -> None:
    first = notebook(tmp_path, "01_a", "", "", "by_page", "by_readme", "by_notebook", "by_figure")
    second = notebook(tmp_path, "02_b", "{glue:text}`01_a.ipynb::by_notebook:s`", "")
    read = nbformat.read(first, 4)
    read.cells[1].metadata["mystnb"] = {"figure": {"caption": "{glue:text}`by_figure`"}}
    nbformat.write(read, first)
    pages = ["{glue:text}`_run/01_a.ipynb::by_page:s`", "<!-- glue: 01_a::by_readme -->1"]
    assert not unquoted_problems([first, second], pages)
    assert len(unquoted_problems([first], [])) == 3
    assert (
        len(unquoted_problems([first, second], [page.replace("01", "02") for page in pages])) == 2
    )


def test_a_notebook_may_say_why(tmp_path: Path) -> None:
    code = 'session.unquoted("table_*", why="in the table below")'
    said = notebook(tmp_path, "01_a", "", code, "table_one", "table_two", "other")
    assert unquoted_problems([said], []) == [
        "01_a: other is recorded and quoted nowhere: quote or delete it"
    ]


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ('session.unquoted("gone_*", why="in the table")', "stands for no record"),
        ('session.unquoted("here", why="quoted meanwhile")', "stands for no record"),
        ('session.unquoted("lost", why=" ")', "gives no reason"),
    ],
)
def test_a_reason_stands_for_something(tmp_path: Path, code: str, complaint: str) -> None:
    records = ("here", "lost") if "lost" in code else ("here",)
    found = notebook(tmp_path, "01_a", "{glue:text}`here`", code, *records)
    (problem,) = unquoted_problems([found], [])
    assert complaint in problem


def test_the_session_knows_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_recorded", {"table_one": ("", 0)})
    session.unquoted("table_*", why="in the table")
    with pytest.raises(ValueError, match="nothing is recorded"):
        session.unquoted("tables_*", why="in the table")
    with pytest.raises(ValueError, match="say why"):
        session.unquoted("table_*", why="")


def test_every_number_of_the_book_is_quoted_or_explained() -> None:
    """A contrary result was recorded for days and stood nowhere."""
    folders = (ROOT / "book", ROOT / "analysis" / "report" / "templates")
    written = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".md", ".yaml") and not path.parent.name.startswith("_")
    ]
    pages = [path.read_text(encoding="utf-8") for path in (*written, ROOT / "README.md")]
    assert unquoted_problems(sorted((ROOT / "notebooks").glob("*.ipynb")), pages) == []
