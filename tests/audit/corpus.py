"""The index of the corpus, read and checked, and its functions."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
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
    given: dict[str, Any] = {}  # noqa: RUF012 - parameter -> numbers, or what lies beside the loss
    holds: dict[str, str] = {}  # noqa: RUF012 - parameter -> dict, or a class, of further inputs
    again: dict[str, str] = {}  # noqa: RUF012 - a further parameter of a role -> that role
    packed: str | None = None  #: flat, row or lists, where its answers are not padded
    prompt: bool = False  #: it wants a token of prompt, and logits that predict the next token
    unprompted: tuple[str, ...] = ()  #: roles without an entry for that token
    rows: int = 1  #: answers in a batch of the enumeration

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

    @property
    def roles(self) -> dict[str, str]:
        """Parameter -> role, without the coefficient."""
        return {name: role for role, name in self.inputs.items()} | self.again

    @property
    def names(self) -> dict[str, str]:
        """Parameter -> role as its author would say them; of a dictionary, that it is one."""
        said = tuple(self.arguments) if self.unusual else self.said
        bags = dict.fromkeys(self.holds, "inputs") if "inputs" in said else {}
        plain = (role for role in said if role not in ("beta", "inputs"))
        more = {name: role for name, role in self.again.items() if role in said and "." not in name}
        return {self.arguments[role]: role for role in plain} | more | bags

    def values(self) -> dict[str, Any]:
        """What is passed as it is."""
        return {name: self._made(what, {}) for name, what in self.given.items()}

    def _made(self, what: Any, fields: dict[str, Any]) -> Any:
        """What the index names, with these fields in it."""
        if isinstance(what, list):
            return torch.tensor(what)
        if isinstance(what, Mapping) or what == "dict":
            return {**(what if isinstance(what, Mapping) else {}), **fields}
        if not isinstance(what, str):
            return what
        found = getattr(self.module, what)
        if inspect.isclass(found):
            return found(**fields)
        made = copy.copy(found)
        vars(made).update(fields)
        return made

    def _passed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """By parameter: what is named with a dot lies inside of what is given or holds inputs."""
        made = self.given | self.holds
        inside: dict[str, dict[str, Any]] = {name: {} for name in made}
        passed = {}
        for path, value in inputs.items():
            name, _, field = path.partition(".")
            if field:
                inside[name][field] = value
            else:
                passed[name] = value
        return passed | {name: self._made(what, inside[name]) for name, what in made.items()}

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
        if self.factory:
            made = self.function(**given)
            return lambda **inputs: made(**self._passed(inputs))
        return lambda **inputs: self.function(**self._passed({**inputs, **given}))

    @property
    def inputs(self) -> dict[str, str]:
        """Role -> parameter, without the coefficient."""
        return {role: name for role, name in self.arguments.items() if role != "beta"}


@cache
def _index() -> dict[str, list[dict[str, Any]]]:
    with INDEX.open() as file:
        return yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read(*sections: str) -> list[Entry]:
    """Entries of these sections of the index; without one, of the corpus, broken ones first."""
    index = _index()
    entries = []
    for row in (row for section in sections or ("broken", "right") for row in index[section]):
        lists = ("per_answer", "same_as", "said", "unprompted")
        many = {name: tuple(row.get(name, ())) for name in lists}
        entries.append(Entry(**(row | many)))
    return entries


def parameters(entry: Entry) -> set[str]:
    """Names of the parameters that the loss has."""
    if not entry.factory:
        return set(inspect.signature(entry.function).parameters)
    made = entry.function()
    call = made.forward if hasattr(made, "forward") else made
    return {entry.beta or "", *inspect.signature(call).parameters}
