"""The tables of chapter 2 say what the theorems say, and their referees could say otherwise."""

from __future__ import annotations

import pytest
import torch

from analysis.experiments.chapters import gradients as study
from analysis.kl.sequences import enumerate_sequences
from analysis.kl.term import KLTerm


def term(estimator: str, placement: str = "loss", *, weighting: str = "none") -> KLTerm:
    return KLTerm(estimator=estimator, placement=placement, weighting=weighting)


@pytest.fixture(scope="module")
def pairs():
    return study.random_policies(40, 9, spread=1.5, seed=5)


def test_what_each_arm_optimises_at_one_state(pairs):
    arms = [
        *study.LOSS_AND_REWARD,
        term("k4"),
        term("k3_clip"),
        term("minimax01"),
    ]
    table = study.one_state_table(pairs, arms).set_index(["estimator", "placement"])
    assert table.optimises.to_dict() == {
        ("k1", "loss"): "nothing",
        ("k2", "loss"): "reverse",
        ("k3", "loss"): "forward",
        ("k1", "reward"): "reverse",
        ("k2", "reward"): "neither",
        ("k3", "reward"): "reverse − forward",
        ("k4", "loss"): "forward",
        ("k3_clip", "loss"): "neither",
        ("minimax01", "loss"): "neither",
    }
    assert table.error_reverse["k2", "loss"] < 1e-12 < table.error_reverse["k3", "loss"]


def test_every_line_of_the_derivation_and_its_flip(pairs):
    lines = study.derivation_errors(pairs)
    assert len(lines) == 4
    assert lines.error.max() < 1e-12
    assert lines.error_flipped.min() > 0.1


def test_drift_starts_at_the_reference_and_spares_the_exact_arms(pairs):
    distances = torch.tensor([0.01, 1.0, 3.0], dtype=torch.float64)
    curves = study.drift_curves(pairs.ref_logits, distances, seed=1)
    at = curves.set_index(["estimator", "placement"])["median"]
    assert (at["k2", "loss"] < 1e-12).all()
    assert (at["k1", "reward"] < 1e-12).all()
    assert at["k3", "loss"].iloc[0] < 0.02
    assert at["k3", "loss"].iloc[-1] > 0.3
    kl = curves[(curves.estimator == "k1") & (curves.placement == "loss")].kl
    assert kl.is_monotonic_increasing
    assert kl.iloc[0] < 1e-3
    assert (curves.p10 <= curves["median"]).all()
    assert (curves["median"] <= curves.p90).all()


def test_staleness_breaks_exactly_the_arms_without_their_weight(pairs):
    distances = torch.tensor([0.0, 1.0], dtype=torch.float64)
    arms = [
        term(k, weighting=w) for k in ("k1", "k2", "k3") for w in ("none", "attached", "detached")
    ]
    curves = study.staleness_curves(pairs, distances, seed=1, terms=arms)
    stale = curves[curves.staleness > 0].set_index(["estimator", "weighting"])["median"]
    exact = {("k2", "detached"), ("k3", "attached"), ("k1", "attached")}
    for key, error in stale.items():
        assert (error < 1e-10) == (key in exact), key


def test_noise_agrees_with_a_sample(pairs):
    table = study.noise_table(
        pairs,
        [
            term("k2"),
            term("k1", "reward"),
            term("k3"),
        ],
    )
    assert table.samples_median[0] == pytest.approx(table.samples_median[1], rel=1e-12)
    assert table.samples_median[2] > table.samples_median[0]
    one = study.Policies(pairs.logits[:1], pairs.ref_logits[:1])
    policy, logp = one.logits[0].softmax(-1), one.logits[0].log_softmax(-1)
    ref_logp = one.ref_logits[0].log_softmax(-1)
    actions = torch.multinomial(
        policy, 200_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    scores = torch.nn.functional.one_hot(actions, 9) - policy
    samples = (logp - ref_logp)[actions].unsqueeze(-1) * scores
    sampled = samples.var(0).sum() / samples.mean(0).square().sum()
    enumerated = study.noise_table(one, [term("k2")]).samples_median[0]
    assert sampled.item() == pytest.approx(enumerated, rel=0.03)


@pytest.mark.parametrize("eos", [None, 2])
def test_what_each_arm_optimises_over_sequences(eos):
    sequences = enumerate_sequences(3, 3, eos=eos)
    tables = study.random_tables(sequences, 3, 6, spread=1.5, seed=2)
    table = study.sequence_table(tables, sequences)
    prefix = table[table.ratio == "prefix"].set_index("estimator").optimises
    assert prefix.to_dict() == {"k1": "reverse", "k2": "neither", "k3": "reverse"}
    table = table[table.ratio == "none"]
    rows = table.set_index(["estimator", "placement", "level", "credit"]).optimises
    assert rows["k1", "reward", "token", "to_go"] == "reverse"
    assert rows["k1", "reward", "sequence", "immediate"] == "reverse"
    assert rows["k1", "reward", "token", "immediate"] == "reverse (visited)"
    assert rows["k2", "loss", "token", "immediate"] == "reverse (visited)"
    assert rows["k2", "loss", "sequence", "immediate"] == "reverse"
    assert rows["k3", "loss", "token", "immediate"] == "forward (visited)"
    assert rows["k3", "loss", "sequence", "immediate"] == "forward"
    assert (rows["k1", "loss"] == "nothing").all()
    assert (rows["k2", "reward"] == "neither").all()
    assert rows["k3", "reward", "sequence", "immediate"] == "reverse − forward"
    assert rows["k3", "reward", "token", "immediate"] == "reverse − forward (visited)"
    assert rows["k3", "reward", "token", "to_go"] == "neither"
