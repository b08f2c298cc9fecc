"""Call a function that somebody else wrote: on copies, and with one line for whatever it does."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kl_term.audit.arguments import Plan, name_of, numbers_of
from kl_term.audit.bags import Bag
from kl_term.audit.batches import Batch, chosen
from kl_term.audit.holding import changed
from kl_term.audit.layout import LAYOUTS, Layout
from kl_term.audit.returning import first_of
from kl_term.audit.spellings import OF_POLICY, OF_TOP_K


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
    calls: int = 0
    notes: set[str] = field(default_factory=set)  #: such as ``modifies its arguments``

    @property
    def name(self) -> str:
        return name_of(self.function)

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
        return "beta" in self.reads or inside

    def untold(self, *, integers: bool = False) -> dict[str, float]:
        """The numbers that are defaults of its signature and that nobody gave."""
        if self.factory is not None:
            return {}
        held = {**self.plan.roles, **self.plan.fixed}
        numbers = numbers_of(self.function, integers=integers)
        return {name: default for name, default in numbers.items() if name not in held}

    def named_in_bags(self) -> dict[str, str]:
        return {n[1:]: r for n, r in self.plan.fixed.items() if n.startswith("*")}

    def call(self, batch: Batch, beta: float, *, watch: bool = False) -> Output:
        """Value and gradient on a batch; ``watch`` also asks where else the gradient goes.

        Raises:
            Exception: whatever the function raises.
            UserError: it returns no number.
        """
        self.calls += 1
        copies = 1 if batch.rows % self.multiple == 0 else self.multiple
        given = Given(self, batch, beta, watch, copies)
        arguments = given.arguments()
        function = self.function
        if self.factory is not None:
            function = function(**{self.factory: beta})
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the same call, again and again
            returned = function(*arguments.positional, **arguments.named)
        returned = first_of(returned, self.name, packed=self.layout.packed)
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


def _of_copies(value: Tensor, copies: int, *, summed: bool) -> Tensor:
    """What a batch has, of what its copies have together."""
    if value.ndim == 0:
        return value / copies if summed else value
    return value.unflatten(0, (copies, -1)).mean(0)


class Arguments(NamedTuple):
    positional: tuple[Any, ...]
    named: dict[str, Any]


class Given:
    """The tensors of one call: fresh copies, one of them the leaf of the gradient."""

    def __init__(self, of: Foreign, batch: Batch, beta: float, watch: bool, copies: int) -> None:
        self.of, self.beta, self.watch = of, beta, watch
        self.watched: dict[str, Tensor] = {}
        self._made: list[Tensor] = []
        floats = of.layout.floats
        start = batch.logits if of.by_logits else batch.logp
        self.leaf = start.detach().to(floats).clone().requires_grad_(True)
        self.batch = batch if copies == 1 else batch.only([*range(batch.rows)] * copies)
        own = self.leaf if copies == 1 else torch.cat([self.leaf] * copies)
        self._logits = own if of.by_logits else self.batch.logits.detach().to(floats)
        self._logp = chosen(self._logits, self.batch.tokens) if of.by_logits else own

    def arguments(self) -> Arguments:
        plan = self.of.plan
        fixed = {n: self._own(n, v) for n, v in plan.fixed.items() if not n.startswith("*")}
        named = {name: self.value(role) for name, role in plan.roles.items()} | fixed
        first = tuple(named.pop(name) for name in plan.positional if name in named)
        return Arguments(first, named)

    def _own(self, name: str, value: Any) -> Any:
        """A copy of what the user gave, with the coefficient where it lies inside."""
        first, _, path = (self.of.beta_path or "").partition(".")
        for size in self.of.group_paths.get(name, ()):
            value = changed(value, size, self.batch.rows // self.of.groups)
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
            "group_size": batch.rows // self.of.groups,
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
            return self._shape(torch.arange(batch.rows).unsqueeze(-1).expand(batch.mask.shape))
        if role in ("lengths", "last"):
            return counted - 1 if role == "last" else counted
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
            return self._tracked(self._prompted(role, self._shape(logp.clone())))
        if role == "ref_log_ratio":
            log_ratio = logp - self.batch.ref_logp.to(logp.dtype)
            return self._shape(log_ratio.square() / 2 if self.of.is_given_kl else log_ratio)
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
        if how == ("column" if self.of.layout.packed else "row"):
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
        """With the prompt's last token before: what predicts the next token stands there for the
        first of the answer, and predicts nothing at the last."""
        before, after = self.of.layout.prompted
        if role not in (*before, *after) or made.shape[:2] != self.batch.mask.shape:
            return made
        if role in after:
            return torch.cat([made, made[:, :1].detach()], 1)
        nothing = -100 if role == "tokens" and self.of.layout.marked else 0
        return torch.cat([torch.full_like(made[:, :1], nothing), made], 1)

    def _shape(self, tensor: Tensor) -> Tensor:
        """Packed, what belongs to tokens loses its padding."""
        if not self.of.layout.packed or tensor.shape[:2] != self.batch.mask.shape:
            return tensor
        flat = tensor[self.batch.mask]
        return flat.unsqueeze(0) if self.of.layout.one_row else flat

    def modified(self) -> bool:
        return any(made._version > 0 for made in self._made)

    def padded(self, returned: Tensor) -> Tensor:
        """The result in the shape of the batch, zero where nothing is counted."""
        mask = self.batch.mask
        if self.of.layout.packed and returned.shape in ((int(mask.sum()),), (1, int(mask.sum()))):
            return torch.zeros(mask.shape, dtype=returned.dtype).masked_scatter(mask, returned)
        if any(self.of.layout.prompted) and returned.shape == (len(mask), mask.shape[1] + 1):
            returned = returned[:, :-1] if self.of.layout.prompted.after else returned[:, 1:]
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
