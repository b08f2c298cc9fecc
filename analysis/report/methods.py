"""The table of methods as a page: what each is called, computed by, trained in and explained in."""

from __future__ import annotations

import ast

from pydantic import Field, ValidationError, model_validator

from analysis.errors import UserError, first_problem
from analysis.report.ledger_page import code, section_link
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from analysis.schema import Schema

_INTRODUCTION = """\
# Methods: code, measurement, explanation

{total} methods, each one small function. A row gives the function that computes it, with its
equation and source, the presets that train it, linked to what their recording shows, and where it
is explained. Below each table stands how a variant of an ablation switches its methods on.

All variants are made of one {{py:obj}}`~analysis.training.variants.Variant`: its parts combine
freely, and a combination in which one part would go unread is refused. `analysis sweep NAME` trains
a preset.
"""
_COLUMNS = ("Method", "Computed by", "Trained in", "Explained in")
_WIDTH = 88  #: of a line of code


class Method(Schema):
    """One method."""

    name: str
    reference: str  #: short citation, MyST
    function: str  #: dotted name, below ``analysis``, of what computes it
    use: str  #: ``Variant(...)``, or for what is done outside training a call of the function
    presets: list[str] = Field(default=[])  #: presets with variants that switch it on
    unmeasured: str = ""  #: why no preset measures it
    section: str  #: page, or page#label, that explains it
    claims: list[str] = Field(default=[])

    @model_validator(mode="after")
    def _measured_or_not(self) -> Method:
        if bool(self.presets) == bool(self.unmeasured):
            raise ValueError("give presets, or say in unmeasured why there is none")
        return self


class Table(Schema):
    """All methods."""

    shown: dict[str, str]  #: preset -> page, or page#label, that shows its recording
    methods: dict[str, list[Method]] = Field(min_length=1)  #: by heading


def load_methods(project: Project) -> Table:
    """Every method, in the order of the file.

    Raises:
        UserError: a malformed entry; names it.
    """
    path = project.book / "methods.yaml"
    label = project.relative(path)
    try:
        return Table.model_validate(load_yaml(path, label))
    except ValidationError as error:
        raise UserError(f"{label}: {first_problem(error)}") from None


def methods_page(table: Table) -> str:
    """The page as MyST text."""
    parts = [_INTRODUCTION.format(total=sum(map(len, table.methods.values())))]
    shown = {name: f"{name} in {section_link(place)}" for name, place in table.shown.items()}
    for heading, methods in table.methods.items():
        rule = "|".join("---" for _ in _COLUMNS)
        parts += [f"## {heading}\n", f"| {' | '.join(_COLUMNS)} |", f"|{rule}|"]
        parts += [_row(method, shown) for method in methods]
        parts += ["\nSwitched on by\n", "```python", "\n\n".join(map(_switch, methods)), "```\n"]
    return "\n".join(parts)


def _row(method: Method, shown: dict[str, str]) -> str:
    claims = ", ".join(f"{{ref}}`{claim} <{claim.lower()}>`" for claim in method.claims)
    cells = (
        f"**{method.name}**<br>{method.reference}",
        code(f"analysis.{method.function}"),
        "<br>".join(shown.get(name, name) for name in method.presets) or method.unmeasured,
        "; ".join(filter(None, (section_link(method.section), claims))),
    )
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _switch(method: Method) -> str:
    """The expression as code under the method's name, a keyword a line where it is long."""
    call = ast.parse(method.use, mode="eval").body
    if len(method.use) <= _WIDTH or not isinstance(call, ast.Call):
        return f"# {method.name}\n{method.use}"
    words = [*call.args, *call.keywords]
    lines = "".join(f"    {ast.unparse(word)},\n" for word in words).replace("'", '"')
    return f"# {method.name}\n{ast.unparse(call.func)}(\n{lines})"
