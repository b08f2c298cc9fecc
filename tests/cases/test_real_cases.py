"""The page of public threads: what the tools say of each input, said again."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.report.audit_sets import SETS
from analysis.report.project import Project
from analysis.report.real_cases import FOLDER, cases_page, load_cases, recorded
from kl_term.errors import UserError
from tests.cases.scoring import DUMPS, ROOT, said

PROJECT = Project(ROOT)
CASES = load_cases(PROJECT).cases
RECORD = recorded(ROOT / "results" / FOLDER)
WITH_DUMPS = [case for case in CASES if case.dump]
OF_LOSSES = [case for case in CASES if case.loss]


def as_recorded(case) -> dict[str, str]:
    return {"thread": case.thread, **RECORD.loc[case.thread].to_dict()}


def test_there_are_twenty_threads_at_least_each_with_an_input_and_a_finding():
    assert len(CASES) >= 20
    assert {case.dump for case in WITH_DUMPS} == {p.name.split(".")[0] for p in DUMPS.iterdir()}
    assert list(RECORD.index) == [case.thread for case in CASES]
    assert (RECORD["code"] != "").all()
    assert all(path.stat().st_size < 100_000 for path in DUMPS.iterdir())


@pytest.mark.parametrize("case", WITH_DUMPS, ids=lambda case: case.dump)
def test_a_dump_is_diagnosed_as_the_page_says(case):
    assert said(case) == as_recorded(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_LOSSES, ids=lambda case: case.loss)
def test_a_loss_is_audited_as_the_page_says(case):
    assert said(case) == as_recorded(case)


@pytest.mark.parametrize("case", OF_LOSSES, ids=lambda case: case.loss)
def test_the_page_and_the_table_of_the_corpus_agree(case):
    tables = [
        pd.read_csv(ROOT / "results" / folder / "losses.csv", keep_default_na=False)
        for folder in (SETS["seen"].folder, SETS["held out"].folder)
    ]
    row = pd.concat(tables).set_index("name").loc[case.loss]
    codes = [code.strip("()") for code in row["codes"].split()]
    assert RECORD.loc[case.thread, "code"] in codes
    repository, number = row["source"].split("#")
    shared = {"allenai", "huggingface"}  # one report after another of one repository
    assert case.thread == f"{repository}#{number}" or repository.split("/")[0] in shared


def test_the_page_shows_every_thread_with_what_was_found():
    page = cases_page(PROJECT)
    for case in CASES:
        assert f"[{case.thread}]({case.url}) ({case.state})" in page
        assert RECORD.loc[case.thread, "says"] in page
        assert case.answered in page
        assert case.unseen in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("dump: top_p", "dump: top_p\n  loss: positive_part"), "a dump or a loss"),
        (("state: merged", "state: merged\n  typo: 1"), "typo"),
        (("verl-project/verl#6280", "huggingface/trl#6789"), "written twice"),
        (("verl-project/verl#6280", "verl-project/verl#1"), "record it again"),
    ],
)
def test_a_record_of_other_threads_is_refused(tmp_path: Path, change, message):
    (tmp_path / "book").mkdir()
    (tmp_path / "results").symlink_to(ROOT / "results")
    text = (ROOT / "book/cases.yaml").read_text(encoding="utf-8").replace(*change, 1)
    (tmp_path / "book/cases.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        cases_page(Project(tmp_path))
