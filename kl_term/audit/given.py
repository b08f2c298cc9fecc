"""The tensors of one call of a foreign function: fresh copies, in the layout that it wants."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kl_term.audit.bags import Bag, asked_for
from kl_term.audit.batches import Batch, chosen
from kl_term.audit.holding import changed
from kl_term.audit.layout import IGNORED, PAD
from kl_term.audit.spellings import NUMBERS, OF_LENGTHS, OF_POLICY, OF_TOP_K

if TYPE_CHECKING:
    from kl_term.audit.calling import Foreign


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
        named = {name: self._argument(name, role) for name, role in plan.roles.items()} | fixed
        first = tuple(named.pop(name) for name in plan.positional if name in named)
        return Arguments(first, named)

    def _argument(self, name: str, role: str) -> Any:
        fields = self.of.fields.get(name) if role == "inputs" else None
        if fields:
            return Bag(self, fields=fields)
        made = asked_for(name, role, self.value(role))
        return made.numpy() if role == "group" and name in self.of.arrays else made

    def _own(self, name: str, value: Any) -> Any:
        """A copy of what the user gave, with the coefficient where it lies inside."""
        first, _, path = (self.of.beta_path or "").partition(".")
        for size in self.of.group_paths.get(name, ()):
            value = changed(value, size, self.batch.rows // self.of.groups)
        if first != name:
            return value.clone() if isinstance(value, Tensor) else value
        return changed(value, path, self.beta)

    def value(self, role: str, *, row: int | None = None) -> Any:
        """What is passed for a role, or an entry of a list holds of it for its answer."""
        made = self._passed(role)
        of_rows = isinstance(made, (list, Tensor)) and row is not None
        return made[row] if of_rows else made

    def _passed(self, role: str) -> Any:
        made = self._value(role)
        layout = self.of.layout
        if role in OF_LENGTHS:
            return made.tolist() if layout.plain else made
        if not layout.listed or not isinstance(made, Tensor) or self._is_of_answers(role):
            return made
        if layout.packed:
            return list(made.split(self._lengths)) if len(made) == sum(self._lengths) else made
        return list(made) if made.ndim > 1 and len(made) == self.batch.rows else made

    def _is_of_answers(self, role: str) -> bool:
        """Whether a role holds one number an answer, as a pack may have answers of one token."""
        column = role == "advantages" and self.of.layout.advantages == "column"
        return column or role in ("rewards", "sample_mask", "group", "last", "cu_seqlens")

    @cached_property
    def _lengths(self) -> list[int]:
        """Counted tokens of each answer."""
        return self.batch.mask.sum(-1).tolist()

    def _number(self, role: str) -> Any:
        numbers: dict[str, Callable[[], Any]] = {
            "beta": lambda: self.beta,
            "clip": lambda: 0.2,
            "temperature": lambda: 1.0,
            "width": lambda: self.of.allowed or self.batch.mask.shape[1],
            "count": lambda: sum(self._lengths),
            "group_size": lambda: self.batch.rows // self.of.groups,
            "max_seqlen": lambda: max(self._lengths),
            "prompt_length": lambda: 1,
            "pad_id": lambda: PAD,
            "ignore_index": lambda: IGNORED,
            "discount": lambda: 1.0,
        }
        return numbers[role]()

    def _value(self, role: str) -> Any:
        batch, layout = self.batch, self.of.layout
        if role == "inputs" and layout.rows:
            return [Bag(self, row=row) for row in range(batch.rows)]
        if role in ("inputs", "config"):
            return Bag(self, nests=role == "config" and self.of.nests)
        if role in NUMBERS:
            return self._number(role)
        if role in OF_TOP_K:
            return self._tracked(self._shape(self._of_top_k(role)))
        if role in OF_POLICY:
            return self._of_policy(role)
        if role in OF_LENGTHS:
            return self._of_lengths(role)
        if role in ("prompt_tokens", "prompt_mask"):
            return torch.zeros(batch.rows, 1).to(torch.long) + int(role == "prompt_mask")
        counted = batch.mask.sum(-1)
        if role == "cu_seqlens":
            return torch.nn.functional.pad(counted.cumsum(0), (1, 0)).to(torch.int32)
        if role == "sequence_ids":
            return self._shape(torch.arange(batch.rows).unsqueeze(-1).expand(batch.mask.shape))
        if role == "last":
            return counted - 1
        if role == "sample_mask":
            return self._made_of(torch.ones(batch.rows, dtype=layout.mask), role)
        if role == "group":
            return torch.zeros(batch.rows, dtype=torch.long)
        if role in ("mask", "padding"):
            mask = batch.mask if role == "mask" else ~batch.mask
            kind = layout.floats if layout.mask.is_floating_point else layout.mask
            return self._made_of(mask.to(kind), role)
        return self._made_of(self._constant(role), role)

    def _of_lengths(self, role: str) -> Tensor:
        """[B]: of the prompts, which have one token, of the answers, or of both."""
        mask, how = self.batch.mask, self.of.layout.lengths
        if role == "prompt_lengths":
            return torch.ones(len(mask), dtype=torch.long)
        counted = torch.full_like(mask[:, 0], mask.shape[1], dtype=torch.long)
        counted = counted if how == "width" else mask.sum(-1)
        return counted + int(role == "total_lengths" or how == "whole")

    def _of_policy(self, role: str) -> Tensor:
        if role == "logits":
            return self._tracked(self._prompted(role, self._shape(self._logits.clone())))
        logp = self._logp
        if role == "logp":
            return self._tracked(self._prompted(role, self._shape(logp.clone())))
        if role == "ref_log_ratio":
            log_ratio = logp - self.batch.ref_logp.to(logp.dtype)
            made = log_ratio.square() / 2 if self.of.is_given_kl else log_ratio
            return self._prompted(role, self._shape(made))
        log_ratio = logp - self.batch.old_logp.to(logp.dtype)
        made = log_ratio if role == "log_ratio" else log_ratio.exp()
        return self._prompted(role, self._shape(made))

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
            return batch.tokens if marked is None else batch.tokens.masked_fill(~batch.mask, marked)
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
        layout = self.of.layout
        how = layout.advantages if role == "advantages" else "row"
        if how == ("column" if layout.packed else "row") or (layout.listed and role == "rewards"):
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
        marked = self.of.layout.marked
        nothing = marked if role == "tokens" and marked not in (None, PAD) else 0
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
        if self.of.layout.listed and returned.shape == (mask.numel(),):
            returned = returned.view(mask.shape)
        if self.of.layout.packed and returned.shape in ((int(mask.sum()),), (1, int(mask.sum()))):
            return torch.zeros(mask.shape, dtype=returned.dtype).masked_scatter(mask, returned)
        if any(self.of.layout.prompted) and returned.shape == (len(mask), mask.shape[1] + 1):
            returned = returned[:, :-1] if self.of.layout.prompted.after else returned[:, 1:]
        if returned.shape == mask.shape:
            return torch.where(mask, returned, 0.0)
        return returned.reshape(()) if returned.numel() == 1 and returned.ndim <= 1 else returned
