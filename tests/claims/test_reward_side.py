"""Claims on the KL in the reward, by routes of their own: finite differences, seeded samples and
sums written out. Each test also shows that the printed or contrary form fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from analysis.experiments.claims import reward_side
from analysis.kl.sequences import enumerate_sequences

POLICY = torch.tensor([0.55, 0.35, 0.10], dtype=torch.float64)
REF = torch.tensor([0.20, 0.30, 0.50], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 1.0, 0.4], dtype=torch.float64)
BETA = 0.3


def slope_of(function, at: Tensor = POLICY) -> Tensor:
    """Central differences by the logits of a function of the probabilities."""
    logits, eps = at.log(), 1e-6
    steps = eps * torch.eye(len(at), dtype=at.dtype)
    return torch.stack(
        [
            (function((logits + s).softmax(-1)) - function((logits - s).softmax(-1))) / (2 * eps)
            for s in steps
        ]
    )


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def sampled_score_mean(weights: Tensor, count: int = 40_000, seed: int = 0) -> tuple[Tensor, float]:
    """Mean over tokens sampled from POLICY of weight times score, and five standard errors."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(POLICY, count, replacement=True, generator=generator)
    eye = torch.eye(len(POLICY), dtype=POLICY.dtype)
    terms = weights[tokens].unsqueeze(-1) * (eye[tokens] - POLICY)
    return terms.mean(0), 5 * terms.std(0).max().item() / count**0.5


def test_sign_of_the_total_loss():
    """Descend the total loss as printed: the reward falls; as corrected, it rises."""

    def printed(p):
        reward_part = -(p * REWARDS).sum()
        return -(reward_part - BETA * kl(p, REF))

    def corrected(p):
        reward_part = (p * REWARDS).sum()
        return -(reward_part - BETA * kl(p, REF))

    start = (REF * REWARDS).sum()
    for loss, rises in ((printed, False), (corrected, True)):
        logits = REF.log()
        for _ in range(50):
            logits = logits - 0.5 * slope_of(loss, logits.softmax(-1))
        assert ((logits.softmax(-1) * REWARDS).sum() > start + 0.05).item() is rises
        assert ((logits.softmax(-1) * REWARDS).sum() < start - 0.05).item() is not rises
    assert reward_side.sign_of_the_total_loss().verdict == "fails"


def test_doubled_probability():
    """Sampling already weighs a token with its probability: an extra factor is counted twice."""
    log_ratio = (POLICY / REF).log()
    exact = slope_of(lambda p: kl(p, REF))
    correct, error = sampled_score_mean(log_ratio)
    doubled, other_error = sampled_score_mean(POLICY * log_ratio, seed=1)
    assert (correct - exact).abs().max() < error
    assert (doubled - exact).abs().max() > 3 * other_error
    constant, noise = sampled_score_mean(POLICY)  # the printed k1 loss, which should average to 0
    assert constant.abs().max() > 3 * noise
    assert reward_side.doubled_probability().verdict == "fails"


def test_equivalent_objective():
    folded = REWARDS - BETA * (POLICY / REF).log()

    def objective(p):
        return (p * REWARDS).sum() - BETA * kl(p, REF)

    def surrogate(p):
        return (p * folded).sum()

    assert (slope_of(objective) - slope_of(surrogate)).abs().max() < 1e-8
    moved = (POLICY.log() + torch.tensor([0.5, -0.3, 0.4]).double()).softmax(-1)
    assert (slope_of(objective, moved) - slope_of(surrogate, moved)).abs().max() > 0.01
    # A linear function on the simplex is largest at a corner, wherever the optimum is.
    corners = torch.eye(3, dtype=torch.float64) * (1 - 3e-12) + 1e-12
    best = max(surrogate(corner).item() for corner in corners)
    optimum = (REF.log() + REWARDS / BETA).softmax(-1)
    assert best > surrogate(optimum).item() + 0.01
    assert objective(optimum) > max(objective(corner) for corner in corners) + 0.01
    assert reward_side.equivalent_objective().verdict == "holds if"


def test_k3_moved_into_the_reward():
    old = torch.tensor([0.30, 0.50, 0.20], dtype=torch.float64)
    forward = slope_of(lambda p: kl(REF, p))
    folded = slope_of(lambda p: (p * (1 - REF / POLICY)).sum())
    assert (folded - forward).abs().max() < 1e-8
    stale = slope_of(lambda p: (p * (1 - REF / old)).sum())
    assert (stale - forward).abs().max() > 0.05
    assert (-folded - forward).abs().max() > 0.05
    found = reward_side.k3_moved_into_the_reward()
    assert found.verdict == "holds if"
    # At every state the penalty has mean zero, so the return adds nothing to it.
    assert (POLICY * (1 - REF / POLICY)).sum().abs() < 1e-12
    assert found.figures["sequence_to_go"] < 1e-10


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
    found = reward_side.always_positive_penalties()
    assert found.verdict == "fails"
    assert found.figures["lost_k1"] == 0 < found.figures["lost_k3"]


def test_folded_reward_is_ppos():
    """Sequences of two tokens by hand: the task reward passed through the return counts twice."""
    tree = enumerate_sequences(2, 2)
    assert tree.mask.all()
    found = reward_side.folded_reward_is_ppos()
    assert found.verdict == "holds if"
    assert found.figures["last_token"] < 1e-10 < 0.05 < found.figures["own_token"]
    reward_per_token, tokens = 1.0, 2
    returned = [reward_per_token * (tokens - t) for t in range(tokens)]
    assert returned == [2.0, 1.0]  # the first token is credited with twice the reward
    assert found.figures["every_token"] > 5 * found.figures["own_token"]


def test_loss_and_reward_convert():
    log_ratio = (POLICY / REF).log()
    for loss, penalty in (
        (lambda p: (POLICY * (p / REF).log().square() / 2).sum(), log_ratio),
        (lambda p: (POLICY * (REF / p - 1 - (REF / p).log())).sum(), 1 - REF / POLICY),
    ):
        folded = slope_of(lambda p, penalty=penalty: (p * penalty).sum())
        assert (slope_of(loss) - folded).abs().max() < 1e-8
    # The estimator itself is not its own counterpart.
    wrong = slope_of(lambda p: (p * log_ratio.square() / 2).sum())
    right = slope_of(lambda p: (POLICY * (p / REF).log().square() / 2).sum())
    assert (wrong - right).abs().max() > 0.05
    assert reward_side.loss_and_reward_convert().verdict == "holds if"


@pytest.mark.parametrize(
    "decision",
    [
        reward_side.sign_of_the_total_loss,
        reward_side.doubled_probability,
        reward_side.equivalent_objective,
    ],
)
def test_a_perturbed_implementation_changes_the_verdict(monkeypatch, decision):
    before = decision().verdict
    true = reward_side.reverse_kl_gradient
    monkeypatch.setattr(reward_side, "reverse_kl_gradient", lambda *pair: -true(*pair))
    true_score = reward_side.expected_score
    monkeypatch.setattr(reward_side, "expected_score", lambda *pair: true_score(*pair) * 1.01)
    assert decision().verdict != before


def test_erratum_one_token_of_a_sequence():
    """The score of one token alone leaves out the gradient at every other state."""
    tree = enumerate_sequences(2, 2)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    rewards = torch.randn(4, generator=generator, dtype=torch.float64)

    def logp(table):
        return table.log_softmax(-1)[tree.states, tree.tokens]

    leaf = logits.clone().requires_grad_(True)
    (exact,) = torch.autograd.grad((logp(leaf).sum(-1).exp() * rewards).sum(), leaf)
    probability = logp(logits).sum(-1).exp()
    for tokens, same in (((0, 1), True), ((0,), False), ((1,), False)):
        leaf = logits.clone().requires_grad_(True)
        terms = probability * rewards * logp(leaf)[:, tokens].sum(-1)
        (gradient,) = torch.autograd.grad(terms.sum(), leaf)
        assert ((gradient - exact).abs().max() < 1e-12).item() is same


def test_erratum_log_likelihood_has_another_value():
    """The rewritten reward term has the gradient of the mean reward, not its value."""
    value = (POLICY * REWARDS).sum()
    rewritten = (POLICY * REWARDS * POLICY.log()).sum()
    assert (value - rewritten).abs() > 0.1
    same = slope_of(lambda p: (POLICY * REWARDS * p.log()).sum())
    assert (same - slope_of(lambda p: (p * REWARDS).sum())).abs().max() < 1e-8


def test_erratum_penalty_gradient_is_not_the_kls():
    """With k2 or k3 as weight, the mean of weight times score is not the gradient of the KL."""
    log_ratio = (POLICY / REF).log()
    exact = slope_of(lambda p: kl(p, REF))
    for penalty, same in (
        (log_ratio, True),
        (log_ratio.square() / 2, False),
        (REF / POLICY - 1 + log_ratio, False),
    ):
        weighted = slope_of(lambda p, penalty=penalty: (p * penalty).sum())
        assert ((weighted - exact).abs().max() < 1e-8).item() is same
