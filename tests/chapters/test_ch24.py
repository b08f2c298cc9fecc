"""A moving reference and an adaptive coefficient: statements by other routes, and broken once."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from analysis.chapters.ch24_moving_reference import coefficients, references, trained
from analysis.evidence.recorded import recorded_runs
from analysis.records.manifests import RESULTS
from analysis.studies.presets import PRESETS
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.kl.mirror_steps import mirror_step
from kl_term.kl.moving_reference import averaged_coefficient, merged_coefficient
from kl_term.objectives.controllers import doubling_step, proportional_step, steady_horizon
from tests.released import functions_of

SIZES = (3, 5, 12)
BETAS = (0.9, 0.3, 2.0, 0.6)


def problem(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * size + seed)
    rewards, logits = torch.randn(2, size, generator=generator, dtype=torch.float64)
    return rewards, (2.5 * logits).log_softmax(-1)


def bend(values: Tensor, rewards: Tensor) -> float:
    """Above zero where a function of the rewards lies below its chord, at three of them."""
    order = rewards.argsort()
    low, middle, high = order[0], order[len(order) // 2], order[-1]
    share = (rewards[middle] - rewards[low]) / (rewards[high] - rewards[low])
    return float((1 - share) * values[low] + share * values[high] - values[middle])


# Resets and averages.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("divergence", ["forward", "chi_square"])
def test_chains_of_other_divergences_are_no_single_run(size: int, divergence: str) -> None:
    for seed in range(10):
        rewards, reference = problem(size, seed)
        # Chi-square: coefficients at which it gives nothing up.
        betas = BETAS if divergence == "forward" else [2 * beta + 6 for beta in BETAS]
        chain = references.reset_chain(rewards, reference, betas, divergence=divergence)
        sign = -1 if divergence == "forward" else 1
        assert bend((sign * (chain[1] - reference)).exp(), rewards) == pytest.approx(0, abs=1e-10)
        assert bend((sign * (chain[-1] - reference)).exp(), rewards) > 1e-6
        away, _ = references.nearest_single_run(
            chain[-1], rewards, reference, divergence=divergence
        )
        assert away > 1e-8
    straight = references.reset_chain(rewards, reference, BETAS)
    found = references.nearest_single_run(straight[-1], rewards, reference, divergence="reverse")
    assert found[0] < 1e-8
    assert found[1] == pytest.approx(1 / sum(1 / b for b in BETAS), rel=1e-7)


def test_with_two_rewards_every_chain_is_a_single_run() -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    _, reference = problem(4)
    for divergence in references.OPTIMA:
        chain = references.reset_chain(rewards, reference, [2.0] * 3, divergence=divergence)
        away, _ = references.nearest_single_run(
            chain[-1], rewards, reference, divergence=divergence
        )
        assert away < 1e-8


def test_what_chi_square_gives_up_stays_given_up() -> None:
    rewards, reference = problem(7)
    chain = references.reset_chain(rewards, reference, [0.3, 50.0, 50.0], divergence="chi_square")
    gone = chain[1] == -torch.inf
    assert gone.any() and (chain[-1][gone] == -torch.inf).all()


@pytest.mark.parametrize("divergence", references.OPTIMA)
def test_late_a_reset_keeps_the_factor(divergence: str) -> None:
    rewards = torch.tensor([0.0, -0.2, -0.5], dtype=torch.float64)
    beta, reference = 1.0, torch.tensor([1 - 2e-9, 1e-9, 1e-9], dtype=torch.float64).log()
    (_, end) = references.reset_chain(rewards, reference, [beta], divergence=divergence)
    kept = (end - reference - (end - reference)[0]).exp()
    assert torch.allclose(kept, references.late_factor(-rewards, beta)[divergence], atol=1e-7)
    found = references.late_factor(-rewards, beta)
    others = [factor for name, factor in found.items() if name != divergence]
    assert all((kept - other).abs().max() > 0.05 for other in others)


@pytest.mark.parametrize("divergence", references.OPTIMA)
def test_many_resets_at_a_large_coefficient_forget_the_divergence(divergence: str) -> None:
    rewards, reference = problem(5)
    one = reverse_kl_optimum(rewards, reference, beta=0.7).exp()
    apart = []
    for runs in (64, 128, 256):
        chain = references.reset_chain(
            rewards, reference, [0.7 * runs] * runs, divergence=divergence
        )
        apart.append(float((chain[-1].exp() - one).abs().sum()))
    if divergence == "reverse":
        assert max(apart) < 1e-12
    else:
        assert apart[0] / apart[1] == pytest.approx(2, rel=0.1)
        assert apart[1] / apart[2] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("size", SIZES)
def test_the_unread_kl_is_what_the_log_leaves_out(size: int) -> None:
    rewards, reference = problem(size)
    chain = references.reset_chain(rewards, reference, BETAS)
    read = sum(float(reverse_kl(b, a)) for a, b in itertools.pairwise(chain))
    true = float(reverse_kl(chain[-1], reference))
    unread = references.unread_kl(chain, rewards, BETAS)
    assert true - read == pytest.approx(unread, abs=1e-12)
    assert unread > 0
    assert abs(true - read + unread) > 1e-3
    assert abs(references.unread_kl(chain, -rewards, BETAS) - unread) > 1e-3


def test_near_the_reference_the_values_read_add_up_to_one_share_in_k() -> None:
    rewards, reference = problem(5)
    chain = references.reset_chain(rewards, reference, [1e4] * 5)
    read = sum(float(reverse_kl(b, a)) for a, b in itertools.pairwise(chain))
    assert read / float(reverse_kl(chain[-1], reference)) == pytest.approx(1 / 5, rel=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_an_arithmetic_average_is_no_tilt_and_forgets_slowly(size: int) -> None:
    rewards, reference = problem(size)
    options = {"rate": 0.3, "updates": 4}
    straight = references.averaged_run(rewards, reference, 0.5, mean="geometric", **options)
    bent = references.averaged_run(rewards, reference, 0.5, mean="arithmetic", **options)
    assert bend(straight - reference, rewards) == pytest.approx(0, abs=1e-12)
    assert bend(bent - reference, rewards) > 1e-3
    # Undo the last run's tilt: what is left is the reference's own ratio, up to its constant.
    anchor = (bent - rewards / 0.5).log_softmax(-1)
    assert float((anchor - reference).min()) > 4 * math.log(0.7)


def test_the_anchored_flow_is_its_differential_equation() -> None:
    beta, rate, speed, time = 0.3, 0.07, 0.4, 9.0

    def field(_: float, state: np.ndarray) -> list[float]:
        policy, anchor = state
        return [speed * (1 - beta * (policy - anchor)), rate * (policy - anchor)]

    end = solve_ivp(field, (0, time), [0.0, 0.0], rtol=1e-12, atol=1e-13, method="DOP853").y[:, -1]
    found = references.anchored_flow(beta, rate=rate, speed=speed, time=time)
    assert found.anchor == pytest.approx(end[1], rel=1e-9)
    assert found.lead == pytest.approx(end[0] - end[1], rel=1e-9)
    late = references.anchored_flow(beta, rate=rate, speed=speed, time=1e5)
    assert late.anchor / 1e5 == pytest.approx(1 / (beta / rate + 1 / speed), rel=1e-3)
    fixed = references.anchored_flow(beta, rate=0.0, speed=speed, time=1e5)
    assert fixed == (pytest.approx(1 / beta), 0.0)


def test_a_log_of_a_reset_reference_drops_to_zero() -> None:
    path = references.sawtooth(beta=0.2, step_size=0.25, period=10, resets=3)
    assert path["read"][[10, 20, 30]].max() < 1e-15
    assert (path.true.diff().dropna() > 0).all()
    assert (path["read"] <= path.true + 1e-12).all()


# Coefficients that follow the KL.

READ: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse": lambda u: u * u.log(),
    "chi_square": lambda u: (u - 1).square(),
    "jensen_shannon": lambda u: u * u.log() - (1 + u) * ((1 + u) / 2).log(),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("descended", references.OPTIMA)
def test_whatever_is_descended_and_read_the_reading_rises_as_beta_falls(
    descended: str, read: str
) -> None:
    for size in SIZES:
        rewards, reference = problem(size)
        readings = []
        for beta in np.geomspace(30, 0.02, 60):
            ratio = (references.OPTIMA[descended](rewards, reference, beta=beta) - reference).exp()
            values = torch.where(
                ratio > 0, READ[read](ratio.clamp(min=1e-300)), READ[read](ratio + 1e-300)
            )
            readings.append(float(reference.exp() @ values))
        rises = np.diff(readings)
        assert (rises > -1e-12).all()
        assert (rises[:20] > 0).all()


@pytest.mark.parametrize("beta", [0.05, 0.3, 2.0])
def test_the_elasticity_is_a_derivative(beta: float) -> None:
    rewards, reference = problem(7)

    def log_kl(at: float) -> float:
        return math.log(
            float(reverse_kl(reverse_kl_optimum(rewards, reference, beta=at), reference))
        )

    step = 1e-5
    slope = (log_kl(beta * math.exp(-step)) - log_kl(beta * math.exp(step))) / (2 * step)
    assert coefficients.kl_elasticity(rewards, reference, beta) == pytest.approx(slope, rel=1e-6)


def test_the_elasticity_is_two_near_the_reference_and_large_where_a_rare_answer_takes_over() -> (
    None
):
    rewards, reference = problem(7)
    assert coefficients.kl_elasticity(rewards, reference, 1e3) == pytest.approx(2, rel=1e-2)
    rare = torch.tensor([1 - 1e-6, 1e-6], dtype=torch.float64).log()
    worth = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert coefficients.kl_elasticity(worth, rare, 1 / 12) > 10


def test_the_linear_loop_is_the_loop_near_its_target() -> None:
    rewards, reference = problem(7)
    beta, step, horizon = 0.5, 0.3, 12.0
    target = float(reverse_kl(reverse_kl_optimum(rewards, reference, beta=beta), reference))
    elasticity = coefficients.kl_elasticity(rewards, reference, beta)
    matrix = coefficients.linear_loop(elasticity=elasticity, follow=step * beta, horizon=horizon)
    small = 1e-6
    for tilted, changed in ((small, 0.0), (0.0, small)):
        tilt, now = math.exp(tilted) / beta, beta * math.exp(changed)
        kl = float(reverse_kl(coefficients.tilted(rewards, reference, tilt), reference))
        after = tilt + step * (1 - now * tilt)
        then = proportional_step(now, kl, target=target, horizon=horizon)
        found = np.array([math.log(after * beta), math.log(then / beta)]) / small
        assert np.allclose(found, matrix @ (np.array([tilted, changed]) / small), atol=1e-4)


def eigenvalues(horizon: float, **options: float) -> np.ndarray:
    return np.linalg.eigvals(coefficients.linear_loop(horizon=horizon, **options))


def test_the_horizon_decides_on_eigenvalues() -> None:
    for follow in (0.01, 0.2, 0.9):
        for elasticity in (0.4, 2.0, 7.0):
            for part in (0.0, 0.1):
                border = steady_horizon(elasticity=elasticity, follow=follow, proportional=part)
                options = {"elasticity": elasticity, "follow": follow, "proportional": part}
                loop = partial(eigenvalues, **options)
                assert (
                    np.isreal(loop(1.01 * border)).all() and np.iscomplex(loop(0.99 * border)).all()
                )
                edge = elasticity / (1 + part)
                assert abs(loop(1.01 * edge)).max() < 1 < abs(loop(0.99 * edge)).max()


@pytest.mark.parametrize("elasticity", [0.8, 1.5, 2.0, 4.0])
def test_doubling_cycles_from_the_share_of_starts(elasticity: float) -> None:
    starts = np.linspace(0, elasticity * math.log(2), 4001)[:-1]
    cycling = 0
    for start in starts:
        beta = math.exp(-start / elasticity)
        for _ in range(60):
            before, beta = beta, doubling_step(beta, beta**-elasticity, target=1.0)
        cycling += beta != before
    assert cycling / len(starts) == pytest.approx(
        coefficients.doubling_cycles(elasticity), abs=2e-3
    )


def test_the_clip_holds_hubers_location() -> None:
    """Of a skewed law: its mean without a clip, its median with a narrow one."""
    batch = np.array([0.2, 0.3, 0.5, 7.0])
    push = lambda target, clip: float(np.clip(batch / target - 1, -clip, clip).mean())
    assert push(batch.mean(), 1e9) == pytest.approx(0, abs=1e-15)
    assert push(np.median(batch), 1e-3) == pytest.approx(0, abs=1e-15)
    assert push(batch.mean(), 0.2) < -0.05


@pytest.mark.parametrize("tokens", [64, 4096])
def test_k3_loses_sight_of_what_is_given_up(tokens: int) -> None:
    rewards, reference = coefficients.giving_up()
    lost = coefficients.GIVEN_UP
    policy = coefficients.tilted(rewards, reference, 40.0)
    seen = {
        name: read((policy - reference).numpy())[0] for name, read in coefficients.READINGS.items()
    }
    assert seen["k1"] == pytest.approx(-math.log1p(-lost), rel=1e-9)
    assert seen["k3"] == pytest.approx(-lost - math.log1p(-lost), rel=1e-9)
    assert seen["k3"] < 0.6 * lost**2
    target = -0.5 * math.log1p(-lost)
    options = {"tilt": 40.0, "target": target, "tokens": tokens, "batches": 50, "seed": 1}
    assert float(reverse_kl(policy, reference)) > 1.9 * target
    assert coefficients.drift("k3", rewards, reference, **options) == pytest.approx(-0.2)
    assert coefficients.drift("k1", rewards, reference, **options) == pytest.approx(0.2)
    mass = policy.exp().numpy()
    mean = mass @ coefficients.READINGS["k3"]((policy - reference).numpy())
    assert mean == pytest.approx(float(reverse_kl(policy, reference)), rel=1e-9)


def test_a_target_beyond_reach_drives_the_coefficient_down_for_good() -> None:
    rewards, reference = problem(5)
    beyond = -1.1 * float(reference[rewards.argmax()])
    step = lambda beta, kl: proportional_step(beta, kl, target=beyond, horizon=5.0)
    path = coefficients.followed(step, rewards, reference, beta=1.0, step_size=0.5, steps=800)
    assert (path.beta.diff().dropna() < 0).all() and path.beta.iloc[-1] < 1e-4


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("runs", "steps"), [(2, 1), (4, 1), (4, 3), (8, 40)])
def test_resets_and_one_run_may_both_stop_early(share: float, runs: int, steps: int) -> None:
    """Step by step on answers, far from the reference; the tilt is read off the log-ratio."""
    rewards, reference = problem(5, seed=3)
    beta, apart = 0.7, float(rewards[1] - rewards[0])

    def tilt(policy: Tensor) -> float:
        ratio = policy - reference
        return float(ratio[1] - ratio[0]) / apart

    def walked(policy: Tensor, anchor: Tensor, beta: float, count: int) -> Tensor:
        for _ in range(count):
            policy = mirror_step(policy, anchor, rewards, beta=beta, step_size=share / 0.7)
        return policy

    chain = reference
    for _ in range(runs):
        chain = walked(chain, chain, beta, steps)
    one = walked(reference, reference, beta / runs, runs * steps)
    ratio = tilt(chain) / tilt(one)
    assert 1 - 1e-12 <= ratio <= share / -math.expm1(-share) + 1e-12
    x = share
    assert ratio == pytest.approx((1 - (1 - x) ** steps) / (1 - (1 - x / runs) ** (runs * steps)))
    wrong = walked(reference, reference, beta, runs * steps)  # at the coefficient itself
    assert tilt(chain) / tilt(wrong) > 1.05 or steps * share < 0.1


# What was trained.


def test_the_single_runs_of_the_presets_are_those_of_the_theorems() -> None:
    betas = {v.name: v.beta for name in ("resets", "polyak") for v in PRESETS[name]().variants}
    moves = {
        v.name: v.reference
        for name in ("resets", "polyak")
        for v in PRESETS[name]().variants
        if v.reference
    }
    updates = PRESETS["resets"]().config.updates
    periods = updates // moves["reverse_resets"].every
    assert betas["reverse_weak"] == merged_coefficient([betas["reverse_resets"]] * periods)
    half = moves["reverse_half"]
    assert half.every * periods == updates
    expected = averaged_coefficient(betas["reverse_half"], rate=half.weight, updates=periods - 1)
    assert betas["reverse_between"] == pytest.approx(expected, rel=1e-15)
    assert PRESETS["polyak"]().seeds == PRESETS["resets"]().seeds


def test_what_controllers_held_is_read_off_the_tables() -> None:
    path = RESULTS / "adaptive_beta_cpu" / "final.csv"
    rows = [row for row in csv.DictReader(path.open()) if row["variant"] == "reads_k1"]
    finals = recorded_runs("adaptive_beta").finals
    targets = {2.0: 0.02, 0.6: 0.01, 0.2: 0.005}
    for found in trained.held(finals, "reads_k1", targets).itertuples():
        own = [row for row in rows if float(row["beta"]) == found.beta]
        assert len(own) == 20 and found.target == targets[found.beta]
        logs = [math.log(float(row["final_reverse_kl"])) for row in own]
        assert found.ended == pytest.approx(math.exp(sum(logs) / 20), rel=1e-9)


def test_a_log_of_a_run_with_resets_begins_again_at_each() -> None:
    curves = recorded_runs("resets").curves
    read = trained.along(curves, "reverse_resets", "k3")
    true = trained.along(curves, "reverse_resets", "reverse_kl")
    assert (read[[30, 60, 90]] < 1e-12).all() and (true[[30, 60, 90]] > 4e-3).all()
    fixed = trained.along(curves, "reverse_strong", "reverse_kl")
    assert true.loc[:25].equals(fixed.loc[:25])  # before the first reset they are one run


# What released trainers do.


@pytest.mark.peers
@pytest.mark.parametrize(
    ("package", "path"),
    [
        ("verl", "verl/trainer/ppo/core_algos.py"),
        ("openrlhf", "openrlhf/trainer/ppo_utils/kl_controller.py"),
    ],
)
def test_released_controllers_are_the_proportional_step(package: str, path: str) -> None:
    """Their horizon is in answers: ours is theirs over the answers of a batch."""
    (controller,) = functions_of(package, path, "AdaptiveKLController", np=np)
    theirs, ours = controller(0.3, 0.1, 10_000), 0.3
    for kl in (0.05, 0.11, 3.0, -0.4, 0.1):
        theirs.update(kl, n_steps=1024)
        ours = proportional_step(ours, kl, target=0.1, horizon=10_000 / 1024)
        assert theirs.value == pytest.approx(ours, rel=1e-14)


@pytest.mark.peers
def test_trl_gives_the_policy_the_weight_alpha() -> None:
    names = {"TrainerCallback": object, "AcceleratorState": None}
    (callback,) = functions_of("trl", "trl/trainer/callbacks.py", "SyncRefModelCallback", **names)
    policy, reference = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before = reference.weight.detach().clone()
    callback._sync_target_model(policy, reference, 0.6)
    expected = 0.6 * policy.weight + 0.4 * before
    assert torch.allclose(reference.weight, expected, atol=1e-6)
    callback._sync_target_model(policy, reference, 1.0)
    assert torch.allclose(reference.weight, policy.weight)
