"""Chapter 6: which losses follow the sequence KL, printed forms by hand, and wrong verdicts."""

from __future__ import annotations

import itertools

import pytest
import torch

from analysis.chapters.ch06_sequences import (
    claims_on_credit,
    claims_on_objectives,
    claims_on_weights,
    credit,
)
from analysis.evidence import kl_estimates
from analysis.evidence.policies import moved_logits, random_tables
from kl_term.kl.credit import credit_moments, state_average
from kl_term.kl.sequences import enumerate_sequences, sequence_kl_gradient, token_logp
from kl_term.objectives.advantages import reward_to_go
from kl_term.objectives.gae import generalised_advantage
from tests.trees import TIGHT


@pytest.fixture(scope="module")
def ragged():
    return enumerate_sequences(3, 4, eos=2)


@pytest.fixture(scope="module")
def policies(ragged):
    return random_tables(ragged, 3, 6, spread=1.2, seed=3)


@pytest.mark.parametrize("gamma", [1.0, 0.8, 0.0])
@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_bias_of_a_wrong_critic_is_the_one_of_the_theorem(policies, ragged, gamma, lam):
    logits, ref_logits = (x[0] for x in policies)
    costs = token_logp(logits, ragged) - token_logp(ref_logits, ragged)
    exact = state_average(reward_to_go(costs), logits, ragged)
    critic = torch.randn(
        len(exact), generator=torch.Generator().manual_seed(8), dtype=torch.float64
    )
    credit = generalised_advantage(costs, critic[ragged.states], ragged.mask, gamma=gamma, lam=lam)
    error = gamma * (1 - lam) * critic - (1 - gamma * lam) * exact
    later = torch.where(ragged.mask, error[ragged.states], 0.0)[:, 1:]
    later = reward_to_go(torch.nn.functional.pad(later, (0, 1)), gamma=gamma * lam)
    bias = credit_moments(logits, ragged, later).mean
    found = credit_moments(logits, ragged, credit).mean
    referee = sequence_kl_gradient(logits, ref_logits, ragged)
    torch.testing.assert_close(found, referee + bias, rtol=0, atol=1e-12)
    if gamma * lam < 1:
        assert (found - referee + bias).abs().max() > 1e-2


#: The losses of the table whose mean is the gradient of the sequence KL, by cost and ratio.
EXACT_ROWS = {
    ("k1", "prefix, attached"),
    ("k3", "prefix, attached"),
    ("full vocabulary", "tokens before, attached"),
    ("growth of k2", "prefix, detached"),
    ("k1 reward to go", "prefix"),
    ("k1 reward to go", "whole"),
}


def test_which_losses_are_the_sequence_kl(policies, ragged):
    mixed, missed = ("k3", "token, gradient of prefix"), []
    for size in (0.02, 0.01):
        samplers = moved_logits(policies.logits, size, seed=5)
        table = credit.prefix_table(policies, samplers, ragged).set_index(["cost", "weight"])
        exact = {c: set(table.index[table[f"error_{c}"] < 1e-12]) for c in ("stale", "fresh")}
        assert exact == {"stale": EXACT_ROWS, "fresh": EXACT_ROWS | {mixed}}
        missed.append(table.error_stale[mixed])
    assert missed[0] / missed[1] == pytest.approx(2, rel=0.05)  # of first order in the staleness


def test_a_cap_trades_bias_for_noise_and_rescaling_keeps_the_gradient(policies, ragged):
    samplers = moved_logits(policies.logits, 0.5, seed=4)
    tight, loose, free = (
        credit.cap_medians(policies, samplers, ragged, cap) for cap in (1.0, 2.0, torch.inf)
    )
    for kind in ("clamp", "rescaled"):
        assert free[f"bias_{kind}"] < 1e-12 < loose[f"bias_{kind}"] < tight[f"bias_{kind}"]
        assert tight[f"noise_{kind}"] < loose[f"noise_{kind}"] < free[f"noise_{kind}"]
    assert tight["bias_rescaled"] < tight["bias_clamp"]
    assert free["capped"] == 0 < loose["capped"] < tight["capped"]
    fresh = credit.cap_medians(policies, policies.logits, ragged, 1.0)
    assert fresh["bias_clamp"] < 1e-12  # a ratio of one is not over the cap


@pytest.mark.parametrize("each", [-0.5, 0.5])
def test_a_capped_ratio_is_finite_on_long_answers(each):
    """The line that chapter 6 shows; as ratio * (capped / ratio).detach() it was 0 / 0."""
    logp = torch.full((1, 400), -1.0, requires_grad=True)
    prefix = (each * torch.arange(1, 401)).exp()
    assert (prefix * (prefix.clamp(max=2.0) / prefix)).isnan().any()
    running = (logp - (logp.detach() - each)).cumsum(-1)
    capped = running.detach().exp().clamp(max=2.0) * (running - running.detach()).exp()
    torch.testing.assert_close(capped[0], prefix.clamp(max=2.0))
    (gradient,) = torch.autograd.grad(capped.sum(), logp)
    torch.testing.assert_close(gradient[0], prefix.clamp(max=2.0).flip(-1).cumsum(-1).flip(-1))


EOS, LENGTH = 2, 3


def prefixes():
    """Every prefix at which a token is drawn, shortest first."""
    return [
        prefix
        for length in range(LENGTH)
        for prefix in itertools.product(range(3), repeat=length)
        if EOS not in prefix
    ]


def answers():
    """Every answer: it ends with the end token or has full length."""
    return [
        (*prefix, token)
        for prefix in prefixes()
        for token in range(3)
        if token == EOS or len(prefix) == LENGTH - 1
    ]


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        p: torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
        for p in prefixes()
    }


def logps(policy, answer):
    return [policy[answer[:t]].log_softmax(-1)[answer[t]] for t in range(len(answer))]


def gradient(objective, policy):
    leaves = list(policy.values())
    return torch.stack(torch.autograd.grad(objective, leaves, allow_unused=False))


def test_broadcast_advantage_is_the_whole_return():
    policy = draw(4)
    outcome = {answer: float(sum(answer)) for answer in answers()}
    mean = sum(sum(logps(policy, a)).exp() * outcome[a] for a in answers())
    broadcast = sum(
        sum(logps(policy, a)).exp().detach() * outcome[a] * sum(logps(policy, a)) for a in answers()
    )
    torch.testing.assert_close(gradient(broadcast, policy), gradient(mean, policy), **TIGHT)


def test_printed_full_vocabulary_gradient_is_on_policy_only():
    generator = torch.Generator().manual_seed(5)
    logits, ref, old = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    leaf = logits.clone().requires_grad_(True)

    def printed(sampler):
        """Equation 22 literally, as an objective whose gradient autograd takes."""
        old_logp = sampler.log_softmax(-1)
        weight = old_logp.exp() * (old_logp - ref.log_softmax(-1))
        (g,) = torch.autograd.grad((weight * leaf.log_softmax(-1)).sum(), leaf)
        return g

    divergence = (leaf.softmax(-1) * (leaf.log_softmax(-1) - ref.log_softmax(-1))).sum()
    (exact,) = torch.autograd.grad(divergence, leaf)
    torch.testing.assert_close(printed(logits), exact, **TIGHT)
    assert (printed(old) - exact).abs().max() > 0.01


def test_state_visits_add_up_to_the_mean_length():
    policy = draw(6)
    mass = sum(sum(logps(policy, p)).exp().item() if p else 1.0 for p in prefixes())
    mean_length = sum(sum(logps(policy, a)).exp().item() * len(a) for a in answers())
    assert mass == pytest.approx(mean_length, abs=1e-12)
    assert mass > 1.1


def test_beta_and_not_theta_controls_the_distance_to_the_reference():
    generator = torch.Generator().manual_seed(7)
    ref, rewards = torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def distance(beta):
        logp = (ref.log_softmax(-1) + rewards / beta).log_softmax(-1)  # optimum at this beta
        return (logp.exp() * (logp - ref.log_softmax(-1))).sum().item()

    assert distance(0.1) > distance(1.0) > distance(10.0) > 0


def test_printed_terminal_reward_defines_itself():
    """With one symbol for outcome and reward the last line is R = R - kl: false unless kl = 0."""
    policy, reference = draw(1), draw(2)
    answer = max(answers(), key=len)
    kl = (logps(policy, answer)[-1] - logps(reference, answer)[-1]).item()
    outcome, rewards = 1.0, [0.0] * len(answer)
    rewards[-1] = outcome - kl
    assert sum(rewards) + kl == pytest.approx(outcome)
    assert abs(rewards[-1] - (rewards[-1] - kl)) > 0.01


def test_a_wrong_sign_changes_the_verdicts(monkeypatch):
    true = claims_on_credit.credit_moments

    def flipped(logits, sequences, credit, old_logits=None):
        moments = true(logits, sequences, credit, old_logits)
        return moments._replace(mean=-moments.mean)

    for module in (
        claims_on_credit,
        kl_estimates,
    ):  # where the chapter looks it up, and what it calls
        monkeypatch.setattr(module, "credit_moments", flipped)
    assert claims_on_credit.k1_in_reward_is_k2_as_loss().verdict == "fails"
    assert claims_on_credit.on_policy_distillation().verdict == "fails"


def test_a_wrong_kl_changes_the_verdicts(monkeypatch):
    monkeypatch.setattr(claims_on_credit, "reverse_kl_gradient", lambda logits, ref: logits - ref)
    assert claims_on_credit.full_vocabulary().verdict == "fails"
    monkeypatch.setattr(claims_on_credit, "sequence_kl", lambda *a: torch.tensor(0.5).double())
    assert claims_on_credit.exact_kl_of_sequences().verdict == "fails"


def test_exponent_of_the_product_needs_log_ratios():
    generator = torch.Generator().manual_seed(2)
    policy, old = torch.randn(2, 4, generator=generator, dtype=torch.float64).softmax(-1)
    words = torch.multinomial(old, 50, replacement=True, generator=torch.Generator().manual_seed(0))
    ratio = (policy / old)[words]
    printed, corrected = (ratio - 1).sum().exp(), ratio.log().sum().exp()
    torch.testing.assert_close(corrected, ratio.prod(), rtol=1e-12, atol=0)
    assert printed / ratio.prod() > 2


def test_token_surrogate_is_biased_on_a_chain():
    """Two binary tokens; the second pays only after the first: supports are full."""
    old, new = torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8])
    q_second = torch.tensor([0.0, 1.0])  # return of the second token after first token 1
    value_one = float(old @ q_second)
    gain = float(new[1] * (new @ q_second) - old[1] * (old @ q_second))
    first = torch.tensor([0.0, value_one]) - float(old[1]) * value_one
    second = q_second - value_one
    surrogate = float(new @ first) + float(old[1]) * float(new @ second)
    with_states = float(new @ first) + float(new[1]) * float(new @ second)
    assert with_states == pytest.approx(gain, abs=1e-6)
    assert abs(surrogate - gain) > 0.05


def test_wrong_weights_change_the_verdicts(monkeypatch):
    monkeypatch.setattr(claims_on_weights, "product_variance", lambda chi2, length: chi2 * length)
    assert claims_on_weights.product_variance_grows().verdict == "fails"
    monkeypatch.setattr(claims_on_weights, "masked_logits", lambda logits, keep: -logits)
    assert claims_on_weights.keep_sampling_mask().verdict == "fails"
    monkeypatch.setattr(claims_on_objectives, "performance_difference", lambda *a: torch.zeros(()))
    assert claims_on_objectives.token_ratio_surrogate().verdict == "holds"


def test_another_clip_is_not_the_printed_weight(monkeypatch):
    monkeypatch.setattr(claims_on_weights, "EPSILON", 0.1)
    assert claims_on_weights.cispo_weight().verdict == "fails"
