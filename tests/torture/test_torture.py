"""A slice of ``make torture``, and the page that reads its record."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest

from analysis.records.manifests import write_folder
from analysis.report.generated_pages import torture_figures
from analysis.report.project import Project
from kl_term.errors import UserError
from torture.__main__ import survived
from torture.book import book
from torture.flips import flips
from torture.mutations import mutations
from torture.outcome import Outcome
from torture.sweeps import failing_disks, kills


@pytest.mark.slow
@pytest.mark.parametrize(
    "tried",
    [
        lambda chance: failing_disks(print, every=9),
        lambda chance: flips(70, chance, print),
        lambda chance: mutations(24, chance, print),
        lambda chance: kills(3, chance, print),  # more may cost more compute than many do
        lambda chance: book(3, chance, print),
    ],
    ids=["disk", "flips", "mutations", "kills", "book"],
)
def test_nothing_is_lost_and_nothing_gets_past(tried, one_thread: None) -> None:
    outcomes = tried(random.Random(1))
    assert survived(outcomes), outcomes
    assert sum(outcome.tried for outcome in outcomes) >= 3


@pytest.mark.parametrize(
    "outcome",
    [Outcome("a", 9, 1, 0), Outcome("a", 9, 0, 1), Outcome("a", 9, 0, 0, 1.3)],
    ids=["lost", "silent", "compute"],
)
def test_what_got_past_is_no_success(outcome: Outcome) -> None:
    assert survived([Outcome("b", 9, 0, 0, 1.1)])
    assert not survived([Outcome("b", 9, 0, 0), outcome])


def test_the_page_quotes_the_record_and_hides_no_loss(tmp_path: Path) -> None:
    fields = {
        "preset": "torture",
        "seeds": [0],
        "device": "cpu",
        "versions": {"torch": "2"},
        "source": "abc",
        "wall_seconds": 120.0,
    }
    assert "run `make torture`" in torture_figures(Project(tmp_path))
    table = pd.DataFrame([Outcome("sweep killed", 1234, 0, 0, 1.125), Outcome("bit", 7, 0, 0)])
    write_folder(tmp_path / "results" / "torture", {"faults.csv": table}, fields)
    page = torture_figures(Project(tmp_path))
    assert "broke things 1,241 times: 0 finished results lost, 0 faults unnoticed" in page
    assert "1.12 times" in page and "| sweep killed | 1,234 | 0 | 0 |" in page
    assert "in 2 minutes" in page
    write_folder(tmp_path / "results" / "torture", {"faults.csv": table.assign(silent=1)}, fields)
    with pytest.raises(UserError, match="sweep killed, bit: say on the page what got past"):
        torture_figures(Project(tmp_path))
