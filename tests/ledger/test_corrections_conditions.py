"""Counterexamples to statements whose page had dropped a condition (book/corrections.yaml)."""

from __future__ import annotations

import pytest
import torch

EXACT = 1e-12


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_logged_by_completion_k1_and_k3_need_not_agree_on_fresh_samples():
    """By hand: an answer ends at its first token or has two; the policy goes on more often."""
    stop, ref_stop = 0.10, 0.15
    chance, ref = numbers(stop, 1 - stop), numbers(ref_stop, 1 - ref_stop)
    length, l = numbers(1, 2), (chance / ref).log()  # the second token is certain under both
    logs = {"k1": l, "k3": torch.expm1(-l) + l}
    total, tokens = (chance @ l).item(), (chance @ length).item()
    for values in logs.values():
        assert (chance @ values).item() / tokens == pytest.approx(total / tokens)
    by_completion = {name: (chance @ (values / length)).item() for name, values in logs.items()}
    assert by_completion["k1"] < 0 < total / tokens < 0.6 * by_completion["k3"]
    assert by_completion["k3"] - by_completion["k1"] == pytest.approx((ref_stop - stop) / 2)
