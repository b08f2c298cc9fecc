r"""A mixture-of-experts head whose routing can be replayed.

Routing is a step function of the parameters: a tiny change of the router's logits swaps experts and
moves a log-prob by a finite amount. Replaying the experts chosen at sampling time makes the
log-prob a smooth function of the parameters again.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

from torch import Tensor

from kl_term.checks import checked
from kl_term.shapes import Axes, LogProbs

Hidden: TypeAlias = Annotated[Tensor, Axes("N D")]
Experts: TypeAlias = Annotated[Tensor, Axes("N", "integers")]


class ExpertHead(NamedTuple):
    """Parameters of one top-1 mixture-of-experts layer that ends in vocabulary logits."""

    router: Tensor  #: [E, D]
    experts: Tensor  #: [E, V, D]


@checked(nan="refused", half="kept")
def choose_experts(head: ExpertHead, hidden: Hidden) -> Tensor:
    """[N] expert of each of the hidden states [N, D]: the one with the largest router logit."""
    return _router_logits(head, hidden).argmax(dim=-1)


@checked(nan="refused", half="kept")
def routed_logp(head: ExpertHead, hidden: Hidden, experts: Experts) -> LogProbs:
    r"""Log-probs over the vocabulary when every state goes through a *given* expert.

    .. math:: \log \pi(\cdot \mid h) = \log\operatorname{softmax}\big(g_e(h)\, W_e h\big), \qquad
        g(h) = \operatorname{softmax}(R h)

    Pass :func:`choose_experts` of the trained head to recompute the routing, or of the head that
    sampled to replay it. Gradients reach the router through the gate either way.

    Equation: ``routed_logp``
    Source: DeepSeek-AI (2025), DeepSeek-V3.2, keep routing.

    Args:
        head: the parameters.
        hidden: [N, D].
        experts: [N], integers.

    Returns:
        [N, V].
    """
    logits = _router_logits(head, hidden)
    if bool(((experts < 0) | (experts >= len(head.router))).any()):
        raise ValueError(f"experts must be in [0, {len(head.router)})")
    gate = logits.softmax(dim=-1).gather(-1, experts.unsqueeze(-1))
    logits = (head.experts[experts] @ hidden.unsqueeze(-1)).squeeze(-1)
    return (gate * logits).log_softmax(dim=-1)


def _router_logits(head: ExpertHead, hidden: Tensor) -> Tensor:
    if hidden.shape[-1] != head.router.shape[-1] or hidden.dtype != head.router.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} {tuple(hidden.shape)}: head.router needs "
            f"{head.router.dtype} [N, {head.router.shape[-1]}]"
        )
    return hidden @ head.router.T
