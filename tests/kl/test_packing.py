"""Packed rows against padded ones, to the bit, over every choice; and what is refused."""

from __future__ import annotations

import itertools
from functools import partial
from typing import get_args

import pytest
import torch

from kl_term.kl.choice import KLChoice
from kl_term.kl.importance import importance_ratio
from kl_term.kl.names import (
    CREDITS,
    LEVELS,
    PLACEMENTS,
    RATIO_LEVELS,
    WEIGHTINGS,
    Estimator,
    Value,
)
from kl_term.kl.packing import Packing, sequence_ids
from kl_term.kl.prefix import prefix_coefficients
from kl_term.kl.returns import reward_to_go
from kl_term.kl.surrogates import kl_loss, kl_penalty
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import MODES, aggregate, token_weights
from kl_term.objectives.credit import fold_kl
from kl_term.objectives.losses import KINDS, policy_loss

#: Sequences 1 and 5 are empty; all tokens of sequence 3 are masked, and some of others.
LENGTHS = torch.tensor([5, 0, 37, 2, 11, 0])
WIDTH = 37
INSIDE = torch.arange(WIDTH) < LENGTHS.unsqueeze(-1)
CU = torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)).int()
IDS = sequence_ids(cu_seqlens=CU)


def choices():
    names = {
        "estimator": get_args(Estimator)[-3:] + get_args(Value) + ("minimax01",),
        "placement": PLACEMENTS,
        "level": LEVELS,
        "weighting": WEIGHTINGS,
        "ratio": RATIO_LEVELS,
        "credit": CREDITS,
        "value": (None, "k3"),
    }
    for values in itertools.product(*names.values()):
        try:
            yield KLTerm(**dict(zip(names, values, strict=True)))
        except ValueError:
            continue


CHOICES = sorted(set(choices()), key=lambda term: term.name)


@pytest.fixture(scope="module")
def padded():
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = INSIDE.shape
    mask = INSIDE & (torch.rand(size, generator=generator) < 0.8)
    mask[3] = False
    logits, ref_logits = 2 * draw(2, *size, 5)
    logp, ref_logp, old_logp = -4 * draw(3, *size).abs()
    filled = {"logp": logp, "ref_logp": ref_logp, "old_logp": old_logp, "mask": mask}
    return filled | {"logits": logits, "ref_logits": ref_logits, "advantages": draw(len(LENGTHS))}


def packed(padded):
    return {n: t if n == "advantages" else t[INSIDE] for n, t in padded.items()}


def gradients(function, given, name="logp"):
    leaf = given[name].clone().requires_grad_()
    result = function(given | {name: leaf})
    upstream = torch.linspace(-1, 2, INSIDE.numel(), dtype=torch.float64).reshape(INSIDE.shape)
    if result.ndim:  # what the aggregate hands back differs from token to token
        upstream = upstream if result.shape == INSIDE.shape else upstream[INSIDE]
    else:
        upstream = torch.ones((), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(result, leaf, upstream)
    return result.detach(), gradient


def test_every_choice_is_here():
    axes = [{getattr(term, axis) for term in CHOICES} for axis in KLChoice.model_fields]
    assert axes[0] == set(get_args(Estimator)) - {"none"}
    assert axes[1:6] == [
        set(names) for names in (PLACEMENTS, LEVELS, WEIGHTINGS, RATIO_LEVELS, CREDITS)
    ]
    assert len(CHOICES) > 100


@pytest.mark.parametrize("term", CHOICES, ids=lambda term: term.name)
def test_a_term_of_packed_rows_is_that_of_padded_ones_to_the_bit(padded, term):
    flat = packed(padded)
    names = ["logp", "ref_logp"]
    if term.placement == "reward":
        pick = lambda given: {n: given[n] for n in [*names, "mask"]}
        assert torch.equal(
            term.penalty(**pick(flat), sequence_ids=IDS), term.penalty(**pick(padded))[INSIDE]
        )
        whole = term.completion_penalty(**pick(flat), sequence_ids=IDS)
        # the last sequence is empty, so no number speaks of it
        assert torch.equal(whole, term.completion_penalty(**pick(padded))[:-1])
        return
    names += ["old_logp", "mask", "logits", "ref_logits"]
    of = lambda given, **ids: term.loss(**{n: given[n] for n in names}, **ids)
    leaf = "logits" if term.reads_logits else "logp"
    value, gradient = gradients(of, padded, leaf)
    packed_value, packed_gradient = gradients(lambda given: of(given, sequence_ids=IDS), flat, leaf)
    assert torch.equal(packed_value, value[INSIDE])
    assert torch.equal(packed_gradient, gradient[INSIDE])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_token", [False, True])
def test_the_policy_loss_is_that_of_padded_rows_to_the_bit(padded, kind, per_token):
    def loss(given, aggregation, **ids):
        advantages = given["advantages"]
        if per_token:
            advantages = given["ref_logp"] + 2
        how = {"kind": kind, "aggregation": aggregation, "advantages": advantages}
        rest = {n: given[n] for n in ("logp", "old_logp", "mask")}
        return policy_loss(**rest, **how, **ids)

    packing = {"sequence_ids": IDS, "sequences": 6, "width": WIDTH}
    for mode in MODES:
        of_padded = gradients(lambda given, how=mode: loss(given, how).loss, padded)
        of_packed = gradients(
            lambda given, how=mode: loss(given, how, **packing).loss, packed(padded)
        )
        assert torch.equal(of_packed[0], of_padded[0]), mode
        assert torch.equal(of_packed[1], of_padded[1][INSIDE]), mode
        both = loss(packed(padded), mode, **packing), loss(padded, mode)
        for name in ("per_token", "weight", "clipped"):
            assert torch.equal(getattr(both[0], name), getattr(both[1], name)[INSIDE]), mode
        assert both[0].clip_fraction == both[1].clip_fraction, mode


@pytest.mark.parametrize("term", [t for t in CHOICES if t.placement == "loss"], ids=str)
def test_an_aggregated_term_is_that_of_padded_rows_to_the_bit(padded, term):
    names = ["logp", "ref_logp", "old_logp", "mask", "logits", "ref_logits"]
    name = "logits" if term.reads_logits else "logp"

    def in_each_mode(given, ids=None, **how):
        leaf = given[name].clone().requires_grad_()
        values = term.loss(**{n: given[n] for n in names} | {name: leaf}, sequence_ids=ids)
        for mode in MODES:
            total = aggregate(values, given["mask"], mode, sequence_ids=ids, **how)
            yield total.detach(), torch.autograd.grad(total, leaf, retain_graph=True)[0]

    of_padded = in_each_mode(padded)
    of_packed = in_each_mode(packed(padded), IDS, sequences=6, width=WIDTH)
    for mode, (value, gradient), found in zip(MODES, of_padded, of_packed, strict=True):
        assert torch.equal(found[0], value), mode
        assert torch.equal(found[1], gradient[INSIDE]), mode


def test_returns_ratios_and_folded_rewards(padded):
    flat, inside = packed(padded), INSIDE
    of = lambda given: torch.where(given["mask"], given["ref_logp"], 0.0)
    for gamma in (0.0, 0.7, 1.0):
        found = reward_to_go(of(flat), gamma=gamma, sequence_ids=IDS)
        assert torch.equal(found, reward_to_go(of(padded), gamma=gamma)[inside])
    for level in RATIO_LEVELS:
        two = lambda given: [given[n] for n in ("logp", "old_logp", "mask")]
        found = importance_ratio(*two(flat), level=level, sequence_ids=IDS)
        assert torch.equal(found, importance_ratio(*two(padded), level=level)[inside])
    for estimator in get_args(Value):
        three = lambda given: [given[n] for n in ("logp", "ref_logp", "old_logp", "mask")]
        found = prefix_coefficients(*three(flat), estimator=estimator, sequence_ids=IDS)
        assert torch.equal(found, prefix_coefficients(*three(padded), estimator=estimator)[inside])
        penalty = partial(kl_penalty, estimator=estimator)
        pair = lambda given: {n: given[n] for n in ("logp", "ref_logp", "mask")}
        found = penalty(**pair(flat), sequence_ids=IDS)
        assert torch.equal(found, penalty(**pair(padded))[inside])
    for credit in ("immediate", "to_go"):
        fold, rows = partial(fold_kl, beta=0.3, credit=credit), padded["advantages"]
        found = fold(rows[:-1], flat["ref_logp"], flat["mask"], sequence_ids=IDS)
        assert torch.equal(found, fold(rows, padded["ref_logp"], padded["mask"])[inside])
    for mode in MODES:
        weights = token_weights(flat["mask"], mode, sequence_ids=IDS, sequences=6, width=WIDTH)
        assert torch.equal(weights, token_weights(padded["mask"], mode)[inside])


def test_without_ids_the_row_is_one_sequence_and_the_values_are_others(padded):
    """What packed rows gave before anybody said where a sequence ends."""
    flat = packed(padded)
    for term in (
        KLTerm(estimator="k1", placement="reward"),
        KLTerm(estimator="k1", placement="reward", credit="whole"),
    ):
        pick = {n: flat[n] for n in ("logp", "ref_logp", "mask")}
        assert not torch.allclose(term.penalty(**pick), term.penalty(**pick, sequence_ids=IDS))
    pick = {n: flat[n] for n in ("logp", "ref_logp", "old_logp", "mask")}
    for fields in ({"ratio": "prefix"}, {"ratio": "geometric"}, {"ratio": "sequence"}):
        how = {"weighting": "attached"} | fields
        alone = kl_loss(**pick, **how)
        assert not torch.allclose(alone, kl_loss(**pick, **how, sequence_ids=IDS))


def test_rows_of_a_batch_with_several_sequences_each_and_padding_between(padded):
    term = KLTerm(estimator="k1", placement="reward")
    ids = torch.full((2, 40), -1)
    rows = [[0, 3], [2]]  # in any order of numbers, with room behind
    values = {n: torch.full((2, 40), 7.0, dtype=torch.float64) for n in ("logp", "ref_logp")}
    for row, held in enumerate(rows):
        at = 1
        for number in held:
            length = int(LENGTHS[number])
            ids[row, at : at + length] = number
            for name in values:
                values[name][row, at : at + length] = padded[name][number, :length]
            at += length
    found = term.penalty(**values, sequence_ids=ids)
    wanted = term.penalty(padded["logp"], padded["ref_logp"], mask=INSIDE)
    assert (found[ids < 0] == 0).all()
    for number in (0, 2, 3):
        assert torch.equal(found[ids == number], wanted[number, : LENGTHS[number]])


def test_ids_of_ends_and_of_positions():
    assert torch.bincount(IDS, minlength=6).tolist() == LENGTHS.tolist()
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    ids = sequence_ids(position_ids=positions)
    assert ids.tolist() == [[0, 0, 0, 1, 1], [2, 3, 3, 3, 3]]
    assert Packing(ids).counted(None).sum(-1).tolist() == [3, 2, 1, 4]


def test_nothing_at_all():
    none = torch.zeros(0, dtype=torch.float64)
    ids = sequence_ids(cu_seqlens=torch.tensor([0]))
    assert KLTerm(level="sequence").loss(none, none, sequence_ids=ids).shape == (0,)
    total = aggregate(none, none.bool(), "seq_mean_token_mean", sequence_ids=ids, sequences=2)
    assert total == 0


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("cu_seqlens or position_ids", lambda: sequence_ids()),
        ("must begin at 0 and not fall", lambda: sequence_ids(cu_seqlens=torch.tensor([0, 3, 2]))),
        ("must begin at 0 and not fall", lambda: sequence_ids(cu_seqlens=torch.tensor([1, 3]))),
        ("must be .S . 1. integers", lambda: sequence_ids(cu_seqlens=torch.tensor([0.0, 3.0]))),
        ("must begin at 0", lambda: sequence_ids(position_ids=torch.tensor([[3, 0, 1]]))),
        ("side by side in one row", lambda: Packing(torch.tensor([0, 1, 0]))),
        ("side by side in one row", lambda: Packing(torch.tensor([[0, 0], [0, 0]]))),
        ("sequences is 1", lambda: Packing(torch.tensor([0, 1]), sequences=1)),
        ("width is 1", lambda: Packing(torch.tensor([0, 0]), width=1)),
        ("token axis", lambda: Packing(torch.tensor(0))),
        (
            "width is needed",
            lambda: aggregate(ROW, ROW > 0, "seq_mean_token_sum_norm", sequence_ids=ONE),
        ),
        ("give their sequence_ids", lambda: aggregate(ROW, ROW > 0, "token_mean", width=3)),
        (
            "several sequences, give their sequence_ids",
            lambda: policy_loss(ROW, old_logp=ROW, advantages=torch.ones(2), mask=ROW > 0),
        ),
        (
            "give one a sequence",
            lambda: policy_loss(
                ROW, old_logp=ROW, advantages=torch.ones(2), mask=ROW > 0, sequence_ids=ONE
            ),
        ),
        ("sequence_ids", lambda: KLTerm().loss(ROW, ROW, sequence_ids=ONE[:2])),
        ("sequence_ids", lambda: KLTerm().loss(ROW, ROW, sequence_ids=ROW)),
    ],
)
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


ROW, ONE = torch.ones(3), torch.zeros(3, dtype=torch.long)
