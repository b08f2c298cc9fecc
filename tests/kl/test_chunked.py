"""Divergences from hidden states against the naive form: values, gradients, masks and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kl_term.kl import divergences
from kl_term.kl.chunked import (
    Chunks,
    Head,
    divergences_from_hidden,
    entropy_from_hidden,
    reverse_kl_from_hidden,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
UNEVEN = Chunks(tokens=3, vocab=7)


def drawn(dtype=torch.float64, *, tokens=10, vocab=23, width=5, ref_width=4, bias=True, scale=1.0):
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    head = Head(normal(vocab, width), normal(vocab) if bias else None, 0.7)
    ref_head = Head(normal(vocab, ref_width), normal(vocab) if bias else None, 1.3)
    return normal(tokens, width), head, normal(tokens, ref_width), ref_head


def leaves(hidden, head):
    hidden, weight, bias = (x.detach().clone().requires_grad_() for x in (hidden, *head[:2]))
    return hidden, Head(weight, bias, head.temperature)


def naive_logits(hidden, head):
    return (hidden @ head.weight.T + (0 if head.bias is None else head.bias)) / head.temperature


def naive(hidden, head, ref_hidden, ref_head):
    logits, ref_logits = naive_logits(hidden, head), naive_logits(ref_hidden, ref_head)
    return (
        divergences.reverse_kl(logits, ref_logits),
        divergences.forward_kl(logits, ref_logits),
        divergences.entropy(logits),
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunks", [UNEVEN, Chunks(1, 1), Chunks(100, 100)], ids=str)
def test_values(dtype, chunks):
    inputs = drawn(dtype, scale=0.6)
    exact = naive(*drawn(torch.float64, scale=0.6)) if dtype == torch.float64 else naive(*inputs)
    chunked = divergences_from_hidden(*inputs, chunks=chunks)
    for value, expected in zip(chunked, exact, strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert (chunked.reverse - chunked.forward).abs().min() > 1e-3


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients(dtype):
    hidden, head, ref_hidden, ref_head = drawn(dtype, scale=0.6)
    weights = torch.randn(3, len(hidden), generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = []
    for function in (naive, divergences_from_hidden):
        leaf, leaf_head = leaves(hidden, head)
        options = {"chunks": UNEVEN} if function is divergences_from_hidden else {}
        values = function(leaf, leaf_head, ref_hidden, ref_head, **options)
        total = sum((w * v).sum() for w, v in zip(weights, values, strict=True))
        grads.append(torch.autograd.grad(total, [leaf, leaf_head.weight, leaf_head.bias]))
    for expected, gradient in zip(*grads, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert (gradient + expected).abs().max() > 0.1


#: As functions of all inputs.
ALONE = {
    "reverse": reverse_kl_from_hidden,
    "forward": lambda *inputs, **how: divergences_from_hidden(*inputs, **how).forward,
    "entropy": lambda hidden, head, ref_hidden, ref_head, **how: entropy_from_hidden(
        hidden, head, **how
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_divergence_alone_by_finite_differences(name):
    hidden, head, ref_hidden, ref_head = drawn(tokens=4, vocab=9, width=3)
    leaf, leaf_head = leaves(hidden, head)

    def alone(hidden, weight, bias):
        at = Head(weight, bias, head.temperature)
        return ALONE[name](hidden, at, ref_hidden, ref_head, chunks=UNEVEN)

    assert torch.autograd.gradcheck(alone, (leaf, *leaf_head[:2]))
    expected = naive(hidden, head, ref_hidden, ref_head)[list(ALONE).index(name)]
    torch.testing.assert_close(alone(leaf, *leaf_head[:2]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("every", [3, 1], ids=["some", "all"])
def test_masked_tokens_leave_no_trace(every):
    hidden, head, ref_hidden, ref_head = drawn()
    mask = torch.arange(len(hidden)) % every != 0
    kept, kept_head = leaves(hidden[mask], head)
    reverse_kl_from_hidden(kept, kept_head, ref_hidden[mask], ref_head).sum().backward()
    hidden[~mask], ref_hidden[~mask] = torch.nan, torch.inf
    leaf, leaf_head = leaves(hidden, head)
    values = reverse_kl_from_hidden(leaf, leaf_head, ref_hidden, ref_head, mask=mask, chunks=UNEVEN)
    values.sum().backward()
    assert (values[~mask] == 0).all() and (leaf.grad[~mask] == 0).all()
    torch.testing.assert_close(leaf.grad[mask], kept.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(leaf_head.weight.grad, kept_head.weight.grad, rtol=0, atol=1e-12)


def test_batch_axes_and_missing_bias():
    hidden, head, ref_hidden, ref_head = drawn(bias=False, tokens=12)
    flat = reverse_kl_from_hidden(hidden, head, ref_hidden, ref_head)
    shaped = reverse_kl_from_hidden(
        hidden.view(3, 4, -1), head, ref_hidden.view(3, 4, -1), ref_head, chunks=UNEVEN
    )
    torch.testing.assert_close(shaped, flat.view(3, 4), rtol=0, atol=1e-12)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_only_rounded_at_the_ends(half):
    inputs = drawn(half)
    wide = [
        Head(*(x.double() if isinstance(x, torch.Tensor) else x for x in item))
        if isinstance(item, Head)
        else item.double()
        for item in inputs
    ]
    value = reverse_kl_from_hidden(*inputs, chunks=UNEVEN)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), naive(*wide)[0], rtol=1e-5, atol=1e-5)
    in_half = naive_logits(inputs[0], inputs[1]).log_softmax(-1)  # what rounding logits would do
    exact = naive_logits(wide[0], wide[1]).log_softmax(-1)
    assert (in_half.double() - exact).abs().max() > 1e-3
    hidden, head, ref_hidden, ref_head = inputs
    leaf, leaf_head = leaves(hidden, head)
    reverse_kl_from_hidden(leaf, leaf_head, ref_hidden, ref_head).sum().backward()
    assert leaf.grad.dtype == leaf_head.weight.grad.dtype == half


def test_large_logits_do_not_overflow():
    inputs = drawn(torch.float32, scale=12.0)
    exact = naive(*drawn(torch.float64, scale=12.0))
    chunked = divergences_from_hidden(*inputs, chunks=UNEVEN)
    assert exact[0].max() > 100
    for value, expected in zip(chunked, exact, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-3)


def test_frozen_unembedding_gets_no_gradient():
    hidden, head, ref_hidden, ref_head = drawn()
    leaf = hidden.clone().requires_grad_()
    reverse_kl_from_hidden(leaf, head, ref_hidden, ref_head).sum().backward()
    assert leaf.grad.abs().max() > 0.1 and head.weight.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ref_hidden": torch.zeros(9, 4)}, "ref_hidden is for tokens"),
        ({"ref_head": Head(torch.zeros(22, 4))}, "ref_head has 22 tokens but head has 23"),
        ({"head": Head(torch.zeros(23, 6))}, "hidden has shape"),
        ({"head": Head(torch.zeros(23, 5), temperature=0.0)}, "head.temperature must be"),
        ({"head": Head(torch.zeros(23, 5, dtype=torch.long))}, "head.weight must be a floating"),
        ({"head": Head(torch.zeros(23, 5), torch.zeros(22))}, "head.bias has shape"),
        ({"mask": torch.ones(9)}, "mask has shape"),
        ({"chunks": Chunks(tokens=0)}, "chunks.tokens must be"),
        ({"head": torch.nn.Linear(5, 23)}, r"head must be Head\(weight, bias, .*got Linear"),
        ({"ref_head": torch.nn.Linear(4, 23)}, "ref_head must be Head"),
    ],
)
def test_refusals(change, message):
    names = ("hidden", "head", "ref_hidden", "ref_head")
    arguments = {**dict(zip(names, drawn(torch.float32), strict=True)), **change}
    with pytest.raises(ValueError, match=message):
        reverse_kl_from_hidden(**arguments)


#: One tensor [tokens, vocab] of float32 is 0.6 GB at 1024 tokens; the naive form holds about ten.
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
import torch
from kl_term.kl import divergences
from kl_term.kl.chunked import Head, reverse_kl_from_hidden
torch.manual_seed(0)
hidden, ref_hidden = torch.randn(2, {tokens}, 16)
hidden.requires_grad_()
weight, ref_weight = 0.3 * torch.randn(2, 152_064, 16)
weight.requires_grad_()
if {chunked}:
    values = reverse_kl_from_hidden(hidden, Head(weight), ref_hidden, Head(ref_weight))
else:
    values = divergences.reverse_kl(hidden @ weight.T, ref_hidden @ ref_weight.T)
values.mean().backward()
with torch.no_grad():
    few = divergences.reverse_kl(hidden[:4] @ weight.T, ref_hidden[:4] @ ref_weight.T)
assert torch.allclose(values[:4], few, rtol=1e-5), (values[:4], few)
assert weight.grad.norm() > 0 and hidden.grad.isfinite().all()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "naive"])
def test_a_large_vocabulary_fits_into_four_gigabytes(chunked):
    child = subprocess.run(
        [sys.executable, "-c", LIMITED.format(chunked=chunked, tokens=1024 if chunked else 2048)],
        capture_output=True,
        text=True,
        check=False,
    )
    if chunked:
        assert child.returncode == 0, child.stderr
    else:
        assert child.returncode != 0
        assert "allocate memory" in child.stderr or "MemoryError" in child.stderr, child.stderr


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_products(half):
    """Close to the reference, rounded products were worth more than the whole KL."""
    hidden, head, ref_hidden, ref_head = drawn(torch.float32, ref_width=5)
    ref_hidden, ref_head = hidden + 0.01 * ref_hidden, head
    results = []
    for enabled in (False, True):
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", dtype=half, enabled=enabled):
            value = reverse_kl_from_hidden(leaf, head, ref_hidden, ref_head)
            assert value.dtype == torch.float32
            value.sum().backward()
        results.append((value.detach(), leaf.grad))
    for plain, cast in zip(*results, strict=True):
        torch.testing.assert_close(cast, plain, rtol=0, atol=0)
