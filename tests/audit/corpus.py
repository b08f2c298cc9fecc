"""The index of the corpus, read and checked, and its functions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

INDEX = Path(__file__).with_name("index.yaml")


class Entry(NamedTuple):
    """One loss of the corpus; ``index.yaml`` says what the fields mean."""

    name: str
    callable: str
    arguments: dict[str, str]
    minimises: dict[str, dict[str, str | None]]
    term: str | None
    aggregation: str | None
    scale: float | None
    source: str | None = None  #: repository and number of the report; None = a right loss
    wrong: str | None = None
    want: dict[str, str] | None = None
    per_answer: tuple[str, ...] = ()
    returns: str = "loss"
    factory: bool = False
    claims: dict[str, str] | None = None
    dtype: str = "float64"
    unusual: bool = False  #: its argument names cannot be guessed
    convention: str | None = None
    same_as: tuple[str, ...] = ()
    package: str | None = None  #: a released one, with its version
    said: tuple[str, ...] = ()  #: roles that its author would say, where not all of them
    given: dict[str, Any] = {}  # noqa: RUF012 - parameter -> numbers, or a class beside the loss

    @property
    def broken(self) -> bool:
        return self.want is not None

    @property
    def title(self) -> str:
        """The first sentence of its docstring."""
        text = " ".join((self.function.__doc__ or "").split()).replace("``", "")
        return text.split(". ")[0].rstrip(".")

    @property
    def beta(self) -> str | None:
        """The parameter that multiplies the KL, of the factory where there is one."""
        return self.arguments.get("beta")

    def values(self, beta: float | None = None) -> dict[str, Any]:
        """What is passed as it is; the coefficient where it lies inside."""
        found: dict[str, Any] = {}
        for name, value in self.given.items():
            if not isinstance(value, str):
                found[name] = torch.tensor(value)
                continue
            inside = (self.beta or "").partition(".")
            own = {inside[2]: beta} if inside[0] == name and beta is not None else {}
            found[name] = getattr(self.module, value)(**own)
        return found

    @property
    def module(self) -> Any:
        folder = "tests.audit" if self.package else "tests.audit.losses"
        return importlib.import_module(f"{folder}.{self.callable.partition(':')[0]}")

    @property
    def function(self) -> Callable[..., Any]:
        """What the index names: a loss, or what makes one."""
        return getattr(self.module, self.callable.partition(":")[2])

    def loss(self, beta: float | None = None) -> Callable[..., Any]:
        """The loss at a coefficient; None leaves it at its default."""
        given = {} if beta is None or self.beta is None else {self.beta: beta}
        if self.given:
            inside = {name: value for name, value in given.items() if "." not in name}
            return lambda **inputs: self.function(**inputs, **inside, **self.values(beta))
        if self.factory:
            return self.function(**given)
        return lambda **inputs: self.function(**inputs, **given)

    @property
    def inputs(self) -> dict[str, str]:
        """Role -> parameter, without the coefficient."""
        return {role: name for role, name in self.arguments.items() if role != "beta"}


def read(*sections: str) -> list[Entry]:
    """Entries of these sections of the index; without one, of the corpus, broken ones first."""
    with INDEX.open() as file:
        index = yaml.safe_load(file)
    entries = []
    for row in (row for section in sections or ("broken", "right") for row in index[section]):
        for many in ("per_answer", "same_as", "said"):
            row[many] = tuple(row.get(many, ()))
        entries.append(Entry(**row))
    return entries


def parameters(entry: Entry) -> set[str]:
    """Names of the parameters that the loss has."""
    if not entry.factory:
        return set(inspect.signature(entry.function).parameters)
    made = entry.function()
    call = made.forward if hasattr(made, "forward") else made
    return {entry.beta or "", *inspect.signature(call).parameters}
