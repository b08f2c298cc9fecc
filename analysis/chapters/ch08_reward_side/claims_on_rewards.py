"""Claims on the KL in the reward: signs, weights, credit, and losses turned into rewards."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from analysis.chapters.ch08_reward_side.orders import Prompts, random_prompts
from analysis.chapters.ch08_reward_side.penalties import CREDITS, folded_return_errors
from analysis.evidence.claims import (
    EXACT,
    Finding,
    Verdict,
    claim,
    error_of,
    judge,
    largest,
    median,
    share,
)
from analysis.evidence.policies import (
    RAGGED,
    flat_error,
    lowered,
    measured,
    random_policies,
    random_tables,
)
from analysis.evidence.stale_states import merged_kl_gradient, stale_states
from analysis.records.manifests import RESULTS, recorded_table
from kl_term.kl.ascent import expected_ascent
from kl_term.kl.credit import credit_moments
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import (
    cosine,
    expected_gradient,
    forward_kl_gradient,
    reverse_kl_gradient,
)
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.kl.mirror_steps import folded_reward, mirror_step
from kl_term.kl.returns import reward_to_go
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import enumerate_sequences, expected_sequence_gradient, token_logp
from kl_term.kl.surrogates import ESTIMATORS, gradient_coefficient

BETA = 0.1
AGES = {"fresh": 0.0, "stale": 0.5}  #: how far the policy has moved from its sampler


def _prompts() -> Prompts:
    return random_prompts(60, 8, distance=1.0, seed=80)


def _decided(verdict: Verdict, referee: float, figures: dict[str, float]) -> Finding:
    """A refutation counts only while the corrected statement passes; else nothing is decided."""
    return Finding(verdict if referee < EXACT else "open", figures)


@claim("S4-6")
def sign_of_the_total_loss() -> Finding:
    """The total loss exactly as printed: whether descending it raises the reward, and agrees
    with the printed gradient."""
    logits, ref_logits, rewards = prompts = _prompts()

    def reward_part(at: Tensor) -> Tensor:  # L_R, from the line "-L_R = E[r]"
        return -(at.softmax(-1) * rewards).sum()

    def total(at: Tensor) -> Tensor:
        return -(reward_part(at) - BETA * reverse_kl(at, ref_logits).sum())

    printed = expected_score(logits, logits.softmax(-1) * rewards)  # grad L_R = E[r grad log pi]
    descended = logits - 1e-3 * grad(total)(logits)
    raised = ((descended.softmax(-1) - logits.softmax(-1)) * rewards).sum(-1) > 0
    correct = printed - BETA * reverse_kl_gradient(logits, ref_logits)
    figures = {
        "cosine_to_printed_gradient": cosine(grad(reward_part)(logits), printed).mean().item(),
        "share_reward_raised": share(raised),
        "corrected_error": error_of(correct, _regularised_ascent(*prompts), worst=True),
    }
    consistent = figures["cosine_to_printed_gradient"] > 1 - EXACT
    as_printed = consistent and figures["share_reward_raised"] > 0.5
    return _decided(judge(as_printed, False), figures["corrected_error"], figures)


def _regularised_ascent(logits: Tensor, ref_logits: Tensor, rewards: Tensor) -> Tensor:
    """Gradient of expected reward minus BETA times the reverse KL, by autograd through both."""
    ascent = grad(lambda at: (at.softmax(-1) * rewards).sum())(logits)
    return ascent - BETA * grad(lambda at: reverse_kl(at, ref_logits).sum())(logits)


@claim("S4-7")
def doubled_probability() -> Finding:
    """The mean of the printed estimator, its extra probability included, against the KL's
    gradient, and of a constant penalty."""
    logits, ref_logits, _ = _prompts()
    policy, uniform = logits.softmax(-1), torch.zeros_like(logits)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    exact = reverse_kl_gradient(logits, ref_logits)
    printed = expected_score(logits, policy**2 * log_ratio)
    without = expected_score(logits, policy * log_ratio)
    constant = expected_score(logits, policy**2)
    at_uniform = expected_score(uniform, uniform.softmax(-1) ** 2 * -ref_logits.log_softmax(-1))
    figures = {
        "error": error_of(printed, exact),
        "cosine": median(cosine(printed, exact)),
        "smallest_cosine": cosine(printed, exact).min().item(),
        "corrected_error": error_of(without, exact, worst=True),
        "constant_penalty": median(constant.norm(dim=-1) / policy.norm(dim=-1)),
        "uniform_sampler_cosine": cosine(at_uniform, reverse_kl_gradient(uniform, ref_logits))
        .min()
        .item(),
    }
    always = error_of(printed, exact, worst=True) < EXACT
    verdict = judge(always and figures["constant_penalty"] < EXACT, always)
    return _decided(verdict, figures["corrected_error"], figures)


@claim("S4-13")
def equivalent_objective() -> Finding:
    """The folded objective's gradient at the sampler and after a move, and its maximiser,
    against those of reward minus KL."""
    logits, ref_logits, rewards = _prompts()
    moved = random_policies(*logits.shape, spread=0.5, seed=81).logits + logits
    folded = folded_reward(logits, ref_logits, rewards, beta=BETA)
    errors = [
        error_of(
            expected_score(at, at.softmax(-1) * folded),
            _regularised_ascent(at, ref_logits, rewards),
        )
        for at in (logits, moved)
    ]
    optimum = reverse_kl_optimum(rewards, ref_logits, beta=BETA).exp()
    ascent = partial(expected_ascent, estimator="k1", placement="reward", steps=800)
    literal = ascent(logits, folded, ref_logits, beta=0.0).exp()
    step = mirror_step(logits, ref_logits, rewards, beta=BETA, step_size=1 / BETA).exp()
    figures = {
        "gradient_error_at_sampler": errors[0],
        "gradient_error_after_move": errors[1],
        "argmax_probability": median(literal.amax(-1)),
        "argmax_distance": median((literal - optimum).abs().sum(-1) / 2),
        "proximal_step_distance": largest((step - optimum).abs().sum(-1) / 2),
    }
    local = figures["gradient_error_at_sampler"] < EXACT
    same = figures["gradient_error_after_move"] < EXACT and figures["argmax_distance"] < EXACT
    return Finding(judge(local and same, local), figures)


@claim("S4-29")
def k3_moved_into_the_reward() -> Finding:
    """The folded k3 against the k3 loss it replaces: fresh and stale, one token and ragged
    sequences."""
    gradients = {}
    for age, distance in AGES.items():
        states = stale_states(100, 16, distance, seed=82)
        merged = merged_kl_gradient(states, reading="old", penalty="k3")
        gradients[age] = (merged, expected_gradient(*states[:3], estimator="k3"))
    forward = forward_kl_gradient(*states[:2])
    attached = merged_kl_gradient(states, reading="attached", penalty="k3")
    own, to_go = _folded_over_sequences("k3")
    figures = {
        "fresh": error_of(*gradients["fresh"], worst=True),
        "stale_to_loss": error_of(*gradients["stale"]),
        "stale_to_forward": error_of(gradients["stale"][0], forward),
        "sequence_own_credit": own,
        "sequence_to_go": to_go,
        "attached_norm": largest(attached.norm(dim=-1) / forward.norm(dim=-1)),
    }
    sometimes = max(figures["fresh"], own, to_go) < EXACT
    always = figures["stale_to_loss"] < EXACT
    return Finding(judge(sometimes and always, sometimes), figures)


def _folded_over_sequences(estimator: str) -> tuple[float, float]:
    """Worst error with own-token credit and median error to go, against the loss per token."""

    def errors(logits: Tensor, ref_logits: Tensor) -> dict[str, float]:
        loss = expected_sequence_gradient(logits, ref_logits, RAGGED, estimator=estimator)
        logps = (token_logp(x, RAGGED) for x in (logits, ref_logits))
        own = gradient_coefficient(*logps, estimator=estimator)
        return {
            name: flat_error(credit_moments(logits, RAGGED, credit).mean, loss)
            for name, credit in (("own", own), ("to_go", reward_to_go(own)))
        }

    found = measured(errors, *random_tables(RAGGED, 3, 20, spread=1.0, seed=83))
    return found.own.max(), found.to_go.quantile(interpolation="lower")


@claim("S4-30")
def always_positive_penalties() -> Finding:
    """Signs of the expected step, the effect of a constant, one-sample steps, and the ends of
    exact training on the penalty alone."""
    prompts = random_prompts(200, 6, distance=1.0, seed=84)
    logp, ref_logp = prompts.logits.log_softmax(-1), prompts.ref_logits.log_softmax(-1)
    positive, shift = [], []
    for name in ("k2", "k3"):
        penalty = ESTIMATORS[name](logp, ref_logp)
        steps = (expected_score(prompts.logits, logp.exp() * (penalty - c)) for c in (0.0, 100.0))
        positive.append(share(penalty >= 0))
        shift.append(largest(torch.sub(*steps)))
    flow = {"beta": 1.0, "placement": "reward", "steps": 400, "step_size": 0.5}
    nothing, least = torch.zeros_like(prompts.rewards), ref_logp + math.log(1e-6)
    ends = {
        name: expected_ascent(prompts.logits, nothing, prompts.ref_logits, estimator=name, **flow)
        for name in ("k1", "k2", "k3")
    }
    lost = {name: share((end < least).any(-1)) for name, end in ends.items()}
    rising = [
        (expected_gradient(*prompts[:2], estimator=name, placement="reward") < 0).sum(-1).min()
        for name in ("k2", "k3")
    ]
    figures = {
        "share_positive": min(positive),
        "fewest_rising": float(min(rising)),
        "constant_changes": max(shift),
        "sample_lowered": share(lowered(*prompts[:2], ESTIMATORS["k3"], step_size=0.1)),
        "lost_k1": lost["k1"],
        "lost_k2": lost["k2"],
        "lost_k3": lost["k3"],
        "returned_positive_k1": share(reverse_kl(ends["k1"], prompts.ref_logits) < 1e-3),
        **_of_language_model("k3_reward", "none"),
    }
    every_action_lowered = figures["fewest_rising"] == 0
    k1_never_returns = 1.0 - figures["returned_positive_k1"]
    referee = max(figures["constant_changes"], k1_never_returns, figures["lost_k1"])
    return _decided(judge(every_action_lowered, every_action_lowered), referee, figures)


def _of_language_model(*variants: str) -> dict[str, float]:
    """Accuracy of the recorded runs of 200 updates on a language model, means over seeds: of three
    on a GPU, and of the final policies of the new ones in ``again``."""
    found = {}
    for called, folder, metric in (
        ("language", "smollm2_cuda", "accuracy"),
        ("again", "smollm2_reward_long_cpu", "final_accuracy"),
    ):
        ends = recorded_table(RESULTS / folder, "final.csv").groupby("variant")[metric].mean()
        found |= {f"{called}_{name}": float(ends[name]) for name in variants}
    return found


@claim("S4-xr")
def folded_reward_is_ppos() -> Finding:
    """The printed per-token reward under its possible credits against autograd through reward
    minus sequence KL."""
    tables = random_tables(RAGGED, 3, 20, spread=1.0, seed=85)
    rewards, _ = random_policies(20, len(RAGGED.tokens), spread=1.0, seed=86)
    error = folded_return_errors(*tables, rewards, RAGGED, beta=BETA)
    logits, ref_logits, reward = _prompts()
    pair = (logits.unsqueeze(1), ref_logits.unsqueeze(1))
    single = folded_return_errors(*pair, reward, enumerate_sequences(8, 1), beta=BETA)
    names = ("own_token", "every_token", "last_token")
    figures = dict(zip(names, error[list(CREDITS)], strict=True))
    figures["one_token"] = single.max()
    sometimes = max(figures["one_token"], figures["last_token"]) < EXACT
    always = max(figures["own_token"], figures["every_token"]) < EXACT
    return Finding(judge(sometimes and always, sometimes), figures)


@claim("S4-xs")
def loss_and_reward_convert() -> Finding:
    """Estimators as losses against their derivatives as penalties: fresh, stale and over
    sequences."""
    figures = {}
    for age, distance in AGES.items():
        logits, ref_logits, old_logits, _ = stale_states(100, 16, distance, seed=87)
        sampled = (old_logits.log_softmax(-1), ref_logits.log_softmax(-1))
        errors = []
        for name in ("k2", "k3"):
            loss = expected_gradient(logits, ref_logits, old_logits, estimator=name)
            penalty = gradient_coefficient(*sampled, estimator=name)
            folded = expected_score(logits, logits.softmax(-1) * penalty)
            errors.append(error_of(folded, loss, worst=age == "fresh"))
        figures[age] = max(errors)
    own, to_go = _folded_over_sequences("k2")
    figures |= {"sequence_own_credit": own, "sequence_to_go": to_go}
    sometimes = max(figures["fresh"], own) < EXACT
    return Finding(judge(sometimes and max(figures["stale"], to_go) < EXACT, sometimes), figures)
