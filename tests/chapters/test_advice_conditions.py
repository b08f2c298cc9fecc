"""What advice rests on, once with each condition and once without it: by enumeration.

``book/conditions.yaml`` names these tests: each statement holds as long as its condition does, and
breaks in the case that the condition excludes.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad

from analysis.chapters.ch16_objectives import mean_length_slope
from analysis.evidence.reasoning import open_length_chain
from kl_term.kl.credit import credit_moments, state_average
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.enumeration import (
    expected_gradient,
    forward_kl_gradient,
    relative_error,
    reverse_kl_gradient,
)
from kl_term.kl.potentials import kl_potential
from kl_term.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    token_logp,
    visited_kl_gradient,
)
from kl_term.kl.term import KLTerm
from kl_term.kl.truncation import keep_top, masked_logits
from kl_term.kl.variance import estimator_means, estimator_variances, variance_gap
from tests.supports import Supports, of_loss, report
from tests.trees import TIGHT, draw

RAGGED = enumerate_sequences(3, 4, eos=2)
LENGTHS = RAGGED.mask.sum(-1).double()
ONE_STATE = enumerate_sequences(5, 1)
REVERSE = [("k1", "attached"), ("k3", "attached"), ("k2", "detached")]


def tables(sequences=RAGGED, vocab=3):
    """Policy, reference and sampler, far from each other."""
    return tuple(1.5 * draw(sequences.num_states, vocab, seed=seed) for seed in (0, 1, 2))


def per_token(weights):
    return weights[:, None].expand(RAGGED.mask.shape)


def apart(found, exact):
    return relative_error(found.flatten(), exact.flatten()).item()


def forbidding():
    """A policy that forbids a token which its reference allows."""
    policy, reference, _ = (2 * draw(6, seed=seed) for seed in (3, 4, 5))
    policy[2] = -torch.inf
    return policy, reference


def test_fresh_samples_need_equal_supports_for_the_forward_kl_and_the_mean_of_k3():
    policy, reference = forbidding()
    lost = reference.softmax(-1)[2]
    found = expected_gradient(policy, reference, estimator="k3")
    assert forward_kl(policy, reference).isinf()
    assert (found - forward_kl_gradient(policy, reference))[:2].abs().max() > 1e-2
    mean = estimator_means(policy, reference)
    kl = reverse_kl(policy, reference)
    torch.testing.assert_close(mean["k1"], kl, **TIGHT)
    torch.testing.assert_close(mean["k3"], kl - lost, **TIGHT)
    assert lost > 1e-3
    policy[2] = 0.3
    found = expected_gradient(policy, reference, estimator="k3")
    torch.testing.assert_close(found, forward_kl_gradient(policy, reference), **TIGHT)
    means = estimator_means(policy, reference)
    torch.testing.assert_close(means["k3"], reverse_kl(policy, reference), **TIGHT)


@pytest.mark.parametrize("name", ["k3_clip", "minimax01"])
def test_a_potential_is_what_fresh_samples_descend(name):
    logits, ref, old = (1.5 * draw(5, seed=seed) for seed in (6, 7, 8))
    exact = grad(lambda z: kl_potential(z, ref, estimator=name))(logits)
    fresh = expected_gradient(logits, ref, estimator=name)
    torch.testing.assert_close(fresh, exact, **TIGHT)
    assert apart(expected_gradient(logits, ref, old, estimator=name), exact) > 0.05


def test_a_potential_is_of_one_state():
    """Whole answers: the capped forward KL of each visited state misses how visits move."""
    logits, ref, _ = tables()
    visits = state_visits(logits, RAGGED)
    for name in ("k3_clip", "minimax01"):
        held = grad(lambda z, n=name: visits @ kl_potential(z, ref, estimator=n))(logits)
        moved = grad(lambda z, n=name: state_visits(z, RAGGED) @ kl_potential(z, ref, estimator=n))(
            logits
        )
        found = expected_sequence_gradient(logits, ref, RAGGED, estimator=name)
        torch.testing.assert_close(found, held, **TIGHT)
        assert apart(found, moved) > 0.05


@pytest.mark.parametrize(("estimator", "weighting"), REVERSE)
def test_a_weighted_loss_needs_one_divisor_for_all_completions(estimator, weighting):
    logits, ref, old = tables()
    given = (logits, ref, RAGGED, old)
    how = {"estimator": estimator, "weighting": weighting}
    held = visited_kl_gradient(logits, ref, RAGGED, old)
    summed = expected_sequence_gradient(*given, **how)
    torch.testing.assert_close(summed, held, **TIGHT)
    mean = expected_sequence_gradient(*given, **how, token_weights=per_token(1 / LENGTHS))
    scale = (mean * held).sum() / held.square().sum()
    assert (mean - scale * held).norm() > 0.05 * mean.norm()


def test_a_live_ratio_needs_a_sampler_that_covers_the_policy():
    policy, reference, old = (draw(6, seed=seed) for seed in (9, 10, 11))
    exact = grad(lambda z: estimator_means(z, reference)["k2"])(policy)
    covering = of_loss(Supports(policy, old, reference), "k2", "attached")
    torch.testing.assert_close(covering, exact, **TIGHT)
    cut = Supports(policy, masked_logits(old, keep_top(old, top_p=0.8)), reference)
    assert apart(of_loss(cut, "k2", "attached"), exact) > 0.05


def test_a_live_ratio_holds_the_states_of_the_sampler():
    """Over answers the attached k2 has the gradient of its mean at the visits of the sampler."""
    logits, ref, old = tables()
    how = {"estimator": "k2", "weighting": "attached"}
    found = expected_sequence_gradient(logits, ref, RAGGED, old, **how)
    visits = state_visits(old, RAGGED)
    held = grad(lambda z: visits @ estimator_means(z, ref)["k2"])(logits)
    torch.testing.assert_close(found, held, **TIGHT)
    whole = grad(lambda z: state_visits(z, RAGGED) @ estimator_means(z, ref)["k2"])(logits)
    assert apart(found, whole) > 0.05


def test_a_reward_per_token_needs_one_divisor_for_all_completions():
    """k1 in the reward, each token paying for all that follow."""
    logits, ref, old = tables()
    how = {"estimator": "k1", "placement": "reward"}
    exact = sequence_kl_gradient(logits, ref, RAGGED)
    summed = expected_sequence_gradient(logits, ref, RAGGED, **how)
    torch.testing.assert_close(summed, exact, **TIGHT)
    weights = per_token(1 / LENGTHS)
    mean = expected_sequence_gradient(logits, ref, RAGGED, **how, token_weights=weights)
    scale = (mean * exact).sum() / exact.square().sum()
    assert (mean - scale * exact).norm() > 0.05 * mean.norm()
    stale = expected_sequence_gradient(logits, ref, RAGGED, old, **how)
    assert apart(stale, exact) > 0.05


def test_a_weight_on_completions_is_read_on_fresh_samples():
    """k1 as a loss has the gradient of the mean weight of what it samples, on fresh samples."""
    logits, ref, old = tables()
    how = {"estimator": "k1", "token_weights": per_token(1 / LENGTHS)}
    exact = grad(lambda z: sequence_probability(z, RAGGED) @ (1 / LENGTHS))(logits)
    fresh = expected_sequence_gradient(logits, ref, RAGGED, **how)
    torch.testing.assert_close(fresh, exact, **TIGHT)
    assert apart(expected_sequence_gradient(logits, ref, RAGGED, old, **how), exact) > 0.05


def test_with_completions_of_weight_zero_the_divergence_is_zero_elsewhere_too():
    """Old statement: at sequence level every weight leaves a divergence that is zero at the
    reference only. What is cut has the weight zero: probability moves among it for nothing."""
    _, ref, _ = tables()
    ref_mass = sequence_probability(ref, RAGGED)
    cut = LENGTHS.max() == LENGTHS
    mass = torch.where(cut, 0.0, ref_mass)
    moved = torch.where(cut, ref_mass[cut].sum() / cut.sum(), mass)

    def divergence(weights):
        return weights @ (moved * (moved / ref_mass).log() - moved + ref_mass)

    assert (moved - ref_mass).abs().max() > 1e-3 and moved.sum() == pytest.approx(1)
    assert divergence((~cut).double()).abs() < 1e-14
    assert divergence(1 / LENGTHS) > 1e-3


def test_the_geometric_ratio_is_right_for_one_token_only():
    for sequences, vocab in ((RAGGED, 3), (ONE_STATE, 5)):
        logits, ref, old = tables(sequences, vocab)
        fields = {"estimator": "k3", "weighting": "attached", "ratio": "geometric"}
        found = expected_sequence_gradient(logits, ref, sequences, old, **fields)
        held = visited_kl_gradient(logits, ref, sequences, old)
        if sequences is ONE_STATE:
            torch.testing.assert_close(found, held, **TIGHT)
        else:
            assert apart(found, held) > 0.05


def credited(policy, reference, estimator):
    """What k2 or k3 in the reward adds to the growth rate of each token's log-probability."""
    log_ratio = (policy / reference).log()
    values = {"k2": log_ratio.square() / 2, "k3": (-log_ratio).expm1() + log_ratio}
    return policy @ values[estimator] - values[estimator]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_token_below_its_reference_may_rise_until_it_is_rare_enough(estimator):
    """Old statement: a token that has become too rare is penalised, so it becomes rarer."""
    reference = torch.tensor([0.45, 0.45, 0.1], dtype=torch.float64)
    for rare, rises in ((0.09, True), (1e-4, False)):
        policy = torch.tensor([0.1, 0.9 - rare, rare], dtype=torch.float64)
        assert (credited(policy, reference, estimator)[2] > 0) == rises


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_rare_token_that_shares_a_logit_need_not_be_lost(estimator):
    """The first two tokens in a fixed proportion: they move together, and may rise."""
    policy = torch.tensor([0.49, 0.01, 0.45, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.1, 0.1, 0.3], dtype=torch.float64)
    rates = credited(policy, reference, estimator)
    assert rates[1] < -1  # with a logit of its own the rare one is driven out
    bound = policy[:2] / policy[:2].sum()
    assert bound @ rates[:2] > 0.1


def test_means_of_k1_and_k3_are_the_kl_on_fresh_samples():
    logits, ref, old = (1.5 * draw(6, seed=seed) for seed in (12, 13, 14))
    kl = reverse_kl(logits, ref)
    fresh, stale = estimator_means(logits, ref), estimator_means(logits, ref, old)
    for name in ("k1", "k3"):
        torch.testing.assert_close(fresh[name], kl, **TIGHT)
        assert (stale[name] - kl).abs() > 0.05 * kl
    spread = estimator_variances(logits, ref, old)
    assert ((spread["k3"] - spread["k1"]) - variance_gap(logits, ref)).abs() > 0.05


def logged(logits, ref, completions):
    """Expected k1 and k3 in a log of so many answers: a token mean, and one per completion."""
    mass = sequence_probability(logits, RAGGED)
    log_ratio = token_logp(logits, RAGGED) - token_logp(ref, RAGGED)
    sums = {
        name: torch.where(RAGGED.mask, value, 0.0).sum(-1)
        for name, value in {"k1": log_ratio, "k3": (-log_ratio).expm1() + log_ratio}.items()
    }
    per_completion = {name: (mass @ (total / LENGTHS)).item() for name, total in sums.items()}
    means = {}
    for name, total in sums.items():  # E[sum / length] over batches, a convolution by length
        chance, value = {0: 1.0}, {0: 0.0}
        for _ in range(completions):
            grown, cost = {}, {}
            for size, probability in chance.items():
                for row, length in enumerate(LENGTHS.int().tolist()):
                    at = size + length
                    grown[at] = grown.get(at, 0.0) + probability * mass[row].item()
                    added = value[size] + probability * total[row].item()
                    cost[at] = cost.get(at, 0.0) + mass[row].item() * added
            chance, value = grown, cost
        means[name] = sum(cost / size for size, cost in value.items())
    return means, per_completion


def test_a_log_that_averages_per_completion_shows_two_kls():
    """Old statement: on fresh samples logged k1 and k3 agree. Per completion they do not, and k1
    may be negative; a mean over the tokens of many answers is the KL a token in both."""
    ref = draw(RAGGED.num_states, 3, seed=1)
    logits = ref.clone()
    logits[:, 2] -= 0.4  # the same answers, somewhat longer
    _, per_completion = logged(logits, ref, 1)
    kl = (
        sequence_kl(logits, ref, RAGGED) / (sequence_probability(logits, RAGGED) @ LENGTHS)
    ).item()
    assert per_completion["k1"] < 0 < per_completion["k3"]
    errors = []
    for completions in (1, 4, 32):
        means, _ = logged(logits, ref, completions)
        errors.append([abs(means[name] - kl) / kl for name in ("k1", "k3")])
    assert errors[0][0] > 1 and errors[2][0] < errors[0][0] / 20
    assert errors[2][1] < errors[1][1] < errors[0][1]


def test_one_length_is_enough_for_an_average_per_completion():
    sequences = enumerate_sequences(3, 3)
    logits, ref, _ = tables(sequences)
    mass = sequence_probability(logits, sequences)
    log_ratio = token_logp(logits, sequences) - token_logp(ref, sequences)
    k3 = (-log_ratio).expm1() + log_ratio
    torch.testing.assert_close(mass @ log_ratio.mean(-1), mass @ k3.mean(-1), **TIGHT)


def test_a_sum_over_the_vocabulary_differentiates_its_weights():
    logits, ref, old = (1.5 * draw(6, seed=seed) for seed in (15, 16, 17))
    exact = reverse_kl_gradient(logits, ref)

    def total(weights):
        return grad(lambda z: weights(z) @ (z.log_softmax(-1) - ref.log_softmax(-1)))(logits)

    torch.testing.assert_close(total(lambda z: z.softmax(-1)), exact, **TIGHT)
    assert apart(total(lambda _: logits.softmax(-1)), exact) > 0.05
    assert apart(total(lambda _: old.softmax(-1)), exact) > 0.05


def test_a_sum_over_the_vocabulary_holds_the_states_of_the_sampler():
    logits, ref, old = tables()
    visits = state_visits(old, RAGGED)
    found = grad(lambda z: visits @ reverse_kl(z, ref))(logits)
    torch.testing.assert_close(found, visited_kl_gradient(logits, ref, RAGGED, old), **TIGHT)
    assert apart(found, sequence_kl_gradient(logits, ref, RAGGED)) > 0.05


def test_levels_agree_where_a_completion_has_one_weight():
    logp, ref_logp = (draw(2, 4, seed=seed) - 3 for seed in (1, 2))
    mask = torch.ones(2, 4, dtype=torch.bool)
    token, whole = (
        KLTerm(estimator="k1", level=level).loss(logp, ref_logp, mask=mask)
        for level in ("token", "sequence")
    )
    one = torch.tensor([[0.3], [0.7]], dtype=torch.float64)
    torch.testing.assert_close((one * token).sum(), (one * whole).sum(), **TIGHT)
    uneven = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert ((uneven * token).sum() - (uneven * whole).sum()).abs() > 1e-2


@pytest.mark.parametrize("clip", [math.inf, 0.2])
def test_a_kl_merged_into_the_advantage_needs_a_covering_sampler_and_no_clip(clip):
    """One state, the sampler's log-ratio as credit: KL to the reference less KL to the sampler."""
    logits, ref, old = (1.5 * draw(6, seed=seed) for seed in (18, 19, 20))
    exact = reverse_kl_gradient(logits, ref) - reverse_kl_gradient(logits, old)

    def merged(sampler):
        drawn = sampler > -torch.inf
        old_logp = sampler.log_softmax(-1)[drawn]
        credit = -(old_logp - ref.log_softmax(-1)[drawn])

        def loss(z):
            ratio = (z.log_softmax(-1)[drawn] - old_logp).exp()
            clipped = ratio.clamp(1 - clip, 1 + clip)
            return -(old_logp.exp() @ torch.minimum(ratio * credit, clipped * credit))

        return grad(loss)(logits)

    if clip == math.inf:
        torch.testing.assert_close(merged(old), exact, **TIGHT)
        assert apart(merged(masked_logits(old, keep_top(old, top_p=0.8))), exact) > 0.05
    else:
        assert apart(merged(old), exact) > 0.05


def test_the_reward_of_an_answer_is_learnt_from_fresh_samples():
    """Summed over tokens no length is moved within a class; on stale samples without a ratio the
    gradient is another one."""
    logits, _, old = tables()
    right = (RAGGED.tokens[:, 0] == 1).double()
    credit = per_token(right - 0.4)
    exact = grad(lambda z: sequence_probability(z, RAGGED) @ right)(logits)
    fresh = credit_moments(logits, RAGGED, credit).mean
    torch.testing.assert_close(fresh, exact, **TIGHT)
    assert apart(credit_moments(logits, RAGGED, credit, old).mean, exact) > 0.05


def test_a_stale_report_of_the_weighted_k3_needs_the_reference_inside_the_policy():
    policy, reference = forbidding()
    old = draw(6, seed=21)
    value = report(Supports(policy, old, reference), "k3", "attached")
    kl = reverse_kl(policy, reference)
    torch.testing.assert_close(value, kl - reference.softmax(-1)[2], **TIGHT)


def test_attached_k3_and_detached_k2_are_one_gradient_token_by_token():
    """Old statement: under its ratio k2 has another variance than the attached k3."""
    logp, ref_logp, old_logp = (draw(1, 400, seed=seed) - 4 for seed in (3, 4, 5))
    gradients = []
    for estimator, weighting in (("k3", "attached"), ("k2", "detached"), ("k1", "attached")):
        leaf = logp.clone().requires_grad_(True)
        term = KLTerm(estimator=estimator, weighting=weighting)
        loss = term.loss(leaf, ref_logp, old_logp=old_logp).sum()
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    k3, k2, k1 = gradients
    torch.testing.assert_close(k3, k2, rtol=1e-12, atol=1e-12)
    assert (k1 - k3).abs().max() > 0.1  # the same mean, another variance


def test_a_merged_kl_of_tokens_is_not_that_of_answers():
    """One token, the statement holds; over answers, credited to go under the token's ratio, not."""
    for sequences, vocab in ((ONE_STATE, 5), (RAGGED, 3)):
        logits, ref, old = tables(sequences, vocab)
        how = {"estimator": "k1", "placement": "reward", "weighting": "detached"}
        found = expected_sequence_gradient(logits, ref, sequences, old, **how)
        exact = sequence_kl_gradient(logits, ref, sequences)
        exact = exact - sequence_kl_gradient(logits, old, sequences)
        if sequences is ONE_STATE:
            torch.testing.assert_close(found, exact, **TIGHT)
        else:
            assert apart(found, exact) > 0.05


def test_near_the_reference_a_healthy_log_breaks_rules_without_an_error():
    """Old statements: k1 far above k3, trust k1; k1 clearly negative, columns are exchanged.

    Mean and variance of both rules over 5,000 healthy fresh tokens, enumerated; normal by their
    number. Measured by its own standard error k1 - k3 stays within four of them.
    """
    ref = draw(50, seed=22)
    logits = ref + 0.009 * draw(50, seed=23)
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref.log_softmax(-1)
    k3 = (-log_ratio).expm1() + log_ratio
    kl = reverse_kl(logits, ref).item()
    assert 1e-5 < kl < 1e-4

    def chance_above_zero(values):
        mean = policy @ values
        error = (policy @ (values - mean).square() / 5000).sqrt()
        return 0.5 * math.erfc(-(mean / error).item() / math.sqrt(2)), mean / error

    assert chance_above_zero(log_ratio - 2 * k3)[0] > 0.3
    assert chance_above_zero(-log_ratio - k3)[0] > 0.2
    assert chance_above_zero(log_ratio - k3)[1].abs() < 1e-9
    spread = {
        name: (policy @ (v - kl).square() / 5000).sqrt()
        for name, v in (("k1", log_ratio), ("k3", k3))
    }
    assert spread["k1"] > kl > 20 * spread["k3"]


@pytest.mark.parametrize("clip", [math.inf, 0.2])
def test_the_policy_gradient_of_k1_is_exact_on_stale_samples_at_one_state(clip):
    """Old statement: no setting of verl is exact on stale samples. Its distillation takes minus
    the new log-ratio to the teacher, here the reference, as the advantage of a clipped surrogate.
    """
    logits, ref, old = (1.5 * draw(6, seed=seed) for seed in (24, 25, 26))
    advantage = ref.log_softmax(-1) - logits.log_softmax(-1)
    old_logp = old.log_softmax(-1)

    def loss(z):
        ratio = (z.log_softmax(-1) - old_logp).exp()
        kept = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        return -(old_logp.exp() @ kept)

    exact = reverse_kl_gradient(logits, ref)
    error = apart(grad(loss)(logits), exact)
    assert error < 1e-12 if clip == math.inf else error > 0.05


def test_k1_per_completion_reads_the_length_near_the_reference_only():
    """It is the change of the mean of 1/|o|, up to second order in the distance."""
    ref, direction = (draw(RAGGED.num_states, 3, seed=seed) for seed in (27, 28))
    errors = []
    for size in (1.0, 1e-2, 1e-3):
        logits = ref + size * direction
        mass, of_ref = (sequence_probability(x, RAGGED) for x in (logits, ref))
        log_ratio = token_logp(logits, RAGGED) - token_logp(ref, RAGGED)
        k1 = mass @ (torch.where(RAGGED.mask, log_ratio, 0.0).sum(-1) / LENGTHS)
        change = (mass - of_ref) @ (1 / LENGTHS)
        errors.append(((k1 - change) / change).abs().item())
    assert errors[0] > 0.5 and errors[1] < 0.1
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.2)


def test_graded_rewards_move_lengths_under_the_sum_too():
    """Along the natural gradient: nothing moves if right answers earn alike, else lengths do."""
    problem = open_length_chain(5, right=0.4, stop=0.2)
    lengths = problem.sequences.mask.sum(-1).double()
    graded = problem.outcome * (1 + 0.1 * lengths)
    for reward, moves in ((problem.outcome, False), (graded, True)):
        mass = sequence_probability(problem.logits, problem.sequences)
        credit = (reward - mass @ reward)[:, None].expand(problem.sequences.mask.shape)
        natural = state_average(credit, problem.logits, problem.sequences, by_action=True)
        slope = mean_length_slope(problem, problem.outcome, natural) * natural.norm()
        assert slope > 1e-3 if moves else abs(slope) < 1e-14


def test_with_shared_logits_training_rests_elsewhere():
    """Every state has the same three logits: what is reached rests, and is not the tilt."""
    beta, sequences = 1.0, enumerate_sequences(3, 2, eos=2)
    lengths = sequences.mask.sum(-1).double()
    ref_logp = token_logp(draw(sequences.num_states, 3, seed=29), sequences).sum(-1)
    reward = 0.5 * draw(len(lengths), seed=30)

    counts = torch.stack([((sequences.tokens == a) & sequences.mask).sum(-1) for a in range(3)], -1)
    counts = counts.double()

    def step(row):  # the expected gradient, a score a token
        logp = counts @ row.log_softmax(-1)
        advantage = reward - beta * (logp - ref_logp) - logp.exp() @ reward
        return (logp.exp() * advantage / lengths) @ (counts - lengths[:, None] * row.softmax(-1))

    row = torch.zeros(3, dtype=torch.float64)
    for _ in range(2000):
        row = row + step(row)
    logp = counts @ row.log_softmax(-1)
    assert step(row).abs().max() < 1e-12 and logp.min() > -12
    mass = logp.exp()
    bonus = beta * (mass @ (logp - ref_logp)) / (mass @ lengths)
    tilt = (ref_logp + (reward + bonus * lengths) / beta).log_softmax(-1)
    assert (logp - tilt).abs().max() > 0.1
