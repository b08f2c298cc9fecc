"""Claims about the group's baseline and division: each by a second route, and its contrary."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from analysis.experiments.claims import advantages as claims
from analysis.experiments.claims.recorded import recorded
from analysis.objectives.advantages import group_normalise

RIGHT_WRONG = [0.0, 1.0, 1.0, 0.0]


def trained_by_hand(preset: str, arm: str, other: str, metric: str) -> float:
    """Mean of ten differences between recorded runs of the same seed."""
    rows = recorded(preset).finals
    ends = [rows[rows["arm"] == a].set_index("seed")[metric].to_dict() for a in (arm, other)]
    differences = sorted(ends[0][seed] - ends[1][seed] for seed in ends[0])
    assert len(differences) == 10
    return statistics.fmean(differences)


def test_group_normalisation():
    found = claims.group_normalisation()
    assert found.verdict == "holds if"
    assert found.figures["undefined_groups"] == 2
    values = [0.1, 0.7, 0.4]
    mean, std = statistics.fmean(values), statistics.stdev(values)
    ours = group_normalise(torch.tensor(values, dtype=torch.float64), eps=0.0)
    assert ours.tolist() == pytest.approx([(v - mean) / std for v in values], abs=1e-12)
    assert found.figures["ddof_ratio"] == pytest.approx(math.sqrt(8 / 7))


def test_a_perturbed_normalisation_changes_the_verdict(monkeypatch):
    monkeypatch.setattr(claims, "group_normalise", lambda r, **k: -group_normalise(r, **k))
    assert claims.group_normalisation().verdict == "fails"


def test_baseline_and_scale():
    found = claims.baseline_and_scale()
    assert found.verdict == "holds if"
    # Two answers, p = 0.9, one sample, exact baseline: (1 - 2p)^2 / (1 - p)^2 = 64.
    assert found.figures["variance_ratio_easy"] > 64 > 1 > found.figures["variance_ratio_hard"]
    assert found.figures["normalised_cosine"] < 0.9


def test_the_baseline_costs_variance_above_two_thirds():
    for p in (0.5, 0.6, 0.7, 0.9):
        plain = p * 2 * (1 - p) ** 2 - 2 * p**2 * (1 - p) ** 2
        second = p * (1 - p) ** 2 * 2 * (1 - p) ** 2 + (1 - p) * p**2 * 2 * p**2
        centred = second - 2 * p**2 * (1 - p) ** 2
        assert plain == pytest.approx(2 * p * (1 - p) ** 3)
        assert centred == pytest.approx(2 * p * (1 - p) * (1 - 2 * p) ** 2)
        assert (centred < plain) == (p < 2 / 3)


def test_clip_higher():
    found = claims.clip_higher()
    assert found.verdict == "holds if"
    assert found.figures["gradient_symmetric"] == 0 > found.figures["gradient_higher"]
    assert found.figures["rare_growth_symmetric"] > 1.2  # the clip stops, it does not bound
    assert 0.9 * 1.2 > 1  # a likely token cannot reach either bound
    assert trained_by_hand("clip_higher", "higher", "symmetric", "entropy") == pytest.approx(
        found.figures["higher_entropy"]
    )


def test_dynamic_sampling():
    found = claims.dynamic_sampling()
    assert found.verdict == "holds if"
    mixed = [g for g in itertools.product((0, 1), repeat=8) if 0 < sum(g) < 8]
    kept = sum(0.1 ** sum(g) * 0.9 ** (8 - sum(g)) for g in mixed)
    assert found.figures["kept_at_p10_of_8"] == pytest.approx(kept, abs=1e-12)
    assert found.figures["trained_gain_noisy"] == 0.0  # noise leaves no two rewards equal
    assert found.figures["trained_gain_low"] < 0 < found.figures["trained_gain_high"]


def test_seed_3_calls_undefined_what_its_own_eps_defines():
    equal = torch.full((4,), 0.5, dtype=torch.float64)
    deviation, std = equal - equal.mean(), equal.std()
    assert (deviation / std).isnan().all()
    assert (deviation / (std + 1e-4) == 0).all()


def test_length_price():
    found = claims.length_price()
    assert found.verdict == "holds if"
    lengths = [400, 100, 100, 400]
    for price in (1e-6, 0.1):
        values = [1 - price * n for n in lengths]
        by_hand = (values[0] - statistics.fmean(values)) / statistics.stdev(values)
        assert by_hand == pytest.approx(found.figures["all_right_cheap"], rel=1e-6)
    # A price above 1/300 outweighs right against wrong.
    assert found.figures["long_right_dear"] < 0 < found.figures["long_right_cheap"]
    assert found.figures["trained_length_high"] < 0
    assert trained_by_hand("length_growth", "linear_price", "grpo", "accuracy") == pytest.approx(
        found.figures["trained_accuracy"]
    )


def test_a_price_that_did_not_shorten_would_change_the_verdict(negate):
    negate(claims, "length")
    assert claims.length_price().verdict == "fails"


def test_noise_example():
    found = claims.noise_example()
    assert found.verdict == "holds if"
    assert found.figures["ddof1"] == pytest.approx(math.sqrt(3) / 2, abs=1e-9)
    assert found.figures["ddof0"] == pytest.approx(1.0, abs=1e-9)
    assert found.figures["with_eps"] == pytest.approx(1e-5 / (2e-5 / 3**0.5 + 1e-4), rel=1e-6)


def test_seed_4_divides_by_n_minus_one_in_the_text_and_by_n_in_the_proof():
    rewards = torch.tensor([0.99999, 1.00001] * 2, dtype=torch.float64)
    deviation = rewards - rewards.mean()
    by_proof = deviation / deviation.square().mean().sqrt()
    by_text = deviation / rewards.std()
    assert by_text[1].item() == pytest.approx(0.8660, abs=5e-5)
    assert abs(by_proof[1].item() - 0.8660) > 0.1


def test_clipped_std():
    found = claims.clipped_std()
    assert found.verdict == "holds if"
    assert found.figures["bound_at_min"] == pytest.approx(1 / 0.1)
    assert found.figures["unbounded_at_zero"] > 1e8
    assert trained_by_hand(
        "near_ties", "std_min_noisy", "group_std_noisy", "accuracy"
    ) == pytest.approx(found.figures["trained_gain"])
    assert found.figures["trained_gain_low"] > 0


def test_variance_of_bounded_rewards():
    found = claims.variance_of_bounded_rewards()
    assert found.verdict == "holds"
    for size in range(2, 8):
        grid = itertools.product((0.0, 0.5, 1.0), repeat=size)
        largest = max(statistics.variance(group) for group in grid)
        half = size // 2 * (size - size // 2)
        assert largest == pytest.approx(half / (size * (size - 1)))
        assert largest <= found.figures["sample_max"] < 1
    assert statistics.variance([0.0, 2.0]) > 1  # the range matters


def test_seed_4_bounds_the_variance_with_a_group_that_does_not_exist():
    # Step 2 of the proof lets x = 0 in a group whose mean is 1: any group with a zero is below.
    for size in range(2, 9):
        means = [statistics.fmean([0.0, *rest]) for rest in [[1.0] * (size - 1)]]
        assert max(means) == pytest.approx((size - 1) / size)
        assert max(means) < 1
    # The bound it proves, 1, is four times the one that is attained.
    assert statistics.pvariance(RIGHT_WRONG) == pytest.approx(0.25)


def test_smaller_variance_larger_amplification():
    found = claims.smaller_variance_larger_amplification()
    assert found.verdict == "holds"
    assert found.figures["least_growth"] == pytest.approx(10**0.5, rel=1e-6)
    assert found.figures["least_growth_with_floor"] == pytest.approx(1.0)
