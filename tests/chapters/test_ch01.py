"""Chapter 1's tables against scipy, brute force, and the limits they must reach."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from analysis.chapters import ch01_estimators as study
from analysis.evidence.gaussian_pairs import SCHULMAN_FAR, GaussianPair, log_probs, normal_nodes
from kl_term.kl.sequences import enumerate_sequences, sequence_kl, sequence_probability, token_logp
from kl_term.kl.surrogates import ESTIMATORS
from tests.trees import draw

V = 40


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    return study.zipf_logits(V, 1.2)


@pytest.fixture(scope="module")
def direction() -> torch.Tensor:
    return study.normal_draws((V,), seed=3)


def test_log_probs_are_those_of_scipy():
    z = torch.linspace(-3, 3, 31, dtype=torch.float64)
    logp, ref_logp = log_probs(GaussianPair(0.4, 1.7, -0.8, 0.6), z)
    x = 0.4 + 1.7 * z.numpy()
    assert np.abs(logp.numpy() - stats.norm(0.4, 1.7).logpdf(x)).max() < 1e-12
    assert np.abs(ref_logp.numpy() - stats.norm(-0.8, 0.6).logpdf(x)).max() < 1e-12


def test_quadrature_nodes_have_the_moments_of_a_standard_normal():
    z, weights = normal_nodes()
    for power, moment in ((0, 1), (1, 0), (2, 1), (4, 3), (6, 15)):
        assert (weights * z**power).sum().item() == pytest.approx(moment, abs=1e-9)


def test_survival_and_quantiles_of_a_loaded_die():
    die, weights = {"die": torch.tensor([3.0, -1.0, 2.0])}, torch.tensor([0.2, 0.5, 0.3]).double()
    thresholds = torch.tensor([-2.0, -1.0, 0.0, 2.0, 2.5, 3.0])
    exceed = study.tail_curves(die, weights, 1.0, thresholds)["die"]
    assert exceed.to_list() == pytest.approx([1.0, 0.5, 0.5, 0.2, 0.2, 0.0])
    row = study.quantile_table(die, weights, 1.0, (0.4, 0.6, 0.9, 1.0)).loc["die"]
    assert row.to_list() == pytest.approx([-1, 2, 3, 3, 0.5])


def test_gaussian_tail_of_k1_is_the_normal_tail():
    nodes, weights = normal_nodes()
    estimates = study.estimates(*log_probs(SCHULMAN_FAR, nodes))
    thresholds = torch.tensor([1.0, 2.0, 12.0], dtype=torch.float64)
    curve = study.tail_curves(estimates, weights, SCHULMAN_FAR.kl, thresholds)
    expected = stats.norm.sf(thresholds.numpy() / 2 - 0.5)  # k1 = 1/2 - z, in units of KL = 1/2
    assert np.abs(curve["k1"].to_numpy() - expected).max() < 3e-4
    assert curve["k3"].iloc[-1] > 10 * curve["k1"].iloc[-1]


def test_drift_starts_near_the_reference_and_crosses_where_the_deviations_meet(
    reference, direction
):
    steps = torch.cat([torch.tensor([0.01]).double(), torch.linspace(0.05, 4, 400).double()])
    table = study.drift_table(reference, direction, steps)
    wide = table.pivot(index="kl", columns="estimator", values="std")
    crossing = study.crossing_kl(reference, direction, farthest=4.0)
    assert ((wide.k3 < wide.k1) == (wide.index < crossing)).all()
    assert wide.k1.iloc[0] == pytest.approx(math.sqrt(2 / wide.index[0]), rel=0.02)
    bias = table.pivot(index="kl", columns="estimator", values="bias")
    assert bias.iloc[-1][["k1", "k3"]].abs().max() < 1e-12 < abs(bias.k2.iloc[-1])
    with pytest.raises(ValueError, match="different signs"):
        study.crossing_kl(reference, direction, farthest=0.05)


def ragged_pair(vocab, longest, *, scale, seed=0):
    """A policy, and a reference ``scale`` away, with every answer of up to ``longest`` tokens."""
    tree = enumerate_sequences(vocab, longest, eos=vocab - 1)
    policy, move = (draw(tree.num_states, vocab, seed=2 * seed + i) for i in (0, 1))
    return policy, policy + scale * move, tree


def both_logs(policy, reference, tree, average):
    return [study.logged_mean(policy, reference, tree, k, average=average) for k in ("k1", "k3")]


@pytest.mark.parametrize(("vocab", "longest"), [(2, 7), (3, 4), (5, 3)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_gap_between_two_logs_is_what_the_reference_expects_of_the_length(
    vocab, longest, scale
):
    policy, reference, tree = ragged_pair(vocab, longest, scale=scale)
    of_k1, of_k3 = both_logs(policy, reference, tree, "completions")
    gap = study.logged_gap(policy, reference, tree)
    assert of_k3 - of_k1 == pytest.approx(gap, abs=1e-12)
    assert abs(of_k1 - of_k3 - gap) > 1e-3  # the other sign
    length = sequence_probability(policy, tree) @ tree.mask.sum(-1).double()
    per_token = (sequence_kl(policy, reference, tree) / length).item()
    assert both_logs(policy, reference, tree, "tokens") == pytest.approx([per_token] * 2, abs=1e-12)
    assert abs(of_k1 / per_token - 1) > 0.01 < abs(of_k3 / per_token - 1)


def test_the_gap_runs_over_the_tokens_that_the_policy_allows():
    policy, reference, tree = ragged_pair(3, 4, scale=1.0)
    forbids = policy.clone()
    forbids[0, 1] = forbids[2, 0] = -torch.inf
    of_k1, of_k3 = both_logs(forbids, reference, tree, "completions")
    gap = study.logged_gap(forbids, reference, tree)
    assert of_k3 - of_k1 == pytest.approx(gap, abs=1e-12)
    assert abs(gap - study.logged_gap(policy, reference, tree)) > 1e-3


def test_no_gap_where_every_answer_has_one_length():
    tree = enumerate_sequences(3, 3)
    policy, reference = (draw(tree.num_states, 3, seed=seed) for seed in (0, 1))
    assert study.logged_gap(policy, reference, tree) == pytest.approx(0, abs=1e-12)
    logs = [both_logs(policy, reference, tree, average) for average in ("tokens", "completions")]
    assert np.ptp(logs) < 1e-12


def test_near_the_reference_the_log_of_k1_is_first_order_and_that_of_k3_second():
    """By halving the distance; the first order is the difference of the mean of 1/|o|."""
    rest = {}
    for scale in (2e-3, 1e-3):
        policy, reference, tree = ragged_pair(3, 4, scale=scale)
        of_k1, of_k3 = both_logs(policy, reference, tree, "completions")
        inverse = 1 / tree.mask.sum(-1).double()
        own, other = (sequence_probability(x, tree) @ inverse for x in (policy, reference))
        rest[scale] = of_k3, of_k1 - (own - other).item(), of_k1
    for i, order in ((0, 4), (1, 4), (2, 2)):
        assert rest[2e-3][i] / rest[1e-3][i] == pytest.approx(order, rel=0.02)


def test_the_mean_over_the_tokens_of_one_batch_is_biased_and_that_of_a_large_one_hardly():
    """Four answers, and eight: every batch by its probability; the bias falls as one over them."""
    policy, reference, tree = ragged_pair(2, 3, scale=1.0)
    chance, length = sequence_probability(policy, tree), tree.mask.sum(-1).double()
    k1 = (token_logp(policy, tree) - token_logp(reference, tree)).sum(-1)
    exact = ((chance @ k1) / (chance @ length)).item()
    bias = {}
    for answers in (4, 8):
        axes = torch.cartesian_prod(*[torch.arange(len(chance))] * answers)
        log = k1[axes].sum(-1) / length[axes].sum(-1)
        bias[answers] = (chance[axes].prod(-1) @ log).item() - exact
    assert abs(bias[8]) > 1e-3 * exact
    assert bias[4] / bias[8] == pytest.approx(2, rel=0.2)


def test_answers_twice_as_long_by_their_series():
    """Geometric lengths without a longest one, for which E[1/n] is end log(1/end) / (1 - end)."""
    end, ref_end = 0.05, 0.10
    table = study.logged_table(end, ref_end, 500).set_index("average")
    inverse = -end * math.log(end) / (1 - end)
    for name, go_on, stop in (
        ("k1", math.log((1 - end) / (1 - ref_end)), math.log(end / ref_end)),
        ("k3", None, None),
    ):
        if name == "k3":
            go_on, stop = ((b / a - 1 - math.log(b / a)) for a, b in ((0.95, 0.9), (0.05, 0.1)))
        found = table[name]
        assert found["completions"] == pytest.approx(go_on * (1 - inverse) + stop * inverse)
        assert found["tokens"] == pytest.approx(go_on * (1 - end) + stop * end, abs=1e-9)
    assert table.k1["completions"] < 0 < table.per_token["tokens"] < table.k3["completions"]


def test_claims_count_what_numpy_counts():
    """The shares behind the value claims, from log-probs alone."""
    policy, reference = (study.FAR.logits.softmax(-1), study.FAR.ref_logits.softmax(-1))
    p, q = policy.numpy(), reference.numpy()
    samples = {"k1": np.log(p / q), "k2": np.log(p / q) ** 2 / 2, "k3": q / p - 1 + np.log(p / q)}
    mean = {k: (p * s).sum(-1, keepdims=True) for k, s in samples.items()}
    variance = {k: (p * (s - mean[k]) ** 2).sum(-1) for k, s in samples.items()}
    wins = (variance["k3"] < variance["k1"]).mean()
    assert 0.1 < wins < 0.8
    assert study.k3_is_unbiased_with_low_variance().figures["wins_far"] == wins
    quieter = (variance["k2"] < variance["k1"]).mean()
    assert study.k2_is_biased_with_low_variance().figures["quieter_far"] == quieter
    spread = np.median(np.sqrt(variance["k3"]) / mean["k1"][:, 0])
    found = study.k3_equals_the_divergence().figures["relative_std"]
    assert found == pytest.approx(spread, rel=0.02)  # torch's median is the lower one of two


def test_the_chain_of_means_and_the_sign_of_the_control_variate():
    """E[r - 1] is zero, not one; r - 1 rises with log r and falls with k1 = -log r."""
    p, q = study.FAR.logits.softmax(-1).numpy(), study.FAR.ref_logits.softmax(-1).numpy()
    assert (p * (q / p)).sum(-1) == pytest.approx(1.0)
    assert study.the_printed_chain_of_means().verdict == "fails"
    covariance = (p * (q / p - 1) * np.log(q / p)).sum(-1)
    found = study.the_control_variate().figures["smallest_covariance"]
    assert found == pytest.approx(covariance.min(), rel=1e-9) and covariance.min() > 0


def test_exchanged_policies_overturn_the_verdicts(monkeypatch):
    for name, estimator in list(ESTIMATORS.items()):
        monkeypatch.setitem(ESTIMATORS, name, lambda logp, ref_logp, e=estimator: e(ref_logp, logp))
    for decide in (
        study.k3_is_unbiased_and_positive,
        study.k1_is_unbiased_with_high_variance,
        study.k3_is_unbiased_with_low_variance,
    ):
        assert decide().verdict == "fails"
