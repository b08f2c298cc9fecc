"""What every update logs, per member, and the glossary that says so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.kl import divergences, estimators

#: Cheap: the mean over all updates of a logging window.
WINDOW_METRICS: dict[str, str] = {
    "reward": "Mean reward of the update's completions, without any KL penalty.",
    "accuracy": "Share of the update's completions that are right as a whole.",
    "length": "Mean number of counted tokens of a completion.",
    "gradient_norm": "Euclidean norm of the member's gradient before clipping.",
    "clip_fraction": "Share of tokens whose gradient the ratio clip changes.",
    "ratio_ess": "Effective sample size of the token ratios to the sampler, as a share of tokens.",
}

#: Over the whole vocabulary or against the reference: at the first update of a logging window.
POLICY_METRICS: dict[str, str] = {
    "reverse_kl": "Exact KL of the policy from the reference, full vocabulary, visited states.",
    "forward_kl": "Exact KL of the reference from the policy, full vocabulary, visited states.",
    "k1": "Mean of the estimator k1 over the sampled tokens.",
    "k2": "Mean of the estimator k2 over the sampled tokens.",
    "k3": "Mean of the estimator k3 over the sampled tokens.",
    "entropy": "Exact entropy of the policy over the vocabulary, at visited states.",
    "kl_cosine": "Cosine of the arm's KL gradient with the exact reverse KL's, over all weights.",
}

#: Name -> one-line definition. Within an update, a metric is the mean over its optimizer steps and
#: over counted tokens; KLs, estimators and entropy are in nats per token. ``kl_cosine`` is of the
#: first optimizer step; it is NaN without a KL term, while the policy is the reference, and in the
#: windows where ``cosine_every`` asks for none.
METRICS: dict[str, str] = WINDOW_METRICS | POLICY_METRICS


def member_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[M]: mean of values [M, ...] over the counted tokens of each member."""
    counted = torch.where(mask, values, 0.0).flatten(1).sum(dim=1)
    return counted / mask.flatten(1).sum(dim=1)


def elementwise_mean(values: Sequence[Tensor]) -> Tensor:
    """[M]: mean of tensors [M], added in their order.

    The mean over a dimension of their stack would round by M, so a member's would not be its own.
    """
    return sum(values[1:], start=values[0]) / len(values)


@torch.no_grad()
def policy_metrics(
    logp: Tensor, ref_logp: Tensor, logits: Tensor, ref_logits: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Divergences, estimators and entropy [M] of one optimizer step's policy.

    ``logits`` and ``ref_logits`` [M, P, G, T, V] are at the sampling temperature.
    """
    values = {
        "reverse_kl": divergences.reverse_kl(logits, ref_logits),
        "forward_kl": divergences.forward_kl(logits, ref_logits),
        "k1": estimators.k1(logp, ref_logp),
        "k2": estimators.k2(logp, ref_logp),
        "k3": estimators.k3(logp, ref_logp),
        "entropy": divergences.entropy(logits),
    }
    return {name: member_mean(value, mask) for name, value in values.items()}
