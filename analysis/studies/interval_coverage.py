"""How often an interval over seeds covers the true value, simulated from recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import pandas as pd
from scipy import stats

from analysis.records import statistics
from analysis.records.config import TrainConfig
from analysis.records.manifests import RESULTS
from analysis.records.recording import by_start, load

METRICS = ("accuracy", "own_accuracy", "reverse_kl", "entropy", "length")
RESAMPLES = 500
#: Bandwidth of the smoothed resampling, in standard deviations.
SMOOTHING = 0.5
#: What trimmed means leave out at each end.
TRIM = 0.25
#: Share of runs that are lost in the hardest population, and how far they fall.
LOST, FALL = 0.1, 8.0
#: Read for what a start adds: the policy's own accuracy, whoever sampled.
OF_STARTS = "own_accuracy"

#: Draws [len(rows), n] from populations that are told by their number.
Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]
#: Of an interval in each simulation: low and high.
Bounds = Sequence[np.ndarray]


@cache
def recorded_differences() -> np.ndarray:
    """[P, 10]: variants less the first of their recording, of mean 0 and deviation 1.

    By seed of one start, or by start, of all recordings with ten of them and all of ``METRICS``,
    but those that are nearly always zero.
    """
    found = []
    for path in sorted(RESULTS.glob("*_cpu*/final.csv")):
        table = by_start(load(path.parent)).finals
        for metric in METRICS:
            wide = table.pivot(index="seed", columns=["variant", "beta"], values=metric)
            first = tuple(table.loc[0, ["variant", "beta"]])
            gaps = wide.drop(columns=[first]).sub(wide[first], axis=0).to_numpy().T
            kept = gaps[[len(np.unique(row)) > 5 for row in gaps]]
            if len(wide) == 10 and len(kept):
                kept = kept - kept.mean(axis=1, keepdims=True)
                found.append(kept / kept.std(axis=1, ddof=1, keepdims=True))
    return np.concatenate(found)


def populations(differences: np.ndarray) -> dict[str, Draw]:
    """Name -> how to draw from populations of mean zero, as many as there are ``differences``.

    The recorded skewness is shrunk by what ten numbers from a normal would have.
    """
    size = differences.shape[1]
    skews = stats.skew(differences, axis=1, bias=False)
    of_normal = 6 * size * (size - 1) / ((size - 2) * (size + 1) * (size + 3))
    skews = skews * np.sqrt(max(0.0, 1 - of_normal / skews.var()))
    shapes = 4.0 / np.maximum(np.abs(skews), 0.02) ** 2  # of a gamma with that skewness

    def smoothed(rng: np.random.Generator, rows: np.ndarray, n: int) -> np.ndarray:
        picks = rng.integers(size, size=(len(rows), n))
        noise = SMOOTHING * rng.standard_normal((len(rows), n))
        return np.take_along_axis(differences[rows], picks, axis=1) + noise

    def skewed(rng: np.random.Generator, rows: np.ndarray, n: int) -> np.ndarray:
        shape = shapes[rows, None]
        drawn = rng.gamma(shape, size=(len(rows), n))
        return np.sign(skews[rows, None]) * (drawn - shape) / np.sqrt(shape)

    def lost(rng: np.random.Generator, rows: np.ndarray, n: int) -> np.ndarray:
        falls = FALL * ((rng.random((len(rows), n)) < LOST) - LOST)
        return rng.standard_normal((len(rows), n)) - falls

    return {
        "recorded, smoothed": smoothed,
        "recorded skewness": skewed,
        "normal": lambda rng, rows, n: rng.standard_normal((len(rows), n)),
        "heavy tails: t, 3 degrees": lambda rng, rows, n: rng.standard_t(3, size=(len(rows), n)),
        "skewed: exponential": lambda rng, rows, n: rng.exponential(size=(len(rows), n)) - 1.0,
        "one run in ten is lost": lost,
    }


def t_mean(values: np.ndarray) -> Bounds:
    """The interval of the book: :func:`analysis.records.statistics.interval`."""
    return statistics.interval(values)[1:]


def t_trimmed(values: np.ndarray) -> Bounds:
    """Of the interquartile mean, with the winsorised variance (Yuen, 1974)."""
    test = stats.ttest_ind(values, np.zeros_like(values), axis=1, equal_var=False, trim=TRIM)
    return test.confidence_interval(statistics.LEVEL)


def bootstraps(values: np.ndarray, rng: np.random.Generator) -> dict[str, Bounds]:
    """Four that resample the seeds of each simulation [simulations, n]; three of them scipy's."""

    def resampled(statistic: Callable, method: str) -> Bounds:
        options = {"n_resamples": RESAMPLES, "batch": 100, "method": method, "rng": rng}
        return stats.bootstrap((values,), statistic, axis=1, **options).confidence_interval

    return {
        "percentile, interquartile mean": resampled(_middle_mean, "percentile"),
        "percentile, mean": resampled(np.mean, "percentile"),
        "BCa, mean": resampled(np.mean, "BCa"),
        "studentised, mean": _studentised(values, rng),
    }


def _middle_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """``scipy.stats.trim_mean`` over the last axis: few numbers are sorted faster than parted."""
    cut = int(TRIM * values.shape[axis])
    return np.sort(values, axis)[..., cut : values.shape[axis] - cut].mean(axis)


def _studentised(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mean less quantiles of the resampled t statistic, turned round."""
    size, tails = values.shape[1], np.array([1 + statistics.LEVEL, 1 - statistics.LEVEL]) / 2
    picks = rng.integers(size, size=(RESAMPLES, size))  # the same for every simulation
    weights = (picks[:, :, None] == np.arange(size)).mean(axis=1).T  # [n, resamples]
    mean, deviation = values.mean(axis=1), values.std(axis=1, ddof=1)
    centred = values - mean[:, None]
    shifts = centred @ weights  # of the resampled mean, [simulations, resamples]
    variances = np.maximum(centred**2 @ weights - shifts**2, 0.0) * size / (size - 1)
    errors = np.maximum(np.sqrt(variances), 1e-9 * deviation[:, None])
    turned = np.quantile(shifts / errors, tails, axis=1)
    return mean - turned * deviation


def coverage_table(
    seeds: Iterable[int] = (4, 5, 10, 20), *, simulations: int = 1500, seed: int = 0
) -> pd.DataFrame:
    """Share of simulations in which an interval holds the population's own value; of those in
    closed form there are ten times as many as of bootstraps."""
    rows, differences = [], recorded_differences()
    everyone = np.arange(len(differences))
    for name, draw in populations(differences).items():
        rng = np.random.default_rng(seed)
        many = np.sort(draw(rng, everyone, 2000), axis=1)
        true = {"mean": 0.0 * everyone, "interquartile mean": many[:, 500:1500].mean(axis=1)}
        for size in seeds:
            chosen = rng.integers(len(everyone), size=10 * simulations)
            values = draw(rng, chosen, size)
            found = {"t, mean": t_mean(values), "t, interquartile mean": t_trimmed(values)}
            found |= bootstraps(values[:simulations], rng)
            for interval, (low, high) in found.items():
                aim = true[interval.split(", ")[1]][chosen[: len(low)]]
                held = ((low <= aim) & (aim <= high)).mean()
                rows.append((name, size, interval, held))
    return pd.DataFrame(rows, columns=["population", "n", "interval", "coverage"])


def start_shares(*, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
    r"""What a start adds to the variance of a seed's difference, by recording.

    .. math:: r = \frac1n \left(\frac{n s_G^2}{s^2} \cdot \frac{\nu - 2}{\nu} - 1\right),
        \qquad \nu = G (n - 1)

    :math:`s_G^2` is the variance of the means of the :math:`G` starts, :math:`s^2` that of the
    :math:`n` seeds of a start, both of a variant's difference in accuracy from the first variant.
    Unbiased for one difference of normal seeds, so negative by chance where a start adds nothing;
    the mean over the variants.

    Returns:
        One row per recording with several seeds of several starts: ``recording``, ``starts``,
        ``seeds`` (of each start), ``share`` (:math:`r`), ``low`` and ``high``, the 95% percentiles
        of a bootstrap over the starts, and ``covered``, of :func:`of_one_start`.
    """
    rows = []
    for path in sorted(RESULTS.glob("*/final.csv")):
        found = load(path.parent)
        config = found.preset.config
        starts = config.start.count if isinstance(config, TrainConfig) else 1
        seeds = len(found.preset.seeds) // starts
        if starts == 1 or seeds == 1:
            continue
        wide = found.finals.pivot(index="seed", columns=["variant", "beta"], values=OF_STARTS)
        gaps = wide.iloc[:, 1:].sub(wide.iloc[:, 0], axis=0)
        grouped = gaps.groupby(gaps.index % starts)
        means, within = grouped.mean().to_numpy(), grouped.var().to_numpy()
        varies = within.mean(axis=0) > 0
        if varies.any():
            place = {"recording": path.parent.name, "starts": starts, "seeds": seeds}
            kept = means[:, varies], within[:, varies]
            share = _start_share(*kept, seeds)
            rng = np.random.default_rng(seed)
            drawn = rng.integers(starts, size=(resamples, starts))
            again = _start_share(*(part[drawn] for part in kept), seeds)
            low, high = np.nanpercentile(again, (2.5, 97.5))
            ends = {"share": share, "low": low, "high": high}
            rows.append(place | ends | {"covered": of_one_start(share)})
    return pd.DataFrame(rows).sort_values("share", ignore_index=True)


def _start_share(means: np.ndarray, within: np.ndarray, seeds: int) -> np.ndarray:
    """[...] of :func:`start_shares`, from means and variances [..., starts, variants] of seeds."""
    freedom = means.shape[-2] * (seeds - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = seeds * means.var(axis=-2, ddof=1) / within.mean(axis=-2)
    return (((freedom - 2) / freedom * ratio - 1) / seeds).mean(axis=-1)


def of_one_start(share: float, seeds: int = 10) -> float:
    r"""How often the t interval over the seeds of one start holds the mean over starts.

    .. math:: 2 F_{S-1}\left(\frac{t_{S-1,\,(1+c)/2}}{\sqrt{1 + S r}}\right) - 1

    Args:
        share: :math:`r` of :func:`start_shares`; below zero counts as zero.
        seeds: :math:`S`.
    """
    spread = np.sqrt(1 + seeds * max(share, 0.0))
    reach = statistics.t_quantile(seeds - 1) / spread
    return float(2 * stats.t.cdf(reach, seeds - 1) - 1)
