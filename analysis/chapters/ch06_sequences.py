"""Chapter 6: which token answers for the KL that comes later, and what products of ratios cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor
from torch.func import grad, jacrev
from torch.nn import functional

from analysis.evidence.claims import EXACT, Finding, band, claim, error_of, judge, largest
from analysis.evidence.clip_slopes import EPSILON, clip_slopes, score_coefficients
from analysis.evidence.kl_estimates import kl_estimates
from analysis.evidence.policies import (
    RAGGED,
    SPREAD,
    Chains,
    Policies,
    by_token,
    flat_error,
    group_moments,
    log_ratios,
    measured,
    medians,
    moved_logits,
    normal_draws,
    ragged_tables,
    random_chains,
    random_returns,
    random_tables,
)
from analysis.evidence.recorded import difference, recorded
from kl_term import style
from kl_term.kl.credit import (
    advantage_table,
    credit_moments,
    last_token_groups,
    sample_gradients,
    tie_states,
    weighted_moments,
)
from kl_term.kl.divergences import chi_square, reverse_kl
from kl_term.kl.enumeration import (
    GradientMoments,
    cosine,
    expected_gradient,
    relative_error,
    reverse_kl_gradient,
)
from kl_term.kl.estimators import k1, k2, k3
from kl_term.kl.full_vocabulary import full_vocabulary_gradients, markov_kl, visited_kl
from kl_term.kl.importance import importance_ratio
from kl_term.kl.prefix import PRODUCT, markov_kl_moments
from kl_term.kl.products import (
    chi_square_bounds,
    geometric_spread,
    markov_product_variance,
    product_variance,
    sequence_ratio_spread,
)
from kl_term.kl.ratio_objectives import (
    performance_difference,
    ratio_objective,
    ratio_objective_gradient,
    token_surrogate,
)
from kl_term.kl.returns import reward_to_go
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    token_logp,
    visited_kl_gradient,
)
from kl_term.kl.term import KLTerm
from kl_term.kl.truncation import keep_top, masked_logits
from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.gae import CRITICS, gae_kl_gradient
from kl_term.objectives.losses import policy_loss

# --- Credit for the KL that comes later ------------------------------------------------------


def gae_curves(
    tables: Policies, sequences: Sequences, lams: Iterable[float], gammas: Iterable[float]
) -> pd.DataFrame:
    """Error of k1 in the reward through GAE against the sequence KL's gradient, as quantiles; no
    row where there is no scaled critic."""
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


def length_curves(chains: Chains, lengths: Iterable[int]) -> pd.DataFrame:
    """Error and cosine of the best token-weighted loss by length, with dynamic programming."""
    pairs = list(zip(*chains[:2], strict=True))
    rows = []
    for length in lengths:
        per_token, exact = (
            torch.stack([grad(markov_kl)(*pair, length, fixed_states=x) for pair in pairs])
            for x in (True, False)
        )
        per_token, exact = per_token.flatten(1), exact.flatten(1)
        row = {"length": length} | band(relative_error(per_token, exact))
        rows.append(row | {"cosine": cosine(per_token, exact).quantile(0.5).item()})
    return pd.DataFrame(rows)


# --- The attached prefix ratio, on trees -----------------------------------------------------

#: A per-token loss [N, T] of log-probs under policy, reference and sampler, the mask, and the KL
#: of each token's state.
TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _prefix(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    return importance_ratio(logp, old_logp, mask, level="prefix")


def _term(**fields: str) -> TokenLoss:
    term = KLTerm(**fields)
    return lambda p, r, o, m, _: term.loss(p, r, old_logp=o, mask=m)


#: What is compared, by cost and ratio. The first three and the fifth have the gradient of the
#: sequence KL, as have the two ways to put k1 in the reward.
LOSSES: dict[tuple[str, str], TokenLoss] = {
    ("k3", "prefix, attached"): _term(estimator="k3", weighting="attached", ratio="prefix"),
    ("k1", "prefix, attached"): _term(estimator="k1", weighting="attached", ratio="prefix"),
    ("full vocabulary", "tokens before, attached"): lambda p, _, o, m, state_kl: (
        _prefix(p, o, m) / importance_ratio(p, o, m) * state_kl
    ),
    ("k2", "prefix, attached"): _term(estimator="k2", weighting="attached", ratio="prefix"),
    ("growth of k2", "prefix, detached"): lambda p, r, o, m, _: (
        _prefix(p, o, m).detach()
        * k2(p.cumsum(-1), r.cumsum(-1)).diff(prepend=torch.zeros_like(p[:, :1]))
    ),
    ("k2", "prefix, detached"): _term(estimator="k2", weighting="detached", ratio="prefix"),
    ("k3", "token, attached"): _term(estimator="k3", weighting="attached"),
    ("k3", "token, gradient of prefix"): lambda p, r, o, m, _: (
        importance_ratio(p, o, m).detach() * _prefix(p, p.detach(), m) * k3(p, r)
    ),
    ("k1 reward to go", "prefix"): lambda p, r, o, m, _: (
        reward_to_go(_prefix(p, o, m) * k1(p, r)).detach() * p
    ),
    ("k1 reward to go", "whole"): lambda p, r, o, m, _: (
        (importance_ratio(p, o, m, level="sequence") * reward_to_go(k1(p, r))).detach() * p
    ),
}


#: The way to the same gradient that the noise of the others is compared with.
BASELINE = ("k1 reward to go", "prefix")


def loss_moments(
    logits: Tensor, ref_logits: Tensor, old_logits: Tensor, sequences: Sequences, loss: TokenLoss
) -> GradientMoments:
    """Mean and variance of one sequence's gradient of a loss summed over tokens, by autograd."""

    def per_sequence(at: Tensor) -> Tensor:
        logps = (token_logp(x, sequences) for x in (at, ref_logits, old_logits))
        state_kl = visited_kl(at, ref_logits, sequences)
        per_token = loss(*logps, sequences.mask, state_kl)
        return torch.where(sequences.mask, per_token, 0.0).sum(-1)

    probability = sequence_probability(old_logits, sequences)
    return weighted_moments(probability, jacrev(per_sequence)(logits))


def prefix_table(tables: Policies, samplers: Tensor, sequences: Sequences) -> pd.DataFrame:
    """What the mean of each loss misses of the sequence KL's gradient, and its noise.

    On-policy (``fresh``) and under the given samplers (``stale``). ``error`` is a median over the
    pairs; ``noise``, ``low`` and ``high`` are the median, the smallest and the largest variance of
    one sequence's gradient over that of ``BASELINE``.
    """
    rows = []
    for age, olds in (("fresh", tables.logits), ("stale", samplers)):
        for *pair, old in zip(*tables, olds, strict=True):
            exact = sequence_kl_gradient(*pair, sequences)
            moments = {key: loss_moments(*pair, old, sequences, x) for key, x in LOSSES.items()}
            for (cost, weight), (mean, spread) in moments.items():
                noise = (spread / moments[BASELINE].trace_var).item()
                rows.append((age, cost, weight, flat_error(mean, exact), noise))
    found = pd.DataFrame(rows, columns=["age", "cost", "weight", "error", "noise"])
    summary = found.groupby(["cost", "weight", "age"], sort=False).agg(
        error=("error", "median"),
        noise=("noise", "median"),
        low=("noise", "min"),
        high=("noise", "max"),
    )
    summary = summary.unstack("age", sort=False)
    summary.columns = ["_".join(names) for names in summary.columns]
    return summary.reset_index()


def cap_medians(
    tables: Policies, samplers: Tensor, sequences: Sequences, cap: float
) -> dict[str, float]:
    """Bias and noise of k3 under a capped prefix ratio, attached: medians over the pairs.

    ``clamp`` differentiates the cap, so that a capped token's ratio is a constant; ``rescaled``
    caps the value and keeps the gradient of the ratio's logarithm. In norms of the exact gradient;
    ``capped`` is the mean share of tokens over the cap, ``kept_is_closer`` the share of pairs on
    which ``rescaled`` has the smaller bias.
    """
    losses: dict[str, TokenLoss] = {
        "clamp": lambda p, r, o, m, _: _prefix(p, o, m).clamp(max=cap) * k3(p, r),
        "rescaled": lambda p, r, o, m, _: (
            _prefix(p, o, m).detach().clamp(max=cap) * _prefix(p, p.detach(), m) * k3(p, r)
        ),
    }

    def errors(logits: Tensor, ref_logits: Tensor, old_logits: Tensor) -> dict[str, Any]:
        mask, exact = sequences.mask, sequence_kl_gradient(logits, ref_logits, sequences)
        chance = sequence_probability(old_logits, sequences)
        over = _prefix(*(token_logp(x, sequences) for x in (logits, old_logits)), mask) > cap
        counts = (chance @ x.sum(-1).double() for x in (over & mask, mask))
        found: dict[str, Any] = {"capped": torch.div(*counts)}
        for kind, loss in losses.items():
            mean, spread = loss_moments(logits, ref_logits, old_logits, sequences, loss)
            found[f"bias_{kind}"] = flat_error(mean, exact)
            found[f"noise_{kind}"] = spread.sqrt() / exact.norm()
        return found

    found = measured(errors, *tables, samplers)
    closer = (found.bias_rescaled < found.bias_clamp).mean()
    return {**found.median(), "kept_is_closer": closer}


# --- The prefix ratio along chains of any length ---------------------------------------------


def noise_curves(chains: Chains, lengths: Sequence[int], *, baseline: bool = False) -> pd.DataFrame:
    """Sequences at which noise equals the exact gradient, for each way to get it, against their
    length: medians over chains. With ``baseline``, of one length."""
    moments = markov_kl_moments(*chains, max(lengths), baseline=baseline)
    pairs = list(zip(*chains[:2], strict=True))
    rows = []
    for length in lengths:
        signal = torch.stack([grad(markov_kl)(*pair, length).square().sum() for pair in pairs])
        for way, of_lengths in moments.items():
            samples = (of_lengths[length - 1] / signal - 1).median().item()
            rows.append({"length": length, "way": way, "samples": samples})
    return pd.DataFrame(rows)


def baseline_table(length: int, drifts: Iterable[float], **chain: int) -> pd.DataFrame:
    """Noise on-policy without and with the mean KL to go at a position as baseline: medians over
    chains; ``kl`` is that of a whole sequence (nats)."""
    tables = []
    for drift in drifts:
        chains = random_chains(drift=drift, **chain)
        kl = torch.stack([markov_kl(*pair, length) for pair in zip(*chains[:2], strict=True)])
        bare, centred = (noise_curves(chains, [length], baseline=x) for x in (False, True))
        tables.append(bare.assign(kl=kl.median().item(), baseline=centred.samples))
    return pd.concat(tables).sort_values("kl", kind="stable")


# --- Importance ratios: first orders, products and weights -----------------------------------

CLIPPED = ("gspo", "cispo", "grpo")

#: The weights of the table, in reading order, and what the figure calls them.
WEIGHTS = {
    "none": "no weight",
    "token": "token ratio",
    "prefix": "prefix ratio",
    "sequence": "whole ratio",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "grpo": "GRPO, clipped",
}


def spread_curves(logits: Tensor, old_logits: Tensor, lengths: Sequence[int]) -> pd.DataFrame:
    """Standard deviation of three weights of a sequence of independent tokens, by its length:
    ``product``, ``geometric`` (GSPO) and one ``token``."""
    length = torch.tensor(lengths, dtype=torch.float64)
    chi2 = chi_square(old_logits, logits)  # of the policy from the sampler
    mean, var = geometric_spread(logits, old_logits, length)
    return pd.DataFrame(
        {
            "length": lengths,
            "product": product_variance(chi2, length).sqrt(),
            "geometric": var.sqrt(),
            "geometric_mean": mean,
            "token": chi2.sqrt().expand_as(length),
        }
    )


def gradient_weights(
    logits: Tensor,
    old_logits: Tensor,
    sequences: Sequences,
    returns: Tensor,
    *,
    weight: str,
) -> Tensor:
    """[N, T] credit of each token: its importance weight, cut as its kind does, times the
    return."""
    logp, old_logp = (token_logp(x.detach(), sequences) for x in (logits, old_logits))
    per_token = by_token(returns, sequences)
    if weight == "none":
        return per_token
    if weight not in CLIPPED:
        return importance_ratio(logp, old_logp, sequences.mask, level=weight) * per_token
    options = {"old_logp": old_logp, "advantages": per_token, "mask": sequences.mask}
    return score_coefficients(logp, kind=weight, **options)


def weight_table(tables: Policies, sequences: Sequences, *, seed: int) -> pd.DataFrame:
    """Bias and noise of every weight against the gradient of the policy's own mean return.

    ``tables`` holds policies and their stale samplers; ``noise`` is the standard deviation of one
    sequence's gradient over the norm of the exact one.
    """
    rows = []
    for index, (logits, old) in enumerate(zip(*tables, strict=True)):
        returns = _centred_returns(old, sequences, seed=seed + index)
        exact = ratio_objective_gradient(logits, old, sequences, returns)
        for weight in WEIGHTS:
            credit = gradient_weights(logits, old, sequences, returns, weight=weight)
            mean, trace_var = credit_moments(logits, sequences, credit, old)
            noise = (trace_var.sqrt() / exact.norm()).item()
            rows.append({"weight": weight, "bias": flat_error(mean, exact), "noise": noise})
    return medians(rows, "weight")


def _centred_returns(old_logits: Tensor, sequences: Sequences, *, seed: int) -> Tensor:
    returns = random_returns(sequences, seed=seed)
    return returns - sequence_probability(old_logits, sequences) @ returns


def one_recurrent_state(vocab_size: int, stay: float) -> tuple[Tensor, Tensor]:
    """Policy and sampler [V + 1, V] of Markov tokens that differ after the first token only.

    The sampler is uniform; after the first token the policy repeats it with probability ``stay``.
    """
    sampler = torch.full((vocab_size + 1, vocab_size), 1 / vocab_size, dtype=torch.float64)
    policy = sampler.clone()
    policy[0] = (1 - stay) / (vocab_size - 1)
    policy[0, 0] = stay
    return policy.log(), sampler.log()


# --- What it draws ---------------------------------------------------------------------------

EXPECTED_ERROR = "relative error of the\nexpected gradient"

#: Colour and label of each critic of GAE, and of each memory of a policy.
CRITIC_LOOKS = {
    "zero": {"color": "#9A5B00", "marker": "o", "label": "no critic"},
    "exact": {"color": "#111111", "marker": "o", "label": "discounted critic"},
    "scaled": {"color": "#3D5A9E", "marker": "o", "label": "scaled critic"},
}
MEMORY_LOOKS = {
    0.0: {"color": "#3D5A9E", "marker": "o", "label": "mixes fast"},
    5.0: {"color": "#9A5B00", "marker": "o", "label": "repeats\nitself"},
}

#: Estimator that colours each way to the sequence KL's gradient, its line style and its label.
WAY_LOOKS: dict[str, dict[str, str]] = {
    way: {"color": style.COLOURS[colour], "linestyle": dashes, "label": label}
    for way, colour, dashes, label in (
        ("k1 prefix", "k1", "-", "$k_1$ prefix loss"),
        (PRODUCT, "none", ":", "reward, product"),
        ("k1 reward to go", "k1", "--", "$k_1$ reward"),
        ("k3 prefix", "k3", "-", "$k_3$ prefix loss"),
        ("full vocabulary prefix", "exact", "-", "full vocabulary"),
    )
}


def draw_gae(curves: pd.DataFrame) -> Figure:
    """Error of the KL's gradient through GAE against lambda, one panel a discount."""
    gammas = sorted(curves.gamma.unique(), reverse=True)
    panels = {"panel": "gamma", "titles": {g: rf"$\gamma = {g:g}$" for g in gammas}}
    panels |= {"ylim": (-0.04, 1.4), "xticks": [0, 0.5, 1], "height": 3.7}
    labels = {"xlabel": r"$\lambda$ of GAE", "ylabel": EXPECTED_ERROR}
    looks = {"kind": "critic", "looks": CRITIC_LOOKS}
    return style.lines(curves, "lam", **looks, **labels, **panels, **style.P10_TO_P90)


def draw_lengths(curves: pd.DataFrame) -> Figure:
    """Error of a token-weighted loss against the length, for a short and for a long memory."""
    labels = {"xlabel": "tokens in a sequence (log scale)", "ylabel": EXPECTED_ERROR}
    looks = {"kind": "stickiness", "looks": MEMORY_LOOKS, "xscale": "log", "ylim": (-0.02, None)}
    figure = style.lines(curves, "length", **looks, **labels, **style.P10_TO_P90)
    return _binary_scale(figure, curves.length.unique())


def draw_noise(curves: pd.DataFrame) -> Figure:
    """Sequences until signal equals noise against their length, fresh and stale."""
    fresh_product = (curves.staleness == 0) & (curves.way == PRODUCT)  # there the product is one
    shown = curves[(curves.length > 1) & ~fresh_product]
    titles = {0.0: "fresh samples", curves.staleness.max(): "stale samples"}
    looks = {"kind": "way", "looks": WAY_LOOKS, "panel": "staleness", "titles": titles}
    labels = {"xlabel": "tokens in a sequence (log scale)"}
    labels |= {"ylabel": "sequences until signal\nequals noise (log scale)"}
    figure = style.lines(shown, "length", "samples", **looks, **labels, **style.LOG_LOG, height=4.6)
    return _binary_scale(figure, (2, 16, 128, 512))


def _binary_scale(figure: Figure, ticks: Iterable[int]) -> Figure:
    """The figure with powers of two along the axis, and these numbers written out."""
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(ticks), [str(n) for n in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    return figure


SPREAD_LOOKS = {
    "product": {"color": "#111111", "label": "product"},
    "token": {"color": "#3D5A9E", "label": "one token"},
    "geometric": {"color": "#7A3E9D", "label": "GSPO"},
}


def draw_spreads(curves: pd.DataFrame) -> Figure:
    """Standard deviation of a sequence's weight against its length, both axes logarithmic."""
    shown = curves.melt("length", list(SPREAD_LOOKS)).query("value < 1e4")
    labels = {"xlabel": "tokens in a sequence (log scale)"}
    labels |= {"ylabel": "standard deviation of the\nweight (log scale)"}
    looks = {"kind": "variable", "looks": SPREAD_LOOKS}
    return style.lines(shown, "length", "value", **looks, **labels, **style.LOG_LOG)


def draw_weights(table: pd.DataFrame) -> Figure:
    """Bias and noise of seven off-policy weights, a row each."""
    columns = {
        "bias": "bias\n(relative error)",
        "noise": "noise of a sequence\n(norms of the gradient)",
    }
    shown = table.assign(label=table.weight.map(WEIGHTS))
    return style.lollipops(shown, "label", columns, colour="#3D5A9E")


# --- The claims it decides -------------------------------------------------------------------

BETA = 0.3


def _trees(count: int) -> list[tuple[Sequences, Policies, Tensor | None]]:
    """Fixed length, ragged, and shared parameters (only the last token is seen)."""
    fixed, ragged = enumerate_sequences(3, 4), enumerate_sequences(4, 3, eos=3)
    groups = last_token_groups(fixed, 3)
    shared = (normal_draws((count, 4, 3), seed=seed) for seed in (5, 6))
    return [
        (fixed, random_tables(fixed, 3, count, spread=SPREAD, seed=0), None),
        (ragged, random_tables(ragged, 4, count, spread=SPREAD, seed=1), None),
        (fixed, Policies(*(x[:, groups] for x in shared)), groups),
    ]


@claim("S4-12")
def k1_in_reward_is_k2_as_loss() -> Finding:
    """Both expected gradients on three kinds of sequences, then stale, normalised and clipped."""
    found = pd.concat(
        measured(partial(_credit_errors, sequences=sequences, groups=groups), *tables)
        for sequences, tables, groups in _trees(count=20)
    )
    logits, ref, drift = SPREAD * normal_draws((3, 20, 8), seed=4)
    stale = (logits, ref, logits + 0.3 * drift)  # in the reward k1 is the sampler's, and weighted
    reward = expected_gradient(*stale, estimator="k1", placement="reward", weighting="detached")
    figures = {
        "immediate_gap": found.immediate_gap.max(),
        "k2_error": found.k2_error.median(),
        "to_go_error": found.to_go_error.max(),
        "stale_gap": error_of(reward, expected_gradient(*stale, estimator="k2")),
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
    """The gradient of the printed token reward under five kinds of credit, against autograd."""
    found = measured(_reward_errors, *ragged_tables(12, seed=11))
    figures = {name: x.max() if x.max() < EXACT else x.median() for name, x in found.items()}
    right = max(figures["to_go_error"], figures["gae_exact_critic_error"]) < EXACT
    return Finding(judge(right and max(figures.values()) < EXACT, right), figures)


def _reward_errors(logits: Tensor, ref: Tensor) -> dict[str, float]:
    mask = RAGGED.mask
    last = mask & ~functional.pad(mask, (0, 1))[:, 1:]
    outcomes = normal_draws((len(mask), 1), seed=12)
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
    """The printed loss against the sequence KL, gradients of per-token scores, and recorded
    gains of credit to go."""
    tables = ragged_tables(20, seed=21)
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
    tables = ragged_tables(20, seed=31)
    found = measured(_full_vocabulary_errors, *tables, range(20))
    immediate = kl_estimates(tables, RAGGED).query("credit == 'immediate'")
    immediate = immediate.groupby("vocabulary").median(numeric_only=True)
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
    old_logp = old.log_softmax(-1)  # equation 22 as printed, with the policy's score
    printed = expected_score(logits, old_logp.exp() * (old_logp - ref.log_softmax(-1)))
    visited = visited_kl_gradient(logits, ref, RAGGED)
    gradients = full_vocabulary_gradients(logits, ref, RAGGED)
    mean = weighted_moments(sequence_probability(logits, RAGGED), gradients).mean
    return {
        "state": flat_error(reverse_kl_gradient(logits, ref), by_autograd),
        "printed": flat_error(printed, by_autograd),
        "visited": flat_error(mean, visited),
        "stale": flat_error(visited_kl_gradient(logits, ref, RAGGED, old), visited),
    }


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
    logits = ragged_tables(1, seed=51).logits[0]
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


SIZES = (0.005, 0.01, 0.02, 0.04)  #: steps over which an order is measured
ORDER = 0.1  #: how near a measured slope must come to a whole order


def _near(value: float, target: float) -> bool:
    return abs(value - target) < ORDER


def by_step(
    errors: Callable[..., Mapping[str, float | Tensor]],
    *tables: Iterable[Any],
    sizes: Iterable[float] = SIZES,
) -> pd.DataFrame:
    """What ``errors`` finds for each row of the tables after a step of each ``size``."""
    found = (measured(partial(errors, size=size), *tables).assign(size=size) for size in sizes)
    return pd.concat(found)


def order(found: pd.DataFrame, error: str) -> float:
    """Power of the step with which a median error vanishes: least squares over logarithms."""
    middle = found.groupby("size")[error].median()
    return float(np.polyfit(*np.log([middle.index, middle]), deg=1)[0])


@claim("S3-21")
def product_variance_grows() -> Finding:
    """Variance of products of ratios: in closed form, over every sequence, and where one state
    alone changes, met once or again and again."""
    generator = torch.Generator().manual_seed(71)
    base, direction = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    moved = base + 0.3 * direction
    chi2 = chi_square(base, moved)
    iid, first_only = [], []
    for length in (1, 2, 3, 4, 5):
        tree = enumerate_sequences(3, length)
        logits, old = (row.repeat(tree.num_states, 1) for row in (moved, base))
        listed = sequence_ratio_spread(logits, old, tree).var
        iid.append((listed / product_variance(chi2, length) - 1).abs().item())
        logits[1:] = base
        first_only.append(sequence_ratio_spread(logits, old, tree).var.item())
    logits, old = torch.randn(2, tree.num_states, 3, generator=generator, dtype=torch.float64)
    low, high = chi_square_bounds(logits, old, 5)
    listed = sequence_ratio_spread(logits, old, tree).var
    # mean log of exp(sum of rho - 1) over the product of rho, for a thousand tokens a little apart
    near, old = (base + 0.03 * direction).softmax(-1), base.softmax(-1)
    misprint = 1000 * (old * (near / old - 1 - (near / old).log())).sum()
    figures = {
        "iid_error": max(iid),
        "iid_variance_5": product_variance(chi2, 5).item(),
        "iid_variance_50": product_variance(chi2, 50).item(),
        "one_state_growth": abs(first_only[-1] / first_only[0] - 1),
        "one_of_ten_100": markov_product_variance(*one_recurrent_state(10, 0.4), 100).item(),
        "outside_bounds": float(not low <= listed <= high),
        "delta_log_gap_1000": misprint.item(),
    }
    exponential = figures["iid_error"] < EXACT and figures["outside_bounds"] == 0
    always = figures["one_state_growth"] > 1 and figures["delta_log_gap_1000"] < EXACT
    return Finding(judge(exponential and always, exponential), figures)


@claim("S3-23")
def gspo_weight() -> Finding:
    """GSPO's gradient identity, mean and spread of its weight beside the product's, and recorded
    runs."""
    old, direction = (x[0] for x in ragged_tables(1, seed=81))
    logits, lengths = old + 0.5 * direction, RAGGED.mask.sum(-1)

    def weights(at: Tensor) -> Tensor:
        return (log_ratios(at, old, RAGGED).sum(-1) / lengths).exp()

    credit = by_token(weights(logits) / lengths, RAGGED)
    by_hand = sample_gradients(logits, RAGGED, credit).flatten(1)

    def agreement(sampler: Tensor, direction: Tensor, seed: int) -> dict[str, Tensor]:
        returns = _centred_returns(sampler, RAGGED, seed=seed)
        exact, gspo = (
            ratio_objective_gradient(
                sampler + 0.2 * direction, sampler, RAGGED, returns, objective=name
            )
            for name in ("sequence", "geometric")
        )
        return {"cosine": cosine(gspo.flatten(), exact.flatten())}

    tables = ragged_tables(8, seed=83)
    spreads = spread_curves(old[1] + 0.3 * old[0], old[1], [10, 1000]).set_index("length")
    figures = {
        "identity_error": largest(relative_error(by_hand, jacrev(weights)(logits).flatten(1))),
        "std_10": spreads.geometric[10],
        "std_1000": spreads.geometric[1000],
        "product_std_1000": spreads["product"][1000],
        "mean_1000": spreads.geometric_mean[1000],
        "gradient_cosine": measured(agreement, *tables, range(8)).cosine.median(),
    }
    finals = recorded("objectives").finals
    for variant in ("gspo", "gspo_narrow"):
        figures |= difference(finals, variant, "grpo", "accuracy").figures(f"trained_{variant}")
    identity_and_spread = (
        figures["identity_error"] < EXACT
        and figures["std_1000"] < figures["std_10"] < figures["product_std_1000"]
    )
    comparable = _near(figures["std_10"] / figures["std_1000"], 1)
    return Finding(judge(identity_and_spread and comparable, identity_and_spread), figures)


@claim("S3-33")
def keep_sampling_mask() -> Finding:
    """Mean ratios and gradients under a top-p sampler, with and without its mask on the policy,
    against autograd through the mean return; and recorded runs."""
    old, direction, returns = normal_draws((3, 40, 16), seed=91)
    old, logits = 1.5 * old, 1.5 * old + 0.3 * direction
    keep = keep_top(old, top_p=0.9)
    sampler = masked_logits(old, keep).softmax(-1)
    masked = masked_logits(logits, keep)

    def estimated(policy_logits: Tensor) -> tuple[Tensor, Tensor]:
        weighted = sampler * torch.where(keep, policy_logits.softmax(-1) / sampler, 0.0)
        return weighted.sum(-1), expected_score(policy_logits, weighted * returns)

    exact = grad(lambda at: (at.softmax(-1) * returns).sum())
    masked_mean, masked_gradient = estimated(masked)
    plain_mean, plain_gradient = estimated(logits)
    figures = {
        "masked_mean_error": largest(masked_mean - 1),
        "masked_gradient_error": flat_error(masked_gradient, exact(masked)),
        "plain_mean": plain_mean.mean().item(),
        "plain_mean_100_tokens": plain_mean.log().mean().mul(100).exp().item(),
        "plain_gradient_error": flat_error(plain_gradient, exact(logits)),
        "full_policy_error": flat_error(masked_gradient, exact(logits)),
    }
    finals = recorded("mismatch").finals
    pair = ("top_p_keep_mask", "top_p_uncorrected", "own_accuracy")
    figures |= difference(finals, *pair).figures("trained_gain")
    unbiased = max(figures["masked_mean_error"], figures["masked_gradient_error"]) < EXACT
    return Finding(judge(unbiased and figures["full_policy_error"] < EXACT, unbiased), figures)


@claim("S3-34")
def token_objective_is_first_order() -> Finding:
    """Measured orders of the token objective's error: slopes over steps of four sizes."""
    old_logits = ragged_tables(8, seed=101).logits
    found = by_step(_objective_errors, old_logits, range(102, 110))
    old, returns = old_logits[0], random_returns(RAGGED, seed=103)
    at_sampler = {
        name: ratio_objective_gradient(old, old, RAGGED, returns, objective=name)
        for name in ("sequence", "token", "token_mean")
    }
    figures = {
        "gradient_error_at_sampler": flat_error(at_sampler["token"], at_sampler["sequence"]),
        "value_order": order(found, "value"),
        "gradient_order": order(found, "gradient"),
        "length_mean_error": flat_error(at_sampler["token_mean"], at_sampler["sequence"]),
        "length_mean_order": order(found, "mean_gradient"),
        "error_3_tokens": _token_error(3),
        "error_8_tokens": _token_error(8),
    }
    first_order = (
        figures["gradient_error_at_sampler"] < EXACT
        and _near(figures["value_order"], 2)
        and _near(figures["gradient_order"], 1)
    )
    everywhere = figures["length_mean_error"] < EXACT
    return Finding(judge(first_order and everywhere, first_order), figures)


def _objective_errors(
    old: Tensor, seed: int, size: float, sequences: Sequences = RAGGED
) -> dict[str, Tensor | float]:
    """By how much the linear objective leaves the exact one, and GRPO's gradient the exact one."""
    returns = random_returns(sequences, seed=seed)
    fixed = {"old_logits": old, "sequences": sequences, "returns": returns}
    logits = moved_logits(old, size, seed=seed + 1000)
    promised, gain = (
        ratio_objective(logits, **fixed, objective=name)
        - ratio_objective(old, **fixed, objective=name)
        for name in ("linear", "sequence")
    )
    exact, linear, mean = (
        ratio_objective_gradient(logits, **fixed, objective=name)
        for name in ("sequence", "linear", "token_mean")
    )
    return {
        "value": (promised - gain).abs(),
        "gradient": flat_error(linear, exact),
        "mean_gradient": flat_error(mean, exact),
    }


def _token_error(length: int) -> float:
    """Median relative error of the token gradient at one step size, by length."""
    sequences = enumerate_sequences(2, length)
    tables = random_tables(sequences, 2, 6, spread=SPREAD, seed=104)
    errors = partial(_objective_errors, size=0.2, sequences=sequences)
    return measured(errors, tables.logits, range(105, 111)).gradient.median()


@claim("S3-35")
def two_factors_of_the_ratio() -> Finding:
    """Each factor alone, the first one dropped, and both cancelling, on enumerated sequences."""
    tables = ragged_tables(8, seed=111)
    found = by_step(_factor_errors, *tables, range(8))
    middle = found.groupby("size").median()
    figures = {
        "identity_error": middle.identity.max(),
        "gap_order": order(found, "gap"),
        "stale_order": order(found, "stale"),
        "dropped_order": order(found, "dropped"),
        "dropped_over_kept": (middle.dropped / middle.gap).iloc[-1],
        "cancelled_error": middle.cancelled.max(),
    }
    identity = figures["identity_error"] < EXACT
    each_breaks = all(_near(figures[f"{name}_order"], 1) for name in ("gap", "stale"))
    whatever_the_other = figures["cancelled_error"] > EXACT
    return Finding(judge(identity and each_breaks and whatever_the_other, identity), figures)


def _factor_errors(old: Tensor, direction: Tensor, seed: int, size: float) -> dict[str, float]:
    """Errors of the token ratio, against the product of both factors, where a factor is not one."""
    returns = random_returns(RAGGED, seed=seed)
    moved, sampler = moved_logits(old, size, seed=seed), old + size * direction

    def gradient(logits: Tensor, sampler: Tensor, objective: str) -> Tensor:
        return ratio_objective_gradient(logits, sampler, RAGGED, returns, objective=objective)

    def error(*pair: Tensor) -> float:
        return flat_error(gradient(*pair, "token"), gradient(*pair, "sequence"))

    unweighted = credit_moments(old, RAGGED, by_token(returns, RAGGED), sampler).mean
    first, second, both = (
        log_ratios(*pair, RAGGED).sum(-1).exp()
        for pair in ((old, sampler), (moved, old), (moved, sampler))
    )
    return {
        "gap": error(old, sampler),
        "stale": error(moved, old),
        "cancelled": error(sampler, sampler),
        "dropped": flat_error(unweighted, gradient(old, sampler, "sequence")),
        "identity": largest(first * second / both - 1),
    }


@claim("S4-46")
def token_ratio_surrogate() -> Finding:
    """The surrogate with dropped state ratio against the exact improvement; beside it the
    performance-difference lemma, which keeps the ratio."""
    old_logits = ragged_tables(8, seed=121).logits
    small = by_step(_step_errors, old_logits, range(8))
    large = by_step(_step_errors, old_logits, range(8), sizes=[0.5])
    found = pd.concat([small, large])
    figures = {
        "lemma_error": found.lemma.max(),
        "one_token_error": found.one_token.max(),
        "value_order": order(small, "value"),
        "gradient_order": order(small, "gradient"),
        "gradient_error": large.gradient.median(),
        "largest_value_error": large.share.max(),
    }
    referee_agrees = max(figures["lemma_error"], figures["one_token_error"]) < EXACT
    biased = figures["gradient_error"] > EXACT and _near(figures["value_order"], 2)
    return Finding("fails" if referee_agrees and biased else "holds", figures)


def _step_errors(old: Tensor, seed: int, size: float) -> dict[str, float]:
    """Errors of the surrogate and the lemma after one step, and of a policy of one token."""
    returns, one_token = random_returns(RAGGED, seed=seed), enumerate_sequences(3, 1)
    logits = moved_logits(old, size, seed=seed)
    found = _improvement_errors(logits, old, RAGGED, returns)
    bandit = _improvement_errors(logits[:1], old[:1], one_token, returns[:3])
    return found | {"one_token": bandit["value"]}


def _improvement_errors(
    logits: Tensor, old: Tensor, sequences: Sequences, returns: Tensor
) -> dict[str, float]:
    """Errors of the gain that surrogate and lemma promise, and of the surrogate's gradient."""
    whole = by_token(returns, sequences)
    fixed = (old, sequences, advantage_table(whole, old, sequences))
    change = sequence_probability(logits, sequences) - sequence_probability(old, sequences)
    gain = change @ returns
    value = (token_surrogate(logits, *fixed) - gain).abs()
    gradient = grad(token_surrogate)(logits, *fixed)
    return {
        "value": value.item(),
        "share": (value / gain.abs()).item(),
        "lemma": (performance_difference(logits, *fixed) - gain).abs().item(),
        "gradient": flat_error(gradient, ratio_objective_gradient(logits, old, sequences, returns)),
    }


@claim("S4-xd")
def two_approximations() -> Finding:
    """Orders at which state distribution and advantages leave the sampler's, and their depth."""
    sequences = enumerate_sequences(2, 7)
    depth = torch.zeros(sequences.num_states, dtype=torch.long)
    depth[sequences.states] = torch.arange(7).expand(sequences.states.shape)
    old_logits = random_tables(sequences, 2, 8, spread=SPREAD, seed=131).logits

    def gaps(old: Tensor, seed: int, size: float) -> dict[str, Tensor]:
        returns = random_returns(sequences, seed=seed)
        both = (old, moved_logits(old, size, seed=seed))
        before, after = (state_visits(x, sequences) for x in both)
        whole = by_token(returns, sequences)
        advantages = [advantage_table(whole, x, sequences) for x in both]
        state = (after - before).abs()
        found = {f"depth_{n}": state[depth == n].sum() for n in (1, 6)}
        return found | {"state": state.sum(), "advantage": torch.dist(*advantages)}

    found = by_step(gaps, old_logits, range(8))
    figures = {
        "state_order": order(found, "state"),
        "advantage_order": order(found, "advantage"),
        "depth_growth": found.depth_6.sum() / found.depth_1.sum(),
    }
    first_order = all(_near(figures[f"{k}_order"], 1) for k in ("state", "advantage"))
    uniform = figures["depth_growth"] < 1 + ORDER
    return Finding(judge(first_order and uniform, first_order), figures)


@claim("S4-48")
def ppo_clip() -> Finding:
    """Slope of the clipped objective in all four corners, and where one ascent step ends."""
    good, bad = (clip_slopes(sign, (0.5, 1.5, 100.0)) for sign in (1.0, -1.0))
    start = torch.zeros(8, dtype=torch.float64)
    step = grad(lambda at: at.log_softmax(-1)[0])(start)  # of the ratio, where it is one
    ratio = ((start + 5.0 * step).log_softmax(-1) - start.log_softmax(-1))[0].exp().item()
    figures = {
        "good_above": good[1],
        "bad_below": bad[0],
        "good_below": good[0],
        "bad_above": bad[1],
        "bad_far_above": bad[2],
        "ratio_after_a_step": ratio,
        "pull_back": clip_slopes(1.0, [ratio])[0],
    }
    incentive_ends = figures["good_above"] == figures["bad_below"] == 0.0
    bounded = abs(figures["bad_far_above"]) <= 1.2 and figures["ratio_after_a_step"] <= 1.2
    return Finding(judge(incentive_ends and bounded, incentive_ends), figures)


@claim("S1-xt")
def ratio_alone_limits_nothing() -> Finding:
    """Slope of the unclipped ratio objective by the log-prob: a limit would make it fall as the
    ratio grows."""
    at_one, at_three = clip_slopes(1.0, (1.0, 3.0), epsilon=math.inf)
    clipped = clip_slopes(1.0, [3.0], epsilon=1.0)[0]  # to [0, 2]
    figures = {
        "slope_at_one": at_one,
        "slope_at_three": at_three,
        "slope_at_three_clipped": clipped,
    }
    return Finding("holds" if at_three <= at_one else "fails", figures)


@claim("S3-25")
def cispo_weight() -> Finding:
    """CISPO's gradient by autograd against the printed weight, the tokens that PPO's clip
    silences, the bias of the mean, and recorded runs."""
    old, direction = (x[0] for x in ragged_tables(1, seed=171))
    logits, returns = old + 0.5 * direction, random_returns(RAGGED, seed=172)
    cispo, ppo = (
        gradient_weights(logits, old, RAGGED, returns, weight=kind) for kind in ("cispo", "grpo")
    )
    ratio = log_ratios(logits, old, RAGGED).exp()
    printed = ratio.clamp(1 - EPSILON, 1 + EPSILON) * returns[:, None]
    exact = ratio_objective_gradient(logits, old, RAGGED, returns)
    visits = sequence_probability(old, RAGGED)[:, None] * RAGGED.mask
    figures = {
        "printed_error": largest((cispo - printed)[RAGGED.mask]),
        "silenced_share": (visits * (cispo == 0)).sum().item() / visits.sum().item(),
        "silenced_share_ppo": (visits * (ppo == 0)).sum().item() / visits.sum().item(),
        "off_policy_bias": flat_error(credit_moments(logits, RAGGED, cispo, old).mean, exact),
    }
    finals = recorded("objectives").finals
    for other in ("grpo", "reinforce"):
        gain = difference(finals, "cispo", other, "accuracy")
        figures |= gain.figures(f"trained_against_{other}")
    as_printed = figures["printed_error"] < EXACT
    return Finding(judge(as_printed and figures["silenced_share"] == 0.0, as_printed), figures)
