"""Chapter 8: weights on completions, over every completion of small trees."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.func import grad

from analysis.chapters.ch08_reward_side import claims_on_objectives, groups
from analysis.evidence import length_weights
from analysis.evidence.length_weights import DIRECTIONS
from kl_term.kl.credit import credit_moments, state_average
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.enumeration import exact_kl_gradient
from kl_term.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    token_logp,
    visited_kl_gradient,
)
from kl_term.kl.surrogates import gradient_coefficient, kl_loss
from kl_term.objectives.advantages import group_centre
from kl_term.objectives.aggregation import aggregate, token_mean_weight
from kl_term.objectives.losses import policy_loss
from tests.trees import TIGHT, draw

VOCAB, LONGEST = 3, 4
END = VOCAB - 1
RAGGED = enumerate_sequences(VOCAB, LONGEST, eos=END)
FIXED = enumerate_sequences(VOCAB, 3)
ESTIMATORS = ("k1", "k2", "k3")


def pair(sequences, vocab=VOCAB):
    return tuple(2 * draw(sequences.num_states, vocab, seed=seed) for seed in (0, 1))


def lengths(sequences):
    return sequences.mask.sum(-1).double()


#: A pair on the ragged tree, and GRPO's weight on each completion.
ONE_OVER_LENGTH = (*pair(RAGGED), 1 / lengths(RAGGED))
FINISHED = ((RAGGED.tokens == END) & RAGGED.mask).any(-1).double()


def by_token(weights, sequences):
    return weights.unsqueeze(-1).expand(sequences.mask.shape)


def of_term(pair, sequences, estimator, weights, **fields):
    return expected_sequence_gradient(
        *pair,
        sequences,
        estimator=estimator,
        token_weights=by_token(weights, sequences),
        **fields,
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_weight_is_another_sampler(estimator):
    """Old statement: on fresh samples k2 and k3 follow a KL and k1 nothing, whatever the mean."""
    logits, ref, weights = ONE_OVER_LENGTH
    of_action = state_average(by_token(weights, RAGGED), logits, RAGGED, by_action=True)
    tilted = logits.log_softmax(-1) + of_action.log()
    by_sampler = expected_sequence_gradient(logits, ref, RAGGED, tilted, estimator=estimator)
    mean = sequence_probability(logits, RAGGED) @ weights
    gradient = of_term((logits, ref), RAGGED, estimator, weights)
    torch.testing.assert_close(gradient, mean * by_sampler, **TIGHT)
    fresh = expected_sequence_gradient(logits, ref, RAGGED, estimator=estimator)
    assert (gradient - mean * fresh).abs().max() > 1e-2


@pytest.mark.parametrize(
    "weights", [ONE_OVER_LENGTH[2], FINISHED], ids=["1/|o|", "cut completions left out"]
)
def test_k1_is_the_gradient_of_the_mean_weight(weights):
    logits, ref, _ = ONE_OVER_LENGTH
    gradient = of_term((logits, ref), RAGGED, "k1", weights)
    exact = grad(lambda z: sequence_probability(z, RAGGED) @ weights)(logits)
    torch.testing.assert_close(gradient, exact, **TIGHT)
    assert gradient.norm() > 1e-2
    at_reference = of_term((ref, ref), RAGGED, "k1", weights)
    assert at_reference.norm() > 1e-2
    for estimator in ("k2", "k3"):
        assert of_term((ref, ref), RAGGED, estimator, weights).norm() < 1e-14


@pytest.mark.parametrize(("estimator", "direction"), DIRECTIONS.items())
def test_the_error_is_a_covariance_at_each_state(estimator, direction):
    logits, ref, weights = ONE_OVER_LENGTH
    policy, visits = logits.softmax(-1), state_visits(logits, RAGGED).unsqueeze(-1)
    of_action = state_average(by_token(weights, RAGGED), logits, RAGGED, by_action=True)
    of_state = (policy * of_action).sum(-1, keepdim=True)
    coefficient = gradient_coefficient(
        logits.log_softmax(-1), ref.log_softmax(-1), estimator=estimator
    )
    scores = torch.eye(VOCAB, dtype=logits.dtype) - policy.unsqueeze(-2)  # [S, V, V]: e_a - pi
    product = policy * (of_action - of_state) * coefficient
    covariance = (product.unsqueeze(-1) * scores).sum(-2)
    exact = visits * (of_state * exact_kl_gradient(logits, ref, direction=direction) + covariance)
    torch.testing.assert_close(of_term((logits, ref), RAGGED, estimator, weights), exact, **TIGHT)
    assert (visits * covariance).norm() > 1e-2


def test_what_the_tokens_decide_adds_up_to_the_variance_of_the_weight():
    logits, _, weights = ONE_OVER_LENGTH
    of_action = state_average(by_token(weights, RAGGED), logits, RAGGED, by_action=True)
    policy = logits.softmax(-1)
    of_state = (policy * of_action).sum(-1, keepdim=True)
    spread = (policy * (of_action - of_state).square()).sum(-1)
    mass = sequence_probability(logits, RAGGED)
    variance = mass @ weights.square() - (mass @ weights).square()
    torch.testing.assert_close(state_visits(logits, RAGGED) @ spread, variance, **TIGHT)


@pytest.mark.parametrize("column", [0, 1])
def test_what_a_prompt_or_a_tool_decides_about_the_weight_leaves_no_error(column):
    """Old statement: without error only if the weight is the same for all completions."""
    logits, ref = pair(FIXED)
    own = FIXED.mask.clone()
    own[:, column] = False  # column 0: which of three prompts; column 1: what the tool answers
    chosen = torch.ones(FIXED.num_states, dtype=torch.bool)
    chosen[FIXED.states[:, column]] = False
    logits[~chosen] = logits[~chosen][0]  # it answers alike, whatever was asked
    policy, mass = logits.softmax(-1), sequence_probability(logits, FIXED)
    visits = state_visits(logits, FIXED)
    logp, ref_logp = token_logp(logits, FIXED), token_logp(ref, FIXED)
    external = torch.tensor([1, 1 / 2, 1 / 4]).double()[FIXED.tokens[:, column]]
    mixed = external / (1 + FIXED.tokens[:, 2])
    for weights in (external, mixed):
        of_action = state_average(by_token(weights, FIXED), logits, FIXED, by_action=True)
        of_state = (policy * of_action).sum(-1, keepdim=True)
        spread = visits * (policy * (of_action - of_state).square()).sum(-1)
        variance = mass @ weights.square() - (mass @ weights).square()
        torch.testing.assert_close(spread.sum(), variance, **TIGHT)
        assert spread[~chosen].sum() > 1e-3
        k1, k2 = (
            credit_moments(logits, FIXED, torch.where(own, weights[:, None] * c, 0.0)).mean[chosen]
            for c in (torch.ones_like(logp), logp - ref_logp)
        )
        kl = exact_kl_gradient(logits, ref, direction="reverse")
        error = k2 - (visits[:, None] * of_state * kl)[chosen]
        if weights is external:  # it varies, and the policy's tokens decide nothing about it
            assert max(spread[chosen].sum(), k1.norm(), error.norm()) < 1e-13
        else:
            assert min(spread[chosen].sum(), k1.norm(), error.norm()) > 1e-3


@pytest.mark.parametrize(
    ("direction", "divergence"), [("reverse", reverse_kl), ("forward", forward_kl)]
)
def test_the_sum_over_the_vocabulary_keeps_its_kl_with_other_weights_on_states(
    direction, divergence
):
    """Old statement: a mean per completion leaves no KL. Of sampled tokens; not of this one."""
    logits, ref = pair(RAGGED)
    weights, mass = 1 / lengths(RAGGED), sequence_probability(logits, RAGGED)

    def loss(leaf):
        terms = divergence(leaf, ref)[RAGGED.states]
        return mass @ (weights * torch.where(RAGGED.mask, terms, 0.0).sum(-1))

    gradient = grad(loss)(logits)
    of_state = state_average(by_token(weights, RAGGED), logits, RAGGED, by_action=True)
    of_state = (logits.softmax(-1) * of_state).sum(-1, keepdim=True)
    visits = state_visits(logits, RAGGED)[:, None]
    exact = visits * exact_kl_gradient(logits, ref, direction=direction)
    torch.testing.assert_close(gradient, of_state * exact, **TIGHT)
    assert of_state.min() > 1 / LONGEST - 1e-12
    assert length_weights.unexplained(gradient.flatten(), exact.flatten()) > 1e-2
    estimator = {"reverse": "k2", "forward": "k3"}[direction]
    sampled = of_term((logits, ref), RAGGED, estimator, weights)
    assert length_weights.unexplained(sampled, exact) > 1e-2


def test_exact_at_one_length_at_one_state_and_for_constants():
    for sequences in (FIXED, enumerate_sequences(5, 1)):
        logits, ref = pair(sequences, vocab=int(sequences.tokens.max()) + 1)
        weights = 1 / lengths(sequences)
        exact = weights[0] * visited_kl_gradient(logits, ref, sequences)
        torch.testing.assert_close(of_term((logits, ref), sequences, "k2", weights), exact, **TIGHT)
        assert of_term((logits, ref), sequences, "k1", weights).norm() < 1e-14
    both = pair(RAGGED)
    for estimator, direction in DIRECTIONS.items():
        constant = length_weights.completion_weights(both[0], RAGGED, math.inf)
        gradient = of_term(both, RAGGED, estimator, constant)
        exact = constant[0] * visited_kl_gradient(*both, RAGGED, direction=direction)
        torch.testing.assert_close(gradient, exact, **TIGHT)
        mean = of_term(both, RAGGED, estimator, 1 / lengths(RAGGED))
        assert length_weights.unexplained(mean, exact) > 1e-3


def test_a_k2_loss_under_one_over_length_can_raise_the_kl_it_names():
    """Root: end (log-ratio 0.6), a (1.4), b (-2.5); after a and b the policy is the reference."""
    sequences = enumerate_sequences(3, 5, eos=END)
    logits = torch.tensor([0.0, 0.0, -30.0]).double().repeat(sequences.num_states, 1)
    ref = logits.clone()
    logits[0] = torch.tensor([0.4, 0.05, 0.55]).double().log()
    ref[0] = torch.tensor([0.1, 0.6, 0.3]).double().log()
    kl = sequence_kl_gradient(logits, ref, sequences)
    mean = of_term((logits, ref), sequences, "k2", 1 / lengths(sequences))
    total = of_term((logits, ref), sequences, "k2", torch.ones(len(sequences.mask)).double())
    assert (mean * kl).sum() < -0.01 < 0.01 < (total * kl).sum()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_mean_over_the_tokens_of_a_batch_is_a_weight(estimator, number):
    """Every batch, through the aggregation that a trainer runs."""
    sequences = enumerate_sequences(3, 3 if number < 3 else 2, eos=END)
    logits, ref = pair(sequences)
    mass, ref_logp = sequence_probability(logits, sequences), token_logp(ref, sequences)
    batches = itertools.product(range(len(mass)), repeat=number)

    def loss(leaf):
        terms = kl_loss(token_logp(leaf, sequences), ref_logp, estimator=estimator)
        rows = [list(batch) for batch in batches]
        return sum(
            mass[row].prod() * aggregate(terms[row], sequences.mask[row], "token_mean")
            for row in rows
        )

    weights = length_weights.completion_weights(logits, sequences, number)
    torch.testing.assert_close(
        of_term((logits, ref), sequences, estimator, weights), grad(loss)(logits), **TIGHT
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_error_of_a_batch_falls_as_one_over_its_completions(estimator):
    both = pair(RAGGED)
    mass, size = sequence_probability(both[0], RAGGED), lengths(RAGGED)
    mean = mass @ size
    spread = mass @ size.square() - mean.square()
    total = of_term(both, RAGGED, estimator, torch.ones_like(size))
    leading = total * spread / mean**3 - of_term(both, RAGGED, estimator, size - mean) / mean**2
    if estimator == "k1":  # lengthens: the gradient of 1 / E[T]
        shorter = grad(lambda z: 1 / (sequence_probability(z, RAGGED) @ size))(both[0])
        torch.testing.assert_close(leading, shorter, **TIGHT)
    errors = []
    for number in (64, 256):
        weights = length_weights.completion_weights(both[0], RAGGED, number)
        rest = number * (of_term(both, RAGGED, estimator, weights) - total / mean) - leading
        errors.append((rest.norm() / leading.norm()).item())
    assert errors[1] < 0.02
    assert errors[0] == pytest.approx(4 * errors[1], rel=0.05)


def generalised_kl(weights, of_logp, other_logp):
    return weights @ (of_logp.exp() * (of_logp - other_logp) - of_logp.exp() + other_logp.exp())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_at_sequence_level_the_weight_leaves_a_divergence(estimator):
    logits, ref, weights = ONE_OVER_LENGTH
    ref_logp = token_logp(ref, RAGGED).sum(-1)

    def objective(leaf):
        logp = token_logp(leaf, RAGGED).sum(-1)
        if estimator == "k1":
            return weights @ logp.exp()
        sides = (logp, ref_logp) if estimator == "k2" else (ref_logp, logp)
        return generalised_kl(weights, *sides)

    exact = grad(objective)(logits)
    whole = of_term((logits, ref), RAGGED, estimator, weights, level="sequence")
    torch.testing.assert_close(whole, exact, **TIGHT)
    assert exact.norm() > 1e-2
    if estimator == "k2":  # and k1 in the reward, each token owing all of the completion's
        owed = {"placement": "reward", "credit": "whole"}
        torch.testing.assert_close(
            of_term((logits, ref), RAGGED, "k1", weights, **owed), exact, **TIGHT
        )
    if estimator != "k1":
        assert objective(logits) > 0.1
        assert abs(objective(ref)) < 1e-14


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_prefix_ratio_weighs_each_token_with_what_the_sampler_expects(estimator):
    """The loss is exactly E_pi of the sum of W_old(s, a) k, with W_old of the sampler, frozen."""
    logits, ref = pair(RAGGED)
    old = logits + 0.5 * draw(*logits.shape, seed=9)
    weights = 1 / lengths(RAGGED)
    ref_logp = token_logp(ref, RAGGED)
    expected = state_average(by_token(weights, RAGGED), old, RAGGED, by_action=True)
    expected = expected[RAGGED.states, RAGGED.tokens]

    def exact(leaf):
        logp = token_logp(leaf, RAGGED)
        term = kl_loss(logp, ref_logp, estimator=estimator, mask=RAGGED.mask)
        return logp.sum(-1).exp() @ (expected * term).sum(-1)

    fields = {"weighting": "attached", "ratio": "prefix"}
    gradient = of_term((logits, ref), RAGGED, estimator, weights, old_logits=old, **fields)
    torch.testing.assert_close(gradient, grad(exact)(logits), **TIGHT)
    kl = sequence_kl_gradient(logits, ref, RAGGED)
    assert length_weights.unexplained(gradient.flatten(), kl.flatten()) > 1e-2


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("baseline", ["expected", "of the group", "of the group, KL included"])
def test_what_pays_for_length_is_one_over_length_and_a_baseline_without_the_kl(baseline, summed):
    """The resting point of the natural flow on the reward less k1 of the whole completion.

    Old statement: with tokens summed it is the tilt by R / beta, whatever the baseline. The mean of
    a group of two takes half of the reward, and none of a KL that is subtracted after it.
    """
    beta, size = 0.5, lengths(RAGGED)
    weights = torch.ones_like(size) if summed else 1 / size
    ref_logp = token_logp(draw(RAGGED.num_states, VOCAB, seed=3), RAGGED).sum(-1)
    reward = draw(len(size), seed=4)

    def over_groups(values, mass):  # expected advantage of each completion, over its partners
        pairs = torch.stack(torch.broadcast_tensors(values[:, None], values), dim=-1)
        return group_centre(pairs)[..., 0] @ mass

    logp = ref_logp
    for _ in range(400):
        mass = logp.exp()
        price = beta * (logp - ref_logp)
        if baseline == "of the group, KL included":
            advantage = over_groups(reward - price, mass)
        else:
            of_group = baseline == "of the group"
            centred = over_groups(reward, mass) if of_group else reward - mass @ reward
            advantage = centred - price
        logp = (logp + advantage * weights).log_softmax(-1)
    mass = logp.exp()
    share = 0.5 if baseline == "of the group" else 1.0
    pays = baseline != "of the group, KL included" and not summed
    bonus = beta * (mass @ (logp - ref_logp)) / (mass @ size) if pays else 0.0
    tilt = (ref_logp + (share * reward + bonus * size) / beta).log_softmax(-1)
    torch.testing.assert_close(logp, tilt, rtol=0, atol=1e-10)
    paper = (ref_logp + reward / beta).log_softmax(-1)
    as_on_paper = baseline != "of the group" and not pays
    assert (logp - paper).abs().max() < 1e-10 if as_on_paper else (logp - paper).norm() > 0.3
    unpaid = (ref_logp + share * reward / beta).log_softmax(-1).exp()
    longer = (mass - unpaid) @ size
    assert longer > 0.1 if pays else abs(longer) < 1e-10


def test_a_token_left_out_for_what_it_is_breaks_even_the_sum():
    """The end token uncounted: k1 is minus the visited gradient of ending, not zero."""
    logits, ref = pair(RAGGED)
    ends = RAGGED.mask & (RAGGED.tokens == END)
    counted = RAGGED.mask & ~ends
    mass = sequence_probability(logits, RAGGED)
    ref_logp = token_logp(ref, RAGGED)

    def loss(leaf):
        terms = kl_loss(token_logp(leaf, RAGGED), ref_logp, estimator="k1", mask=counted)
        return mass @ terms.sum(-1)

    visits = state_visits(logits, RAGGED).detach()
    ending = grad(lambda z: visits @ z.softmax(-1)[:, END])(logits)
    torch.testing.assert_close(grad(loss)(logits), -ending, **TIGHT)
    assert ending.norm() > 1e-2


def test_a_divisor_that_is_the_longest_completion_seen_is_a_weight():
    """Every pair of completions, cut to the longer one before it is aggregated."""
    sequences = enumerate_sequences(3, 3, eos=END)
    logits, ref = pair(sequences)
    mass, size = sequence_probability(logits, sequences), sequences.mask.sum(-1)
    ref_logp = token_logp(ref, sequences)

    def loss(leaf):
        terms = kl_loss(token_logp(leaf, sequences), ref_logp, estimator="k1")
        total = 0.0
        for i, j in itertools.product(range(len(mass)), repeat=2):
            row, width = [i, j], max(size[i], size[j])
            cut = terms[row, :width], sequences.mask[row, :width]
            total = total + mass[i] * mass[j] * aggregate(*cut, "seq_mean_token_sum_norm")
        return total

    longest = torch.maximum(size[:, None], size).double()
    weights = (mass / longest).sum(-1)
    gradient = grad(loss)(logits)
    expected = of_term((logits, ref), sequences, "k1", weights)
    torch.testing.assert_close(gradient, expected, **TIGHT)
    assert gradient.norm() > 1e-3


def test_the_push_of_k1_equals_the_pull_of_k2_at_half_the_squared_variation():
    """Squared sizes in the metric of the natural gradient, policy and reference close."""
    logits, _ = pair(RAGGED)
    ref = logits + 1e-4 * draw(*logits.shape, seed=8)
    weights, mass = 1 / lengths(RAGGED), sequence_probability(logits, RAGGED)
    kl = mass @ (token_logp(logits, RAGGED) - token_logp(ref, RAGGED)).sum(-1)
    variance = mass @ weights.square() - (mass @ weights).square()
    variation = variance / (mass @ weights).square()
    sizes = []
    for gradient in (
        of_term((logits, ref), RAGGED, "k1", weights),
        (mass @ weights) * of_term((logits, ref), RAGGED, "k2", torch.ones_like(weights)),
    ):
        natural = gradient / (state_visits(logits, RAGGED)[:, None] * logits.softmax(-1))
        sizes.append((gradient * natural).sum())
    assert sizes[0].item() == pytest.approx(variance.item(), rel=1e-10)
    assert (sizes[1] / sizes[0]).item() == pytest.approx((2 * kl / variation).item(), rel=1e-3)


def test_the_recorded_spread_is_within_prompts():
    spread = groups.recorded_spread().set_index("variant")
    assert spread.loc["none", "variation"] < 0.05
    assert (spread["equal_kl"] < 0.01 * spread["kl"]).all()


def test_the_weight_of_thousands_of_completions_keeps_its_digits_in_float32():
    lengths = torch.tensor([0.0, 0.2, 0.3, 0.1, 0.4])
    weight, exact = (token_mean_weight(x, 2000) for x in (lengths, lengths.double()))
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.double(), exact, rtol=1e-6, atol=0)
    assert (weight.diff() < 0).all()


def test_sum_and_mean_over_tokens_differ_by_the_length():
    """One binary choice: stop with return 1, or go on for a second token with return 1.

    The mean return is constant, so its gradient is zero: the sum agrees, the mean over tokens
    prefers the short answer.
    """
    stop = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    p = stop.detach()
    answers = [(p, stop.log(), 1), (1 - p, (1 - stop).log(), 2)]  # probability, log-prob, length
    total = sum(probability * logp for probability, logp, _ in answers)
    mean = sum(probability * logp / length for probability, logp, length in answers)
    by_sum, by_mean = (
        torch.autograd.grad(x, stop, retain_graph=True)[0].item() for x in (total, mean)
    )
    assert by_sum == pytest.approx(0.0, abs=1e-12)
    assert by_mean == pytest.approx(0.5)


def test_cispo_weighs_tokens_and_gspo_sequences():
    logp = torch.log(torch.tensor([[0.22, 0.36]], dtype=torch.float64)).requires_grad_()
    old_logp = torch.log(torch.tensor([[0.2, 0.4]], dtype=torch.float64))
    mask, one = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    slopes = {}
    for kind in ("cispo", "gspo"):
        loss = policy_loss(
            logp, old_logp=old_logp, advantages=-one, mask=mask, kind=kind
        ).per_token.sum()
        slopes[kind] = torch.autograd.grad(loss, logp)[0][0].tolist()
    assert slopes["cispo"] == pytest.approx([1.1, 0.9])
    assert slopes["gspo"] == pytest.approx([math.sqrt(0.99)] * 2)


def test_other_kinds_are_not_what_is_printed(monkeypatch):
    true = policy_loss

    def token_form(*args, kind="grpo", **options):
        return true(*args, kind="grpo", **options)

    monkeypatch.setattr(claims_on_objectives, "policy_loss", token_form)
    assert claims_on_objectives.sequence_form().verdict == "fails"


def test_a_flipped_kl_is_not_the_printed_objective(monkeypatch):
    true = claims_on_objectives.kl_loss
    monkeypatch.setattr(claims_on_objectives, "kl_loss", lambda *a, **k: -true(*a, **k))
    assert claims_on_objectives.grpo_objective().verdict == "fails"
