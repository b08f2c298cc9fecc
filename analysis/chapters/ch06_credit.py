"""Chapter 6: credit for the KL that comes later, and the attached prefix ratio, enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis import style
from analysis.chapters.claims import (
    EXACT,
    Finding,
    band,
    claim,
    difference,
    error_of,
    judge,
    recorded,
)
from analysis.chapters.policies import (
    Policies,
    flat_error,
    group_moments,
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
from analysis.kl.estimators import k1, k2, k3
from analysis.kl.full_vocabulary import full_vocabulary_gradients, markov_kl, visited_kl
from analysis.kl.importance import importance_ratio
from analysis.kl.prefix import markov_second_moments
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
    token_logp,
    visited_kl_gradient,
)
from analysis.kl.term import KLTerm
from analysis.objectives.advantages import group_normalise
from analysis.objectives.gae import CRITICS, gae_kl_gradient
from analysis.objectives.losses import policy_loss

RAGGED = enumerate_sequences(3, 4, eos=2)  #: what claims enumerate
SPREAD = 1.2  #: standard deviation of the random logits there

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

    Policies that see the last token only, ``drift`` away from their references; ``stickiness``
    (nats) favours repeating the last token.
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
    """Four estimators of a KL gradient on each pair: ``error`` against the sequence KL's
    gradient, and ``samples``, sequences until signal = noise."""
    rows = []
    for pair in zip(*tables, strict=True):
        exact = sequence_kl_gradient(*pair, sequences)
        for (vocabulary, credit), (mean, trace_var) in _estimators(*pair, sequences).items():
            samples = (trace_var / mean.square().sum()).item()
            row = {"vocabulary": vocabulary, "credit": credit}
            rows.append(row | {"error": flat_error(mean, exact), "samples": samples})
    return pd.DataFrame(rows)


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
    pair: Policies, old_logits: Tensor, sequences: Sequences, loss: TokenLoss
) -> GradientMoments:
    """Mean and variance of one sequence's gradient of a loss summed over tokens, by autograd."""
    with torch.enable_grad():
        leaf = pair.logits.detach().requires_grad_(True)
        logp, ref_logp, old_logp = (
            token_logp(x, sequences) for x in (leaf, pair.ref_logits, old_logits)
        )
        state_kl = visited_kl(leaf, pair.ref_logits, sequences)
        per_token = loss(logp, ref_logp, old_logp, sequences.mask, state_kl)
        per_sequence = torch.where(sequences.mask, per_token, 0.0).sum(-1)
        each = torch.eye(len(per_sequence), dtype=per_sequence.dtype)
        (gradients,) = torch.autograd.grad(per_sequence, leaf, each, is_grads_batched=True)
    return weighted_moments(sequence_probability(old_logits, sequences), gradients)


def prefix_table(tables: Policies, samplers: Tensor, sequences: Sequences) -> pd.DataFrame:
    """What the mean of each loss misses of the sequence KL's gradient, and its noise.

    On-policy (``fresh``) and under the given samplers (``stale``). ``error`` is a median over the
    pairs; ``noise``, ``low`` and ``high`` are the median, the smallest and the largest variance of
    one sequence's gradient over that of ``BASELINE``.
    """
    rows = []
    for age, olds in (("fresh", tables.logits), ("stale", samplers)):
        for logits, ref_logits, old in zip(*tables, olds, strict=True):
            pair = Policies(logits, ref_logits)
            exact = sequence_kl_gradient(*pair, sequences)
            moments = {key: loss_moments(pair, old, sequences, x) for key, x in LOSSES.items()}
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
        pair, mask = Policies(logits, ref_logits), sequences.mask
        exact = sequence_kl_gradient(*pair, sequences)
        chance = sequence_probability(old_logits, sequences)
        over = _prefix(*(token_logp(x, sequences) for x in (logits, old_logits)), mask) > cap
        counts = (chance @ x.sum(-1).double() for x in (over & mask, mask))
        found: dict[str, Any] = {"capped": torch.div(*counts)}
        for kind, loss in losses.items():
            mean, spread = loss_moments(pair, old_logits, sequences, loss)
            found[f"bias_{kind}"] = flat_error(mean, exact)
            found[f"noise_{kind}"] = spread.sqrt() / exact.norm()
        return found

    found = measured(errors, *tables, samplers)
    closer = (found.bias_rescaled < found.bias_clamp).mean()
    return {**found.median(), "kept_is_closer": closer}


# --- The prefix ratio along chains of any length ---------------------------------------------


class Chains(NamedTuple):
    """Policies that see the last token only, [N, V + 1, V]; the last row starts a sequence."""

    logits: Tensor
    ref_logits: Tensor
    old_logits: Tensor


#: Ways to the gradient of the sequence KL, and one more that needs stale samples to differ.
WAYS = ("k1 reward to go", "k1 prefix", "k3 prefix", "full vocabulary prefix")


PRODUCT = "k1 reward to go, whole product"


def random_chains(
    vocab_size: int, count: int, *, drift: float, staleness: float, seed: int
) -> Chains:
    """References of unit-variance logits, policies ``drift`` away, samplers ``staleness`` away."""
    ref_logits, moved, behind = normal_draws((3, count, vocab_size + 1, vocab_size), seed=seed)
    logits = ref_logits + drift * moved
    return Chains(logits, ref_logits, logits + staleness * behind)


def chain_samples(
    chains: Chains, lengths: Sequence[int], *, baseline: bool = False
) -> dict[str, Tensor]:
    """[lengths, N] sequences at which noise equals the exact gradient, for each way to get it.

    With ``baseline`` the mean KL to go at its position is taken off each token's coefficient, as
    the other answers of a group estimate it; that needs the length, so only the largest is done.
    """
    logits, ref_logits, old_logits = chains
    longest = max(lengths)
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    score = torch.eye(policy.shape[-1], dtype=policy.dtype) - policy.unsqueeze(-2)
    ratio = policy / old_logits.softmax(-1)
    state_kl = reverse_kl(logits, ref_logits).unsqueeze(-1)
    k3_cost = torch.expm1(-log_ratio) + log_ratio
    k1_own = log_ratio.unsqueeze(-1) * score
    full_own = reverse_kl_gradient(logits, ref_logits).unsqueeze(-2) / ratio.unsqueeze(-1)
    own = torch.stack([k1_own, k1_own + score, k1_own, full_own])
    future = torch.stack([log_ratio, log_ratio, k3_cost, state_kl / ratio])
    pairs = list(zip(logits, ref_logits, strict=True))
    wide = (x.expand(len(future), *x.shape) for x in (logits, old_logits))
    off = product_off = None
    if baseline:
        lengths = [longest]
        owed, own_kl = _mean_kls(policy, state_kl.squeeze(-1), longest)
        off = torch.stack([owed, owed, owed, owed - own_kl], dim=1)  # the vocabulary's own is known
        off = off.unsqueeze(-1).expand(*off.shape, policy.shape[-2])
        product_off = off[:, 0]
    second = markov_second_moments(*wide, own, future, longest, baseline=off)
    moments = dict(zip(WAYS, second.unbind(1), strict=True))
    moments[PRODUCT] = markov_second_moments(
        logits, old_logits, k1_own, log_ratio, longest, weight="sequence", baseline=product_off
    )
    signal = torch.stack(
        [
            torch.stack([grad(markov_kl)(*pair, length).square().sum() for pair in pairs])
            for length in lengths
        ]
    )
    return {way: x[torch.tensor(lengths) - 1] / signal - 1 for way, x in moments.items()}


def _mean_kls(policy: Tensor, state_kl: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """[length, N] each: the mean KL to go at a position, and the mean KL of its own token."""
    to_go = [torch.zeros_like(state_kl)]
    for _ in range(length):
        to_go.append(state_kl + (policy @ to_go[-1][..., :-1, None]).squeeze(-1))
    visits = torch.zeros_like(state_kl)
    visits[..., -1] = 1.0
    owed, own = [], []
    for left in reversed(to_go[1:]):
        owed.append((visits * left).sum(-1))
        own.append((visits * state_kl).sum(-1))
        visits = functional.pad((visits.unsqueeze(-1) * policy).sum(-2), (0, 1))
    return torch.stack(owed), torch.stack(own)


def noise_curves(
    lengths: Sequence[int],
    vocab_size: int,
    count: int,
    *,
    drift: float,
    staleness: Iterable[float],
    seed: int,
) -> pd.DataFrame:
    """Noise of each way to the sequence KL's gradient against the length: medians over chains."""
    curves = []
    for behind in staleness:
        chains = random_chains(vocab_size, count, drift=drift, staleness=behind, seed=seed)
        for way, samples in chain_samples(chains, lengths).items():
            columns = {"length": lengths, "samples": samples.median(-1).values}
            curves.append(pd.DataFrame(columns).assign(staleness=behind, way=way))
    return pd.concat(curves, ignore_index=True)


def baseline_table(
    length: int, vocab_size: int, count: int, *, drifts: Iterable[float], seed: int
) -> pd.DataFrame:
    """Noise on-policy without and with the mean KL to go at a position as baseline: medians over
    chains; ``kl`` is that of a whole sequence (nats)."""
    rows = []
    for drift in drifts:
        chains = random_chains(vocab_size, count, drift=drift, staleness=0.0, seed=seed)
        kl = torch.stack([markov_kl(*pair, length) for pair in zip(*chains[:2], strict=True)])
        bare, centred = (chain_samples(chains, [length], baseline=x) for x in (False, True))
        for way in WAYS:
            middle = (x.median().item() for x in (kl, bare[way], centred[way]))
            rows.append((way, *middle))
    table = pd.DataFrame(rows, columns=["way", "kl", "bare", "baseline"])
    return table.sort_values("kl", kind="stable")


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
    tables = random_tables(RAGGED, 3, 12, spread=SPREAD, seed=11)
    found = measured(_reward_errors, *tables)
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
    mean = _estimators(logits, ref, RAGGED)["full", "immediate"].mean
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
