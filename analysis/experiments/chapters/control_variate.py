"""Where k3 beats k1: phase diagrams for Gaussians, two tokens and random softmax policies."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.kl.divergences import reverse_kl
from analysis.kl.gaussians import moments
from analysis.kl.variance import estimator_variances, optimal_control_weight


def gaussian_phase(shifts: Tensor, scales: Tensor) -> np.ndarray:
    """Ratio of the variances of k3 and k1 between Gaussians; ``inf`` where k3 has none.

    Args:
        shifts: [M], distances of the means in units of the reference's standard deviation.
        scales: [N], the policy's standard deviation in the same unit.

    Returns:
        [N, M].
    """
    table = moments(shifts[None, :], scales[:, None], 0.0, 1.0)
    return (table["k3"].var / table["k1"].var).numpy()


def location_crossing() -> float:
    r"""The shift of equal-width Gaussians at which k3 stops beating k1, in standard deviations.

    .. math:: e^{d^2} - 1 = 2 d^2

    Equation: ``location_crossing``
    """
    low, high = 0.5, 2.0
    for _ in range(80):
        middle = (low + high) / 2
        beaten = math.expm1(middle**2) > 2 * middle**2
        low, high = (low, middle) if beaten else (middle, high)
    return high


def binary_phase(probabilities: Tensor) -> np.ndarray:
    """Ratio of the variances of k3 and k1 for two tokens; NaN where the policies are equal.

    Args:
        probabilities: [N], of the first token.

    Returns:
        [N, N]: rows vary the policy's probability, columns the reference's.
    """
    policy, reference = torch.meshgrid(probabilities, probabilities, indexing="ij")
    variances = estimator_variances(_two_tokens(policy), _two_tokens(reference))
    equal = policy == reference
    ratio = variances["k3"] / torch.where(equal, 1.0, variances["k1"])
    return torch.where(equal, torch.nan, ratio).numpy()


def random_drifts(
    count: int, vocab_size: int, *, ref_spread: float, farthest: float, seed: int
) -> pd.DataFrame:
    """Random references, each with a policy that has drifted from it in a random direction.

    Args:
        count: pairs of policies.
        vocab_size: tokens.
        ref_spread: standard deviation of the reference's logits.
        farthest: largest drift, the standard deviation of the change in logits; the drifts are
            uniform in their logarithm over two decades below it.
        seed: of all draws.

    Returns:
        One row a pair: ``kl`` (nats), ``ratio`` (variance of k3 over that of k1), ``ratio_k2``
        (over that of k2), ``optimal`` (variance at the optimal weight over that of k1), ``weight``
        (the optimal weight).
    """
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    ref_logits = ref_spread * torch.randn(count, vocab_size, **options)
    drift = farthest * 10 ** (-2 * torch.rand(count, 1, **options))
    logits = ref_logits + drift * torch.randn(count, vocab_size, **options)
    variances = estimator_variances(logits, ref_logits)
    return pd.DataFrame(
        {
            "kl": reverse_kl(logits, ref_logits).numpy(),
            "ratio": (variances["k3"] / variances["k1"]).numpy(),
            "ratio_k2": (variances["k3"] / variances["k2"]).numpy(),
            "optimal": (variances["optimal"] / variances["k1"]).numpy(),
            "weight": optimal_control_weight(logits, ref_logits).numpy(),
        }
    )


def share_of_wins(drifts: pd.DataFrame, edges: np.ndarray, *, min_pairs: int = 20) -> pd.DataFrame:
    """Share of pairs where k3 beats k1, by distance, with Wilson 95% intervals.

    Args:
        drifts: from :func:`random_drifts`.
        edges: [B + 1], bounds of the bins in nats.
        min_pairs: bins with fewer pairs are left out.

    Returns:
        One row a bin: ``kl`` (geometric middle), ``pairs``, ``share``, ``low``,
        ``high``.
    """
    middles = np.sqrt(edges[:-1] * edges[1:])
    bins = pd.cut(drifts["kl"], edges, labels=False)
    rows = []
    for index, group in drifts.groupby(bins):
        pairs, share = len(group), float((group["ratio"] < 1).mean())
        if pairs < min_pairs:
            continue
        low, high = wilson_interval(share, pairs)
        rows.append(
            {"kl": middles[int(index)], "pairs": pairs, "share": share, "low": low, "high": high}
        )
    return pd.DataFrame(rows)


def wilson_interval(share: float, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval of a share of ``count`` independent trials."""
    centre = share + z**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    return (centre - half) / scale, (centre + half) / scale


def _two_tokens(probability: Tensor) -> Tensor:
    return torch.stack([probability, 1 - probability], dim=-1).log()
