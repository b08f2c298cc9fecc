"""Where a policy loss is clipped, alone and in a group, and whose log-probs its ratio reads."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kl_term.audit.auditing import _clipped
from kl_term.audit.policy_part import NOWHERE, policy_part
from kl_term.audit.policy_rules import of_policy
from kl_term.audit.readings import read
from kl_term.audit.temperatures import Tempered

pytestmark = pytest.mark.slow


def surrogate(clipped):
    """PPO's surrogate with one's own clip of ratio and advantage, beside k2."""

    def loss(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
        ratio, worth = (logp - old_logp).exp(), advantages.unsqueeze(-1)
        terms = beta * 0.5 * (logp - ref_logp) ** 2 - clipped(ratio, worth)
        return torch.where(mask, terms, 0.0).sum() / mask.sum()

    return loss


def of_group(clipped, spread=True):
    """The same, of rewards that the loss itself centres in their group."""

    def loss(rewards, logps, old_logps, ref_logps, keep_mask, kl_beta=0.1):
        centred = rewards - rewards.mean()
        worth = centred / (rewards.std() + 1e-6) if spread else centred
        terms = kl_beta * 0.5 * (logps - ref_logps) ** 2
        terms = terms - clipped((logps - old_logps).exp(), worth.unsqueeze(-1))
        return (terms * keep_mask).sum() / keep_mask.sum()

    return loss


def codes(loss):
    reading = read(loss)
    facts = SimpleNamespace(
        policy=policy_part(reading),
        reading=reading,
        tempered=Tempered({}),
        invariants=SimpleNamespace(sampler_shifted=False),
        identity=SimpleNamespace(aggregation=None),
    )
    return [finding.code for finding in of_policy(facts) if finding.severity != "note"]


def ppo(low, high):
    return lambda r, a: torch.min(r * a, r.clamp(low, high) * a)


def dual(everywhere):
    def clipped(r, a):
        least = torch.min(r * a, r.clamp(0.8, 1.2) * a)
        floor = torch.max(least, 3.0 * a)
        return floor if everywhere else torch.where(a < 0, floor, least)

    return clipped


#: Clips of ratio and advantage -> what is found.
CLIPS = {
    "both sides": (ppo(0.8, 1.2), []),
    "higher above": (ppo(0.8, 1.28), []),
    "one over c and c": (ppo(1 / 3, 3.0), []),
    "a little lower": (ppo(0.6, 1.2), []),
    "none below": (lambda r, a: torch.min(r * a, r.clamp(max=1.2) * a), []),
    "positive alone": (lambda r, a: r.clamp(max=1.2) * a.clamp(min=0), []),
    "dual": (dual(everywhere=False), []),
    "eps for one minus eps": (ppo(0.1, 1.1), ["policy-clip"]),
    "dual for both signs": (dual(everywhere=True), ["policy-clip"]),
    "the larger product": (
        lambda r, a: torch.max(r * a, r.clamp(0.8, 1.2) * a),
        ["policy-clip"],
    ),
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_is_read_on_both_sides_of_both_signs(name):
    clipped, found = CLIPS[name]
    assert codes(surrogate(clipped)) == found


@pytest.mark.parametrize(
    "name", ["both sides", "dual", "eps for one minus eps", "the larger product"]
)
def test_a_clip_is_read_where_only_a_group_has_advantages(name):
    clipped, found = CLIPS[name]
    assert codes(of_group(clipped)) == found


@pytest.mark.parametrize(
    ("clipped", "spread", "found"),
    [
        (lambda r, a: r * a, True, []),
        (lambda r, a: r * a, False, []),
        (lambda r, a: torch.where((r > 0.5) & (r < 2), r, 0.0) * a, True, []),  # a filter
        (lambda r, a: r * r * a, True, ["policy-ratio"]),
        (lambda r, a: r * a.abs(), False, ["policy-sign"]),
        (lambda r, a: r * a * a.abs(), False, ["policy-weight"]),
    ],
)
def test_the_weight_of_a_token_is_read_in_its_group(clipped, spread, found):
    reading = read(of_group(clipped, spread))
    assert reading.fewest_of_policy > 1
    assert codes(of_group(clipped, spread)) == found


def test_a_sign_without_any_gradient_is_said():
    part = policy_part(read(surrogate(dual(everywhere=True))))
    assert part.clips["positive"] == NOWHERE != part.clips["negative"]


def of_pack(mean):
    def loss(lp, old_lp, lp_ref, adv, boundaries_mask, cu_seqlens, kl_coef=0.1):
        moved = (lp - old_lp) * boundaries_mask
        log_ratio = mean(moved, cu_seqlens)
        ratio = (log_ratio.detach() + lp - lp.detach()).exp()
        per_token = kl_coef * 0.5 * (lp - lp_ref) ** 2 - ratio * adv
        return (per_token * boundaries_mask).sum() / (len(cu_seqlens) - 1)

    return loss


def by_answer(moved, cu_seqlens):
    lengths = cu_seqlens.diff().long()
    ends = torch.arange(len(lengths)).repeat_interleave(lengths)
    sums = moved.new_zeros(len(lengths)).index_add(0, ends, moved)
    return (sums / lengths)[ends]


def test_a_ratio_over_the_whole_pack_reads_other_answers():
    assert codes(of_pack(by_answer)) == []
    assert codes(of_pack(lambda moved, cu_seqlens: moved.mean())) == ["policy-ratio"]


@pytest.mark.parametrize(
    ("below", "above", "said"),
    [
        (0.0, 1.2, "no gradient at ratios above 1.2"),
        (0.8, math.inf, "no gradient at ratios below 0.8"),
        (0.8, 1.2, "no gradient at ratios below 0.8 and above 1.2"),
        (0.0, math.inf, "a gradient at every ratio"),
        (*NOWHERE, "no gradient at any ratio"),
    ],
)
def test_a_side_that_no_ratio_has_is_not_said(below, above, said):
    assert _clipped(below, above) == said
