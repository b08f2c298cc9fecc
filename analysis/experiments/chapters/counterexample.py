"""The printed counterexample to k3, run again over many seeds and many sample sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch.distributions import Normal

from analysis.experiments.chapters.gaussian_pairs import (
    LIU_APPENDIX_D,
    GaussianPair,
    log_probs,
    normal_nodes,
)
from analysis.kl.gaussians import moments
from analysis.kl.surrogates import ESTIMATORS

NAMES = ("k1", "k2", "k3", "k4", "k3_clip")

#: Draws held in memory at a time: small enough to stay in a processor's cache.
CHUNK = 100_000

#: Sample size of the printed script.
PRINTED_SAMPLE_SIZE = 10_000

#: Relative bias and relative sample standard deviation printed by Liu et al. (2025), appendix D.
PRINTED = pd.DataFrame(
    {
        "bias": [0.0007, -0.2348, -0.4051, -0.4051, -0.4676],
        "std": [0.5896, 0.4524, 2.4417, 2.4417, 0.4370],
    },
    index=pd.Index(NAMES, name="estimator"),
)


def printed_script(seed: int, sample_size: int = PRINTED_SAMPLE_SIZE) -> dict[str, tuple]:
    """The script of the appendix, in its own float32, from one torch seed.

    Returns:
        Relative bias and relative sample standard deviation of each estimator.
    """
    torch.manual_seed(seed)
    q = Normal(LIU_APPENDIX_D.q_mean, LIU_APPENDIX_D.q_std)
    p = Normal(LIU_APPENDIX_D.p_mean, LIU_APPENDIX_D.p_std)
    x = q.sample((sample_size,))
    logp, ref_logp = q.log_prob(x), p.log_prob(x)
    kl = torch.distributions.kl_divergence(q, p)
    result = {}
    for name in NAMES:
        sample = ESTIMATORS[name](logp, ref_logp)
        result[name] = (((sample.mean() - kl) / kl).item(), (sample.std() / kl).item())
    return result


def printed_script_over(seeds: Iterable[int]) -> pd.DataFrame:
    """The script once per seed: rows are seeds, columns (estimator, ``bias`` or ``std``)."""
    seeds = list(seeds)
    rows = [[number for pair in printed_script(seed).values() for number in pair] for seed in seeds]
    columns = pd.MultiIndex.from_product([NAMES, ("bias", "std")], names=["estimator", "column"])
    return pd.DataFrame(rows, index=pd.Index(seeds, name="seed"), columns=columns)


def against_print(runs: pd.DataFrame, pair: GaussianPair = LIU_APPENDIX_D) -> pd.DataFrame:
    """Printed numbers beside their distribution over seeds and the exact moments.

    Returns:
        One row an estimator: ``printed``, ``exact``, ``median``, ``low``, ``high`` (2.5% and 97.5%
        over seeds) and ``place`` (share of seeds below the printed number), for bias and std.
    """
    exact = exact_moments(pair)
    rows = []
    for name in NAMES:
        for column in ("bias", "std"):
            values, printed = runs[name][column], PRINTED.loc[name, column]
            rows.append(
                {
                    "estimator": name,
                    "column": column,
                    "printed": printed,
                    "exact": exact.loc[name, column],
                    "low": values.quantile(0.025),
                    "median": values.median(),
                    "high": values.quantile(0.975),
                    "place": (values < printed).mean(),
                }
            )
    return pd.DataFrame(rows).set_index(["estimator", "column"])


def exact_moments(pair: GaussianPair) -> pd.DataFrame:
    """Exact relative bias and standard deviation of each estimator; k3_clip by quadrature."""
    exact = {name: (m.mean, m.var) for name, m in moments(*pair).items()}
    z, weights = normal_nodes()
    clipped = ESTIMATORS["k3_clip"](*log_probs(pair, z))
    mean = (weights * clipped).sum().item()
    exact["k3_clip"] = (mean, (weights * (clipped - mean).square()).sum().item())
    rows = {
        n: {"bias": exact[n][0] / pair.kl - 1, "std": exact[n][1] ** 0.5 / pair.kl} for n in NAMES
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("estimator")


def matching_seeds(runs: pd.DataFrame, digits: int = 4) -> list[int]:
    """Seeds whose ten numbers all round to the printed ones."""
    printed = PRINTED.loc[list(NAMES)].to_numpy().ravel()
    close = np.abs(runs.to_numpy() - printed) <= 0.5 * 10.0**-digits + 1e-6
    return runs.index[close.all(axis=1)].tolist()


def sample_size_sweep(
    pair: GaussianPair, sizes: Sequence[int], *, replicates: int, draws: int, seed: int
) -> pd.DataFrame:
    """Relative error of the mean and sample standard deviation of k3, for growing samples.

    Args:
        pair: the two Gaussians.
        sizes: sample sizes n.
        replicates: independent samples of each size, at most.
        draws: the most draws to spend on one size; fewer replicates where n is large.
        seed: of the first size; each size has its own.

    Returns:
        Long table: ``sample_size``, ``bias`` and ``std`` of each replicate, in units of the KL.
    """
    frames = []
    for index, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed + index)
        count = max(1, min(replicates, draws // size))
        rows = max(1, CHUNK // size)
        chunks = [
            _relative_mean_and_std(pair, min(rows, count - start), size, generator)
            for start in range(0, count, rows)
        ]
        bias, std = (torch.cat(parts).numpy() for parts in zip(*chunks, strict=True))
        frames.append(pd.DataFrame({"sample_size": size, "bias": bias, "std": std}))
    return pd.concat(frames, ignore_index=True)


def _relative_mean_and_std(
    pair: GaussianPair, rows: int, size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    k3 = ESTIMATORS["k3"](*log_probs(pair, z))
    return k3.mean(-1) / pair.kl - 1, k3.std(-1) / pair.kl
