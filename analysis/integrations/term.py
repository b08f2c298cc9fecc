r"""Which KL term: the axes on which trainers differ, as one choice and two functions.

A term in the *loss* is a value per token, with gradient, which the trainer aggregates as it does
its own. A term in the *reward* is a number per token or per completion, without gradient, which
lowers the advantages.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor

from analysis.checks import as_mask
from analysis.kl.importance import importance_ratio
from analysis.kl.surrogates import kl_loss, kl_penalty
from analysis.objectives.credit import fold_kl
from analysis.training.schema import Schema

#: A reward is a number, which neither of these has: a surrogate has a gradient only, and the full
#: vocabulary belongs to a state, not to a sampled token.
LOSS_ONLY = ("minimax01", "exact")


class KLTerm(Schema):
    """What is added to a GRPO loss or taken from its rewards, times beta; by default GRPO's own.

    Every estimator but ``exact`` reads the sampled tokens. Fields that have no meaning for a
    choice must be left at their defaults.
    """

    #: ``none`` measures the KL to the reference and leaves it out of the objective.
    estimator: Literal["none", "k1", "k2", "k3", "k3_clip", "minimax01", "exact"] = "k3"
    placement: Literal["loss", "reward"] = "loss"
    #: Of the log-ratio in the estimator: a token's, or the whole completion's.
    level: Literal["token", "sequence"] = "token"
    #: Off-policy weight in the loss: policy over sampler, with gradient, without, or none.
    weighting: Literal["none", "attached", "detached"] = "none"
    #: Of the weight, as in :func:`analysis.kl.importance.importance_ratio`. At level ``sequence``
    #: it is the whole completion's.
    ratio: Literal["token", "prefix", "sequence", "geometric"] = "token"
    #: In the reward at level ``token``: a token pays for itself, or for all that follow too.
    credit: Literal["immediate", "to_go"] = "immediate"

    @model_validator(mode="after")
    def _consistent(self) -> KLTerm:
        for field, why in self._without_meaning():
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field}={getattr(self, field)!r} has no meaning {why}")
        if self.placement == "reward" and self.estimator in LOSS_ONLY:
            raise ValueError(
                f"estimator={self.estimator!r} works in the loss only: in the reward use k1"
            )
        return self

    def _without_meaning(self) -> list[tuple[str, str]]:
        """Fields that this choice gives no meaning to, and why."""
        if self.estimator == "none":
            fields = ("placement", "level", "weighting", "ratio", "credit")
            return [(field, "without an estimator") for field in fields]
        found = []
        if self.placement == "reward":
            found += [("weighting", "in the reward: the policy loss has the ratio already")]
        if self.estimator in LOSS_ONLY:
            found += [("level", f"for {self.estimator}, which belongs to a token")]
        if self.estimator == "exact":
            found += [("weighting", "for the exact KL, which samples no token")]
        if self.weighting == "none":
            found += [("ratio", "without a weighting")]
        if self.level == "sequence":
            found += [("ratio", "at level sequence"), ("credit", "at level sequence")]
        if self.placement == "loss":
            found += [("credit", "in the loss")]
        return found


def loss_terms(
    term: KLTerm, logp: Tensor, ref_logp: Tensor, old_logp: Tensor, mask: Tensor
) -> Tensor:
    r"""Per-token KL term of a loss, to be aggregated like the policy loss and multiplied by beta.

    .. math:: \text{token:} \quad w_t\, k(l_t), \qquad
        \text{sequence:} \quad \frac{W\, k\big(\sum_u l_u\big)}{T}

    At level ``sequence`` a completion has one value, which its :math:`T` tokens share evenly: with
    k1 both levels have the same value, whatever the aggregation.

    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        term: in the loss, by any estimator of sampled tokens.
        logp: [B, T], with gradient.
        ref_logp, old_logp: [B, T], constant.
        mask: [B, T], True = counted.

    Returns:
        [B, T], nats; exactly zero in value and gradient where masked.
    """
    counted = as_mask("mask", mask, "logp", logp)
    if term.level == "sequence":
        whole = kl_loss(
            *(_whole(x, counted) for x in (logp, ref_logp, old_logp)),
            estimator=term.estimator,
            weighting=term.weighting,
        )
        return torch.where(counted, whole / counted.sum(-1, keepdim=True).clamp(min=1), 0.0)
    value = kl_loss(logp, ref_logp, estimator=term.estimator, mask=counted)
    if term.weighting == "none":
        return value
    ratio = importance_ratio(logp, old_logp, counted, level=term.ratio)
    return value * (ratio if term.weighting == "attached" else ratio.detach())


def penalised_advantages(
    term: KLTerm,
    beta: float,
    advantages: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
) -> Tensor:
    r"""Advantages less the KL of the policy that sampled, after their normalisation.

    .. math:: \text{token:} \quad A_t - \beta \sum_{s \ge t} k(l_s)
        \;\text{(to\_go)}, \quad A_t - \beta\, k(l_t) \;\text{(immediate)}, \qquad
        \text{sequence:} \quad A - \beta\, k\big(\sum_u l_u\big)

    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        term: in the reward.
        beta: the KL coefficient, at least 0.
        advantages: [B] or [B, T], constant.
        old_logp, ref_logp: [B, T].
        mask: [B, T], True = counted.

    Returns:
        [B, T], without gradient; zero where masked.
    """
    counted = as_mask("mask", mask, "old_logp", old_logp)
    if term.level == "token":
        penalty = kl_penalty(old_logp, ref_logp, estimator=term.estimator, mask=counted)
    else:
        whole = (_whole(x, counted) for x in (old_logp, ref_logp))
        penalty = kl_penalty(*whole, estimator=term.estimator).expand_as(old_logp)
    return fold_kl(advantages, penalty, counted, beta=beta, credit=term.credit)


def _whole(logp: Tensor, counted: Tensor) -> Tensor:
    """[B, 1]: log-probs of the completions."""
    return torch.where(counted, logp, 0.0).sum(-1, keepdim=True)
