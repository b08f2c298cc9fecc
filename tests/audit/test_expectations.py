"""Exact expectations of the audit, against the enumeration of the package and closed forms."""

from __future__ import annotations

import pytest
import torch

from kl_term.audit import assert_minimises, assert_term
from kl_term.audit.readings import Part, read
from kl_term.audit.targets import POTENTIALS, minimised, potential_gradient
from kl_term.audit.trees import expected_gradient, state, tree
from kl_term.kl.divergences import chi_square, forward_kl, half_squared_distance, reverse_kl
from kl_term.kl.sequences import expected_sequence_gradient, sequence_kl_gradient
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import aggregate

TIGHT = {"rtol": 0, "atol": 1e-12}
RAGGED = tree(3, 3, ragged=True, seed=4)
CASES = [
    KLTerm(estimator="k2"),
    KLTerm(estimator="k3", weighting="attached", ratio="prefix"),
    KLTerm(estimator="k2", weighting="detached", ratio="geometric"),
    KLTerm(estimator="k2", level="sequence", weighting="attached"),
]


def written(term):
    """A term as a foreign loss of tokens."""

    def loss(logp, ref_logp, old_logp, mask):
        return term.loss(logp, ref_logp, old_logp=old_logp, mask=mask)

    return loss


@pytest.mark.parametrize("term", CASES, ids=lambda term: term.name)
def test_the_mean_over_answers_is_that_of_the_enumeration(term):
    reading = read(written(term))
    found = expected_gradient(reading.kl, RAGGED, separable=True)
    exact = expected_sequence_gradient(
        RAGGED.logits,
        RAGGED.ref_logits,
        RAGGED.sequences,
        RAGGED.old_logits,
        **term.model_dump(include={"estimator", "level", "weighting", "ratio"}),
    )
    torch.testing.assert_close(found, exact, **TIGHT)
    assert (found + exact).norm() > 0.1  # the flipped sign is another gradient


@pytest.mark.parametrize("rows", [2, 3])
def test_the_mean_over_batches_is_a_sum_over_every_batch(rows):
    """By hand: the loss of every batch times its probability, differentiated by the table."""
    at = tree(2, 2, ragged=True, seed=5)

    def loss(logp, ref_logp, mask):
        return aggregate(0.5 * (logp - ref_logp) ** 2, mask, "token_mean")

    found = [
        expected_gradient(read(loss).kl, at, rows=rows, symmetric=symmetric)
        for symmetric in (False, True)
    ]
    leaf = at.logits.clone().requires_grad_(True)
    answers = range(len(at.sequences.mask))
    chance = at.answer_logp(at.old_logits).exp()
    total = torch.zeros((), dtype=torch.float64)
    for batch in torch.cartesian_prod(*[torch.tensor(list(answers))] * rows):
        s, t = at.sequences.states[batch], at.sequences.tokens[batch]
        logp = leaf.log_softmax(-1)[s, t]
        ref_logp = at.ref_logits.log_softmax(-1)[s, t]
        total = total + chance[batch].prod() * loss(logp, ref_logp, at.sequences.mask[batch])
    (exact,) = torch.autograd.grad(total, leaf)
    for gradient in found:
        torch.testing.assert_close(gradient, exact, **TIGHT)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("reverse KL", reverse_kl),
        ("forward KL", forward_kl),
        ("half squared distance", half_squared_distance),
        ("half chi-square", lambda p, r: chi_square(r, p) / 2),
        ("half chi-square of the reference", lambda p, r: chi_square(p, r) / 2),
    ],
)
def test_a_potential_is_the_divergence_of_its_name(name, exact):
    at = state(7, seed=2)
    leaf = at.logits.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(exact(leaf, at.ref_logits).sum(), leaf)
    torch.testing.assert_close(potential_gradient(name, at), gradient, **TIGHT)


def test_over_a_tree_it_is_the_divergence_of_whole_answers():
    for direction in ("reverse", "forward"):
        exact = sequence_kl_gradient(
            RAGGED.logits, RAGGED.ref_logits, RAGGED.sequences, direction=direction
        )
        found = potential_gradient(f"{direction} KL", RAGGED)
        torch.testing.assert_close(found, exact, **TIGHT)


def test_every_potential_is_told_from_every_other():
    places = [state(size, seed=size) for size in (2, 3, 5)]
    for name in POTENTIALS:
        gradients = [-1.5 * potential_gradient(name, at) for at in places]
        found = minimised(gradients, places, 1e-8)
        assert (found.name, round(found.scale, 6)) == (name, -1.5)


def test_sums_and_nothing_and_neither():
    places = [state(size, seed=size).fresh() for size in (3, 5)]
    reverse, forward = (
        [potential_gradient(f"{d} KL", at) for at in places] for d in ("reverse", "forward")
    )

    def of(a, b):
        pairs = zip(reverse, forward, strict=True)
        return minimised([a * r + b * f for r, f in pairs], places, 1e-8)

    assert of(1, -1).known == "reverse - forward"
    assert of(0.5, 0.5).said == "half (reverse + forward)"
    assert of(1, 0.25).name == "reverse KL + 0.25 forward KL"
    assert of(0, 0).known == "nothing"
    odd = [torch.ones_like(g).cumsum(-1) - g for g in reverse]
    assert minimised(odd, places, 1e-8).known == "neither"


def test_assertions_hold_and_fail_readably():
    term = KLTerm(estimator="k3", weighting="attached")
    assert_minimises(written(term), "reverse KL", samples="stale", level="token")
    assert_term(written(term), term)
    with pytest.raises(AssertionError, match="minimises forward KL on fresh samples"):
        assert_minimises(written(KLTerm(estimator="k3")), "reverse KL")
    with pytest.raises(AssertionError, match="is k2_loss, not k3_loss_attached"):
        assert_term(written(KLTerm(estimator="k2")), term)


def test_a_part_is_value_and_gradient():
    part = read(written(CASES[0])).kl(RAGGED.answers())
    assert isinstance(part, Part)
    expected = (RAGGED.answers().logp - RAGGED.answers().ref_logp) / len(RAGGED.sequences.mask)
    expected = torch.where(RAGGED.sequences.mask, expected, 0.0)
    torch.testing.assert_close(part.gradient, expected, **TIGHT)
