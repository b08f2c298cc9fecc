"""Means with intervals and tail indices, by routes that share no line with the package."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kl_term.diagnosis import statistics
from kl_term.diagnosis.schema import Tail
from kl_term.diagnosis.statistics import infinite_variance, student, tail_index, token_means

RESAMPLES = 200


def within(t: float, freedom: int) -> float:
    """P(|T| < t) of Student's t, its density integrated by Simpson's rule."""
    points = np.linspace(0.0, t, 20_001)
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = np.exp(constant) / math.sqrt(freedom * math.pi)
    density *= (1 + points**2 / freedom) ** (-(freedom + 1) / 2)
    inner = 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum()
    return 2 * (points[1] / 3) * (density[0] + inner + density[-1])


@pytest.mark.parametrize(
    ("freedom", "accuracy"),
    [(1, 1e-6), (2, 1e-9), (3, 3e-4), (5, 3e-5), (10, 1e-6), (30, 1e-8), (100, 1e-10)],
)
@pytest.mark.parametrize("error", [0.05, 0.01])
def test_the_quantile_of_student_has_its_probability(freedom, accuracy, error):
    accuracy *= 1 if error == 0.05 else 10
    assert within(student(freedom, error), freedom) == pytest.approx(1 - error, abs=accuracy)
    assert student(freedom, 0.05) == student(freedom)


#: Lengths, sums and their units: seven completions of unequal length, one of them far off.
LENGTHS = np.array([1, 4, 2, 6, 3, 5, 2])
UNIT = np.repeat(np.arange(7), LENGTHS)
VALUES = {
    "skewed": np.random.default_rng(0).exponential(size=LENGTHS.sum()) ** 3,
    "signed": np.random.default_rng(1).standard_normal(LENGTHS.sum()),
    "turned": -(np.random.default_rng(2).exponential(size=LENGTHS.sum()) ** 3),
}
WEIGHT = np.random.default_rng(3).exponential(size=LENGTHS.sum())


def error_of(sums, counts) -> float:
    mean, units = sums.sum() / counts.sum(), len(sums)
    return math.sqrt(units / (units - 1) * ((sums - mean * counts) ** 2).sum()) / counts.sum()


def by_resampling(values, weight, unit, seed: int) -> tuple[float, float, float]:
    """Value and interval: completions are drawn and laid side by side, one draw after another."""
    sums, counts = np.bincount(unit, values * weight), np.bincount(unit, weight)
    mean, error, units = sums.sum() / counts.sum(), error_of(sums, counts), len(sums)
    quantile = student(units - 1)
    times = np.random.default_rng(seed).multinomial(
        units, np.full(units, 1 / units), size=RESAMPLES
    )
    studentised = []
    for drawn in times:
        one = np.repeat(np.arange(units), drawn)
        away = sums[one].sum() / counts[one].sum() - mean
        alike = len(np.unique(one)) == 1
        studentised.append(0.0 if alike else away / error_of(sums[one], counts[one]))
    least, most = np.percentile(studentised, [2.5, 97.5]).clip(-3 * quantile, 3 * quantile)
    low, high = mean - max(most, quantile) * error, mean - min(least, -quantile) * error
    return mean, max(low, 0.0) if (sums >= 0).all() else low, high


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("units", [4, 7])
def test_an_interval_is_the_hull_of_students_and_the_studentised_bootstraps(units, weighted, seed):
    weight, unit = WEIGHT if weighted else None, UNIT % units
    found = token_means(VALUES, unit, resamples=RESAMPLES, seed=seed, weight=weight)
    for name, values in VALUES.items():
        ones = np.ones(len(values)) if weight is None else weight
        value, low, high = by_resampling(values, ones, unit, seed)
        assert found[name].value == pytest.approx(value, rel=1e-12)
        assert found[name].low == pytest.approx(low, rel=1e-9, abs=1e-12)
        assert found[name].high == pytest.approx(high, rel=1e-9)


def test_a_thousand_completions_are_drawn_one_by_one():
    values = np.random.default_rng(4).exponential(size=1000) ** 4
    found = token_means({"x": values}, np.arange(1000), resamples=RESAMPLES, seed=3)["x"]
    _, low, high = by_resampling(values, np.ones(1000), np.arange(1000), 3)
    assert found.high - found.value > 1.1 * (found.value - found.low), "by the bootstrap"
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)


def test_a_bootstrap_reaches_farther_than_student_where_completions_are_skewed():
    found = token_means(VALUES, UNIT, resamples=RESAMPLES, seed=0)
    skewed, turned = found["skewed"], found["turned"]
    assert skewed.low == 0.0, "a mean of what is never negative"
    assert skewed.high - skewed.value > 1.2 * (skewed.value - skewed.low)
    assert turned.value - turned.low > 1.2 * (turned.high - turned.value)


@pytest.mark.parametrize(("units", "quantile"), [(2, 12.7062047), (3, 4.30265273)])
def test_of_two_or_three_completions_it_is_students_alone(units, quantile):
    values, unit = np.array([1.0, 2.0, 4.0, 9.0])[: units + 1], np.arange(units + 1) % units
    found = token_means({"x": values - 3}, unit, resamples=RESAMPLES, seed=0)["x"]
    sums, counts = np.bincount(unit, values - 3), np.bincount(unit)
    reach = quantile * error_of(sums, counts)
    assert found.high - found.value == pytest.approx(reach, rel=1e-6)
    assert found.value - found.low == pytest.approx(reach, rel=1e-6)


def test_one_completion_has_no_interval():
    columns = {"fell": np.array([1.0, -2.0]), "rose": np.array([-1.0, 2.0])}
    found = token_means(columns, np.zeros(2, int), resamples=RESAMPLES, seed=0)
    fell, rose = found["fell"], found["rose"]
    assert (fell.value, fell.low, fell.high) == (-0.5, -math.inf, math.inf)
    assert (rose.value, rose.low, rose.high) == (0.5, 0.0, math.inf), "no sum is below zero"


@pytest.mark.parametrize("look", [1, 2, 9])
def test_all_looks_together_err_as_often_as_one(look):
    """At the j-th with probability 0.05 times 6 / (pi j)^2, which sum to 0.05."""
    how = {"unit": UNIT, "resamples": RESAMPLES, "seed": 0}
    once, later = (token_means(VALUES, **how, look=j)["signed"] for j in (0, look))
    for end in ("low", "high"):
        wider = (getattr(later, end) - later.value) / (getattr(once, end) - once.value)
        covered = math.erf(1.959963985 * wider / math.sqrt(2))
        assert 1 - covered == pytest.approx(0.05 * 6 / (math.pi * look) ** 2, rel=1e-6)


def test_a_dump_is_summed_in_blocks(monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK", 4)
    made = {name: (lambda part, x=values: x[part]) for name, values in VALUES.items()}
    for weight in (None, WEIGHT):
        how = {"unit": UNIT, "resamples": RESAMPLES, "seed": 0, "weight": weight}
        small = token_means(made, **how)
        monkeypatch.setattr(statistics, "BLOCK", 1000)
        assert token_means(VALUES, **how)["skewed"].value == pytest.approx(small["skewed"].value)
        monkeypatch.setattr(statistics, "BLOCK", 4)


def test_above_a_thousand_completions_whole_ones_are_put_in_bags():
    """Each bag holds completions of its own, as many as the others, by lot."""
    sequence = np.repeat(np.arange(2500), 2)
    values = np.random.default_rng(0).standard_normal(2500)[sequence]
    found = {
        seed: token_means({"x": values}, sequence, resamples=RESAMPLES, seed=seed)["x"]
        for seed in (0, 1)
    }
    assert found[0].value == pytest.approx(values.mean(), rel=1e-12)
    expected = 2 * 1.96 * values[::2].std() / 50
    for interval in found.values():
        assert interval.high - interval.low == pytest.approx(expected, rel=0.1)
    assert found[0].high != found[1].high
    again = token_means({"x": values}, sequence, resamples=RESAMPLES, seed=0)["x"]
    assert again == found[0]


@pytest.mark.filterwarnings("error")
def test_infinities_are_said_and_nothing_else_is():
    at = np.arange(40) == 3
    values, unit = np.where(at, math.inf, 1.0), np.arange(40) // 4
    how = {"unit": unit, "resamples": RESAMPLES, "seed": 0}
    beside = np.random.default_rng(0).standard_normal(40)
    hidden = np.where(at, math.nan, 1.0)
    columns = {"up": values, "down": -values, "nan": hidden, "beside": beside}
    found = token_means(columns, **how)
    assert found["up"].model_dump() == {"value": math.inf, "low": 1.0, "high": math.inf}
    assert found["down"].model_dump() == {"value": -math.inf, "low": -math.inf, "high": -1.0}
    assert math.isnan(found["nan"].value)
    assert found["beside"] == token_means({"beside": beside}, **how)["beside"]
    unseen = token_means(columns, **how, weight=np.where(at, 0.0, 1.0))
    for name, one in (("up", 1.0), ("down", -1.0), ("nan", 1.0)):
        assert set(unseen[name].model_dump().values()) == {one}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e100, 1e160, 1e200, 1e265])
def test_a_sum_whose_square_overflows_has_an_interval(size):
    """k3 of one token at a log-ratio of 230, 368, 460, 610 nats: that of resampled means."""
    unit, values = np.arange(40) // 4, np.where(np.arange(40) == 3, size, 1.0)
    columns = {"first": -values / 3, "large": values, "small": np.ones(40)}
    found = token_means(columns, unit, resamples=RESAMPLES, seed=0)
    assert found["large"].value == pytest.approx(size / 40, rel=1e-12)
    assert found["small"].model_dump() == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert 0 <= found["large"].low <= 1 and size / 40 < found["large"].high < math.inf
    if size > 1e150:
        times = np.random.default_rng(0).multinomial(10, np.full(10, 0.1), size=RESAMPLES)
        means = times @ np.bincount(unit, values) / 40
        assert found["large"].low == pytest.approx(np.percentile(means, 2.5), rel=1e-12)
        assert found["large"].high == pytest.approx(np.percentile(means, 97.5), rel=1e-12)


@pytest.mark.parametrize(
    ("tokens", "largest"),
    [(5, 0.0), (10, 0.0), (11, 1 - math.log(10) / math.log(11)), (100, 0.5), (10**9, 0.7)],
)
def test_the_largest_trusted_index_grows_with_the_tokens(tokens, largest):
    assert statistics.trusted_k(tokens) == pytest.approx(largest, abs=1e-12)


@pytest.mark.parametrize(
    ("k", "infinite"), [(None, False), (0.5, False), (0.51, True), (-1.0, False)]
)
def test_a_variance_is_infinite_above_one_half(k, infinite):
    assert infinite_variance(Tail(ratio="r", k=k, threshold=0.7)) is infinite
    assert not infinite_variance(None)


def by_the_paper(log_weights: list[float]) -> float:
    """Zhang and Stephens (2009) with the prior of Vehtari et al. (2024), term by term."""
    n = len(log_weights)
    tail = int(min(0.2 * n, 3 * math.sqrt(n)))
    ordered = sorted(log_weights)
    x = [math.exp(l - ordered[-1]) - math.exp(ordered[-tail - 1] - ordered[-1]) for l in ordered]
    x = x[-tail:]
    m = 30 + math.floor(math.sqrt(tail))
    quartile = x[math.floor(tail / 4 + 0.5) - 1]
    theta = [1 / x[-1] + (1 - math.sqrt(m / (i - 0.5))) / (3 * quartile) for i in range(1, m + 1)]
    k = [sum(math.log(1 - t * y) for y in x) / tail for t in theta]
    profile = [tail * (math.log(-t / s) - s - 1) for t, s in zip(theta, k, strict=True)]
    weight = [1 / sum(math.exp(other - one) for other in profile) for one in profile]
    mean = sum(w * t for w, t in zip(weight, theta, strict=True))
    fitted = sum(math.log(1 - mean * y) for y in x) / tail
    return fitted * tail / (tail + 10) + 10 * 0.5 / (tail + 10)


@pytest.mark.parametrize("size", [100, 226, 900])
@pytest.mark.parametrize("scale", [0.2, 0.9, 2.5])
def test_a_tail_is_fitted_as_the_paper_says(size, scale):
    log_weights = scale * np.random.default_rng(size).standard_exponential(size)
    found = tail_index("policy/sampler", log_weights)
    assert found.k == pytest.approx(by_the_paper(list(log_weights)), rel=1e-9)
    assert found.ratio == "policy/sampler" and found.unfitted == ""
    assert found.threshold == statistics.trusted_k(size)
    shifted = tail_index("policy/sampler", log_weights + 300)
    assert shifted.k == pytest.approx(found.k, rel=1e-6), "a ratio's scale has no tail"


def test_what_has_no_tail_to_fit():
    fine = np.random.default_rng(0).standard_normal(100)
    few = tail_index("r", fine[:99])
    assert (few.ratio, few.k, few.unfitted) == ("r", None, "too few tokens")
    assert few.threshold == statistics.trusted_k(99)
    equal = tail_index("r", np.where(np.arange(100) < 70, fine - 9, 1.0))
    assert (equal.ratio, equal.k, equal.unfitted) == ("r", None, "largest values equal")
    assert equal.threshold == 0.5
    steps = np.r_[np.zeros(95), np.arange(1.0, 6.0)]
    assert tail_index("r", steps).k is not None, "five values above the others"
    assert tail_index("r", np.r_[0.0, steps[:-1]]).k is None
    for step, fitted in ((0.9e-9, False), (1.1e-9, True)):  # of the twenty largest
        nearly = 5.0 + np.r_[np.full(80, -9.0), np.linspace(0.0, step, 20)]
        assert (tail_index("r", nearly).k is not None) is fitted
