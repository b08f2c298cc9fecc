"""What a loss of the corpus descends, by sums over every answer and autograd of closed forms.

Written apart from the package: neither its enumeration nor its divergences are used, so that an
error there and here would have to be the same one. A policy is a table of logits, one row a prefix.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from tests.audit.corpus import Entry, read

#: Relative error below which two gradients are one, by the precision of the loss.
SAME = {"float64": 1e-9, "float32": 1e-4}
#: What a masked position holds: finite, and nothing that could be taken for a log-prob of zero.
JUNK = {"logp": -0.9, "ref_logp": -2.3, "old_logp": -0.4}
#: Tokens of a list of the likeliest.
TOP = 2


class Tree:
    """Every answer over V tokens of at most T, ended by token 0 or by its length."""

    def __init__(self, vocab_size: int, longest: int) -> None:
        self.vocab_size, self.longest = vocab_size, longest
        self.answers: list[tuple[int, ...]] = []
        self._grow(())
        prefixes = {a[:t] for a in self.answers for t in range(len(a))}
        self.rows = {prefix: row for row, prefix in enumerate(sorted(prefixes))}

    def _grow(self, prefix: tuple[int, ...]) -> None:
        if len(prefix) == self.longest or (prefix and prefix[-1] == 0):
            self.answers.append(prefix)
            return
        for token in range(self.vocab_size):
            self._grow((*prefix, token))

    def token_logp(self, table: Tensor, answer: tuple[int, ...]) -> Tensor:
        """[length]: log-prob of each token of an answer."""
        rows = [self.rows[answer[:t]] for t in range(len(answer))]
        return table[rows].log_softmax(-1)[range(len(answer)), list(answer)]

    def answer_logp(self, table: Tensor) -> Tensor:
        """[answers]: log-prob of each."""
        return torch.stack([self.token_logp(table, a).sum() for a in self.answers])


@dataclass(frozen=True, eq=False)
class Case:
    """A tree with the policy that is trained, its reference and its sampler, each [prefixes, V].

    What does not depend on a loss is computed once, for all losses of the corpus.
    """

    tree: Tree
    policy: Tensor
    reference: Tensor
    sampler: Tensor

    @cached_property
    def fresh(self) -> Case:
        return Case(self.tree, self.policy, self.reference, self.policy)

    @cached_property
    def leaf(self) -> Tensor:
        """The policy, with a gradient: that of every loss is taken by it."""
        return self.policy.clone().requires_grad_(True)

    @cached_property
    def chance(self) -> Tensor:
        """[answers]: how likely the sampler gives each."""
        return self.tree.answer_logp(self.sampler).exp()

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """[prefixes, V] each: the gradients of the divergences by the policy's logits."""
        return {
            name: torch.autograd.grad(value, self.leaf, retain_graph=True)[0]
            for name, value in divergences(self, self.leaf).items()
        }


def states(entry: Entry) -> tuple[Case, ...]:
    """One state: answers of one token, V from 3 to 6, the last with a token that the reference
    alone allows, unless the loss reads logits, which are finite."""
    return _states("logits" not in entry.inputs)


@cache
def _states(unequal: bool) -> tuple[Case, ...]:
    found = []
    for seed, vocab_size in enumerate((3, 4, 6)):
        case = _random(Tree(vocab_size, 1), seed)
        if vocab_size == 6 and unequal:
            case.policy[:, 4] = case.sampler[:, 4] = -torch.inf
        found.append(case)
    return tuple(found)


@cache
def trees() -> tuple[Case, ...]:
    """Ragged trees, V = 3, at most three tokens: fifteen answers of four lengths' tables."""
    return tuple(_random(Tree(3, 3), seed) for seed in (11, 12))


def _random(tree: Tree, seed: int) -> Case:
    """Far from the reference (0.7 a logit), the sampler near enough that no clip of 0.2 is the
    rule, none of them symmetric."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(tree.rows), tree.vocab_size)
    reference, away, behind = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    policy = reference + 0.7 * away
    return Case(tree, policy, reference, policy + 0.4 * behind)


def divergences(case: Case, policy: Tensor) -> dict[str, Tensor]:
    """Closed forms over the answers that the policy can give, differentiable in ``policy``."""
    possible = case.tree.answer_logp(case.policy) > -torch.inf
    logp = case.tree.answer_logp(policy)[possible]
    logr = case.tree.answer_logp(case.reference)[possible]
    p, r, gap = logp.exp(), logr.exp(), logp - logr
    lengths = torch.tensor([float(len(a)) for a in case.tree.answers], dtype=p.dtype)[possible]
    reverse, forward = (p * gap).sum(), -(r * gap).sum()
    return {
        "reverse KL": reverse,
        "forward KL": forward,
        "E[k2]": (p * gap.square()).sum() / 2,
        "half chi-square": (p * gap.exp()).sum() / 2,
        "total variation": (p - r).abs().sum() / 2,
        "half squared distance": (p - r).square().sum() / 2,
        "reverse - forward": reverse - forward,
        "reverse + forward": reverse + forward,
        "negative entropy": (p * logp).sum(),
        "mean length": (p * lengths).sum(),
    }


def tensors(case: Case, batch: tuple[tuple[int, ...], ...], policy: Tensor) -> dict[str, Tensor]:
    """A batch of answers under every role; the log-probs of the policy carry its gradient."""
    width = max(len(a) for a in batch)
    shape = (len(batch), width)
    rows = torch.zeros(shape, dtype=torch.long)
    tokens = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    for i, answer in enumerate(batch):
        for t, token in enumerate(answer):
            rows[i, t], tokens[i, t], mask[i, t] = case.tree.rows[answer[:t]], token, True
    lengths = mask.sum(-1)
    given: dict[str, Tensor] = {"tokens": tokens, "mask": mask}
    tables = {"": policy, "ref_": case.reference, "old_": case.sampler}
    for prefix, table in tables.items():
        logits = table[rows]
        logp = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        given[f"{prefix}logits"] = logits
        given[f"{prefix}logp"] = torch.where(mask, logp, JUNK[f"{prefix}logp"])
    given |= _of_the_likeliest(given)
    given["padding"], given["sample_mask"] = ~mask, torch.ones(len(batch), dtype=torch.bool)
    given["sequence_ids"] = torch.arange(len(batch)).repeat_interleave(lengths)
    given["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    given["position_ids"] = torch.cat([torch.arange(n) for n in lengths])
    given["count"], given["group_size"] = lengths.sum(), torch.tensor(len(batch))
    given["advantages"] = torch.zeros(shape, dtype=policy.dtype)
    given["rewards"] = given["token_rewards"] = torch.zeros(shape, dtype=policy.dtype)
    given["values"] = (0.5 - 0.3 * torch.arange(width, dtype=policy.dtype)).expand(shape)
    return given


@cache
def drawn(case: Case, batch: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """The same by the leaf of the case, once for all losses: each is given copies."""
    return tensors(case, batch, case.leaf)


def _of_the_likeliest(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """[B, T, TOP]: the policy's likeliest tokens under both, and the reference's under itself."""
    logp, ref_logp = given["logits"].log_softmax(-1), given["ref_logits"].log_softmax(-1)
    own, ids = logp.topk(TOP)
    best, ref_ids = ref_logp.topk(TOP)
    there = ref_logp.gather(-1, ids)
    return {"topk_logp": own, "ref_at_topk": there, "ref_topk_logp": best, "ref_topk_ids": ref_ids}


def kl_loss(entry: Entry, given: dict[str, Tensor]) -> Tensor:
    """The part of the loss that the coefficient multiplies, at coefficient one: a scalar."""
    inputs = {parameter: _shaped(entry, role, given) for parameter, role in entry.roles.items()}
    beta = 0.5
    whole = _scalar(entry, entry.loss(beta)(**inputs), given)
    if entry.beta is None:
        return whole
    return (whole - _scalar(entry, entry.loss(0.0)(**inputs), given)) / beta


def _shaped(entry: Entry, role: str, given: dict[str, Tensor]) -> Any:
    """A tensor as the loss wants it: packed, one number an answer, or of its precision."""
    value, mask = given[role].clone(), given["mask"]
    if role in entry.per_answer:
        value = value[:, 0]
    value = value.to(getattr(torch, entry.dtype)) if value.is_floating_point() else value
    if entry.prompt and role not in entry.unprompted and value.shape[:2] == mask.shape:
        return _after_a_prompt(role, value)
    tells = {"cu_seqlens", "position_ids"} & set(entry.inputs)
    packed = entry.packed or ("flat" if tells else None)
    if packed == "lists" and value.shape == mask.shape:
        return [row[counted] for row, counted in zip(value, mask, strict=True)]
    if packed and value.shape == mask.shape:
        value = value[mask]
    return value[None] if packed == "row" and role not in entry.per_answer else value


def _after_a_prompt(role: str, value: Tensor) -> Tensor:
    """[B, 1 + T]: an entry a token, the first the prompt's; logits predict the next token."""
    empty = torch.zeros_like(value[:, :1])
    return torch.cat([value, empty] if "logits" in role else [empty, value], 1)


def _scalar(entry: Entry, result: Any, given: dict[str, Tensor]) -> Tensor:
    """What a trainer would differentiate."""
    if isinstance(result, list):
        result = torch.nn.utils.rnn.pad_sequence(result, batch_first=True)
    elif isinstance(result, dict):
        result = result["loss"] if "loss" in result else next(iter(result.values()))
    elif hasattr(result, "loss"):
        result = result.loss
    elif isinstance(result, tuple):
        result = result[0]
    mask = given["mask"]
    if entry.returns == "tokens":
        return torch.where(mask, result, 0.0).sum() / len(mask)
    if entry.returns == "loss":
        return result
    credit = result.detach()
    if credit.ndim == 1:
        credit = credit.unsqueeze(-1)
    elif entry.returns == "token rewards":
        credit = torch.where(mask, credit, 0.0).flip(-1).cumsum(-1).flip(-1)
    return -torch.where(mask, credit * given["logp"], 0.0).sum() / len(mask)


def expected_gradient(entry: Entry, case: Case, batch_size: int = 1) -> Tensor:
    """[prefixes, V]: by the policy's logits, over every batch of answers that the sampler draws."""
    total = case.leaf.new_zeros(())
    possible = [i for i in range(len(case.tree.answers)) if case.chance[i] > 0]
    for batch in itertools.product(possible, repeat=batch_size):
        answers = tuple(case.tree.answers[i] for i in batch)
        total = total + case.chance[list(batch)].prod() * kl_loss(entry, drawn(case, answers))
    if not total.requires_grad:
        return torch.zeros_like(case.policy)
    (gradient,) = torch.autograd.grad(total, case.leaf, allow_unused=True, retain_graph=True)
    return torch.zeros_like(case.policy) if gradient is None else gradient


def descends(entry: Entry, cases: list[Case], batch_size: int = 1) -> tuple[str, float]:
    """The divergence whose gradient it is in every case, and the factor; ``neither`` or
    ``nothing`` with a factor of zero."""
    found: set[str] | None = None
    scales: dict[str, list[float]] = {}
    for case in cases:
        gradient = expected_gradient(entry, case, batch_size)
        fits = dict(_fits(gradient, case, SAME[entry.dtype]))
        found = set(fits) if found is None else found & set(fits)
        for name, scale in fits.items():
            scales.setdefault(name, []).append(scale)
    for name in found or ():
        if name == "nothing":
            return name, 0.0
        scale = scales[name]
        if max(scale) - min(scale) < 1e-4 * abs(scale[0]):
            return (name if scale[0] > 0 else f"minus {name}"), abs(scale[0])
    return "neither", 0.0


def _fits(gradient: Tensor, case: Case, same: float) -> Iterator[tuple[str, float]]:
    if gradient.norm() < same * case.exact["reverse KL"].norm():
        yield "nothing", 0.0
        return
    for name, of in case.exact.items():
        scale = (gradient * of).sum() / of.square().sum()
        if (gradient - scale * of).norm() < same * gradient.norm():
            yield name, scale.item()


def verdict(entry: Entry) -> dict[str, dict[str, tuple[str, float]]]:
    """``minimises`` of the index, each with its factor: {"fresh": {"state": ..., ...}, ...}."""
    which: dict[str, Callable[[Case], Case]] = {"fresh": lambda c: c.fresh, "stale": lambda c: c}
    return {
        samples: {
            "state": descends(entry, [of(c) for c in states(entry)], entry.rows),
            "sequence": descends(entry, [of(c) for c in trees()], entry.rows),
        }
        for samples, of in which.items()
    }


def defined(entry: Entry) -> bool:
    """Whether the index states a verdict at all."""
    return any(name is not None for of in entry.minimises.values() for name in of.values())


def main() -> None:
    """Print what the enumeration finds in these sections of the index, and where that differs."""
    for entry in filter(defined, read(*sys.argv[1:])):
        for samples, levels in verdict(entry).items():
            for level, (name, scale) in levels.items():
                stated = entry.minimises[samples][level]
                note = "" if stated in (name, None) else f"   the index says {stated}"
                print(f"{entry.name:32}{samples:6}{level:9}{name} x {scale:.4g}{note}")


if __name__ == "__main__":
    main()
