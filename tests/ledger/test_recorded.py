"""The recorded ledger: complete, evidenced, and recomputed to the same verdicts."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from analysis.cli.main import main
from analysis.evidence.claims import VERDICTS, decisions
from analysis.report.ledger import SOURCES, load_ledger, load_sources, recompute
from analysis.report.ledger_page import ledger_page
from analysis.report.project import Project

PROJECT = Project(Path(__file__).parents[2])
LEDGER = load_ledger(PROJECT)

#: Rows that the list of claims holds, by source; ids with a letter were found beside the list.
LISTED = {"A": 4, "B": 12, "C": 4, "D": 31, "E": 39}


def test_every_listed_claim_has_its_row():
    listed = Counter(claim.source for claim in LEDGER if claim.id.split("-")[1].isdigit())
    assert listed == LISTED
    assert sum(LISTED.values()) == 90


def test_what_the_ledger_says_is_implemented_is():
    for name in filter(None, (claim.implemented for claim in LEDGER)):
        module, _, function = name.rpartition(".")
        assert callable(getattr(import_module(module), function)), name


def test_the_sources_stand_in_their_order():
    assert "".join(source.id for source in load_sources(PROJECT)) == SOURCES


def test_no_decision_without_a_row():
    assert set(decisions()) == {claim.id for claim in LEDGER}


@pytest.mark.slow
@pytest.mark.parametrize("claim", LEDGER, ids=lambda claim: claim.id)
def test_recomputed(claim):
    (outcome,) = recompute([claim])
    assert outcome.problem == ""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout that holds nothing but the ledger."""
    (tmp_path / "pyproject.toml").touch()
    for folder in ("notebooks", "book", "analysis"):
        (tmp_path / folder).mkdir()
    ledger = tmp_path / "book" / "claims.yaml"
    ledger.write_text(PROJECT.claims.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return ledger


def test_the_command_asks_for_one_claim(checkout, capsys):
    assert main(["claims", "S4-37"]) == 0
    assert capsys.readouterr().out.startswith("S4-37  holds")


def test_the_command_fails_on_a_verdict_changed_by_hand(checkout, capsys):
    text = checkout.read_text(encoding="utf-8")
    row = text.index("id: S4-37")
    at = text.index("verdict: holds", row)
    checkout.write_text(text[:at] + "verdict: fails" + text[at + len("verdict: holds") :])
    assert main(["claims", "S4-37"]) == 1
    assert "S4-37: recorded 'fails', recomputed 'holds'" in capsys.readouterr().err
    assert main(["claims", "S4-99"]) == 1


def test_the_page_shows_every_row_once():
    page = ledger_page(PROJECT)
    for claim in LEDGER:
        assert page.count(f"({claim.id.lower()})=") == 1
    shown = {claim.verdict for claim in LEDGER}
    assert {"holds", "holds if", "fails"} <= shown <= set(VERDICTS)  # open: maybe none is left
