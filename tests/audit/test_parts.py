"""Results of several entries: which is the loss, and which a KL that the caller multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from kl_term.audit.layouts import probe_of
from kl_term.audit.parts import said
from kl_term.audit.readings import read
from kl_term.audit.returning import Parts


@dataclass
class Settings:
    beta: float = 0.05
    clip_higher: float = 0.2
    estimator: str = "k2"


def k2(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def surrogates(ratio, advantages, high=0.2):
    return -advantages * ratio, -advantages * ratio.clamp(1 - high, 1 + high)


def quadruple(new_logprobs, ratio, advantages, ref_logprobs, config: Settings):
    """Both terms, the loss, and the KL that the caller scales by the coefficient it holds."""
    one, two = surrogates(ratio, advantages, config.clip_higher)
    kl = k2(new_logprobs, ref_logprobs) if config.estimator == "k2" else None
    return one, two, torch.max(one, two), kl


def gated(logp, old_logp, ref_logp, advantages, config: Settings):
    """The coefficient is asked for, and multiplied outside."""
    loss = torch.max(*surrogates((logp - old_logp).exp(), advantages))
    return loss, k2(logp, ref_logp) if config.beta else torch.zeros_like(loss)


def numbers(logp, old_logp, ref_logp, advantages, mask):
    one, two = surrogates((logp - old_logp).exp(), advantages)
    return tuple((x * mask).sum() / mask.sum() for x in (torch.max(one, two), k2(logp, ref_logp)))


class Terms(NamedTuple):
    policy_loss: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor


def named(logp, old_logp, ref_logp, advantages, mask):
    loss, kl = numbers(logp, old_logp, ref_logp, advantages, mask)
    return Terms(loss, -(logp * mask).sum(), kl)


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        (quadruple, Parts(2, 3)),
        (gated, Parts(0, 1)),
        (numbers, Parts(0, 1)),
        (named, Parts("policy_loss", "kl")),
    ],
)
def test_a_kl_beside_the_loss_is_multiplied_by_its_caller(loss, parts):
    reading = read(loss)
    assert reading.foreign.parts == parts
    assert reading.foreign.has_beta and reading.foreign.beta_path is None
    assert "config.beta" not in reading.foreign.plan.guessed
    batch = probe_of(reading.foreign)
    gap = torch.where(batch.mask, batch.logp - batch.ref_logp, 0.0)
    divisor = batch.mask.sum() if reading.shape == "number" else batch.rows
    seen = reading.kl(batch).gradient * batch.mask
    torch.testing.assert_close(seen, gap / divisor, rtol=1e-12, atol=1e-12)


def test_what_was_read_as_what_is_said():
    assert said(Parts(2, 3)).startswith("entry 3 of what it returns, plus the coefficient")
    assert said(Parts("total")) == "'total' of what it returns"


def test_the_loss_with_its_kl_is_found_behind_another_entry():
    def loss(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
        policy, kl = numbers(logp, old_logp, ref_logp, advantages, mask)
        return policy, policy + beta * kl, kl

    assert read(loss).foreign.parts == Parts(1)


def test_a_loss_that_holds_its_kl_is_the_first():
    def loss(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
        policy, kl = numbers(logp, old_logp, ref_logp, advantages, mask)
        return policy + beta * kl, policy, kl

    assert read(loss).foreign.parts is None


def test_a_coefficient_that_it_takes_is_to_be_used_by_itself():
    def forgotten(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
        return numbers(logp, old_logp, ref_logp, advantages, mask)

    reading = read(forgotten)
    assert reading.foreign.parts is None
    assert not bool(reading.kl(probe_of(reading.foreign)).gradient.any())


def test_a_kl_without_gradient_beside_the_loss_is_its_kl_all_the_same():
    def measured(logp, old_logp, ref_logp, advantages):
        loss = torch.max(*surrogates((logp - old_logp).exp(), advantages))
        return loss, k2(logp, ref_logp).detach()

    reading = read(measured)
    kl = reading.kl(probe_of(reading.foreign))
    assert reading.foreign.parts == Parts(0, 1)
    assert bool(kl.value.any()) and not bool(kl.gradient.any())


def test_what_is_paid_has_no_kl_beside_it():
    def shaped(rewards, logprobs, ref_logprobs, mask, kl_coef=0.1):
        kl = (logprobs - ref_logprobs) * mask
        return rewards.unsqueeze(-1) * mask, kl

    reading = read(shaped)
    assert (reading.foreign.parts, reading.kind) == (None, "reward")
