"""The pages of the book, and whether each may be published.

What Sphinx finds itself is left to it, since the build turns its warnings into errors: broken
references and links between pages, missing files of ``_toc.yml``, quotations of unknown numbers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sphinx_external_toc.parsing import MalformedError, parse_toc_data

from analysis.report.project import Project
from analysis.report.provenance import RunFiles, inputs_of, read_notebook, why_stale
from analysis.report.strict_yaml import load_yaml
from kl_term.errors import UserError
from kl_term.files import read_json

#: Kinds of output that a browser interprets; images and plain text it only shows.
_RENDERED = ("text/html", "text/markdown", "text/latex", "image/svg+xml")
_ACTIVE = re.compile(r"<script|javascript:|<[^>]+\son[a-z]+\s*=|<iframe\b", re.IGNORECASE)
#: Scripts that the book ships itself.
_ALLOWED_SCRIPT = re.compile(
    r'<script( defer| async)? src="(\.\./)+_static/[\w.-]+\.js"( defer| async)?>\s*</script>'
)
#: Read by jupyter_book.config, but in neither its schema nor its defaults.
_UNLISTED = {("parse", "myst_substitutions")}


def toc_pages(project: Project) -> list[Path]:
    """The pages that _toc.yml lists, in order, as files without a suffix."""
    try:
        pages = parse_toc_data(load_yaml(project.toc, project.toc.name))
    except MalformedError as error:
        raise UserError(f"_toc.yml: {error}") from error
    return [project.root / page for page in pages]


def run_pages(project: Project) -> list[RunFiles]:
    """The executed notebooks among the pages."""
    return [
        RunFiles(project.runs, page.name.removesuffix(".ipynb"))
        for page in toc_pages(project)
        if page.parent == project.runs
    ]


def run_problems(project: Project) -> list[str]:
    """Why executed notebooks may not be published, one line each."""
    problems = []
    for run in run_pages(project):
        source = project.notebooks / f"{run.name}.ipynb"
        label = project.relative(run.output)
        if not source.is_file():
            problems.append(f"{label}: there is no {project.relative(source)}; correct _toc.yml")
            continue
        notebook = read_notebook(source, project.relative(source))
        inputs = inputs_of(project, notebook, {}, project.relative(source))
        del inputs["parameters"]  # a page may be published with other parameters than the defaults
        if reason := why_stale(project, run, inputs):
            problems.append(f"{label}: {reason}; run: analysis run {run.name}")
        else:
            found = output_problems(read_notebook(run.output, label))
            problems += [f"{label}: {problem}" for problem in found]
    return problems


def output_problems(notebook: Mapping[str, Any]) -> Iterator[str]:
    """What in the outputs of an executed notebook must not be published."""
    cells = (
        cell
        for cell in notebook["cells"]
        if "injected-parameters" not in cell["metadata"].get("tags", ())
    )
    for index, cell in enumerate(cells, start=1):
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
    return bool(_ACTIVE.search(_ALLOWED_SCRIPT.sub("", text)))


def config_problems(project: Project) -> list[str]:
    """The unknown keys of _config.yml, which Jupyter Book passes over in silence."""
    config = load_yaml(project.config, project.config.name)
    if not isinstance(config, dict):
        raise UserError("_config.yml: must be a mapping")
    spec = find_spec("jupyter_book")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("jupyter-book is not installed; run make book")
    folder = Path(spec.submodule_search_locations[0])
    schema = read_json(folder / "config_schema.json", "config_schema.json")
    defaults = load_yaml(folder / "default_config.yml", "default_config.yml")
    known = {*_paths(_properties(schema)), *_paths(defaults), *_UNLISTED}
    parents = {(), *(path[:-1] for path in known)}
    problems = []
    for path in _paths(config):
        if path not in known and path[:-1] in parents:
            beside = [other[-1] for other in known if other[:-1] == path[:-1]]
            nearest = difflib.get_close_matches(path[-1], beside, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            problems.append(f"_config.yml: unknown key {'.'.join(path)}{hint}")
    return problems


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _properties(value) for key, value in schema.get("properties", {}).items()}


def _paths(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of nested mappings, each with those above it."""
    if isinstance(value, dict):
        for key, part in value.items():
            path = (*above, str(key))
            yield path
            yield from _paths(part, path)
