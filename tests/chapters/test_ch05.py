"""Chapter 5 on small problems, by routes that the chapter does not take."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from analysis.chapters.ch05_fixed_points import (
    coefficients,
    descent,
    fixed_points,
    gradient_noise,
    k1_walk,
    penalties,
    reward_noise,
)
from analysis.evidence.policies import lowered, random_policies
from kl_term.kl.divergences import entropy, reverse_kl
from kl_term.kl.enumeration import expected_gradient, gradient_moments
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.kl.surrogates import ESTIMATORS
from kl_term.kl.term import KLTerm


@pytest.fixture(scope="module")
def problems():
    return fixed_points.random_problems(6, 5, spread=0.5, reward_spread=0.5, seed=3)


def test_a_wrong_closed_form_would_be_seen(problems, monkeypatch):
    k3 = KLTerm(estimator="k3")
    monkeypatch.setitem(fixed_points.OPTIMA, k3, reverse_kl_optimum)
    starts = fixed_points.random_starts(problems, 1, spread=1.0, seed=4)
    table = fixed_points.ends_table(problems, starts, [k3], beta=1.0, steps=800, step_size=0.6)
    assert table.error[0] > 1e-2


@pytest.mark.slow
def test_where_penalties_end_under_each_dynamics():
    ref_logits = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64).log()
    generator = torch.Generator().manual_seed(5)
    starts = ref_logits + torch.randn(40, 5, generator=generator, dtype=torch.float64)
    paths = penalties.penalty_paths(ref_logits, starts, ("k2", "k3", "k3_clip"), frames=60, seed=6)
    rows = penalties.survivors_table(paths, ref_logits).set_index(["estimator", "dynamics"])
    assert rows.one["k3", "plain flow"] == 1.0 > 0.3 > rows.one["k3", "natural flow"]
    assert rows.one["k2"].max() < 0.3
    assert rows.one["k3", "sampled"] > 0.7 > 0.5 > rows.one["k3", "sampled, clipped"]
    assert rows.distance["k3", "natural flow"] < 1e-9
    assert rows.distance["k2"].max() < 0.01
    assert (rows.least["k3_clip"] > 0.5 * math.exp(-9)).all()
    assert rows.least["k3", "plain flow"] < 1e-100


def test_a_batch_without_rare_tokens_stands_still_at_a_truncation():
    """The expected force has length above a tenth; the draws that carry it do not come."""
    ref = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64)
    kept = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    policy = kept * ref / (kept * ref).sum() * (1 - 2e-10) + (1 - kept) * 1e-10
    start = policy.log().expand(30, 5)
    force = expected_gradient(start, ref.log().expand(30, 5), estimator="k3", placement="reward")
    assert (force.norm(dim=-1) > 0.1).all()
    penalty = penalties.centred(ESTIMATORS["k3"])
    settings = {"step_size": 0.1, "steps": 200, "batch_size": 8, "seed": 3}
    still = descent.sampled_descent(start, ref.log().expand(30, 5), penalty, **settings)
    assert (still[-1] - still[0]).abs().max() < 1e-12
    noisy = descent.sampled_descent(start, ref.log().expand(30, 5), ESTIMATORS["k3"], **settings)
    assert (noisy[-1] - noisy[0]).abs().max() > 1e-3


def test_a_leave_one_out_baseline_keeps_the_mean_and_a_clip_keeps_the_length():
    values = torch.tensor([[1.0, 4.0, -2.0]], dtype=torch.float64)
    centred = penalties.centred(lambda logp, ref_logp: logp)(values, values)
    assert centred.tolist() == [[0.0, 4.5, -4.5]]
    start = torch.tensor([[0.0, -3.0]], dtype=torch.float64)
    steep = lambda logp, ref_logp: torch.full_like(logp, 50.0)
    options = {"step_size": 1.0, "steps": 1, "seed": 0, "max_norm": 0.25}
    moved = descent.sampled_descent(start, start, steep, **options)
    contrast = (moved[1] - moved[0])[0]
    assert (contrast[0] - contrast[1]).abs().item() == pytest.approx(0.25 * 2**0.5, abs=1e-5)


def test_sampled_descent_follows_the_expected_gradient():
    one = random_policies(1, 5, spread=1.0, seed=6)
    k2, rows = coefficients.coefficient_of("k2"), (x.expand(20_000, -1) for x in one)
    once = descent.sampled_descent(*rows, k2, step_size=1e-3, steps=1, seed=0)
    moved = (once[1] - once[0]).mean(0) / -1e-3
    mean = gradient_moments(*one, estimator="k2").mean[0]
    centred = moved - moved.mean()
    assert torch.allclose(centred, mean, atol=0.05)
    assert not torch.allclose(-centred, mean, atol=0.3)


def test_batches_only_average():
    logits, ref_logits = random_policies(1, 5, spread=1.0, seed=6)
    begin = reverse_kl(logits, ref_logits).item()
    rows = (logits.expand(40, -1), ref_logits.expand(40, -1))
    for estimator, batch_size in itertools.product(("k2", "k3"), (1, 16)):
        options = {"step_size": 0.02 * batch_size, "steps": 1600 // batch_size, "seed": 1}
        options |= {"batch_size": batch_size, "checkpoints": 4}
        history = descent.sampled_descent(*rows, coefficients.coefficient_of(estimator), **options)
        kls = reverse_kl(history, ref_logits.expand_as(history))
        table = descent.quantiles(kls, 1600).set_index("position")
        assert table.loc[0, "median"] == pytest.approx(begin)
        assert table.loc[1600, "median"] < 0.1 * begin
    with pytest.raises(ValueError, match="checkpoints"):
        descent.sampled_descent(
            *rows, k1_walk.WALKS["k1"], step_size=0.1, steps=5, checkpoints=2, seed=0
        )


def test_entropy_drift_against_samples_and_its_leading_order():
    uniform = torch.zeros(1, 8, dtype=torch.float64)
    drift = k1_walk.entropy_drift(uniform, step_size=0.01).item()
    assert drift == pytest.approx(-(0.01**2) * 7 / 128, rel=0.02)
    skewed = random_policies(1, 8, spread=1.0, seed=9).logits
    rows = skewed.expand(50_000, -1)
    many = descent.sampled_descent(rows, rows, k1_walk.WALKS["k1"], step_size=0.5, steps=1, seed=4)
    change = entropy(many[1]) - entropy(many[0])
    error = change.std() / len(change) ** 0.5
    assert abs(change.mean() - k1_walk.entropy_drift(skewed, step_size=0.5)) < 4 * error


@pytest.mark.parametrize("step_size", [0.1, 1.0, 3.9])
def test_a_k1_step_takes_twins_apart_and_its_flipped_sign_takes_them_together(step_size):
    y, z = random_policies(200, 8, spread=2.0, seed=21)
    z = torch.cat([z, y + 1e-3 * z])
    y = torch.cat([y, y])
    before = (y - z).norm(dim=-1)
    for name, sign in (("k1", 1), ("flipped", -1)):
        coefficient = k1_walk.WALKS[name]

        def stepped(logits: torch.Tensor, token: int, coefficient=coefficient) -> torch.Tensor:
            logp = logits.log_softmax(-1)
            weight = coefficient(logp[:, [token]], logp[:, [token]])
            score = torch.eye(8, dtype=logp.dtype)[token] - logp.exp()
            return logits - step_size * weight * score

        for token in range(8):
            after = (stepped(y, token) - stepped(z, token)).norm(dim=-1)
            assert (sign * (after - before) > 0).all()


def test_twins_with_the_same_random_numbers_can_draw_different_tokens():
    """Old statement: reading the same random numbers, runs of the k1 loss never come closer, and
    those of the flipped sign never part."""
    y, z = random_policies(500, 2, spread=1.0, seed=22)
    starts = (y, y + 0.5 * z)
    for name, sign in (("k1", 1), ("flipped", -1)):
        options = {"step_size": 0.1, "steps": 1, "seed": 23}
        ends = [descent.sampled_descent(x, x, k1_walk.WALKS[name], **options)[-1] for x in starts]
        moves = [
            (end - start.log_softmax(-1))[:, 0] for end, start in zip(ends, starts, strict=True)
        ]
        apart = moves[0] * moves[1] < 0  # one lowers the token that the other raises
        assert 0 < apart.sum() < len(apart) / 2
        before, after = ((one - other).diff(dim=-1).abs()[:, 0] for one, other in (starts, ends))
        grown = sign * (after - before)
        assert (grown[~apart] > -1e-5).all()
        assert (grown[apart] < 0).double().mean() > 0.9


def test_the_last_bit_decides_no_run(monkeypatch):
    walk = partial(
        descent.sampled_descent,
        ref_logits=torch.zeros(40, 8, dtype=torch.float64),
        coefficient=k1_walk.WALKS["k1"],
        step_size=0.1,
        steps=2500,
        seed=5,
    )
    noise = 1e-15 * torch.randn(40, 8, generator=torch.Generator().manual_seed(6)).double()
    assert torch.equal(walk(0 * noise), walk(noise))
    monkeypatch.setattr(descent, "GRID", 2.0**-52)
    parted = (walk(0 * noise)[-1].exp() - walk(noise)[-1].exp()).abs().amax(-1) > 0.1
    assert parted.double().mean() > 0.1


def test_noise_is_equal_where_policies_are():
    table = gradient_noise.noise_map(16, 5)
    assert table.max().max() > 100 and table.min().min() < 0.3
    assert (np.diag(table) == 1).all()


def test_what_one_step_does_to_two_tokens_by_hand():
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    p = 1 / (1 + math.exp(-1.0))
    assert 1 / (1 + math.exp(-(1.0 - 2 * 0.3 * (1 - p)))) < p  # the log-odds fall
    for walk, share in (("k1", 1.0), ("flipped", 0.0)):
        falls = lowered(logits, logits, k1_walk.WALKS[walk], step_size=0.3)
        assert falls.double().mean() == share
    ref = 1 / (1 + math.exp(14.0))  # the variance's trace is 2 p q (c1 q + c2 p)^2
    k2 = math.log(0.7 / ref) * 0.3 + math.log(0.3 / (1 - ref)) * 0.7
    k3 = (1 - ref / 0.7) * 0.3 + (1 - (1 - ref) / 0.3) * 0.7
    found = gradient_noise.k3_noise_against_k2().figures
    assert found["ratio_forbidden"] == pytest.approx((k3 / k2) ** 2, rel=1e-9)
    assert found["language_low"] < 0 < found["language_high"], "a language model: none is seen"
    assert 1 < found["equal_kl_low"] < 1.25 < found["equal_kl_high"], "at equal KL: suggestive"


def test_flipped_signs_change_the_verdicts(monkeypatch):
    with monkeypatch.context() as flipped:
        flipped.setitem(k1_walk.WALKS, "k1", k1_walk.WALKS["flipped"])
        assert k1_walk.k1_loss_walks_at_random().verdict == "fails"
    right = coefficients.coefficient_of
    monkeypatch.setattr(
        reward_noise, "coefficient_of", lambda name: lambda logp, ref: -right(name)(logp, ref)
    )
    assert reward_noise.one_sample_is_unbiased_and_constrains().verdict == "holds"


def test_a_step_of_the_k2_loss_raises_what_the_reference_prefers():
    """Liu et al. print "lowers" where they mean "raises"."""
    assert coefficients.the_sign_of_one_k2_step().figures == {
        "lowered_where_ref_is_larger": 0.0,
        "lowered_where_ref_is_smaller": 1.0,
    }
    policy, reference = 0.2, 0.5
    odds = math.log(policy / (1 - policy)) - 0.1 * math.log(policy / reference)
    assert 1 / (1 + math.exp(-odds)) > policy


def test_the_published_plot_of_coefficients_leaves_the_log_probs():
    """Their axis runs from -3 to 2; log-probs end at 0."""
    found = coefficients.the_published_coefficient_plot().figures
    assert found["share_above_zero"] == pytest.approx(2 / 5, abs=0.01)
    assert found["k3_at_minus_3"] == pytest.approx(1 - math.exp(2.3), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "inverses", "third"),
    [
        ("k2", (-0.8, 2.5), (0.18, 0.22)),
        ("k2", (-2.5, 1.2), (4.1, 4.2)),
        ("k3", (-1.5, 1.2), (5.0, 5.1)),
        ("k3", (-4.0, 2.5), (6.8, 6.9)),
    ],
)
def test_where_the_inverse_slopes_cancel_a_fixed_point_is_no_maximum(name, inverses, third):
    """The degenerate line of thm-penalty-equilibria where it has no cubic, by the potential's own
    values: the integral of the penalty over each probability."""
    cubic = 1 if name == "k2" else 2

    def fixed_point(last):
        """Inverse slopes y give the log-ratios, and the policy that makes both means vanish."""
        y = np.array([*inverses, last])
        means = np.array([np.ones(3), y, y**3 - cubic * y**2])
        return y, np.linalg.solve(means, [1, 0, 0]), 1 / y if name == "k2" else -np.log(1 - 1 / y)

    def excess(last):
        _, policy, l = fixed_point(last)
        return policy @ np.exp(-l) - 1  # the reference sums to one

    y, policy, l = fixed_point(brentq(excess, *third))
    assert policy.min() > 0 and (l < 0).tolist() == [True, False, False]
    reference = policy * np.exp(-l)
    rewards = (
        l**2 / 2 if name == "k2" else np.expm1(-l) + l
    )  # equal to the penalties: a fixed point

    def potential(p):
        log = np.log(p / reference)
        own = p * (log**2 / 2 - log + 1)
        integral = own if name == "k2" else reference * np.log(p) + p * log - 2 * p
        return rewards @ p - integral.sum()

    quartic = policy @ ((3 * y**4 - 2 * y**3) if name == "k2" else (4 * y**4 - 6 * y**3)) / 24
    second = policy @ y**2
    assert quartic * 24 >= (3 * second**2 + second if name == "k2" else 4 * second**2 + 4 * second)
    size = 0.01
    rises = [potential(policy + sign * size * policy * y) - potential(policy) for sign in (-1, 1)]
    assert min(rises) > 0
    assert np.mean(rises) == pytest.approx(quartic * size**4, rel=0.02)


def test_on_the_logits_a_rare_token_may_become_likelier_and_still_vanish_under_k2():
    """Its logit falls all the while, and the mean logit of the others less its own grows."""
    reference, rewards = torch.tensor([0.4, 0.4, 0.2]).double(), torch.tensor([0, 20.0, 0]).double()
    z = torch.tensor([6.0, 0.0, -7.8]).double()
    logits = [z]
    for _ in range(6000):
        policy = z.softmax(-1)
        credit = rewards - (policy / reference).log().square() / 2
        z = z + 0.02 * policy * (credit - policy @ credit)
        logits.append(z)
    path = torch.stack(logits)
    rare = path.log_softmax(-1)[:, 2]
    assert rare.max() - rare[0] > 1 and rare.argmax() > 10
    assert rare[-1] < rare.max() - 1
    assert (path[:, 2].diff() < 0).all()
    assert ((path[:, :2].mean(-1) - path[:, 2]).diff() > 0).all()
    assert path.sum(-1).sub(path[0].sum()).abs().max() < 1e-9
