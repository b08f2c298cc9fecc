"""Verdicts that lie close to one another: what is wrong, and the right loss beside it."""

from __future__ import annotations

import pytest
import torch

from kl_term.audit import audit
from kl_term.kl.term import KLTerm

pytestmark = pytest.mark.slow


def loud(function):
    found = audit(function)
    return found, [f.code for f in found.findings if f.severity != "note"]


def apart(logp, ref_logp, mask):
    return torch.where(mask, logp - ref_logp, 0.0)


def to_go(kl, discount=1.0):
    found, rest = torch.zeros_like(kl), torch.zeros(len(kl), dtype=kl.dtype)
    for t in reversed(range(kl.shape[1])):
        rest = kl[:, t] + discount * rest
        found[:, t] = rest
    return found


def summed(rewards, logp, ref_logp, mask, beta):
    return rewards - beta * apart(logp, ref_logp, mask).detach().sum(-1)


def averaged(rewards, logp, ref_logp, mask, beta):
    return rewards - beta * apart(logp, ref_logp, mask).detach().sum(-1) / mask.sum(-1)


def all_that_follows(rewards, logp, ref_logp, mask, beta):
    price = to_go(apart(logp, ref_logp, mask).detach())
    return (rewards.unsqueeze(-1) - beta * price) * mask


def discounted(rewards, logp, ref_logp, mask, beta):
    price = to_go(apart(logp, ref_logp, mask).detach(), 0.9)
    return (rewards.unsqueeze(-1) - beta * price) * mask


def divided_by_spread(rewards, logp, ref_logp, mask, beta):
    score = rewards - beta * apart(logp, ref_logp, mask).sum(-1)
    return (score - score.mean()) / (score.std() + 1e-6)


@pytest.mark.parametrize(
    ("shaped", "codes"),
    [
        (summed, []),
        (averaged, ["divisor"]),
        (all_that_follows, []),
        (discounted, ["credit"]),
        (divided_by_spread, ["inside-the-std"]),
    ],
)
def test_of_a_kl_in_the_reward(shaped, codes):
    found, above = loud(shaped)
    assert found.kind == "reward"
    assert above == codes
    assert (found.term is None) == bool(codes)


def jeffreys(logp, ref_logp, old_logp, mask, beta):
    log_ratio = apart(logp, ref_logp, mask)
    weight, k3 = apart(logp, old_logp, mask).exp(), torch.exp(-log_ratio) - 1 + log_ratio
    return beta * (0.5 * (weight * k3 + weight.detach() * k3)).sum() / mask.sum()


def also_in_the_reward(logp, ref_logp, old_logp, rewards, mask, beta):
    log_ratio = apart(logp, ref_logp, mask)
    paid = rewards.unsqueeze(-1) - beta * log_ratio.detach()
    weight = apart(logp, old_logp, mask).exp()
    return torch.where(mask, beta * 0.5 * log_ratio**2 - weight * paid, 0.0).sum(-1).mean()


def test_a_symmetric_kl_is_not_counted_twice():
    found, above = loud(jeffreys)
    assert above == []
    assert found.minimises["fresh"]["state"] == "reverse + forward"
    assert found.minimises["stale"]["state"] == "reverse + forward"
    assert "counted-twice" in loud(also_in_the_reward)[1]


def test_a_kl_to_the_sampler_is_a_note_where_no_reference_is_taken():
    def without(logp, old_logp, mask, kl_tau=1e-3):
        return kl_tau * apart(logp, old_logp, mask).square().sum() / mask.sum()

    def beside(logp, old_logp, ref_logp, mask, kl_tau=1e-3):
        return without(logp, old_logp, mask, kl_tau) + 0.0 * ref_logp.sum()

    found, above = loud(without)
    assert above == []
    assert "to-the-sampler" in [f.code for f in found.findings]
    assert loud(beside)[1][0] == "reference-not-read"


@pytest.mark.parametrize("acting", [lambda b: min(b, 0.1), lambda b: b * b])
def test_a_coefficient_that_does_not_scale_the_kl_has_no_scale(acting):
    def loss(logp, ref_logp, mask, beta=0.01):
        return acting(beta) * 0.5 * apart(logp, ref_logp, mask).square().sum() / mask.sum()

    found, above = loud(loss)
    assert (above, found.scale) == (["beta-not-linear"], None)


@pytest.mark.parametrize("weighting", ["none", "attached"])
def test_a_capped_k3_is_told_from_k3_and_pushes_away(weighting):
    def of(estimator):
        term = KLTerm(estimator=estimator, weighting=weighting)

        def loss(logp, ref_logp, old_logp, mask, beta):
            per_token = term.loss(logp, ref_logp, old_logp=old_logp, mask=mask)
            return beta * torch.where(mask, per_token, 0.0).sum() / mask.sum()

        return term, *loud(loss)

    term, found, above = of("k3")
    assert (found.term, above) == (term, [])
    term, found, above = of("k3_clip")
    assert (found.term, above) == (term, ["pushes-away"])


def test_tokens_that_no_kl_reads_are_named():
    def first_alone(logp, ref_logp, mask, beta):
        return beta * 0.5 * apart(logp, ref_logp, mask)[:, 0].square().mean()

    assert loud(first_alone)[1] == ["tokens-left-out"]
