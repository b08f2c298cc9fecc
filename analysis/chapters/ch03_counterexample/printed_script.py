"""The published script, run over many seeds, against what it printed and against the truth."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.distributions import Normal

from analysis.evidence.claims import Finding, claim, judge, largest
from analysis.evidence.gaussian_pairs import LIU_APPENDIX_D, GaussianPair, log_probs, normal_nodes
from kl_term import style
from kl_term.kl.estimators import k1, k3, k4
from kl_term.kl.gaussians import k3_variance_is_finite, moments
from kl_term.kl.surrogates import ESTIMATORS, gradient_coefficient

NAMES = ("k1", "k2", "k3", "k4", "k3_clip")

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


def over_seeds(seeds: Iterable[int]) -> pd.DataFrame:
    """The script of the appendix, in its own float32, once per seed: relative bias and relative
    sample standard deviation of each estimator, columns (estimator, ``bias`` or ``std``)."""
    q_mean, q_std, p_mean, p_std = LIU_APPENDIX_D
    q, p = Normal(q_mean, q_std), Normal(p_mean, p_std)
    kl = torch.distributions.kl_divergence(q, p)
    rows = {}
    for seed in seeds:
        torch.manual_seed(seed)
        x = q.sample((PRINTED_SAMPLE_SIZE,))
        samples = [ESTIMATORS[name](q.log_prob(x), p.log_prob(x)) for name in NAMES]
        pairs = [(sample.mean() - kl, sample.std()) for sample in samples]
        rows[seed] = [(moment / kl).item() for pair in pairs for moment in pair]
    columns = pd.MultiIndex.from_product([NAMES, ("bias", "std")], names=["estimator", "column"])
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def exact_moments(pair: GaussianPair) -> pd.DataFrame:
    """Exact relative ``bias`` and ``std`` of each estimator; those of k3_clip by quadrature."""
    exact = {name: (m.mean, m.var) for name, m in moments(*pair).items()}
    z, weights = normal_nodes()
    clipped = ESTIMATORS["k3_clip"](*log_probs(pair, z))
    mean = weights @ clipped
    exact["k3_clip"] = (mean.item(), (weights @ (clipped - mean).square()).item())
    rows = {n: (exact[n][0] / pair.kl - 1, exact[n][1] ** 0.5 / pair.kl) for n in NAMES}
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["bias", "std"])
    return table.rename_axis("estimator")


def against_print(runs: pd.DataFrame) -> pd.DataFrame:
    """Printed numbers beside the exact moments and their distribution over seeds.

    One row an estimator and column: the 2.5%, 50% and 97.5% quantiles over the seeds (``low``,
    ``median``, ``high``), and the share of seeds below the printed number (``place``).
    """
    low, median, high = runs.quantile([0.025, 0.5, 0.975]).to_numpy()
    printed, exact = (
        table.to_numpy().ravel() for table in (PRINTED, exact_moments(LIU_APPENDIX_D))
    )
    columns = {"printed": printed, "exact": exact, "low": low, "median": median, "high": high}
    return pd.DataFrame(columns | {"place": (runs < printed).mean()}, index=runs.columns)


def plot_seeds(runs: pd.DataFrame, printed: pd.DataFrame) -> Figure:
    """Histograms over seeds of the relative error of the sample mean, with the printed numbers."""
    names, limit = ("k1", "k3", "k3_clip"), 0.7
    figure, panels = style.subplots(len(names), 1, sharex=True, height=4.9)
    corner = {"xycoords": "axes fraction", "ha": "right", "va": "top"}
    mark = {"marker": "v", "markersize": 9, "color": "black", "clip_on": False, "zorder": 5}
    for panel, name in zip(panels, names, strict=True):
        error = runs[name]["bias"]
        weights = np.full(len(error), 1 / len(error))  # those beyond the limit count too
        edges = np.linspace(-limit, limit, 141)
        panel.hist(error, edges, weights=weights, color=style.COLOURS[name])
        style.guide(panel, x=0, color="black", linewidth=1.2, linestyle="-")
        at = printed.loc[name, "bias"]
        panel.plot(at, 0, **mark, transform=panel.get_xaxis_transform())
        panel.margins(y=0.12)
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
        panel.grid(visible=False)
        label = {"colour": name, "fontsize": "large", **corner}
        style.note(panel, style.LABELS[name], (0.99, 0.9), **label)
    style.note(panels[0], "truth", (0, 1), offset=(6, -2), xycoords=("data", "axes fraction"))
    beyond = (runs["k3"]["bias"] > limit).mean()
    text = f"{beyond:.1%} of seeds\nlie further right →"
    style.note(panels[1], text, (0.99, 0.5), **corner)
    panels[-1].set_xlabel("relative error of the sample mean (▼ printed)")
    figure.supylabel("share of seeds", fontsize="medium")
    return figure


@cache
def thousand_runs() -> pd.DataFrame:
    """The printed script under a thousand seeds; its global generator is put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        return over_seeds(range(1000))


@claim("S4-34")
def printed_bias_and_std_of_k3() -> Finding:
    """Exact bias and variance of k3 for the printed Gaussians; the print's place among seeds."""
    rows = against_print(thousand_runs()).loc["k3"]
    row = rows.loc["bias"]
    finite = k3_variance_is_finite(LIU_APPENDIX_D.q_std, LIU_APPENDIX_D.p_std)
    figures = {
        "exact_bias": row.exact,
        "exact_std": rows.exact["std"],
        "median_bias": row["median"],
        "share_below_truth": (thousand_runs()["k3"]["bias"] < 0).mean(),
        "place_of_print": row.place,
    }
    return Finding(judge(abs(row.exact - row.printed) < 0.05 and finite, False), figures)


@claim("S4-35")
def printed_bias_and_std_of_k1_and_k2() -> Finding:
    """The printed columns against the exact moments and against their spread over seeds."""
    rows = against_print(thousand_runs()).loc[["k1", "k2"]]
    figures = {
        "k1_std": rows.exact["k1", "std"],
        "k2_bias": rows.exact["k2", "bias"],
        "k2_std": rows.exact["k2", "std"],
    }
    figures |= {f"place_{name}_{column}": at for (name, column), at in rows.place.items()}
    printed_are_exact = (rows.exact - rows.printed).abs().max() < 5e-5
    return Finding(judge(printed_are_exact, rows.place.between(0.025, 0.975).all()), figures)


@claim("S4-36")
def k3_clip_tames_the_variance() -> Finding:
    """Exact moments of k3_clip by quadrature, and the sign of its gradient above the cap."""
    rows = against_print(thousand_runs())
    above_the_cap = torch.tensor(-3.0), torch.tensor(0.0)
    figures = {
        "bias": rows.exact["k3_clip", "bias"],
        "std": rows.exact["k3_clip", "std"],
        "coefficient_above_cap": gradient_coefficient(*above_the_cap, estimator="k3_clip").item(),
        "place_of_printed_bias": rows.place["k3_clip", "bias"],
    }
    tames = figures["std"] < rows.exact["k1", "std"]
    unharmed = abs(figures["bias"]) < 1e-6 and figures["coefficient_above_cap"] < 0
    return Finding(judge(tames and unharmed, tames), figures)


@claim("S4-37")
def k4_is_k3() -> Finding:
    """Largest difference of k4 and k3 over a grid of log-ratios in both float types, and where
    the minimum with k1 binds."""
    differences = []
    for dtype in (torch.float32, torch.float64):
        grid = torch.linspace(-12, 12, 100_001, dtype=dtype)
        zeros = torch.zeros_like(grid)
        above_k1 = (k3(grid, zeros) > k1(grid, zeros)) & (grid >= 0)
        differences += [largest(k4(grid, zeros) - k3(grid, zeros)), above_k1.sum().item()]
    return Finding(judge(max(differences) == 0, False), {"largest_difference": max(differences)})
