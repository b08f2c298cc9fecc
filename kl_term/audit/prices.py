"""How a price that a reward pays for the KL of a token becomes a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.kl.term import KLTerm

#: Of the leaf's log-probs, the reference's, the sampler's [..., B, T], mask and logits: the term
#: of each token.
Terms = Callable[["Seen"], Tensor]


class Seen(NamedTuple):
    """What a term reads, with leading axes for what is computed together."""

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    mask: Tensor
    logits: Tensor
    ref_logits: Tensor


OF_ANSWERS = "price of the sampler, times the ratio of the answer"
#: How a price on a token becomes a loss: whose log-ratio it holds, and what it multiplies.
SURROGATES: dict[str, Callable[[Seen], tuple[Tensor, Tensor]]] = {
    "price of the sampler, times the ratio": lambda s: (s.old_logp, _ratio(s)),
    "price of the policy, times the ratio": lambda s: (s.logp.detach(), _ratio(s)),
    "price of the sampler, times the log-prob": lambda s: (s.old_logp, s.logp),
    "price of the policy, times the log-prob": lambda s: (s.logp.detach(), s.logp),
    OF_ANSWERS: lambda s: (s.old_logp, _ratio_of_answer(s)),
}


def _ratio(seen: Seen) -> Tensor:
    return torch.where(seen.mask, seen.logp - seen.old_logp, 0.0).exp()


def _ratio_of_answer(seen: Seen) -> Tensor:
    """Of which each token has an equal share."""
    log_ratio = torch.where(seen.mask, seen.logp - seen.old_logp, 0.0).sum(-1, keepdim=True)
    return log_ratio.exp() / seen.mask.sum(-1, keepdim=True)


def priced(
    term: KLTerm,
    surrogate: Callable[[Seen], tuple[Tensor, Tensor]],
    off: Callable[[Tensor], Tensor] | None = None,
) -> Terms:
    def per_token(seen: Seen) -> Tensor:
        held, factor = surrogate(seen)
        price = term.penalty(held, seen.ref_logp, mask=seen.mask)
        if off is not None:  # the answers of a batch are one group; every token owes the same
            price = torch.where(seen.mask, price - off(price[..., 0]).unsqueeze(-1), 0.0)
        return price * factor

    return per_token


#: What is taken off the price of an answer, from those of its group [..., G].
BASELINES: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean of the others": lambda p: (p.sum(-1, keepdim=True) - p) / max(p.shape[-1] - 1, 1),
    "the mean of the group": lambda p: p.mean(-1, keepdim=True).expand_as(p),
}
