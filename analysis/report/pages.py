"""The pages of the book, and whether each may be published."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.errors import Refused
from analysis.report.project import Project
from analysis.report.provenance import (
    RunFiles,
    hash_source,
    read_notebook,
    shared_inputs,
    why_not_current,
)
from analysis.report.strict_yaml import load_yaml

_SCRIPT = re.compile(r"<script\b[^>]*>.*?(?:</script\s*>|\Z)", re.IGNORECASE | re.DOTALL)
_ACTIVE = re.compile(r"javascript:|<[^>]+\son[a-z]+\s*=|<iframe\b", re.IGNORECASE)
# Kinds that a browser interprets; images and plain text it only shows.
_RENDERED = ("text/html", "text/markdown", "text/latex", "image/svg+xml")
# Scripts that the book ships itself.
_ALLOWED_SCRIPT = re.compile(
    r'<script( defer| async)? src="(\.\./)+_static/[\w.-]+\.js"( defer| async)?>\s*</script>'
)
_TOC_KEYS = {
    "caption",
    "chapters",
    "defaults",
    "entries",
    "file",
    "format",
    "glob",
    "hidden",
    "maxdepth",
    "numbered",
    "options",
    "parts",
    "reversed",
    "root",
    "sections",
    "subtrees",
    "title",
    "titlesonly",
    "url",
}


def toc_pages(project: Project) -> list[Path]:
    """The pages that _toc.yml lists, in order, as files without a suffix.

    Raises:
        Refused: a key is misspelt, or the file is no table of contents.
    """
    toc = load_yaml(project.toc, project.toc.name)
    if not isinstance(toc, dict) or "root" not in toc:
        raise Refused("_toc.yml: name the first page with 'root:'")
    return [project.root / name for name in _files(toc)]


def _files(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for part in node:
            yield from _files(part)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key not in _TOC_KEYS:
                raise Refused(f"_toc.yml: unknown key {key!r}")
            if key in ("root", "file"):
                yield str(value)
            elif key not in ("defaults", "options"):
                yield from _files(value)


def run_pages(project: Project) -> list[RunFiles]:
    """The executed notebooks among the pages."""
    return [
        RunFiles(project.runs, page.name.removesuffix(".ipynb"))
        for page in toc_pages(project)
        if page.parent == project.runs
    ]


def prose_pages(project: Project) -> dict[Path, Path]:
    """Each page that holds prose, with the file in which it is written."""
    generated = (project.runs, project.generated)
    written = [
        path
        for path in sorted(project.book.rglob("*.md"))
        if not any(path.is_relative_to(folder) for folder in generated)
    ]
    notebooks = {run.output: project.notebooks / f"{run.name}.ipynb" for run in run_pages(project)}
    return {path: path for path in written} | {
        page: source for page, source in notebooks.items() if source.is_file()
    }


def missing_pages(project: Project) -> list[str]:
    """The entries of _toc.yml for which no file exists, one line each."""
    return [
        f"_toc.yml: {project.relative(page)} does not exist; write it or correct the entry"
        for page in toc_pages(project)
        if page.parent not in (project.runs, project.generated)
        and not any(page.with_name(page.name + end).is_file() for end in ("", ".md", ".ipynb"))
    ]


def run_problems(project: Project) -> list[str]:
    """Why executed notebooks may not be published, one line each."""
    shared = shared_inputs(project)
    problems = []
    for run in run_pages(project):
        source = project.notebooks / f"{run.name}.ipynb"
        label = project.relative(run.output)
        if not source.is_file():
            problems.append(f"{label}: there is no {project.relative(source)}; correct _toc.yml")
            continue
        notebook = read_notebook(source, project.relative(source))
        inputs = {"notebook": hash_source(notebook), **shared}
        reason = why_not_current(run, inputs)
        if reason is not None:
            problems.append(f"{label}: {reason}; run: analysis run {run.name}")
            continue
        for problem in output_problems(read_notebook(run.output, label)):
            problems.append(f"{label}: {problem}")
    return problems


def output_problems(notebook: dict[str, Any]) -> Iterator[str]:
    """What in the outputs of an executed notebook must not be published."""
    for index, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] != "code":
            continue
        if "".join(cell["source"]).strip() and cell.get("execution_count") is None:
            yield f"cell {index} was not executed"
        for output in cell.get("outputs", ()):
            if output["output_type"] == "error":
                yield f"cell {index} stores the error {output.get('ename', '')}"
            for kind, content in output.get("data", {}).items():
                if _runs_code(kind, content):
                    yield f"cell {index} stores a script ({kind}) that a reader's browser would run"


def _runs_code(kind: str, content: Any) -> bool:
    if "javascript" in kind:
        return True
    if not kind.endswith(_RENDERED):
        return False
    text = "".join(content) if isinstance(content, list) else str(content)
    scripts = _SCRIPT.findall(text)
    return bool(_ACTIVE.search(text)) or any(not _ALLOWED_SCRIPT.fullmatch(s) for s in scripts)
