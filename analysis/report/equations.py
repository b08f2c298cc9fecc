"""The equation index: which function implements which equation of the book.

A function names its equation in its docstring (a line ``Equation: ``label`` ``, the label being the
function's own name) and gives its formula in a ``.. math::`` block. A chapter that derives the
equation labels it. This module reads both as text, without importing the package, and writes the
index page, which also shows the equations that no chapter derives. :func:`problems` says where the
two sides disagree.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import yaml

_FIELD = re.compile(r"^[ \t]*Equation:[ \t]*(``[^`\n]+``(?:,[ \t]*``[^`\n]+``)*)", re.MULTILINE)
_NAME = re.compile(r"``([^`]+)``")
_DIRECTIVE = re.compile(r"^[ \t]*[`:]{3,}\{math\}.*\n((?:[ \t]*:[\w-]+:.*\n)*)", re.MULTILINE)
_OPTION = re.compile(r"^[ \t]*:label:[ \t]*(\S+)", re.MULTILINE)
_DOLLARS = re.compile(r"\$\$[ \t]*\(([^()\s]+)\)")

_FORMULA = re.compile(r"^\.\. math::(.*\n(?:[ \t]+.*\n|[ \t]*\n)*)", re.MULTILINE)
_ROLE = re.compile(r":(\w+):`~?([^`]+)`")

_LINE = 80  # characters of LaTeX that fit the column

_HEADER = """\
# Equations and the code that computes them

Each numbered equation carries the name of the function that implements it. Search the repository
for the name and you find the equation, the function and its tests. Functions are named from the
package `analysis`.

| Equation | Function | Shown in |
|---|---|---|
"""


_BELOW = """
## Formulas that no chapter derives

They are taken from the docstrings of the functions named. {doc}`/book/notation` defines the
symbols.

"""


@dataclass(frozen=True)
class Implementation:
    """A function that names the equation it implements."""

    label: str
    function: str  # dotted, e.g. analysis.kl.estimators.k3
    path: str  # relative to the root, with forward slashes
    line: int
    summary: str  # the docstring's first line, as MyST
    formula: str  # the docstring's first formula, as LaTeX; empty if it has none


@dataclass(frozen=True)
class Equation:
    """A labelled equation of the book."""

    label: str
    path: str  # page or notebook, relative to the root


def implementations(root: Path) -> list[Implementation]:
    """Every ``Equation`` field in the docstrings of ``analysis/``, by path and line."""
    found = []
    for path in sorted((root / "analysis").rglob("*.py")):
        relative = path.relative_to(root)
        module = ".".join(relative.with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(relative))
        for name, node in _documented(tree):
            text = ast.get_docstring(node) or ""
            place = (f"{module}.{name}", relative.as_posix(), node.lineno)
            found += [
                Implementation(label, *place, _summary(text), _formula(text))
                for field in _FIELD.findall(text)
                for label in _NAME.findall(field)
            ]
    return found


def equations(root: Path) -> list[Equation]:
    """Every labelled equation of the pages in ``book/`` and the notebooks in ``notebooks/``."""
    sources = [
        *sorted((root / "book").glob("*.md")),
        *sorted((root / "notebooks").glob("*.ipynb")),
    ]
    return [
        Equation(label, path.relative_to(root).as_posix())
        for path in sources
        for label in labels(_markdown(path))
    ]


def labels(text: str) -> list[str]:
    """The labels of the equations in MyST text: ``{math}`` directives and ``$$ ... $$ (label)``."""
    directives = [
        match for options in _DIRECTIVE.findall(text) for match in _OPTION.findall(options)
    ]
    return directives + _DOLLARS.findall(text)


def problems(root: Path) -> list[str]:
    """One line for each disagreement between docstrings and pages; empty when they agree.

    They agree when every field is the name of its function and has a formula, in a chapter or in
    the docstring, and every labelled equation is such a field or a step ``<field>-...`` of its
    derivation.
    """
    code, shown = implementations(root), equations(root)
    fields = Counter(item.label for item in code)
    pages = Counter(item.label for item in shown)
    lines = []
    for item in code:
        where = f"{item.path}:{item.line}: {item.function}"
        if item.label != item.function.rpartition(".")[2]:
            lines.append(f"{where} names equation {item.label!r}; use the function's own name")
        if fields[item.label] > 1:
            lines.append(
                f"{where} shares equation {item.label!r} with another function; rename one"
            )
        if item.label not in pages and not item.formula:
            lines.append(f"{where} names equation {item.label!r} and shows none; add '.. math::'")
    for equation in shown:
        if pages[equation.label] > 1:
            lines.append(f"{equation.path}: label {equation.label!r} is used twice; rename one")
        if not any(_belongs(equation.label, field) for field in fields):
            lines.append(
                f"{equation.path}: equation {equation.label!r} names no function and no step "
                "of one's derivation; name the function in its label or drop the label"
            )
    return list(dict.fromkeys(lines))


def write_index(path: Path, root: Path) -> None:
    """Write the index page to ``path`` (``book/_generated/equations.md``), links relative to it.

    Raises:
        ValueError: docstrings and pages disagree; the message is the first of :func:`problems`.
    """
    faults = problems(root)
    if faults:
        raise ValueError(faults[0])
    pages = {equation.label: equation.path for equation in equations(root)}
    source = source_url(root)
    rows, below = [], []
    for item in implementations(root):
        code = f"[`{item.function.removeprefix('analysis.')}`]({source}/{item.path}#L{item.line})"
        where = "below"
        if item.label in pages:
            document = os.path.relpath(root / _document(pages[item.label]), path.parent)
            where = f"{{doc}}`{Path(document).as_posix()}`"
        else:
            below.append(_section(item))
        rows.append(f"| {{eq}}`{item.label}` | {code} | {where} |")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        _HEADER + "\n".join(rows) + "\n" + (_BELOW + "\n".join(below) if below else ""),
        encoding="utf-8",
    )


def _section(item: Implementation) -> str:
    name = item.function.rpartition(".")[2]
    maths = f"```{{math}}\n:label: {item.label}\n{in_lines(item.formula)}\n```"
    return f"**`{name}`**. {item.summary}\n\n{maths}\n"


def repository_url(root: Path) -> str:
    """The repository's address, from ``_config.yml``, where alone it is said."""
    return str(_repository(root)["url"]).rstrip("/")


def source_url(root: Path) -> str:
    """The address under which the repository's files are shown."""
    return f"{repository_url(root)}/blob/{_repository(root)['branch']}"


def _repository(root: Path) -> dict[str, str]:
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    return config["repository"]


def in_lines(formula: str) -> str:
    r"""A long formula with a line for each statement that a ``\qquad`` sets apart from the last."""
    lines = re.split(r"\\qquad", formula)
    if len(formula) <= _LINE or len(lines) == 1 or not all(_balanced(line) for line in lines):
        return formula
    rows = " \\\\\n".join(line.strip() for line in lines if line.strip())
    return f"\\begin{{gathered}}\n{rows}\n\\end{{gathered}}"


def _balanced(latex: str) -> bool:
    pairs = [(r"\{", r"\}"), (r"\\begin\b", r"\\end\b"), (r"\\left\b", r"\\right\b")]
    return all(len(re.findall(a, latex)) == len(re.findall(b, latex)) for a, b in pairs)


def _summary(docstring: str) -> str:
    first = docstring.partition("\n")[0]
    return _ROLE.sub(lambda m: f"${m[2]}$" if m[1] == "math" else f"`{m[2]}`", first)


def _formula(docstring: str) -> str:
    found = _FORMULA.search(docstring + "\n")
    return inspect.cleandoc(found[1].strip()) if found else ""


def _belongs(label: str, field: str) -> bool:
    return label == field or label.startswith(f"{field}-")


def _document(page: str) -> str:
    """The document, without suffix, that Sphinx reads for a source: notebooks are read as run."""
    stem = page.rpartition(".")[0]
    return re.sub(r"^notebooks/", "book/_run/", stem)


def _markdown(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def _documented(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
            for method in node.body:
                if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{node.name}.{method.name}", method
