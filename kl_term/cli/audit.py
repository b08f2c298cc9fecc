"""``kl-term audit``: what a loss minimises, exactly, and what is wrong with it."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kl_term.audit.isolated import answer_isolated
from kl_term.audit.request import Request
from kl_term.audit.spellings import ROLES
from kl_term.errors import UserError
from kl_term.files import replace_file
from kl_term.plain_checks import check_choice, check_positive


def audit(
    target: Annotated[str, tyro.conf.Positional],
    /,
    beta_name: str | None = None,
    expect: str | None = None,
    stale: bool = False,
    level: Literal["state", "sequence"] = "state",
    term: str | None = None,
    aggregation: str | None = None,
    names: tuple[str, ...] = (),
    factory: bool = False,
    kind: Literal["loss", "reward"] | None = None,
    json: Path | None = None,
    page: Path | None = None,
    fail_on: str = "error,warning",
    seconds: float = 300.0,
) -> None:
    """Say what a loss minimises, which KL term it is, and what is wrong with it.

    The function is called on enumerated states and answers, in a process of its own; what it
    prints is not shown. Its arguments are told apart by their names, and what was guessed is said.
    Ends with status 1 where an expectation, or something that a loss must not do, fails.

    Args:
        target: FILE.py:FUNCTION or MODULE:FUNCTION.
        beta_name: the argument that is the KL coefficient.
        expect: what it must minimise, such as "reverse KL".
        stale: expect it on stale samples too.
        level: of the expectation: one state, or whole answers.
        term: the term that it must be, such as k3_loss_attached.
        aggregation: the aggregation that it must have, such as token_mean.
        names: ARGUMENT=ROLE, where a name does not say what it is.
        factory: the function makes the loss, given the coefficient.
        kind: loss, or reward for what turns rewards into rewards or advantages.
        json: write the report here, for a machine.
        page: write a page here (HTML, one file).
        fail_on: codes or severities (error, warning, note) that fail, separated by commas.
        seconds: time limit.
    """
    try:
        check_positive("seconds", seconds)
        if aggregation is not None:
            from kl_term.objectives.aggregation import MODES  # torch

            check_choice("aggregation", aggregation, MODES)
        roles = dict(_pair(text) for text in names)
        for role in roles.values():
            check_choice("a role", role, ROLES)
    except ValueError as error:
        raise UserError(str(error)) from None
    request = Request(
        target=target,
        names=roles,
        beta_name=beta_name,
        factory=factory,
        kind=kind,
        expect=expect,
        samples="fresh",
        level=level,
        term=term,
        aggregation=aggregation,
        fail_on=tuple(name.strip() for name in fail_on.split(",") if name.strip()),
        stale_too=stale,
    )
    found = answer_isolated(request, seconds=seconds)
    if json is not None:
        text = json_format.dumps(found.report, indent=2, ensure_ascii=False)
        replace_file(json, text.encode() + b"\n")
    if page is not None:
        replace_file(page, found.page.encode())
    print(found.text)
    for line in found.failed:
        print(f"fails: {line}")
    if found.failed:
        raise SystemExit(1)


def _pair(text: str) -> tuple[str, str]:
    name, equals, role = text.partition("=")
    if not equals:
        raise ValueError(f"--names takes ARGUMENT=ROLE, got {text!r}")
    return name, role
