"""Chapter 14: forms of k3 against exact rational arithmetic, edges against their equations."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from analysis.chapters.ch14_frameworks import claims_on_k3, clamps, digits
from kl_term.kl.estimators import k2, k3


def by_series(log_ratio: float) -> float:
    """k3 of a small float, summed exactly: sum over n >= 2 of d^n / n!, d = -log_ratio."""
    d, term, total = Fraction(-log_ratio), Fraction(1), Fraction(0)
    for n in range(1, 12):
        term = term * d / n
        total += term if n >= 2 else 0
    return float(total)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_all_errors_are_measured_against_is_exact(dtype):
    rounded = digits.small_log_ratios(count=5).to(digits.DTYPES[dtype]).double()
    exact = [by_series(value) for value in rounded.tolist()]
    found = k3(rounded, torch.zeros_like(rounded))
    torch.testing.assert_close(found, torch.tensor(exact, dtype=torch.float64), rtol=1e-10, atol=0)


def test_only_the_widened_form_keeps_its_digits_and_its_sign():
    near = digits.small_log_ratios()
    for dtype in ("bfloat16", "float16", "float32"):
        of = {
            name: digits.relative_errors(form, digits.DTYPES[dtype], near).median().item()
            for name, form in digits.FORMS.items()
        }
        assert of["widened"] < 1e-3 < of["naive"], dtype
        assert digits.negative_share(digits.FORMS["widened"], digits.DTYPES[dtype], near) == 0
    assert digits.negative_share(digits.FORMS["naive"], torch.bfloat16, near) > 0


def test_dead_zones_begin_where_the_clamped_value_is_reached():
    zones = clamps.clamped_ratios().set_index("estimator")["ratio"]
    assert zones["k2"] == pytest.approx(math.exp(math.sqrt(20)))
    r = zones["k3"]
    assert r - 1 - math.log(r) == pytest.approx(10)
    for estimator, edge in ((k2, zones["k2"]), (k3, zones["k3"])):
        around = -torch.tensor([edge * 0.99, edge * 1.01], dtype=torch.float64).log()
        alive, dead = clamps.clamped_coefficient(around, estimator, value_bound=10.0).tolist()
        assert alive < 0.0 and dead == 0.0, "it pulls the token up until the clamp binds"


def test_overflow_is_where_the_type_ends():
    for name in ("float16", "float32", "float64"):
        dtype = digits.DTYPES[name]
        edge = digits.overflow_threshold(dtype)
        assert edge == pytest.approx(math.log(torch.finfo(dtype).max), rel=1e-3)


def test_the_printed_line_is_k3_and_no_expansion(monkeypatch):
    assert claims_on_k3.the_printed_line_is_k3().verdict == "holds"
    expansion = claims_on_k3.the_printed_line_is_a_second_order_expansion()
    assert expansion.verdict == "fails"
    assert expansion.figures["ratio_far"] == pytest.approx((math.exp(5) - 6) / 12.5, rel=1e-12)
    monkeypatch.setattr(claims_on_k3, "naive_k3", lambda logp, ref_logp: k3(ref_logp, logp))
    assert claims_on_k3.the_printed_line_is_k3().verdict == "fails"


def test_the_slope_of_the_coefficient_of_k3_by_hand():
    slope = claims_on_k3.the_printed_line_is_stabler_and_smoother().figures["slope_k3"]
    assert slope == pytest.approx(math.exp(5), rel=1e-6)


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7])
def test_expm1_in_float32_loses_all_digits_near_enough_to_the_reference(size):
    near = digits.small_log_ratios(size, 1.5 * size)
    median = digits.relative_errors(digits.FORMS["expm1"], torch.float32, near).median().item()
    predicted = 2**-24 / (size / 2)
    assert predicted / 10 < median < predicted
    assert (median > 0.1) == (size < 1e-6)
    assert digits.negative_share(digits.FORMS["expm1"], torch.float32, near) == 0
