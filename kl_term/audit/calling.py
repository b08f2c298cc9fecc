"""Call a function that somebody else wrote: on copies, and with one line for whatever it does."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kl_term.audit.arguments import Plan, name_of, numbers_of
from kl_term.audit.bags import Bag
from kl_term.audit.batches import Batch, chosen
from kl_term.audit.holding import changed
from kl_term.audit.spellings import OF_POLICY, OF_TOP_K
from kl_term.errors import UserError


class Layout(NamedTuple):
    """The shapes and types that a function wants."""

    packed: bool = False  #: tokens of all answers in one row, without padding
    listed: bool = False  #: and cut into a list of one row an answer
    marked: bool = False  #: labels are -100 where nothing is counted
    advantages: str = "row"  #: ``row`` [B], ``column`` [B, 1] or ``token`` [B, T]
    mask: torch.dtype = torch.bool
    floats: torch.dtype = torch.float64
    #: Logits predict the next token: roles that have one more position, the prompt's, before.
    prompted: tuple[str, ...] = ()


#: In this order they are tried; the first that a function can be called with is used.
LAYOUTS = tuple(
    Layout(advantages=advantages, mask=mask, floats=floats)
    for floats in (torch.float64, torch.float32)
    for mask in (torch.bool, torch.float64, torch.long)
    for advantages in ("row", "token", "column")
)


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
    bag_beta: bool = False  #: whether it reads the coefficient out of its inputs
    allowed: int | None = None  #: the longest completion allowed; None = the width of the batch
    #: Numbers of the caller that divide the loss, and their defaults.
    divisors: dict[str, float] = field(default_factory=dict)
    nests: bool = False  #: its configuration holds others
    kept: int | None = None  #: tokens of a top k; None = the whole vocabulary
    calls: int = 0
    notes: set[str] = field(default_factory=set)  #: such as ``modifies its arguments``

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def roles(self) -> set[str]:
        return set(self.plan.roles.values())

    @property
    def by_logits(self) -> bool:
        return bool(self.roles & {"logits", "topk_logp"})

    @property
    def has_beta(self) -> bool:
        inside = self.beta_path is not None or self.factory is not None
        return "beta" in self.roles or inside or self.bag_beta

    def untold(self, *, integers: bool = False) -> dict[str, float]:
        """The numbers that are defaults of its signature and that nobody gave."""
        if self.factory is not None:
            return {}
        held = {**self.plan.roles, **self.plan.fixed}
        numbers = numbers_of(self.function, integers=integers)
        return {name: default for name, default in numbers.items() if name not in held}

    def _named_in_bags(self) -> dict[str, str]:
        return {n[1:]: r for n, r in self.plan.fixed.items() if n.startswith("*")}

    def call(self, batch: Batch, beta: float, *, watch: bool = False) -> Output:
        """Value and gradient on a batch; ``watch`` also asks where else the gradient goes.

        Raises:
            Exception: whatever the function raises.
            UserError: it returns no number.
        """
        self.calls += 1
        given = Given(self, batch, beta, watch)
        arguments = given.arguments()
        function = self.function
        if self.factory is not None:
            function = function(**{self.factory: beta})
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the same call, again and again
            returned = first_of(function(*arguments.positional, **arguments.named), self.name)
        if given.modified():
            self.notes.add("modifies its arguments")
        value = given.padded(returned)
        if not returned.requires_grad:
            return Output(value.detach(), None, {})
        total = returned.sum() if returned.ndim == 0 else value.sum() / batch.rows
        leaves = [given.leaf, *given.watched.values()]
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        gradient = None if found[0] is None else found[0].double()
        leaks = {
            name: g.abs().max().item()
            for name, g in zip(given.watched, found[1:], strict=True)
            if g is not None and bool((g != 0).any())
        }
        return Output(value.detach(), gradient, leaks)


def first_of(returned: Any, name: str) -> Tensor:
    """The loss in what a function returned: a tensor, or the first of a tuple, or ``.loss``."""
    found = returned
    if isinstance(found, Mapping):
        found = found.get("loss", next(iter(found.values()), None))
    elif isinstance(found, tuple) and found:
        found = getattr(found, "loss", found[0])
    elif not isinstance(found, Tensor) and hasattr(found, "loss"):
        found = found.loss
    if not isinstance(found, Tensor):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise UserError(f"{name}: returns {what}, no tensor to differentiate")
    if not found.is_floating_point():
        raise UserError(f"{name}: returns integers ({found.dtype}), which have no gradient")
    return found


class Arguments(NamedTuple):
    positional: tuple[Any, ...]
    named: dict[str, Any]


class Given:
    """The tensors of one call: fresh copies, one of them the leaf of the gradient."""

    def __init__(self, of: Foreign, batch: Batch, beta: float, watch: bool) -> None:
        self.of, self.batch, self.beta, self.watch = of, batch, beta, watch
        self.watched: dict[str, Tensor] = {}
        self._made: list[Tensor] = []
        floats = of.layout.floats
        start = batch.logits if of.by_logits else batch.logp
        self.leaf = start.detach().to(floats).clone().requires_grad_(True)
        self._logits = self.leaf if of.by_logits else batch.logits.detach().to(floats)
        self._logp = chosen(self._logits, batch.tokens) if of.by_logits else self.leaf

    def arguments(self) -> Arguments:
        plan = self.of.plan
        fixed = {n: self._own(n, v) for n, v in plan.fixed.items() if not n.startswith("*")}
        named = {name: self.value(role) for name, role in plan.roles.items()} | fixed
        first = tuple(named.pop(name) for name in plan.positional if name in named)
        return Arguments(first, named)

    def _own(self, name: str, value: Any) -> Any:
        """A copy of what the user gave, with the coefficient where it lies inside."""
        first, _, path = (self.of.beta_path or "").partition(".")
        if first != name:
            return value.clone() if isinstance(value, Tensor) else value
        return changed(value, path, self.beta)

    def value(self, role: str) -> Any:
        """What is passed for a role."""
        made = self._value(role)
        lengths = self.batch.mask.sum(-1).tolist()
        if self.of.layout.listed and isinstance(made, Tensor) and len(made) == sum(lengths):
            return list(made.split(lengths))
        return made

    def _value(self, role: str) -> Any:
        batch, layout = self.batch, self.of.layout
        if role in ("inputs", "config"):
            return Bag(self, nests=role == "config" and self.of.nests)
        scalars = {
            "beta": self.beta,
            "clip": 0.2,
            "temperature": 1.0,
            "width": self.of.allowed or batch.mask.shape[1],
            "count": int(batch.mask.sum()),
            "group_size": batch.rows,
            "max_seqlen": int(batch.mask.sum(-1).max()),
        }
        if role in scalars:
            return scalars[role]
        if role in OF_TOP_K:
            return self._tracked(self._shape(self._of_top_k(role)))
        if role in OF_POLICY:
            return self._of_policy(role)
        counted = batch.mask.sum(-1)
        if role == "cu_seqlens":
            return torch.nn.functional.pad(counted.cumsum(0), (1, 0)).to(torch.int32)
        if role == "sequence_ids":
            return torch.arange(batch.rows).repeat_interleave(counted)
        if role == "lengths":
            return counted
        if role == "sample_mask":
            return self._made_of(torch.ones(batch.rows, dtype=layout.mask), role)
        if role == "group":
            return torch.zeros(batch.rows, dtype=torch.long)
        if role in ("mask", "padding"):
            mask = batch.mask if role == "mask" else ~batch.mask
            kind = layout.floats if layout.mask.is_floating_point else layout.mask
            return self._made_of(mask.to(kind), role)
        return self._made_of(self._constant(role), role)

    def _of_policy(self, role: str) -> Tensor:
        if role == "logits":
            return self._tracked(self._prompted(role, self._shape(self._logits.clone())))
        logp = self._logp
        if role == "logp":
            return self._tracked(self._shape(logp.clone()))
        if role == "ref_log_ratio":
            return self._shape(logp - self.batch.ref_logp.to(logp.dtype))
        log_ratio = logp - self.batch.old_logp.to(logp.dtype)
        return self._shape(log_ratio if role == "log_ratio" else log_ratio.exp())

    def _of_top_k(self, role: str) -> Tensor:
        """Of the likeliest tokens of the reference, the likeliest first."""
        likeliest = self.batch.ref_logits.argsort(dim=-1, descending=True, stable=True)
        ids = likeliest[..., : self.of.kept]
        if role == "topk_ids":
            return ids
        of_policy = role == "topk_logp"
        logits = self._logits if of_policy else self.batch.ref_logits.to(self._logits.dtype)
        return logits.log_softmax(-1).gather(-1, ids)

    def _constant(self, role: str) -> Tensor:
        batch, floats = self.batch, self.of.layout.floats
        if role == "tokens":
            marked = self.of.layout.marked
            return batch.tokens.masked_fill(~batch.mask, -100) if marked else batch.tokens
        if role == "position_ids":
            return torch.arange(batch.mask.shape[1]).expand(batch.rows, -1)
        if role in ("ref_logp", "old_logp", "ref_logits", "old_logits"):
            return getattr(batch, role).to(floats)
        if role == "token_rewards":
            last = batch.mask.cumsum(-1) == batch.mask.sum(-1, keepdim=True)
            return torch.where(last & batch.mask, batch.rewards.unsqueeze(-1), 0.0).to(floats)
        if role == "values":  # of a position, so that a baseline of them costs nothing
            return 0.1 * torch.arange(1, batch.mask.shape[1] + 1).to(floats).expand(batch.rows, -1)
        value = getattr(batch, role).to(floats)
        if value.ndim == 2:  # one a token: what masked positions hold is told apart
            return value if self.of.layout.advantages == "token" else value[:, 0]
        how = self.of.layout.advantages if role == "advantages" else "row"
        if how == "row" and not self.of.layout.packed:
            return value
        return (
            value.unsqueeze(-1) if how == "column" else value.unsqueeze(-1).expand(batch.mask.shape)
        )

    def _made_of(self, tensor: Tensor, role: str) -> Tensor:
        made = self._shape(tensor.detach().clone(memory_format=torch.contiguous_format))
        made = self._prompted(role, made)
        if self.watch and made.is_floating_point() and "mask" not in role and role != "padding":
            self.watched[role] = made.requires_grad_(True)
            made = made.clone()
        return self._tracked(made)

    def _tracked(self, made: Tensor) -> Tensor:
        self._made.append(made)
        return made

    def _prompted(self, role: str, made: Tensor) -> Tensor:
        """With the prompt's last token before: its logits predict the first of the answer, and the
        last logits predict nothing."""
        if role not in self.of.layout.prompted:
            return made
        if "logits" in role:
            return torch.cat([made, made[:, :1].detach()], 1)
        nothing = -100 if role == "tokens" and self.of.layout.marked else 0
        return torch.cat([torch.full_like(made[:, :1], nothing), made], 1)

    def _shape(self, tensor: Tensor) -> Tensor:
        """Packed, what belongs to tokens loses its padding."""
        if not self.of.layout.packed or tensor.shape[:2] != self.batch.mask.shape:
            return tensor
        return tensor[self.batch.mask]

    def modified(self) -> bool:
        return any(made._version > 0 for made in self._made)

    def padded(self, returned: Tensor) -> Tensor:
        """The result in the shape of the batch, zero where nothing is counted."""
        mask = self.batch.mask
        if self.of.layout.packed and returned.shape == (int(mask.sum()),):
            return torch.zeros(mask.shape, dtype=returned.dtype).masked_scatter(mask, returned)
        if returned.shape == mask.shape:
            return torch.where(mask, returned, 0.0)
        return returned.reshape(()) if returned.numel() == 1 and returned.ndim <= 1 else returned


def random_states() -> tuple[Any, ...]:
    """The states of the generators that a loss might draw from."""
    return (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))  # noqa: NPY002


def one_line(error: BaseException) -> str:
    """The first line of an exception, with its type."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:160]}" if said else type(error).__name__
