"""What every update logs, per run, and the glossary that says so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.training.environment import Scores
from kl_term.kl import divergences, estimators

#: Cheap: the mean over all updates of a logging window.
WINDOW_METRICS: dict[str, str] = {
    "reward": "Mean reward of the update's finished completions, without shaping or KL penalty.",
    "accuracy": "Share of the update's finished completions that are right as a whole.",
    "length": "Mean number of counted tokens of a finished completion.",
    "right_length": "The same over the right completions; NaN if there is none.",
    "wrong_length": "The same over the wrong completions; NaN if there is none.",
    "own_accuracy": "Accuracy of completions of the policy itself, whoever samples for training.",
    "own_length": "Length of completions of the policy itself, whoever samples for training.",
    "gradient_norm": "Euclidean norm of the run's gradient before clipping.",
    "clip_fraction": "Share of tokens whose gradient the ratio clip changes.",
    "ratio_ess": "Effective sample size of the token ratios to the sampler, as a share of tokens.",
    "used_fraction": "Share of tokens whose policy term no mask or filter leaves out.",
}

#: Over the whole vocabulary or against the reference: at the first update of a logging window.
POLICY_METRICS: dict[str, str] = {
    "reverse_kl": "Exact KL of the policy from the reference, full vocabulary, visited states.",
    "forward_kl": "Exact KL of the reference from the policy, full vocabulary, visited states.",
    "k1": "Mean of the estimator k1 over the sampled tokens.",
    "k2": "Mean of the estimator k2 over the sampled tokens.",
    "k3": "Mean of the estimator k3 over the sampled tokens.",
    "entropy": "Exact entropy of the policy over the vocabulary, at visited states.",
    "teacher_kl": "Exact KL of the policy from the teacher, full vocabulary; NaN without one.",
    "kl_cosine": "Cosine of the run's KL gradient with the exact reverse KL's, over all weights.",
}

#: Name -> one-line definition. Within an update, a metric is the mean over its optimizer steps and
#: over counted tokens; KLs, estimators and entropy are in nats per token. ``kl_cosine`` is of the
#: first optimizer step; it is NaN without a KL term, while the policy is the reference, and in the
#: windows where ``cosine_every`` asks for none.
METRICS: dict[str, str] = WINDOW_METRICS | POLICY_METRICS

#: Those that are NaN where they are undefined; the others are finite in a healthy run.
PARTIAL_METRICS: tuple[str, ...] = ("kl_cosine", "teacher_kl", "right_length", "wrong_length")


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
    return {
        "reward": _mean_where(finished, scores.rewards.flatten(1)),
        "accuracy": _mean_where(finished, scores.accuracy.flatten(1)),
        "length": _mean_where(finished, lengths),
        "right_length": _mean_where(finished & right, lengths),
        "wrong_length": _mean_where(finished & ~right, lengths),
    }


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

    All logits [M, P, G, T, V] are at the sampling temperature.
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
