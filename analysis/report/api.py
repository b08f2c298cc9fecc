"""The reference of the package on the site, and the links between equations, claims and code.

A Sphinx extension. A function names its equation in its docstring (``Equation: ``label`` ``, the
label being its own name) and gives the formula in a ``.. math::`` block.

* Fields such as ``Equation`` and ``Source`` become a list; an equation that no chapter shows is
  numbered where the docstring shows it.
* Every numbered equation of a page that a function implements is followed by a link to it.
* The value of a constant is shown where it is short.
* An id of the ledger or the errata in the text of a page (S4-12, E-S1-03) links to its entry.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc import DataDocumenter
from sphinx.util.logging import getLogger

from analysis.evidence.claims import decisions
from analysis.report.methods import load_methods
from analysis.report.project import Project

#: The pages of the reference: heading, package, and the modules of it, by how their names begin; no
#: beginnings are what the package's other pages leave.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "kl": ("kl_term.kl: divergences, estimators, KL terms", "kl_term.kl", ()),
    "kl_sequences": (
        "kl_term.kl: sequences and whole vocabularies",
        "kl_term.kl",
        (
            *("chunked", "credit", "full_", "importance", "packing", "prefix", "products"),
            *("returns", "sequences", "top_k", "truncation", "vocabulary"),
        ),
    ),
    "objectives": ("kl_term.objectives: advantages and losses", "kl_term.objectives", ()),
    "records": ("analysis.records: runs as data", "analysis.records", ()),
    "records_judged": (
        "analysis.records: what is read of runs",
        "analysis.records",
        (
            "designs",
            "control_noise",
            "estimator_tail",
            "gradient_noise",
            "hierarchical",
            "nats",
            "retention",
            "statistics",
        ),
    ),
    "training": ("analysis.training: the trainer", "analysis.training", ()),
    "training_models": (
        "analysis.training: models, tasks, sampling",
        "analysis.training",
        ("environment", "pretrained", "rollout", "sampling", "tiny"),
    ),
    "audit": ("kl_term.audit: any loss, read exactly", "kl_term.audit", ()),
    "audit_calling": (
        "kl_term.audit: how a foreign loss is called",
        "kl_term.audit",
        (
            *("alignment", "answering", "arguments", "bags", "batches", "calling", "given"),
            *("holding", "isolated", "layout", "lengths", "listing", "loading", "names"),
            *("numbers", "padding", "parts", "request", "returning", "shapes", "spellings"),
            *("supports", "trees", "ways"),
        ),
    ),
    "diagnosis": ("kl_term.diagnosis: a run's KL term, checked", "kl_term.diagnosis", ()),
    "diagnosis_readers": (
        "kl_term.diagnosis: dumps, written and read",
        "kl_term.diagnosis",
        ("budgets", "cells", "columns", "dumping", "formats", "names", "readers", "schema"),
    ),
    "integrations": ("kl_term.integrations: other trainers", "kl_term.integrations", ()),
    "chapters": (
        "analysis.chapters: what chapters 0 to 8 compute and claim",
        "analysis.chapters",
        ("ch00", "ch01", "ch02", "ch03", "ch04", "ch05", "ch06", "ch07", "ch08"),
    ),
    "chapters_methods": (
        "analysis.chapters: what chapters 10 to 15 compute and claim",
        "analysis.chapters",
        ("ch10", "ch12", "ch13", "ch14", "ch15"),
    ),
    "chapters_evidence": (
        "analysis.chapters: what chapters from 16 on compute and claim",
        "analysis.chapters",
        (),
    ),
    "evidence": ("analysis.evidence: what chapters share", "analysis.evidence", ()),
}

_FIELD = re.compile(r"(Equation|Source|Sampler|Estimates|Gradient):\s+(\S.*)")
_NAME = re.compile(r"``([^`]+)``")
_ENTRY = re.compile(r"\b(?:E-S[0-4]-\d\d|S[0-4]-(?:\d+|x[a-z]))\b")
_LOG = getLogger(__name__)
#: Characters of a constant's value; of a longer one its description says what it holds.
LONGEST_VALUE = 300


class Constant(DataDocumenter):
    """A constant of a module."""

    def should_suppress_value_header(self) -> bool:
        """Is its value left out?"""
        too_long = len(repr(self.object)) > LONGEST_VALUE
        return too_long or super().should_suppress_value_header()


def modules(package: str) -> Iterator[str]:
    """The public modules of a package, in order, packages before their modules."""
    found = import_module(package)
    yield found.__name__
    for module in pkgutil.walk_packages(found.__path__, f"{found.__name__}."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            yield module.name


def modules_of(page: str) -> list[str]:
    """The modules that a page of :data:`PAGES` describes, in order."""
    _, package, begin = PAGES[page]
    taken = begin or tuple(
        b for _, other, begins in PAGES.values() if other == package for b in begins
    )
    return [
        name
        for name in modules(package)
        if name.removeprefix(package).lstrip(".").startswith(taken or ("\0",)) == bool(begin)
    ]


def reference_page(project: Project, page: str) -> str:
    """A page of :data:`PAGES` as MyST text."""
    heading, package, _ = PAGES[page]
    deciding: dict[str, list[str]] = {}
    if package == "analysis.chapters":
        for function in dict.fromkeys(decisions().values()):
            deciding.setdefault(function.__module__, []).append(function.__qualname__)
        for methods in load_methods(project).methods.values():
            for module, _, function in (m.function.rpartition(".") for m in methods):
                if module in deciding:
                    deciding[module].append(function)
    parts = [f"# {heading}\n"]
    for name in modules_of(page):
        heading = name.removeprefix(package).strip(".") or "the package"
        lines = [f".. automodule:: {name}", "   :members:"]
        if name in deciding:  # of a chapter equations and claims; they link to the whole source
            functions = dict.fromkeys([*_equations(name), *deciding[name]])
            lines = [lines[0], "", *(f".. autofunction:: {name}.{one}" for one in functions)]
        parts += [f"## {heading}\n", "```{eval-rst}", *lines, "```\n"]
    return "\n".join(parts)


def _equations(module: str) -> list[str]:
    """The functions of a module that name an equation."""
    return [
        name
        for name, value in vars(import_module(module)).items()
        if getattr(value, "__module__", "") == module and "Equation: ``" in (value.__doc__ or "")
    ]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    for extension in ("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"):
        app.setup_extension(extension)
    app.add_autodocumenter(Constant, override=True)
    app.connect("env-before-read-docs", _start)
    app.connect("autodoc-process-docstring", describe, priority=400)  # before napoleon
    app.connect("env-updated", _check_labels)
    app.connect("doctree-resolved", _link)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}


def describe(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make a list of a docstring's fields, and number its formula if no page does."""
    env, described, labelled = app.env, [], []
    inside = False
    for line in lines:
        field = _FIELD.fullmatch(line.rstrip())
        if field and field[1] == "Equation":
            labelled += _NAME.findall(field[2])
            line = ":Equation: " + ", ".join(f":eq:`{label}`" for label in _NAME.findall(field[2]))
        elif field:
            line = f":{field[1]}: {field[2]}"
        elif inside and line.strip():
            line = f"    {line.strip()}"
        if field and not inside and described and described[-1].strip():
            described.append("")
        inside = bool(line.strip()) and (inside or bool(field))
        described.append(line)
    for label in labelled:
        if label != name.rpartition(".")[2]:
            _LOG.warning("%s names equation %r; use the function's own name", name, label)
        env.kl_equations[label] = (env.docname, name)
        if label not in env.get_domain("math").equations:
            described = _numbered(described, label)
    lines[:] = described


def _numbered(lines: list[str], label: str) -> list[str]:
    """The docstring with a label on its first formula."""
    at = next((i for i, line in enumerate(lines) if line.startswith(".. math::")), None)
    if at is None:
        return lines
    formula = lines[at].removeprefix(".. math::").strip()
    head = [".. math::", f"   :label: {label}", "", *([f"    {formula}"] if formula else [])]
    rest = lines[at + 1 :]
    while not formula and rest and not rest[0].strip():
        rest = rest[1:]
    return [*lines[:at], *head, *rest]


def _start(app: Sphinx, env: Any, docnames: list[str]) -> None:
    """Read the reference last, when the equations of all other pages are known."""
    env.kl_equations = {}
    docnames.sort(key=lambda name: name.rpartition("/")[2].startswith("api"))


def _check_labels(app: Sphinx, env: Any) -> None:
    """Warn of a numbered equation that names no function and no step of a function's derivation."""
    for label in sorted(env.get_domain("math").equations):
        if not any(label == name or label.startswith(f"{name}-") for name in env.kl_equations):
            _LOG.warning("equation %r names no function; use its name, or <name>-<step>", label)


def _link(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    def address(document: str, anchor: str) -> str:
        return f"{app.builder.get_relative_uri(docname, document)}#{anchor}"

    printed = app.builder.format == "latex"  # paper has no reference
    for formula in [] if printed else list(doctree.findall(nodes.math_block)):
        place = app.env.kl_equations.get(formula.get("label"))
        if place is not None and place[0] != docname:
            name = place[1]
            link = nodes.reference("", "", nodes.literal("", name), refuri=address(*place))
            link["internal"] = True
            formula.parent.insert(
                formula.parent.index(formula) + 1,
                nodes.paragraph("", "", link, classes=["code-of"]),
            )
    entries = app.env.get_domain("std").anonlabels
    for text in list(doctree.findall(nodes.Text)):
        if not _ENTRY.search(text) or _quiet(text):
            continue
        parts: list[nodes.Node] = []
        end = 0
        for found in _ENTRY.finditer(text):
            document, anchor = entries.get(found[0].lower(), ("", ""))
            if document in ("", docname) or (printed and document not in app.builder.docnames):
                continue
            parts.append(nodes.Text(text[end : found.start()]))
            uri = address(document, anchor)
            parts.append(nodes.reference("", found[0], refuri=uri, internal=True))
            end = found.end()
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(text[end:])])


def _quiet(text: nodes.Text) -> bool:
    """Is the text code, a title, or part of a link?"""
    kinds = (nodes.literal, nodes.literal_block, nodes.reference, nodes.title, nodes.raw)
    node = text.parent
    while node is not None:
        if isinstance(node, kinds):
            return True
        node = node.parent
    return False
