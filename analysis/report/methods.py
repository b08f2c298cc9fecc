"""The table of methods: each with its equation, function, test, arm, recorded preset and chapter.

``book/methods.yaml`` holds one entry a method, and where the book shows each preset's recording.
:func:`load_methods` refuses an entry that points at nothing, or whose preset does not switch the
method on, so the page built from it cannot promise what is not there.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from analysis.errors import Refused
from analysis.experiments.ablations.catalogue import CATALOGUE
from analysis.kl.term import KLTerm
from analysis.report.equations import equations, implementations
from analysis.report.evidence import missing_function, missing_section, missing_test
from analysis.report.ledger import load_ledger
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from analysis.schema import Schema
from analysis.training.arms import (
    Advantage,
    Arm,
    Correction,
    Distillation,
    Objective,
    Sampler,
    Shaping,
)

#: Kinds of methods, in the order of the page, with its headings.
FAMILIES = {
    "objective": "Policy terms",
    "aggregation": "From tokens to one number",
    "kl": "KL terms: estimators and placements",
    "kl-axis": "KL terms: levels, weights, credit, order",
    "advantage": "Advantages and groups",
    "length": "Lengths, loops and cuts",
    "process": "Process rewards",
    "off-policy": "Samples that are not the policy's own",
    "distillation": "Learning from a teacher",
}

_PARTS: dict[str, type[Schema]] = {
    part.__name__: part
    for part in (Arm, KLTerm, Objective, Advantage, Shaping, Sampler, Correction, Distillation)
}
_CALL = re.compile(r"([a-z_][a-z0-9_]*)\(")


class Method(BaseModel):
    """One method."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    family: Literal[tuple(FAMILIES)]
    name: str
    source: str  #: short citation, MyST
    equation: str  #: label in the book
    function: str  #: dotted name of what computes it
    test: str  #: tests/path.py::test_name, exact
    #: ``Arm(...)``, or for what is done outside training a call of the function.
    use: str
    #: Preset of the catalogue -> labels of its arms that switch the method on.
    presets: dict[str, list[str]] = {}
    unmeasured: str = ""  #: why no preset measures it
    section: str  #: page, or page#label, that explains it
    claims: list[str] = []

    @model_validator(mode="after")
    def _measured_or_not(self) -> Method:
        if bool(self.presets) == bool(self.unmeasured):
            raise ValueError("give presets, or say in unmeasured why there is none")
        if self.presets and self.arm is None:
            raise ValueError("presets measure arms: use must be an Arm(...)")
        return self

    @property
    def arm(self) -> Arm | None:
        """What ``use`` is; None for a call.

        Raises:
            ValueError: it is no arm, or none that trains.
        """
        return arm_of(self.use) if self.use.startswith("Arm(") else None


class Table(BaseModel):
    """All methods."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shown: dict[str, str]  #: preset -> page, or page#label, that shows its recording
    methods: list[Method]


def arm_of(expression: str) -> Arm:
    """The arm that an expression of ``Arm``, its parts and literals stands for.

    Raises:
        ValueError: it holds anything else, or is no valid arm.
    """
    try:
        built = _built(ast.parse(expression, mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is no expression") from None
    if not isinstance(built, Arm):
        raise ValueError(f"{expression!r} is no Arm")
    return built


def switches_on(arm: Schema, pattern: Schema) -> bool:
    """Does an arm set all that a pattern sets? Of numbers it counts whether they are 0."""
    return all(
        _alike(getattr(arm, name), getattr(pattern, name)) for name in pattern.model_fields_set
    )


def load_methods(project: Project) -> Table:
    """Every method, in the order of the file.

    Raises:
        Refused: a malformed or repeated entry, or one that dangles; names the entry.
    """
    path = methods_path(project)
    label = project.relative(path)
    content = load_yaml(path, label)
    if not isinstance(content, dict) or not isinstance(content.get("methods"), list):
        raise Refused(f"{label}: must hold shown and a list of methods")
    try:
        table = Table.model_validate(content)
    except ValidationError as error:
        raise Refused(f"{label}: {_fault(content, error)}") from None
    ids = [method.id for method in table.methods]
    for twice in sorted({i for i in ids if ids.count(i) > 1}):
        raise Refused(f"{label}: {twice} is written twice; keep one")
    if faults := dangling(project, table, known(project)):
        raise Refused("\n".join(faults))
    return table


def methods_path(project: Project) -> Path:
    return project.book / "methods.yaml"


class Known(NamedTuple):
    """What methods may name."""

    equations: set[str]
    claims: set[str]


def known(project: Project) -> Known:
    """Labels of the book's equations and ids of the ledger."""
    labels = {equation.label for equation in equations(project.root)}
    labels |= {item.label for item in implementations(project.root)}
    return Known(labels, {claim.id for claim in load_ledger(project)})


def dangling(project: Project, table: Table, names: Known) -> list[str]:
    """One line for everything that the table names and that does not exist or fit."""
    lines = []
    for preset, section in table.shown.items():
        missing = "" if preset in CATALOGUE else f"no preset {preset}"
        problems = (missing, missing_section(project, section))
        lines += [f"book/methods.yaml: shown: {preset}: {text}" for text in problems if text]
    for method in table.methods:
        problems = [
            "" if method.equation in names.equations else f"no equation {method.equation}",
            missing_function(project, "function", method.function),
            missing_test(project, method.test),
            missing_section(project, method.section),
            _misused(method),
            *(f"no claim {claim}" for claim in method.claims if claim not in names.claims),
            *_unmatched(method),
        ]
        lines += [f"book/methods.yaml: {method.id}: {text}" for text in problems if text]
    return lines


def recordings(project: Project) -> dict[str, Path]:
    """Preset -> the folder in ``results/`` that holds its recording on the CPU."""
    return {
        json.loads(path.read_text(encoding="utf-8"))["preset"]: path.parent
        for path in sorted(project.results.glob("*_cpu*/manifest.json"), reverse=True)
    }


def _built(node: ast.expr) -> Any:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    part = _PARTS.get(node.func.id) if isinstance(node.func, ast.Name) else None
    if part is None or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError(f"{ast.unparse(node)} is no part of an arm, given by keywords")
    return part(**{word.arg: _built(word.value) for word in node.keywords})


def _alike(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, Schema):
        return value is not None and switches_on(value, pattern)
    if isinstance(pattern, float | int) and not isinstance(pattern, bool):
        return value is not None and bool(value) == bool(pattern)
    return value == pattern


def _misused(method: Method) -> str:
    """One line if ``use`` is a call of anything but the function."""
    call, function = _CALL.match(method.use), method.function.rpartition(".")[2]
    if method.use.startswith("Arm(") or (call and call[1] == function):
        return ""
    return f"use is neither an Arm(...) nor a call of {function}"


def _unmatched(method: Method) -> list[str]:
    """One line for each preset, and each of its arms, that is not there or is another method."""
    lines = []
    for name, labels in method.presets.items():
        if name not in CATALOGUE:
            lines.append(f"no preset {name}")
            continue
        if not labels:
            lines.append(f"names no arm of preset {name}")
        for label in labels:
            arms = [arm for arm in _arms(name) if arm.name == label]
            if not arms:
                lines.append(f"preset {name} has no arm {label}")
            elif not all(switches_on(arm, method.arm) for arm in arms):
                lines.append(f"arm {label} of preset {name} is not what use says")
    return lines


@cache
def _arms(preset: str) -> tuple[Arm, ...]:
    return CATALOGUE[preset]().arms


def _fault(content: dict[str, Any], error: ValidationError) -> str:
    """The first thing that is wrong, with the id of its entry."""
    first = error.errors()[0]
    place = [*first["loc"]]
    if place[:1] == ["methods"] and len(place) > 1:
        row = content["methods"][place[1]]
        named = isinstance(row, dict) and "id" in row
        place[:2] = [row["id"] if named else f"entry {place[1] + 1}"]
    return f"{': '.join(map(str, place[:1]))}: {'.'.join(map(str, place[1:]))}: {first['msg']}"
