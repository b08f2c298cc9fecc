"""The numbers that executed notebooks recorded, and where prose may quote them from."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from analysis.errors import Refused
from analysis.report.project import Project
from analysis.report.provenance import RunFiles, read_notebook

# Markers around a quoted number in README.md, which GitHub renders without our tools.
_README_QUOTE = re.compile(
    r"<!--\s*glue:\s*(?P<name>[\w.-]+)::(?P<key>[\w.-]+)\s*-->(?P<text>.*?)<!--\s*/glue\s*-->",
    re.DOTALL,
)
_README_MARKER = re.compile(r"<!--\s*glue:[^>]*-->")


def records_of(notebook: Mapping[str, Any]) -> dict[str, str]:
    """What an executed notebook recorded, by key."""
    found = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            key = output.get("metadata", {}).get("scrapbook", {}).get("name")
            if key is not None:
                found[key] = _plain_text(output.get("data", {}))
    return found


def _plain_text(data: Mapping[str, Any]) -> str:
    text = next(("".join(value) for kind, value in data.items() if kind.endswith("text/plain")), "")
    if text[:1] in "'\"" and text:
        return str(ast.literal_eval(text))
    return text


def read_records(project: Project, name: str) -> dict[str, str] | None:
    """The records of the book's run of notebook ``name``; None when it was not run."""
    output = RunFiles(project.runs, name).output
    if not output.is_file():
        return None
    return records_of(read_notebook(output, project.relative(output)))


def readme_problems(project: Project) -> list[str]:
    """The quoted numbers of README.md that differ from the runs, one line each."""
    if not project.readme.is_file():
        return []
    text = project.readme.read_text(encoding="utf-8")
    problems = []
    quotes = list(_README_QUOTE.finditer(text))
    if len(quotes) != len(_README_MARKER.findall(text)):
        problems.append(
            "README.md: close each <!-- glue: notebook::key --> with <!-- /glue --> and name both"
        )
    for quote in quotes:
        name, key, quoted = quote["name"], quote["key"], quote["text"]
        where = f"README.md:{text.count(chr(10), 0, quote.start()) + 1}"
        try:
            recorded = (read_records(project, name) or {}).get(key)
        except Refused as refusal:
            problems.append(str(refusal))
            continue
        if recorded is None:
            problems.append(f"{where}: {name} records no {key!r}")
        elif recorded != quoted.strip():
            problems.append(f"{where}: {name}::{key} is {recorded}, not {quoted.strip()!r}")
    return problems
