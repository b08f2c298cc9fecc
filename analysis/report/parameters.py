"""The parameters of a notebook: declared once with types, checked before anything runs."""

from __future__ import annotations

import ast
import difflib
import json
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.records.choices import POLICIES, PROFILES
from kl_term.errors import UserError

#: Parameters that mean one of a few names in every notebook that has them.
CHOICES = {"profile": PROFILES, "policy": POLICIES}

_TYPES = {t.__name__: t for t in (int, float, str, bool, list, dict)}
_SECRET = re.compile(
    r"(^|(?<!per)_)token$|passw(or)?d|secret|credential|(api|access|private)_?key", re.IGNORECASE
)


@dataclass(frozen=True)
class Parameter:
    """One line of a ``parameters`` cell: ``name: type = default``.

    A type with a ``|`` stands in a comment, ``name = None  # type: int|None``: papermill's own
    ``--help-notebook`` reads no other spelling, and would call the parameter unknown.
    """

    name: str
    annotation: str
    default: Any

    def check(self, value: Any, label: str) -> Any:
        """``value`` as this parameter's type, strictly: 1 may stand for 1.0, never 1.5 for 1."""
        from pydantic import ConfigDict, TypeAdapter, ValidationError

        adapter = TypeAdapter(
            _type_of(ast.parse(self.annotation, mode="eval").body),
            config=ConfigDict(strict=True, allow_inf_nan=False),
        )
        try:
            checked = adapter.validate_json(json.dumps(value))
        except (ValidationError, TypeError, RecursionError):
            raise UserError(f"{label}: {self._complaint(value)}") from None
        if type(checked) is int and checked < self._least:
            raise UserError(
                f"{label}: parameter {self.name} must be at least {self._least}, not {checked}"
            )
        known = CHOICES.get(self.name)
        if known is not None and checked not in known:
            raise UserError(f"{label}: {self.name} is one of {', '.join(known)}, not {checked!r}")
        return checked

    @property
    def _least(self) -> int:
        """Whole numbers are counts, and those that may be none are 0 by default, as seeds are."""
        return 0 if self.default == 0 else 1

    def _complaint(self, value: Any) -> str:
        finite = "finite " if "float" in self.annotation else ""
        said = f"parameter {self.name} must be {finite}{self.annotation}, not {value!r}"
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value):
            mantissa, exponent = re.split("[eE]", value)
            said += f" (YAML reads {value} as text: write {mantissa}.0e{int(exponent):+d})"
        return said


def declared_parameters(notebook: Mapping[str, Any], label: str) -> dict[str, Parameter]:
    """The parameters that a parsed notebook declares, by name; messages call it ``label``."""
    cells = [
        cell
        for cell in notebook["cells"]
        if "parameters" in cell.get("metadata", {}).get("tags", ())
    ]
    if len(cells) != 1 or cells[0]["cell_type"] != "code":
        raise UserError(
            f"{label}: {len(cells)} cells are tagged 'parameters'; tag exactly one code cell"
        )
    try:
        parameters = _declarations("".join(cells[0]["source"]), label)
    except SyntaxError as error:
        raise UserError(
            f"{label}: line {error.lineno} of the parameters cell is no Python"
        ) from None
    except RecursionError:
        raise UserError(f"{label}: the parameters cell is nested too deeply") from None
    return parameters


def _declarations(source: str, label: str) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for statement in ast.parse(source, type_comments=True).body:
        parameter = _declaration(statement, label)
        if parameter.name in parameters:
            raise UserError(f"{label}: parameter {parameter.name} is declared twice")
        parameters[parameter.name] = parameter
    return parameters


def _declaration(statement: ast.stmt, label: str) -> Parameter:
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as v):
            parameter = _parameter(name, annotation, v)
        case ast.Assign(targets=[ast.Name(id=name)], value=v, type_comment=str() as comment):
            parameter = _parameter(name, ast.parse(comment.split()[0], mode="eval").body, v)
        case _:
            parameter = None
    if parameter is None:
        raise UserError(
            f"{label}: write line {statement.lineno} of the parameters cell as "
            "'name: type = literal', or 'name = literal  # type: one|other', "
            f"not {ast.unparse(statement)!r}"
        )
    parameter.check(parameter.default, label)
    return parameter


def _parameter(name: str, annotation: ast.expr, value: ast.expr) -> Parameter | None:
    try:
        _type_of(annotation)
        return Parameter(name, ast.unparse(annotation), ast.literal_eval(value))
    except ValueError:
        return None


def _type_of(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _TYPES:
            return _TYPES[name]
        case ast.Constant(value=None):
            return type(None)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type_of(left) | _type_of(right)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=arguments)) if (
            name in _TYPES
        ):
            return _TYPES[name][tuple(_type_of(argument) for argument in arguments)]
        case ast.Subscript(value=ast.Name(id=name), slice=argument) if name in _TYPES:
            return _TYPES[name][_type_of(argument)]
    raise ValueError(f"{ast.unparse(node)} is no supported type")


def parse_assignments(assignments: Iterable[str], option: str = "-p") -> dict[str, str]:
    """``["beta=0.1", ...]`` as typed on a command line behind ``option``, by name."""
    texts: dict[str, str] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"{option} {assignment}: write it as name=value")
        require_parameter_name(name, option)
        if name in texts:
            raise UserError(f"{option} {name}: given twice")
        texts[name] = text
    return texts


def require_parameter_name(name: Any, label: str) -> None:
    """Refuse what is no Python name, and names under which secrets travel."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"{label}: {name!r} is no parameter name")
    if _SECRET.search(name):
        raise UserError(
            f"{label}: {name} looks like a secret, and parameters are stored in the page; "
            "use an environment variable"
        )


def from_text(text: str, annotation: str) -> Any:
    """The value that ``text`` on a command line means for a parameter of type ``annotation``."""
    if annotation == "str":
        return text
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    plain = text.isascii() and "_" not in text  # Python reads 3_0 and full-width digits too
    for read in (json.loads, float) if plain else (json.loads,):
        try:
            return read(text)
        except (ValueError, RecursionError):
            continue
    return text


def resolve_parameters(
    declared: Mapping[str, Parameter],
    values: Mapping[str, Any],
    texts: Mapping[str, str],
    label: str,
) -> dict[str, Any]:
    """Every parameter: its default, else from a file (``values``), else typed (``texts``)."""
    for name in (*declared, *values, *texts):
        require_parameter_name(name, label)
        if name not in declared:
            raise UserError(f"{label}: no parameter {name!r}; {_suggestion(name, declared)}")
    given = dict(values) | {n: from_text(t, declared[n].annotation) for n, t in texts.items()}
    return {
        name: parameter.check(given.get(name, parameter.default), label)
        for name, parameter in declared.items()
    }


def changed_parameters(
    declared: Mapping[str, Parameter], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameters that differ from their defaults: all that needs injecting."""
    return {
        name: value
        for name, value in parameters.items()
        if json.dumps(value) != json.dumps(declared[name].default)
    }


def _suggestion(name: str, declared: Mapping[str, Parameter]) -> str:
    nearest = difflib.get_close_matches(name, declared, 1, 0.4)
    return f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(declared) or 'none'}"
