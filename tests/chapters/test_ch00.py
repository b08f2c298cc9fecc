"""Chapter 0: the table of gradients by hand, on other tokens than the page's."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters.ch00_start import draw_pulls, expected_gradients

POLICY = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def test_the_gradients_are_those_of_the_formulas():
    table = expected_gradients(POLICY, REFERENCE)
    log_ratio = (POLICY / REFERENCE).log()
    by_hand = {
        "reverse KL": POLICY * (log_ratio - (POLICY * log_ratio).sum()),
        "forward KL": POLICY - REFERENCE,
        "k1 as a loss": torch.zeros(3),
    }
    by_hand["k2 as a loss"] = by_hand["reverse KL"]
    by_hand["k3 as a loss"] = by_hand["forward KL"]
    assert set(table.index) == set(by_hand)
    for name, gradient in by_hand.items():
        assert table.loc[name].to_list() == pytest.approx(gradient.tolist(), abs=1e-12)
    assert table.loc["k2 as a loss"].to_list() != pytest.approx((-by_hand["reverse KL"]).tolist())


def test_the_figure_draws_steps_against_the_gradient():
    above, below = draw_pulls(POLICY, REFERENCE).axes
    assert [bar.get_height() for bar in above.patches[:3]] == pytest.approx(POLICY.tolist())
    k3 = [bar.get_height() for bar in below.patches[3:]]
    assert k3 == pytest.approx((REFERENCE - POLICY).tolist(), abs=1e-12)
