"""Call a function that somebody else wrote: on copies, and with one line for whatever it does."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kl_term.audit.arguments import Plan, name_of, numbers_of, zeros_of
from kl_term.audit.batches import Batch
from kl_term.audit.given import Given
from kl_term.audit.layout import LAYOUTS, Layout
from kl_term.audit.listing import arrays_of, fields_of
from kl_term.audit.returning import Key, Parts, loss_of, tensors_of


class Output(NamedTuple):
    """What a function returned, and its gradient."""

    value: Tensor  #: scalar, [B] or [B, T], as returned, without gradient
    gradient: Tensor | None  #: of the sum over the mean row by the leaf; None without a graph
    leaks: dict[str, float]  #: the other tensors that got a gradient, and its largest entry


@dataclass
class Foreign:
    """A function with the way to call it."""

    function: Callable[..., Any]
    plan: Plan
    beta_path: str | None = None  #: such as ``config.kl_loss_coef``, inside a given value
    factory: str | None = None  #: the function makes the loss, given this coefficient
    layout: Layout = LAYOUTS[0]
    #: What it read out of batches and configurations: name -> role.
    bag_roles: dict[str, str] = field(default_factory=dict)
    allowed: int | None = None  #: the longest completion allowed; None = the width of the batch
    #: Numbers of the caller that divide the loss, and their defaults.
    divisors: dict[str, float] = field(default_factory=dict)
    nests: bool = False  #: its configuration holds others
    kept: int | None = None  #: tokens of a top k; None = the whole vocabulary
    multiple: int = 1  #: of how many answers a batch must hold a multiple
    summed: bool = False  #: of copies of a batch, its number is the sum
    groups: int = 1  #: prompts in a batch, where it is told the size of a group
    #: Where configurations hold the size of a group: argument -> paths.
    group_paths: dict[str, list[str]] = field(default_factory=dict)
    parts: Parts | None = None  #: of what it returns, where not the first entry is the loss
    calls: int = 0
    notes: set[str] = field(default_factory=set)  #: such as ``modifies its arguments``

    @property
    def name(self) -> str:
        return name_of(self.function)

    @cached_property
    def fields(self) -> dict[str, tuple[str, ...]]:
        """Of arguments that are named tuples."""
        return fields_of(self.function)

    @cached_property
    def arrays(self) -> set[str]:
        """The arguments that are arrays of numpy."""
        return arrays_of(self.function)

    @property
    def roles(self) -> set[str]:
        """What it is given by argument."""
        return set(self.plan.roles.values())

    @property
    def reads(self) -> set[str]:
        """What it is given by argument, or asks a batch for."""
        return self.roles | set(self.bag_roles.values())

    @property
    def is_given_kl(self) -> bool:
        """Whether it takes the log-probs and, computed already, the KL of the tokens."""
        return {"logp", "ref_log_ratio"} <= self.roles

    @property
    def by_logits(self) -> bool:
        return bool(self.reads & {"logits", "topk_logp"})

    @property
    def has_beta(self) -> bool:
        inside = self.beta_path is not None or self.factory is not None
        outside = self.parts is not None and self.parts.kl is not None
        return "beta" in self.reads or inside or outside

    def untold(self, *, integers: bool = False) -> dict[str, float]:
        """The numbers that are defaults of its signature and that nobody gave."""
        if self.factory is not None:
            return {}
        held = {**self.plan.roles, **self.plan.fixed}
        numbers = numbers_of(self.function, integers=integers)
        return {name: default for name, default in numbers.items() if name not in held}

    def switched_off(self) -> list[str]:
        """The defaults of its signature that are zero, and that nobody gave."""
        held = {**self.plan.roles, **self.plan.fixed}
        names = [] if self.factory is not None else zeros_of(self.function)
        return [name for name in names if name not in held]

    def named_in_bags(self) -> dict[str, str]:
        return {n[1:]: r for n, r in self.plan.fixed.items() if n.startswith("*")}

    def call(self, batch: Batch, beta: float, *, watch: bool = False) -> Output:
        """Value and gradient on a batch; ``watch`` also asks where else the gradient goes.

        Raises:
            Exception: whatever the function raises.
            UserError: it returns no number.
        """
        copies = 1 if batch.rows % self.multiple == 0 else self.multiple
        given = Given(self, batch, beta, watch, copies)
        with torch.enable_grad():
            returned = loss_of(
                self._returned(given, beta),
                self.name,
                packed=self.layout.packed,
                parts=self.parts,
                beta=beta,
            )
        if given.modified():
            self.notes.add("modifies its arguments")
        value = given.padded(returned)
        if copies > 1:
            value = _of_copies(value, copies, summed=self.summed)
        if not returned.requires_grad:
            return Output(value.detach(), None, {})
        total = value.sum() if returned.ndim == 0 else value.sum() / batch.rows
        leaves = [given.leaf, *given.watched.values()]
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        gradient = None if found[0] is None else found[0].double()
        leaks = {
            name: g.abs().max().item()
            for name, g in zip(given.watched, found[1:], strict=True)
            if g is not None and bool((g != 0).any())
        }
        return Output(value.detach(), gradient, leaks)

    def entries(self, batch: Batch, beta: float) -> dict[Key, Tensor]:
        """What it returns beside each other, in the shape of the batch, and with its graph."""
        copies = 1 if batch.rows % self.multiple == 0 else self.multiple
        given = Given(self, batch, beta, watch=False, copies=copies)
        found = tensors_of(self._returned(given, beta), packed=self.layout.packed)
        return {key: given.padded(entry) for key, entry in found.items()}

    def _returned(self, given: Given, beta: float) -> Any:
        self.calls += 1
        arguments = given.arguments()
        function = self.function
        if self.factory is not None:
            function = function(**{self.factory: beta})
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the same call, again and again
            return function(*arguments.positional, **arguments.named)


def _of_copies(value: Tensor, copies: int, *, summed: bool) -> Tensor:
    """What a batch has, of what its copies have together."""
    if value.ndim == 0:
        return value / copies if summed else value
    return value.unflatten(0, (copies, -1)).mean(0)


def random_states() -> tuple[Any, ...]:
    """The states of the generators that a loss might draw from."""
    return (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))  # noqa: NPY002


def one_line(error: BaseException) -> str:
    """The first line of an exception, with its type."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:160]}" if said else type(error).__name__
