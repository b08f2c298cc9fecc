"""Every number that a notebook records is quoted on a page, or the notebook says why not.

What is computed and kept but stands nowhere is how a contrary result is lost. A notebook that
records more than it quotes, such as all that its tables of predictions show, says so itself with
:func:`analysis.report.session.unquoted`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from analysis.report.prose import records_of
from analysis.report.provenance import read_notebook

#: ``{glue:text}`key` `` or ``{glue:text}`key:.2f` `` in a notebook, of its own records.
_OWN = re.compile(r"\{glue:[\w:]+\}`(?:[^`<]*<)?([a-z][a-z0-9_]*)(?=[:>`])")
#: ``NAME.ipynb::key`` elsewhere, and ``NAME::key`` in README.md.
_OTHER = re.compile(r"([\w.-]+?)(?:\.ipynb)?::([a-z][a-z0-9_]*)")


def unquoted_problems(notebooks: Iterable[Path], pages: Iterable[str]) -> list[str]:
    """What notebooks record and nothing quotes, and reasons that stand for nothing; a line each.

    Args:
        notebooks: executed ones.
        pages: the text of whatever else quotes their records.
    """
    read = {path.stem: read_notebook(path, path.name) for path in notebooks}
    prose = {name: "\n".join(_prose(notebook)) for name, notebook in read.items()}
    elsewhere = {match for text in (*pages, *prose.values()) for match in _OTHER.findall(text)}
    problems = []
    for name, notebook in read.items():
        own = set(_OWN.findall(prose[name])) | {key for of, key in elsewhere if of == name}
        left = sorted(set(records_of(notebook)) - own)
        reasons = dict(_reasons(notebook))
        for key in left:
            if not any(fnmatchcase(key, pattern) for pattern in reasons):
                problems.append(f"{name}: {key} is recorded and quoted nowhere: quote or delete it")
        for pattern, why in reasons.items():
            if not why.strip():
                problems.append(f"{name}: unquoted {pattern!r} gives no reason")
            if not any(fnmatchcase(key, pattern) for key in left):
                problems.append(f"{name}: unquoted {pattern!r} stands for no record: delete it")
    return problems


def _prose(notebook: Mapping[str, Any]) -> Iterator[str]:
    """Markdown, and the captions of figures."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            yield "".join(cell["source"])
        figure = cell["metadata"].get("mystnb", {}).get("figure", {})
        yield str(figure.get("caption", ""))


def _reasons(notebook: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The arguments of each ``session.unquoted(...)`` in the code."""
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "session.unquoted":
                (why,) = (ast.literal_eval(word.value) for word in node.keywords)
                for argument in node.args:
                    yield ast.literal_eval(argument), why
