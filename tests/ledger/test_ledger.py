"""The ledger's machinery on made-up claims: what it must refuse, and that it can agree."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from analysis.cli import claims as command
from analysis.evidence.claims import Finding, claim, judge
from analysis.report import ledger
from analysis.report.ledger import (
    disagreement,
    load_ledger,
    recompute,
    select_claims,
    write_measured,
)
from analysis.report.project import Project
from kl_term.errors import UserError

ROW = {
    "id": "S4-12",
    "source": "E",
    "place": "section 2",
    "kind": "theorem",
    "statement": "A is B.",
    "verdict": "holds if",
    "condition": "Only on-policy.",
    "measured": {"error": 0.25},
    "figure": "error {error:.2f}",
    "section": "02_gradients",
}


def a_is_b() -> Finding:
    return Finding("holds if", {"error": 0.25})


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "book").mkdir()
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "a.py").write_text("x = 1\n")
    return Project(tmp_path)


def write(project: Project, *rows: dict) -> None:
    (project.book / "claims.yaml").write_text(yaml.safe_dump(list(rows)))


def outcome_of(project, decide=a_is_b, **changes):
    write(project, {**ROW, **changes})
    return next(recompute(load_ledger(project), lambda: {"S4-12": decide}))


def test_agreement(project):
    outcome = outcome_of(project)
    assert outcome.problem == "" and 0 <= outcome.seconds < 60
    assert outcome.claim.shown_figure == "error 0.25"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"verdict": "holds"}, "recorded 'holds', recomputed 'holds if'"),
        ({"measured": {"error": 0.26}}, "error recorded 0.26, recomputed 0.25"),
        ({"measured": {"error": math.inf}}, "error recorded inf"),
        (
            {"measured": {"other": 0.25}, "figure": ""},
            "measured names ['other'], recomputed names ['error']",
        ),
    ],
)
def test_every_departure_is_named(project, changes, problem):
    assert problem in outcome_of(project, **changes).problem


def test_a_decision_that_raises_or_is_missing_is_a_disagreement(project):
    def broken() -> Finding:
        raise RuntimeError("no")

    problem = outcome_of(project, decide=broken).problem
    assert problem.endswith("broken raised RuntimeError: no") and __name__ in problem
    write(project, ROW)
    missing = next(recompute(load_ledger(project), dict))
    assert "no function decides it" in missing.problem


def test_what_was_recomputed_can_be_written_and_then_agrees(project):
    write(project, {**ROW, "measured": {"error": 0.5}}, {**ROW, "id": "S4-14"})
    found = {"S4-12": a_is_b, "S4-14": lambda: Finding("fails", {"error": 1 / 3})}
    write_measured(project, recompute(load_ledger(project), lambda: found))
    first, second = load_ledger(project)
    assert (first.measured, second.verdict, second.measured) == (
        {"error": 0.25},
        "fails",
        {"error": 0.3333},
    )
    assert not any(o.problem for o in recompute([first, second], lambda: found))


def test_a_written_row_keeps_its_order_its_letters_and_lines_of_its_width(project):
    statement = "β weighs the KL of " + "a long sentence " * 12
    row = {**ROW, "statement": statement.strip(), "measured": {"error": 0.5}}
    project.claims.write_text(yaml.safe_dump([row], sort_keys=False))
    write_measured(project, recompute(load_ledger(project), lambda: {"S4-12": a_is_b}))
    lines = project.claims.read_text(encoding="utf-8").splitlines()
    assert [line.split(":")[0].strip("- ") for line in (lines[0], lines[1])] == ["id", "source"]
    assert "β weighs" in project.claims.read_text(encoding="utf-8")
    assert 100 < max(map(len, lines)) <= 120


#: A row as somebody wrapped it by hand, with a remark: nothing here would dump it like this.
BY_HAND = """# what the sources say
- id: S4-13
  source: E
  place: section 2
  kind: theorem
  statement: "C is D,
    whatever   E is."   # as printed
  verdict: holds
  condition: Always.
  measured: {error: 0.125}
  figure: error {error:.2f}
  section: 02_gradients
"""


def test_only_the_rows_that_disagree_are_written(project):
    stale = yaml.safe_dump([{**ROW, "measured": {"error": 0.5}}])
    project.claims.write_text(BY_HAND + stale)
    found = {"S4-12": a_is_b, "S4-13": lambda: Finding("holds", {"error": 0.125})}
    assert write_measured(project, recompute(load_ledger(project), lambda: found)) == ["S4-12"]
    text = project.claims.read_text()
    assert text.startswith(BY_HAND) and "0.5" not in text
    assert all(o.problem == "" for o in recompute(load_ledger(project), lambda: found))
    assert write_measured(project, recompute(load_ledger(project), lambda: found)) == []
    assert project.claims.read_text() == text


def test_rows_that_are_not_at_the_margin_are_not_said_to_be_written(project):
    outcome = outcome_of(project, lambda: Finding("holds if", {"error": 0.5}))
    indented = "".join(f"  {line}" for line in project.claims.read_text().splitlines(True))
    project.claims.write_text(indented)
    assert load_ledger(project)[0].measured == {"error": 0.25}
    with pytest.raises(ValueError, match="shorter"):
        write_measured(project, [outcome])
    assert project.claims.read_text() == indented


def test_nothing_is_written_when_a_claim_raises(project):
    def broken() -> Finding:
        raise ZeroDivisionError("no seeds")

    stale = yaml.safe_dump([{**ROW, "measured": {"error": 0.5}}])
    project.claims.write_text(BY_HAND + stale)
    found = {"S4-12": a_is_b, "S4-13": broken}
    with pytest.raises(UserError, match=r"S4-13: .*no seeds\nnothing was written"):
        write_measured(project, recompute(load_ledger(project), lambda: found))
    assert project.claims.read_text() == BY_HAND + stale
    del found["S4-13"]
    with pytest.raises(UserError, match="S4-13: no function decides it"):
        write_measured(project, recompute(load_ledger(project), lambda: found))


def test_infinite_and_undefined_figures_can_agree(project):
    write(project, {**ROW, "measured": {"error": math.inf, "other": math.nan}})
    (claim,) = load_ledger(project)
    assert not disagreement(claim, Finding("holds if", {"error": math.inf, "other": math.nan}))
    assert disagreement(claim, Finding("holds if", {"error": -math.inf, "other": math.nan}))
    assert disagreement(claim, Finding("holds if", {"error": math.inf, "other": 0.5}))
    write(project, {**ROW, "measured": {"error": 0.0, "other": 0.5}})
    (claim,) = load_ledger(project)
    assert not disagreement(claim, Finding("holds if", {"error": 1e-12, "other": 0.5004}))
    assert disagreement(claim, Finding("holds if", {"error": 1e-12, "other": math.nan}))
    assert disagreement(claim, Finding("holds if", {"error": 1e-6, "other": 0.5}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": "true"}, "S4-12: verdict"),
        ({"kind": "guess"}, "S4-12: kind"),
        ({"colour": "red"}, "S4-12: colour"),
        ({"figure": "{absent:.1f}"}, "figure quotes \\['absent'\\]"),
        ({"verdict": "open"}, "exactly the open claims name an experiment"),
        ({"source": "D"}, "source D does not fit"),
        ({"id": "S9-1"}, "S9-1: id"),
    ],
)
def test_a_malformed_row_is_refused_by_id_and_field(project, changes, message):
    write(project, {**ROW, **changes})
    with pytest.raises(UserError, match=message):
        load_ledger(project)


def test_a_row_without_an_id_is_refused_by_file_and_number(project):
    write(project, ROW, {"source": "E"})
    with pytest.raises(UserError, match=r"^book/claims\.yaml: row 2: id"):
        load_ledger(project)
    write(project, ROW, {"key": "nameless"})
    with pytest.raises(UserError, match=r"^book/claims\.yaml: nameless: id"):
        load_ledger(project)
    write(project, ROW, "words")
    with pytest.raises(UserError, match=r"^book/claims\.yaml: row 2: row: "):
        load_ledger(project)
    project.claims.write_text("- [")
    with pytest.raises(UserError, match=r"^book/claims\.yaml"):
        load_ledger(project)


def test_an_id_written_twice_is_refused(project):
    write(project, ROW, ROW)
    with pytest.raises(UserError, match="S4-12 is written twice"):
        load_ledger(project)


def test_one_id_can_be_asked_for(project):
    write(project, ROW, {**ROW, "id": "S4-14"})
    ledger = load_ledger(project)
    assert [claim.id for claim in select_claims(ledger, ["S4-14"])] == ["S4-14"]
    assert len(select_claims(ledger, [])) == 2
    with pytest.raises(UserError, match=r"no claim 'S4-99' .* ids look like S4-12"):
        select_claims(ledger, ["S4-99"])


def test_a_claim_has_one_decision(monkeypatch):
    monkeypatch.setattr("analysis.evidence.claims._DECISIONS", {})

    def one() -> Finding: ...

    def two() -> Finding: ...

    claim("S0-test")(one)
    claim("S0-test")(one)
    with pytest.raises(ValueError, match="S0-test is decided by"):
        claim("S0-test")(two)


def test_settle():
    assert [judge(True, True), judge(False, True), judge(False, False)] == [
        "holds",
        "holds if",
        "fails",
    ]


@pytest.mark.parametrize(("force", "times"), [(False, 0), (True, 1)])
def test_force_recomputes_what_is_up_to_date(project, force, times, monkeypatch):
    write(project, ROW)
    monkeypatch.setattr(command, "find_project", lambda folder: project)
    monkeypatch.setattr(command, "ledger_problems", lambda project: [])
    monkeypatch.setattr(command, "store_ledger", lambda *of: None)
    asked = []

    def decided(rows):
        asked.append([row.id for row in rows])
        return recompute(rows, lambda: {"S4-12": a_is_b})

    monkeypatch.setattr(ledger, "recompute", decided)
    command.claims(force=force)
    assert asked == [["S4-12"]] * times
