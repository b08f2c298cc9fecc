"""Pages that are written from the code and the runs: prose in ``templates/``, filled in.

A name that a template needs and is not given is an error, never an empty place on the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from analysis.report.numbers import format_value

TEMPLATES = Path(__file__).with_name("templates")


def render(name: str, **values: Any) -> str:
    """The template ``name`` as MyST text, or as HTML, in which every text is escaped.

    Its filters: ``number(spec)`` rounds as :func:`format_value`; ``table`` makes one of a frame of
    texts, its index first; ``cell`` keeps text inside a cell; ``versions`` lists packages.
    """
    return _ENVIRONMENT.get_template(name).render(values)


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


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    undefined=jinja2.StrictUndefined,
    autoescape=jinja2.select_autoescape(["html"]),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {
    "number": _number,
    "table": _table,
    "cell": _cell,
    "versions": _versions,
}
