"""What the full vocabulary costs and removes: counts by hand, enumeration by brute force."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters import ch15_full_vocabulary as study
from kl_term.kl.chunked import Chunks
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.estimators import k2, k3

#: Published parameter counts, embeddings included.
PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "Llama-2-7B": 6_738_415_616,
    "Qwen2.5-7B": 7_615_616_512,
}


def test_shapes_give_the_published_numbers_of_parameters():
    for name, model in study.MODELS.items():
        assert study.parameters(model) == pytest.approx(PARAMETERS[name], rel=5e-4)


def test_extra_operations():
    table = study.operations_table().set_index("model")
    head, vocab = 576 * 49_152, 49_152
    body = 30 * (2 * 576 * 64 * (9 + 3) + 3 * 576 * 1536)
    by_hand = (4 * head + 10 * vocab) / (8 * (body + head))
    assert table.chunked["SmolLM2-135M"] == pytest.approx(by_hand)
    assert (table.stored < 0.01 * table.chunked).all()


def test_memory_is_what_the_vocabulary_makes_it():
    table = study.memory_table(tokens=100, tensors=8.0).set_index("model")
    assert table.one["Qwen2.5-7B"] == 4 * 100 * 152_064
    assert table.naive["Qwen2.5-7B"] == 8 * table.one["Qwen2.5-7B"]
    by_vocabulary = {}
    for vocab in (10, 10_000):
        model = study.MODELS["SmolLM2-135M"].model_copy(update={"vocab_size": vocab})
        found = study.memory_table({"": model}, tokens=100, tensors=8.0)
        (by_vocabulary[vocab],) = found.chunked
    assert by_vocabulary[10] == by_vocabulary[10_000]


def test_blocks_hold_what_was_measured():
    row = study.recorded().set_index(["method", "vocab"]).loc["chunked", 152_064]
    measured = row.peak_bytes - 4 * 152_064 * row.width  # the gradient of the unembedding
    assert study.block_bytes(int(row.width), Chunks()) == pytest.approx(measured, rel=0.3)


SHAPE = {"width": 3, "exponent": 1.0, "sharpness": 1.0, "drift": 0.5, "seed": 4}


@pytest.mark.parametrize(
    ("variant", "estimator", "divergence"), [("k2", k2, reverse_kl), ("k3", k3, forward_kl)]
)
def test_variance_parts_against_every_sample(variant, estimator, divergence):
    """Each state and token in turn, gradients by autograd through the product with the weight."""
    batch = study.language_like(4, 5, **SHAPE)
    weight = torch.linalg.lstsq(batch.hidden, batch.logits).solution.T  # [V, d]; the rest is bias
    bias = batch.logits - batch.hidden @ weight.T
    samples, probabilities, means = [], [], []
    for state in range(4):
        leaf = weight.clone().requires_grad_()
        logits = leaf @ batch.hidden[state] + bias[state]
        logp, ref_logp = logits.log_softmax(-1), batch.ref_logits[state].log_softmax(-1)
        (exact,) = torch.autograd.grad(
            divergence(logits, batch.ref_logits[state]), leaf, retain_graph=True
        )
        means.append(exact)
        for token in range(5):
            loss = estimator(logp[token], ref_logp[token])
            samples.append(torch.autograd.grad(loss, leaf, retain_graph=True)[0])
            probabilities.append(logp[token].exp().item() / 4)
    probability, sample = torch.tensor(probabilities).double(), torch.stack(samples)
    mean = torch.einsum("n,nvd->vd", probability, sample)
    total = probability @ (sample - mean).square().sum((-1, -2))
    between = (torch.stack(means) - mean).square().sum((-1, -2)).mean()
    parts = study.variance_parts(batch, variant=variant)
    assert parts["between"] == pytest.approx(between.item())
    assert parts["within"] == pytest.approx((total - between).item())
    assert parts["within"] > 0.1 * parts["between"]


def test_on_the_gpu_blocks_save_memory_and_cost_time():
    found = study.recorded(study.RECORDED_GPU).set_index(["method", "vocab"])
    blocks, stored = (found.loc[name].sort_index().iloc[-1] for name in ("chunked", "naive"))
    assert blocks["peak_bytes"] < 0.1 * stored["peak_bytes"]
    assert blocks["seconds"] > 1.5 * stored["seconds"]
