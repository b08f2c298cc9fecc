"""Sums over the vocabulary, cut by the probability of the token."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.records import estimator_tail as recorded_tail
from analysis.studies.language import estimator_tail
from analysis.training.trainer import PopulationTrainer
from kl_term.diagnosis.columns import assemble
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.estimators import k1, k3
from tests.experiments.tiny import short_llama


def log_probs(states: int, vocab_size: int, scale: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(states, vocab_size, generator=generator, dtype=torch.float64)
    return torch.log_softmax(logits, dim=-1)


def test_columns_add_up_to_the_moments_and_two_of_them_to_the_kl():
    logp, ref_logp = log_probs(7, 50, 4.0, 0), log_probs(7, 50, 3.0, 1)
    sums = estimator_tail.contributions(logp, ref_logp).sum()
    exact = reverse_kl(logp, ref_logp).mean().item()
    assert sums["mass"] == pytest.approx(1.0, abs=1e-12)
    assert sums["k1"] == pytest.approx(exact, abs=1e-12)
    assert sums["k3"] == pytest.approx(exact, abs=1e-12)
    loops = [
        [p * (math.exp(r - q) - 1 - (r - q)) ** 2, p * 0.5 * (q - r) ** 2]
        for q_row, r_row in zip(logp.tolist(), ref_logp.tolist(), strict=True)
        for p, q, r in zip(np.exp(q_row), q_row, r_row, strict=True)
    ]
    squared, halved = np.array(loops).sum(axis=0) / 7
    assert sums["k3_squared"] == pytest.approx(squared, rel=1e-10)
    assert sums["k2"] == pytest.approx(halved, rel=1e-10)


def test_a_token_counts_in_the_decade_of_its_probability():
    probs = torch.tensor([[0.9, 0.0999, 1e-4 - 1e-14, 1e-14]], dtype=torch.float64)
    reference = torch.tensor([[0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    table = estimator_tail.contributions(probs.log(), reference.log()).set_index("decade")
    assert table.loc[-1.0, "mass"] == pytest.approx(0.9)
    assert table.loc[-2.0, "mass"] == pytest.approx(0.0999)
    assert table.loc[-5.0, "mass"] == pytest.approx(1e-4)
    assert table.loc[-np.inf, "mass"] == pytest.approx(1e-14)
    # No log will ever show this token; a quarter of the reference lies on it.
    assert table.loc[-np.inf, "k3"] == pytest.approx(0.25, rel=1e-9)
    assert abs(table.loc[-np.inf, "k1"]) < 1e-12


def test_runs_are_trained_and_then_measured_where_they_go():
    preset = short_llama(3, 2).model_copy(update={"seeds": (0, 1)})
    after = estimator_tail.train_and_measure(preset, rollouts=2)
    assert list(after) == ["none", "k1_loss"]
    trainer = PopulationTrainer(
        preset.config, preset.runs[:1], estimator_tail.environment_of(preset.config)
    )
    trainer.run()
    tails, dump = after["none"]
    table, other = (tails[tails["seed"] == seed] for seed in preset.seeds)
    assert len(table) == len(other) and not np.allclose(table["k1"], other["k1"], rtol=1e-3)
    kl, tokens = 0.0, 0
    for update in (3, 4):
        drawn = trainer.rollout(update)
        metrics = trainer.losses(trainer.batch(drawn), measure=True).metrics
        rows = dump[dump["step"] == update]
        assert len(rows) == int(drawn.rollout.mask.sum())
        for name, estimator in (("k1", k1), ("k3", k3)):
            read = estimator(*(torch.tensor(rows[c].to_numpy()) for c in ("logp", "ref_logp")))
            assert read.mean().item() == pytest.approx(metrics[name].item(), rel=1e-4)
        assert rows["reward"].mean() > 0 or drawn.scores.rewards.sum() == 0
        kl, tokens = kl + metrics["reverse_kl"].item() * len(rows), tokens + len(rows)
    assert table["k1"].sum() == pytest.approx(kl / tokens, rel=1e-4)
    assert kl / tokens > 1e-6
    np.testing.assert_allclose(dump["logp"], dump["old_logp"], atol=1e-5)
    rollouts = assemble({name: dump[name].to_numpy() for name in dump}, "read by the diagnosis")
    assert rollouts.tokens == len(dump) and rollouts.sequences == 2 * 4 * 6


def test_what_is_recorded_is_read_back_and_sealed(monkeypatch, tmp_path):
    def one_row(preset):
        made = {}
        for place, run in enumerate(preset.runs):
            table = pd.DataFrame({"decade": [-np.inf], "k1": [0.25 + place]})
            made.setdefault(
                run.variant.name,
                estimator_tail.After(table, pd.DataFrame({"logp": [-0.5 - place]})),
            )
        return made

    monkeypatch.setattr(estimator_tail, "train_and_measure", one_row)
    monkeypatch.setattr(estimator_tail, "RECORDED", tmp_path / "tail")
    monkeypatch.setattr(recorded_tail, "RECORDED", tmp_path / "tail")
    estimator_tail.record()
    back = recorded_tail.recorded()
    assert list(back) == list(recorded_tail.VARIANTS)
    assert back["k3_loss"].tail["k1"].to_list() == [0.25]
    assert back["k3_loss"].tail["decade"].to_list() == [-np.inf]
    assert back["none"].dump["logp"].to_list() == [-0.5]
    (tmp_path / "tail" / "none_tail.csv").write_text("decade\n0\n")
    with pytest.raises(ValueError, match="changed since it was recorded"):
        recorded_tail.recorded()
