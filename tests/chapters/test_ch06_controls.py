"""The tables of chapter 6 on the control variate and the truncated ratio, by other routes."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.chapters.ch06_sequences import controls
from analysis.evidence.policies import random_chains, random_tables
from analysis.evidence.prefix_controls import (
    answer_gradients,
    draw_answers,
    given_up,
    parabolas,
    same_batch_bias,
    truncation_table,
)
from analysis.studies.presets import make_preset
from kl_term.kl.full_vocabulary import markov_kl
from kl_term.kl.sequences import enumerate_sequences


def test_the_parabola_is_the_variance_of_sampled_gradients():
    chains = given_up(random_chains(3, 1, drift=0.5, staleness=0.2, seed=1), 0.3)
    length = 4
    drawn = draw_answers(chains, 60_000, length, seed=3)
    one = type(drawn)(*(part[0] for part in drawn))
    parabola = parabolas(chains, length)
    exact = torch.func.grad(markov_kl)(chains.logits[0], chains.ref_logits[0], length)
    bare = None
    for control in (0.0, 0.4, 1.0):
        gradients = answer_gradients(one, chains.logits[0], control)
        error = (gradients.mean(0) - exact.flatten()).norm() / exact.norm()
        assert error < 0.03
        spread = (gradients - gradients.mean(0)).square().sum(-1).mean()
        bare = spread if bare is None else bare
        found = parabola.at(control)[0].item()
        assert (spread / bare).item() == pytest.approx(found, rel=0.06)


def test_given_up_tokens_are_drawn_less():
    before = random_chains(4, 2, drift=0.2, seed=0)
    after = given_up(before, 0.01)
    odds = lambda logits: logits.softmax(-1)[..., 0] / (1 - logits.softmax(-1)[..., 0])
    torch.testing.assert_close(odds(after.logits), 0.01 * odds(before.logits))
    torch.testing.assert_close(after.ref_logits, before.ref_logits)


def test_a_whole_window_without_a_cap_has_no_bias_and_a_token_has():
    table = truncation_table(
        0.2, (1.0, math.inf), (1, 12), length=12, drift=0.5, stickiness=3.0, count=2
    ).set_index(["window", "cap"])
    assert table.bias[12, math.inf] < 0.25 * table.bias[1, math.inf]
    assert table.bias[12, math.inf] < table.bias[12, 1.0]
    assert table.moment[1, 1.0] < table.moment[12, 1.0]


def test_medians_of_the_bias_of_an_own_batch():
    sequences = enumerate_sequences(2, 3, eos=1)
    policies = random_tables(sequences, 2, 5, spread=1.0, seed=0)
    table = controls.own_batch(policies, sequences, (1, 2))
    for answers in (1, 2):
        pairs = zip(policies.logits, policies.ref_logits, strict=True)
        each = [same_batch_bias(*pair, sequences, answers=answers) for pair in pairs]
        for column in ("bias", "bound"):
            middle = sorted(getattr(one, column).item() for one in each)[2]
            assert table.loc[answers, column] == pytest.approx(middle)
    assert (table.bias < table.bound).all() and (table.bias > 0).all()


def test_every_variant_of_the_recording_has_a_name():
    assert {v.name for v in make_preset("control_variate", {}).variants} == set(controls.NAMES)
