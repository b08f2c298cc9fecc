"""Errata and corrections of our own: evidenced, shown, and what the loader refuses."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import yaml

from analysis.report.ledger import SOURCES, Correction, load_corrections, load_errata, load_sources
from analysis.report.ledger_page import errata_page
from analysis.report.project import Project
from kl_term.errors import UserError

PROJECT = Project(Path(__file__).parents[2])
ROW = """\
- id: M0
  where: Chapter 0, summary
  stood: one and one are three
  since: "2026-11-20"
  true: one and one are two
  shown_by: test_one_and_one
"""


@pytest.fixture
def book(tmp_path):
    """Loads the corrections of a book that holds nothing but the given ones."""
    (tmp_path / "book").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text("def test_one_and_one():\n    pass\n")

    def load(text):
        (tmp_path / "book" / "corrections.yaml").write_text(text)
        return load_corrections(Project(tmp_path))

    return load


def test_every_entry_is_shown_once():
    errata, corrections = load_errata(PROJECT), load_corrections(PROJECT)
    page, _, own = errata_page(errata, corrections, load_sources(PROJECT)).partition(
        "## Our own corrections"
    )
    for text, entries in ((page, errata), (own, corrections)):
        for entry in entries:
            assert text.count(f"({entry.id.lower()})=") == 1
    assert {erratum.source for erratum in errata} == set(SOURCES)
    assert all(correction.since <= date.today() for correction in corrections)


def test_a_correction_shows_what_stood_since_when_and_what_is_true():
    (row,) = yaml.load(ROW, yaml.BaseLoader)
    row["shown_by"] = "test_refused"
    page = errata_page([], [Correction.model_validate(row)], [])
    assert "**M0** Chapter 0, summary\n" in page
    assert "*Stood since 2026-11-20:* one and one are three\n" in page
    assert "*True:* one and one are two\n\n`test_refused`" in page


def test_true_is_a_key_like_any_other(book):
    (correction,) = book(ROW)
    assert correction.true == "one and one are two"
    assert correction.since == date(2026, 11, 20)
    assert book(ROW.replace('"2026-11-20"', "2026-11-20")) == [correction]
    (of_one_case,) = book(ROW.replace("test_one_and_one", '"test_one_and_one[first]"'))
    assert of_one_case.test == "test_one_and_one[first]"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("test_one_and_one", "test_two", "M0: no test test_two"),
        ('"2026-11-20"', "in spring", "M0: since: "),
        ("  stood: one and one are three\n", "", "M0: stood: Field required"),
        ("true: one", "true: yes\n  true: one", "'true' is written twice"),
        (ROW, "M0: x", "must be a list"),
    ],
)
def test_refused(book, old, new, problem):
    with pytest.raises(UserError, match=problem):
        book(ROW.replace(old, new))
