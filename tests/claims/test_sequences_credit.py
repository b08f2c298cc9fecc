"""Credit claims on a tree walked by recursion in plain Python: no table, no enumeration module."""

from __future__ import annotations

import itertools

import pytest
import torch

from analysis.experiments.claims import sequences_credit, sequences_states
from analysis.experiments.claims.recorded import recorded

EOS, LENGTH = 2, 3
TIGHT = {"rtol": 0, "atol": 1e-12}


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


@pytest.fixture
def pair():
    return draw(1), draw(2)


@pytest.fixture
def exact(pair):
    """Gradient of the sequence KL, by autograd through the sum over answers."""
    policy, reference = pair
    total = 0.0
    for answer in answers():
        logp, ref = sum(logps(policy, answer)), sum(logps(reference, answer)).detach()
        total = total + logp.exp() * (logp - ref)
    return gradient(total, policy)


def credited(pair, credit):
    """Expected gradient when token t of an answer gets ``credit(log_ratios, t)``."""
    policy, reference = pair
    surrogate = 0.0
    for answer in answers():
        logp, ref = logps(policy, answer), logps(reference, answer)
        ratios = [(a - b).item() for a, b in zip(logp, ref, strict=True)]
        weight = sum(logp).exp().detach()
        surrogate = surrogate + weight * sum(
            credit(ratios, t) * logp[t] for t in range(len(answer))
        )
    return gradient(surrogate, policy)


def immediate(ratios, t):
    return ratios[t]


def to_go(ratios, t):
    return sum(ratios[t:])


def test_k1_in_reward_is_k2_as_loss_with_immediate_credit_only(pair, exact):
    policy, reference = pair
    k2 = 0.0
    for answer in answers():
        logp, ref = logps(policy, answer), logps(reference, answer)
        terms = sum((a - b.detach()) ** 2 / 2 for a, b in zip(logp, ref, strict=True))
        k2 = k2 + sum(logp).exp().detach() * terms
    k2_gradient = gradient(k2, policy)
    torch.testing.assert_close(credited(pair, immediate), k2_gradient, **TIGHT)
    torch.testing.assert_close(credited(pair, to_go), exact, **TIGHT)
    assert (k2_gradient - exact).abs().max() > 0.01
    finding = sequences_credit.k1_in_reward_is_k2_as_loss()
    assert finding.verdict == "holds if"
    assert finding.figures["k2_error"] > 0.1


def test_kl_in_reward_needs_its_future_undiscounted(pair, exact):
    discounted = credited(pair, lambda r, t: sum(0.9 ** (u - t) * r[u] for u in range(t, len(r))))
    torch.testing.assert_close(credited(pair, lambda r, t: sum(r)), exact, **TIGHT)
    assert (discounted - exact).abs().max() > 1e-3
    assert sequences_credit.kl_in_the_reward().verdict == "holds if"


def test_outcome_beside_every_token_counts_it_often():
    policy = draw(3)
    outcome = {answer: float(len(answer) == 2) - answer[0] for answer in answers()}
    mean = sum(sum(logps(policy, a)).exp() * outcome[a] for a in answers())
    exact = gradient(mean, policy)

    def with_rewards(rewards):
        surrogate = 0.0
        for answer in answers():
            logp = logps(policy, answer)
            terms = sum(sum(rewards(answer)[t:]) * logp[t] for t in range(len(answer)))
            surrogate = surrogate + sum(logp).exp().detach() * terms
        return gradient(surrogate, policy)

    at_the_end = with_rewards(lambda a: [0.0] * (len(a) - 1) + [outcome[a]])
    everywhere = with_rewards(lambda a: [outcome[a]] * len(a))
    torch.testing.assert_close(at_the_end, exact, **TIGHT)
    assert (everywhere - exact).abs().max() > 0.01


def test_distillation_needs_the_scores_to_go(pair, exact):
    assert (credited(pair, immediate) - exact).abs().max() > 0.01
    differentiated = credited(pair, lambda r, t: 1.0)  # autograd through the sampled log-ratio
    assert differentiated.abs().max() < 1e-12
    finding = sequences_credit.on_policy_distillation()
    assert finding.verdict == "holds if"
    assert finding.figures["to_go_error"] < 1e-12 < 0.1 < finding.figures["immediate_error"]
    finals = recorded("distillation_sparse").finals.groupby("arm")["own_accuracy"].median()
    crude = finals["opd_to_go"] - finals["opd_immediate"]
    assert finding.figures["to_go_sparse"] == pytest.approx(crude, abs=0.02) and crude < -0.1


def test_broadcast_advantage_is_the_whole_return():
    policy = draw(4)
    outcome = {answer: float(sum(answer)) for answer in answers()}
    mean = sum(sum(logps(policy, a)).exp() * outcome[a] for a in answers())
    broadcast = sum(
        sum(logps(policy, a)).exp().detach() * outcome[a] * sum(logps(policy, a)) for a in answers()
    )
    torch.testing.assert_close(gradient(broadcast, policy), gradient(mean, policy), **TIGHT)


def test_full_vocabulary_is_exact_at_a_state_only(pair, exact):
    policy, reference = pair
    visited = 0.0
    for prefix in prefixes():
        reach = sum(logps(policy, prefix)).exp().detach() if prefix else 1.0
        logp, ref = policy[prefix].log_softmax(-1), reference[prefix].detach().log_softmax(-1)
        visited = visited + reach * (logp.exp() * (logp - ref)).sum()
    per_state = gradient(visited, policy)
    torch.testing.assert_close(credited(pair, immediate), per_state, **TIGHT)
    assert (per_state - exact).abs().max() > 0.01
    assert sequences_states.full_vocabulary().verdict == "holds if"


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


def test_sequence_kl_needs_no_sum_over_sequences(pair):
    policy, reference = pair

    def divergence(prefix):
        """By recursion over states: the KL here plus that of what follows."""
        logp, ref = policy[prefix].log_softmax(-1), reference[prefix].log_softmax(-1)
        total = 0.0
        for token in range(3):
            ends = token == EOS or len(prefix) == LENGTH - 1
            later = 0.0 if ends else divergence((*prefix, token))
            total = total + logp[token].exp() * (logp[token] - ref[token] + later)
        return total

    by_answers = sum(
        sum(logps(policy, a)).exp() * (sum(logps(policy, a)) - sum(logps(reference, a)))
        for a in answers()
    )
    torch.testing.assert_close(divergence(()), by_answers, **TIGHT)
    finding = sequences_states.exact_kl_of_sequences()
    assert finding.verdict == "holds if"
    assert finding.figures["variance_left"] < 0.5


def test_state_visits_add_up_to_the_mean_length():
    policy = draw(6)
    mass = sum(sum(logps(policy, p)).exp().item() if p else 1.0 for p in prefixes())
    mean_length = sum(sum(logps(policy, a)).exp().item() * len(a) for a in answers())
    assert mass == pytest.approx(mean_length, abs=1e-12)
    assert mass > 1.1
    assert sequences_states.state_distribution().verdict == "fails"


def test_beta_and_not_theta_controls_the_distance_to_the_reference():
    generator = torch.Generator().manual_seed(7)
    ref, rewards = torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def distance(beta):
        logp = (ref.log_softmax(-1) + rewards / beta).log_softmax(-1)  # optimum at this beta
        return (logp.exp() * (logp - ref.log_softmax(-1))).sum().item()

    assert distance(0.1) > distance(1.0) > distance(10.0) > 0


def test_a_loss_is_not_its_gradient(pair):
    """Equation 15 equates the KL loss, a number, with the gradient of k2, which has a shape."""
    policy, reference = pair
    first = policy[()]
    log_ratio = first.log_softmax(-1) - reference[()].detach().log_softmax(-1)
    weight = first.detach().softmax(-1)
    kl_loss = (weight * log_ratio.detach() * first.log_softmax(-1)).sum()
    k2_loss = (weight * log_ratio.square() / 2).sum()
    by_kl, by_k2 = (torch.autograd.grad(x, first, retain_graph=True)[0] for x in (kl_loss, k2_loss))
    torch.testing.assert_close(by_kl, by_k2, **TIGHT)
    assert kl_loss.shape != by_k2.shape
    assert (kl_loss.detach() - by_k2).abs().min() > 1e-3


def test_printed_terminal_reward_defines_itself(pair):
    """With one symbol for outcome and reward the last line is R = R - kl: false unless kl = 0."""
    policy, reference = pair
    answer = max(answers(), key=len)
    kl = (logps(policy, answer)[-1] - logps(reference, answer)[-1]).item()
    outcome, rewards = 1.0, [0.0] * len(answer)
    rewards[-1] = outcome - kl
    assert sum(rewards) + kl == pytest.approx(outcome)
    assert abs(rewards[-1] - (rewards[-1] - kl)) > 0.01


def test_a_wrong_sign_changes_the_verdicts(monkeypatch):
    true = sequences_credit.credit_moments

    def flipped(logits, sequences, credit, old_logits=None):
        mean, trace_var = true(logits, sequences, credit, old_logits)
        return type(true(logits, sequences, credit, old_logits))(-mean, trace_var)

    monkeypatch.setattr(sequences_credit, "credit_moments", flipped)
    assert sequences_credit.k1_in_reward_is_k2_as_loss().verdict == "fails"
    assert sequences_credit.on_policy_distillation().verdict == "fails"


def test_a_wrong_kl_changes_the_verdicts(monkeypatch):
    monkeypatch.setattr(sequences_states, "reverse_kl_gradient", lambda logits, ref: logits - ref)
    assert sequences_states.full_vocabulary().verdict == "fails"
    monkeypatch.setattr(sequences_states, "sequence_kl", lambda *a: torch.tensor(0.5).double())
    assert sequences_states.exact_kl_of_sequences().verdict == "fails"
