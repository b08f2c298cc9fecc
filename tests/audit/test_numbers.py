"""What a loss makes of infinities, overflows, filters and few digits, and of the advantage."""

from __future__ import annotations

import pytest
import torch

from kl_term.audit import audit
from kl_term.audit.invariants import _batch, _moves_with_advantage, _poison
from kl_term.audit.numerics import numerics
from kl_term.audit.readings import read
from kl_term.audit.supports import supports

pytestmark = pytest.mark.slow


def k2_of(policy, frozen, keep):
    return 0.5 * torch.where(keep, policy - frozen, 0.0) ** 2


def half_precision(log_probs, ref_log_probs, mask, kl_coef):
    """Rounded after the difference, not before."""
    gap = torch.where(mask, log_probs - ref_log_probs, 0.0).to(torch.bfloat16)
    return kl_coef * (gap * gap / 2).sum().to(log_probs.dtype) / mask.sum()


def both_rounded(log_probs, ref_log_probs, mask, kl_coef):
    gap = log_probs.half() - ref_log_probs.half()
    return (
        kl_coef * 0.5 * torch.where(mask, gap.to(log_probs.dtype), 0.0).square().sum() / mask.sum()
    )


@pytest.mark.parametrize("loss", [half_precision, both_rounded])
def test_what_rounds_inside_is_recognised_and_told_by_how_much(loss):
    found = audit(loss)
    assert found.minimises["fresh"]["state"] == "reverse KL"
    assert found.findings[0].code == "digits"
    lost = loss is both_rounded  # a difference that is rounded keeps its first digits
    assert ("at a KL of 1e-06" in found.findings[0].says) is lost


def test_digits_near_the_reference_are_counted_in_both_types():
    def naive(logp, ref_logp):
        x = ref_logp - logp
        return x.exp() - x - 1

    def careful(logp, ref_logp):
        x = ref_logp - logp
        return x.square() / 2 + x**3 / 6 + x**4 / 24

    assert numerics(read(naive)).digits["float32", 1e-6] > 0.01
    assert numerics(read(naive)).digits["bfloat16", 1e-4] > 0.5
    assert max(numerics(read(careful)).digits.values()) < 0.02


def weighed(factor):
    def loss(new_logp, behavior_logp, ref_logp, adv, response_mask, beta=0.1):
        m = response_mask.bool()
        ratio = torch.where(m, new_logp - behavior_logp, 0.0).exp()
        kl = k2_of(new_logp, ref_logp, m)
        return torch.where(m, beta * kl * factor(adv) - ratio * adv, 0.0).sum() / m.sum()

    return loss


@pytest.mark.parametrize(
    ("factor", "moves"),
    [
        (torch.ones_like, None),
        (lambda a: 3 * a, "sign"),
        (lambda a: (a < 0).to(a.dtype), "size"),
        (lambda a: a.sigmoid(), "size"),
    ],
)
def test_a_kl_must_not_move_with_the_advantage(factor, moves):
    reading = read(weighed(factor))
    assert _moves_with_advantage(reading, reading.kl, _batch(reading)) == moves


def test_a_kl_that_an_advantage_multiplies_is_an_error_that_comes_first():
    found = audit(weighed(lambda a: 3 * a))
    assert (found.findings[0].code, found.findings[0].severity) == ("kl-times-advantage", "error")


def filtered(keep_by):
    def loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef=0.1):
        m = mask.bool()
        gap = torch.where(m, logprobs - old_logprobs, 0.0)
        policy = -keep_by(gap) * torch.where(m, advantages, 0.0)
        return torch.where(m, policy + kl_coef * k2_of(logprobs, ref_logprobs, m), 0.0).mean()

    return loss


@pytest.mark.parametrize(
    ("keep_by", "fails"),
    [
        (lambda gap: gap.exp() * (gap.abs() < 2), True),
        (lambda gap: torch.where(gap.abs() < 2, gap.exp(), 0.0), True),  # its gradient
        (lambda gap: gap.clamp(-3, 3).exp() * (gap.abs() < 2), False),
        (lambda gap: gap.exp(), False),  # no filter: it overflows, as it says
    ],
)
def test_a_filter_must_not_leave_what_it_removes(keep_by, fails):
    assert numerics(read(filtered(keep_by))).filter_fails is fails


def multiplied(logp, ref_logp, mask):
    return ((logp - ref_logp) ** 2 * mask).sum() / mask.sum()


def selected_first(logp, ref_logp, mask):
    return k2_of(logp.masked_fill(~mask, 0.0), ref_logp.masked_fill(~mask, 0.0), mask).sum()


def finite_only(logp, ref_logp, mask):
    return ((logp.clamp(min=-1e4) - ref_logp.clamp(min=-1e4)) ** 2 * mask).sum()


@pytest.mark.parametrize(
    ("loss", "poison"), [(multiplied, "infinity"), (selected_first, None), (finite_only, "NaN")]
)
def test_infinity_at_a_masked_position_is_told_from_nan(loss, poison):
    reading = read(loss)
    whole = lambda batch: reading.whole(batch, 0.5)
    assert _poison(reading, whole, _batch(reading)) == poison


def k3(logp, ref_logp):
    x = ref_logp - logp
    return x.exp() - x - 1


def zeroed(logp, ref_logp):
    return torch.nan_to_num(logp - ref_logp, posinf=0.0).square() / 2


def bounded(logp, ref_logp):
    return (logp - ref_logp).clamp(max=20.0).square() / 2


@pytest.mark.parametrize(("loss", "free"), [(k3, False), (zeroed, True), (bounded, False)])
def test_what_the_reference_never_gives_is_not_free(loss, free):
    assert supports(read(loss)).free is free


def by_product(logits, ref_logits):
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)


def by_xlogy(logits, ref_logits):
    p, gap = logits.softmax(-1), logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    return (p * torch.where(p > 0, gap, 0.0)).sum(-1)


def test_nan_at_probability_zero_is_found_in_logits():
    assert supports(read(by_product)).not_a_number == ("the policy gives", "both give")
    assert supports(read(by_xlogy)).not_a_number == ()
