"""Advice: what the book refuses, on made-up rows, and that its own pages pass."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from analysis.report.advice import load_advice, prose, said
from analysis.report.advice_page import (
    advice_json,
    conditions_page,
    filled,
    filler,
    shown_fields,
    theorem_links,
)
from analysis.report.project import Project
from analysis.report.prose import prose_problems
from analysis.report.translation import catalogue_path, problems, update
from kl_term.errors import UserError

BOOK = Project(Path(__file__).parents[2])
CONDITIONS = {
    "names": {"fresh samples": "the policy drew them", "one state": "states are held fixed"},
    "theorems": {
        "thm-one": {
            "fresh samples": "tests/test_a.py::test_stale",
            "one state": "tests/test_a.py::test_answers",
        }
    },
}
ADVICE = {
    "notes": {"state": {"says": "All of it holds [[one state|at one state]]."}},
    "rows": {
        "k2_loss": {
            "when": "the KL is a loss",
            "says": "on [[fresh samples|fresh ones]] use $k_2$",
            "theorems": ["thm-one"],
            "under": ["state"],
            "names": {"verl": "`mse`", "TRL": "its own"},
        },
        "halve": {"says": "halve the step", "measured": "01_a"},
    },
}
PAGE = """# Use

| {{ advice.k2_loss.when }} | {{ advice.k2_loss.says }} | {{ advice.k2_loss.proof }} |

{{ advice.state.says }} Also {{ advice.halve.says }}.
"""
CELL = "```{prf:theorem} One\n:label: thm-one\n\n1. It holds.\n```\n"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for folder in ("book", "notebooks", "tests"):
        (tmp_path / folder).mkdir()
    cell = {"cell_type": "markdown", "source": [CELL]}
    (tmp_path / "notebooks/01_a.ipynb").write_text(json.dumps({"cells": [cell]}))
    (tmp_path / "tests/test_a.py").write_text("def test_stale():\n\n\ndef test_answers():\n")
    (tmp_path / "book/answer.md").write_text(PAGE)
    write(tmp_path, CONDITIONS, ADVICE)
    return Project(tmp_path)


def write(root, conditions, advice):
    (root / "book/conditions.yaml").write_text(yaml.safe_dump(conditions))
    (root / "book/advice.yaml").write_text(yaml.safe_dump(advice, sort_keys=False))


def changed(project, *, conditions=None, row=None, note=None, page=None):
    """The refusal after changes, each a function of what it changes; a line a problem."""
    needs, advice = copy.deepcopy(CONDITIONS), copy.deepcopy(ADVICE)
    if conditions:
        conditions(needs)
    if row:
        row(advice["rows"]["k2_loss"])
    if note:
        note(advice["notes"])
    write(project.root, needs, advice)
    if page:
        (project.book / "answer.md").write_text(page(PAGE))
    with pytest.raises(UserError) as refusal:
        load_advice(project)
    return str(refusal.value).splitlines()


def test_a_page_shows_what_its_rows_say(project):
    shown = shown_fields(project)["k2_loss"]
    assert shown["says"] == "on fresh ones use $k_2$"
    assert shown["proof"] == "{prf:ref}`thm-one`"
    assert shown["how"] == "verl `mse`; TRL its own" and shown["in_trl"] == "its own"
    assert theorem_links(["thm-a 2", "thm-b", "thm-a 3", "thm-b 1"]) == (
        "{prf:ref}`thm-a` (2, 3), {prf:ref}`thm-b`"
    )
    assert json.loads(advice_json(project))["state"]["says"] == "All of it holds at one state."
    page = filled(PAGE, shown_fields(project))
    assert "| the KL is a loss | on fresh ones use $k_2$ | {prf:ref}`thm-one` |" in page
    assert said("[[one state]] and [[fresh samples|drawn now]]") == "one state and drawn now"


def test_a_row_that_drops_a_condition_is_refused_in_one_line(project):
    drop = changed(project, row=lambda row: row.update(says="use $k_2$"))
    assert drop == [
        "book/advice.yaml: k2_loss: does not say 'fresh samples', which thm-one needs",
    ]
    drop = changed(project, note=lambda notes: notes["state"].update(says="All of it holds."))
    assert drop == ["book/advice.yaml: k2_loss: does not say 'one state', which thm-one needs"]


def test_a_theorem_that_needs_more_is_asked_of_every_row(project):
    def need(conditions):
        conditions["names"]["no clip"] = "nothing is clipped"
        conditions["theorems"]["thm-one"]["no clip"] = "tests/test_a.py::test_stale"

    (told,) = changed(project, conditions=need)
    assert told == "book/advice.yaml: k2_loss: does not say 'no clip', which thm-one needs"


def set_in(*path, value):
    def change(data):
        for step in path[:-1]:
            data = data[step]
        if value is None:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("row", set_in("theorems", value=["thm-one", "thm-two"]), "thm-two has no conditions"),
        ("row", set_in("under", value=["stat"]), "k2_loss: no note stat"),
        (
            "row",
            set_in("says", value="[[fresh samples]] [[fresh]] use $k_2$"),
            "k2_loss: no condition 'fresh'",
        ),
        ("row", set_in("theorems", value=[]), "names neither a theorem nor"),
        ("row", set_in("measured", value="02_b"), "k2_loss: no notebook 02_b"),
        ("row", set_in("theorem", value="thm-one"), "k2_loss: theorem: Extra inputs"),
        ("note", set_in("more", value={"says": "So."}), "more: no row stands under it"),
        ("note", set_in("halve", value={"says": "So."}), "halve: is a note and a row"),
        (
            "conditions",
            set_in("theorems", "thm-one", "one state", value="tests/test_a.py::test_ans"),
            "thm-one: one state: no test tests/test_a.py::test_ans",
        ),
        (
            "conditions",
            set_in("theorems", "thm-one", "one state", value="tests/test_b.py::test_answers"),
            "no test tests/test_b.py::test_answers",
        ),
        ("conditions", set_in("names", "unread", value="so"), "no theorem needs 'unread'"),
        ("conditions", set_in("names", "one state", value=None), "'one state' is not among"),
        (
            "conditions",
            set_in("theorems", "thm-two", value={"one state": "tests/test_a.py::test_stale"}),
            "thm-two: no box of the book has this label",
        ),
        (
            "conditions",
            set_in("theorems", "thm-one 1", value={"one state": "tests/test_a.py::test_stale"}),
            "thm-one 1: no row of advice rests on it",
        ),
        (
            "conditions",
            set_in("theorems", "thm-one 2", value={"one state": "tests/test_a.py::test_stale"}),
            "thm-one 2: the box has no such item",
        ),
        ("page", lambda page: page.replace("state.says", "stat.says"), "answer.md: no row stat"),
        (
            "page",
            lambda page: page.replace("loss.when", "loss.how_to"),
            "row k2_loss has no how_to; it has when, says, proof, how",
        ),
        (
            "page",
            lambda page: page.replace("{{ advice.k2_loss.says }}", "$k_2$"),
            "shows k2_loss without its 'says', which says conditions",
        ),
        (
            "page",
            lambda page: page.replace("{{ advice.state.says }}", ""),
            "shows k2_loss without the note state, which says its conditions",
        ),
        ("page", lambda page: page.replace("{{ advice.halve.says }}", ""), "no page shows it"),
    ],
)
def test_what_is_refused(project, part, change, problem):
    told = changed(project, **{part: change})
    assert any(problem in line for line in told), told


def test_numbers_in_advice_are_marked_as_given(project):
    advice = copy.deepcopy(ADVICE)
    advice["rows"]["halve"]["says"] = "halve the step below 0.25"
    write(project.root, CONDITIONS, advice)
    assert ("book/advice.yaml: halve", "halve the step below 0.25") in list(prose(project))
    project.toc.write_text("format: jb-book\nroot: book/answer\n")
    (told,) = prose_problems(project)
    assert told.startswith("book/advice.yaml: halve:1: the number 0.25 is typed by hand")


def test_a_translation_says_the_same_conditions(project):
    for page in ("answer", "advice"):
        assert update(project, page)[1] > 0
    assert any("not translated" in line for line in problems(project))
    path = catalogue_path(project, "advice")
    text = path.read_text(encoding="utf-8")
    assert "halve the step" in text and "TRL" not in text
    source = "on [[fresh samples|fresh ones]] use $k_2$"
    for chinese, told in (("用 $k_2$", True), ("在[[fresh samples|新鲜样本]]上用 $k_2$", False)):
        path.write_text(
            text.replace(f'msgid "{source}"\nmsgstr ""', f'msgid "{source}"\nmsgstr "{chinese}"')
        )
        found = [line for line in problems(project) if "roles, formulas or links differ" in line]
        assert bool(found) == told


def test_a_translated_page_shows_rows_in_its_words(project):
    words = {"on [[fresh samples|fresh ones]] use $k_2$": "[[fresh samples|neu]]: $k_2$"}
    page = filler(project, lambda text: words.get(text, text))(PAGE)
    assert "| neu: $k_2$ |" in page and "halve the step" in page and "advice." not in page


def test_the_advice_of_this_book_passes():
    advice = load_advice(BOOK)
    assert len(advice.rows) > 60
    shown = shown_fields(BOOK)
    assert all("[[" not in text for row in shown.values() for text in row.values())
    page = conditions_page(BOOK)
    assert all(
        f"`{test.partition('::')[2]}`" in page
        for needs in advice.conditions.theorems.values()
        for test in needs.values()
    )
