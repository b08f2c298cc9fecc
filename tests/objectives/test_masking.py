"""Sequence masking against its sentence, and its refusals."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.objectives.masking import off_policy_sequence_mask

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
OLD = torch.full((4, 3), -1.0, dtype=torch.float64)
# mean log(old / policy) per row: 0.4, 0.4 (padding would make it larger), -0.4, empty
LOGP = torch.tensor(
    [[-1.4, -1.9, -0.9], [-1.2, -1.6, -9.0], [-0.6, -0.6, -0.6], [-5.0, -5.0, -5.0]]
).double()


@pytest.mark.parametrize(
    ("advantages", "delta", "kept"),
    [
        ([-1.0, -1.0, -1.0, -1.0], 0.3, [False, False, True, False]),
        ([-1.0, 1.0, -1.0, 1.0], 0.3, [False, True, True, False]),
        ([0.0, -1.0, -1.0, -1.0], 0.3, [True, False, True, False]),
        ([-1.0, -1.0, -1.0, -1.0], 0.41, [True, True, True, False]),
        ([-1.0, -1.0, -1.0, -1.0], math.inf, [True, True, True, False]),
    ],
)
def test_rows(advantages, delta, kept):
    result = off_policy_sequence_mask(
        LOGP, OLD, torch.tensor(advantages).double(), MASK, delta=delta
    )
    assert result.any(-1).tolist() == kept
    assert (result & ~MASK).sum() == 0
    assert (result == (MASK & torch.tensor(kept).unsqueeze(-1))).all()


def test_the_sign_of_the_log_ratio_matters():
    negative = torch.full((4,), -1.0, dtype=torch.float64)
    swapped = off_policy_sequence_mask(OLD, LOGP, negative, MASK, delta=0.3)
    assert swapped.any(-1).tolist() == [True, True, False, False]
