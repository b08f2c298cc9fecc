r"""The published counterexample to k3, and where k3 beats k1: chapter 3.

When the sampler q is the narrower Gaussian, the set :math:`r > t` is the outside of an interval, so
its probability under q and under p are two normal tails each. Under p it is the part of the mean of
r that lies above t, :math:`\mathbb{E}_q[r\,[r > t]] = P_p(r > t)`: what a sample lacks that has not
seen r above t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from scipy import optimize, stats
from scipy.special import lambertw, ndtr
from torch.distributions import Normal

from analysis.evidence.claims import Finding, claim, judge, largest, share
from analysis.evidence.gaussian_pairs import LIU_APPENDIX_D, GaussianPair, log_probs, normal_nodes
from analysis.evidence.policies import FAR
from kl_term import style
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.estimators import k1, k3, k4
from kl_term.kl.gaussians import k3_variance_is_finite, moments
from kl_term.kl.surrogates import ESTIMATORS, gradient_coefficient
from kl_term.kl.variance import estimator_variances

# --- What it computes: the script, the tail of r, and where k3 wins

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


def printed_script_over(seeds: Iterable[int]) -> pd.DataFrame:
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


def against_print(runs: pd.DataFrame, pair: GaussianPair = LIU_APPENDIX_D) -> pd.DataFrame:
    """Printed numbers beside the exact moments and their distribution over seeds.

    One row an estimator and column: the 2.5%, 50% and 97.5% quantiles over the seeds (``low``,
    ``median``, ``high``), and the share of seeds below the printed number (``place``).
    """
    low, median, high = runs.quantile([0.025, 0.5, 0.975]).to_numpy()
    printed, exact = (table.to_numpy().ravel() for table in (PRINTED, exact_moments(pair)))
    columns = {"printed": printed, "exact": exact, "low": low, "median": median, "high": high}
    return pd.DataFrame(columns | {"place": (runs < printed).mean()}, index=runs.columns)


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


def sample_size_sweep(
    pair: GaussianPair, sizes: Sequence[int], *, replicates: int, draws: int, seed: int
) -> pd.DataFrame:
    """Relative error of the mean and relative standard deviation of k3, a row a sample: so many
    of each ``sample_size`` as asked for, or as ``draws`` allow."""
    frames = []
    for index, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed + index)
        left = max(1, min(replicates, draws // size))
        while left:
            rows = min(left, max(1, CHUNK // size))
            left -= rows
            z = torch.randn(rows, size, generator=generator, dtype=torch.float64)
            sample = ESTIMATORS["k3"](*log_probs(pair, z)) / pair.kl
            columns = {"bias": sample.mean(-1) - 1, "std": sample.std(-1)}
            frames.append(pd.DataFrame(columns).assign(sample_size=size))
    return pd.concat(frames, ignore_index=True)


#: Where log t is looked for: from where every sample exceeds t to the largest of floats.
LOG_T = (-50.0, 700.0)


class TailMass(NamedTuple):
    """Probability of ``r > t`` under the sampler q and under p."""

    under_q: float
    under_p: float


def ratio_tail_index(pair: GaussianPair) -> float:
    r"""Exponent of the power-law tail of r under q: moments of r exist below it.

    .. math:: P_q(r > t) = t^{-\alpha + o(1)}, \qquad
        \alpha = \frac{\sigma_p^2}{\sigma_p^2 - \sigma_q^2}
        \quad (\sigma_q < \sigma_p), \text{ else } \infty

    Equation: ``ratio_tail_index``
    Sampler: :math:`x \sim q`.

    Returns:
        Above 1; ``inf`` if q is no narrower than p, where all moments exist.
    """
    excess = pair.p_std**2 - pair.q_std**2
    return pair.p_std**2 / excess if excess > 0 else math.inf


def tail_mass(pair: GaussianPair, log_threshold: float) -> TailMass:
    """Exact ``P(r > t)`` under q and p; ``log_threshold`` is log t, and q narrower than p."""
    low, high = seen_interval(pair, log_threshold)
    return TailMass(
        *(
            ndtr((low - mean) / std) + ndtr((mean - high) / std)
            for mean, std in ((pair.q_mean, pair.q_std), (pair.p_mean, pair.p_std))
        )
    )


def seen_interval(pair: GaussianPair, log_threshold: float) -> tuple[float, float]:
    """The interval where ``log r <= log_threshold``, a single point if there is none; q must be
    the narrower one."""
    q_precision, p_precision = pair.q_std**-2, pair.p_std**-2
    excess = q_precision - p_precision
    if not excess > 0:
        raise ValueError(f"q_std must be below p_std, got {pair.q_std!r} and {pair.p_std!r}")
    # log r = lowest + excess (x - centre)^2 / 2
    centre = (q_precision * pair.q_mean - p_precision * pair.p_mean) / excess
    shift_cost = q_precision * p_precision * (pair.q_mean - pair.p_mean) ** 2 / (2 * excess)
    lowest = math.log(pair.q_std / pair.p_std) - shift_cost
    half = math.sqrt(max(0.0, 2 * (log_threshold - lowest) / excess))
    return centre - half, centre + half


def largest_seen(pair: GaussianPair, sample_size: float) -> float:
    """log t such that one of ``sample_size`` draws from q is expected to have ``r > t``."""
    return optimize.brentq(lambda log_t: tail_mass(pair, log_t).under_q - 1 / sample_size, *LOG_T)


def unseen_mass(pair: GaussianPair, sample_size: float) -> float:
    r"""The part of the mean of r that a sample of n draws is not expected to contain.

    .. math:: u_n = P_p(r > t_n) = \mathbb{E}_q\big[r\,[r > t_n]\big], \qquad
        n\, P_q(r > t_n) = 1

    Equation: ``unseen_mass``
    Sampler: :math:`x \sim q`, n times.
    Estimates: minus the typical error of the sample mean of r, and so of k3; a rule of thumb.

    Args:
        pair: q narrower than p.
        sample_size: n, at least 2.

    Returns:
        Between 0 and 1.
    """
    return tail_mass(pair, largest_seen(pair, sample_size)).under_p


def samples_to_see(pair: GaussianPair, unseen: float) -> float:
    """The sample size at which :func:`unseen_mass` has fallen to ``unseen``."""
    log_t = optimize.brentq(lambda log_t: tail_mass(pair, log_t).under_p - unseen, *LOG_T)
    return 1 / tail_mass(pair, log_t).under_q


def underestimate_probability(
    pair: GaussianPair, sample_size: float, *, of: Literal["k3", "r"] = "k3"
) -> float:
    r"""A proved lower bound on the probability that a sample mean falls below its expectation.

    .. math:: \Pr\big[\bar f_n < \mathbb{E}_q[f]\big] \;\ge\; \max_t \Big[1 - n P_q(r > t)
        - \frac{v_t}{v_t + n\, m_t^2}\Big], \qquad
        v_t = \mathrm{Var}_q\big[f\,[r \le t]\big], \quad m_t = \mathbb{E}_q\big[f\,[r > t]\big]

    for :math:`f = k_3`, whose expectation is the KL, or :math:`f = r`, whose expectation is 1. The
    two events differ by the error of the mean of k1.

    Equation: ``underestimate_probability``
    Sampler: :math:`x \sim q`, n times.

    Args:
        pair, sample_size: as :func:`unseen_mass`.
        of: whose mean.

    Returns:
        Between 0 and 1.
    """
    bounds = [0.0]
    for log_threshold in largest_seen(pair, sample_size) + np.arange(0, 8, 0.25):
        x = np.linspace(*seen_interval(pair, log_threshold), 4001)
        log_q = stats.norm.logpdf(x, pair.q_mean, pair.q_std)
        log_r = stats.norm.logpdf(x, pair.p_mean, pair.p_std) - log_q
        f, whole = (np.exp(log_r), 1.0) if of == "r" else (np.expm1(log_r) - log_r, pair.kl)
        seen, second_moment = (np.trapezoid(np.exp(log_q) * f**power, x) for power in (1, 2))
        variance, lacks = second_moment - seen**2, max(0.0, whole - seen)
        slack = variance / (variance + sample_size * lacks**2)
        above = sample_size * tail_mass(pair, log_threshold).under_q
        bounds.append(1 - above - slack)
    return max(bounds)


def clip_bias(pair: GaussianPair, max_ratio: float) -> float:
    r"""Exact bias of k3_clip: the mass it cuts off.

    .. math:: \mathbb{E}_q[k_{3,\mathrm{clip}}] - \mathrm{KL}(q \Vert p)
        = -\mathbb{E}_q[(r - r_{\max})_+]
        = -\big(P_p(r > r_{\max}) - r_{\max} P_q(r > r_{\max})\big)

    Equation: ``clip_bias``
    Sampler: :math:`x \sim q`.

    Returns:
        Nats, not positive.
    """
    mass = tail_mass(pair, math.log(max_ratio))
    return -(mass.under_p - max_ratio * mass.under_q)


def location_crossing() -> float:
    r"""The shift of equal-width Gaussians at which k3 stops beating k1, in standard deviations.

    .. math:: e^{d^2} - 1 = 2 d^2

    Equation: ``location_crossing``
    """
    lower_branch = lambertw(-0.5 * math.exp(-0.5), -1)  # of d^2 = u, where e^u = 1 + 2 u
    return math.sqrt(-0.5 - lower_branch.real)


def random_drifts(
    count: int, vocab_size: int, *, ref_spread: float, farthest: float, seed: int
) -> pd.DataFrame:
    """Random references, each with a policy that has drifted from it in a random direction.

    Drifts are log-uniform over two decades below ``farthest``. A row a pair: ``kl`` (nats), the
    variance of k3 over that of k1 (``ratio``) and k2 (``ratio_k2``), and that at the ``optimal``
    weight over k1's.
    """
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    ref_logits = ref_spread * torch.randn(count, vocab_size, **options)
    drift = farthest * 10 ** (-2 * torch.rand(count, 1, **options))
    logits = ref_logits + drift * torch.randn(count, vocab_size, **options)
    variances = estimator_variances(logits, ref_logits)
    return pd.DataFrame(
        {
            "kl": reverse_kl(logits, ref_logits),
            "ratio": variances["k3"] / variances["k1"],
            "ratio_k2": variances["k3"] / variances["k2"],
            "optimal": variances["optimal"] / variances["k1"],
        }
    )


# --- What it draws


def plot_seeds(runs: pd.DataFrame, printed: pd.DataFrame, limit: float = 0.7) -> Figure:
    """Histograms over seeds of the relative error of the sample mean, with the printed numbers."""
    names = ("k1", "k3", "k3_clip")
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


def plot_seen(pair: GaussianPair, interval: tuple[float, float], unseen: float) -> Figure:
    """Densities of sampler and reference, and the part of the reference no sample is drawn from."""
    z = torch.linspace(-24, 22, 2401, dtype=torch.float64)
    x = (pair.q_mean + pair.q_std * z).numpy()
    q, p = (density.exp().numpy() for density in log_probs(pair, z))
    figure, axes = style.subplots(height=3.4)
    colour, top = style.COLOURS["forward"], q.max()
    axes.plot(x, q, color=style.COLOURS["exact"])
    axes.plot(x, p, color=colour)
    outside = (x < interval[0]) | (x > interval[1])
    axes.fill_between(x, p, where=outside, color=colour, alpha=0.35, linewidth=0)
    for edge in interval:
        style.guide(axes, x=edge)
    line = {"arrowprops": {"arrowstyle": "-", "color": style.QUIET}}
    axes.annotate("policy $q$", (pair.q_mean + 1.2 * pair.q_std, 0.62 * top))
    of_reference = {"xytext": (-3.4, 0.55), "color": style.text_colour(colour)}
    axes.annotate("reference $p$", (-1.75, 0.11), **of_reference, **line)
    text = f"{unseen:.0%} of the reference\nlies out here"
    axes.annotate(text, (1.3, 0.1), xytext=(1.15, 0.75), **line)
    axes.set(xlim=(-3.6, 3.6), ylim=(0, 1.08 * top), ylabel="probability density")
    axes.set_xlabel("$x$ (standard deviations of the reference)")
    return figure


def plot_sample_sizes(sweep: pd.DataFrame, predicted: pd.DataFrame, unseen_goal: float) -> Figure:
    """Error of the sample mean of k3 against sample size, and the rule of thumb far beyond it."""
    figure, axes = style.subplots(height=3.8)
    look = style.line("k3", markeredgecolor=style.COLOURS["k3"])
    look |= {"estimator": "median", "errorbar": ("pi", 50), "legend": False}
    look["err_kws"] = {"alpha": 0.25, "linewidth": 0}
    sns.lineplot(sweep, x="sample_size", y="bias", ax=axes, **look)
    rule = {"color": style.COLOURS["exact"], "linestyle": (0, (4, 2))}
    axes.plot(predicted.sample_size, -predicted.unseen, **rule)
    style.guide(axes, y=0, color="black", linewidth=1.2, linestyle="-")
    style.guide(axes, y=-unseen_goal)
    quiet = {"offset": (2, -4), "color": style.QUIET}
    style.note(axes, f"{unseen_goal:.0%} error", (1e2, -unseen_goal), **quiet)
    middle = predicted.iloc[len(predicted) // 2]
    text, at = "minus the unseen\nmass of $p$ / KL", (middle.sample_size, -middle.unseen)
    style.note(axes, text, at, offset=(8, -12))
    last = sweep.groupby("sample_size").bias.median().tail(1)
    text, at = "median and quartiles\nover samples", (last.index[0], last.iloc[0])
    style.note(axes, text, at, offset=(12, -16), colour="k3")
    axes.set(xscale="log", ylim=(-0.62, 0.1), xlabel="sample size $n$ (log scale)")
    axes.set_ylabel("relative error of the mean of $k_3$")
    return figure


#: From "k3 is quieter" over "equal" to "k1 is quieter", in the colours of the two estimators.
DIVERGING = LinearSegmentedColormap.from_list(
    "k3-k1", [style.COLOURS["k3"], "#FFFFFF", style.COLOURS["k1"]]
)


def plot_gaussian_phase(points: Mapping[str, GaussianPair]) -> Figure:
    """Ratio of the variances of k3 and k1 between Gaussians; hatched where k3 has none.

    By the distance of the means and the policy's width, in deviations of the reference.
    """
    shifts = torch.linspace(0.01, 2, 200, dtype=torch.float64)
    scales = torch.linspace(0.05, 2, 196, dtype=torch.float64)
    exact = moments(shifts, scales[:, None], 0.0, 1.0)
    ratio = exact["k3"].var / exact["k1"].var
    finite = torch.where(ratio.isfinite(), ratio, torch.nan)
    shifts, scales, finite = (values.numpy() for values in (shifts, scales, finite))
    figure, axes = style.subplots(height=4.6)
    label = "variance of $k_3$ / variance of $k_1$ (log scale)"
    style.ratio_mesh(axes, shifts, scales, finite, decades=2, cmap=DIVERGING, label=label)
    axes.contour(shifts, scales, np.log10(finite), levels=[0.0], colors="black", linewidths=1.6)
    edge = math.sqrt(0.5)
    style.guide(axes, y=edge, color="black", linewidth=1.2, linestyle="--")
    hatch = {"facecolor": "#F3E9E4", "edgecolor": style.QUIET, "hatch": "///", "linewidth": 0}
    axes.fill_between(shifts, 0, edge, **hatch)
    box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    axes.annotate("variance of $k_3$ infinite", (0.97 * shifts[-1], 0.36), bbox=box, ha="right")
    axes.annotate("$k_3$ wins", (0.12, 1.22), bbox=box)
    axes.annotate("$k_1$ wins", (1.55, 0.86), bbox=box)
    for label, pair in points.items():
        at = (abs(pair.q_mean - pair.p_mean) / pair.p_std, pair.q_std / pair.p_std)
        axes.plot(*at, marker="o", color="black", markersize=7)
        style.note(axes, label, at, offset=(-4, 9), bbox=box, ha="left", va="baseline")
    axes.set(xlim=(shifts[0], shifts[-1]), ylim=(scales[0], scales[-1]))
    axes.set_xlabel("shift of the mean (standard deviations of the reference)")
    axes.set_ylabel("policy's width /\nreference's width")
    return figure


def plot_softmax_wins(drifts: pd.DataFrame, crossing: float) -> Figure:
    """Ratio of the variances of k3 and k1 against the distance, one dot a random pair."""
    figure, axes = style.subplots(height=3.9)
    winner = np.where(drifts.ratio < 1, style.COLOURS["k3"], style.COLOURS["k1"])
    axes.scatter(drifts.kl, drifts.ratio, s=5, alpha=0.35, color=winner, linewidth=0)
    style.guide(axes, y=1, color="black", linewidth=1.2, linestyle="-")
    style.guide(axes, x=crossing, linestyle="--")
    at = {"xycoords": ("data", "axes fraction"), "va": "top", "fontsize": "small"}
    style.note(axes, "Gaussians of\nequal width", (crossing, 0.96), offset=(-6, 0), **at)
    axes.set(xscale="log", yscale="log", xlabel="reverse KL from the reference (nats, log scale)")
    axes.set_ylabel("variance of $k_3$ /\nvariance of $k_1$ (log scale)")
    return figure


# --- What it decides


@cache
def runs() -> pd.DataFrame:
    """The printed script under a thousand seeds; its global generator is put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        return printed_script_over(range(1000))


@claim("S4-34")
def printed_bias_and_std_of_k3() -> Finding:
    """Exact bias and variance of k3 for the printed Gaussians; the print's place among seeds."""
    row = against_print(runs()).loc["k3", "bias"]
    finite = k3_variance_is_finite(LIU_APPENDIX_D.q_std, LIU_APPENDIX_D.p_std)
    figures = {
        "exact_bias": row.exact,
        "exact_std": exact_moments(LIU_APPENDIX_D).loc["k3", "std"],
        "median_bias": row["median"],
        "share_below_truth": (runs()["k3"]["bias"] < 0).mean(),
        "place_of_print": row.place,
    }
    return Finding(judge(abs(row.exact - row.printed) < 0.05 and finite, False), figures)


@claim("S4-35")
def printed_bias_and_std_of_k1_and_k2() -> Finding:
    """The printed columns against the exact moments and against their spread over seeds."""
    rows = against_print(runs()).loc[["k1", "k2"]]
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
    rows = against_print(runs())
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


@claim("S4-38")
def k3_is_not_always_the_quietest() -> Finding:
    """How often the variance of k3 exceeds that of k1, and of k2, over far pairs."""
    variances = estimator_variances(*FAR)
    over = {k: share(variances["k3"] > variances[k]) for k in ("k1", "k2")}
    figures = {"share_over_k1": over["k1"], "share_over_k2": over["k2"]}
    return Finding(judge(min(over.values()) > 0, False), figures)
