"""Decisions on the KL in the reward: signs, sampling weights, folded objectives (chapter 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.experiments.chapters import off_policy, reward_side
from analysis.experiments.chapters.gradients import random_policies, random_tables
from analysis.experiments.chapters.group_orders import Prompts, random_prompts
from analysis.experiments.claims import Finding, Verdict, decides, settle
from analysis.experiments.claims.gradient_errors import error_of
from analysis.kl.ascent import expected_ascent
from analysis.kl.enumeration import (
    cosine,
    expected_gradient,
    forward_kl_gradient,
    relative_error,
    reverse_kl_gradient,
)
from analysis.kl.fixed_points import reverse_kl_optimum
from analysis.kl.mirror_steps import folded_reward, mirror_step
from analysis.kl.scores import expected_score
from analysis.kl.sequences import enumerate_sequences, expected_sequence_gradient, token_logp
from analysis.kl.surrogates import ESTIMATORS, gradient_coefficient
from analysis.objectives.credit import reward_to_go

#: Below this an enumerated identity holds.
EXACT = 1e-10
BETA = 0.1


def _prompts(distance: float = 1.0) -> Prompts:
    return random_prompts(60, 8, distance=distance, seed=80)


def _decided(verdict: Verdict, referee: float, figures: dict[str, float]) -> Finding:
    """A refutation counts only while the corrected statement passes; else nothing is decided."""
    return Finding(verdict if referee < EXACT else "open", figures)


@decides("S4-6")
def sign_of_the_total_loss() -> Finding:
    """The total loss exactly as printed, by autograd; descending it must raise the reward, and its
    reward part must agree with the printed gradient of the merged form."""
    logits, ref_logits, rewards = _prompts()
    leaf = logits.clone().requires_grad_(True)
    policy = leaf.softmax(-1)
    reward_part = -(policy * rewards).sum(-1)  # L_R, from the line "-L_R = E[r]"
    kl_part = (policy * (leaf.log_softmax(-1) - ref_logits.log_softmax(-1))).sum(-1)
    total = -(reward_part - BETA * kl_part)
    (slope,) = torch.autograd.grad(total.sum(), leaf, retain_graph=True)
    (of_reward_part,) = torch.autograd.grad(reward_part.sum(), leaf)
    printed = expected_score(logits, policy.detach() * rewards)  # grad L_R = E[r grad log pi]
    raised = ((logits - 1e-3 * slope).softmax(-1) - logits.softmax(-1)) * rewards
    corrected = _regularised_ascent(logits, ref_logits, rewards)
    figures = {
        "cosine_to_printed_gradient": cosine(of_reward_part, printed).mean().item(),
        "share_reward_raised": (raised.sum(-1) > 0).double().mean().item(),
        "corrected_error": error_of(
            printed - BETA * reverse_kl_gradient(logits, ref_logits), corrected, worst=True
        ),
    }
    consistent = figures["cosine_to_printed_gradient"] > 1 - EXACT
    as_printed = consistent and figures["share_reward_raised"] > 0.5
    return _decided(settle(as_printed, False), figures["corrected_error"], figures)


def _regularised_ascent(logits: Tensor, ref_logits: Tensor, rewards: Tensor) -> Tensor:
    """Gradient of expected reward minus BETA times the reverse KL, by autograd through both."""
    leaf = logits.clone().requires_grad_(True)
    policy = leaf.softmax(-1)
    log_ratio = leaf.log_softmax(-1) - ref_logits.log_softmax(-1)
    return torch.autograd.grad((policy * (rewards - BETA * log_ratio)).sum(), leaf)[0]


@decides("S4-7")
def doubled_probability() -> Finding:
    """The mean of the printed estimator, its extra probability included, against the exact gradient
    of the reverse KL; and its mean for a constant penalty, which must vanish."""
    logits, ref_logits, _ = _prompts()
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    exact = reverse_kl_gradient(logits, ref_logits)
    printed = expected_score(logits, policy * policy * log_ratio)
    without = expected_score(logits, policy * log_ratio)
    constant = expected_score(logits, policy * policy)
    uniform = torch.zeros_like(logits)
    at_uniform = expected_score(uniform, uniform.softmax(-1) ** 2 * -ref_logits.log_softmax(-1))
    figures = {
        "error": error_of(printed, exact),
        "cosine": cosine(printed, exact).median().item(),
        "smallest_cosine": cosine(printed, exact).min().item(),
        "corrected_error": error_of(without, exact, worst=True),
        "constant_penalty": (constant.norm(dim=-1) / policy.norm(dim=-1)).median().item(),
        "uniform_sampler_cosine": cosine(at_uniform, reverse_kl_gradient(uniform, ref_logits))
        .min()
        .item(),
    }
    always = error_of(printed, exact, worst=True) < EXACT
    verdict = settle(always and figures["constant_penalty"] < EXACT, always)
    return _decided(verdict, figures["corrected_error"], figures)


@decides("S4-13")
def equivalent_objective() -> Finding:
    """The folded objective's gradient by autograd, where it was sampled and after a move, and its
    literal maximiser, against the gradient and the optimum of reward minus KL."""
    logits, ref_logits, rewards = _prompts()
    moved = logits + random_policies(*logits.shape, spread=0.5, seed=81).logits
    folded = folded_reward(logits, ref_logits, rewards, beta=BETA)
    errors = [
        error_of(expected_score(at, at.softmax(-1) * folded), _regularised_ascent(at, *fixed))
        for at, fixed in ((logits, (ref_logits, rewards)), (moved, (ref_logits, rewards)))
    ]
    optimum = reverse_kl_optimum(rewards, ref_logits, beta=BETA).exp()
    literal = expected_ascent(
        logits, folded, ref_logits, beta=0.0, estimator="k1", placement="reward", steps=800
    ).exp()
    step = mirror_step(logits, ref_logits, rewards, beta=BETA, step_size=1 / BETA).exp()
    figures = {
        "gradient_error_at_sampler": errors[0],
        "gradient_error_after_move": errors[1],
        "argmax_probability": literal.amax(-1).median().item(),
        "argmax_distance": (literal - optimum).abs().sum(-1).div(2).median().item(),
        "proximal_step_distance": (step - optimum).abs().sum(-1).div(2).max().item(),
    }
    local = figures["gradient_error_at_sampler"] < EXACT
    same = figures["gradient_error_after_move"] < EXACT and figures["argmax_distance"] < EXACT
    return Finding(settle(local and same, local), figures)


@decides("S4-29")
def k3_moved_into_the_reward() -> Finding:
    """The folded k3 against the k3 loss it replaces: autograd through both, fresh and stale, one
    token and ragged sequences with the return a policy gradient passes on."""
    fresh, stale = (off_policy.stale_states(100, 16, d, seed=82) for d in (0.0, 0.5))
    errors = {}
    for age, states in (("fresh", fresh), ("stale", stale)):
        merged = off_policy.merged_kl_gradient(states, reading="old", penalty="k3")
        loss = expected_gradient(*states[:3], estimator="k3")
        errors[age] = (merged, loss)
    forward = forward_kl_gradient(stale.logits, stale.ref_logits)
    own, to_go = _folded_over_sequences("k3")
    attached = off_policy.merged_kl_gradient(stale, reading="attached", penalty="k3")
    figures = {
        "fresh": error_of(*errors["fresh"], worst=True),
        "stale_to_loss": error_of(*errors["stale"]),
        "stale_to_forward": error_of(errors["stale"][0], forward),
        "sequence_own_credit": own,
        "sequence_to_go": to_go,
        "attached_norm": (attached.norm(dim=-1) / forward.norm(dim=-1)).max().item(),
    }
    sometimes = max(figures["fresh"], own, to_go) < EXACT
    always = figures["stale_to_loss"] < EXACT
    return Finding(settle(sometimes and always, sometimes), figures)


def _folded_over_sequences(estimator: str) -> tuple[float, float]:
    """Worst error with own-token credit and median error to go, against the loss per token."""
    tree = enumerate_sequences(3, 4, eos=2)
    own, to_go = [], []
    for logits, ref_logits in zip(*random_tables(tree, 3, 20, spread=1.0, seed=83), strict=True):
        loss = expected_sequence_gradient(logits, ref_logits, tree, estimator=estimator).flatten()
        logp, ref_logp = token_logp(logits, tree), token_logp(ref_logits, tree)
        penalty = gradient_coefficient(logp, ref_logp, estimator=estimator)
        for errors, credit in ((own, penalty), (to_go, reward_to_go(penalty))):
            leaf = logits.clone().requires_grad_(True)
            terms = logp.sum(-1).exp().unsqueeze(-1) * credit * token_logp(leaf, tree)
            (gradient,) = torch.autograd.grad(terms.sum(), leaf)
            errors.append(relative_error(gradient.flatten(), loss))
    return torch.stack(own).max().item(), torch.stack(to_go).median().item()


@decides("S4-30")
def always_positive_penalties() -> Finding:
    """Signs of every entry of the expected step, the effect of a constant, one-sample steps over
    all tokens, and the ends of exact training on the penalty alone from many starts."""
    prompts = random_prompts(200, 6, distance=1.0, seed=84)
    logp, ref_logp = prompts.logits.log_softmax(-1), prompts.ref_logits.log_softmax(-1)
    policy = logp.exp()
    positive, rising, shift = [], [], []
    for name in ("k2", "k3"):
        penalty = ESTIMATORS[name](logp, ref_logp)
        step = -expected_score(prompts.logits, policy * penalty)
        shifted = -expected_score(prompts.logits, policy * (penalty - 100.0))
        positive.append((penalty >= 0).double().mean())
        rising.append((step > 0).sum(-1).min())
        shift.append((step - shifted).abs().max())
    ends = reward_side.flow_table(prompts, ("k1", "k2", "k3"), steps=400, step_size=0.5)
    ends = ends.set_index("estimator")
    figures = {
        "share_positive": torch.stack(positive).min().item(),
        "fewest_rising": float(torch.stack(rising).min()),
        "constant_changes": torch.stack(shift).max().item(),
        "sample_lowered": _sample_lowered(logp, ref_logp),
        "lost_k1": ends.share_collapsed["k1"],
        "lost_k2": ends.share_collapsed["k2"],
        "lost_k3": ends.share_collapsed["k3"],
        "returned_positive_k1": ends.share_returned["k1"],
    }
    every_action_lowered = figures["fewest_rising"] == 0
    k1_never_returns = 1.0 - figures["returned_positive_k1"]
    referee = max(figures["constant_changes"], k1_never_returns, figures["lost_k1"])
    return _decided(settle(every_action_lowered, every_action_lowered), referee, figures)


def _sample_lowered(logp: Tensor, ref_logp: Tensor) -> float:
    """Share of all single tokens that a descent step on their own k3 penalty makes less likely."""
    penalty = ESTIMATORS["k3"](logp, ref_logp)
    score = torch.eye(logp.shape[-1], dtype=logp.dtype) - logp.exp().unsqueeze(-2)
    moved = (logp.unsqueeze(-2) - 0.1 * penalty.unsqueeze(-1) * score).log_softmax(-1)
    return (moved.diagonal(dim1=-2, dim2=-1) < logp).double().mean().item()


@decides("S4-xr")
def folded_reward_is_ppos() -> Finding:
    """The printed per-token reward under its possible credits, over every ragged sequence, against
    autograd through expected reward minus sequence KL."""
    tree = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(tree, 3, 20, spread=1.0, seed=85)
    rewards, _ = random_policies(20, len(tree.tokens), spread=1.0, seed=86)
    table = reward_side.folded_return_table(*tables, rewards, tree, beta=BETA)
    error = dict(zip(("own_token", "every_token", "last_token"), table.error, strict=True))
    flat = enumerate_sequences(8, 1)
    logits, ref_logits, reward = (x.unsqueeze(1) for x in _prompts())
    single = reward_side.folded_return_table(logits, ref_logits, reward.squeeze(1), flat, beta=BETA)
    figures = {**error, "one_token": single.error.max()}
    sometimes = max(figures["one_token"], error["last_token"]) < EXACT
    always = max(error["own_token"], error["every_token"]) < EXACT
    return Finding(settle(sometimes and always, sometimes), figures)


@decides("S4-xs")
def loss_and_reward_convert() -> Finding:
    """Estimators as losses against their derivatives as penalties: fresh, stale and over sequences
    with the return a policy gradient passes on."""
    states = {age: off_policy.stale_states(100, 16, d, seed=87) for age, d in _AGES.items()}
    errors = {}
    for age, (logits, ref_logits, old_logits, _) in states.items():
        worst = []
        for name in ("k2", "k3"):
            loss = expected_gradient(logits, ref_logits, old_logits, estimator=name)
            sampled = (old_logits.log_softmax(-1), ref_logits.log_softmax(-1))
            penalty = gradient_coefficient(*sampled, estimator=name)
            worst.append(error_of(expected_score(logits, logits.softmax(-1) * penalty), loss))
        errors[age] = max(worst)
    own, to_go = _folded_over_sequences("k2")
    figures = {**errors, "sequence_own_credit": own, "sequence_to_go": to_go}
    sometimes = max(figures["fresh"], own) < EXACT
    return Finding(settle(sometimes and max(figures["stale"], to_go) < EXACT, sometimes), figures)


_AGES = {"fresh": 0.0, "stale": 0.5}
