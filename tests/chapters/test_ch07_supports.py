"""Chapter 7: which supports each term needs, by enumeration and by loops over the tokens."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.chapters import ch07_supports
from analysis.chapters.ch07_supports import Supports
from analysis.chapters.policies import Policies
from analysis.kl.divergences import entropy, reverse_kl
from analysis.kl.enumeration import expected_gradient, reverse_kl_gradient
from analysis.kl.scores import expected_score
from analysis.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_probability,
    token_logp,
)
from analysis.kl.term import KLTerm
from analysis.kl.truncation import keep_top, masked_logits

EXACT = 1e-12
LOSSES = {
    (r["estimator"], r["weighting"]): r for r in ch07_supports.ROWS if r["placement"] == "loss"
}
CASES = ch07_supports.geometries(seed=5)
TREE = enumerate_sequences(3, 3, eos=2)


def test_every_overlap_of_three_supports_is_tried_once():
    seen = {tuple(case.hold(i) for i in ch07_supports.PAIRS) for case in CASES}
    assert len(CASES) == 64
    regions = {tuple((torch.stack(case) > -torch.inf).any(1).tolist()) for case in CASES}
    assert regions == {(True, True, True)}
    assert len(seen) == 29  # preorders on three labelled sets: the transitive relations


@pytest.fixture(scope="module")
def table():
    return ch07_supports.support_table(seed=11).set_index(["term", "weight"])


COVERED, FINITE = "P ⊆ M", "P ⊆ R"
BOTH = f"{COVERED}, {FINITE}"


@pytest.mark.parametrize(
    ("row", "stale", "needs", "cut", "token", "prefix", "sequence"),
    [
        (("k1 as a loss", "detached"), "nothing", COVERED, "covered mass", *(3 * ("nothing",))),
        (
            ("k2 as a loss", "detached"),
            "reverse",
            BOTH,
            "covered reverse",
            "reverse, sampler's states",
            "reverse, policy's states",
            "reverse, policy's states",
        ),
        (
            ("k3 as a loss", "detached"),
            "forward",
            f"{COVERED}, R ⊆ P",
            "covered forward",
            "forward, sampler's states",
            "forward, policy's states",
            "forward, policy's states",
        ),
        (
            ("k1 as a loss", "attached"),
            "reverse",
            BOTH,
            "covered reverse + mass",
            "reverse, sampler's states",
            "reverse, whole",
            "reverse, whole",
        ),
        (
            ("k3 as a loss", "attached"),
            "reverse",
            BOTH,
            "covered reverse",
            "reverse, sampler's states",
            "reverse, whole",
            "reverse, whole",
        ),
        (
            ("k1 in the reward", "detached"),
            "reverse − drift",
            BOTH,
            "reverse of the cut policy × mass",
            "reverse − drift, sampler's states",
            "reverse − drift, policy's states",
            "reverse − drift, policy's states",
        ),
        (
            ("k1 recomputed, to go", "detached"),
            "reverse",
            BOTH,
            "covered reverse",
            "neither",
            "neither",
            "reverse, whole",
        ),
    ],
)
def test_rows_of_the_table(table, row, stale, needs, cut, token, prefix, sequence):
    found = table.loc[row]
    assert (found.stale, found.needs, found.cut) == (stale, needs, cut)
    assert (found.token, found.prefix, found.sequence) == (token, prefix, sequence)


def test_unweighted_terms_and_attached_k2_descend_no_kl_when_stale(table):
    none = table.index[table.stale == "neither"]
    assert {weight for _, weight in none} == {"none", "attached"}
    assert [term for term, weight in none if weight == "attached"] == ["k2 as a loss"]
    assert (table.loc[none].token == "neither").all()
    fresh = table.fresh.xs("none", level="weight")
    assert fresh[["k1 as a loss", "k2 as a loss", "k3 as a loss"]].tolist() == [
        "nothing",
        "reverse",
        "forward",
    ]


def test_where_policy_or_reference_forbid_tokens(table):
    """The sampler goes where the policy cannot; a fresh policy goes where the reference cannot."""
    by_policy, by_reference = (
        {name: set(table.index[table[column] == name]) for name in table[column].unique()}
        for column in ("policy", "reference")
    )
    assert by_policy["infinite"] == {("k2 as a loss", "none"), ("k3 as a loss", "none")}
    assert by_policy["covered forward"] == {("k3 as a loss", "detached")}
    assert by_policy["reverse"] == {row for row in table.index if table.stale[row] == "reverse"}
    assert by_reference["nothing"] == {("k1 as a loss", w) for w in ("none", "detached")}
    assert by_reference["forward"] == {("k3 as a loss", w) for w in ("none", "detached")}
    finite = by_reference["nothing"] | by_reference["forward"]
    assert by_reference["infinite"] == set(table.index) - finite


def test_as_a_report_k3_needs_the_reference_inside_the_policy(table):
    reports = table.report_needs.dropna()
    assert (reports.xs("k1 as a loss") == BOTH).all()
    assert (reports.xs("k3 as a loss") == "P = R, R ⊆ M").all()
    assert "k2 as a loss" not in reports.index.get_level_values("term")


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("weighting", ["none", "detached"])
def test_k2_and_k3_in_the_reward_descend_neither_kl(estimator, weighting):
    row = {"estimator": estimator, "placement": "reward", "weighting": weighting}
    fresh = CASES[-1]._replace(sampler=CASES[-1].policy)
    for case in (CASES[-1], fresh, ch07_supports.cut_sampler(seed=1)):
        assert ch07_supports.descends(case, row) == "neither"


@pytest.mark.parametrize("key", [k for k in LOSSES if k[1] != "none"])
def test_a_geometric_ratio_and_the_log_ratio_of_completions(table, key):
    generator = torch.Generator().manual_seed(21)
    tables = torch.randn(3, TREE.num_states, 3, generator=generator, dtype=torch.float64)
    pair, old = Policies(*tables[:2]), tables[2]
    targets = ch07_supports.tree_targets(pair, old, TREE)
    geometric = ch07_supports.row_gradient(pair, old, TREE, LOSSES[key], "geometric")
    assert ch07_supports.name_of(geometric, targets) == "neither"
    completions = expected_sequence_gradient(*pair, TREE, old, **LOSSES[key], level="sequence")
    stale = table.stale[f"{key[0]} as a loss", key[1]]
    whole = {"reverse": "reverse, whole", "forward": "forward, whole"}
    assert ch07_supports.name_of(completions, targets) == whole.get(stale, stale)


@pytest.mark.parametrize("case", CASES[::3])
@pytest.mark.parametrize("key", [k for k in LOSSES if k[1] != "none"])
def test_weighted_losses_are_sums_of_scores(case, key):
    """By a loop over the tokens, with nothing but the coefficient of each score."""
    estimator, weighting = key
    policy, sampler, reference = (x.softmax(-1).tolist() for x in case)
    weights = []
    for p, mu, ref in zip(policy, sampler, reference, strict=True):
        weights.append(0.0)
        if p == 0 or mu == 0:
            continue
        if ref == 0 and key != ("k1", "detached"):
            return  # the reverse KL is infinite, and so is the loss
        log = math.log(p / ref) if ref else math.inf
        slope = {"k1": 1.0, "k2": log, "k3": 1 - ref / p}[estimator]
        value = {"k1": log, "k2": log**2 / 2, "k3": ref / p - 1 + log}[estimator]
        weights[-1] = p * (slope + (value if weighting == "attached" else 0.0))
    expected = expected_score(case.policy, torch.tensor(weights, dtype=torch.float64))
    found = ch07_supports.at_one_state(case, LOSSES[key])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("case", CASES)
def test_what_k3_with_the_ratio_reports(case):
    if not (case.hold(("policy", "sampler")) and case.hold(("policy", "reference"))):
        return
    exact = reverse_kl(case.policy, case.reference)
    lost = case.reference.softmax(-1)[case.policy == -torch.inf].sum()
    for weighting in ("attached", "detached"):
        k1, k3 = (ch07_supports.report(case, LOSSES[k, weighting]) for k in ("k1", "k3"))
        torch.testing.assert_close(k1, exact, rtol=0, atol=EXACT)
        torch.testing.assert_close(k3, exact - lost, rtol=0, atol=EXACT)


def test_at_rest_under_a_cut_sampler():
    case = ch07_supports.cut_sampler(seed=3)
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
        elsewhere = ch07_supports.at_one_state(case._replace(policy=free.log()), LOSSES[key])
        assert elsewhere.abs().max() < EXACT
    for key, rests in (
        (("k3", "attached"), True),
        (("k2", "detached"), True),
        (("k1", "attached"), False),
    ):
        gradient = ch07_supports.at_one_state(at_reference, LOSSES[key]).abs().max()
        assert (gradient < EXACT) == rests
        gradient = ch07_supports.at_one_state(at_rest, LOSSES[key]).abs().max()
        assert (gradient < EXACT) != rests


@pytest.mark.parametrize("seed", range(5))
def test_a_group_mean_leaves_no_force_on_what_the_sampler_cuts(seed):
    policy, sampler, reference = ch07_supports.cut_sampler(seed=seed)
    keep = sampler > -torch.inf
    drawn = sampler.softmax(-1)
    penalty = torch.where(keep, sampler.log_softmax(-1) - reference.log_softmax(-1), 0.0)
    less_mean = expected_score(policy, drawn * (penalty - drawn @ penalty))
    exact = reverse_kl_gradient(masked_logits(policy, keep), reference)
    torch.testing.assert_close(less_mean, exact, rtol=0, atol=EXACT)
    assert less_mean[~keep].abs().max() < EXACT
    with_mean = expected_score(policy, drawn * penalty)
    assert with_mean[~keep].abs().min() > 1e-4


@pytest.mark.parametrize("key", [k for k in LOSSES if k[1] != "none"])
def test_log_probs_from_before_the_cut_rescale_a_state(key):
    policy, old, reference = torch.randn(
        3, 6, generator=torch.Generator().manual_seed(10), dtype=torch.float64
    )
    keep = keep_top(old, top_p=0.7)
    true = ch07_supports.at_one_state(
        Supports(policy, masked_logits(old, keep), reference), LOSSES[key]
    )
    logp, old_logp, ref_logp = (x.log_softmax(-1) for x in (policy, old, reference))
    leaf = logp.clone().requires_grad_(True)
    loss = KLTerm(**LOSSES[key]).loss(
        leaf.unsqueeze(-1), ref_logp.unsqueeze(-1), old_logp=old_logp.unsqueeze(-1)
    )
    (coefficient,) = torch.autograd.grad(loss.sum(), leaf)
    reported = expected_score(policy, masked_logits(old, keep).softmax(-1) * coefficient)
    share = old.softmax(-1)[keep].sum()
    torch.testing.assert_close(share * reported, true[0], rtol=0, atol=EXACT)
    assert 0.7 <= share < 0.97


@pytest.mark.parametrize("seed", range(3))
def test_with_top_p_the_k1_loss_is_an_entropy_bonus(seed):
    """Exercise ``ex-cut-k1``: exact descent nears the uniform policy if nothing else stops it."""
    generator = torch.Generator().manual_seed(seed)
    logits, reference = 2 * torch.randn(2, 8, generator=generator, dtype=torch.float64)
    start = entropy(logits)
    for _ in range(2000):
        keep = keep_top(logits, top_p=0.9)
        policy = logits.softmax(-1)
        two_rates = torch.where(keep, -1.0, 1.0).double()
        natural = policy * (two_rates - policy @ two_rates)
        assert -natural @ policy.log() > 0 or keep.all()
        sampler = masked_logits(logits, keep)
        logits = logits - 0.2 * expected_gradient(logits, reference, sampler, estimator="k1")
    assert start < 0.85 * math.log(8) < 0.97 * math.log(8) < entropy(logits)


def test_staleness_by_k3_needs_equal_supports():
    policy, sampler, _ = ch07_supports.cut_sampler(seed=7)
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
    row = LOSSES["k3", "attached"]
    found = ch07_supports.row_gradient(pair, old, TREE, row, ratio)
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    if not frozen:
        assert covered < sequence_kl(*pair, TREE) - 0.1
        k1 = ch07_supports.row_gradient(pair, old, TREE, LOSSES["k1", "attached"], ratio)
        assert (k1 - found).abs().max() > 1e-2
    chance = sequence_probability(old, TREE)
    logp, ref_logp, old_logp = (token_logp(x, TREE)[chance > 0] for x in (*pair, old))
    loss = KLTerm(weighting="attached", ratio=ratio).loss(
        logp, ref_logp, old_logp=old_logp, mask=TREE.mask[chance > 0]
    )
    value = chance[chance > 0] @ loss.sum(-1)
    torch.testing.assert_close(value, covered.detach(), rtol=0, atol=EXACT)
    assert token_logp(old, TREE).isinf().any()


def test_what_no_inclusion_decides_is_refused():
    with pytest.raises(ValueError, match="no set of inclusions"):
        ch07_supports.needs([i == 7 for i in range(64)], CASES)
