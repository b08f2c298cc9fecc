"""Chapter 7: which supports an off-policy KL term needs, and what it descends without them."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.evidence.policies import Policies
from kl_term.kl.divergences import entropy, reverse_kl
from kl_term.kl.enumeration import exact_kl_gradient, expected_gradient, reverse_kl_gradient
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    can_draw,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_probability,
    token_logp,
)
from kl_term.kl.term import KLTerm
from kl_term.kl.truncation import keep_top, masked_logits
from tests.supports import Supports, of_loss, overlaps, report

EXACT = 1e-12
WEIGHTED = [(name, how) for name in ("k1", "k2", "k3") for how in ("attached", "detached")]
REVERSE = [("k1", "attached"), ("k3", "attached"), ("k2", "detached")]
CASES = overlaps(seed=5)
TREE = enumerate_sequences(3, 3, eos=2)


def cut_sampler(seed):
    """A policy that samples its likeliest tokens only, beside a reference of full support."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    return Supports(policy, masked_logits(policy, keep_top(policy, top_p=0.7)), reference)


@pytest.mark.parametrize("case", CASES[::3])
@pytest.mark.parametrize(("estimator", "weighting"), WEIGHTED)
def test_weighted_losses_are_sums_of_scores(case, estimator, weighting):
    """By a loop over the tokens, with nothing but the coefficient of each score."""
    policy, sampler, reference = (x.softmax(-1).tolist() for x in case)
    weights = []
    for p, mu, ref in zip(policy, sampler, reference, strict=True):
        weights.append(0.0)
        if p == 0 or mu == 0:
            continue
        if ref == 0 and (estimator, weighting) != ("k1", "detached"):
            return  # the reverse KL is infinite, and so is the loss
        log = math.log(p / ref) if ref else math.inf
        slope = {"k1": 1.0, "k2": log, "k3": 1 - ref / p}[estimator]
        value = {"k1": log, "k2": log**2 / 2, "k3": ref / p - 1 + log}[estimator]
        weights[-1] = p * (slope + (value if weighting == "attached" else 0.0))
    expected = expected_score(case.policy, torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(of_loss(case, estimator, weighting), expected, rtol=0, atol=EXACT)


def test_what_the_lines_of_both_kls_need():
    """Over every overlap of three supports in which the reverse KL is finite."""
    finite = [case for case in CASES if case.hold("policy", "reference")]
    assert len(CASES) == 64 and len(finite) == 16
    for case in finite:
        covered = case.hold("policy", "sampler")
        reverse = reverse_kl_gradient(case.policy, case.reference)
        for loss in REVERSE:
            assert ((of_loss(case, *loss) - reverse).abs().max() < EXACT) == covered
        assert (of_loss(case, "k1", "detached").abs().max() < EXACT) == covered
        if case.hold("reference", "policy"):
            forward = exact_kl_gradient(case.policy, case.reference, direction="forward")
            error = (of_loss(case, "k3", "detached") - forward).abs().max()
            assert (error < EXACT) == covered
        if covered:
            lost = case.reference.softmax(-1)[case.policy == -torch.inf].sum()
            kl = reverse_kl(case.policy, case.reference)
            for weighting in ("attached", "detached"):
                k1, k3 = (report(case, name, weighting) for name in ("k1", "k3"))
                torch.testing.assert_close(k1, kl, rtol=0, atol=EXACT)
                torch.testing.assert_close(k3, kl - lost, rtol=0, atol=EXACT)


def test_at_rest_under_a_cut_sampler():
    case = cut_sampler(3)
    keep = case.sampler > -torch.inf
    at_reference = case._replace(policy=case.reference)
    inside = case.reference.softmax(-1)[keep].sum()
    tail = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)[: int((~keep).sum())]
    moved = torch.empty_like(case.reference)
    moved[keep] = case.reference.softmax(-1)[keep] / math.e
    moved[~keep] = tail / tail.sum() * (1 - inside / math.e)
    at_rest = case._replace(policy=moved.log())
    free = torch.where(keep, case.reference.softmax(-1), 0.0)
    free[~keep] = tail.flip(0) / tail.sum() * (1 - inside)
    assert (free - case.reference.softmax(-1)).abs().max() > 1e-3
    for key in (("k3", "attached"), ("k2", "detached")):
        elsewhere = of_loss(case._replace(policy=free.log()), *key)
        assert elsewhere.abs().max() < EXACT
    for key, rests in (
        (("k3", "attached"), True),
        (("k2", "detached"), True),
        (("k1", "attached"), False),
    ):
        gradient = of_loss(at_reference, *key).abs().max()
        assert (gradient < EXACT) == rests
        gradient = of_loss(at_rest, *key).abs().max()
        assert (gradient < EXACT) != rests


@pytest.mark.parametrize("seed", range(2))
def test_a_group_mean_leaves_no_force_on_what_the_sampler_cuts(seed):
    policy, sampler, reference = cut_sampler(seed)
    keep = sampler > -torch.inf
    drawn = sampler.softmax(-1)
    penalty = torch.where(keep, sampler.log_softmax(-1) - reference.log_softmax(-1), 0.0)
    less_mean = expected_score(policy, drawn * (penalty - drawn @ penalty))
    exact = reverse_kl_gradient(masked_logits(policy, keep), reference)
    torch.testing.assert_close(less_mean, exact, rtol=0, atol=EXACT)
    assert less_mean[~keep].abs().max() < EXACT
    with_mean = expected_score(policy, drawn * penalty)
    assert with_mean[~keep].abs().min() > 1e-4


@pytest.mark.parametrize(("estimator", "weighting"), WEIGHTED)
def test_log_probs_from_before_the_cut_rescale_a_state(estimator, weighting):
    policy, old, reference = torch.randn(
        3, 6, generator=torch.Generator().manual_seed(10), dtype=torch.float64
    )
    keep = keep_top(old, top_p=0.7)
    true = of_loss(Supports(policy, masked_logits(old, keep), reference), estimator, weighting)
    logp, old_logp, ref_logp = (x.log_softmax(-1)[..., None] for x in (policy, old, reference))
    leaf = logp.clone().requires_grad_(True)
    loss = KLTerm(estimator=estimator, weighting=weighting).loss(leaf, ref_logp, old_logp=old_logp)
    (coefficient,) = torch.autograd.grad(loss.sum(), leaf)
    drawn = masked_logits(old, keep).softmax(-1)
    reported = expected_score(policy, drawn * coefficient.squeeze(-1))
    share = old.softmax(-1)[keep].sum()
    torch.testing.assert_close(share * reported, true, rtol=0, atol=EXACT)
    assert 0.7 <= share < 0.97


@pytest.mark.parametrize("seed", range(2))
def test_with_top_p_the_k1_loss_is_an_entropy_bonus(seed):
    """Exercise ``ex-cut-k1``: exact descent nears the uniform policy if nothing else stops it."""
    generator = torch.Generator().manual_seed(seed)
    logits, reference = 2 * torch.randn(2, 8, generator=generator, dtype=torch.float64)
    start = entropy(logits)
    for _ in range(500):
        keep = keep_top(logits, top_p=0.9)
        policy = logits.softmax(-1)
        two_rates = torch.where(keep, -1.0, 1.0).double()
        natural = policy * (two_rates - policy @ two_rates)
        assert -natural @ policy.log() > 0 or keep.all()
        sampler = masked_logits(logits, keep)
        logits = logits - 0.8 * expected_gradient(logits, reference, sampler, estimator="k1")
    assert start < 0.85 * math.log(8) < 0.97 * math.log(8) < entropy(logits)


def test_staleness_by_k3_needs_equal_supports():
    policy, sampler, _ = cut_sampler(7)
    drawn = sampler.softmax(-1)
    keep = drawn > 0
    log_ratio = (policy.log_softmax(-1) - sampler.log_softmax(-1))[keep]
    mass = policy.softmax(-1)[keep].sum()
    k3 = drawn[keep] @ (log_ratio.exp() - 1 - log_ratio)
    torch.testing.assert_close(k3, mass - 1 - mass.log(), rtol=0, atol=EXACT)
    exact = reverse_kl(sampler, policy)
    torch.testing.assert_close(exact, -mass.log(), rtol=0, atol=EXACT)
    assert k3 < 0.3 * exact


def cut_tables(seed):
    """Policy, reference, and a stale sampler that forbids a token in some of the states."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference, old = torch.randn(3, TREE.num_states, 3, generator=generator).double()
    old[0, 1] = old[3, 2] = old[4, 0] = -torch.inf
    return Policies(policy, reference), old


def covered_states(policy, reference, old, visits):
    """Sum over the prefixes of a visit times the covered part of the KL, prefix by prefix."""
    total = torch.zeros((), dtype=torch.float64)
    seen = set()
    for tokens, states, mask in zip(TREE.tokens, TREE.states, TREE.mask, strict=True):
        reach = torch.ones((), dtype=torch.float64)
        for token, state, counted in zip(tokens, states, mask, strict=True):
            if not counted:
                break
            keep = old[state] > 0
            if int(state) not in seen and reach > 0:
                seen.add(int(state))
                p, r = policy[state][keep], reference[state][keep]
                total = total + reach * (p * (p / r).log() - p + r).sum()
            reach = reach * visits[state, token] * keep[token]
    return total


@pytest.mark.parametrize(("ratio", "frozen"), [("token", True), ("prefix", False)])
def test_a_cut_sampler_over_sequences(ratio, frozen):
    pair, old = cut_tables(seed=8)
    leaf = pair.logits.clone().requires_grad_(True)
    policy, sampler = leaf.softmax(-1), old.softmax(-1)
    covered = covered_states(
        policy, pair.ref_logits.softmax(-1), sampler, sampler if frozen else policy
    )
    (expected,) = torch.autograd.grad(covered, leaf)
    drawn = TREE.only(can_draw(old, TREE))
    fields = {"weighting": "attached", "ratio": ratio}
    found = expected_sequence_gradient(*pair, drawn, old, estimator="k3", **fields)
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    if not frozen:
        assert covered < sequence_kl(*pair, TREE) - 0.1
        k1 = expected_sequence_gradient(*pair, drawn, old, estimator="k1", **fields)
        assert (k1 - found).abs().max() > 1e-2
    chance = sequence_probability(old, TREE)
    logp, ref_logp, old_logp = (token_logp(x, TREE)[chance > 0] for x in (*pair, old))
    loss = KLTerm(weighting="attached", ratio=ratio).loss(
        logp, ref_logp, old_logp=old_logp, mask=TREE.mask[chance > 0]
    )
    value = chance[chance > 0] @ loss.sum(-1)
    torch.testing.assert_close(value, covered.detach(), rtol=0, atol=EXACT)
    assert token_logp(old, TREE).isinf().any()
