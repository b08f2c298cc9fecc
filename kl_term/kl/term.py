r"""One KL term: every axis on which trainers differ, as one choice with a loss and a penalty.

This is the only description of a KL term in the project: the population trainer, the TRL
integration, the diagnosis, the audit of the frameworks and the chapters all read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError, model_validator
from torch import Tensor

from kl_term.checks import as_mask, check_same_shape, checked, pair_of_floats
from kl_term.errors import first_problem
from kl_term.kl.estimators import ESTIMATORS, TOKEN_ESTIMATORS, VOCABULARY_ESTIMATORS
from kl_term.kl.names import Credit, Estimator, Level, Placement, Ratio, Value, Weighting
from kl_term.kl.returns import reward_to_go
from kl_term.kl.surrogates import kl_loss, kl_penalty, straight_through
from kl_term.schema import Schema
from kl_term.shapes import Logits, LogProbs, Mask, Values


class KLTerm(Schema):
    r"""How a KL to a reference enters training, apart from its coefficient; by default GRPO's own.

    A loss is aggregated like the policy loss, a penalty is subtracted from the advantages, both
    times beta. The loss of a token is

    .. math:: \text{token:} \quad \kappa_t = w_t\, k(l_t), \qquad
        \text{sequence:} \quad \kappa_t = \frac{1}{T}\, W\, k\Big(\sum_{u \le T} l_u\Big)

    **Scale of a loss.** At either level the tokens of a completion *sum* to its loss: at level
    ``sequence`` its :math:`T` counted tokens share :math:`W k(\sum l)` evenly. So with k1 and no
    weighting both levels have one value under every aggregation that weighs the tokens of a
    completion alike, and at level ``sequence`` k2 as a loss has, sample by sample, the gradient of
    k1 in the reward. An aggregation that divides by :math:`T` (``seq_mean_token_mean``) divides the
    loss of a completion by its length at either level. In the reward nothing is shared: at level
    ``sequence`` each token owes the whole.

    Fields that have no meaning for a choice must be left at their defaults.

    Equation: ``KLTerm``
    """

    #: ``none`` measures the KL and leaves it out of the objective. ``exact`` and ``forward`` are
    #: the reverse and the forward KL over the vocabulary at each visited state. ``cross_entropy``
    #: is minus the log-prob of the sampled token: supervised, if a teacher samples.
    estimator: Estimator = "k3"
    placement: Placement = "loss"
    #: Of the log-ratio in the estimator: a token's, or the whole completion's.
    level: Level = "token"
    #: Off-policy weight of the loss: see :func:`kl_term.kl.surrogates.kl_loss`.
    weighting: Weighting = "none"
    #: Of the weight, at level ``token``: see :func:`kl_term.kl.importance.importance_ratio`.
    ratio: Ratio = "token"
    #: In the reward at level ``token``: a token pays for itself and all that follow, for itself
    #: alone, or for the whole completion.
    credit: Credit = "to_go"
    #: Estimator that a loss reports while ``estimator`` gives its gradient; None = the same.
    value: Value | None = None

    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            """Raises: ValueError: one line on the first field that does not fit."""
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise ValueError(f"KLTerm: {first_problem(error)}") from None

        __init__.__pydantic_base_init__ = True  # as a field it is validated with its place

    @model_validator(mode="after")
    def _consistent(self) -> KLTerm:
        for field, why in self._without_meaning():
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field}={getattr(self, field)!r} has no meaning {why}")
        if self.placement == "reward" and self.estimator not in ESTIMATORS:
            raise ValueError(
                f"estimator={self.estimator!r} works in the loss only: in the reward use one of "
                f"{list(ESTIMATORS)}"
            )
        if self.estimator not in ESTIMATORS and self.weighting == "attached":
            raise ValueError(
                f"weighting='attached' would differentiate the value of {self.estimator}, which "
                "has a gradient only: set weighting to 'none' or 'detached'"
            )
        return self

    def _without_meaning(self) -> list[tuple[str, str]]:
        """Fields that this choice gives no meaning to, and why."""
        if self.estimator == "none":
            fields = ("placement", "level", "weighting", "ratio", "credit", "value")
            return [(field, "without an estimator") for field in fields]
        found = []
        if self.placement == "reward":
            found += [("weighting", "in the reward: the policy loss has the ratio already")]
            found += [("value", "in the reward, which is a value alone")]
        else:
            found += [("credit", "in the loss")]
        if self.estimator not in ESTIMATORS:
            found += [("level", f"for {self.estimator}, which belongs to a token")]
            found += [("value", f"for {self.estimator}, which is no estimator of sampled tokens")]
        if self.estimator not in TOKEN_ESTIMATORS:
            found += [("weighting", f"for {self.estimator}, which is not weighted by a ratio")]
        if self.weighting == "none":
            found += [("ratio", "without a weighting")]
        if self.level == "sequence":
            found += [("ratio", "at level sequence: it is the completion's")]
            found += [("credit", "at level sequence: it is the completion's")]
        return found

    @property
    def name(self) -> str:
        """Such as ``none``, ``k3_loss``, ``k1_reward`` or ``k3_loss_attached_prefix``."""
        if self.estimator == "none":
            return "none"
        rest = self.model_dump(exclude={"estimator", "placement", "value"}, exclude_defaults=True)
        shown = [] if self.value is None else ["shows", self.value]
        return "_".join([self.estimator, self.placement, *rest.values(), *shown])

    @property
    def at_one_state(self) -> dict[str, str]:
        """The axes that mean something at one state, for :mod:`kl_term.kl.enumeration`."""
        return self.model_dump(include={"estimator", "placement", "weighting"})

    @property
    def reads_logits(self) -> bool:
        return self.estimator in VOCABULARY_ESTIMATORS

    @checked(half="kept")  # logits that the term does not read are not widened
    def loss(
        self,
        logp: LogProbs,
        ref_logp: LogProbs,
        *,
        old_logp: LogProbs | None = None,
        mask: Mask | None = None,
        logits: Logits | None = None,
        ref_logits: Logits | None = None,
    ) -> Values:
        r"""The term :math:`\kappa_t` of each token of a loss, to be aggregated and minimised.

        Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

        Args:
            logp: [..., T], log-probs of the sampled tokens under the trained policy, with gradient.
            ref_logp: [..., T], under the reference; constant.
            old_logp: [..., T], under the policy that sampled; constant. Read by a weighting.
            mask: [..., T], True = counted; None counts every token.
            logits, ref_logits: [..., T, V], at the sampling temperature, the reference's constant.
                Read by ``exact`` and ``forward``; finite where masked.

        What the term does not read may be given, so that one call serves every term.

        Returns:
            [..., T], nats; exactly zero in value and gradient where masked.

        Raises:
            ValueError: the term is none of the loss, or lacks what it reads.
        """
        if self.placement != "loss" or self.estimator == "none":
            raise ValueError(f"{self.name} has no loss: use penalty, or leave the term out")
        logp, ref_logp = pair_of_floats("logp", logp, "ref_logp", ref_logp)
        counted = _counted(logp, mask)
        if self.reads_logits:
            if logits is None or ref_logits is None:
                raise ValueError(f"estimator={self.estimator!r} needs logits and ref_logits")
            full = VOCABULARY_ESTIMATORS[self.estimator](logits, ref_logits.detach())
            check_same_shape("logp", logp, "the KL of logits", full)
            return torch.where(counted, full, 0.0)
        if self.estimator == "cross_entropy":
            return torch.where(counted, -logp, 0.0)
        weight: dict[str, Any] = {"weighting": self.weighting, "ratio": self.ratio}
        if self.weighting != "none":
            weight["old_logp"] = old_logp
        if self.level == "token":
            return self._shown(logp, ref_logp, mask=counted, **weight)
        if self.weighting != "none" and old_logp is not None:
            weight["old_logp"] = _whole(
                pair_of_floats("logp", logp, "old_logp", old_logp)[1], counted
            )
        whole = self._shown(_whole(logp, counted), _whole(ref_logp, counted), **weight)
        return torch.where(counted, whole / counted.sum(-1, keepdim=True).clamp(min=1), 0.0)

    @checked
    def penalty(self, logp: LogProbs, ref_logp: LogProbs, *, mask: Mask | None = None) -> Values:
        r"""What each token owes in the reward: subtract beta times it from the advantages.

        .. math:: \sum_{u \ge t} k(l_u) \;\text{(to\_go)}, \quad k(l_t) \;\text{(immediate)},
            \quad \sum_u k(l_u) \;\text{(whole)}, \qquad
            \text{sequence:} \quad k\Big(\sum_u l_u\Big)

        Sampler: :math:`y \sim \pi_\theta`, the policy whose log-probs are given.

        Args:
            logp: [..., T], log-probs of the sampled tokens under the policy that sampled them.
            ref_logp: [..., T], under the reference.
            mask: [..., T], True = counted; None counts every token.

        Returns:
            [..., T], nats, without gradient; exactly zero where masked.

        Raises:
            ValueError: the term is none of the reward.
        """
        counted = _counted(logp, mask)
        if self.level == "sequence" or self.credit == "whole":
            owed = self.completion_penalty(logp, ref_logp, mask=mask).unsqueeze(-1)
            return torch.where(counted, owed, 0.0)
        own = self._own_penalty(logp, ref_logp, counted)
        return own if self.credit == "immediate" else torch.where(counted, reward_to_go(own), 0.0)

    @checked
    def completion_penalty(
        self, logp: LogProbs, ref_logp: LogProbs, *, mask: Mask | None = None
    ) -> Values:
        """What a whole completion owes, [...]: subtract beta times it from an outcome reward.

        Args, Raises: as :meth:`penalty`.
        """
        logp, ref_logp = pair_of_floats("logp", logp, "ref_logp", ref_logp)
        counted = _counted(logp, mask)
        if self.level == "token":
            return self._own_penalty(logp, ref_logp, counted).sum(-1)
        return self._own_penalty(_whole(logp, counted), _whole(ref_logp, counted), None).squeeze(-1)

    def _own_penalty(self, logp: Tensor, ref_logp: Tensor, mask: Tensor | None) -> Tensor:
        if self.placement != "reward":
            raise ValueError(f"{self.name} has no penalty: use loss, or leave the term out")
        return kl_penalty(logp, ref_logp, estimator=self.estimator, mask=mask)

    def _shown(self, logp: Tensor, ref_logp: Tensor, **how: Any) -> Tensor:
        """The loss, with the value of another estimator if one is to be shown."""
        loss = kl_loss(logp, ref_logp, estimator=self.estimator, **how)
        if self.value is None:
            return loss
        return straight_through(kl_loss(logp, ref_logp, estimator=self.value, **how), loss)


def _counted(logp: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(logp, dtype=torch.bool)
    return as_mask("mask", mask, "logp", logp)


def _whole(logp: Tensor, counted: Tensor) -> Tensor:
    """[..., 1]: log-probs of the completions."""
    return torch.where(counted, logp, 0.0).sum(-1, keepdim=True)
