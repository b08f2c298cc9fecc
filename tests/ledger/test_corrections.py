"""Counterexamples to statements that earlier versions of the book made (book/corrections.yaml)."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.chapters.ch14_frameworks.trainers.openrlhf_family import openrlhf
from kl_term.kl.ascent import expected_ascent
from kl_term.kl.credit import credit_moments
from kl_term.kl.divergences import entropy, forward_kl, reverse_kl
from kl_term.kl.enumeration import expected_gradient, gradient_moments, reverse_kl_gradient
from kl_term.kl.estimators import k1, k2, k3
from kl_term.kl.fixed_points import forward_kl_optimum, reverse_kl_optimum
from kl_term.kl.sequences import enumerate_sequences, sequence_probability, token_logp
from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.losses import policy_loss
from kl_term.objectives.merged import kl_coefficient_kept
from kl_term.objectives.preference import dpo_loss
from tests.supports import Supports, of_loss

EXACT = 1e-12


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def variance(policy, values):
    return (policy * (values - (policy * values).sum()).square()).sum().item()


def test_always_positive_penalties():
    """Two tokens, integrated: a positive penalty that returns, and two that do not."""
    ref = torch.tensor([0.3, 0.7], dtype=torch.float64)
    penalties = {
        "k1 + 100": lambda l: l + 100,
        "k2": lambda l: l.square() / 2,
        "k3": lambda l: torch.expm1(-l) + l,
    }
    ends = {}
    for name, penalty in penalties.items():
        logits = torch.tensor([0.2, 0.8], dtype=torch.float64).log()
        for _ in range(4000):
            p = logits.softmax(-1)
            cost = penalty((p / ref).log())
            assert (cost >= 0).all()
            step = -p * (cost - (p * cost).sum())
            assert (step >= 0).any()
            logits = logits + 0.2 * step
        ends[name] = logits.softmax(-1)[0].item()
    assert ends["k1 + 100"] == pytest.approx(0.3, abs=1e-9)
    assert ends["k2"] < 0.01
    assert ends["k3"] < 1e-6


def test_sum_and_mean_over_tokens_agree_for_rewards_on_answers_of_one_length():
    """Old statement: they agree only if all answers have one length; for some rewards they do."""
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logp = (logits + torch.tensor([0.7, -0.4, 0.0]).double()).log_softmax(-1)
    lengths = torch.tensor([1, 2, 2]).double()
    gradients = []
    for rewards in (torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])):
        score = logp.exp().detach() * rewards.double() * logp
        gradients.append(
            [
                torch.autograd.grad((score / by).sum(), logits, retain_graph=True)[0]
                for by in (1.0, lengths)
            ]
        )
    (of_one, its_mean), (total, mean) = gradients
    torch.testing.assert_close(its_mean, of_one / 2, rtol=0, atol=1e-15)
    assert of_one.norm() > 0.1
    assert torch.linalg.matrix_rank(torch.stack([total, mean])) == 2  # no constant for this reward


def test_equal_supports_are_not_what_the_reverse_lines_need():
    """The old condition: the sampler allows every token of policy *and* reference."""
    policy, sampler, reference = torch.randn(
        3, 5, generator=torch.Generator().manual_seed(2)
    ).double()
    policy[0] = sampler[0] = -torch.inf  # the reference alone allows it: the condition is broken
    sampler_only = torch.cat([sampler[1:], sampler[:1]])
    assert sampler_only.isinf().sum() == 1
    case = Supports(policy, sampler, reference)
    referee = reverse_kl_gradient(policy, reference)
    for key in (("k1", "attached"), ("k3", "attached"), ("k2", "detached")):
        found = of_loss(case, *key)
        torch.testing.assert_close(found, referee, rtol=0, atol=EXACT)
    sampler[0] = 0.3  # now it is met, and the forward line is false: that KL is infinite
    case = Supports(policy, sampler, reference)
    assert forward_kl(policy, reference) == torch.inf
    assert of_loss(case, "k3", "detached").isfinite().all()


def test_other_weights_of_the_sum_are_exact_too():
    """The counterexample to "if and only if the weights are the policy's, differentiated"."""
    policy, old, reference = torch.randn(3, 6, generator=torch.Generator().manual_seed(9)).double()
    leaf = policy.clone().requires_grad_(True)
    log_ratio = leaf.log_softmax(-1) - reference.log_softmax(-1)
    probability = leaf.softmax(-1)
    exact = reverse_kl_gradient(policy, reference)
    for weights, good in (
        (probability, True),
        ((probability * log_ratio).detach(), True),
        (probability.detach(), False),
        (old.softmax(-1), False),
    ):
        (gradient,) = torch.autograd.grad((weights * log_ratio).sum(), leaf, retain_graph=True)
        assert ((gradient - exact).abs().max() < EXACT) == good


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_the_lower_of_two_tokens_below_the_reference_can_rise_and_come_back(name):
    """They are driven apart, as the theorem says; "the lower one falls ever faster" stood there."""

    def moved(start, steps, size):
        return expected_ascent(
            start.log(),
            torch.zeros_like(start),
            ref.log(),
            beta=1.0,
            estimator=name,
            placement="reward",
            geometry="natural",
            steps=steps,
            step_size=size,
        ).exp()

    ref = torch.tensor([0.7, 0.1, 0.2], dtype=torch.float64)
    path = [torch.tensor([0.6, 0.099, 0.301], dtype=torch.float64)]
    for _ in range(40):
        path.append(moved(path[-1], 2, 0.05))
    lower, higher = (torch.stack(path) / ref).log()[:, :2].unbind(-1)
    below = higher < 0
    assert lower[0] < higher[0] and below[:3].all()
    assert (lower.diff() > 0).all()
    assert (higher - lower)[below].diff().min() > 0
    assert torch.allclose(moved(path[-1], 900, 5.0), ref, atol=2e-3)


def test_the_logit_of_a_token_can_rise_and_its_probability_fall():
    """Plain steps: a penalty below average raises the logit; a sample lowers one not sampled."""
    policy = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    penalty = torch.tensor([0.0, 1.0, 0.3], dtype=torch.float64)
    force = policy * ((policy * penalty).sum() - penalty)
    assert force[2] > 0
    assert (policy.log() + 1e-3 * force).softmax(-1)[2] < policy[2]
    peaked = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    for step_size in (1e-3, 0.1, 1.0):
        sampled = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
        moved = (peaked.log() - step_size * (sampled - peaked)).softmax(-1)
        assert moved[0] > peaked[0] and moved[1] < peaked[1]


def test_raising_a_token_costs_more_entropy_than_lowering_it_at_a_large_step():
    """From the uniform policy the two losses agree to second order in the step only."""
    sampled = torch.eye(8, dtype=torch.float64)[0]

    def lost(step_size):
        return math.log(8) - entropy(step_size * sampled).item()

    law = 1e-6 * 7 / (2 * 8**2)
    assert lost(1e-3) == pytest.approx(law, rel=2e-3)
    assert lost(-1e-3) == pytest.approx(law, rel=2e-3)
    assert lost(1.0) == pytest.approx(0.0851, abs=1e-4)
    assert lost(-1.0) == pytest.approx(0.0324, abs=1e-4)


def test_the_k3_loss_can_have_the_reverse_kl_gradient_away_from_the_reference():
    """It has it where l + r is one number; "at every policy it has not" stood there."""
    ref, low = numbers(0.0923225, 0.0615484, 0.5922904, 0.2538387), -1.0028153418
    policy = ref * numbers(1.5, 1.5, low, low).exp()
    assert reverse_kl(policy.log(), ref.log()) > 0.7
    found = expected_gradient(policy.log(), ref.log(), estimator="k3")
    torch.testing.assert_close(
        found, reverse_kl_gradient(policy.log(), ref.log()), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("gap", [0.3, 1.0, 2.5, 8.0])
def test_k3_ends_more_accurate_below_one_pass_rate_and_less_above_it(gap):
    """At that rate the two losses end alike; "different above a gap of beta" stood there."""
    rise = math.expm1(gap)
    rate = (1 - 1 / gap + 1 / rise) * gap / rise
    below, at, above = (
        (forward_kl_optimum(*problem, beta=1.0) - reverse_kl_optimum(*problem, beta=1.0))[0].item()
        for p in (rate / 3, rate, (1 + rate) / 2)
        for problem in [(numbers(gap, 0), numbers(p, 1 - p).log())]
    )
    assert below > 1e-3
    assert at == pytest.approx(0, abs=1e-9)
    assert above < -1e-3


def test_a_sampler_that_is_stale_where_the_log_ratio_is_zero_does_no_harm():
    policy, ref = numbers(0.2, 0.3, 0.4, 0.1), numbers(0.2, 0.3, 0.25, 0.25)
    old = numbers(0.3, 0.2, 0.4, 0.1)
    for estimator, harmed in (("k1", True), ("k2", False), ("k3", False)):
        fresh, stale = (
            expected_gradient(policy.log(), ref.log(), *sampler, estimator=estimator)
            for sampler in ((), (old.log(),))
        )
        assert ((fresh - stale).abs().max() > EXACT) == harmed


def test_far_from_the_reference_k2_can_be_quieter_than_k1():
    policy = numbers(0.999, 0.001)
    logp, ref_logp = policy.log(), policy.flip(0).log()
    assert variance(policy, k2(logp, ref_logp)) < EXACT < 0.1 < variance(policy, k1(logp, ref_logp))


def test_the_rule_for_the_variances_needs_one_support():
    """The reference allows a third token: both divergences are infinite, and k3 is quieter."""
    policy, ref_logp = numbers(0.6, 0.4), numbers(0.5, 0.4).log()
    assert variance(policy, k3(policy.log(), ref_logp)) < variance(
        policy, k1(policy.log(), ref_logp)
    )


def test_an_upper_bound_on_the_spread_lifts_the_bound_on_advantages():
    advantages = group_normalise(numbers(100, 0), eps=0, std_max=1.0)
    assert advantages.abs().max() == 50


def test_ratios_need_a_sampler_that_allows_what_the_policy_allows():
    """The product varies less than its lower bound, and the gain of the policy is not seen."""
    old, policy = (numbers(1, 0), numbers(0.5, 0.5)), (numbers(0.5, 0.5), numbers(0.9, 0.1))
    mean = policy[0][0]
    second = mean**2 * (policy[1].square() / old[1]).sum()
    lower = (policy[1].square() / old[1]).sum() ** 2 - 1
    assert second - mean**2 == pytest.approx(0.16)
    assert lower > 1.6
    rewards = numbers(0, 1)
    advantage = rewards - (old[0] * rewards).sum()
    assert (policy[0] * advantage).sum() == 0.5
    assert (policy[0] * advantage)[old[0] > 0].sum() == 0


def test_one_minus_r_has_mean_zero_only_where_the_policy_allows_what_the_reference_allows():
    """After the first token the policy forbids half of the reference, after the second nothing."""
    policy, ref = numbers(0.4, 0.6), numbers(0.5, 0.5)
    later = numbers(1 - 0.5, 0)
    own, to_go = (
        policy * (cost - (policy * cost).sum())
        for cost in (1 - ref / policy, 1 - ref / policy + later)
    )
    assert (own - to_go).abs().max() > 0.1
    kept, ref_kept = numbers(1.0), numbers(0.5)  # the same state: a value with lambda = 1
    assert k3(kept.log(), ref_kept.log()) == pytest.approx(math.log(2) - 0.5)


def kept_past_the_bound(ref_log_ratio: float, advantage: float, *, beta: float) -> bool:
    """Whether a token at rho = e, or 1 / e if its advantage is negative, keeps its merged KL."""
    logp = numbers(-1.0)
    found = kl_coefficient_kept(
        logp,
        logp - ref_log_ratio,
        logp - math.copysign(1, advantage),
        numbers(advantage),
        torch.ones(1, dtype=torch.bool),
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    return bool((found != 0).all())


def test_at_the_threshold_the_clip_silences_no_kl():
    """A = beta l: the merged reward is zero and not clipped; "only when |l| is larger" stood."""
    assert kept_past_the_bound(2.0, 1.0, beta=0.5)
    assert not kept_past_the_bound(2.0, 1.1, beta=0.5)


def test_a_kl_that_agrees_with_the_advantage_is_silent_at_any_size():
    """Old summary: no KL until |l| is |A| / beta. The sign decides as well."""
    for advantage in (1.0, -1.0):
        assert kept_past_the_bound(30 * advantage, advantage, beta=0.5)
        assert not kept_past_the_bound(-30 * advantage, advantage, beta=0.5)


def test_other_samplers_than_the_uniform_one_hide_a_doubled_probability():
    """Old statement: with its extra factor pi_old the printed mean is right in direction only where
    the sampler is uniform. Three unequal tokens, and any two."""

    def gradients(policy, log_ratio):
        weights = (policy.square() * log_ratio, policy * log_ratio)
        return [w - policy * w.sum() for w in weights]

    policy, log_ratio = numbers(0.6, 0.3, 0.1), -0.014800624 / (numbers(0.6, 0.3, 0.1) - 0.4)
    assert (policy * (-log_ratio).exp()).sum().item() == pytest.approx(1.0, abs=1e-8)
    printed, exact = gradients(policy, log_ratio)
    assert exact.norm() > 0.01
    assert torch.allclose(printed, 0.4 * exact, rtol=1e-10)
    policy, reference = numbers(0.9, 0.1), numbers(0.4, 0.6)
    printed, exact = gradients(policy, (policy / reference).log())
    assert torch.allclose(printed / exact, (printed / exact)[:1].expand(2)) and printed[0] > 0


def test_a_constant_at_every_token_is_a_price_on_length():
    """Old statement: a constant in the penalty changes no expected gradient, and k1 plus any
    constant returns to the reference. Lengths that vary are paid for, the same KL or not."""
    tree = enumerate_sequences(3, 3, eos=2)
    generator = torch.Generator().manual_seed(3)
    logits, ref = torch.randn(2, tree.num_states, 3, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    chance = sequence_probability(logits, tree)
    logp, length = token_logp(logits, tree), tree.mask.sum(-1).double()

    def descended(constant):
        penalty = k1(logp, token_logp(ref, tree)).detach() + constant * tree.mask
        to_go = penalty.flip(-1).cumsum(-1).flip(-1)
        mean = (chance.detach().unsqueeze(-1) * to_go * logp).sum()
        return torch.autograd.grad(mean, logits, retain_graph=True)[0]

    price = torch.autograd.grad(chance @ length, logits, retain_graph=True)[0]
    assert price.norm() > 0.1
    assert (descended(2.0) - descended(0.0) - 2 * price).abs().max() < EXACT
    fixed = enumerate_sequences(3, 3)
    assert (fixed.mask.sum(-1) == 3).all()  # its mean cannot move: there the statement holds
    assert k1(numbers(-3.0), numbers(-1.0)) + 1 < 0  # and no constant is positive everywhere


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_two_tokens_have_no_minimum_at_the_reference_either(probability):
    """What k2 and k3 in the reward descend has lower values beside the reference, of two equally
    likely tokens on both sides."""
    ref = numbers(probability, 1 - probability)
    below = []
    for step in (-1e-2, 1e-2):
        policy = ref + numbers(step, -step)
        l = (policy / ref).log()
        below.append([(policy * (l.square() / 2 - l)).sum() < 0, ((policy + ref) * l).sum() < 0])
    assert all(any(side) for side in zip(*below, strict=True))
    assert all(map(all, below)) is (probability == 0.5)


def test_the_live_ratio_leaves_k2_its_gradient_where_the_log_ratio_has_one_size():
    """Old statement: with a live ratio k2 has not the gradient of the reverse KL."""

    def error(policy, ref):
        l = (policy / ref).log()
        gradients = [w - policy * w.sum() for w in (policy * (l.square() / 2 + l), policy * l)]
        return ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()

    assert error(numbers(0.8, 0.2), numbers(0.2, 0.8)) < EXACT  # |l| = log 4 at both tokens
    assert error(numbers(0.8, 0.2), numbers(0.3, 0.7)) > 0.01


def test_with_other_pairs_a_tabular_policy_loses_both_answers_of_a_pair():
    """Old statement: a tabular policy never shows chosen and rejected falling together. On one pair
    it does not; beside a pair that raises a likelier answer it does, at once and for long."""
    ref, beta = numbers(0.1, 0.1, 0.7, 0.1).log(), 0.1
    chosen, rejected = torch.tensor([0, 2]), torch.tensor([1, 3])

    def moved(weight, steps):
        logits = ref.clone()
        for _ in range(steps):
            logits = logits.detach().requires_grad_()
            logp = logits.log_softmax(-1)
            pairs = (logp[chosen], logp[rejected], ref[chosen], ref[rejected])
            loss = weight @ dpo_loss(*pairs, beta=beta)
            logits = logits - torch.autograd.grad(loss, logits)[0]
        return logits.log_softmax(-1).detach() - ref

    alone, beside = numbers(1.0, 0.0), numbers(0.2, 0.8)
    for steps in (1, 200):
        assert moved(alone, steps)[0] > 0 > moved(alone, steps)[1]
        assert (moved(beside, steps)[:2] < 0).all()


def test_a_term_on_the_preferred_answers_can_leave_the_optimum_where_it_is():
    """Old statement: it moves the minimiser away. Two answers, a uniform reference and beta one:
    the preferred answers are distributed like the optimum, and supervision rests there too."""
    for beta, rests in ((1.0, True), (0.5, False)):
        optimum = (numbers(0.3, -0.9) / beta).softmax(-1)
        preferred = numbers(0.3, -0.9).softmax(-1)  # Bradley and Terry's winners
        assert ((optimum - preferred).abs().max() < EXACT).item() is rests


def test_a_value_that_is_off_by_a_constant_bootstraps_without_bias():
    """Old statement: bootstrapping a cut answer is unbiased only with the exact value."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    first, then = logits[0].softmax(-1), logits[1:].softmax(-1)
    at_cut = (first.unsqueeze(-1) * then).flatten()  # probability of each first segment
    value = torch.randn(4, generator=generator, dtype=torch.float64)

    def bias(error):
        values = torch.stack([value + error, value])
        ascents = [torch.autograd.grad(at_cut @ v, logits, retain_graph=True)[0] for v in values]
        return (ascents[0] - ascents[1]).abs().max().item()

    assert bias(torch.full((4,), 0.2).double()) < EXACT
    assert bias(numbers(0.2, 0.2, 0.2, 0.0)) > 0.01


def test_summed_over_an_answer_the_vocabulary_can_be_noisier_than_the_sample():
    """Old statement: the sum over the vocabulary at the visited states never has the larger
    variance. Two tokens; the policy is nearly its reference given that the answer is not (0, 1), so
    the summed log-ratio is nearly constant and the KL of the second state is not."""
    ref = numbers(0.5, 0.5).unsqueeze(-1) * torch.tensor([[0.2, 0.8], [0.6, 0.4]]).double()
    policy = ref * torch.tensor([[1.0, 1e-3], [1.0, 1.0]]).double()
    policy = policy / policy.sum()
    first, ref_first = policy.sum(-1), ref.sum(-1)
    then, ref_then = (p / p.sum(-1, keepdim=True) for p in (policy, ref))
    of_states = ((first * (first / ref_first).log()).sum()) + (then * (then / ref_then).log()).sum(
        -1, keepdim=True
    ).expand(2, 2)
    sampled = (policy / ref).log()
    assert (policy * (of_states - sampled)).sum().abs() < EXACT  # one mean
    sampled, of_states = (variance(policy, values) for values in (sampled, of_states))
    assert of_states > 10 * sampled
    k1_noise = [variance(p, (p / r).log()) for p, r in zip(then, ref_then, strict=True)]
    assert min(k1_noise) > 0  # at one state the sum has none


def test_a_dropped_group_takes_its_kl_loss_with_it():
    """Old statement: dropping groups of equal rewards changes no sum of gradients."""
    ref = numbers(-0.5, -1.0, -2.0, -0.3).unsqueeze(-1)
    logp = numbers(-0.7, -0.7, -1.1, -1.1).unsqueeze(-1).requires_grad_()
    advantages = group_normalise(torch.tensor([[1.0, 1.0], [1.0, 0.0]]).double()).flatten()

    def gradient(kept, beta):
        mask = kept.unsqueeze(-1)
        loss = policy_loss(logp, old_logp=logp.detach(), advantages=advantages, mask=mask)
        terms = loss.per_token + beta * torch.where(mask, k2(logp, ref), 0.0)
        return torch.autograd.grad(terms.sum(), logp)[0]

    everyone, kept = torch.ones(4, dtype=torch.bool), torch.tensor([False, False, True, True])
    assert (gradient(everyone, 0.0) == gradient(kept, 0.0)).all()
    assert (gradient(everyone, 0.1) - gradient(kept, 0.1))[:2].abs().min() > 0.01


def test_folded_in_before_the_division_beta_keeps_its_unit():
    """Old statement: before the division beta would be divided by the standard deviation. What one
    nat costs in reward: the change of the reward that makes up for a nat of one answer."""
    rewards, kl, beta = numbers(1.0, 0.0, 0.0, 0.0), numbers(0.3, 0.1, 0.5, 0.2), 0.04

    def price(advantages):
        """Slope of the first advantage by its KL over that by its reward."""
        slopes = []
        for dr, dk in ((0.0, 1.0), (1.0, 0.0)):
            moved = advantages(rewards + 1e-6 * dr * rewards, kl + 1e-6 * dk * rewards)
            slopes.append((moved - advantages(rewards, kl))[0].item())
        return -slopes[0] / slopes[1]

    def before(rewards, kl):
        return group_normalise(rewards - beta * kl, eps=0.0)

    held = 1 / rewards.std()

    def after(rewards, kl):
        return (rewards - rewards.mean()) * held - beta * (kl - kl.mean())

    assert price(before) == pytest.approx(beta, rel=1e-4)
    assert price(after) == pytest.approx(beta * rewards.std().item(), rel=1e-4)


def test_against_its_advantage_no_ratio_stops_a_gradient():
    """Old statement: far from the sampler the gradient of a clipped ratio stops."""
    for kind in ("grpo", "gspo", "sequence"):
        for ratio, advantage, stops in ((1e4, 1.0, True), (1e4, -1.0, False), (1e-4, -1.0, True)):
            old = numbers(-10.0).unsqueeze(0)
            logp = (old + math.log(ratio)).requires_grad_()
            loss = policy_loss(
                logp,
                old_logp=old,
                advantages=numbers(advantage),
                mask=torch.ones(1, 1, dtype=torch.bool),
                kind=kind,
            ).loss
            slope = torch.autograd.grad(loss, logp)[0].item()
            assert slope == (0.0 if stops else pytest.approx(ratio))


def test_a_mask_on_failing_answers_leaves_a_push_towards_failing():
    """Old statement: beside the KL's share on failing answers a push away from failing is left."""
    logits, teacher = numbers(0.3, -0.2, 0.5, 0.0).requires_grad_(), numbers(0.1, 0.4, -0.3, 0.2)
    policy, fails = logits.softmax(-1), numbers(1.0, 0.0, 1.0, 0.0)
    l = logits.log_softmax(-1) - teacher.log_softmax(-1)
    parts = ((policy.detach() * fails * l.square() / 2), policy * fails * l, policy * fails)
    masked, share, failing = (
        torch.autograd.grad(part.sum(), logits, retain_graph=True)[0] for part in parts
    )
    assert (masked - (share - failing)).abs().max() < EXACT
    assert -(masked - share) @ failing > 0.01  # one step on what is beside the share: more fail


def ends_of_k3_in_the_reward(logits, reference, table):
    """[starts, answers]: plain descent of the exact gradient by a table's logits."""
    for _ in range(3000):
        leaf = logits.detach().requires_grad_(True)
        logp = table(leaf)
        policy = logp.exp()
        owed = reference - policy + policy * (logp - reference.log())  # policy times k3
        centred = (owed - policy * owed.sum(-1, keepdim=True)).detach()
        surrogate = (centred * logp).sum()
        (gradient,) = torch.autograd.grad(surrogate, leaf)
        logits = logits - gradient
    return table(logits).exp()


def test_on_the_logits_of_tokens_k3_of_a_whole_answer_can_keep_several():
    """Two binary tokens, k3 of the answer in the reward, equal rewards: where the plain flow ends.

    On one logit an answer it leaves a single answer. On the logits of the tokens the answers that
    share the first token stay, in the proportions of the reference.
    """
    reference = numbers(0.37, 0.28, 0.22, 0.13)
    noise = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    starts = (reference.log() + noise).softmax(-1).unflatten(-1, (2, 2))
    # the first token, and the second after either
    tables = torch.stack([starts.sum(-1), *starts.unbind(1)], dim=1).log()

    def of_tokens(logits):
        logp = logits.log_softmax(-1)
        return (logp[:, 0].unsqueeze(-1) + logp[:, 1:]).flatten(1)

    single = ends_of_k3_in_the_reward(
        starts.flatten(1).log(), reference, lambda logits: logits.log_softmax(-1)
    )
    assert (single.amax(-1) > 0.99).all()
    pairs = ends_of_k3_in_the_reward(tables, reference, of_tokens)
    truncated = torch.stack([reference * numbers(1, 1, 0, 0), reference * numbers(0, 0, 1, 1)])
    truncated = truncated / truncated.sum(-1, keepdim=True)
    at_one = (pairs.unsqueeze(1) - truncated).abs().amax(-1).amin(-1) < 0.01
    assert at_one.double().mean() > 0.6


@pytest.mark.parametrize("geometry", ["natural", "plain"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_exceptional_starts_return_to_a_reference_without_a_majority(estimator, geometry):
    """Old statement: no direction draws starts in. A start beside this one is lost."""
    equal = torch.zeros(2, 3, dtype=torch.float64)
    starts = torch.stack([numbers(0.4, 0.3, 0.3), numbers(0.4, 0.305, 0.295)]).log()
    ends = expected_ascent(
        starts,
        equal,
        equal,
        beta=1.0,
        estimator=estimator,
        placement="reward",
        geometry=geometry,
        steps=1000,
        step_size=4.0,
    ).exp()
    assert (ends[0] - 1 / 3).abs().max() < 0.01
    assert ends[1].min() < 0.01


def test_the_clamp_of_openrlhf_takes_the_gradient_of_k2_from_the_farthest_tokens():
    """A token the policy has made two hundred times likelier: its k2 has the slope zero there."""
    policy, ref = numbers(0.99, 0.01), numbers(0.004, 0.996)
    logits = policy.log().requires_grad_(True)
    logp = logits.log_softmax(-1)
    for options, exact in (({}, False), ({"unbiased_gradient": True}, True)):
        loss = openrlhf(logp, ref.log(), policy.log(), estimator="k2", **options)
        (found,) = torch.autograd.grad(policy @ loss, logits, retain_graph=True)
        error = (found - reverse_kl_gradient(policy.log(), ref.log())).abs().max()
        assert (error < EXACT) == exact


def test_k3_can_be_the_quieter_loss_with_no_token_nearly_forbidden():
    """Every token has one in ten; the reference gives five of them half, five half as much more."""
    policy, ref = numbers(*[0.1] * 10), numbers(*[0.05] * 5, *[0.15] * 5)
    noise = {
        name: gradient_moments(policy.log(), ref.log(), estimator=name).trace_var
        for name in ("k2", "k3")
    }
    assert noise["k3"] < 0.8 * noise["k2"]


def test_k1_in_the_reward_has_the_reverse_kls_gradient_on_fresh_samples_only():
    """As trainers compute it: the sampler's log-ratio, weighted with the ratio."""
    policy, reference = numbers(0.6, 0.3, 0.1), numbers(0.2, 0.3, 0.5)
    logits = policy.log().requires_grad_(True)
    (exact,) = torch.autograd.grad(reverse_kl(logits, reference.log()), logits)
    for sampler, right in ((policy, True), (numbers(0.4, 0.4, 0.2), False)):
        owed = (sampler / reference).log()
        found = (sampler * (policy / sampler) * owed) @ (torch.eye(3).double() - policy)
        assert ((found - exact).norm() < EXACT) == right
        assert right or (found - exact).norm() > 0.5 * exact.norm()


def test_the_mean_of_k2_is_not_the_kl():
    """Old statement: an estimator's mean is the KL."""
    policy, reference = numbers(0.7, 0.25, 0.05), numbers(0.4, 0.3, 0.3)
    kl = (policy * (policy / reference).log()).sum().item()
    means = {k.__name__: (policy @ k(policy.log(), reference.log())).item() for k in (k1, k2, k3)}
    assert means["k1"] == pytest.approx(kl, abs=EXACT)
    assert means["k3"] == pytest.approx(kl, abs=EXACT)
    assert abs(means["k2"] / kl - 1) > 0.2


def test_under_one_over_length_neither_order_nor_conversion_holds():
    """Reward less KL against its gradient, which leave-one-out has for every group; and 1 - r
    passed on through the return against own-token credit. Summed over tokens, and averaged."""
    answers = enumerate_sequences(2, 3, eos=1)
    draws = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, answers.num_states, 2, generator=draws, dtype=torch.float64)
    rewards = torch.randn(len(answers.mask), generator=draws, dtype=torch.float64)
    logits.requires_grad_(True)
    logp, ref_logp = token_logp(logits, answers), token_logp(reference, answers)
    chance = logp.sum(-1).exp()
    kl = (logp - ref_logp).sum(-1)
    (goal,) = torch.autograd.grad(chance @ (rewards - 0.4 * kl), logits, retain_graph=True)

    def gradient(credit, weights):
        value = (chance.detach()[:, None] * weights * credit.detach() * logp).sum()
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    penalised = (rewards - 0.4 * kl)[:, None].expand_as(logp)
    own = -torch.expm1(ref_logp - logp)
    to_go = own.flip(-1).cumsum(-1).flip(-1)
    mean = 1 / answers.mask.sum(-1, keepdim=True)
    for weights, right in ((torch.ones_like(mean), True), (mean, False)):
        pairs = ((penalised, goal), (to_go, gradient(own, weights)))
        for credit, claimed in pairs:
            both = torch.stack([gradient(credit, weights), claimed]).flatten(1)
            assert ((both[0] - both[1]).norm() < EXACT) == right
            assert right or torch.linalg.matrix_rank(both, rtol=1e-3) == 2  # nor is the direction


def test_not_every_loss_of_single_tokens_has_the_gradient_at_the_visited_states():
    """By hand on answers of two of two tokens: plain k3 weighs a token with nothing else."""
    answers = enumerate_sequences(2, 2)
    draws = torch.Generator().manual_seed(1)
    logits, reference = torch.randn(2, 3, 2, generator=draws, dtype=torch.float64)
    logits.requires_grad_(True)
    logp, ref_logp = token_logp(logits, answers), token_logp(reference, answers)
    visits = torch.cat([numbers(1.0), logits[0].softmax(-1)]).detach()
    reverse, forward = (
        torch.autograd.grad(visits @ kl(logits, reference), logits)[0]
        for kl in (reverse_kl, forward_kl)
    )
    chance = logp.sum(-1).exp().detach()
    found = {
        k.__name__: torch.autograd.grad(
            chance @ k(logp, ref_logp).sum(-1), logits, retain_graph=True
        )[0]
        for k in (k1, k2, k3)
    }
    assert (found["k2"] - reverse).norm() < EXACT
    assert (found["k3"] - forward).norm() < EXACT
    assert found["k1"].norm() < EXACT
    assert (forward - reverse).norm() > 0.1


def test_seldom_tokens_that_lost_probability_can_leave_the_best_constant_positive():
    """A row for every prefix, in each of which the seldom token has lost probability."""
    answers = enumerate_sequences(2, 2)
    second = numbers(0.999, 0.001)
    policy = torch.stack([numbers(0.95, 0.05), second, second]).log()
    reference = torch.stack([numbers(0.9, 0.1), 1 - second, 1 - second]).log()
    log_ratio = token_logp(policy, answers) - token_logp(reference, answers)
    to_go = log_ratio.flip(-1).cumsum(-1).flip(-1)
    spread = [credit_moments(policy, answers, to_go - b).trace_var.item() for b in (-1, 0, 1)]
    best = (spread[0] - spread[2]) / (2 * (spread[0] - 2 * spread[1] + spread[2]))
    assert best > 1
    assert spread[2] < spread[1] < spread[0]


def test_where_the_reward_is_a_sum_over_tokens_the_k2_loss_of_tokens_ends_at_the_tilt():
    """Two independent tokens: each has its own tilt, and their product is that of the answers."""
    answers = enumerate_sequences(2, 2)
    reference = torch.stack([numbers(0.3, -0.4), *numbers(1.0, 0.2).expand(2, 2)])
    rewards = numbers(0.0, 1.0)[answers.tokens[:, 0]] + numbers(0.5, -0.5)[answers.tokens[:, 1]]
    ref_logp = token_logp(reference, answers)
    tilt = (ref_logp.sum(-1) + rewards / 0.7).softmax(-1)
    logits = reference + torch.stack([numbers(0, 1), *numbers(0.5, -0.5).expand(2, 2)]) / 0.7
    logits.requires_grad_(True)
    logp = token_logp(logits, answers)
    chance = logp.sum(-1).exp()
    assert (chance - tilt).abs().max() < EXACT
    loss = 0.7 * (chance.detach() @ k2(logp, ref_logp).sum(-1)) - chance @ rewards
    (slope,) = torch.autograd.grad(loss, logits)
    assert slope.abs().max() < EXACT
