"""A sum over the likeliest tokens as a KL term: by loops over tokens, and by finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kl_term.kl.choice import KLChoice
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.names import CORRECTIONS, SUPPORTS
from kl_term.kl.term import KLTerm

CHOICES = list(itertools.product(("exact", "forward"), SUPPORTS, CORRECTIONS))


def logits(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 3, 7], far from each other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, 3, 7, generator=generator, dtype=torch.float64).mul(2.0).unbind()


def by_hand(policy, reference, term: KLTerm) -> float:
    """The sum at one state, token by token."""
    p, q = (z.softmax(-1).tolist() for z in (policy, reference))
    whose = p if term.support == "policy" else q
    chosen = sorted(range(len(p)), key=lambda a: -whose[a])[: term.top_k]
    if term.estimator == "forward":
        p, q = q, p
    inside, other = sum(p[a] for a in chosen), sum(q[a] for a in chosen)
    if term.correction == "renormalised":
        return sum(p[a] / inside * math.log(p[a] / inside / (q[a] / other)) for a in chosen)
    total = sum(p[a] * math.log(p[a] / q[a]) for a in chosen)
    if term.correction == "unnormalised":
        total += other - inside
    if term.correction == "tail":
        total += (1 - inside) * math.log((1 - inside) / (1 - other))
    return total


@pytest.mark.parametrize(("estimator", "support", "correction"), CHOICES)
def test_the_loss_is_the_sum_token_by_token(estimator, support, correction) -> None:
    policy, reference = logits()
    fields = {"support": support, "correction": correction}
    term = KLTerm(estimator=estimator, top_k=3, **fields)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    leaf = policy.clone().requires_grad_()
    given = {"logits": leaf, "ref_logits": reference, "mask": mask}
    found = term.loss(nothing, nothing, **given)
    for row, step in itertools.product(range(2), range(3)):
        state = policy[row, step], reference[row, step]
        expected = by_hand(*state, term) if mask[row, step] else 0.0
        assert float(found[row, step].detach()) == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert not gradient[0, 2].any()
    for token in range(7):
        step = torch.zeros(7, dtype=torch.float64)
        step[token] = 1e-6
        ends = [by_hand(policy[1, 0] + s * step, reference[1, 0], term) for s in (1, -1)]
        slope = (ends[0] - ends[1]) / 2e-6
        assert float(gradient[1, 0, token]) == pytest.approx(slope, abs=1e-7)
    flipped = KLTerm(
        estimator={"exact": "forward", "forward": "exact"}[estimator], top_k=3, **fields
    )
    assert (flipped.loss(nothing, nothing, **given) - found).abs().max() > 1e-2


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_over_all_tokens_it_is_the_full_term(correction) -> None:
    policy, reference = logits(1)
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    for estimator, full in (("exact", reverse_kl), ("forward", forward_kl)):
        term = KLTerm(estimator=estimator, top_k=7, correction=correction)
        found = term.loss(nothing, nothing, logits=policy, ref_logits=reference)
        torch.testing.assert_close(found, full(policy, reference), rtol=0, atol=1e-12)


def test_a_choice_without_it_keeps_its_name_and_its_record() -> None:
    plain = KLChoice(estimator="exact")
    assert not {"top_k", "support", "correction"} & set(plain.model_dump())
    assert plain.name == "exact_loss"
    assert KLChoice(estimator="exact", top_k=8).name == "exact_loss_top_8"
    named = KLChoice(estimator="forward", top_k=8, support="policy", correction="none")
    assert named.name == "forward_loss_top_8_policy_none"
    assert KLChoice.model_validate_json(named.model_dump_json()) == named != plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"estimator": "k3", "top_k": 8}, "top_k=8 has no meaning for k3"),
        ({"estimator": "none", "top_k": 8}, "top_k=8 has no meaning without an estimator"),
        ({"estimator": "exact", "support": "policy"}, "support='policy' has no meaning without"),
        ({"estimator": "exact", "correction": "none"}, "correction='none' has no meaning without"),
        ({"estimator": "exact", "top_k": 0}, "top_k"),
    ],
)
def test_what_has_no_meaning_is_refused(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        KLChoice(**fields)


def test_more_tokens_than_there_are_are_refused() -> None:
    policy, reference = logits()
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="between 1 and 7"):
        KLTerm(estimator="exact", top_k=8).loss(
            nothing, nothing, logits=policy, ref_logits=reference
        )
