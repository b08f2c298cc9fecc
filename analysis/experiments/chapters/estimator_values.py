"""k1, k2 and k3 as values: tables and curves of chapter 1. All but ``sampled_moments`` is exact."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gaussian_pairs import (
    SCHULMAN_FAR,
    SCHULMAN_NEAR,
    GaussianPair,
    draw,
    log_probs,
    normal_nodes,
)
from analysis.kl.divergences import forward_kl, reverse_kl
from analysis.kl.gaussians import moments
from analysis.kl.surrogates import ESTIMATORS
from analysis.kl.variance import estimator_means, estimator_variances, variance_gap

NAMES = ("k1", "k2", "k3")

#: Relative bias and relative standard deviation as printed by Schulman (2020), 10 million samples.
SCHULMAN_PRINTED: dict[GaussianPair, dict[str, tuple[float, float]]] = {
    SCHULMAN_NEAR: {"k1": (0.0, 20.0), "k2": (0.002, 1.42), "k3": (0.0, 1.42)},
    SCHULMAN_FAR: {"k1": (0.0, 2.0), "k2": (0.25, 1.73), "k3": (0.0, 1.7)},
}

#: Two-sided 95% quantile of a standard normal.
NORMAL_95 = 1.959963984540054


def schulman_table(pair: GaussianPair, *, sample_size: int, seed: int) -> pd.DataFrame:
    """Relative bias and standard deviation of k1, k2, k3: printed, exact, and sampled.

    Args:
        pair: a key of :data:`SCHULMAN_PRINTED`.
        sample_size: draws from q.
        seed: of these draws.

    Returns:
        One row an estimator; everything in units of KL(q || p). The ``low`` and ``high`` columns
        bound 95% intervals (normal approximation; delta method for the standard deviation).
    """
    exact = moments(*pair)
    sampled = sampled_moments(pair, sample_size=sample_size, seed=seed)
    rows = []
    for name in NAMES:
        printed_bias, printed_std = SCHULMAN_PRINTED[pair][name]
        rows.append(
            {
                "estimator": name,
                "printed_bias": printed_bias,
                "exact_bias": exact[name].mean / pair.kl - 1,
                "printed_std": printed_std,
                "exact_std": math.sqrt(exact[name].var) / pair.kl,
                **sampled[name],
            }
        )
    return pd.DataFrame(rows).set_index("estimator")


def against_print(schulman: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The tables of several settings as one: a row for each setting, estimator and quantity.

    Returns:
        ``setting``, ``estimator``, ``quantity`` (bias or std), ``printed``, ``exact``, ``sampled``,
        ``low``, ``high``.
    """
    columns = {"printed": "printed_{}", "exact": "exact_{}", "sampled": "sampled_{}"}
    columns |= {"low": "{}_low", "high": "{}_high"}
    rows = [
        {"setting": setting, "estimator": name, "quantity": quantity}
        | {column: row[source.format(quantity)] for column, source in columns.items()}
        for setting, table in schulman.items()
        for quantity in ("bias", "std")
        for name, row in table.iterrows()
    ]
    return pd.DataFrame(rows)


def sampled_moments(
    pair: GaussianPair, *, sample_size: int, seed: int
) -> dict[str, dict[str, float]]:
    """Sample mean and standard deviation of k1, k2, k3 with 95% intervals, in units of the KL."""
    logp, ref_logp = log_probs(pair, draw((sample_size,), seed=seed))
    table = {}
    for name in NAMES:
        sample = ESTIMATORS[name](logp, ref_logp) / pair.kl
        bias = sample.mean().item() - 1
        centred = sample - sample.mean()
        var = centred.square().mean().item()
        std = math.sqrt(var)
        # Var[s] ~ (m4 - s^4) / (4 s^2 n)
        excess = centred.pow(4).mean().item() - var**2
        half_bias = NORMAL_95 * std / math.sqrt(sample_size)
        half_std = NORMAL_95 * math.sqrt(excess / sample_size) / (2 * std)
        table[name] = {
            "sampled_bias": bias,
            "bias_low": bias - half_bias,
            "bias_high": bias + half_bias,
            "sampled_std": std,
            "std_low": std - half_std,
            "std_high": std + half_std,
        }
    return table


def zipf_logits(vocab_size: int, exponent: float) -> Tensor:
    """Logits [V] of a Zipf law over ranks: a vocabulary with a few likely and many rare tokens."""
    ranks = torch.arange(1, vocab_size + 1, dtype=torch.float64)
    return -exponent * torch.log(ranks)


def drifted(ref_logits: Tensor, direction: Tensor, steps: Sequence[float] | Tensor) -> Tensor:
    """Policies [S, V] on a straight line of logits that leaves the reference at step 0."""
    steps = torch.as_tensor(steps, dtype=ref_logits.dtype)
    return ref_logits + steps[:, None] * direction


def gaussian_estimates(pair: GaussianPair) -> tuple[dict[str, Tensor], Tensor]:
    """Values of k1, k2, k3 at quadrature nodes, and the weights of the nodes under q."""
    z, weights = normal_nodes()
    logp, ref_logp = log_probs(pair, z)
    return {name: ESTIMATORS[name](logp, ref_logp) for name in NAMES}, weights


def softmax_estimates(logits: Tensor, ref_logits: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Values of k1, k2, k3 of every token, and the policy's probabilities."""
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return {name: ESTIMATORS[name](logp, ref_logp) for name in NAMES}, logp.exp()


def survival(values: Tensor, weights: Tensor, thresholds: Tensor) -> Tensor:
    """Probability that a sample exceeds each threshold, for a distribution on weighted points."""
    order = values.argsort()
    above = weights[order].flip(0).cumsum(0).flip(0)
    above = torch.cat([above, above.new_zeros(1)])
    return above[torch.searchsorted(values[order], thresholds, right=True)]


def quantile(values: Tensor, weights: Tensor, level: float) -> float:
    """Smallest point whose cumulative probability reaches ``level``."""
    order = values.argsort()
    cumulative = weights[order].cumsum(0)
    index = int(torch.searchsorted(cumulative, level * cumulative[-1]))
    return values[order][min(index, len(values) - 1)].item()


def tail_curves(
    estimates: Mapping[str, Tensor], weights: Tensor, kl: float, thresholds: Tensor
) -> pd.DataFrame:
    """P(estimate > threshold * KL), one column an estimator, indexed by threshold."""
    columns = {
        name: survival(values / kl, weights, thresholds).numpy()
        for name, values in estimates.items()
    }
    return pd.DataFrame(columns, index=pd.Index(thresholds.numpy(), name="threshold"))


def quantile_table(
    estimates: Mapping[str, Tensor], weights: Tensor, kl: float, levels: Sequence[float]
) -> pd.DataFrame:
    """Quantiles in units of the KL and the share of negative values, one row an estimator."""
    rows = {
        name: {
            **{f"{level:.1%}": quantile(values / kl, weights, level) for level in levels},
            "negative": weights[values < 0].sum().item(),
        }
        for name, values in estimates.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("estimator")


def drift_table(ref_logits: Tensor, direction: Tensor, steps: Tensor) -> pd.DataFrame:
    """Exact bias and standard deviation of each estimator along a drift, in units of the KL.

    Returns:
        Long table: ``step``, ``kl`` (nats), ``estimator`` (k1, k2, k3, optimal), ``bias``, ``std``.
    """
    logits = drifted(ref_logits, direction, steps)
    reference = ref_logits.expand_as(logits)
    kl = reverse_kl(logits, reference)
    means = estimator_means(logits, reference)
    frames = []
    for name, variance in estimator_variances(logits, reference).items():
        if name not in (*NAMES, "optimal"):
            continue
        mean = means.get(name, kl)
        frames.append(
            pd.DataFrame(
                {
                    "step": steps.numpy(),
                    "kl": kl.numpy(),
                    "estimator": name,
                    "bias": (mean / kl - 1).numpy(),
                    "std": (variance.sqrt() / kl).numpy(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def crossing_kl(ref_logits: Tensor, direction: Tensor, *, farthest: float) -> float:
    """The reverse KL (nats) at which k3 stops beating k1 along a drift, by bisection.

    Raises:
        ValueError: if k3 does not go from better to worse between the reference and ``farthest``.
    """

    def gap(step: float) -> float:
        return variance_gap(drifted(ref_logits, direction, [step])[0], ref_logits).item()

    near, far = farthest * 1e-3, farthest
    if not gap(near) < 0 < gap(far):
        raise ValueError(
            f"farthest={farthest!r}: the variances of k1 and k3 do not cross before it"
        )
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if gap(middle) < 0 else (near, middle)
    return reverse_kl(drifted(ref_logits, direction, [far])[0], ref_logits).item()


def stale_table(
    logits: Tensor, ref_logits: Tensor, direction: Tensor, steps: Tensor
) -> pd.DataFrame:
    """Mean of k3 when the samples come from an older policy, against both KLs.

    The sampler is ``logits - step * direction``: the policy has moved on by ``step``. To first
    order in the step, the opposite direction has the opposite error.

    Returns:
        ``staleness`` (reverse KL of the policy from its sampler, nats), ``k3`` (mean under the
        sampler), ``weighted`` (mean of ratio times k3), ``reverse``, ``forward``; one row a step.
    """
    old_logits = drifted(logits, direction, -steps)
    policy, reference = logits.expand_as(old_logits), ref_logits.expand_as(old_logits)
    logp, ref_logp = policy.log_softmax(-1), reference.log_softmax(-1)
    old_logp = old_logits.log_softmax(-1)
    weighted = old_logp.exp() * torch.exp(logp - old_logp) * ESTIMATORS["k3"](logp, ref_logp)
    return pd.DataFrame(
        {
            "staleness": reverse_kl(policy, old_logits).numpy(),
            "k3": estimator_means(policy, reference, old_logits)["k3"].numpy(),
            "weighted": weighted.sum(-1).numpy(),
            "reverse": reverse_kl(policy, reference).numpy(),
            "forward": forward_kl(policy, reference).numpy(),
        }
    )


def binary_bias(ref_probability: float, probabilities: Tensor) -> pd.DataFrame:
    """Relative bias of k2 for two tokens, as the policy's probability of the first one varies."""
    logits = torch.stack([probabilities, 1 - probabilities], dim=-1).log()
    ref = torch.tensor([ref_probability, 1 - ref_probability], dtype=logits.dtype).log()
    reference = ref.expand_as(logits)
    kl = reverse_kl(logits, reference)
    bias = estimator_means(logits, reference)["k2"] / kl - 1
    return pd.DataFrame({"probability": probabilities.numpy(), "bias": bias.numpy()})
