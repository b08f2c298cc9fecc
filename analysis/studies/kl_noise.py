r"""How noisy a recorded KL is, and what a difference at equal KL is without that noise.

The fit of :mod:`analysis.records.hierarchical` takes a run's KL as given. Before 2026-11-26 it
was read on the answers of a few updates, so :math:`x` is the log KL plus noise, which flattens both
curves and moves what is compared. Simulation and extrapolation undoes it: with noise of
:math:`\lambda` times the variance *added*, the difference is

.. math:: D(\lambda) \approx a + b\lambda + c\lambda^2, \qquad D(-1) = \text{without noise}.

Source: Cook and Stefanski (1994). The extrapolation is an approximation; an error of the variance
moves it further.
"""

from __future__ import annotations

import zlib

import numpy as np
import pandas as pd

from analysis.records import hierarchical
from analysis.records.designs import EQUAL, starts_of
from analysis.records.recording import Recording

#: Added noise, in units of that which is there, and how often each is drawn.
ADDED = (0.5, 1.0, 1.5, 2.0)
DRAWS = 40
_CELL = ["variant", "beta"]


def deviations(curves: pd.DataFrame, *, share: float = 0.5) -> pd.Series:
    """Standard deviation of one reading of log KL, by variant and beta.

    From the changes between successive windows of the last ``share`` of training, less their mean
    over the runs of a cell, which is what training does; a reading is one of two that differ.
    """
    last = curves[curves["update"] >= (1.0 - share) * curves["update"].max()]
    logs = last.assign(log=np.log(last[EQUAL]))
    wide = logs.pivot_table(index=[*_CELL, "seed"], columns="update", values="log")
    change = wide.diff(axis=1).iloc[:, 1:]
    change -= change.groupby(level=_CELL).transform("mean")
    return np.sqrt((change**2).stack().groupby(level=_CELL).mean() / 2.0)


def shares(recording: Recording) -> pd.Series:
    """Variance of that noise in a run's final log KL over the variance between runs, by cell."""
    finals = recording.finals.set_index([*_CELL, "seed"])
    within = np.log(finals[EQUAL]).groupby(level=_CELL).var()
    return deviations(recording.curves) ** 2 / _readings(recording) / within


def without_noise(
    recording: Recording, variant: str, other: str, metric: str
) -> tuple[float, float]:
    """A difference at equal KL as it is fitted, and extrapolated to a KL without noise."""
    runs = recording.finals[recording.finals["variant"].isin((variant, other))]
    asked = {"starts": starts_of(recording.preset), "of": EQUAL, "metric": metric}
    plain = hierarchical.fit(runs, variant, other, **asked)
    noise = deviations(recording.curves) / np.sqrt(_readings(recording))
    own = noise.loc[list(map(tuple, runs[_CELL].to_numpy()))].to_numpy()
    rng = np.random.default_rng(zlib.crc32(f"{variant} {other} {metric}".encode()))
    found = [_mean(plain)]
    for added in ADDED:
        drawn = []
        for _ in range(DRAWS):
            shift = rng.normal(0.0, np.sqrt(added) * own)
            noisy = runs.assign(**{EQUAL: runs[EQUAL] * np.exp(shift)})
            fitted = hierarchical.fit(noisy, variant, other, **asked, ratios=plain.ratios)
            # Noise widens the runs' spread; what is compared stays the range of the recorded KLs.
            moved = {end: getattr(plain, end) for end in ("low", "high")}
            drawn.append(_mean(fitted._replace(**moved)))
        found.append(float(np.mean(drawn)))
    curve = np.polynomial.Polynomial.fit((0.0, *ADDED), found, 2)
    return found[0], float(curve(-1.0))


def _mean(fit: hierarchical.Fit) -> float:
    return fit.difference(margin=1.0)["mean"]


def _readings(recording: Recording, *, share: float = 0.1) -> int:
    """Windows whose readings are averaged for a run's final KL: those of ``ablation.final``."""
    return max(1, round(share * recording.curves["update"].nunique()))
