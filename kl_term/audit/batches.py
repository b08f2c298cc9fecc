"""A batch of answers under policy, reference and sampler, by logits and by log-probs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Answers under a policy, a reference and a sampler, and what they are worth."""

    logits: Tensor  #: [B, T, V], of the policy
    ref_logits: Tensor  #: [B, T, V]
    old_logits: Tensor  #: [B, T, V]
    tokens: Tensor  #: [B, T] long
    mask: Tensor  #: [B, T] bool, True = counted
    advantages: Tensor  #: [B], one an answer
    rewards: Tensor  #: [B], one an answer

    @cached_property
    def logp(self) -> Tensor:
        return chosen(self.logits, self.tokens)

    @cached_property
    def ref_logp(self) -> Tensor:
        return chosen(self.ref_logits, self.tokens)

    @cached_property
    def old_logp(self) -> Tensor:
        return chosen(self.old_logits, self.tokens)

    @property
    def rows(self) -> int:
        return len(self.mask)

    def fresh(self) -> Batch:
        """The same answers, sampled by the policy itself."""
        return replace(self, old_logits=self.logits)

    def only(self, rows: Tensor | list[int]) -> Batch:
        """Some of the answers, in the order given."""
        found = Batch(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))
        for name in ("logp", "ref_logp", "old_logp"):
            if name in self.__dict__:  # computed already: not once more for each batch of a tree
                found.__dict__[name] = self.__dict__[name][rows]
        return found

    def wider(self, columns: int) -> Batch:
        """The same answers with more padding at the end, which holds ordinary numbers."""

        def padded(x: Tensor) -> Tensor:
            if x.ndim < 2:
                return x
            more = x[:, :1].expand(-1, columns, *x.shape[2:])
            return torch.cat([x, torch.zeros_like(more) if x.dtype == torch.bool else more], 1)

        return Batch(*(padded(getattr(self, name)) for name in self.__dataclass_fields__))


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-prob of each token [...] under logits [..., V]."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def random_batch(
    *,
    rows: int,
    width: int,
    vocab_size: int,
    distance: float,
    staleness: float,
    ragged: bool,
    seed: int,
) -> Batch:
    """Answers with random logits: the reference ``distance`` away, the sampler ``staleness``.

    Advantages have both signs and no two sizes, rewards are not their multiples.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(rows, width, vocab_size)
    mask = torch.ones(rows, width, dtype=torch.bool)
    if ragged:
        lengths = 1 + (torch.arange(rows) + seed) % width
        mask = torch.arange(width) < lengths.unsqueeze(-1)
    signs = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).double()
    return Batch(
        logits=logits,
        ref_logits=logits + distance * normal(rows, width, vocab_size).clamp(-2.0, 2.0),
        old_logits=logits + staleness * normal(rows, width, vocab_size).clamp(-1.5, 1.5),
        tokens=torch.randint(vocab_size, (rows, width), generator=generator),
        mask=mask,
        advantages=signs * (0.5 + normal(rows).abs()),
        rewards=torch.rand(rows, generator=generator, dtype=torch.float64) * 2,
    )


def token_batch(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, advantage: float = 0.0) -> Batch:
    """One token an answer with these log-probs [B], out of a vocabulary of two."""

    def of_two(x: Tensor) -> Tensor:
        x = x.double()
        other = torch.log(-torch.expm1(x.clamp(max=-1e-12)))
        return torch.stack([x, other], dim=-1).unsqueeze(1)

    count = len(logp)
    return Batch(
        logits=of_two(logp),
        ref_logits=of_two(ref_logp),
        old_logits=of_two(old_logp),
        tokens=torch.zeros(count, 1, dtype=torch.long),
        mask=torch.ones(count, 1, dtype=torch.bool),
        advantages=torch.full((count,), advantage, dtype=torch.float64),
        rewards=torch.full((count,), advantage, dtype=torch.float64),
    )
