"""What a proxy does to the truth: every statement by another route, and broken once."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest
import torch
from torch import Tensor

from analysis.chapters.ch22_proxy import answers, exploits, worlds
from analysis.evidence.recorded import recorded
from analysis.records import nats
from kl_term.kl.ascent import expected_ascent
from kl_term.kl.divergences import reverse_kl

BETAS = (0.03, 0.1, 0.3, 1.0, 3.0, 30.0)


def draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_world(answers: int, seed: int, *, levels: int = 0) -> worlds.World:
    logits, truth, error = 1.5 * draws(3, answers, seed=seed)
    world = worlds.World(logits.softmax(-1), truth, error)
    if not levels:
        return world
    # Thousandths in binary, so that truth + error is the level to the last digit.
    truth, proxy = ((1024 * x).round() / 1024 for x in (truth, draws(levels, seed=seed + 1)))
    proxy = proxy[torch.arange(answers) % levels]
    return world._replace(truth=truth, error=proxy - truth)


def value(world: worlds.World, divergence: str, beta: float) -> float:
    return float(worlds.optimum(world, divergence, beta) @ world.truth)


@pytest.mark.parametrize("divergence", worlds.OPTIMA)
@pytest.mark.parametrize("answers", [2, 3, 9, 40])
def test_the_slope_is_the_derivative_in_one_over_beta(divergence: str, answers: int) -> None:
    for seed in range(5):
        world = random_world(answers, seed)
        for beta in BETAS:
            inverse, step = 1 / beta, 1e-5 / beta
            up, down = (value(world, divergence, 1 / (inverse + s)) for s in (step, -step))
            slope = worlds.truth_slope(world, divergence, beta)
            assert (up - down) / (2 * step) == pytest.approx(slope, rel=2e-5, abs=1e-8)


@pytest.mark.parametrize("divergence", worlds.OPTIMA)
def test_the_truth_is_that_of_the_calibration_curve(divergence: str) -> None:
    """However the truth varies within a level of the proxy, only its mean counts."""
    for seed in range(5):
        world = random_world(30, seed, levels=6)
        levels, mass, truth = (
            torch.tensor(worlds.calibration(world)[name].to_numpy())
            for name in ("proxy", "mass", "truth")
        )
        assert len(levels) == 6
        merged = worlds.of_calibration(levels, mass, truth)
        for beta in BETAS:
            assert value(world, divergence, beta) == pytest.approx(
                value(merged, divergence, beta), abs=1e-12
            )


@pytest.mark.parametrize("divergence", worlds.OPTIMA)
def test_a_calibration_curve_that_never_falls_never_loses_truth(divergence: str) -> None:
    for seed in range(10):
        world = random_world(12, seed)
        rising = world.truth.sort().values[world.proxy.argsort().argsort()]
        sound = worlds.World(world.reference, rising, world.proxy - rising)
        values = [value(sound, divergence, beta) for beta in sorted(BETAS, reverse=True)]
        assert all(late >= early - 1e-12 for early, late in itertools.pairwise(values))


def test_in_the_end_of_the_reverse_kl_the_two_best_levels_decide() -> None:
    for seed in range(10):
        world = random_world(8, seed)
        levels = torch.arange(8.0, dtype=torch.float64)[world.proxy.argsort().argsort()]
        world = world._replace(error=levels - world.truth)
        best, second = levels.topk(2).indices
        falls = bool(world.truth[second] > world.truth[best])
        assert (worlds.truth_slope(world, "reverse", 0.05) < 0) == falls


def test_in_the_end_of_the_forward_kl_the_whole_reference_decides() -> None:
    disagree = 0
    for seed in range(20):
        world = random_world(8, seed)
        best, second = world.proxy.topk(2).indices
        lost = worlds.late_loss(world)
        assert (worlds.truth_slope(world, "forward", 1e-4) < 0) == (lost > 0)
        ends = value(world, "forward", 1e-5)
        assert float(world.truth[best]) + 1e-5 * lost == pytest.approx(ends, abs=1e-7)
        disagree += (lost > 0) != bool(world.truth[second] > world.truth[best])
    assert disagree > 0


def test_the_late_loss_counts_equal_best_answers_by_their_mean() -> None:
    """With the truth of one of them in place of the mean, it is far off."""
    world = random_world(9, 4, levels=3)
    top = world.proxy == world.proxy.max()
    mean = float((world.reference @ (world.truth * top)) / world.reference[top].sum())
    beta, late = 1e-6, worlds.late_loss(world)
    assert top.sum() == 3
    assert value(world, "forward", beta) == pytest.approx(mean + beta * late, abs=1e-9)
    assert abs(beta * late) > 1e-7
    one = float(world.truth[world.proxy.argmax()])
    assert abs(value(world, "forward", beta) - one) > 0.01


def peaked_world(answers: int, seed: int) -> worlds.World:
    """The truth rises with the proxy to one peak and falls."""
    world = random_world(answers, seed)
    order = world.proxy.argsort()
    values = world.truth.sort().values
    peak = 1 + seed % (answers - 1)
    truth = torch.empty_like(values)
    truth[order] = torch.cat([values[-peak:], values[:-peak].flip(0)])
    return worlds.World(world.reference, truth, world.proxy - truth)


def steps(world: worlds.World, divergence: str) -> Tensor:
    """How the truth changes as the coefficient is lowered."""
    betas = (10 ** torch.linspace(3, -3, 61, dtype=torch.float64)).tolist()
    return torch.tensor([value(world, divergence, beta) for beta in betas]).diff()


def turns(changes: Tensor) -> list[int]:
    signs = [int(step.sign()) for step in changes if abs(step) > 1e-12]
    return [sign for sign, _ in itertools.groupby(signs)]


@pytest.mark.parametrize("divergence", worlds.OPTIMA)
def test_one_peak_in_the_curve_is_at_most_one_in_the_truth(divergence: str) -> None:
    shapes = {tuple(turns(steps(peaked_world(7, seed), divergence))) for seed in range(25)}
    assert (1, -1) in shapes
    assert shapes <= {(1,), (-1,), (1, -1)}
    wild = {tuple(turns(steps(random_world(7, seed), divergence))) for seed in range(25)}
    assert not wild <= shapes


@pytest.mark.parametrize("divergence", worlds.OPTIMA)
def test_clipped_where_the_mean_above_is_highest_no_truth_is_lost(divergence: str) -> None:
    lost_at_the_peak = 0
    for seed in range(25):
        world = peaked_world(7, seed)
        level = worlds.clip_level(world)
        best = max(
            float((world.reference * world.truth)[kept].sum() / world.reference[kept].sum())
            for kept in (world.proxy >= c for c in world.proxy)
        )
        sound = worlds.clipped(world, level)
        assert (steps(sound, divergence) > -1e-12).all()
        assert value(sound, divergence, 1e-6) == pytest.approx(best, abs=1e-4)
        peak = worlds.clipped(world, float(world.proxy[world.truth.argmax()]))
        lost_at_the_peak += bool((steps(peak, divergence) < -1e-3).any())
    assert lost_at_the_peak > 3


@pytest.mark.parametrize("divergence", worlds.OPTIMA)
def test_a_verifier_that_errs_costs_no_truth_and_a_bonus_on_top_may(divergence: str) -> None:
    right = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    accepted = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.1, 0.2, 0.1, 0.1], dtype=torch.float64)
    world = worlds.World(reference, right, accepted - right)
    assert (steps(world, divergence) > -1e-12).all()
    bonus = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert (steps(world._replace(error=world.error + bonus), divergence) < -1e-3).any()


def plain_flow(world: worlds.World, beta: float, time: float, step: float = 0.01) -> list[Tensor]:
    """Ascent on the logits of the proxy less beta times the reverse KL, from the reference."""
    reference = world.reference.log()
    logits, found = reference, []
    for _ in range(round(time / step)):
        policy = logits.softmax(-1)
        credit = world.proxy - beta * (policy.log() - reference)
        found.append(policy)
        logits = logits + step * policy * (credit - policy @ credit)
    return found


def test_a_plain_flow_may_lose_truth_on_its_way_that_no_optimum_loses() -> None:
    """Two answers of one score: the frequent one is wrong, and runs ahead of the right one."""
    world = worlds.World(
        reference=torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64),
        truth=torch.tensor([0.0, 1.0, 0.28], dtype=torch.float64),
        error=torch.tensor([1.0, 0.0, -0.28], dtype=torch.float64),
    )
    curve = worlds.calibration(world)
    assert curve.truth.is_monotonic_increasing
    start = float(world.reference @ world.truth)
    for divergence in worlds.OPTIMA:
        assert all(value(world, divergence, beta) >= start - 1e-12 for beta in BETAS)
    on_the_way = [float(policy @ world.truth) for policy in plain_flow(world, 0.0, 20.0)]
    assert min(on_the_way) < start - 0.02


# --- Errors that are independent of the truth ---------------------------------------------------


def independent_world(seed: int, *, truths: int = 4, errors: int = 5) -> worlds.World:
    t, e = draws(2, max(truths, errors), seed=seed)
    p, q = (1.5 * draws(2, max(truths, errors), seed=seed + 100)).exp()
    p, q = p[:truths], q[:errors]
    return worlds.independent(t[:truths], p / p.sum(), 3 * e[:errors] ** 3, q / q.sum())


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_independent_errors_never_lose_truth_under_either_kl(divergence: str) -> None:
    for seed in range(20):
        world = independent_world(seed)
        for beta in BETAS:
            assert worlds.truth_slope(world, divergence, beta) >= -1e-13


def test_under_the_reverse_kl_truth_and_error_stay_independent() -> None:
    """So the truth is tilted as if there were no error, and the KL is a sum of two."""
    world = independent_world(3)
    for beta in BETAS:
        joint = worlds.optimum(world, "reverse", beta).view(4, 5)
        assert torch.allclose(
            joint, torch.outer(joint.sum(1), joint.sum(0)), rtol=1e-12, atol=1e-15
        )
        reference = world.reference.view(4, 5)
        kl, *parts = (
            float(reverse_kl(p.log(), q.log()))
            for p, q in (
                (joint.flatten(), reference.flatten()),
                (joint.sum(1), reference.sum(1)),
                (joint.sum(0), reference.sum(0)),
            )
        )
        assert kl == pytest.approx(sum(parts), rel=1e-12)


def test_under_the_forward_kl_they_are_drawn_together_and_under_chi_square_apart() -> None:
    def covariance(world: worlds.World, divergence: str, beta: float) -> float:
        weights = worlds.marginal_weights(world, divergence, beta)
        weights = weights / weights.sum()
        return float(weights @ ((world.truth - weights @ world.truth) * world.error))

    apart = 0
    for seed in range(15):
        world = independent_world(seed)
        for beta in BETAS:
            assert covariance(world, "forward", beta) > 0
            assert abs(covariance(world, "reverse", beta)) < 1e-12
            apart += covariance(world, "chi_square", beta) < -1e-9
    assert apart > 10


def test_chi_square_loses_truth_to_an_independent_error() -> None:
    """Truth 0 or 1, error 0 or 4: what is cut off first are the wrong answers without error."""
    two = torch.tensor([0.0, 1.0], dtype=torch.float64)
    world = worlds.independent(
        two, torch.tensor([0.5, 0.5]).double(), 4 * two, torch.tensor([0.9, 0.1]).double()
    )
    slopes = {
        divergence: min(
            worlds.truth_slope(world, divergence, 10**x) for x in torch.linspace(-2, 2, 81).tolist()
        )
        for divergence in worlds.OPTIMA
    }
    assert slopes["chi_square"] < -0.05
    assert min(slopes["reverse"], slopes["forward"]) > -1e-13


# --- The price of one answer ---------------------------------------------------------------------


def divergences(policy: Tensor, reference: Tensor) -> dict[str, float]:
    log_ratio = (policy / reference).log()
    return {
        "reverse": float((policy * log_ratio).sum()),
        "forward": float(-(reference * log_ratio).sum()),
        "chi_square": float(((policy - reference) ** 2 / reference).sum() / 2),
    }


def test_the_price_is_the_least_over_all_policies_with_that_share() -> None:
    for seed in range(20):
        reference, other = (1.5 * draws(2, 7, seed=seed)).softmax(-1)
        share, p = other[0], reference[0]
        cheapest = torch.cat([share[None], (1 - share) * reference[1:] / (1 - p)])
        least, more = divergences(cheapest, reference), divergences(other, reference)
        for name, found in exploits.price(share, p).items():
            assert least[name] == pytest.approx(float(found), rel=1e-9, abs=1e-12)
            assert more[name] >= float(found) - 1e-12
    apart = exploits.price(torch.tensor(0.5).double(), torch.tensor(0.01).double())
    exchanged = exploits.price(torch.tensor(0.01).double(), torch.tensor(0.5).double())
    assert apart["reverse"] == exchanged["forward"] and apart["reverse"] > 2 * apart["forward"]


@pytest.mark.parametrize("p", [0.2, 1e-2, 1e-4])
@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.7, 5.0, 40.0])
def test_the_share_of_an_exploit_has_its_closed_form(p: float, ratio: float) -> None:
    beta = 0.4
    gain = ratio * beta
    found = exploits.exploit_share(gain, p, beta)
    tilt = p * math.exp(ratio)
    assert found["reverse"] == pytest.approx(tilt / (1 - p + tilt), rel=1e-12)
    assert found["chi_square"] == pytest.approx(min(1.0, p + p * (1 - p) * ratio), rel=1e-12)
    # Forward: the larger root of share (beta - gain) ... as a quadratic in the multiplier.
    half = 0.5 * (gain + beta)
    multiplier = half + math.sqrt(half**2 - beta * gain * (1 - p))
    assert found["forward"] == pytest.approx(beta * p / (multiplier - gain), rel=1e-9)


def test_under_the_forward_kl_an_exploit_is_no_safer_for_being_rare() -> None:
    for ratio in (1.5, 3.0, 10.0):
        for p in (1e-6, 1e-9):
            found = exploits.exploit_share(ratio * 0.2, p, 0.2)
            assert found["forward"] == pytest.approx(1 - 1 / ratio, abs=2e-3 * p**0.25 + 5e-6)
            assert found["chi_square"] < 2e-5
            assert found["reverse"] < 0.03


def test_an_exploit_has_less_than_its_share_before_the_optimum_is_reached() -> None:
    """On its way the share depends on time too."""
    p, gain, beta = 1e-3, 1.0, 0.5
    world = worlds.World(
        reference=torch.tensor([1 - p, p], dtype=torch.float64),
        truth=torch.zeros(2, dtype=torch.float64),
        error=torch.tensor([0.0, gain], dtype=torch.float64),
    )
    share = exploits.exploit_share(gain, p, beta)["reverse"]
    early = plain_flow(world, beta, 5.0)[-1][1]
    assert share == pytest.approx(float(worlds.optimum(world, "reverse", beta)[1]), rel=1e-12)
    assert early < 0.5 * share


def test_the_closed_shares_are_those_of_two_levels_only() -> None:
    """A third answer that scores nearly as high takes most of what the formula promises."""
    p, gain, beta = 1e-2, 2.0, 0.2
    world = worlds.World(
        reference=torch.tensor([0.5, 0.49, p], dtype=torch.float64),
        truth=torch.zeros(3, dtype=torch.float64),
        error=torch.tensor([0.0, 1.9, gain], dtype=torch.float64),
    )
    promised = exploits.exploit_share(gain, p, beta)
    for divergence in ("reverse", "chi_square"):
        found = float(worlds.optimum(world, divergence, beta)[2])
        assert found < 0.6 * promised[divergence]


def test_half_of_all_probability_is_the_exploits_at_these_gains() -> None:
    for p in (0.4, 0.1, 1e-3, 1e-6):
        for name, gain in exploits.half_share_gain(p, 0.3).items():
            assert exploits.exploit_share(gain, p, 0.3)[name] == pytest.approx(0.5, abs=1e-9)
    gains = exploits.half_share_gain(1e-6, 0.3)
    assert gains["forward"] == pytest.approx(0.6, rel=1e-5)
    assert gains["chi_square"] > 1e4 * gains["reverse"] > 1e4 * gains["forward"]


def test_the_forward_kl_gives_the_best_answer_its_share_whatever_the_others() -> None:
    below = {"reverse": 0, "chi_square": 0}
    for seed in range(30):
        world = random_world(12, seed)
        best, second = world.proxy.topk(2).values
        top = world.proxy.argmax()
        p, gain = float(world.reference[top]), float(best - second)
        for beta in (0.2 * gain, 0.7 * gain, 2 * gain):
            floor = 1 - beta * (1 - p) / gain
            share = {name: float(worlds.optimum(world, name, beta)[top]) for name in worlds.OPTIMA}
            assert share["forward"] > floor
            for name in below:
                below[name] += share[name] < floor
    assert min(below.values()) > 0


def test_the_forward_kl_does_not_charge_for_what_the_reference_never_gives() -> None:
    """So its optimum over all policies is not that over the reference's answers."""
    reference = torch.tensor([0.7, 0.3], dtype=torch.float64)
    beta, gain = 0.2, 0.6

    def net(share: float) -> float:
        others = (1 - share) * reference
        return share * gain - beta * float((reference * (reference / others).log()).sum())

    best = max((x / 1000 for x in range(1000)), key=net)
    assert best == pytest.approx(1 - beta / gain, abs=2e-3)
    assert net(best) > net(0.0) + 0.1


# --- Recorded runs -------------------------------------------------------------------------------


def test_against_none_is_the_mean_of_the_differences_of_the_seeds() -> None:
    found = answers.against_none()
    assert set(found) == set(answers.REWARD_IS_THE_TRUTH)
    for key, (preset, variant, beta) in answers.REWARD_IS_THE_TRUTH.items():
        finals = recorded(preset).finals.set_index("seed")
        term = finals[(finals["variant"] == variant) & (finals["beta"] == beta)]["accuracy"]
        none = finals[finals["variant"] == "none"]["accuracy"]
        assert found[key]["mean"] == pytest.approx((term - none).mean(), abs=1e-12)


def test_readings_are_the_reference_the_first_at_each_level_and_the_last() -> None:
    path = pd.DataFrame(
        {"update": [0, 2, 4, 6, 8], "reverse_kl": [0.0, 0.01, 0.04, 0.5, 0.6], "letters": 4.0}
    )
    assert answers.shown_readings(path) == [0, 4, 6, 8]
    assert answers.shown_readings(path, levels=[5.0]) == [0, 8]
    said = pd.DataFrame(
        [(u, q, f"{q}{u}") for u in path["update"] for q in "ab"],
        columns=["update", "question", "answer"],
    )
    table = answers.beside_the_reference(nats.Nats(path, said), [1])
    assert table["answer"].tolist() == ["b0", "b4", "b6", "b8"]
    assert table["kl"].tolist() == [0.0, 0.04, 0.5, 0.6]
    shown = answers.as_lines(table.assign(answer="a | *b* " * 20)).split("\n")
    assert len(shown) == 6 and shown[2].startswith("| b | 0.00 | a \\| \\*b\\* a")
    assert shown[3].startswith("|  | 0.04 | ") and shown[3].count("\\*b\\*") == 20


# --- Closed forms --------------------------------------------------------------------------------


def test_a_normal_proxy_with_a_bent_calibration_gives_the_square_root_form() -> None:
    grid = torch.linspace(-14, 14, 5601, dtype=torch.float64)
    slope, bend, scale = 0.7, 0.11, 1.3
    truth = slope * grid - bend * grid.square()
    world = worlds.of_calibration(grid, worlds.normal_mass(grid, scale), truth)
    start = world.reference @ world.truth
    curve = worlds.truth_curve(world, "reverse", [0.5, 1.0, 2.0, 8.0])
    expected = exploits.square_root_form(
        torch.tensor(curve["kl"].to_numpy()), slope=slope, bend=bend, scale=scale
    )
    assert torch.allclose(torch.tensor(curve["truth"].to_numpy()) - start, expected, atol=1e-10)
    flipped = exploits.square_root_form(
        torch.tensor(curve["kl"].to_numpy()), slope=slope, bend=-bend, scale=scale
    )
    assert not torch.allclose(torch.tensor(curve["truth"].to_numpy()) - start, flipped, atol=1e-2)


def test_the_square_root_form_peaks_there_and_needs_a_proxy_of_mean_zero() -> None:
    slope, bend, scale, mean = 0.7, 0.11, 1.3, 0.8
    peak = exploits.square_root_peak(slope=slope, bend=bend, scale=scale)
    around = torch.tensor([0.99 * peak, peak, 1.01 * peak], dtype=torch.float64)
    gains = exploits.square_root_form(around, slope=slope, bend=bend, scale=scale)
    assert gains.argmax() == 1
    assert scale * math.sqrt(2 * peak) == pytest.approx(slope / (2 * bend), rel=1e-12)
    grid = torch.linspace(-14, 14, 5601, dtype=torch.float64)
    levels = grid + mean
    truth = slope * levels - bend * levels.square()
    world = worlds.of_calibration(levels, worlds.normal_mass(grid, scale), truth)
    curve = worlds.truth_curve(world, "reverse", [1.0, 4.0])
    gained = torch.tensor(curve["truth"].to_numpy()) - world.reference @ world.truth
    kl = torch.tensor(curve["kl"].to_numpy())
    shifted = exploits.square_root_form(kl, slope=slope - 2 * bend * mean, bend=bend, scale=scale)
    assert torch.allclose(gained, shifted, atol=1e-10)
    naive = exploits.square_root_form(kl, slope=slope, bend=bend, scale=scale)
    assert not torch.allclose(gained, naive, atol=1e-2)


def test_with_a_term_the_natural_flow_walks_the_same_curve_more_slowly() -> None:
    world, beta, time, count = random_world(6, 2), 0.7, 2.0, 10000
    reference = world.reference.log()
    logits = reference
    for _ in range(count):
        logits = logits + time / count * (world.proxy - beta * (logits - reference))
    slowed = beta / (1 - math.exp(-beta * time))
    there = worlds.optimum(world, "reverse", slowed)
    assert (logits.softmax(-1) - there).abs().max() < 1e-4
    assert slowed > 1 / time


def test_the_plain_flow_parts_answers_of_one_proxy_which_no_optimum_does() -> None:
    reference = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64)
    proxy = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    logits = reference.log()
    for _ in range(200):
        policy = logits.softmax(-1)
        logits = logits + 1e-2 * policy * (proxy - policy @ proxy)
    policy = logits.softmax(-1)
    world = worlds.World(reference, proxy, torch.zeros(3, dtype=torch.float64))
    assert policy[0] / policy[1] > 6.5
    for divergence in worlds.OPTIMA:
        end = worlds.optimum(world, divergence, 0.5)
        assert end[0] / end[1] == pytest.approx(6.0, rel=1e-12)


def test_the_natural_flow_without_a_term_walks_the_optima_of_the_reverse_kl() -> None:
    world = random_world(6, 2)
    steps, time = 400, 2.0
    ends = {}
    for geometry in ("natural", "plain"):
        logits, step = world.reference.log(), time / steps
        for _ in range(steps):
            policy = logits.softmax(-1)
            advantage = world.proxy - policy @ world.proxy
            logits = logits + step * (advantage if geometry == "natural" else policy * advantage)
        ends[geometry] = logits.softmax(-1)
    tilted = worlds.optimum(world, "reverse", 1 / time)
    assert (ends["natural"] - tilted).abs().max() < 1e-12
    kls = [float(reverse_kl(p.log(), world.reference.log())) for p in ends.values()]
    assert abs(kls[0] - kls[1]) > 0.05
    assert (ends["plain"] - tilted).abs().max() > 0.05


def test_the_bound_of_chi_square_holds_and_is_reached_and_no_kl_has_one() -> None:
    for seed in range(20):
        world = random_world(10, seed)
        other = draws(10, seed=seed + 50).softmax(-1)
        gain = float((other - world.reference) @ world.proxy)
        assert gain <= exploits.gain_bound(world, other) + 1e-12
    centred = world.proxy - world.reference @ world.proxy
    linear = world.reference * (1 + 0.05 * centred)
    reached = float((linear - world.reference) @ world.proxy)
    assert reached == pytest.approx(exploits.gain_bound(world, linear), rel=1e-12)
    gains = []
    for cut in (10.0, 1e3, 1e5):  # a power tail of finite variance, cut ever farther out
        errors = torch.cat([torch.zeros(1), torch.logspace(0, math.log10(cut), 200)]).double()
        mass = torch.cat([torch.ones(1), errors[1:] ** -2.5 * 0.01])
        world = worlds.independent(
            torch.tensor([0.0, 1.0]).double(), torch.tensor([0.5, 0.5]).double(),
            errors, (mass / mass.sum()).double(),
        )  # fmt: skip
        share = cut**-0.5
        policy = exploits.lottery(world, share)
        kl = float(reverse_kl(policy.log(), world.reference.log()))
        gains.append((float((policy - world.reference) @ world.proxy), kl))
        assert gains[-1][0] == pytest.approx(
            share * float(world.proxy.max() - world.reference @ world.proxy), rel=1e-9
        )
    assert gains[0][0] < gains[1][0] < gains[2][0] and gains[0][1] > gains[1][1] > gains[2][1]


def test_exact_ascent_ends_where_the_closed_forms_say() -> None:
    world = random_world(5, 7)
    start = world.reference.log()
    for divergence, estimator in (("reverse", "k2"), ("forward", "k3")):
        end = expected_ascent(start, world.proxy, start, estimator=estimator, beta=0.6, steps=600)
        assert (end.exp() - worlds.optimum(world, divergence, 0.6)).abs().max() < 1e-8
