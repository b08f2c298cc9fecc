"""Weights between trainer and sampler, by enumeration of all completions of two tokens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kl_term.objectives.mismatch import CORRECTIONS, LEVELS, mismatch_weight

V, T = 3, 2
COMPLETIONS = torch.tensor(list(itertools.product(range(V), repeat=T)))


def policy(seed):
    """Log-probs [N, T] of every completion under a policy whose second token heeds the first."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(V, generator=generator, dtype=torch.float64).log_softmax(-1)
    second = torch.randn(V, V, generator=generator, dtype=torch.float64).log_softmax(-1)
    a, b = COMPLETIONS.T
    return torch.stack([first[a], second[a, b]], dim=-1)


TRAINER, SAMPLER = policy(0), policy(3)
EVERY = torch.ones(V**T, T, dtype=torch.bool)
F = torch.randn(V**T, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def weights(**options):
    return mismatch_weight(TRAINER, SAMPLER, EVERY, **options)


def under(logp, values):
    return (logp.sum(-1).exp() * values).sum()


@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_without_a_bound_the_weight_of_the_completion_is_unbiased(kind):
    exact = weights(kind=kind, bound=math.inf, level="sequence")
    assert torch.allclose(exact[:, 0], exact[:, 1], rtol=0, atol=1e-15)
    assert torch.isclose(under(SAMPLER, exact[:, 0] * F), under(TRAINER, F), rtol=0, atol=1e-14)
    assert (under(SAMPLER, F) - under(TRAINER, F)).abs() > 0.05
    inverted = mismatch_weight(SAMPLER, TRAINER, EVERY, kind=kind, bound=math.inf, level="sequence")
    assert (under(SAMPLER, inverted[:, 0] * F) - under(TRAINER, F)).abs() > 0.05


@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_without_a_bound_the_weight_of_a_token_is_unbiased_at_the_sampler_s_states(kind):
    exact = weights(kind=kind, bound=math.inf)
    last = COMPLETIONS[:, 1].double()
    mixed = torch.stack([SAMPLER[:, 0], TRAINER[:, 1]], dim=-1)  # sampler's state, trainer's token
    assert torch.isclose(under(SAMPLER, exact[:, 1] * last), under(mixed, last), rtol=0, atol=1e-14)
    assert (under(SAMPLER, exact[:, 1] * last) - under(TRAINER, last)).abs() > 1e-3


@pytest.mark.parametrize("level", LEVELS)
def test_a_bound_costs_bias_and_buys_variance(level):
    moments = {}
    for kind in ("truncated", "masked"):
        for bound in (1.5, math.inf):
            weight = weights(kind=kind, bound=bound, level=level)[:, 0]
            mean = under(SAMPLER, weight)
            moments[kind, bound] = (mean, under(SAMPLER, (weight - mean) ** 2))
    for kind in ("truncated", "masked"):
        assert moments[kind, math.inf][0] == pytest.approx(1.0)
        assert moments[kind, 1.5][0] < 0.99
        assert moments[kind, 1.5][1] < moments[kind, math.inf][1]
    assert moments["masked", 1.5][0] < moments["truncated", 1.5][0]


def test_weights_by_hand():
    old = torch.log(torch.tensor([[0.6, 0.2, 0.1, 0.5]], dtype=torch.float64))
    drawn = torch.log(torch.tensor([[0.2, 0.4, 0.1, 0.1]], dtype=torch.float64))  # 3, 1/2, 1, 5
    mask = torch.tensor([[True, True, True, False]])
    of = lambda **options: mismatch_weight(old, drawn, mask, **options).flatten().tolist()
    assert of(kind="none") == [1, 1, 1, 0]
    assert of(kind="truncated", bound=2.0) == pytest.approx([2, 0.5, 1, 0])
    assert of(kind="masked", bound=2.5) == pytest.approx([0, 0.5, 1, 0])
    assert of(kind="masked", bound=1.9) == pytest.approx([0, 0, 1, 0])
    assert of(kind="truncated", level="sequence", bound=2.0) == pytest.approx([1.5, 1.5, 1.5, 0])
    assert of(kind="truncated", level="sequence", bound=1.2) == pytest.approx([1.2, 1.2, 1.2, 0])
    assert of(kind="masked", level="sequence", bound=1.2) == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_no_gradient_and_no_weight_where_masked(kind, level):
    mask = torch.ones_like(EVERY)
    mask[2:, 1] = False
    old = TRAINER.clone().requires_grad_()
    weight = mismatch_weight(old, SAMPLER, mask, kind=kind, level=level)
    assert not weight.requires_grad and (weight[~mask] == 0).all()


def test_a_large_ratio_does_not_overflow():
    old, drawn = torch.tensor([[0.0, 0.0]]), torch.tensor([[-1000.0, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert mismatch_weight(old, drawn, mask, kind="masked").tolist() == [[0.0, 1.0]]
    truncated = mismatch_weight(old, drawn, mask, kind="truncated")
    assert torch.allclose(truncated, torch.tensor([[2.0, 1.0]]), rtol=0, atol=1e-6)
