"""The numbers that a function is not given: defaults, and what its configurations hold."""

from __future__ import annotations

from dataclasses import replace

from kl_term.audit.calling import Foreign
from kl_term.audit.holding import changed, numbers_in


def numbers_beside(foreign: Foreign, *, integers: bool = False) -> dict[str, float]:
    """Of its signature by name, and of its configurations by path."""
    found = dict(foreign.untold(integers=integers))
    for name, value in foreign.plan.fixed.items():
        if not name.startswith("*"):
            found |= {".".join((name, *path)): x for path, x in numbers_in(value)}
    return found


def fixed_with(foreign: Foreign, values: dict[str, float]) -> dict[str, object]:
    """What it is given as it is, with other numbers."""
    fixed = {n: v for n, v in foreign.plan.fixed.items() if not n.startswith("*")}
    for path, value in values.items():
        name, _, inner = path.partition(".")
        fixed[name] = changed(fixed[name], inner, value) if inner else value
    return fixed


def with_number(foreign: Foreign, path: str, value: float) -> Foreign:
    """The function with another value of an argument, or of what lies in one."""
    fixed = foreign.plan.fixed | fixed_with(foreign, {path: value})
    return replace(foreign, plan=foreign.plan._replace(fixed=fixed), notes=set())
