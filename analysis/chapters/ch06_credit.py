"""Chapter 6: which token answers for the KL that comes later, over all sequences of a tree."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis import style
from analysis.chapters.ch09_advantages import group_moments
from analysis.chapters.claims import EXACT, Finding, band, claim, difference, judge, recorded
from analysis.chapters.policies import (
    Policies,
    flat_error,
    log_ratios,
    measured,
    moved_logits,
    normal_draws,
    random_tables,
)
from analysis.kl.credit import credit_moments, last_token_groups, tie_states, weighted_moments
from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import (
    GradientMoments,
    cosine,
    expected_gradient,
    relative_error,
    reverse_kl_gradient,
)
from analysis.kl.full_vocabulary import full_vocabulary_gradients, markov_kl, visited_kl
from analysis.kl.returns import reward_to_go
from analysis.kl.scores import expected_score
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    visited_kl_gradient,
)
from analysis.objectives.advantages import group_normalise
from analysis.objectives.gae import CRITICS, gae_kl_gradient
from analysis.objectives.losses import policy_loss

RAGGED = enumerate_sequences(3, 4, eos=2)  #: what claims enumerate
SPREAD = 1.2  #: standard deviation of the random logits there

# --- What the chapter computes -----------------------------------------------------------------


def gae_curves(
    tables: Policies, sequences: Sequences, lams: Iterable[float], gammas: Iterable[float]
) -> pd.DataFrame:
    """Error of k1 in the reward through GAE against the sequence KL's gradient, as quantiles.

    The scaled critic has no row where there is none.
    """
    exact = [sequence_kl_gradient(*pair, sequences) for pair in zip(*tables, strict=True)]
    rows = []
    for gamma, critic, lam in itertools.product(gammas, CRITICS, lams):
        if critic == "scaled" and (gamma == 0.0 or lam == 1.0):
            continue
        options = {"gamma": gamma, "critic": critic, "lam": lam}
        errors = [
            flat_error(gae_kl_gradient(*pair, sequences, **options), kl_gradient)
            for *pair, kl_gradient in zip(*tables, exact, strict=True)
        ]
        rows.append(options | band(torch.tensor(errors)))
    return pd.DataFrame(rows)


def length_curves(
    lengths: Iterable[int],
    vocab_size: int,
    count: int,
    *,
    drift: float,
    stickiness: float = 0.0,
    seed: int,
) -> pd.DataFrame:
    """Error and cosine of the best token-weighted loss as sequences grow, by dynamic programming.

    The policies see the last token only and share their parameters over positions. The policy is
    its reference moved by ``drift``; ``stickiness`` (nats) favours repeating the last token.
    """
    base, direction = normal_draws((2, count, vocab_size + 1, vocab_size), seed=seed)
    ref_logits = base + stickiness * torch.eye(vocab_size + 1, dtype=base.dtype)[:, :-1]
    rows = []
    for length in lengths:
        gradients = []
        for pair in zip(ref_logits + drift * direction, ref_logits, strict=True):
            gradients.append(
                [grad(markov_kl)(*pair, length, fixed_states=fixed) for fixed in (True, False)]
            )
        per_token, exact = (torch.stack(x).flatten(1) for x in zip(*gradients, strict=True))
        row = {"stickiness": stickiness, "length": length}
        row |= band(relative_error(per_token, exact))
        rows.append(row | {"cosine": cosine(per_token, exact).quantile(0.5).item()})
    return pd.DataFrame(rows)


def kl_estimates(tables: Policies, sequences: Sequences) -> pd.DataFrame:
    """Four estimators of a KL gradient on each pair: what the mean misses, and its noise.

    ``error`` is against the sequence KL's gradient; ``samples``, sequences until signal = noise.
    """
    rows = []
    for pair in zip(*tables, strict=True):
        exact = sequence_kl_gradient(*pair, sequences)
        for (vocabulary, credit), (mean, trace_var) in _estimators(*pair, sequences).items():
            samples = (trace_var / mean.square().sum()).item()
            row = {"vocabulary": vocabulary, "credit": credit}
            rows.append(row | {"error": flat_error(mean, exact), "samples": samples})
    return pd.DataFrame(rows)


def sampling_table(tables: Policies, sequences: Sequences) -> pd.DataFrame:
    """Medians of :func:`kl_estimates` over the pairs."""
    estimates = kl_estimates(tables, sequences)
    return estimates.groupby(["vocabulary", "credit"], sort=False, as_index=False).median()


def _estimators(
    logits: Tensor, ref_logits: Tensor, sequences: Sequences
) -> dict[tuple[str, str], GradientMoments]:
    """Moments by vocabulary (sampled or full) and credit (immediate or to go)."""
    costs = log_ratios(logits, ref_logits, sequences)
    probability = sequence_probability(logits, sequences)
    moments = {
        ("sampled", "immediate"): credit_moments(logits, sequences, costs),
        ("sampled", "to_go"): credit_moments(logits, sequences, reward_to_go(costs)),
    }
    for credit in ("immediate", "to_go"):
        gradients = full_vocabulary_gradients(logits, ref_logits, sequences, credit=credit)
        moments["full", credit] = weighted_moments(probability, gradients)
    return moments


# --- What it draws -----------------------------------------------------------------------------


#: Colour and label of what is no estimator: critics, objectives and weights.
LOOKS: dict[str, tuple[str, str]] = {
    "zero": ("#9A5B00", "no critic"),
    "exact": ("#111111", "discounted critic"),
    "scaled": ("#3D5A9E", "scaled critic"),
    "linear": ("#3D5A9E", "token sum"),
    "token_mean": ("#9A5B00", "token mean"),
    "geometric": ("#7A3E9D", "GSPO"),
    "product": ("#111111", "product"),
    "token": ("#3D5A9E", "one token"),
    "both factors, product": ("#111111", "both, product"),
    "both factors, per token": ("#3D5A9E", "both, per token"),
    "first factor dropped": ("#9A5B00", "first dropped"),
}


def draw_gae(curves: pd.DataFrame) -> Figure:
    """Error of the KL's gradient through GAE against lambda, one panel a discount."""
    gammas = sorted(curves.gamma.unique(), reverse=True)
    figure, axes = style.subplots(1, len(gammas), sharey=True, height=3.7)
    for panel, gamma in zip(axes, gammas, strict=True):
        for critic in ("zero", "exact", "scaled"):
            curve = curves[(curves.gamma == gamma) & (curves.critic == critic)]
            style.band(panel, curve, "lam", **look(critic), marker="o", markersize=5)
        panel.set(title=rf"$\gamma = {gamma:g}$", ylim=(-0.04, 1.4), xticks=[0, 0.5, 1])
    style.label_line_ends(axes[-1])
    figure.supxlabel(r"$\lambda$ of GAE", fontsize="medium")
    axes[0].set_ylabel("relative error of the\nexpected gradient")
    return figure


def draw_lengths(curves: pd.DataFrame) -> Figure:
    """Error of a token-weighted loss against the length, for a short and for a long memory."""
    figure, axes = style.subplots(height=3.9)
    looks = (("#3D5A9E", "mixes fast"), ("#9A5B00", "repeats\nitself"))
    for (colour, label), (_, curve) in zip(looks, curves.groupby("stickiness"), strict=True):
        style.band(axes, curve, "length", color=colour, marker="o", label=label)
    lengths = curves.length.unique()
    binary_scale(axes, lengths)
    axes.set_ylim(bottom=-0.02)
    axes.set_xlabel("tokens in a sequence (log scale)")
    axes.set_ylabel("relative error of the\nexpected gradient")
    style.label_line_ends(axes)
    return figure


def binary_scale(axes: Axes, ticks: Iterable[int]) -> None:
    """Powers of two along the axis, with these numbers written out."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), [str(n) for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def look(name: str) -> dict[str, str]:
    """Colour and label of :data:`LOOKS`, for ``Axes.plot``."""
    return dict(zip(("color", "label"), LOOKS[name], strict=True))


# --- The claims it decides ---------------------------------------------------------------------


BETA = 0.3


def _trees(count: int) -> list[tuple[Sequences, Policies, Tensor | None]]:
    """Fixed length, ragged, and shared parameters (only the last token is seen)."""
    fixed, ragged = enumerate_sequences(3, 4), enumerate_sequences(4, 3, eos=3)
    groups = last_token_groups(fixed, 3)
    shared = (moved_logits(torch.zeros(count, 4, 3).double(), 1.0, seed=k) for k in (5, 6))
    return [
        (fixed, random_tables(fixed, 3, count, spread=SPREAD, seed=0), None),
        (ragged, random_tables(ragged, 4, count, spread=SPREAD, seed=1), None),
        (fixed, Policies(*(x[:, groups] for x in shared)), groups),
    ]


@claim("S4-12")
def k1_in_reward_is_k2_as_loss() -> Finding:
    """Both expected gradients on three kinds of sequences, then stale, normalised and clipped.

    The route is the sum over sequences; the referee is autograd through the sequence KL.
    """
    found = pd.concat(
        measured(partial(_credit_errors, sequences=sequences, groups=groups), *tables)
        for sequences, tables, groups in _trees(count=20)
    )
    figures = {
        "immediate_gap": found.immediate_gap.max(),
        "k2_error": found.k2_error.median(),
        "to_go_error": found.to_go_error.max(),
        "stale_gap": _stale_gap(),
        "normalised_gap": _normalised_gap(),
        "clipped_share": _clipped_share(),
    }
    equivalent = max(figures["immediate_gap"], figures["to_go_error"]) < EXACT
    departs = max(v for k, v in figures.items() if k not in ("immediate_gap", "to_go_error"))
    return Finding(judge(equivalent and departs < EXACT, equivalent), figures)


def _credit_errors(
    logits: Tensor, ref_logits: Tensor, sequences: Sequences, groups: Tensor | None = None
) -> dict[str, float]:
    """Errors of k1 in the reward and k2 as a loss, by shared parameters if groups are given."""
    costs = log_ratios(logits, ref_logits, sequences)
    gradients = {
        "kl": sequence_kl_gradient(logits, ref_logits, sequences),
        "k2": expected_sequence_gradient(logits, ref_logits, sequences, estimator="k2"),
        "immediate": credit_moments(logits, sequences, costs).mean,
        "to_go": credit_moments(logits, sequences, reward_to_go(costs)).mean,
    }
    if groups is not None:
        gradients = {name: tie_states(x, groups) for name, x in gradients.items()}
    return {
        "immediate_gap": flat_error(gradients["immediate"], gradients["k2"]),
        "k2_error": flat_error(gradients["k2"], gradients["kl"]),
        "to_go_error": flat_error(gradients["to_go"], gradients["kl"]),
    }


def _stale_gap() -> float:
    """In the reward k1 keeps the sampler's log-ratio and a ratio weight; the k2 loss does not."""
    logits, ref, old = SPREAD * normal_draws((3, 20, 8), seed=4)
    tables = (logits, ref, logits + 0.3 * old)
    reward = expected_gradient(*tables, estimator="k1", placement="reward", weighting="detached")
    return relative_error(reward, expected_gradient(*tables, estimator="k2")).median().item()


def _normalised_gap() -> float:
    """The KL part of the gradient when the KL enters before group normalisation, against beta."""
    logits, ref, rewards = normal_draws((3, 4), seed=7)
    normalise = partial(group_normalise, eps=0.0)
    penalised = rewards - BETA * (logits.log_softmax(-1) - ref.log_softmax(-1))
    with_kl, without = (group_moments(logits, x, 3, normalise).mean for x in (penalised, rewards))
    return flat_error(with_kl - without, -BETA * reverse_kl_gradient(logits, ref))


def _clipped_share() -> float:
    """Share of sampled tokens whose KL in the reward is silenced by the PPO clip."""
    logits, ref, drift = normal_draws((3, 64), seed=8)
    logp, old_logp = logits.log_softmax(-1), (logits + 0.3 * drift).log_softmax(-1)
    output = policy_loss(
        logp[None],
        old_logp=old_logp[None],
        advantages=(ref.log_softmax(-1) - old_logp)[None],
        mask=torch.ones(1, 64, dtype=torch.bool),
        kind="grpo_off_policy",
    )
    return (old_logp.exp() * output.clipped[0]).sum().item()


@claim("S1-11")
def kl_in_the_reward() -> Finding:
    """The gradient of the printed token reward under five kinds of credit, against autograd.

    The referee differentiates the mean outcome minus beta times the sequence KL as one finite sum.
    """
    tables = random_tables(RAGGED, 3, 12, spread=SPREAD, seed=11)
    found = measured(_reward_errors, *tables)
    figures = {name: x.max() if x.max() < EXACT else x.median() for name, x in found.items()}
    right = max(figures["to_go_error"], figures["gae_exact_critic_error"]) < EXACT
    return Finding(judge(right and max(figures.values()) < EXACT, right), figures)


def _reward_errors(logits: Tensor, ref: Tensor) -> dict[str, float]:
    mask = RAGGED.mask
    last = mask & ~functional.pad(mask, (0, 1))[:, 1:]
    outcomes = moved_logits(torch.zeros(len(mask)).double(), 1.0, seed=12).unsqueeze(-1)
    kl_exact = sequence_kl_gradient(logits, ref, RAGGED)
    exact = credit_moments(logits, RAGGED, outcomes.expand(mask.shape)).mean - BETA * kl_exact
    costs = BETA * log_ratios(logits, ref, RAGGED)
    at_end, everywhere = (torch.where(at, outcomes, 0.0) - costs for at in (last, mask))
    credits = {
        "to_go_error": reward_to_go(at_end),
        "gamma_error": reward_to_go(at_end, gamma=0.95),
        "immediate_error": at_end,
        "outcome_everywhere_error": reward_to_go(everywhere),
    }
    errors = {
        name: flat_error(credit_moments(logits, RAGGED, credit).mean, exact)
        for name, credit in credits.items()
    }
    for critic in ("exact", "zero"):
        gradient = gae_kl_gradient(logits, ref, RAGGED, lam=0.95, critic=critic)
        errors[f"gae_{critic}_critic_error"] = flat_error(gradient, kl_exact)
    return errors


@claim("S3-13")
def on_policy_distillation() -> Finding:
    """The printed loss against the sequence KL, and the gradients that per-token scores give; and
    recorded: accuracy with credit to go minus immediate, from a sparse and an easy start."""
    tables = random_tables(RAGGED, 3, 20, spread=SPREAD, seed=21)
    estimates = kl_estimates(tables, RAGGED).query("vocabulary == 'sampled'")
    error = estimates.groupby("credit").error
    found = measured(_distillation_loss, *tables)
    figures = {
        "identity_error": found.identity.max(),
        "to_go_error": error.max()["to_go"],
        "immediate_error": error.median()["immediate"],
        "k2_error": found.k2.median(),
        "differentiated_share": found.differentiated.max(),
    }
    for start in ("easy", "sparse"):
        preset = "distillation_sparse" if start == "sparse" else "distillation"
        trained = difference(recorded(preset).finals, "opd_to_go", "opd_immediate", "own_accuracy")
        figures |= trained.figures(f"to_go_{start}")
    right = max(figures["identity_error"], figures["to_go_error"]) < EXACT
    return Finding(judge(right and figures["immediate_error"] < EXACT, right), figures)


def _distillation_loss(logits: Tensor, teacher: Tensor) -> dict[str, Tensor | float]:
    """The printed loss's value, its k2 form, and autograd through a sample's log-ratio."""
    exact = sequence_kl_gradient(logits, teacher, RAGGED)
    printed = state_visits(logits, RAGGED) @ reverse_kl(logits, teacher)
    k2 = expected_sequence_gradient(logits, teacher, RAGGED, estimator="k2")
    of_sample = credit_moments(logits, RAGGED, torch.ones(RAGGED.mask.shape).double()).mean
    return {
        "identity": (printed - sequence_kl(logits, teacher, RAGGED)).abs(),
        "k2": flat_error(k2, exact),
        "differentiated": of_sample.norm() / exact.norm(),
    }


@claim("S4-14")
def full_vocabulary() -> Finding:
    """The full-vocabulary loss at one state, over sequences, at stale states, and as printed."""
    tables = random_tables(RAGGED, 3, 20, spread=SPREAD, seed=31)
    found = measured(_full_vocabulary_errors, *tables, range(20))
    immediate = sampling_table(tables, RAGGED).query("credit == 'immediate'")
    immediate = immediate.set_index("vocabulary")
    figures = {
        "state_error": found.state.max(),
        "visited_error": found.visited.max(),
        "printed_stale_error": found.printed.median(),
        "sequence_error": immediate.error["full"],
        "stale_states_error": found.stale.median(),
        "noise": immediate.samples["full"],
        "noise_sampled": immediate.samples["sampled"],
    }
    one_state = max(figures["state_error"], figures["visited_error"]) < EXACT
    everything = max(figures[k] for k in figures if k != "noise_sampled") < EXACT
    return Finding(judge(everything, one_state), figures)


def _full_vocabulary_errors(logits: Tensor, ref: Tensor, seed: int) -> dict[str, float]:
    by_autograd = grad(lambda z: reverse_kl(z, ref).sum())(logits)
    old = moved_logits(logits, 0.3, seed=seed)
    visited = visited_kl_gradient(logits, ref, RAGGED)
    mean = _estimators(logits, ref, RAGGED)["full", "immediate"].mean
    return {
        "state": flat_error(reverse_kl_gradient(logits, ref), by_autograd),
        "printed": flat_error(_printed_gradient(logits, ref, old), by_autograd),
        "visited": flat_error(mean, visited),
        "stale": flat_error(visited_kl_gradient(logits, ref, RAGGED, old), visited),
    }


def _printed_gradient(logits: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """Equation 22 as printed: the sampler's probabilities and log-ratio, the policy's score."""
    old_logp = old.log_softmax(-1)
    return expected_score(logits, old_logp.exp() * (old_logp - ref.log_softmax(-1)))


@claim("S1-14")
def exact_kl_of_sequences() -> Finding:
    """Sequence KL over sequences, prefixes and Markov states, and the variance that is left."""
    sequences = enumerate_sequences(3, 5)
    groups = last_token_groups(sequences, 3)
    generator = torch.Generator().manual_seed(41)
    draw = partial(torch.randn, 2, 4, 3, generator=generator, dtype=torch.float64)

    def routes(shared: Tensor, shared_ref: Tensor) -> dict[str, Tensor]:
        logits, ref = shared[groups], shared_ref[groups]
        exact = sequence_kl(logits, ref, sequences)
        probability = sequence_probability(logits, sequences)
        full = visited_kl(logits, ref, sequences).sum(-1)
        k1 = log_ratios(logits, ref, sequences).sum(-1)
        variances = (probability @ (x - exact).square() for x in (full, k1))
        return {
            "prefix": (probability @ full - exact).abs(),
            "sampled": (probability @ k1 - exact).abs(),
            "markov": (markov_kl(shared, shared_ref, 5) - exact).abs(),
            "left": torch.div(*variances),
        }

    found = measured(routes, *zip(*(draw() for _ in range(10)), strict=True))
    figures = {f"{name}_error": found[name].max() for name in ("prefix", "sampled", "markov")}
    figures["variance_left"] = found.left.median()
    figures |= {"prefixes": float(sequences.num_states), "markov_states": float(groups.max() + 1)}
    sampling_works = figures["sampled_error"] < EXACT
    computed_exactly = max(figures["prefix_error"], figures["markov_error"]) < EXACT
    return Finding(judge(sampling_works and not computed_exactly, sampling_works), figures)


@claim("S4-3")
def state_distribution() -> Finding:
    """Total mass of the printed state distribution, and the actions drawn as printed."""
    logits = random_tables(RAGGED, 3, 1, spread=SPREAD, seed=51).logits[0]
    visits = state_visits(logits, RAGGED)
    mean_length = sequence_probability(logits, RAGGED) @ RAGGED.mask.double().sum(-1)
    policy = logits.softmax(-1)
    distance = (policy - policy[0]).abs().sum(-1) / 2  # pi(.|s) against pi(.|x), x the empty prefix
    figures = {
        "mass": visits.sum().item(),
        "mean_length": mean_length.item(),
        "length_error": (visits.sum() - mean_length).abs().item(),
        "action_distance": (visits @ distance / visits.sum()).item(),
    }
    is_distribution = abs(figures["mass"] - 1) < EXACT
    always = is_distribution and figures["action_distance"] < EXACT
    return Finding(judge(always, is_distribution), figures)
