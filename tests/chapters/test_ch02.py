"""The tables of chapter 2 say what the theorems say, and their referees could say otherwise."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters import ch02_gradients as study
from analysis.chapters.claims import recorded
from analysis.chapters.policies import Policies, random_policies, random_tables
from analysis.kl import enumeration
from analysis.kl.divergences import forward_kl, reverse_kl
from analysis.kl.estimators import k1, k2, k3
from analysis.kl.sequences import enumerate_sequences
from analysis.kl.term import KLTerm


def term(estimator: str, placement: str = "loss", *, weighting: str = "none") -> KLTerm:
    return KLTerm(estimator=estimator, placement=placement, weighting=weighting)


@pytest.fixture(scope="module")
def pairs():
    return random_policies(40, 9, spread=1.5, seed=5)


def test_what_each_variant_optimises_at_one_state(pairs):
    variants = [*study.LOSS_AND_REWARD, term("k4"), term("k3_clip"), term("minimax01")]
    table = study.one_state_table(pairs, variants).set_index(["estimator", "placement"])
    assert table.optimises.to_dict() == {
        ("k1", "loss"): "nothing",
        ("k2", "loss"): "reverse",
        ("k3", "loss"): "forward",
        ("k1", "reward"): "reverse",
        ("k2", "reward"): "neither",
        ("k3", "reward"): "reverse − forward",
        ("k4", "loss"): "forward",
        ("k3_clip", "loss"): "neither",
        ("minimax01", "loss"): "neither",
    }
    assert table.error_reverse["k2", "loss"] < 1e-12 < table.error_reverse["k3", "loss"]


def test_noise_agrees_with_a_sample():
    one = Policies(*(x[:1] for x in random_policies(1, 9, spread=1.2, seed=5)))
    policy, log_ratio = one.logits[0].softmax(-1), (one.logits - one.ref_logits)[0]
    log_ratio = log_ratio - one.logits[0].logsumexp(-1) + one.ref_logits[0].logsumexp(-1)
    tokens = torch.multinomial(
        policy, 400_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    score = torch.nn.functional.one_hot(tokens, 9) - policy
    k2, k3 = (c[tokens, None] * score for c in (log_ratio, -torch.expm1(-log_ratio)))
    sampled = k2.var(0).sum() / k2.mean(0).square().sum()
    table = study.noise_table(one, [term("k2"), term("k1", "reward")])
    assert sampled.item() == pytest.approx(table.samples_median[0], rel=0.03)
    assert table.samples_median[0] == pytest.approx(table.samples_median[1], rel=1e-12)
    ratio = study.noise_ratio(*one)[0].item()
    assert (k3.var(0).sum() / k2.var(0).sum()).item() == pytest.approx(ratio, rel=0.03)
    assert abs(ratio - 1) > 0.1


def test_what_each_variant_optimises_over_sequences():
    sequences = enumerate_sequences(3, 3, eos=2)
    tables = random_tables(sequences, 3, 6, spread=1.5, seed=2)
    table = study.sequence_table(tables, sequences)
    prefix = table[table.ratio == "prefix"].set_index("estimator").optimises
    assert prefix.to_dict() == {"k1": "reverse", "k2": "neither", "k3": "reverse"}
    table = table[table.ratio == "none"]
    rows = table.set_index(["estimator", "placement", "level", "credit"]).optimises
    assert rows["k1", "reward", "token", "to_go"] == "reverse"
    assert rows["k1", "reward", "sequence", "immediate"] == "reverse"
    assert rows["k1", "reward", "token", "immediate"] == "reverse (visited)"
    assert rows["k2", "loss", "token", "immediate"] == "reverse (visited)"
    assert rows["k2", "loss", "sequence", "immediate"] == "reverse"
    assert rows["k3", "loss", "token", "immediate"] == "forward (visited)"
    assert rows["k3", "loss", "sequence", "immediate"] == "forward"
    assert (rows["k1", "loss"] == "nothing").all()
    assert (rows["k2", "reward"] == "neither").all()
    assert rows["k3", "reward", "sequence", "immediate"] == "reverse − forward"
    assert rows["k3", "reward", "token", "immediate"] == "reverse − forward (visited)"
    assert rows["k3", "reward", "token", "to_go"] == "neither"


@pytest.mark.parametrize(
    "decision",
    [
        study.k2_loss_is_the_kl_gradient,
        study.kl_as_a_separate_loss,
        study.which_estimator_goes_where,
        study.kdrl_prefers_k2,
    ],
)
def test_a_wrong_k2_changes_the_verdict(decision, monkeypatch):
    right = enumeration.kl_loss
    monkeypatch.setattr(enumeration, "kl_loss", lambda *x, **kind: -right(*x, **kind))
    assert decision().verdict == "fails"


def test_a_wrong_divergence_changes_the_verdict(monkeypatch):
    monkeypatch.setattr(study, "reverse_kl", forward_kl)
    assert study.grpo_names_the_reverse_kl().verdict == "fails"


POLICY, REFERENCE, OLDER = (
    torch.tensor(x, dtype=torch.float64)
    for x in ([0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.4, 0.4, 0.2])
)


def slope(value, step: float = 1e-6) -> torch.Tensor:
    """The gradient of a function of the logits at ``POLICY``, without autograd or a formula."""
    logits, moves = POLICY.log(), step * torch.eye(3, dtype=torch.float64)
    return torch.stack([(value(logits + m) - value(logits - m)) / (2 * step) for m in moves])


def sampled(estimator, sampler: torch.Tensor = POLICY) -> torch.Tensor:
    """Expected gradient of a loss whose sampler stands still."""
    return slope(lambda z: (sampler * estimator(z.log_softmax(-1), REFERENCE.log())).sum())


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=1e-8)


REVERSE, FORWARD = (
    slope(lambda z, kl=kl: kl(z, REFERENCE.log())) for kl in (reverse_kl, forward_kl)
)


def test_losses_by_finite_differences():
    """What DeepSeekMath and Liu et al. print about k1, k2 and k3 as losses, and what is right."""
    assert close(sampled(k1), torch.zeros(3).double()) and sampled(k1, OLDER).norm() > 0.1
    assert close(sampled(k2), REVERSE) and not close(sampled(k2, OLDER), REVERSE)
    assert close(sampled(k3), FORWARD) and not close(sampled(k3), REVERSE)
    mean_of_k2 = slope(lambda z: (z.softmax(-1) * k2(z.log_softmax(-1), REFERENCE.log())).sum())
    assert not torch.allclose(mean_of_k2, REVERSE, atol=0.05)  # the gradient of E[k2] is another


def test_the_logarithm_needs_the_policy_that_is_differentiated():
    score = torch.eye(3, dtype=torch.float64) - POLICY
    assert close((POLICY * (POLICY / REFERENCE).log()) @ score, REVERSE)
    assert not torch.allclose((POLICY * (OLDER / REFERENCE).log()) @ score, REVERSE, atol=0.05)


def test_stale_samples_need_the_policy_in_the_ratio_of_k3():
    """DeepSeekMath's eq. 20 has pi_old there."""

    def descent(sampler: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
        weighted = sampler * (1 - ratio)
        return weighted - POLICY * weighted.sum()

    assert close(sampled(k3), descent(POLICY, REFERENCE / POLICY))
    assert close(sampled(k3, OLDER), descent(OLDER, REFERENCE / POLICY))
    assert not close(sampled(k3, OLDER), descent(OLDER, REFERENCE / OLDER))


def test_minimax01_is_half_a_squared_distance_and_its_sum_the_forward_kl():
    score, gap = torch.eye(3, dtype=torch.float64) - POLICY, POLICY - REFERENCE
    mean = (POLICY * gap) @ score
    assert close(mean, slope(lambda z: 0.5 * (z.softmax(-1) - REFERENCE).square().sum()))
    assert close(gap @ score, FORWARD) and not close(mean, FORWARD) and not close(mean, REVERSE)


def test_the_gradient_of_grpo_without_a_kl_is_that_of_its_surrogate():
    sequences, table, *_ = study.ragged()
    advantages = torch.linspace(-1, 1, len(sequences.tokens), dtype=torch.float64)
    by_hand = study.equation_21_gradient(table, advantages, beta=0.0)
    assert torch.allclose(by_hand, study.equation_3_gradient(table, advantages, beta=1e-300))
    figures = study.gradient_coefficient_of_grpo().figures
    assert min(figures["sign_flipped"], figures["without_length"]) > 0.1


def test_the_recorded_difference_of_kdrl_has_its_sign():
    finals = recorded("kdrl").finals.groupby("variant")["own_accuracy"].median()
    crude = finals["kdrl_k3"] - finals["kdrl_k2"]
    found = study.kdrl_prefers_k2().figures["trained_k3_minus_k2"]
    assert found == pytest.approx(crude, abs=0.02) and crude < 0
