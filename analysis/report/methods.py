"""The table of methods as a page: what each is called, computed by, trained in and explained in."""

from __future__ import annotations

import ast

from pydantic import Field, ValidationError, model_validator

from analysis.report.generated import render
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from kl_term.errors import UserError, first_problem
from kl_term.schema import Schema

_WIDTH = 88  #: of a line of code


class Method(Schema):
    """One method."""

    name: str
    reference: str  #: short citation, MyST
    function: str  #: dotted name of what computes it
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

    @property
    def switch(self) -> str:
        """``use`` as code under the method's name, a keyword a line where it is long."""
        call = ast.parse(self.use, mode="eval").body
        if len(self.use) <= _WIDTH or not isinstance(call, ast.Call):
            return f"# {self.name}\n{self.use}"
        words = [*call.args, *call.keywords]
        lines = "".join(f"    {ast.unparse(word)},\n" for word in words).replace("'", '"')
        return f"# {self.name}\n{ast.unparse(call.func)}(\n{lines})"


class Table(Schema):
    """All methods."""

    shown: dict[str, str]  #: preset -> page, or page#label, that shows its recording
    methods: dict[str, list[Method]] = Field(min_length=1)  #: by heading


def load_methods(project: Project) -> Table:
    """Every method, in the order of the file."""
    path = project.book / "methods.yaml"
    label = project.relative(path)
    try:
        return Table.model_validate(load_yaml(path, label))
    except ValidationError as error:
        raise UserError(f"{label}: {first_problem(error)}") from None


def methods_page(table: Table) -> str:
    """The page as MyST text."""
    return render(
        "methods.md",
        total=sum(map(len, table.methods.values())),
        tables=table.methods,
        shown=table.shown,
    )
