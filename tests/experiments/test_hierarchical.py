"""The hierarchical fit: known curves come back, by dense algebra of other code too."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.records import hierarchical, statistics
from tests.experiments import dense_mixed_model

STARTS, SEEDS, POINTS = 8, 16, 5
SPREADS = {"start": 0.05, "seed": 0.02, "difference": 0.03, "rest": 0.01}


def simulated(generator: np.random.Generator, gap: float, *, jitter: float = 0.3) -> pd.DataFrame:
    """Runs of ``one`` and ``other``, whose curves are ``gap`` apart at every KL."""
    start = SPREADS["start"] * generator.standard_normal(STARTS)
    seed = SPREADS["seed"] * generator.standard_normal(SEEDS)
    difference = SPREADS["difference"] * generator.standard_normal(STARTS)
    rows = []
    for variant, sign in (("one", 0.5), ("other", -0.5)):
        for number in range(SEEDS):
            x = np.linspace(-4.0, -1.0, POINTS) + jitter * generator.standard_normal(POINTS)
            of_start = start[number % STARTS] + sign * (gap + difference[number % STARTS])
            y = 0.5 - 0.04 * (x + 2.5) ** 2 + of_start + seed[number]
            y = y + SPREADS["rest"] * generator.standard_normal(POINTS)
            rows.append(pd.DataFrame({"variant": variant, "seed": number, "kl": np.exp(x), "y": y}))
    return pd.concat(rows, ignore_index=True)


def fitted(runs: pd.DataFrame) -> hierarchical.Fit:
    return hierarchical.fit(runs, "one", "other", starts=STARTS, of="kl", metric="y")


@pytest.mark.parametrize("lost", [[], [3, 5]], ids=["all", "two starts have one seed"])
def test_dense_algebra_finds_the_same_curves(lost: list[int]) -> None:
    runs = simulated(np.random.default_rng(1), 0.04)
    runs = runs[~runs["seed"].isin(lost)]
    x = np.log(runs["kl"].to_numpy())
    one = (runs["variant"] == "one").to_numpy(float)
    y, seed = runs["y"].to_numpy(), runs["seed"].to_numpy()
    found = fitted(runs)
    coefficients, covariance = dense_mixed_model.coefficients(x - x.mean(), y, one, seed, STARTS)
    np.testing.assert_allclose(found.coefficients.ravel(), coefficients, atol=2e-4)
    errors = np.sqrt(np.diag(found.covariance))
    np.testing.assert_allclose(errors, np.sqrt(np.diag(covariance)), rtol=0.02)


def test_equal_kls_give_the_mean_difference_of_the_starts() -> None:
    """Where both curves have the same KLs, nothing is left to fit: it is a paired t interval."""
    runs = simulated(np.random.default_rng(2), 0.04, jitter=0.0)
    wide = runs.assign(start=runs["seed"] % STARTS).groupby(["start", "variant"])["y"].mean()
    gaps = (wide[:, "one"] - wide[:, "other"]).to_numpy()
    found = fitted(runs)
    coefficients = found.coefficients[0] - found.coefficients[1]
    ends = np.array([-4.0, -1.0]) - found.centre
    at = np.linspace(*ends, POINTS)
    mean = (coefficients[0] + coefficients[1] * at + coefficients[2] * at**2).mean()
    assert mean == pytest.approx(gaps.mean(), abs=1e-9)
    t = statistics.interval(gaps)
    width = found.difference(0.03)
    assert width["high"] - width["low"] == pytest.approx(t.high - t.low, rel=0.15)


@pytest.mark.slow
def test_intervals_cover_a_difference_that_starts_vary() -> None:
    generator = np.random.default_rng(3)
    covered, seen = 0, 0
    for _ in range(60):
        runs = simulated(generator, 0.04)
        found = fitted(runs).difference(0.03)
        covered += found["low"] <= 0.04 <= found["high"]
        seen += found["p"] < 0.05
    assert 53 <= covered <= 60, covered
    assert seen > 30, "a gap of more than one standard deviation of starts is seen"


def test_curves_that_share_no_kl_have_no_difference() -> None:
    runs = simulated(np.random.default_rng(4), 0.0)
    runs.loc[runs["variant"] == "one", "kl"] *= 1e6
    found = fitted(runs).difference(0.03)
    assert np.isnan([found["mean"], found["p"], found["equivalent"]]).all()


@pytest.mark.parametrize(("column", "value"), [("kl", 0.0), ("y", np.nan)])
def test_a_number_that_cannot_be_fitted_is_refused(column: str, value: float) -> None:
    runs = simulated(np.random.default_rng(5), 0.0)
    runs.loc[3, column] = value
    with np.errstate(divide="ignore"), pytest.raises(ValueError, match="not finite"):
        fitted(runs)


def test_one_start_gives_no_interval_over_starts() -> None:
    runs = simulated(np.random.default_rng(6), 0.0)
    with pytest.raises(ValueError, match="1 starts"):
        hierarchical.fit(runs, "one", "other", starts=1, of="kl", metric="y")
