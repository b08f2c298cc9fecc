"""The codes of an audit's findings with what each says, read out of the code that raises them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import kl_term.audit
from analysis.report.generated import render
from kl_term.audit.findings import SEVERITIES, Finding
from kl_term.errors import UserError

#: Stands for what only a loss can tell.
HOLE = "…"
TITLES = {
    "error": "Errors: the loss is not what anybody means.",
    "warning": "Warnings: it may be meant, and is seldom said.",
    "note": "Notes: right losses have them too.",
}


def findings_page() -> str:
    """A line a finding, the worst first; what is only said where it applies is left out."""
    shown = [f._replace(says=re.sub(rf"(?<=\w){HOLE}", "", f.says)) for f in all_findings()]
    return render("audit_findings.md", findings=shown, severities=TITLES)


def all_findings() -> list[Finding]:
    """Every finding that a rule can raise; :data:`HOLE` where it says a number or a name.

    Raises:
        UserError: a finding whose code or severity cannot be read.
    """
    found = {
        each: None
        for info in pkgutil.iter_modules(kl_term.audit.__path__)
        if info.name.endswith("_rules")
        for each in _of_module(importlib.import_module(f"kl_term.audit.{info.name}"))
    }
    return sorted(found, key=lambda each: (SEVERITIES.index(each.severity), each.code))


def _of_module(module: ModuleType) -> Iterator[Finding]:
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
            yield from _of_call(node, module)


def _of_call(call: ast.Call, module: ModuleType) -> Iterator[Finding]:
    code, severity, says, advice, *theorem = call.args
    constants = (n.value for n in ast.walk(severity) if isinstance(n, ast.Constant))
    held = {*constants}
    severities = [each for each in SEVERITIES if each in held]
    if isinstance(code, ast.Constant):
        label = _theorem(theorem[0], module) if theorem else None
        for each in severities:
            yield Finding(str(code.value), each, _text(says), _text(advice), label)
    else:  # by a table of faults
        faults: dict[str, tuple[str, str, str | None]] = getattr(module, "_FAULTS", {})
        by_code = _severities_by_code(call, module)
        if not faults:
            raise UserError(f"{module.__name__}:{call.lineno}: cannot read the code of a finding")
        for name, (said, advised, label) in faults.items():
            yield Finding(name, by_code(name), _holes(said), advised, label)


def _severities_by_code(call: ast.Call, module: ModuleType) -> Any:
    """From a fault's code to its severity, which is ``A if code in (...) else B``."""
    source = ast.parse(inspect.getsource(module))
    rule = next(
        (
            node.value
            for node in ast.walk(source)
            if isinstance(node, ast.AnnAssign)
            and getattr(node.target, "id", None) == getattr(call.args[1], "id", "")
            and isinstance(node.value, ast.IfExp)
            and isinstance(node.value.test, ast.Compare)
        ),
        None,
    )
    if rule is None:
        raise UserError(f"{module.__name__}:{call.lineno}: cannot read the severity of a finding")
    codes = {n.value for n in ast.walk(rule.test) if isinstance(n, ast.Constant)}
    inside, outside = ast.literal_eval(rule.body), ast.literal_eval(rule.orelse)
    return lambda code: inside if code in codes else outside


def _text(node: ast.expr) -> str:
    """A text of the source, with a hole at what is filled in and without what may follow."""
    if isinstance(node, ast.BinOp):
        return _text(node.left)
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else HOLE for p in node.values)
        return re.sub(rf"{HOLE}+", HOLE, "".join(map(str, parts)))
    return str(ast.literal_eval(node))


def _holes(text: str) -> str:
    return re.sub(r"\{\w+\}", HOLE, text)


def _theorem(node: ast.expr, module: ModuleType) -> str | None:
    if isinstance(node, ast.Name):
        return str(getattr(module, node.id))
    return None if (label := ast.literal_eval(node)) is None else str(label)
