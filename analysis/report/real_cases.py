"""The page of public threads: each with what the tools say of it and what was answered there."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import Field, ValidationError, model_validator

from analysis.records.manifests import recorded_table
from analysis.report.generated import render
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from kl_term.errors import UserError, first_problem
from kl_term.schema import Schema

FILE = "book/cases.yaml"
FOLDER = "real_cases"


class Case(Schema):
    """One thread; ``book/cases.yaml`` says what the fields mean."""

    thread: str
    state: Literal["open", "closed", "merged"]
    title: str
    asked: str
    answered: str
    unseen: str
    pull: bool = False
    dump: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    loss: str = ""

    @model_validator(mode="after")
    def _has_one_input(self) -> Case:
        if bool(self.dump) == bool(self.loss):
            raise ValueError(f"{self.thread}: give a dump or a loss, one of them")
        return self

    @property
    def url(self) -> str:
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/{'pull' if self.pull else 'issues'}/{number}"


class Cases(Schema):
    """All threads, and when they were last read."""

    checked: date
    cases: list[Case]

    @model_validator(mode="after")
    def _once(self) -> Cases:
        threads = [case.thread for case in self.cases]
        twice = {thread for thread in threads if threads.count(thread) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: written twice")
        return self


def load_cases(project: Project) -> Cases:
    """The threads of ``book/cases.yaml``.

    Raises:
        UserError: one line on the first entry that does not fit.
    """
    content = load_yaml(project.root / FILE, FILE)
    try:
        return Cases.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{FILE}: {first_problem(error)}") from None


def cases_page(project: Project) -> str:
    """The page as MyST text.

    Raises:
        UserError: the record is of other threads.
    """
    told, rows = load_cases(project), recorded(project.results / FOLDER)
    if list(rows.index) != [case.thread for case in told.cases]:
        raise UserError(f"{FILE}: record it again: python -m tests.cases.scoring --record")
    return render(
        "real_cases.md",
        checked=told.checked,
        cases=[(case, rows.loc[case.thread]) for case in told.cases],
        dumps=sum(bool(case.dump) for case in told.cases),
    )


def recorded(folder: Path) -> pd.DataFrame:
    """What the tools said, by thread."""
    return recorded_table(folder, "cases.csv").fillna("").set_index("thread")
