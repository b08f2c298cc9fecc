"""What every update logs, per run: the metrics of :mod:`analysis.records.metrics`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.training.environment import Scores
from kl_term.kl import divergences, estimators


def run_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[M]: mean of values [M, ...] over the counted tokens of each run."""
    return _mean_where(mask.flatten(1), values.flatten(1))


def elementwise_mean(values: Sequence[Tensor]) -> Tensor:
    """[..., M]: mean of tensors [..., M] where they are not NaN, in their order; NaN if none is.

    The mean over a dimension of their stack would round by M, so a run's would not be its own.
    """
    defined = [~value.isnan() for value in values]
    total = sum(torch.where(d, v, 0.0) for d, v in zip(defined, values, strict=True))
    count = sum(d.to(total.dtype) for d in defined)
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def rollout_metrics(mask: Tensor, scores: Scores, done: Tensor) -> dict[str, Tensor]:
    """Rewards, accuracy and lengths [M] over the completions of finished groups.

    Args:
        mask: [M, P, G, T].
        scores: of the completions.
        done: [M, P], the finished groups.
    """
    lengths = mask.sum(dim=-1).float().flatten(1)
    right = scores.accuracy.flatten(1) == 1.0
    finished = done.unsqueeze(-1).expand(mask.shape[:3]).flatten(1)
    proxied = {} if scores.gold is None else {"gold": scores.gold, "proxy": scores.rewards}
    if scores.members is not None:
        each = scores.members.unbind(dim=-1)
        spreads = {"spread": scores.spread, "beyond": scores.beyond}
        proxied |= spreads | {"all_members": sum(each) / len(each)}
    return {
        "reward": _mean_where(finished, scores.rewards.flatten(1)),
        "accuracy": _mean_where(finished, scores.accuracy.flatten(1)),
        "length": _mean_where(finished, lengths),
        "right_length": _mean_where(finished & right, lengths),
        "wrong_length": _mean_where(finished & ~right, lengths),
        **{name: _mean_where(finished, of.flatten(1)) for name, of in proxied.items()},
    }


def mean_spread(scores: Scores, done: Tensor) -> Tensor:
    """[M]: the metric ``spread`` of a rollout whose groups [M, P] are ``done``, or not."""
    finished = done.unsqueeze(-1).expand_as(scores.spread).flatten(1)
    return _mean_where(finished, scores.spread.flatten(1))


def _mean_where(chosen: Tensor, values: Tensor) -> Tensor:
    """[M]: mean of the chosen values [M, N]; NaN where none is chosen."""
    count = chosen.sum(dim=1)
    mean = torch.where(chosen, values, 0.0).sum(dim=1) / count.clamp(min=1)
    return torch.where(count > 0, mean, torch.nan)


@torch.no_grad()
def policy_metrics(
    logp: Tensor,
    logits: Tensor,
    mask: Tensor,
    ref_logp: Tensor,
    ref_logits: Tensor,
    teacher_logits: Tensor | None,
) -> dict[str, Tensor]:
    """Divergences, estimators and entropy [M] of one optimizer step's policy.

    All logits [M, P, G, T, V] are at the sampling temperature. ``ref_logits`` are of the first
    reference, ``ref_logp`` of the one that the run has now.
    """
    values = {
        "reverse_kl": divergences.reverse_kl(logits, ref_logits),
        "forward_kl": divergences.forward_kl(logits, ref_logits),
        "k1": estimators.k1(logp, ref_logp),
        "k2": estimators.k2(logp, ref_logp),
        "k3": estimators.k3(logp, ref_logp),
        "entropy": divergences.entropy(logits),
    }
    measured = {name: run_mean(value, mask) for name, value in values.items()}
    if teacher_logits is None:
        nothing = torch.full_like(measured["entropy"], torch.nan)
        return measured | {"teacher_kl": nothing}
    distance = divergences.reverse_kl(logits, teacher_logits)
    return measured | {"teacher_kl": run_mean(distance, mask)}
