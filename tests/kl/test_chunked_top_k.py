"""Top-k sums from hidden states against the form with logits: values, gradients, masks, memory."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from kl_term.kl.chunked import Chunks, Head
from kl_term.kl.chunked_top_k import log_probs_from_hidden, top_k_divergence_from_hidden
from kl_term.kl.top_k import top_k_divergence
from tests.kl.test_chunked import UNEVEN, drawn, leaves, naive_logits

FORMS = list(
    itertools.product(
        ("reverse", "forward"),
        ("reference", "policy"),
        ("none", "unnormalised", "tail", "renormalised"),
    )
)


def naive(hidden, head, ref_hidden, ref_head, **how):
    return top_k_divergence(naive_logits(hidden, head), naive_logits(ref_hidden, ref_head), **how)


@pytest.mark.parametrize("top_k", [1, 5, 23])
@pytest.mark.parametrize(("direction", "support", "correction"), FORMS)
def test_values_and_gradients(direction, support, correction, top_k):
    hidden, head, ref_hidden, ref_head = drawn(scale=0.6)
    how = {"direction": direction, "support": support, "correction": correction, "top_k": top_k}
    weights = torch.linspace(1, 2, len(hidden), dtype=torch.float64)
    found = []
    for function, options in ((naive, {}), (top_k_divergence_from_hidden, {"chunks": UNEVEN})):
        leaf, leaf_head = leaves(hidden, head)
        value = function(leaf, leaf_head, ref_hidden, ref_head, **how, **options)
        by = torch.autograd.grad((weights * value).sum(), [leaf, leaf_head.weight, leaf_head.bias])
        found.append((value.detach(), *by))
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    if correction != "renormalised" or top_k > 1:  # which is zero of one token
        assert found[0][1].abs().max() > 1e-2


def test_masked_tokens_leave_no_trace():
    hidden, head, ref_hidden, ref_head = drawn()
    mask = torch.arange(len(hidden)) % 3 != 0
    expected = top_k_divergence_from_hidden(hidden[mask], head, ref_hidden[mask], ref_head, top_k=4)
    hidden[~mask], ref_hidden[~mask] = torch.nan, torch.inf
    leaf, leaf_head = leaves(hidden, head)
    values = top_k_divergence_from_hidden(leaf, leaf_head, ref_hidden, ref_head, top_k=4, mask=mask)
    values.sum().backward()
    assert (values[~mask] == 0).all() and (leaf.grad[~mask] == 0).all()
    torch.testing.assert_close(values[mask], expected, rtol=0, atol=1e-12)
    assert leaf_head.weight.grad.isfinite().all()


@pytest.mark.parametrize("chunks", [UNEVEN, Chunks(1, 1), Chunks(100, 100)], ids=str)
def test_ties_fall_as_in_the_form_with_logits(chunks):
    hidden, head, ref_hidden, ref_head = drawn(bias=False)
    ref_hidden = ref_hidden.round()  # whole numbers: products of any order tie exactly
    same = Head(ref_head.weight[torch.arange(23) // 4].round(), None, 1.0)
    for support in ("reference", "policy"):
        how = {"top_k": 3, "support": support, "correction": "none"}
        torch.testing.assert_close(
            top_k_divergence_from_hidden(hidden, head, ref_hidden, same, chunks=chunks, **how),
            naive(hidden, head, ref_hidden, same, **how),
            rtol=0,
            atol=1e-12,
        )


def test_log_probs_by_finite_differences_and_axes():
    hidden, head, *_ = drawn(tokens=4, vocab=9, width=3)
    tokens = torch.tensor([[0, 8, 3], [1, 2, 4], [5, 7, 6], [8, 0, 1]])
    leaf, leaf_head = leaves(hidden, head)

    def alone(hidden, weight, bias):
        return log_probs_from_hidden(hidden, Head(weight, bias, 0.7), tokens, chunks=UNEVEN)

    assert torch.autograd.gradcheck(alone, (leaf, *leaf_head[:2]))
    shaped = log_probs_from_hidden(hidden.view(2, 2, -1), head, tokens.view(2, 2, -1))
    expected = naive_logits(hidden, head).log_softmax(-1).gather(-1, tokens)
    torch.testing.assert_close(shaped.view(4, 3), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_widened_before_the_product(half):
    hidden, head, ref_hidden, ref_head = drawn(half)
    wide = [Head(*(x.double() for x in h[:2]), h.temperature) for h in (head, ref_head)]
    leaf, leaf_head = leaves(hidden, head)
    how = {"top_k": 5, "correction": "tail"}
    with torch.autocast("cpu", dtype=half):
        value = top_k_divergence_from_hidden(leaf, leaf_head, ref_hidden, ref_head, **how)
        value.sum().backward()
    assert value.dtype == torch.float32 and leaf.grad.dtype == leaf_head.weight.grad.dtype == half
    exact = naive(hidden.double(), wide[0], ref_hidden.double(), wide[1], **how)
    torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ref_hidden": torch.zeros(9, 4)}, "ref_hidden is for tokens"),
        ({"ref_head": Head(torch.zeros(22, 4))}, "ref_head has 22 tokens but head has 23"),
        ({"top_k": 0}, "top_k must be between 1 and 23"),
        ({"top_k": 24}, "top_k must be between 1 and 23"),
        ({"direction": "both"}, "direction must be"),
        ({"support": "teacher"}, "support must be"),
        ({"correction": "clamped"}, "correction must be"),
        ({"chunks": Chunks(vocab=0)}, "chunks.vocab must be"),
    ],
)
def test_refusals(change, message):
    names = ("hidden", "head", "ref_hidden", "ref_head")
    arguments = dict(zip(names, drawn(torch.float32), strict=True)) | {"top_k": 3} | change
    with pytest.raises(ValueError, match=message):
        top_k_divergence_from_hidden(**arguments)


def test_tokens_of_other_states_are_refused():
    hidden, head, *_ = drawn()
    with pytest.raises(ValueError, match="tokens has shape"):
        log_probs_from_hidden(hidden, head, torch.zeros(9, 2, dtype=torch.long))


#: Peak beyond what is loaded, at Qwen's vocabulary; one tensor [tokens, vocab] is 0.6 GB.
MEASURED = """
import resource
import torch
from kl_term.kl.chunked import Head
from kl_term.kl.chunked_top_k import top_k_divergence_from_hidden
from kl_term.kl.top_k import top_k_divergence
torch.manual_seed(0)
hidden, ref_hidden = torch.randn(2, 1024, 16)
hidden.requires_grad_()
weight, ref_weight = 0.3 * torch.randn(2, 152_064, 16)
weight.requires_grad_()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
value = top_k_divergence_from_hidden(
    hidden, Head(weight), ref_hidden, Head(ref_weight), top_k=64, support="{support}"
)
value.mean().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
with torch.no_grad():
    few = top_k_divergence(
        hidden[:4] @ weight.T, ref_hidden[:4] @ ref_weight.T, top_k=64, support="{support}"
    )
assert torch.allclose(value[:4], few, rtol=1e-4), (value[:4], few)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss differs elsewhere")
@pytest.mark.parametrize("support", ["reference", "policy"])
def test_memory_at_a_large_vocabulary(support):
    child = subprocess.run(
        [sys.executable, "-c", MEASURED.format(support=support)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert float(child.stdout) < 0.3  # GiB: half of one tensor of logits
