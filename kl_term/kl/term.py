r"""One KL term: a choice along every axis on which trainers differ, with its loss and penalty.

The population trainer, the TRL integration, the diagnosis, the audit of the frameworks and the
chapters all compute a KL term here; its fields are those of :class:`kl_term.kl.choice.KLChoice`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kl_term.checks import checked
from kl_term.kl.choice import KLChoice
from kl_term.kl.estimators import VOCABULARY_ESTIMATORS
from kl_term.kl.packing import by_sequence
from kl_term.kl.returns import reward_to_go
from kl_term.kl.surrogates import kl_loss, kl_penalty, straight_through
from kl_term.kl.top_k import top_k_divergence
from kl_term.shapes import Logits, LogProbs, Mask, Tokens, Values


class KLTerm(KLChoice):
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

    Equation: ``KLTerm``
    """

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
        sequence_ids: Tokens | None = None,
        control: float | Tensor | None = None,
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
            sequence_ids: [..., T] integers, where a row holds several sequences: see
                :mod:`kl_term.kl.packing`. Without them a row is one completion, which a row itself
                cannot contradict.
            control: the weight that a term with ``control="fitted"`` reads, a number or a tensor
                that broadcasts, from :attr:`kl_term.kl.control.ControlFit.weight`.

        What the term does not read may be given, so that one call serves every term.

        Returns:
            [..., T], nats; exactly zero in value and gradient where masked.

        Raises:
            ValueError: the term is none of the loss, or lacks what it reads.
        """
        if self.placement != "loss" or self.estimator == "none":
            raise ValueError(f"{self.name} has no loss: use penalty, or leave the term out")
        logp, ref_logp = _wide(logp), _wide(ref_logp)
        counted = _counted(logp, mask)
        if sequence_ids is not None and not self.reads_logits:
            given = {"logp": logp, "ref_logp": ref_logp, "old_logp": old_logp}
            return by_sequence(partial(self.loss, control=control), sequence_ids, mask, **given)
        if self.reads_logits:  # a token at a time
            counted = counted if sequence_ids is None else counted & (sequence_ids >= 0)
            if logits is None or ref_logits is None:
                raise ValueError(f"estimator={self.estimator!r} needs logits and ref_logits")
            return torch.where(counted, self._summed(logits, ref_logits.detach()), 0.0)
        if self.estimator == "cross_entropy":
            return torch.where(counted, -logp, 0.0)
        weight: dict[str, Any] = {"weighting": self.weighting, "ratio": self.ratio}
        if self.control == "fitted" and control is None:
            raise ValueError("control is needed: the weight that earlier batches fit, a ControlFit")
        control = control if self.control == "fitted" else self.control
        if self.weighting != "none":
            weight["old_logp"] = None if old_logp is None else _wide(old_logp)
        if self.level == "token":
            return self._shown(logp, ref_logp, control, mask=counted, **weight)
        if weight.get("old_logp") is not None:
            weight["old_logp"] = _whole(weight["old_logp"], counted)
        whole = self._shown(_whole(logp, counted), _whole(ref_logp, counted), control, **weight)
        return torch.where(counted, whole / counted.sum(-1, keepdim=True).clamp(min=1), 0.0)

    @property
    def of_top_k(self) -> dict[str, Any]:
        """What :func:`kl_term.kl.top_k.top_k_divergence` is asked, where ``top_k`` is given."""
        return {
            "top_k": self.top_k,
            "direction": "reverse" if self.estimator == "exact" else "forward",
            "support": self.support,
            "correction": self.correction,
        }

    @checked
    def penalty(
        self,
        logp: LogProbs,
        ref_logp: LogProbs,
        *,
        mask: Mask | None = None,
        sequence_ids: Tokens | None = None,
    ) -> Values:
        r"""What each token owes in the reward: subtract beta times it from the advantages.

        .. math:: \sum_{u \ge t} k(l_u) \;\text{(to\_go)}, \quad k(l_t) \;\text{(immediate)},
            \quad \sum_u k(l_u) \;\text{(whole)}, \qquad
            \text{sequence:} \quad k\Big(\sum_u l_u\Big)

        Sampler: :math:`y \sim \pi_\theta`, the policy whose log-probs are given.

        Args:
            logp: [..., T], log-probs of the sampled tokens under the policy that sampled them.
            ref_logp: [..., T], under the reference.
            mask: [..., T], True = counted; None counts every token.
            sequence_ids: [..., T], as in :meth:`loss`.

        Returns:
            [..., T], nats, without gradient; exactly zero where masked.

        Raises:
            ValueError: the term is none of the reward.
        """
        if sequence_ids is not None:
            return by_sequence(self.penalty, sequence_ids, mask, logp=logp, ref_logp=ref_logp)
        counted = _counted(logp, mask)
        if self.level == "sequence" or self.credit == "whole":
            owed = self.completion_penalty(logp, ref_logp, mask=mask).unsqueeze(-1)
            return torch.where(counted, owed, 0.0)
        own = self._own_penalty(logp, ref_logp, counted)
        return own if self.credit == "immediate" else torch.where(counted, reward_to_go(own), 0.0)

    @checked
    def completion_penalty(
        self,
        logp: LogProbs,
        ref_logp: LogProbs,
        *,
        mask: Mask | None = None,
        sequence_ids: Tokens | None = None,
    ) -> Values:
        """What a whole completion owes, [...]: subtract beta times it from an outcome reward.

        Of packed rows [S], one a sequence number.

        Args, Raises: as :meth:`penalty`.
        """
        if sequence_ids is not None:
            given = {"logp": logp, "ref_logp": ref_logp}
            return by_sequence(self.completion_penalty, sequence_ids, mask, **given)
        counted = _counted(logp, mask)
        if self.level == "token":
            return self._own_penalty(logp, ref_logp, counted).sum(-1)
        return self._own_penalty(_whole(logp, counted), _whole(ref_logp, counted), None).squeeze(-1)

    def _summed(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        """[...]: over the vocabulary, or over its likeliest tokens."""
        if self.top_k is None:
            return VOCABULARY_ESTIMATORS[self.estimator](logits, ref_logits)
        return top_k_divergence(logits, ref_logits, **self.of_top_k)

    def _own_penalty(self, logp: Tensor, ref_logp: Tensor, mask: Tensor | None) -> Tensor:
        if self.placement != "reward":
            raise ValueError(f"{self.name} has no penalty: use loss, or leave the term out")
        return kl_penalty(logp, ref_logp, estimator=self.estimator, mask=mask)

    def _shown(self, logp: Tensor, ref_logp: Tensor, control: Any, **how: Any) -> Tensor:
        """The loss, with the value of another estimator if one is to be shown."""
        loss = kl_loss(logp, ref_logp, estimator=self.estimator, control=control, **how)
        if self.value is None:
            return loss
        return straight_through(kl_loss(logp, ref_logp, estimator=self.value, **how), loss)


def _counted(logp: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(logp, dtype=torch.bool)
    return mask.bool()


def _wide(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _whole(logp: Tensor, counted: Tensor) -> Tensor:
    """[..., 1]: log-probs of the completions."""
    return torch.where(counted, logp, 0.0).sum(-1, keepdim=True)
