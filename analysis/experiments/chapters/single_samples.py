"""Descent on one sampled token at a time, at one state, for many seeds at once: chapter 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.divergences import entropy, reverse_kl
from analysis.kl.surrogates import gradient_coefficient

#: log-probs of the sampled tokens under policy and reference -> coefficient of the score
Coefficient = Callable[[Tensor, Tensor], Tensor]


def coefficient_of(estimator: str) -> Coefficient:
    """The coefficient that autograd gives the estimator as a loss."""
    return partial(gradient_coefficient, estimator=estimator)


#: Spacing of the logits of a descent, in nats. Descent of k1 takes two policies that are 1e-15
#: apart to different runs within a few thousand steps: without a grid the last bit of a processor's
#: ``exp`` would decide where a run ends. On it, every processor computes the same runs.
GRID = 2.0**-18

#: The k1 loss and its controls; ``printed`` has the extra probability of the seed's equation (26).
WALKS: dict[str, Coefficient] = {
    "k1": coefficient_of("k1"),
    "flipped": lambda logp, ref_logp: -torch.ones_like(logp),
    "printed": lambda logp, ref_logp: logp.exp(),
    "k2": coefficient_of("k2"),
}


def with_reward_noise(coefficient: Coefficient, *, beta: float, seed: int) -> Coefficient:
    """``beta`` times the coefficient, under advantages of +1 or -1 that carry no information.

    With ``beta = 0`` the runs are random walks: what a policy gradient does on pure noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def noisy(logp: Tensor, ref_logp: Tensor) -> Tensor:
        advantage = 2.0 * torch.randint(2, logp.shape, generator=generator).to(logp.dtype) - 1.0
        return beta * coefficient(logp, ref_logp) - advantage

    return noisy


def centred(coefficient: Coefficient) -> Coefficient:
    """The coefficient less the mean of the batch's other samples: a leave-one-out baseline."""

    def less_others(logp: Tensor, ref_logp: Tensor) -> Tensor:
        value, size = coefficient(logp, ref_logp), logp.shape[-1]
        return (value - value.mean(-1, keepdim=True)) * size / (size - 1)

    return less_others


def sampled_descent(
    start_logits: Tensor,
    ref_logits: Tensor,
    coefficient: Coefficient,
    *,
    step_size: float,
    steps: int,
    seed: int,
    batch_size: int = 1,
    checkpoints: int = 1,
    max_norm: float = math.inf,
) -> Tensor:
    """Stochastic descent of a KL loss on freshly sampled tokens, one policy a row.

    Logits are multiples of ``GRID``.

    Args:
        start_logits, ref_logits: [M, V]; rows are independent runs.
        coefficient: what multiplies the score of a sampled token.
        step_size, steps: of the descent.
        seed: of the sampled tokens.
        batch_size: tokens sampled for one step.
        checkpoints: how many policies to keep, evenly spaced; ``steps`` must be a multiple.
        max_norm: a batch's gradient is cut to this length, as trainers clip it.

    Returns:
        [checkpoints + 1, M, V], log-probs, the start first.

    Raises:
        ValueError: if ``steps`` is no multiple of ``checkpoints``.
    """
    if steps % checkpoints:
        raise ValueError(f"steps must be a multiple of checkpoints, got {steps} and {checkpoints}")
    generator = torch.Generator().manual_seed(seed)
    logits = _on_grid(start_logits)
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kept, runs = [logp], len(logp)
    last = torch.full((runs, 1), logp.shape[-1] - 1)
    for step in range(1, steps + 1):
        policy = logp.exp()
        uniforms = torch.rand(runs, batch_size, generator=generator, dtype=logp.dtype)
        tokens = torch.searchsorted(policy.cumsum(-1), uniforms).minimum(last)
        weight = coefficient(logp.gather(-1, tokens), ref_logp.gather(-1, tokens)) / batch_size
        gradient = -policy * weight.sum(-1, keepdim=True)
        gradient.scatter_add_(-1, tokens, weight)
        gradient *= (max_norm / gradient.norm(dim=-1, keepdim=True)).clamp(max=1.0)
        logits = _on_grid(logits - step_size * gradient)
        logp = logits.log_softmax(-1)
        if step % (steps // checkpoints) == 0:
            kept.append(logp)
    return torch.stack(kept)


def _on_grid(logits: Tensor) -> Tensor:
    return torch.round(logits / GRID) * GRID


def share_lowered(
    logits: Tensor, ref_logits: Tensor, coefficient: Coefficient, *, step_size: float
) -> float:
    """Share of all single tokens whose own probability falls in one descent step on that token."""
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    weight = coefficient(logp, ref_logp)
    score = torch.eye(logp.shape[-1], dtype=logp.dtype) - logp.exp().unsqueeze(-2)
    moved = (logp.unsqueeze(-2) - step_size * weight.unsqueeze(-1) * score).log_softmax(-1)
    return (moved.diagonal(dim1=-2, dim2=-1) < logp).double().mean().item()


def entropy_drift(logits: Tensor, *, step_size: float) -> Tensor:
    r"""Expected change of the entropy in one step of the k1 loss: exact, over all tokens, [...].

    The expected gradient is zero, so the drift is of second order in the step size.
    """
    logp = logits.log_softmax(-1)
    score = torch.eye(logp.shape[-1], dtype=logp.dtype) - logp.exp().unsqueeze(-2)
    after = entropy(logp.unsqueeze(-2) - step_size * score)
    return (logp.exp() * after).sum(-1) - entropy(logp)


def twin_distance(
    coefficient: Coefficient,
    *,
    vocab_size: int,
    runs: int,
    steps: int,
    step_size: float,
    apart: float,
    seed: int,
) -> Tensor:
    """Total variation [runs] between the ends of two runs that read the same random numbers.

    One starts at the uniform reference, its twin with a first logit ``apart`` nats higher.
    """
    uniform = torch.zeros(runs, vocab_size, dtype=torch.float64)
    raised = uniform.clone()
    raised[:, 0] = apart
    ends = [
        sampled_descent(start, uniform, coefficient, step_size=step_size, steps=steps, seed=seed)[
            -1
        ].exp()
        for start in (uniform, raised)
    ]
    return 0.5 * (ends[0] - ends[1]).abs().sum(-1)


def walk_table(
    walks: Mapping[str, Coefficient],
    *,
    vocab_size: int,
    runs: int,
    steps: int,
    step_size: float,
    checkpoints: int,
    seed: int,
    batch_size: int = 1,
) -> pd.DataFrame:
    """Entropy (nats) of runs that start at a uniform reference: quantiles over seeds by step."""
    uniform = torch.zeros(runs, vocab_size, dtype=torch.float64)
    frames = []
    for name, coefficient in walks.items():
        history = sampled_descent(
            uniform,
            uniform,
            coefficient,
            step_size=step_size,
            steps=steps,
            checkpoints=checkpoints,
            seed=seed,
            batch_size=batch_size,
        )
        frames.append(_quantiles(entropy(history), steps).assign(walk=name))
    return pd.concat(frames, ignore_index=True)


def kl_quantiles(history: Tensor, ref_logits: Tensor, last: int) -> pd.DataFrame:
    """Quantiles over runs of the reverse KL (nats) of [checkpoints + 1, M, V], up to ``last``."""
    return _quantiles(reverse_kl(history, ref_logits.expand_as(history)), last)


def _quantiles(values: Tensor, last: int) -> pd.DataFrame:
    """Quantiles over runs of [checkpoints + 1, runs], with the position of each checkpoint."""
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=values.dtype)
    low, mid, high = torch.quantile(values, levels, dim=-1)
    position = torch.linspace(0, last, len(values), dtype=values.dtype)
    return pd.DataFrame(
        {"position": position, "p10": low, "median": mid, "p90": high, "mean": values.mean(-1)}
    )
