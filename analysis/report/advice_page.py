"""What pages show of the advice: its rows as substitutions, and the page of its conditions.

A Sphinx extension too. :func:`advice_json` checks and writes what ``{{ advice.ROW.FIELD }}`` shows
when the book is built, and MyST reads it as a substitution. In the Chinese edition the pages that
are translated are filled in while they are staged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

from analysis.report.advice import SHOWN, TEXTS, Row, load_advice, said, uses_of_advice
from analysis.report.generated import render
from analysis.report.project import Project

FILE = "advice.json"


def advice_json(project: Project) -> str:
    """What the pages show, by row and field."""
    return json.dumps(shown_fields(project), ensure_ascii=False, indent=1) + "\n"


def shown_fields(
    project: Project, translate: Callable[[str], str] = str
) -> dict[str, dict[str, str]]:
    """What ``{{ advice.ROW.FIELD }}`` shows, in the words that ``translate`` gives."""
    every = load_advice(project).every()
    return {name: _fields(row, translate) for name, row in every.items()}


def _fields(row: Row, translate: Callable[[str], str]) -> dict[str, str]:
    made = {
        "proof": theorem_links(row.theorems),
        "how": "; ".join(f"{framework} {name}" for framework, name in row.names.items()),
        **{f"in_{framework.lower()}": name for framework, name in row.names.items()},
    }
    texts = {text: said(translate(" ".join(getattr(row, text).split()))) for text in TEXTS}
    return {field: {**texts, **made}[field] for field in row.fields()}


def theorem_links(theorems: Iterable[str]) -> str:
    """Theorems, or items of them, as the roles that link them, each once."""
    items: dict[str, list[str]] = {}
    for label, _, item in (theorem.partition(" ") for theorem in theorems):
        items.setdefault(label, []).append(item)
    named = {label: f" ({', '.join(of)})" if all(of) else "" for label, of in items.items()}
    return ", ".join(f"{{prf:ref}}`{label}`{which}" for label, which in named.items())


def filler(project: Project, translate: Callable[[str], str]) -> Callable[[str], str]:
    """What shows the advice in a translated text, in the words that ``translate`` gives."""
    return partial(filled, shown=shown_fields(project, translate))


def filled(text: str, shown: Mapping[str, Mapping[str, str]]) -> str:
    """A page's text with each ``{{ advice.ROW.FIELD }}`` in place."""
    return SHOWN.sub(lambda match: shown[match["row"]][match["field"]], text)


def shown_texts(project: Project, pages: Container[str]) -> Iterator[str]:
    """The texts of rows that these pages show, which are translated."""
    every = load_advice(project).every()
    for path, uses in uses_of_advice(project).items():
        if Path(path).stem in pages:
            yield from (getattr(every[row], field) for row, field in uses if field in TEXTS)


def conditions_page(project: Project) -> str:
    """The conditions of every theorem that advice rests on, as MyST text."""
    advice = load_advice(project)
    resting = {
        label: [name for name, row in advice.every().items() if label in row.theorems]
        for label in advice.conditions.theorems
    }
    conditions = advice.conditions
    return render("advice.md", conditions=conditions, resting=resting, links=theorem_links)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.connect("config-inited", _substitute)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _substitute(app: Sphinx, config: Config) -> None:
    path = Path(app.srcdir) / "book/_generated" / FILE
    if path.is_file():
        shown = json.loads(path.read_text(encoding="utf-8"))
        config.myst_substitutions = {**config.myst_substitutions, "advice": shown}
