"""What the full vocabulary costs and removes: counts, enumeration by brute force, the record."""

from __future__ import annotations

import sys

import pytest
import torch

from analysis.experiments.chapters import vocabulary_benchmark as benchmark
from analysis.experiments.chapters import vocabulary_cost as cost
from analysis.experiments.chapters import vocabulary_noise as noise
from analysis.kl.chunked import Chunks
from analysis.kl.divergences import forward_kl, reverse_kl
from analysis.kl.estimators import k2, k3

#: Published parameter counts, embeddings included.
PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "Llama-2-7B": 6_738_415_616,
    "Qwen2.5-7B": 7_615_616_512,
}


def test_shapes_give_the_published_numbers_of_parameters():
    for model in cost.MODELS:
        assert model.parameters == pytest.approx(PARAMETERS[model.name], rel=5e-4)


def test_extra_operations():
    table = cost.operations_table().set_index("model")
    model = cost.MODELS[0]
    by_hand = (4 * model.head + 10 * model.vocab) / (8 * (model.body + model.head))
    assert table.chunked["SmolLM2-135M"] == pytest.approx(by_hand)
    assert (table.stored < 0.01 * table.chunked).all()


def test_memory_is_what_the_vocabulary_makes_it():
    table = cost.memory_table(tokens=100, tensors=8.0).set_index("model")
    assert table.one["Qwen2.5-7B"] == 4 * 100 * 152_064
    assert table.naive["Qwen2.5-7B"] == 8 * table.one["Qwen2.5-7B"]
    by_vocabulary = {}
    for vocab in (10, 10_000):
        model = cost.MODELS[0]._replace(vocab=vocab)
        (by_vocabulary[vocab],) = cost.memory_table([model], tokens=100, tensors=8.0).chunked
    assert by_vocabulary[10] == by_vocabulary[10_000]


def test_blocks_hold_what_was_measured():
    row = benchmark.recorded().set_index(["method", "vocab"]).loc["chunked", 152_064]
    measured = row.peak_bytes - 4 * 152_064 * row.width  # the gradient of the unembedding
    assert cost.block_bytes(int(row.width), Chunks()) == pytest.approx(measured, rel=0.3)


SHAPE = {"width": 3, "exponent": 1.0, "sharpness": 1.0, "drift": 0.5, "seed": 4}


@pytest.mark.parametrize(
    ("arm", "estimator", "divergence"), [("k2", k2, reverse_kl), ("k3", k3, forward_kl)]
)
def test_variance_parts_against_every_sample(arm, estimator, divergence):
    """Each state and token in turn, gradients by autograd through the product with the weight."""
    batch = noise.language_like(4, 5, **SHAPE)
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
    parts = noise.variance_parts(batch, arm=arm)
    assert parts["signal"] == pytest.approx(mean.square().sum().item())
    assert parts["between"] == pytest.approx(between.item())
    assert parts["within"] == pytest.approx((total - between).item())
    assert parts["within"] > 0.1 * parts["between"]


def test_noise_table_says_what_a_sampled_token_is_worth():
    table = noise.noise_table([8, 64], states=6, **SHAPE)
    total = table.within + table.between
    assert (table.tokens - total / table.between).abs().max() < 1e-12
    assert (1 - 1 / table.tokens - table.removed).abs().max() < 1e-12


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_methods_agree_on_what_they_measure():
    rows = {m: benchmark.measure(m, 3000, 64, 16) for m in ("naive", "chunked")}
    assert rows["chunked"]["value"] == pytest.approx(rows["naive"]["value"], rel=1e-5)
    assert all(row["seconds"] > 0 for row in rows.values())


def test_a_failed_child_is_named():
    with pytest.raises(RuntimeError, match="unheard_of at a vocabulary of 10 failed"):
        benchmark.measure("unheard_of", 10, 4, 4)


def test_the_record_is_whole():
    table = benchmark.recorded()
    by = table.set_index(["method", "vocab"])
    for vocab in benchmark.VOCABULARIES:
        assert by.value["chunked", vocab] == pytest.approx(by.value["naive", vocab], rel=1e-4)
        assert by.value["liger", vocab] == pytest.approx(by.value["naive", vocab], rel=1e-4)
        assert by.peak_bytes["chunked", vocab] < by.peak_bytes["naive", vocab]


def test_a_changed_record_is_refused(tmp_path, monkeypatch):
    for name in (benchmark.TABLE, "manifest.json"):
        (tmp_path / name).write_bytes((benchmark.RECORDED / name).read_bytes())
    monkeypatch.setattr(benchmark, "RECORDED", tmp_path)
    benchmark.recorded()
    (tmp_path / benchmark.TABLE).write_text("method,vocab\n")
    with pytest.raises(ValueError, match="changed since it was recorded"):
        benchmark.recorded()
    (tmp_path / benchmark.TABLE).unlink()
    with pytest.raises(ValueError, match="is missing or changed since it was recorded"):
        benchmark.recorded()
