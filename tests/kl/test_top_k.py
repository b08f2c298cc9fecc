"""Sums over the top k: what each form is, where it is least, and what its gradient leaves out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.names import CORRECTIONS, DIRECTIONS
from kl_term.kl.top_k import support_divergence, top_k_divergence, top_k_tokens
from kl_term.kl.truncation import covered_kl, keep_top

EXACT = {"rtol": 0, "atol": 1e-12}
FULL = {"reverse": reverse_kl, "forward": forward_kl}


def drawn(vocab, seed, scale=2.0):
    """Policy and reference far apart, [V] each."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(2, vocab, generator=generator, dtype=torch.float64)


def by_hand(logits, ref_logits, tokens, direction, correction):
    """Plain arithmetic over a list of tokens."""
    of, other = (x.softmax(-1).tolist() for x in (logits, ref_logits))
    if direction == "forward":
        of, other = other, of
    mass, other_mass = (sum(x[a] for a in tokens) for x in (of, other))
    if correction == "renormalised":
        return sum(of[a] / mass * math.log(of[a] / mass / other[a] * other_mass) for a in tokens)
    total = sum(of[a] * math.log(of[a] / other[a]) for a in tokens)
    if correction == "unnormalised":
        total += other_mass - mass
    if correction == "tail" and len(tokens) < len(of):
        total += (1 - mass) * math.log((1 - mass) / (1 - other_mass))
    return total


def gradient(logits, ref_logits, **how):
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(top_k_divergence(leaf, ref_logits, **how), leaf)[0]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("support", ["reference", "policy"])
def test_values_by_hand(direction, correction, support):
    apart = []
    for vocab, seed in itertools.product((2, 5, 9), range(3)):
        logits, ref_logits = drawn(vocab, seed)
        order = (ref_logits if support == "reference" else logits).argsort(descending=True).tolist()
        for k in range(1, vocab + 1):
            how = {"top_k": k, "support": support, "correction": correction}
            value = top_k_divergence(logits, ref_logits, direction=direction, **how).item()
            expected = by_hand(logits, ref_logits, order[:k], direction, correction)
            assert value == pytest.approx(expected, abs=1e-12)
            if k == vocab:
                assert value == pytest.approx(FULL[direction](logits, ref_logits).item(), abs=1e-12)
        other = "forward" if direction == "reverse" else "reverse"
        how = {"top_k": 2, "support": support, "correction": correction}
        swapped = top_k_divergence(logits, ref_logits, direction=other, **how).item()
        apart.append(abs(swapped - by_hand(logits, ref_logits, order[:2], direction, correction)))
    assert max(apart) > 1e-2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_derivatives_by_finite_differences(direction):
    logits, ref_logits = drawn(6, 1)
    for correction, k in itertools.product(CORRECTIONS, (1, 3, 6)):
        how = {"top_k": k, "direction": direction, "correction": correction}
        leaf = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda z, how=how: top_k_divergence(z, ref_logits, **how), leaf
        )


def test_unnormalised_reverse_is_the_covered_kl():
    logits, ref_logits = drawn(8, 3)
    keep = keep_top(ref_logits, top_k=3)
    value = top_k_divergence(logits, ref_logits, top_k=3, correction="unnormalised")
    torch.testing.assert_close(value, covered_kl(logits, ref_logits, keep), **EXACT)


def test_ties_are_cut_at_the_lower_index():
    ref_logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert top_k_tokens(ref_logits, 2).tolist() == [1, 2]
    assert top_k_tokens(ref_logits, 5).tolist() == [1, 2, 3, 0, 4]
    assert (top_k_tokens(torch.zeros(3, 7), 4) == torch.arange(4)).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_order_of_the_forms(direction):
    """0 <= unnormalised <= tail <= full, growing with k; renormalised is part of all of them."""
    for seed in range(30):
        vocab = 2 + seed % 7
        logits, ref_logits = drawn(vocab, seed)
        full = FULL[direction](logits, ref_logits).item()
        before = {"unnormalised": 0.0, "tail": 0.0}
        for k in range(1, vocab + 1):
            value = {
                c: top_k_divergence(
                    logits, ref_logits, top_k=k, direction=direction, correction=c
                ).item()
                for c in CORRECTIONS
            }
            assert -1e-13 <= value["unnormalised"] <= value["tail"] + 1e-13
            assert value["tail"] <= full + 1e-13
            for name in before:
                assert value[name] >= before[name] - 1e-13
                before[name] = value[name]
            if k >= vocab - 1:
                assert value["tail"] == pytest.approx(full, abs=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_zero_exactly_where_the_policies_agree_on_the_support(direction):
    _, ref_logits = drawn(7, 5)
    reference = ref_logits.softmax(-1)
    tokens = top_k_tokens(ref_logits, 3)
    others = [a for a in range(7) if a not in tokens.tolist()]
    moved = reference.clone()
    moved[others] = reference[others].flip(0)  # another tail of the same mass
    for correction in ("unnormalised", "tail"):
        how = {"top_k": 3, "direction": direction, "correction": correction}
        assert top_k_divergence(moved.log(), ref_logits, **how).abs() < 1e-15
        assert gradient(moved.log(), ref_logits, **how).abs().max() < 1e-15
        shifted = reference.clone()
        shifted[tokens] *= 0.7
        assert top_k_divergence(shifted.log(), ref_logits, **how) > 1e-4
    how = {"top_k": 3, "direction": direction, "correction": "none"}
    assert gradient(reference.log(), ref_logits, **how).abs().max() > 1e-2


def test_forbidden_tokens_and_a_reference_that_forbids():
    reference = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64).log()
    policy = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).log()
    for correction in ("none", "tail"):
        value = top_k_divergence(policy, reference, top_k=2, correction=correction)
        assert value.item() == pytest.approx(math.log(1 / 0.6))
    allowed = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    backwards = {"top_k": 2, "direction": "forward", "correction": "none"}
    assert top_k_divergence(policy, allowed, **backwards) == torch.inf
    leaf = policy.clone().requires_grad_()
    value = top_k_divergence(leaf, reference, top_k=2)
    assert torch.autograd.grad(value, leaf)[0][:2].isfinite().all()


def test_log_probs_of_a_server_are_enough():
    logits, ref_logits = drawn(9, 2).unsqueeze(1)
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    tokens = top_k_tokens(ref_logits, 4).flip(-1)  # in any order
    for direction, correction in itertools.product(DIRECTIONS, CORRECTIONS):
        how = {"direction": direction, "correction": correction}
        value = support_divergence(logp.gather(-1, tokens), ref_logp.gather(-1, tokens), **how)
        expected = top_k_divergence(logits, ref_logits, top_k=4, **how)
        torch.testing.assert_close(value, expected, **EXACT)


def test_a_whole_mass_has_a_finite_tail():
    """Rounded to one, it leaves no minus infinity in value or gradient."""
    logp = torch.tensor([[0.5, 0.5], [0.7, 0.2]]).log().requires_grad_()
    ref_logp = torch.tensor([[0.7, 0.2], [0.5, 0.5]]).log()
    for direction in DIRECTIONS:
        value = support_divergence(logp, ref_logp, direction=direction)
        assert value.isfinite().all()
        assert torch.autograd.grad(value.sum(), logp)[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k must be between 1 and 4"),
        ({"top_k": 5}, "top_k must be between 1 and 4"),
        ({"direction": "both"}, "direction must be"),
        ({"support": "teacher"}, "support must be"),
        ({"correction": "clamped"}, "correction must be"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        top_k_divergence(torch.zeros(4), torch.zeros(4), **{"top_k": 2, **change})
