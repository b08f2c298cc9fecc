"""Another reference is another reward: every identity of the theorem by listing every answer."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters.ch08_reward_side.references import other_reference_table, reference_reward
from kl_term.kl.sequences import (
    enumerate_sequences,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    token_logp,
)
from kl_term.kl.truncation import keep_top, masked_logits, tempered
from tests.released import source_of
from tests.trees import draw

SHAPES = [(2, 5, None), (3, 4, 2), (4, 3, 0)]


@pytest.fixture(params=SHAPES, ids=["fixed", "ragged", "wide"])
def world(request):
    vocab, length, eos = request.param
    sequences = enumerate_sequences(vocab, length, eos=eos)
    shape = (sequences.num_states, vocab)
    return sequences, *(1.5 * draw(*shape, seed=seed) for seed in (1, 2, 3))


def reward_gradient(logits, sequences, reward):
    leaf = logits.clone().requires_grad_(True)
    (sequence_probability(leaf, sequences) @ reward).backward()
    return leaf.grad


def test_value_and_gradient(world):
    sequences, policy, meant, other = world
    reward = reference_reward(meant, other, sequences)
    mean = sequence_probability(policy, sequences) @ reward
    to_other, to_meant = (sequence_kl(policy, ref, sequences) for ref in (other, meant))
    torch.testing.assert_close(to_other, to_meant - mean, rtol=0, atol=1e-12)
    assert not torch.isclose(to_other, to_meant + mean, atol=1e-3)
    expected = sequence_kl_gradient(policy, meant, sequences)
    expected = expected - reward_gradient(policy, sequences, reward)
    found = sequence_kl_gradient(policy, other, sequences)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.05, 1.0])
def test_the_optimum_tilts_the_reference_that_is_scored(world, beta):
    sequences, _, meant, other = world
    reward = draw(len(sequences.mask), seed=7)
    shifted = reward + beta * reference_reward(meant, other, sequences)
    direct = (token_logp(other, sequences).sum(-1) + reward / beta).softmax(-1)
    as_reward = (token_logp(meant, sequences).sum(-1) + shifted / beta).softmax(-1)
    torch.testing.assert_close(direct, as_reward, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_an_undivided_reference_is_reached_at_its_own_power(world, temperature):
    sequences, policy, meant, _ = world
    power = tempered(meant, 1 / temperature)  # temperature times the logits
    assert sequence_kl(tempered(power, temperature), meant, sequences).abs() < 1e-12
    assert sequence_kl(tempered(meant, temperature), meant, sequences) > 1e-2
    assert sequence_kl(tempered(power, 1 / temperature), meant, sequences) > 1e-2
    sharper = power.softmax(-1).amax(-1) > meant.softmax(-1).amax(-1)
    assert bool(sharper.all()) == (temperature > 1)
    divided = sequence_kl(tempered(meant, temperature), tempered(meant, temperature), sequences)
    assert divided.abs() < 1e-14
    assert policy.shape == meant.shape


def test_an_unfiltered_reference_charges_the_states_where_the_filter_misses_it(world):
    sequences, policy, meant, _ = world
    keep = keep_top(policy, top_p=0.8)
    assert not keep.all()
    filtered = masked_logits(policy, keep)
    drawn = sequences.only(sequence_probability(filtered, sequences) > 0)
    missed = -torch.where(keep, meant.softmax(-1), 0.0).sum(-1).log()
    charge = (state_visits(filtered, drawn) * missed).sum()
    both = sequence_kl(filtered, masked_logits(meant, keep), sequences)
    found = sequence_kl(filtered, meant, sequences)
    torch.testing.assert_close(found, both + charge, rtol=0, atol=1e-12)
    assert charge > 1e-2
    own = masked_logits(meant, keep_top(meant, top_p=0.5))
    assert sequence_kl(filtered, own, sequences) == torch.inf


def test_the_table():
    table = other_reference_table().set_index("case")
    right = ["both divided by 1.5", "the adapter as it was loaded, or merged"]
    assert (table.loc[right].abs() < 1e-12).all(axis=None)
    assert (table.drop(right) > 1e-2).all(axis=None)


@pytest.mark.peers
@pytest.mark.parametrize(
    "line",
    [
        "self.ref_model, temperature=self.temperature",
        'use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)',
        'Version("0.17.0") <= Version(peft.__version__) < Version("0.20.0")',
        'model.add_adapter("ref", default_config)',
    ],
)
def test_what_the_chapter_says_of_trl(line):
    assert line in source_of("trl", "trl/trainer/grpo_trainer.py").read_text(encoding="utf-8")
