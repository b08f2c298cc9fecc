"""The weighted sum of scores against autograd, and the property every chapter leans on."""

from __future__ import annotations

import torch

from kl_term.kl.scores import expected_score


def test_expected_score_is_autograd_through_the_weighted_log_likelihood():
    generator = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    leaf = logits.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad((weights * leaf.log_softmax(-1)).sum(), leaf)
    torch.testing.assert_close(expected_score(logits, weights), expected, rtol=0, atol=1e-12)
    assert (expected_score(logits, -weights) - expected).abs().max() > 0.1


def test_entries_sum_to_zero_so_no_gradient_lowers_every_token():
    generator = torch.Generator().manual_seed(1)
    logits, weights = torch.rand(2, 9, 4, generator=generator, dtype=torch.float64)
    assert expected_score(logits, weights).sum(-1).abs().max() < 1e-14
