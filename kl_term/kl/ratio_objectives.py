r"""Off-policy objectives of whole sequences: what each importance weight makes of a return.

The exact objective weighs a sequence with the product of its ratios. Practice uses sums, prefixes,
means or clips of them. With every sequence listed, each objective is a finite sum that autograd
differentiates, so the order at which it departs from the exact one can be measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kl_term.checks import check_same_shape, checked
from kl_term.kl.importance import importance_ratio
from kl_term.kl.sequences import Sequences, can_draw, token_logp
from kl_term.plain_checks import check_choice
from kl_term.shapes import PerSequence, Table

OBJECTIVES = ("sequence", "linear", "token", "token_mean", "geometric")


@checked
def ratio_objective(
    logits: Table,
    old_logits: Table,
    sequences: Sequences,
    returns: PerSequence,
    *,
    objective: str = "sequence",
) -> Tensor:
    r"""Value of an off-policy objective with one return a sequence.

    .. math:: J(\theta) = \mathbb{E}_{y \sim \pi_{\mathrm{old}}}[W(y)\, R(y)], \qquad W =
        \prod_t \rho_t,\;\; 1 + \sum_t (\rho_t - 1),\;\; \sum_t \rho_t,\;\;
        \frac{1}{|y|} \sum_t \rho_t,\;\; \Big(\prod_t \rho_t\Big)^{1/|y|}

    for ``sequence`` (the exact :math:`\mathbb{E}_{\pi_\theta}[R]`, if the sampler allows every
    sequence that the policy allows; otherwise without those that it cannot draw), ``linear`` (its
    first-order part), ``token`` (the same gradient as ``linear``), ``token_mean`` (GRPO) and
    ``geometric`` (GSPO), all before any clip.

    Equation: ``ratio_objective``
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logits: [states, vocab], the trained policy, with gradient.
        old_logits: [states, vocab], the sampler.
        returns: [N], one a sequence.
        objective: a name of :data:`OBJECTIVES`.

    Returns:
        A scalar in the unit of the returns, to be maximised.
    """
    check_choice("objective", objective, OBJECTIVES)
    check_same_shape("logits", logits, "old_logits", old_logits)
    drawn = can_draw(old_logits, sequences)
    sequences = sequences.only(drawn)
    logp = token_logp(logits, sequences)
    old_logp = token_logp(old_logits.detach(), sequences)
    weight = _WEIGHTS[objective](logp, old_logp, sequences.mask)
    return (old_logp.sum(-1).exp() * weight * returns.detach()[drawn]).sum()


@checked
def ratio_objective_gradient(
    logits: Table,
    old_logits: Table,
    sequences: Sequences,
    returns: PerSequence,
    *,
    objective: str = "sequence",
) -> Tensor:
    """Gradient [states, vocab] of :func:`ratio_objective`, by autograd through the full sum."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_(True)
        value = ratio_objective(leaf, old_logits, sequences, returns, objective=objective)
        (gradient,) = torch.autograd.grad(value, leaf)
    return gradient


@checked
def token_surrogate(
    logits: Table, old_logits: Table, sequences: Sequences, advantages: Table
) -> Tensor:
    r"""The surrogate of TRPO and PPO: token ratios, the sampler's states and advantages.

    .. math:: L(\theta) = \mathbb{E}_{y \sim \pi_{\mathrm{old}}} \sum_t \rho_t\,
        A_{\mathrm{old}}(y_{<t}, y_t)
        = \sum_s d^{\pi_{\mathrm{old}}}(s) \sum_a \pi_\theta(a|s)\, A_{\mathrm{old}}(s, a)

    Equation: ``token_surrogate``
    Source: Kakade and Langford (2002); Schulman et al. (2015), TRPO.

    Args:
        logits: [states, vocab], the trained policy, with gradient.
        old_logits: [states, vocab], the sampler.
        advantages: [states, vocab], of the sampler, from
            :func:`kl_term.kl.credit.advantage_table`.

    Returns:
        A scalar: the improvement over the sampler that the surrogate promises.
    """
    return _mean_advantage(logits, old_logits, sequences, advantages, level="token")


@checked
def performance_difference(
    logits: Table, old_logits: Table, sequences: Sequences, advantages: Table
) -> Tensor:
    r"""The performance-difference lemma: what the policy's own states would give.

    .. math:: J(\theta) - J(\mathrm{old})
        = \mathbb{E}_{y \sim \pi_\theta} \sum_t A_{\mathrm{old}}(y_{<t}, y_t)
        = \mathbb{E}_{y \sim \pi_{\mathrm{old}}} \sum_t \Big(\prod_{u \le t} \rho_u\Big)
          A_{\mathrm{old}}(y_{<t}, y_t)

    Equation: ``performance_difference``
    Source: Kakade and Langford (2002), lemma 6.1.

    Args, Returns: as :func:`token_surrogate`; exact.
    """
    return _mean_advantage(logits, old_logits, sequences, advantages, level="prefix")


def _mean_advantage(
    logits: Tensor, old_logits: Tensor, sequences: Sequences, advantages: Tensor, *, level: str
) -> Tensor:
    check_same_shape("logits", logits, "advantages", advantages)
    sequences = sequences.only(can_draw(old_logits, sequences))
    logp = token_logp(logits, sequences)
    old_logp = token_logp(old_logits.detach(), sequences)
    weight = importance_ratio(logp, old_logp, sequences.mask, level=level)
    per_token = advantages.detach()[sequences.states, sequences.tokens]
    terms = torch.where(sequences.mask, weight * per_token, 0.0).sum(-1)
    return (old_logp.sum(-1).exp() * terms).sum()


def _token_sum(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    ratio = importance_ratio(logp, old_logp, mask, level="token")
    return torch.where(mask, ratio, 0.0).sum(-1)


def _whole(level: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda logp, old_logp, mask: importance_ratio(logp, old_logp, mask, level=level)[:, 0]


#: One weight [N] a sequence, by objective.
_WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sequence": _whole("sequence"),
    "linear": lambda logp, old_logp, mask: 1.0 + _token_sum(logp, old_logp, mask) - mask.sum(-1),
    "token": _token_sum,
    "token_mean": lambda logp, old_logp, mask: _token_sum(logp, old_logp, mask) / mask.sum(-1),
    "geometric": _whole("geometric"),
}
