"""The attached prefix ratio against autograd through the sequence KL, on trees and chains."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, jacrev

from kl_term.kl.credit import (
    credit_moments,
    last_token_groups,
    sample_gradients,
    tie_states,
    weighted_moments,
)
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import relative_error
from kl_term.kl.full_vocabulary import markov_kl
from kl_term.kl.importance import importance_ratio
from kl_term.kl.prefix import (
    PRODUCT,
    k3_noise_gap,
    markov_kl_moments,
    markov_second_moments,
    prefix_coefficients,
)
from kl_term.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
    visited_kl_gradient,
)
from kl_term.kl.surrogates import ESTIMATORS
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import token_mean_weight
from tests.trees import TIGHT, draw

WORLDS = {"fixed": (3, 3, None), "ragged": (3, 4, 2), "ragged2": (2, 5, 0), "wide": (4, 3, 1)}


class World:
    """A tree, a policy far from its reference, and a sampler: fresh, or stale by as much again."""

    def __init__(self, vocab, length, eos, *, stale, drift=1.2, seed=1):
        self.sequences = enumerate_sequences(vocab, length, eos=eos)
        shape = (self.sequences.num_states, vocab)
        self.ref_logits = 1.2 * draw(*shape, seed=seed)
        self.logits = self.ref_logits + drift * draw(*shape, seed=seed + 1)
        self.old_logits = self.logits + 0.8 * stale * draw(*shape, seed=seed + 2)
        self.mask = self.sequences.mask
        self.leaf = self.logits.clone().requires_grad_(True)
        self.logp, self.ref_logp, self.old_logp = (
            token_logp(x, self.sequences) for x in (self.leaf, self.ref_logits, self.old_logits)
        )
        self.log_ratio = self.logp - self.ref_logp
        self.exact = sequence_kl_gradient(self.logits, self.ref_logits, self.sequences)

    def ratio(self, level):
        return importance_ratio(self.logp, self.old_logp, self.mask, level=level)

    def gradient(self, per_token):
        """Expected gradient under the sampler of a loss summed over tokens."""
        probability = sequence_probability(self.old_logits, self.sequences)
        loss = (probability[:, None] * torch.where(self.mask, per_token, 0.0)).sum()
        return torch.autograd.grad(loss, self.leaf, retain_graph=True)[0]

    def error(self, gradient):
        return relative_error(gradient.flatten(), self.exact.flatten()).item()


@pytest.fixture(params=[False, True], ids=["fresh", "stale"])
def stale(request):
    return request.param


@pytest.fixture(params=WORLDS.values(), ids=WORLDS.keys())
def world(request, stale):
    return World(*request.param, stale=stale)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k4"])
def test_attached_prefix_losses_have_the_gradient_of_the_sequence_kl(world, estimator):
    value = ESTIMATORS[estimator](world.logp, world.ref_logp)
    choice = {"estimator": estimator, "weighting": "attached", "ratio": "prefix"}
    given = (world.logp, world.ref_logp)
    loss = KLTerm(**choice).loss(*given, old_logp=world.old_logp, mask=world.mask)
    for found in (
        world.gradient(loss),
        world.gradient(world.ratio("prefix") * value),
        expected_sequence_gradient(
            world.logits, world.ref_logits, world.sequences, world.old_logits, **choice
        ),
    ):
        torch.testing.assert_close(found, world.exact, **TIGHT)
        assert not torch.allclose(found, -world.exact, atol=1e-3)
    # Detached, or with the token's own ratio, the same loss misses the future.
    assert world.error(world.gradient(world.ratio("prefix").detach() * value)) > 0.05
    assert world.error(world.gradient(world.ratio("token") * value)) > 0.05


def test_a_mean_over_the_tokens_of_many_completions_keeps_the_prefix_ratio_exact():
    """The error falls as one over their number; with one, a mean per completion, it does not."""
    world = World(*WORLDS["ragged"], stale=True)
    lengths = world.mask.sum(-1)
    drawn = sequence_probability(world.old_logits, world.sequences)
    of_length = torch.zeros(lengths.max() + 1, dtype=drawn.dtype).index_add(0, lengths, drawn)
    terms = KLTerm(estimator="k3", weighting="attached", ratio="prefix").loss(
        world.logp, world.ref_logp, old_logp=world.old_logp, mask=world.mask
    )
    errors = []
    for completions in (1, 100, 200):
        weight = token_mean_weight(of_length, completions)[lengths] * (drawn @ lengths.to(drawn))
        errors.append(world.error(world.gradient(weight[:, None] * terms)))
    assert errors[0] > 0.05 and errors[1] < 0.01
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.05)


def test_what_k2_needs(world):
    k2 = ESTIMATORS["k2"](world.logp, world.ref_logp)
    prefix = world.ratio("prefix")
    on_policy = token_logp(world.leaf, world.sequences).sum(-1).exp()
    mean = (on_policy[:, None] * k2).sum()
    of_its_mean = torch.autograd.grad(mean, world.leaf, retain_graph=True)[0]
    torch.testing.assert_close(world.gradient(prefix * k2), of_its_mean, **TIGHT)
    assert world.error(of_its_mean) > 0.05
    visited = visited_kl_gradient(world.logits, world.ref_logits, world.sequences)
    torch.testing.assert_close(world.gradient(prefix.detach() * k2), visited, **TIGHT)
    assert world.error(visited) > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_clip", "k4"])
def test_coefficients_are_those_of_autograd_and_skip_masked_tokens(estimator, stale):
    logp, ref_logp, noise = (1.5 * draw(6, 7, seed=s) - 2.0 for s in (1, 2, 3))
    old_logp = noise if stale else logp.clone()
    mask = draw(6, 7, seed=4) > -0.7  # with holes, as tool outputs leave them
    assert not mask.all()
    leaf = logp.clone().requires_grad_(True)
    ratio = importance_ratio(leaf, old_logp, mask, level="prefix")
    value = ESTIMATORS[estimator](leaf, ref_logp)
    loss = torch.where(mask, ratio * value, 0.0).sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    spoiled = torch.where(mask, logp, torch.nan)
    for given in (logp, spoiled):
        found = prefix_coefficients(given, ref_logp, old_logp, mask, estimator=estimator)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)
    # A hole is as if it were not there.
    for row, kept in enumerate(mask):
        short = (x[row, kept] for x in (logp, ref_logp, old_logp))
        torch.testing.assert_close(
            prefix_coefficients(*short, kept[kept], estimator=estimator),
            found[row, kept],
            rtol=1e-12,
            atol=1e-11,
        )


def moments_of(world, estimator):
    """k3 under the attached prefix ratio, or k1 to go with per-decision weights."""
    given = [x.detach() for x in (world.logp, world.ref_logp, world.old_logp)]
    coefficients = prefix_coefficients(*given, world.mask, estimator=estimator)
    if estimator == "k1":
        coefficients = coefficients - world.ratio("prefix").detach()
    return credit_moments(world.logits, world.sequences, coefficients, world.old_logits)


def test_noise_gap_is_the_difference_of_two_variances(world):
    k3, to_go = (moments_of(world, estimator) for estimator in ("k3", "k1"))
    torch.testing.assert_close(k3.mean, to_go.mean, **TIGHT)
    gap = k3_noise_gap(world.logits, world.ref_logits, world.sequences, world.old_logits)
    difference = k3.trace_var - to_go.trace_var
    torch.testing.assert_close(gap, difference, rtol=1e-10, atol=1e-12)


def test_a_policy_that_dropped_a_token_it_seldom_draws_makes_k1s_constant_a_help():
    """The mean is weighted by the squared score, which is large for seldom tokens."""
    peaked = World(2, 1, None, stale=False)
    logp = torch.tensor([0.99, 0.01], dtype=torch.float64).log()
    ref_logp = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    moments = [
        credit_moments(logp[None], peaked.sequences, (logp - ref_logp + constant)[:, None])
        for constant in (0.0, 1.0)
    ]
    assert moments[1].trace_var < moments[0].trace_var
    torch.testing.assert_close(moments[0].mean, moments[1].mean, **TIGHT)


@pytest.mark.parametrize("shape", WORLDS.values(), ids=WORLDS.keys())
def test_k3_is_quieter_near_the_reference_and_not_everywhere(shape, stale):
    ratios = []
    for drift in (1e-2, 5e-3):
        near = World(*shape, stale=stale, drift=drift)
        gap = k3_noise_gap(near.logits, near.ref_logits, near.sequences, near.old_logits)
        square = torch.eye(near.logits.shape[-1], dtype=torch.float64)
        score = square[near.sequences.tokens] - near.logits.softmax(-1)[near.sequences.states]
        squared = torch.where(near.mask, score.square().sum(-1), 0.0)
        past = squared.cumsum(-1) - squared
        weight = sequence_probability(near.old_logits, near.sequences)
        per_token = near.ratio("prefix").square() * past * near.log_ratio.square()
        leading = -(weight @ torch.where(near.mask, per_token, 0.0).sum(-1)).detach()
        ratios.append((gap / leading).item())
    assert ratios[0] == pytest.approx(1, abs=0.05)
    assert abs(ratios[1] - 1) < 0.7 * abs(ratios[0] - 1)  # the rest is of higher order
    gaps = [
        k3_noise_gap(far.logits, far.ref_logits, far.sequences, far.old_logits)
        for far in (World(*shape, stale=stale, drift=2.5, seed=s) for s in range(20))
    ]
    assert max(gaps) > 0


@pytest.mark.parametrize("weight", ["prefix", "sequence"])
def test_markov_moments_are_those_of_every_sequence_listed(weight):
    vocab, length = 3, 4
    logits, ref_logits, step = draw(3, 2, vocab + 1, vocab, seed=8)  # two chains at once
    old_logits = logits + 0.5 * step
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    score = torch.eye(vocab, dtype=torch.float64) - logits.softmax(-1).unsqueeze(-2)
    baseline = draw(length, 2, vocab + 1, seed=9)
    own = log_ratio.unsqueeze(-1) * score
    future = torch.expm1(-log_ratio) + log_ratio
    found = markov_second_moments(
        logits, old_logits, own, future, length, weight=weight, baseline=baseline
    )
    for chain in range(2):
        for upto in range(1, length + 1):
            sequences = enumerate_sequences(vocab, upto)
            groups = last_token_groups(sequences, vocab)
            pick = lambda x, chain=chain, groups=groups: x[chain][groups]
            logp, ref_logp, old_logp = (
                token_logp(pick(x), sequences) for x in (logits, ref_logits, old_logits)
            )
            ratio = importance_ratio(logp, old_logp, sequences.mask, level="prefix")
            if weight == "sequence":
                ratio = ratio[:, -1:].expand_as(ratio)
            k1 = logp - ref_logp
            k3 = ratio * (torch.expm1(-k1) + k1)
            states = groups[sequences.states]
            at = torch.stack([baseline[t, chain, states[:, t]] for t in range(upto)], dim=-1)
            coefficient = ratio * (k1 - at) + k3.flip(-1).cumsum(-1).flip(-1) - k3
            gradients = tie_states(sample_gradients(pick(logits), sequences, coefficient), groups)
            expected = sequence_probability(pick(old_logits), sequences) @ (
                gradients.flatten(1).square().sum(-1)
            )
            torch.testing.assert_close(found[upto - 1, chain], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("baseline", [False, True], ids=["stale", "fresh, with a baseline"])
def test_moments_of_each_way_are_those_of_autograd_through_every_sequence(baseline):
    vocab, length = 3, 3
    logits, ref_logits, step = draw(3, vocab + 1, vocab, seed=12)
    old_logits = logits if baseline else logits + 0.5 * step
    sequences = enumerate_sequences(vocab, length)
    groups = last_token_groups(sequences, vocab)
    old_logp = token_logp(old_logits[groups], sequences)
    chance = old_logp.sum(-1).exp()

    def to_go(costs):
        return costs.flip(-1).cumsum(-1).flip(-1).detach()

    def losses(leaf):
        logp, ref_logp = (token_logp(x[groups], sequences) for x in (leaf, ref_logits))
        k1, ratio = logp - ref_logp, (logp - old_logp).exp()
        prefix = ratio.cumprod(-1)
        state_kl = reverse_kl(leaf, ref_logits)[groups][sequences.states]
        mean = chance @ k1.detach() if baseline else torch.zeros(length).double()
        off = to_go(mean) * prefix.detach() * logp
        ways = {
            "k1 reward to go": to_go(prefix * k1) * logp - off,
            "k1 prefix": prefix * k1 - off,
            "k3 prefix": prefix * (torch.expm1(-k1) + k1) - off,
            "full vocabulary prefix": prefix / ratio * state_kl - off + mean * logp,
            PRODUCT: prefix[:, -1:].detach() * to_go(k1) * logp - off,
        }
        return {name: per_token.sum(-1) for name, per_token in ways.items()}

    found = markov_kl_moments(logits, ref_logits, old_logits, length, baseline=baseline)
    exact = grad(markov_kl)(logits, ref_logits, length)
    for way, gradients in jacrev(losses)(logits).items():
        torch.testing.assert_close(torch.tensordot(chance, gradients, 1), exact, **TIGHT)
        second = chance @ gradients.flatten(1).square().sum(-1)
        torch.testing.assert_close(found[way][-1], second, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_independent_tokens_make_the_noise_of_a_value_that_of_the_gradient(length):
    """One row of logits for every token, the KL to go as baseline, on-policy: a closed form."""
    sequences = enumerate_sequences(3, length)
    row, ref_row = 1.2 * draw(2, 3, seed=11)
    logits, ref_logits = (x.expand(sequences.num_states, 3) for x in (row, ref_row))
    logp, ref_logp = token_logp(logits, sequences), token_logp(ref_logits, sequences)
    policy, log_ratio = row.softmax(-1), row.log_softmax(-1) - ref_row.log_softmax(-1)
    mean = policy @ log_ratio
    owed = mean * torch.arange(length, 0, -1, dtype=torch.float64)
    shared = torch.zeros(sequences.num_states, dtype=torch.long)
    probability = sequence_probability(logits, sequences)
    score = torch.eye(3, dtype=torch.float64) - policy
    own_gradient = (log_ratio - mean)[:, None] * score
    own = policy @ (own_gradient - policy @ own_gradient).square().sum(-1)
    values = {"k1": log_ratio, "k3": torch.expm1(-log_ratio) + log_ratio}
    for estimator, value in values.items():
        given = (logp, ref_logp, logp, sequences.mask)
        coefficient = prefix_coefficients(*given, estimator=estimator) - owed
        if estimator == "k1":
            coefficient = coefficient - 1.0
        gradients = tie_states(sample_gradients(logits, sequences, coefficient), shared)
        found = weighted_moments(probability, gradients)
        torch.testing.assert_close(found.mean[0], length * (policy @ own_gradient), **TIGHT)
        spread = policy @ (value - mean).square() * (1 - policy.square().sum())
        closed = length * own + length * (length - 1) / 2 * spread
        torch.testing.assert_close(found.trace_var, closed, rtol=1e-11, atol=1e-12)


def test_a_baseline_belongs_beside_the_score_and_not_into_the_cost(world):
    """Inside the loss it is paid once a token: it moves the mean length."""
    k3 = ESTIMATORS["k3"](world.logp, world.ref_logp)
    prefix, baseline = world.ratio("prefix"), draw(world.mask.shape[1], seed=7)
    beside = prefix * k3 - (prefix * baseline).detach() * world.logp
    torch.testing.assert_close(world.gradient(beside), world.exact, **TIGHT)
    inside = world.gradient(prefix * (k3 - 1.0))
    on_policy = token_logp(world.leaf, world.sequences).sum(-1).exp()
    mean_length = on_policy @ world.mask.sum(-1).double()
    (longer,) = torch.autograd.grad(mean_length, world.leaf, retain_graph=True)
    torch.testing.assert_close(inside, world.exact - longer, **TIGHT)


def test_a_cap_on_the_estimator_is_a_bias(stale):
    far = World(3, 4, 2, stale=stale, drift=3.0)
    clipped = ESTIMATORS["k3_clip"](far.logp, far.ref_logp)
    assert far.error(far.gradient(far.ratio("prefix") * clipped)) > 1e-3


def test_under_a_cut_sampler_k1_ends_at_ref_over_e_for_the_last_token_only():
    """Earlier: pi / ref = exp(-1 - v) with v the best sum to come, minus the mass that is kept."""
    ref = torch.tensor([[0.4, 0.35, 0.25], [0.5, 0.2, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
    kept = slice(0, 2)  # each of the two leads to a row of its own

    def descend(policy):
        leaf = policy.log().requires_grad_(True)
        at = leaf.softmax(-1)
        own = (at * (at / ref).log())[:, kept].sum(-1)
        loss = own[0] + at[0, kept] @ own[1:]
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    def completed(kept_part):
        return torch.cat([kept_part, 1 - kept_part.sum(-1, keepdim=True)], dim=-1)

    last = ref[:, kept] / math.e
    first = ref[0, kept] * torch.exp(-1 + last[1:].sum(-1))
    best, at_rest = descend(completed(torch.cat([first[None], last[1:]])))
    assert at_rest.abs().max() < 1e-14
    assert best.item() == pytest.approx(-first.sum().item(), abs=1e-14)
    assert ((first > 1.1 * ref[0, kept] / math.e) & (first < ref[0, kept])).all()
    everywhere, still_moving = descend(completed(last))  # ref / e at every token
    assert everywhere > best and still_moving.abs().max() > 0.01


def test_k3_needs_the_policy_to_cover_the_reference_and_k1_does_not():
    """The reference allows a token that the policy rules out, more of it in some states."""
    world = World(2, 4, None, stale=True)
    share = torch.sigmoid(2 * draw(world.sequences.num_states, seed=5))  # left for policy's tokens
    ref_logp = world.ref_logp + share.log()[world.sequences.states]
    on_policy = world.logp.sum(-1).exp()
    kl = (on_policy * (world.logp - ref_logp).sum(-1)).sum()
    (exact,) = torch.autograd.grad(kl, world.leaf, retain_graph=True)
    found = {
        k: world.gradient(world.ratio("prefix") * ESTIMATORS[k](world.logp, ref_logp))
        for k in ("k1", "k3")
    }
    torch.testing.assert_close(found["k1"], exact, **TIGHT)
    assert relative_error(found["k3"].flatten(), exact.flatten()) > 0.05
    # k3 reads the forbidden mass as a discount: earlier tokens are drawn to such states.
    forbidden = (on_policy @ (1 - share)[world.sequences.states]).sum()
    (drawn,) = torch.autograd.grad(forbidden, world.leaf, retain_graph=True)
    torch.testing.assert_close(found["k3"], exact - drawn, **TIGHT)
    token = world.gradient(world.ratio("token") * ESTIMATORS["k3"](world.logp, ref_logp))
    k2 = world.gradient(world.ratio("token").detach() * ESTIMATORS["k2"](world.logp, ref_logp))
    torch.testing.assert_close(token, k2, **TIGHT)  # a token-weighted loss does not notice


def test_masking_tokens_that_the_policy_chose_is_not_leaving_out_their_cost(world):
    """As for overlong answers: the tokens move the states, masked or not."""
    counted = world.mask.clone()
    counted[:, 0] = False
    k3 = ESTIMATORS["k3"](world.logp, world.ref_logp)
    on_policy = token_logp(world.leaf, world.sequences).sum(-1).exp()
    kept = (on_policy @ torch.where(counted, world.log_ratio, 0.0)).sum()
    (exact,) = torch.autograd.grad(kept, world.leaf, retain_graph=True)
    loss_mask_only = torch.where(counted, world.ratio("prefix") * k3, 0.0)
    torch.testing.assert_close(world.gradient(loss_mask_only), exact, **TIGHT)
    skipping = importance_ratio(world.logp, world.old_logp, counted, level="prefix")
    gradient = world.gradient(torch.where(counted, skipping * k3, 0.0))
    assert relative_error(gradient.flatten(), exact.flatten()) > 0.05


def test_tool_outputs_are_skipped_rightly(stale):
    """The second token is an environment's: everyone's log-prob of it is the same, and masked."""
    world = World(3, 4, None, stale=stale)
    environment = world.sequences.states[:, 1].unique()
    tables = [x.clone() for x in (world.logits, world.ref_logits, world.old_logits)]
    for table in tables:
        table[environment] = world.ref_logits[environment]
    logits, ref_logits, old_logits = tables
    exact = sequence_kl_gradient(logits, ref_logits, world.sequences)
    leaf = logits.clone().requires_grad_(True)
    given = [token_logp(x, world.sequences) for x in (leaf, ref_logits, old_logits)]
    chosen = world.mask.clone()
    chosen[:, 1] = False
    for unread in given:  # what a masked position holds does not matter
        unread[:, 1] = unread[:, 1].detach() - 7.0
    logp, ref_logp, old_logp = given
    term = KLTerm(estimator="k3", weighting="attached", ratio="prefix")
    loss = term.loss(logp, ref_logp, old_logp=old_logp, mask=chosen).sum(-1)
    probability = sequence_probability(old_logits, world.sequences)
    (gradient,) = torch.autograd.grad(probability @ loss, leaf)
    exact[environment] = 0.0  # not the policy's to change
    torch.testing.assert_close(gradient, exact, **TIGHT)


def test_zero_probabilities_are_loud():
    logp, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    term = KLTerm(estimator="k3", weighting="attached", ratio="prefix")
    never = torch.tensor([[-1.0, -math.inf]])
    assert term.loss(logp, never, old_logp=logp, mask=mask)[0, 1] == math.inf
    assert term.loss(never, logp, old_logp=logp, mask=mask)[0, 1].isnan()


def test_half_precision_overflows_unless_raised_first():
    logp = torch.full((1, 512), -1.0, dtype=torch.float16)
    old_logp = torch.full((1, 512), -1.03125, dtype=torch.float16)
    ratio = importance_ratio(logp, old_logp, torch.ones(1, 512), level="prefix")
    assert ratio[0, -1].item() == pytest.approx(math.exp(16), rel=1e-5)
    assert torch.exp((logp - old_logp).cumsum(-1))[0, -1].isinf()
    # Raised first the loss is finite, and its gradient is not: it flows back into float16.
    term = KLTerm(estimator="k3", weighting="attached", ratio="prefix")
    for dtype, finite in ((torch.float16, False), (torch.float32, True)):
        leaf = logp.to(dtype, copy=True).requires_grad_(True)
        loss = term.loss(leaf, leaf.detach() + 0.2, old_logp=old_logp, mask=torch.ones(1, 512))
        assert loss.isfinite().all()
        loss.sum().backward()
        assert leaf.grad.isfinite().all() == finite


@pytest.mark.parametrize("estimator", ["k3", "k4"])
def test_a_token_pays_its_log_ratio_to_the_last_digit(estimator):
    ref_logp = torch.tensor([[-1.0, -0.5, -1.0]])
    logp = ref_logp + torch.tensor([[-18.0, -25.0, -40.0]])
    every = torch.ones(1, 3, dtype=torch.bool)
    found = prefix_coefficients(logp, ref_logp, logp, every, estimator=estimator)
    later = [math.exp(25) - 26 + math.exp(40) - 41, math.exp(40) - 41, 0.0]
    own = [-18.0, -25.0, -40.0]
    assert found[0, 2].item() == own[2]
    expected = [one + rest for one, rest in zip(own, later, strict=True)]
    assert found[0].tolist() == pytest.approx(expected, rel=1e-6)
