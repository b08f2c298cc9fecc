"""Importance ratios along a sequence, enumerated: the second half of chapter 6."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import Policies, drifted_logits
from analysis.experiments.chapters.sequences import flat_error, quantile
from analysis.kl.credit import credit_moments
from analysis.kl.divergences import chi_square
from analysis.kl.importance import importance_ratio
from analysis.kl.products import geometric_spread, log_ratio_spread, product_variance
from analysis.kl.ratio_objectives import ratio_objective, ratio_objective_gradient
from analysis.kl.sequences import Sequences, sequence_probability, token_logp
from analysis.kl.truncation import tempered
from analysis.objectives.losses import policy_loss

#: Weights of the off-policy table, in reading order.
WEIGHTS = ("none", "token", "prefix", "sequence", "gspo", "cispo", "grpo")
CLIPPED = ("gspo", "cispo", "grpo")


def random_returns(sequences: Sequences, *, seed: int) -> Tensor:
    """[N] returns of standard deviation one, one a sequence."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(sequences.mask), generator=generator, dtype=torch.float64)


def slope(sizes: Iterable[float], errors: Iterable[float]) -> float:
    """Order of an error: the slope of its logarithm against that of the step, by least squares."""
    x, y = (torch.tensor(list(v), dtype=torch.float64).log() for v in (sizes, errors))
    return ((x - x.mean()) @ (y - y.mean()) / (x - x.mean()).square().sum()).item()


def order_curves(
    old_logits: Tensor, sequences: Sequences, sizes: Sequence[float], *, seed: int
) -> pd.DataFrame:
    """How fast the linear, GRPO and GSPO objectives leave the exact one as the step shrinks.

    Every table [count, states, vocab] takes a step of random direction and standard deviation
    ``size``. Returns, by objective and size, the medians over tables of ``change`` (absolute error
    of the *change* of the objective since the sampler) and ``gradient`` (relative error).
    """
    objectives = ("linear", "token_mean", "geometric")
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for index, old in enumerate(old_logits):
        returns = random_returns(sequences, seed=seed + index)
        moved = drifted_logits(old, torch.tensor(sizes), seed=seed + 1000 + index)
        start = {
            name: ratio_objective(old, old, sequences, returns, objective=name)
            for name in (*objectives, "sequence")
        }
        for size, logits in zip(sizes, moved, strict=True):
            exact = ratio_objective(logits, old, sequences, returns) - start["sequence"]
            referee = ratio_objective_gradient(logits, old, sequences, returns)
            for name in objectives:
                value = ratio_objective(logits, old, sequences, returns, objective=name)
                gradient = ratio_objective_gradient(logits, old, sequences, returns, objective=name)
                change = (value - start[name] - exact).abs().item()
                found.setdefault((name, size), []).append((change, flat_error(gradient, referee)))
    return pd.DataFrame(
        {
            "objective": name,
            "size": size,
            "change": quantile(change for change, _ in values),
            "gradient": quantile(gradient for _, gradient in values),
        }
        for (name, size), values in found.items()
    )


def spread_curves(logits: Tensor, old_logits: Tensor, lengths: Sequence[int]) -> pd.DataFrame:
    """Standard deviation of three weights of a sequence of independent tokens, by its length.

    ``product``, ``geometric`` (GSPO) and one ``token``; ``log_std`` is that of the log of the
    product, which is a sum and grows as the square root only.
    """
    length = torch.tensor(lengths, dtype=torch.float64)
    chi2 = chi_square(old_logits, logits)  # of the policy from the sampler
    mean, var = geometric_spread(logits, old_logits, length)
    return pd.DataFrame(
        {
            "length": lengths,
            "product": product_variance(chi2, length).sqrt(),
            "geometric": var.sqrt(),
            "geometric_mean": mean,
            "token": chi2.sqrt().expand_as(length),
            "log_std": (length * log_ratio_spread(logits, old_logits).var).sqrt(),
        }
    )


def gradient_weights(
    logits: Tensor,
    old_logits: Tensor,
    sequences: Sequences,
    returns: Tensor,
    *,
    weight: str,
    epsilon: float = 0.2,
) -> Tensor:
    """[N, T] credit of each token: its importance weight, cut as its kind does, times the return.

    For the clipped kinds it is what autograd finds through
    :func:`analysis.objectives.losses.policy_loss`.
    """
    logp, old_logp = (token_logp(x.detach(), sequences) for x in (logits, old_logits))
    per_token = returns.unsqueeze(-1).expand_as(logp)
    if weight == "none":
        return per_token
    if weight not in CLIPPED:
        return importance_ratio(logp, old_logp, sequences.mask, level=weight) * per_token
    with torch.enable_grad():
        leaf = logp.requires_grad_(True)
        output = policy_loss(
            leaf,
            old_logp=old_logp,
            advantages=per_token,
            mask=sequences.mask,
            kind=weight,
            epsilon_low=epsilon,
            epsilon_high=epsilon,
        )
        (gradient,) = torch.autograd.grad(-output.per_token.sum(), leaf)
    return gradient


def weight_table(tables: Policies, sequences: Sequences, *, seed: int) -> pd.DataFrame:
    """Bias and noise of every weight against the gradient of the policy's own mean return.

    ``tables`` holds policies and their stale samplers. ``bias`` is the relative error of the
    expected gradient; ``noise`` the standard deviation of one sequence's gradient over the norm of
    the exact one. Medians over the tables; returns are centred under the sampler.
    """
    rows = []
    for weight in WEIGHTS:
        bias, noise = [], []
        for index, (logits, old) in enumerate(zip(*tables, strict=True)):
            returns = random_returns(sequences, seed=seed + index)
            returns = returns - sequence_probability(old, sequences) @ returns
            exact = ratio_objective_gradient(logits, old, sequences, returns)
            credit = gradient_weights(logits, old, sequences, returns, weight=weight)
            mean, trace_var = credit_moments(logits, sequences, credit, old)
            bias.append(flat_error(mean, exact))
            noise.append((trace_var.sqrt() / exact.norm()).item())
        rows.append({"weight": weight, "bias": quantile(bias), "noise": quantile(noise)})
    return pd.DataFrame(rows)


def mismatch_curves(
    old_logits: Tensor,
    sequences: Sequences,
    temperatures: Sequence[float],
    *,
    staleness: float,
    seed: int,
) -> pd.DataFrame:
    """Gradient error when the sampler has another temperature than the training log-probs say.

    Three weights: the token ratio of policy to *sampler*, the token ratio of policy to the old
    policy (the first factor dropped), and the product of ratios of policy to sampler.
    """
    rows = []
    for temperature in temperatures:
        errors: dict[str, list[float]] = {}
        for index, old in enumerate(old_logits):
            returns = random_returns(sequences, seed=seed + index)
            step = torch.tensor([staleness])
            logits = drifted_logits(old, step, seed=seed + 500 + index)[0]
            sampler = tempered(old, temperature)
            exact = ratio_objective_gradient(logits, sampler, sequences, returns)
            for name, gradient in mismatch_gradients(
                logits, old, sampler, sequences, returns
            ).items():
                errors.setdefault(name, []).append(flat_error(gradient, exact))
        rows += [
            {"temperature": temperature, "weight": name, "error": quantile(values)}
            for name, values in errors.items()
        ]
    return pd.DataFrame(rows)


def mismatch_gradients(
    logits: Tensor, old_logits: Tensor, sampler: Tensor, sequences: Sequences, returns: Tensor
) -> dict[str, Tensor]:
    """Expected gradients under the sampler with both factors, per token or multiplied, or one."""
    mask = sequences.mask
    logp, old_logp, sampler_logp = (token_logp(x, sequences) for x in (logits, old_logits, sampler))
    weights = {
        "both factors, product": importance_ratio(logp, sampler_logp, mask, level="sequence"),
        "both factors, per token": importance_ratio(logp, sampler_logp, mask),
        "first factor dropped": importance_ratio(logp, old_logp, mask),
    }
    return {
        name: credit_moments(logits, sequences, weight * returns.unsqueeze(-1), sampler).mean
        for name, weight in weights.items()
    }


def clip_curves(advantage: float, ratios: Tensor, *, epsilon: float = 0.2) -> pd.DataFrame:
    """Objective of one token and its slope by the ratio, before and after the PPO clip."""
    log_ratio = ratios.log().requires_grad_(True)
    output = policy_loss(
        log_ratio.unsqueeze(0),
        old_logp=torch.zeros_like(log_ratio).unsqueeze(0),
        advantages=torch.full_like(log_ratio, advantage).unsqueeze(0).detach(),
        mask=torch.ones(1, len(ratios), dtype=torch.bool),
        epsilon_low=epsilon,
        epsilon_high=epsilon,
    )
    objective = -output.per_token[0]
    (coefficient,) = torch.autograd.grad(objective.sum(), log_ratio)
    return pd.DataFrame(
        {
            "ratio": ratios.numpy(),
            "objective": objective.detach().numpy(),
            "unclipped": (advantage * ratios).numpy(),
            "coefficient": coefficient.numpy(),
        }
    )


def doubling_length(chi2: float) -> float:
    """Tokens after which the second moment of a product of ratios has doubled."""
    return math.log(2) / math.log1p(chi2)


def one_recurrent_state(vocab_size: int, stay: float) -> tuple[Tensor, Tensor]:
    """Policy and sampler [V + 1, V] of Markov tokens that differ after the first token only.

    The sampler is uniform; after the first token the policy repeats it with probability ``stay``
    and is uniform over the others. With ten tokens and ``stay = 0.4`` the chi-square there is 1.
    """
    sampler = torch.full((vocab_size + 1, vocab_size), 1 / vocab_size, dtype=torch.float64)
    policy = sampler.clone()
    policy[0] = (1 - stay) / (vocab_size - 1)
    policy[0, 0] = stay
    return policy.log(), sampler.log()
