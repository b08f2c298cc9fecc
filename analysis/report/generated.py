"""Pages that are written from the code and the runs: prose in ``templates/``, filled in.

A name that a template needs and is not given is an error, never an empty place on the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2.ext import extract_from_ast

from kl_term.numbers import format_value
from kl_term.templates import environment

TEMPLATES = Path(__file__).with_name("templates")
_PROOFS = ("thm-", "prop-", "lem-", "cor-", "def-", "rem-")


def render(name: str, **values: Any) -> str:
    """The template ``name`` as MyST text, or as HTML, in which every text is escaped.

    Its filters: ``number(spec)`` rounds as :func:`format_value`; ``table`` makes one of a frame of
    texts, its index first; ``cell`` keeps text inside a cell; ``versions`` lists packages; ``code``
    links a function by its bare name to the reference; ``section`` links ``page`` or
    ``page#label``.
    """
    return _ENVIRONMENT.get_template(name).render(values)


def texts_of(name: str) -> list[str]:
    """The texts of a template that go through its function ``_``, which translates them."""
    parsed = _ENVIRONMENT.parse((TEMPLATES / name).read_text(encoding="utf-8"))
    return [text for _, _, text in extract_from_ast(parsed, ("_",)) if isinstance(text, str)]


def section_link(section: str) -> str:
    """A section ``page`` or ``page#label`` as the role that links it."""
    page, _, label = section.partition("#")
    if label.startswith(_PROOFS):
        return f"{{prf:ref}}`{label}`"
    if label.startswith("fig-"):
        return f"{{numref}}`{label}`"
    if label.startswith("sec-"):
        place = f"chapter {int(page[:2])}" if page[:2].isdigit() else page
        return f"{{ref}}`a section of {place} <{label}>`"
    if label:
        return f"equation {{eq}}`{label}`"
    return f"{{doc}}`/book/{'_run/' if page[:2].isdigit() else ''}{page}`"


def _code(name: str) -> str:
    return f"{{py:obj}}`~{name}`"


def _number(value: Any, spec: str) -> str:
    return format_value("value", value, spec)


def _table(frame: pd.DataFrame) -> str:
    shown = frame.reset_index().astype(str)
    lines = [list(shown), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return str(text).replace("|", "&#124;")


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


_ENVIRONMENT = environment(TEMPLATES)
_ENVIRONMENT.filters |= {
    "number": _number,
    "table": _table,
    "cell": _cell,
    "versions": _versions,
    "code": _code,
    "section": section_link,
}
