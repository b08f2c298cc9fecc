"""Chapter 8: what the KL in the reward does to groups, flows, steps and returns, enumerated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis.evidence.claims import (
    EXACT,
    Finding,
    Verdict,
    band,
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
    group_moments,
    log_ratios,
    lowered,
    measured,
    normal_draws,
    random_policies,
    random_tables,
)
from analysis.evidence.stale_states import merged_kl_gradient, spread, stale_states
from analysis.records.manifests import RESULTS, recorded_table
from kl_term import style
from kl_term.kl.ascent import expected_ascent
from kl_term.kl.credit import credit_moments
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import (
    GradientMoments,
    cosine,
    expected_gradient,
    forward_kl_gradient,
    relative_error,
    reverse_kl_gradient,
)
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.kl.mirror_steps import folded_reward, mirror_step
from kl_term.kl.returns import reward_to_go
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from kl_term.kl.surrogates import ESTIMATORS, gradient_coefficient
from kl_term.objectives.ordering import ORDERS

# --- What the chapter computes: groups ---------------------------------------------------------


class Prompts(NamedTuple):
    """Independent one-token prompts, one a row."""

    logits: Tensor  #: [N, V], the policy, which also samples
    ref_logits: Tensor  #: [N, V]
    rewards: Tensor  #: [N, V], one a token


def random_prompts(count: int, vocab_size: int, *, distance: float, seed: int) -> Prompts:
    """Random references, policies ``distance`` away from them and standard normal rewards."""
    ref_logits, step = random_policies(count, vocab_size, spread=1.0, seed=seed)
    rewards, _ = random_policies(count, vocab_size, spread=1.0, seed=seed + 1)
    return Prompts(ref_logits + distance * step, ref_logits, rewards)


def order_moments(prompts: Prompts, order: str, *, beta: float, group_size: int) -> GradientMoments:
    """Exact mean [N, V] and spread [N] of one group's gradient under an order of KL and groups."""
    tokens = torch.arange(prompts.logits.shape[-1])
    moments = []
    for logits, ref_logits, rewards in zip(*prompts, strict=True):
        kl = logits.log_softmax(-1) - ref_logits.log_softmax(-1)

        def advantage(drawn: Tensor, rewards: Tensor = rewards, kl: Tensor = kl) -> Tensor:
            return ORDERS[order](rewards[drawn], kl[drawn], beta=beta)

        moments.append(group_moments(logits, tokens, group_size, advantage))
    return GradientMoments(*(torch.stack(x) for x in zip(*moments, strict=True)))


def order_table(
    prompts: Prompts, scales: Iterable[float], *, beta: float, group_size: int
) -> pd.DataFrame:
    """Weights of reward and KL under each order as the rewards are rescaled: medians over prompts.

    ``std`` is the exact standard deviation of the reward under the policy; ``median``, ``p10`` and
    ``p90`` are of the KL's weight in units of the reward, over beta, by least squares on the two
    exact gradients; ``bias`` is the error of the reward part after the best rescaling.
    """
    policy, rows = prompts.logits.softmax(-1), []
    for scale in scales:
        scaled = prompts._replace(rewards=scale * prompts.rewards)
        std = median(spread(scaled.rewards, policy))
        reward = expected_score(scaled.logits, scaled.logits.softmax(-1) * scaled.rewards)
        descent = -reverse_kl_gradient(scaled.logits, scaled.ref_logits)
        basis = torch.stack([reward, descent], dim=-1)
        for order in ORDERS:
            alone = order_moments(scaled, order, beta=0.0, group_size=group_size).mean
            added = order_moments(scaled, order, beta=beta, group_size=group_size).mean - alone
            of_reward = (alone * reward).sum(-1) / reward.square().sum(-1)
            fitted = torch.linalg.lstsq(basis, added.unsqueeze(-1)).solution.squeeze(-1)
            bias = median(relative_error(alone / of_reward.unsqueeze(-1), reward))
            row = {"order": order, "scale": scale, "std": std, "bias": bias}
            rows.append(row | band(fitted[:, 1] / beta / of_reward))
    return pd.DataFrame(rows)


# --- What it computes: flows, steps and returns ------------------------------------------------


def penalty_force(log_odds: Tensor, ref_probability: float) -> pd.DataFrame:
    """Push of each penalty on the log-odds of the first of two tokens: ``k(second) - k(first)``,
    natural gradient."""
    logits = torch.stack([log_odds, torch.zeros_like(log_odds)], -1)
    ref = torch.tensor([ref_probability, 1 - ref_probability], dtype=log_odds.dtype)
    logp = logits.log_softmax(-1)
    frames = []
    for name in ("k1", "k2", "k3"):
        penalty = ESTIMATORS[name](logp, ref.log().expand_as(logp))
        force = penalty[:, 1] - penalty[:, 0]
        frames.append(pd.DataFrame({"estimator": name, "log_odds": log_odds, "force": force}))
    return pd.concat(frames, ignore_index=True)


#: How the printed per-token reward can be credited, and PPO's own way.
CREDITS = ("own token only", "every token, to go", "last token, to go")


def folded_return_gradient(
    logits: Tensor,
    ref_logits: Tensor,
    rewards: Tensor,
    sequences: Sequences,
    *,
    beta: float,
    credit: str,
) -> Tensor:
    """[states, vocab]: exact ascent direction of a task reward [N] with the KL folded in.

    ``own token only`` weighs a token with ``R - beta l_t``, ``every token, to go`` passes that
    through the return, ``last token, to go`` gives the reward once.
    """
    mask = sequences.mask
    penalty = beta * log_ratios(logits, ref_logits, sequences)
    everywhere = torch.where(mask, rewards.unsqueeze(-1), 0.0)
    follows = functional.pad(mask[:, 1:], (0, 1))
    once = torch.where(mask & ~follows, rewards.unsqueeze(-1), 0.0)
    returns = {
        CREDITS[0]: everywhere - penalty,
        CREDITS[1]: reward_to_go(everywhere - penalty),
        CREDITS[2]: reward_to_go(once - penalty),
    }[credit]
    return credit_moments(logits, sequences, returns).mean


def folded_return_errors(
    logits: Tensor, ref_logits: Tensor, rewards: Tensor, sequences: Sequences, *, beta: float
) -> pd.Series:
    """Each credit's median relative error against the gradient of ``E[R] - beta KL``, over
    tables."""

    def errors(*case: Tensor) -> dict[str, float]:
        exact = regularised_sequence_gradient(*case, sequences, beta=beta)
        options = {"sequences": sequences, "beta": beta}
        found = {name: folded_return_gradient(*case, **options, credit=name) for name in CREDITS}
        return {name: flat_error(gradient, exact) for name, gradient in found.items()}

    return measured(errors, logits, ref_logits, rewards).quantile(interpolation="lower")


def regularised_sequence_gradient(
    logits: Tensor, ref_logits: Tensor, rewards: Tensor, sequences: Sequences, *, beta: float
) -> Tensor:
    """[states, vocab]: gradient of mean reward minus beta times the sequence KL, by autograd."""
    ascent = grad(lambda at: sequence_probability(at, sequences) @ rewards)(logits)
    return ascent - beta * sequence_kl_gradient(logits, ref_logits, sequences)


# --- What it draws -----------------------------------------------------------------------------


def draw_forces(frame: pd.DataFrame, ref_probability: float) -> Figure:
    """Push of each penalty on the log-odds of one of two tokens."""
    figure, axes = style.subplots(height=3.9)
    for name, curve in frame.groupby("estimator"):
        axes.plot(curve.log_odds, curve.force, **style.line(name, "reward", marker=""))
    ref_odds = math.log(ref_probability / (1 - ref_probability))
    style.guide(axes, y=0, linestyle="-")
    style.guide(axes, x=ref_odds, linewidth=2.2)
    at = {"xycoords": ("data", "axes fraction"), "va": "top"}
    style.note(axes, "reference", (ref_odds, 0.96), offset=(-6, 0), **at)
    for text, height in (("raised", 0.75), ("lowered", 0.22)):
        axes.text(0.01, height, text, transform=axes.transAxes, color=style.QUIET)
    axes.set_ylim(-4, 4)
    axes.set(xlabel="log-odds of the first token (nats)", ylabel="push on its log-odds")
    axes.legend(loc="lower right", handlelength=2.4)
    return figure


#: Whose colour and marker each order of KL and groups has, and its label.
ORDER_LOOKS = {
    "kl_then_normalise": style.line("forward", label="KL, then\nnormalise"),
    "normalise_then_kl": style.line("reverse", label="normalise,\nthen KL"),
    "kl_then_leave_one_out": style.line("exact", label="KL, then\nleave one out"),
}


def draw_effective_beta(table: pd.DataFrame) -> Figure:
    """Weight of the KL in units of the reward, over beta, against the spread of the rewards."""
    labels = {"xlabel": "standard deviation of the reward (log scale)"}
    labels |= {"ylabel": r"effective $\beta$ over $\beta$ (log scale)"}
    looks = {"kind": "order", "looks": ORDER_LOOKS, **style.LOG_LOG, **style.P10_TO_P90}
    return style.lines(table, "std", **looks, **labels)


# --- The claims it decides ---------------------------------------------------------------------

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
    """Accuracy of the recorded runs of 200 updates on a language model, means over seeds."""
    finals = recorded_table(RESULTS / "smollm2_cuda", "final.csv")
    finals = finals.groupby("variant")["accuracy"].mean()
    return {f"language_{name}": float(finals[name]) for name in variants}


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


# --- Another reference


def reference_reward(ref_logits: Tensor, other_logits: Tensor, sequences: Sequences) -> Tensor:
    r"""The reward [N] that a KL to another reference adds, per unit of beta.

    .. math:: \mathrm{KL}(\pi \Vert \mathrm{ref}') = \mathrm{KL}(\pi \Vert \mathrm{ref})
        - \mathbb{E}_{y \sim \pi} \log \frac{\mathrm{ref}'(y)}{\mathrm{ref}(y)}

    Args:
        ref_logits, other_logits: [states, vocab], the reference that is meant, and the other.
    """
    ref_logp, other_logp = (token_logp(x, sequences) for x in (ref_logits, other_logits))
    return (other_logp - ref_logp).sum(-1)


def other_reference_table(
    *, spread: float = 1.2, drift: float = 0.5, seed: int = 0
) -> pd.DataFrame:
    """For each reference that may be scored: the KL that is read at the start, where the policy is
    the reference that is meant, and how far from it the policy ends without any reward (nats an
    answer, both at temperature 1)."""
    sequences = enumerate_sequences(3, 4, eos=2)
    meant, moved = normal_draws((2, sequences.num_states, 3), seed=seed)
    meant, other = spread * meant, spread * meant + drift * moved
    rows = []
    for case, scored, temperature, end in (
        ("both divided by 1.5", meant / 1.5, 1.5, meant),
        ("policy divided by 1.5, reference not", meant, 1.5, meant * 1.5),
        ("policy divided by 0.6, reference not", meant, 0.6, meant * 0.6),
        ("another template", other, 1.0, other),
        ("the adapter as it was loaded, or merged", meant, 1.0, meant),
        ("the base model under a trained adapter", other, 1.0, other),
    ):
        start = sequence_kl(meant / temperature, scored, sequences).item()
        reached = sequence_kl(end, meant, sequences).item()
        assert sequence_kl(end / temperature, scored, sequences).abs() < 1e-12
        rows.append({"case": case, "start": start, "reached": reached})
    return pd.DataFrame(rows)
