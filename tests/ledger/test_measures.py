"""How claims measure: extremes, quantiles, shares and errors, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.evidence import claims

VALUES = torch.tensor([[-9.0, 1.0, 2.0, 4.0], [3.0, 0.5, 8.0, -1.0]], dtype=torch.float64)


def test_the_largest_and_the_median():
    assert claims.largest(VALUES) == 9.0
    assert claims.median(VALUES) == 1.0  # of eight, the lower one in the middle


def test_percentiles_are_of_each_row_and_a_band_is_of_all():
    expected = np.quantile(VALUES.numpy(), [0.1, 0.5, 0.9], axis=-1)
    found = claims.percentiles(VALUES)
    assert list(found) == ["p10", "median", "p90"]
    np.testing.assert_allclose(torch.stack(list(found.values())), expected, atol=1e-15)
    expected = np.quantile(VALUES.numpy(), [0.1, 0.5, 0.9])
    np.testing.assert_allclose(list(claims.band(VALUES).values()), expected, atol=1e-15)
    assert list(claims.band(VALUES)) == ["p10", "median", "p90"]
    assert claims.percentiles(VALUES.float())["p10"].dtype == torch.float32


def test_a_share_of_events():
    assert claims.share(VALUES > 1.5) == pytest.approx(4 / 8)


def test_the_error_of_a_gradient_is_the_median_or_the_largest_of_its_rows():
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]], dtype=torch.float64)
    moved = exact + torch.tensor([[0.0, 0.5], [0.6, 0.0], [0.0, 0.2]], dtype=torch.float64)
    assert claims.error_of(moved, exact) == pytest.approx(0.2)  # 0.1, 0.3, 0.2 of their norms
    assert claims.error_of(moved, exact, worst=True) == pytest.approx(0.3)
