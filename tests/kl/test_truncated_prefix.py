"""A cap and a window on the prefix ratio: what they cost the gradient, and the bounds on it."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.kl.credit import credit_moments, sample_gradients
from kl_term.kl.importance import importance_ratio
from kl_term.kl.prefix import prefix_coefficients
from kl_term.kl.sequences import sequence_probability, visited_kl_gradient
from kl_term.kl.truncated_prefix import truncated_prefix_coefficients, windowed_ratio
from tests.kl.test_prefix import World
from tests.trees import draw


@pytest.fixture(params=[(2, 6, None), (3, 4, 2), (4, 3, 1)], ids=["fixed", "ragged", "wide"])
def world(request):
    return World(*request.param, stale=True)


class Parts:
    """Y_t, what token t adds to the gradient under ratio 1, and the laws that it is averaged by."""

    def __init__(self, world, window):
        mask = world.mask
        self.length = mask.shape[1]
        self.logp, self.ref_logp, self.old_logp = (
            x.detach() for x in (world.logp, world.ref_logp, world.old_logp)
        )
        log_ratio = torch.where(mask, self.logp - self.ref_logp, 0.0)
        k3 = torch.expm1(-log_ratio) + log_ratio
        self.own, self.far = [], []
        for t in range(self.length):
            near = torch.zeros_like(log_ratio)
            near[:, max(0, t - window + 1) : t + 1] = k3[:, t : t + 1]
            near[:, t] += -torch.expm1(-log_ratio[:, t])
            past = torch.zeros_like(log_ratio)
            past[:, : max(0, t - window + 1)] = k3[:, t : t + 1]
            for kept, credit in ((self.own, near), (self.far, past)):
                credit = credit * mask[:, t : t + 1]
                each = sample_gradients(world.logits, world.sequences, credit).flatten(1)
                kept.append(each)
        self.policy = sequence_probability(world.logits, world.sequences)
        self.sampler = sequence_probability(world.old_logits, world.sequences)
        ratio = importance_ratio(self.logp, self.old_logp, mask, level="prefix")
        self.windowed = torch.stack(
            [
                ratio[:, t] / (ratio[:, t - window] if t >= window else 1.0)
                for t in range(self.length)
            ],
            -1,
        )

    def mixed(self, t):
        """[N]: drawn by the sampler but for the window up to t, where the policy draws."""
        return self.sampler * self.windowed[:, t]


def mean(world, **how):
    sampled = (x.detach() for x in (world.logp, world.ref_logp, world.old_logp))
    credit = truncated_prefix_coefficients(*sampled, world.mask, **how)
    moments = credit_moments(world.logits, world.sequences, credit, world.old_logits)
    return moments.mean.flatten()


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_the_ratio_and_the_coefficients_are_those_of_autograd(world, window):
    ratio = windowed_ratio(world.logp, world.old_logp, world.mask, window=window)
    steps = torch.where(world.mask, world.logp - world.old_logp, 0.0).detach().exp()
    for t in range(steps.shape[1]):
        product = steps[:, max(0, t - window + 1) : t + 1].prod(-1)
        torch.testing.assert_close(ratio[:, t].detach(), product, rtol=1e-12, atol=0)
    k3 = torch.expm1(-world.log_ratio) + world.log_ratio
    for cap in (0.8, 2.0, math.inf):
        value = ratio.detach().clamp(max=cap) * (ratio.log() - ratio.log().detach()).exp()
        loss = torch.where(world.mask, value * k3, 0.0).sum()
        (each,) = torch.autograd.grad(loss, world.logp, retain_graph=True)
        sampled = (world.logp, world.ref_logp, world.old_logp, world.mask)
        found = truncated_prefix_coefficients(*sampled, cap=cap, window=window)
        torch.testing.assert_close(each, found, rtol=1e-11, atol=1e-11)


def test_its_ends_are_the_token_ratio_and_the_prefix_ratio(world):
    sampled = tuple(x.detach() for x in (world.logp, world.ref_logp, world.old_logp))
    torch.testing.assert_close(
        truncated_prefix_coefficients(*sampled, world.mask),
        prefix_coefficients(*sampled, world.mask),
    )
    assert world.error(mean(world)) < 1e-12
    visited = visited_kl_gradient(world.logits, world.ref_logits, world.sequences, world.old_logits)
    torch.testing.assert_close(mean(world, window=1), visited.flatten(), rtol=0, atol=1e-12)
    assert world.error(mean(world, window=1)) > 1e-2


@pytest.mark.parametrize("window", [1, 2, 3])
def test_what_a_window_leaves_out(world, window):
    """The far past's credit, and the states that the sampler visits in place of the policy."""
    parts = Parts(world, window)
    expected = mean(world, window=window)
    bias = world.exact.flatten() - expected
    credit = sum(parts.policy @ far for far in parts.far)
    states = sum(parts.policy @ own - parts.mixed(t) @ own for t, own in enumerate(parts.own))
    torch.testing.assert_close(bias, credit + states, rtol=0, atol=1e-12)
    if window < parts.length:  # neither part is the whole of it
        assert (bias - credit).norm() > 1e-3
        assert credit.norm() > 1e-3


@pytest.mark.parametrize("window", [1, 2, 9])
@pytest.mark.parametrize("cap", [0.5, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("stale", [0.3, 1.5])
def test_the_bound_on_a_caps_bias_and_on_its_second_moment(world, window, cap, stale):
    world.old_logits = world.logits + stale * draw(*world.logits.shape, seed=9)
    rows, tokens = world.sequences.states, world.sequences.tokens
    world.old_logp = torch.where(world.mask, world.old_logits.log_softmax(-1)[rows, tokens], 0.0)
    parts = Parts(world, window)
    lost = mean(world, window=window) - mean(world, window=window, cap=cap)
    exact = torch.zeros_like(lost)
    hockey = markov = 0.0
    for t, own in enumerate(parts.own):
        ratio, law = parts.windowed[:, t], parts.mixed(t)
        share = (1 - cap / ratio).clamp(min=0)
        exact = exact + (law * share) @ own
        largest = own.norm(dim=-1).max()
        hockey += largest * (law @ share)
        markov += largest * (parts.sampler @ ratio.square()) / (4 * cap)
        capped = ratio.clamp(max=cap).square()
        second = parts.sampler @ (capped * own.square().sum(-1))
        assert second <= cap * (law @ own.square().sum(-1)) + 1e-12
    torch.testing.assert_close(lost, exact, rtol=0, atol=1e-12)
    assert lost.norm() <= hockey + 1e-12
    assert hockey <= markov + 1e-12


def test_a_window_as_long_as_the_memory_is_enough():
    """Where the next token's law does not see further back than the window, it costs nothing."""
    world = World(2, 6, None, stale=True)
    for table in (world.logits, world.ref_logits, world.old_logits):
        table[1:] = table[1]  # every token alike but the first
    rows, tokens = world.sequences.states, world.sequences.tokens
    sampled = [
        table.log_softmax(-1)[rows, tokens]
        for table in (world.logits, world.ref_logits, world.old_logits)
    ]
    credit = truncated_prefix_coefficients(*sampled, world.mask, window=1)
    moments = credit_moments(world.logits, world.sequences, credit, world.old_logits)
    exact = credit_moments(
        world.logits, world.sequences, prefix_coefficients(*sampled, world.mask), world.old_logits
    )
    by_position = lambda gradient: gradient[1:].sum(0)  # the rows that are one parameter
    assert not torch.allclose(moments.mean[1:], exact.mean[1:])
    torch.testing.assert_close(
        by_position(moments.mean), by_position(exact.mean), rtol=0, atol=1e-12
    )


def test_refusals():
    logp, mask = draw(2, 3, seed=1), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="window"):
        windowed_ratio(logp, logp, mask, window=0)
    with pytest.raises(ValueError, match="cap"):
        truncated_prefix_coefficients(logp, logp, logp, mask, cap=0.0)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 63, 64, None])
def test_a_dear_token_leaves_no_rounding_far_before_it(window):
    """In float32 a token of log-ratio -12 costs 160,000, whose last digit is a hundredth."""
    generator = torch.Generator().manual_seed(window or 0)
    logp, move, old = torch.randn(3, 4, 64, generator=generator) / 10
    ref_logp, mask = logp - move, torch.ones(4, 64, dtype=torch.bool)
    ref_logp[:, -1] = logp[:, -1] + 12
    given = (logp, ref_logp, logp - old / 10, mask)
    exact = truncated_prefix_coefficients(*(x.double() for x in given[:3]), mask, window=window)
    found = truncated_prefix_coefficients(*given, window=window)
    far = slice(0, 64 - (window or 64))
    assert torch.allclose(found[:, far].double(), exact[:, far], rtol=1e-5, atol=1e-6)
    assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-6)
