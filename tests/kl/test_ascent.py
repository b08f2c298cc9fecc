"""Penalties in the reward: where the natural and the plain flow end, how fast, and why."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.kl.ascent import expected_ascent, token_advantage
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import expected_gradient
from kl_term.kl.estimators import k3, k3_clip
from kl_term.kl.fixed_points import penalty_equilibrium

from .conftest import random_logits

#: The reference, and the survivors, of the statement that stood until November 2026.
REF = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64)
KEPT = torch.tensor([True, True, True, False, False])


def truncated(outside: float) -> torch.Tensor:
    """REF renormalised on KEPT, with probability ``outside`` on each other token."""
    inside = REF / REF[KEPT].sum() * (1 - 2 * outside)
    return torch.where(KEPT, inside, outside).log()


def plain_force(logits, ref_logits, rewards=None, *, estimator="k3", beta=1.0):
    """The plain direction, from the penalty's value and nothing else of the package."""
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    ratio = (ref_logp - logp).exp()
    penalty = ratio - 1 - ratio.log() if estimator == "k3" else 0.5 * ratio.log().square()
    credit = -beta * penalty if rewards is None else rewards - beta * penalty
    return logp.exp() * (credit - (logp.exp() * credit).sum(-1, keepdim=True))


def ends(starts, ref_logits, *, geometry, steps, estimator="k3", rewards=None, beta=1.0, size=0.5):
    return expected_ascent(
        starts,
        torch.zeros_like(starts) if rewards is None else rewards.expand_as(starts),
        ref_logits.expand_as(starts),
        beta=beta,
        estimator=estimator,
        placement="reward",
        geometry=geometry,
        steps=steps,
        step_size=size,
    ).exp()


def test_a_truncation_is_no_end_of_the_plain_flow_of_k3():
    logits = truncated(1e-14)
    climb = -expected_gradient(logits, REF.log(), estimator="k3", placement="reward")
    kept = REF[KEPT].sum()
    expected = torch.where(KEPT, logits.exp() * (1 - kept), -REF)
    assert torch.allclose(climb, expected, rtol=0, atol=1e-11)
    printed = torch.tensor([0.0706, 0.0441, 0.0353, -0.1, -0.05], dtype=torch.float64)
    assert torch.allclose(climb, printed, atol=5e-5)
    # The statement that stood, "an attractor": true of the credit of the survivors, and of k2.
    nothing = torch.zeros_like(REF)
    for name in ("k2", "k3"):
        credit = token_advantage(
            logits, nothing, REF.log(), beta=1.0, estimator=name, placement="reward"
        )
        assert (credit[KEPT] - credit[0]).abs().max() < 1e-12
    quiet = -expected_gradient(logits, REF.log(), estimator="k2", placement="reward")
    assert quiet.abs().max() < 1e-10
    # On the truncation itself the token is never sampled, and the force is gone: it jumps.
    cut = torch.where(KEPT, logits, -math.inf)
    assert expected_gradient(cut, REF.log(), estimator="k3", placement="reward").abs().max() < 1e-12


def test_the_force_on_any_token_and_its_limit():
    logits, ref_logits = random_logits(20, 6, seed=1), random_logits(20, 6, seed=2)
    rewards = random_logits(20, 6, seed=3)
    policy, ref = logits.softmax(-1), ref_logits.softmax(-1)
    log_ratio = policy.log() - ref.log()
    beta = 0.7
    mean = (policy * rewards).sum(-1, keepdim=True)
    kl = reverse_kl(logits, ref_logits).unsqueeze(-1)
    formula = policy * (beta * (1 + kl - log_ratio) + rewards - mean) - beta * ref
    force = plain_force(logits, ref_logits, rewards, beta=beta)
    assert torch.allclose(force, formula, rtol=0, atol=1e-12)
    logits[:, 2] = -60.0
    force = plain_force(logits, ref_logits, rewards, beta=beta)
    assert torch.allclose(force[:, 2], -beta * ref[:, 2], rtol=1e-9)


def test_no_reward_brings_back_a_token_that_is_rare_enough():
    starts = torch.stack([REF.log(), REF.log()])
    starts[:, 4] += torch.tensor([-2.0, -12.0], dtype=torch.float64)
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 30.0], dtype=torch.float64)
    end = ends(starts, REF.log(), geometry="plain", steps=4000, rewards=rewards)
    assert end[0, 4] > 0.99
    assert end[1, 4] < 1e-50
    k1_pull = -expected_gradient(
        starts, REF.log().expand(2, 5), estimator="k1", placement="reward"
    ) + plain_force(starts, REF.log(), rewards, beta=0.0)
    assert (k1_pull[:, 4] > 0).all()


def stationary_faces(count: int, tokens: int, seed: int):
    """Random policies on the first tokens with the rewards that make them stationary, and x."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)
    kept = 0.4 + 0.5 * rand(count, 1)
    bent = 2 * (2 * rand(count, tokens) - 1)
    bent[::2, 0] += 3.0  # every other row with a majority
    ref = kept * bent.softmax(-1)
    share = ref + (1 - kept) / tokens
    policy = (share.log() + 0.8 * (2 * rand(count, tokens) - 1)).softmax(-1)
    x = share / policy - 1  # K - l + R - mean R
    rewards = x + policy.log() - ref.log()
    return policy, ref, rewards, x


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_which_ends_with_several_tokens_attract_the_plain_flow_of_k3(tokens):
    policy, ref, rewards, x = stationary_faces(300, tokens, seed=tokens)
    dead = torch.full((len(policy), 1), math.exp(-600.0), dtype=torch.float64)
    logp = torch.cat([policy, dead], -1).log()
    ref_logp = torch.cat([ref, 1 - ref.sum(-1, keepdim=True)], -1).log()
    rewards = torch.cat([rewards, rewards[:, :1] - 3.0], -1)

    def force(z):
        return plain_force(z, ref_logp, rewards)

    assert (force(logp)[:, :-1] - force(logp)[:, :1]).abs().max() < 1e-10
    slopes = torch.autograd.functional.jacobian(lambda z: force(z).sum(0), logp)
    slopes = slopes.permute(1, 0, 2)[:, :-1, :-1]  # among the survivors
    centre = torch.eye(tokens, dtype=torch.float64) - 1 / tokens
    seen = torch.linalg.eigvals(centre @ slopes @ centre).real.amax(-1) < 1e-12
    below = x > 0
    largest = policy.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1)
    stable = (below.sum(-1) == 1) & ((policy / x).sum(-1) > 0)
    assert torch.equal(seen, stable)
    assert 2 < stable.sum() < len(stable) / 2
    # What the criterion needs: a majority that is worth less, rewards corrected, than another.
    assert (largest[stable] > 0.5).all()
    level = rewards[:, :-1] - torch.log1p((1 - ref.sum(-1, keepdim=True)) / tokens / ref)
    worth = level.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1)
    assert (worth < level.amax(-1))[stable].all()


@pytest.mark.slow
@pytest.mark.parametrize("geometry", ["natural", "plain"])
def test_a_majority_and_small_rewards_against_it_keep_every_token(geometry):
    """Counterexample to "k3 in the reward ends at one token": an interior end that attracts."""
    ref = torch.tensor([0.8, 0.12, 0.08], dtype=torch.float64)
    policy = torch.tensor([0.76, 0.15, 0.09], dtype=torch.float64)
    rewards = (ref / policy - 1) + (policy / ref).log()  # R - k3 is the same for all tokens
    assert rewards.min() > 0 and rewards.max() < 0.03 and rewards.argmin() == 0
    shares = torch.tensor([[0.72, 0.17, 0.11], [0.79, 0.13, 0.08], [0.74, 0.18, 0.08]]).double()
    along = {"geometry": geometry, "steps": 6000, "size": 0.5}
    end = ends(shares.log(), ref.log(), rewards=rewards, **along)
    assert torch.allclose(end, policy, atol=1e-6)
    against = ends(policy.log(), ref.log(), rewards=-rewards, **along)  # in the majority's favour
    assert against.min() < 1e-6


def test_the_force_that_parts_two_tied_tokens_is_cubic():
    tied = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    apart = []
    for d in (0.05, 0.1):
        logits = torch.tensor([d / 2, -d / 2, -300.0], dtype=torch.float64)
        force = plain_force(logits, tied)
        apart.append((force[0] - force[1]).item())
    assert apart[1] / apart[0] == pytest.approx(8.0, rel=0.02)
    assert apart[0] > 0


def test_a_sign_step_stands_still_around_a_truncation():
    """What Adam makes of forces that do not change: equal steps for all survivors."""
    near = truncated(1e-9) + 0.2 * random_logits(100, 5, seed=13, scale=1.0).clamp(-1, 1)
    force = plain_force(near, REF.log().expand_as(near))
    assert (force[:, KEPT] > 0).all() and (force[:, ~KEPT] < 0).all()
    moved = (near + 0.1 * force.sign())[:, KEPT].softmax(-1)
    assert torch.allclose(moved, near[:, KEPT].softmax(-1), rtol=0, atol=1e-14)
    plain = (near + 0.1 * force)[:, KEPT].softmax(-1)
    assert (plain - moved).abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize("share", [0.55, 0.7, 0.9])
def test_two_tokens_creep_back_on_one_side_of_the_reference_only(share):
    """Phi'' = (p - pi)(1/pi^2 - 1/(1 - pi)^2): one unstable point, below one half."""
    ref = torch.tensor([share, 1 - share], dtype=torch.float64)
    grid = torch.linspace(0.01, 0.99, 197, dtype=torch.float64)
    logits = torch.stack([grid, 1 - grid], -1).log()
    rises = plain_force(logits, ref.log().expand_as(logits))[:, 0]
    turn = grid[(rises > 0).int().argmax()]
    assert 0.01 < turn < 0.5
    assert (rises[(grid > turn + 1e-9) & ((grid - share).abs() > 1e-3)] > 0).all()
    assert (rises[grid < turn - 1e-9] < 0).all()


def test_a_majority_token_below_its_reference_returns_under_the_natural_flow():
    ref = torch.tensor([0.7, 0.12, 0.1, 0.08], dtype=torch.float64)
    mass = 0.5 + 0.19 * torch.rand(200, 1, generator=torch.Generator().manual_seed(7)).double()
    spread = random_logits(200, 3, seed=8, scale=0.3).softmax(-1)
    rest = ref[1:] + (0.7 - mass) * spread  # all above their reference
    starts = torch.cat([mass, rest], -1).log()
    for name in ("k2", "k3"):
        end = ends(starts, ref.log(), geometry="natural", steps=800, size=1.5, estimator=name)
        assert (end - ref).abs().max() < 0.02
        assert (end[:, :1] > mass).all()


def test_how_fast_the_plain_flow_of_k3_loses_a_token():
    """The log-odds against the last survivor fall by beta (1 - ref_m + ref_b) a unit of time."""
    start = torch.tensor([0.98, 0.01, 0.005, 0.003, 0.002], dtype=torch.float64).log()
    half = ends(start, REF.log(), geometry="plain", steps=400, beta=2.0, size=0.1).log()
    full = ends(half, REF.log(), geometry="plain", steps=200, beta=2.0, size=0.1).log()
    rate = (half - full)[1:] / 20.0
    assert torch.allclose(rate, 2.0 * (1 - REF[0] + REF[1:]), rtol=1e-6)


@pytest.mark.parametrize("geometry", ["natural", "plain"])
def test_clipped_k3_in_the_reward_parks_tokens_and_loses_none(geometry):
    for rewards, beta in ((torch.zeros_like(REF), 1.0), (REF.flip(-1), 2.0)):
        starts = REF.log() + random_logits(40, 5, seed=9, scale=1.0)
        end = ends(
            starts,
            REF.log(),
            geometry=geometry,
            steps=900,
            estimator="k3_clip",
            rewards=rewards,
            beta=beta,
            size=1.4 / beta,
        )
        upper = end > 0.1 * REF
        closed = penalty_equilibrium(
            rewards.expand_as(end), REF.log().expand_as(end), upper, beta=beta, estimator="k3_clip"
        ).exp()
        assert torch.allclose(end, closed, atol=1e-9 if geometry == "natural" else 1e-3)
        assert (upper.sum(-1) < 5).all() and (upper.sum(-1) > 1).any()
        assert end.min() > 0.5 * math.exp(-9) * REF.min()
    value = k3_clip(closed.log(), REF.log().expand_as(closed))
    credit = rewards - beta * value
    assert torch.allclose(credit, credit[:, :1].expand_as(credit), atol=1e-9)
    # With equal rewards a parked token has r = e^(9 - v), v the shared value of the others.
    level = penalty_equilibrium(
        torch.zeros_like(REF), REF.log(), KEPT, beta=1.0, estimator="k3_clip"
    )
    shared = k3(level[0], REF[0].log())
    assert torch.allclose(REF.log()[~KEPT] - level[~KEPT], (9 - shared).expand(2), atol=1e-12)


def test_no_clipped_end_where_a_parked_token_would_be_above_the_cap():
    few = torch.tensor([False, False, False, False, True])
    rare = torch.tensor([0.5, 0.3, 0.15, 0.0499, 0.0001], dtype=torch.float64)
    logp = penalty_equilibrium(
        torch.zeros_like(rare), rare.log(), few, beta=1.0, estimator="k3_clip"
    )
    assert logp.isnan().all()


def test_a_forbidden_token_stays_forbidden_under_clipped_k3():
    ref_logits = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64).log()
    rewards = torch.tensor([0.0, 0.1, 0.0, 9.0], dtype=torch.float64)
    kept = torch.tensor([True, True, False, True])
    logp = penalty_equilibrium(rewards, ref_logits, kept, beta=1.0, estimator="k3_clip")
    assert logp[3] == -math.inf
    credit = (rewards - k3_clip(logp, ref_logits))[:3]
    assert torch.allclose(credit, credit[:1].expand(3), atol=1e-9)
    assert logp.exp().sum().item() == pytest.approx(1.0, abs=1e-12)


def test_clipped_k3_is_negative_where_the_reference_is_eight_thousand_times_likelier():
    zero = torch.zeros(2, dtype=torch.float64)
    below, above = k3_clip(zero, torch.tensor([9 - 1e-9, 9 + 1e-9], dtype=torch.float64))
    assert below > 0 > above
    assert k3_clip(zero, zero + 30.0)[0].item() == pytest.approx(-21.0, abs=1e-12)


def test_a_token_below_the_cap_rises_by_its_reward_alone():
    """Clipped k3 as a loss: up exactly if R_b - mean R > beta ref(tokens above their cap)."""
    ref_logits = random_logits(400, 6, seed=10, scale=1.0)
    logits = ref_logits + random_logits(400, 6, seed=11, scale=3.0)
    rewards = random_logits(400, 6, seed=12, scale=1.0)
    policy, ref = logits.softmax(-1), ref_logits.softmax(-1)
    capped = ref / policy > 10
    lead = rewards - (policy * rewards).sum(-1, keepdim=True)
    bar = 0.7 * torch.where(capped, 0.0, ref).sum(-1, keepdim=True)
    credit = token_advantage(logits, rewards, ref_logits, beta=0.7, estimator="k3_clip")
    assert torch.allclose(credit[capped], (lead - bar)[capped], rtol=0, atol=1e-12)
    up = (credit > 0)[capped]
    assert up.any() and not up.all()  # "lost once below the cap" holds at equal rewards only
    level = token_advantage(
        logits, torch.zeros_like(rewards), ref_logits, beta=0.7, estimator="k3_clip"
    )
    assert (level[capped] < 0).all()


def test_below_the_cap_the_plain_flow_can_bring_a_token_back_that_the_natural_flow_loses():
    """With equal rewards its logit falls, and still its probability may rise past the cap."""
    ref = torch.tensor([0.1, 0.8, 0.1], dtype=torch.float64)
    edge = math.log(10 / (3 * 0.1))  # below the mean logit: no way back
    start = torch.tensor([[0.8901, 0.1, 0.0099], [0.8986, 0.1, 0.0014]], dtype=torch.float64).log()
    depth = start.mean(-1) - start[:, 2]
    assert (start[:, 2].exp() < ref[2] / 10).all()
    assert depth[0] < edge < depth[1]
    moves = {"rewards": torch.zeros_like(start), "ref_logits": ref.log().expand_as(start)}
    credit = token_advantage(start, **moves, beta=1.0, estimator="k3_clip")
    assert (credit[:, 2] < 0).all()
    logit_rates = start.exp() * credit
    assert logit_rates[0, 2] > (start.exp() * logit_rates)[0].sum()  # its probability rises
    along = {"beta": 1.0, "estimator": "k3_clip", "step_size": 0.6}
    plain = expected_ascent(start, **moves, **along, geometry="plain", steps=1000).exp()
    assert torch.allclose(plain[0], ref, atol=1e-9)
    assert plain[1, 2] < 0.6 * 0.0014  # like one over the time
    natural = expected_ascent(start, **moves, **along, geometry="natural", steps=1000).exp()
    assert natural[:, 2].max() < 1e-100


def weighted_force(logits, ref_logits, weight):
    """The plain direction of k1 + weight (r - 1) in the reward."""
    logp = logits.log_softmax(-1)
    log_ratio = logp - ref_logits.log_softmax(-1)
    penalty = log_ratio + weight * torch.expm1(-log_ratio)
    return logp.exp() * ((logp.exp() * penalty).sum(-1, keepdim=True) - penalty)


def test_the_pull_of_the_reference_shrinks_with_the_weight():
    small = 1e-5 * random_logits(10, 5, seed=16, scale=1.0)
    of_k1 = weighted_force(REF.log() + small, REF.log(), 0.0)
    for weight in (-1.0, 0.5, 0.9, 2.0):
        force = weighted_force(REF.log() + small, REF.log(), weight)
        assert torch.allclose(force, (1 - weight) * of_k1, rtol=0, atol=1e-9)
        assert (force - of_k1).abs().amax(-1).min() > 1e-8


@pytest.mark.parametrize("natural", [True, False])
def test_any_positive_weight_loses_tokens_and_no_other_does(natural):
    starts = REF.log() + random_logits(200, 5, seed=17, scale=1.0)
    returned = {}
    for weight in (-1.0, 0.0, 0.5):
        logp = starts
        for _ in range(700):
            move = weighted_force(logp, REF.log(), weight)
            if natural:
                move = (move / logp.softmax(-1)).clamp(-1, 1)
            logp = (logp + 0.9 * move).log_softmax(-1).clamp(min=-600.0)
        returned[weight] = ((logp.exp() - REF).abs().amax(-1) < 1e-3).double().mean().item()
    assert returned[-1.0] == returned[0.0] == 1.0
    assert 0.2 < returned[0.5] < 0.8
    rare = truncated(1e-12)
    assert torch.allclose(weighted_force(rare, REF.log(), 0.5)[~KEPT], -0.5 * REF[~KEPT], rtol=1e-6)


def test_a_clamp_on_the_penalty_takes_the_lasting_force_away_and_loses_tokens_all_the_same():
    starts = REF.log() + random_logits(100, 5, seed=18, scale=1.0)
    ends_of = {}
    for ceiling in (10.0, math.inf):
        logp = starts.log_softmax(-1)
        for _ in range(1000):
            penalty = k3(logp, REF.log().expand_as(logp)).clamp(max=ceiling)
            mean = (logp.exp() * penalty).sum(-1, keepdim=True)
            logp = (logp + 1.5 * logp.exp() * (mean - penalty)).log_softmax(-1).clamp(min=-600.0)
        ends_of[ceiling] = (logp.exp() > 0.01 * REF).sum(-1)
    assert (ends_of[math.inf] == 1).all()
    assert (ends_of[10.0] > 1).double().mean() > 0.5
    assert (ends_of[10.0] < 5).all()
