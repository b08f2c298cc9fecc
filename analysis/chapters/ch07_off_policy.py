"""Chapter 7: what readings, weights, clips and masks do to the KL of stale samples, enumerated."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import (
    EXACT,
    Finding,
    band,
    claim,
    error_of,
    judge,
    largest,
    median,
    share,
)
from analysis.evidence.clip_slopes import score_coefficients
from analysis.evidence.kl_estimates import kl_estimates
from analysis.evidence.policies import (
    RAGGED,
    Policies,
    by_token,
    flat_error,
    log_ratios,
    measured,
    moved_logits,
    random_policies,
    random_tables,
)
from analysis.evidence.predictions import at_equal_kl
from analysis.evidence.recorded import difference, recorded
from analysis.evidence.stale_states import (
    NO_CLIP,
    StaleStates,
    merged_gradient,
    merged_kl_gradient,
    stale_states,
    standardised,
)
from analysis.evidence.stale_training import less_large_batches, weighted_at_equal_kl
from kl_term import style
from kl_term.kl.credit import credit_moments
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import (
    exact_kl_gradient,
    expected_gradient,
    relative_error,
    reverse_kl_gradient,
)
from kl_term.kl.estimators import k3
from kl_term.kl.importance import importance_ratio
from kl_term.kl.returns import reward_to_go
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    Sequences,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from kl_term.kl.surrogates import kl_loss
from kl_term.objectives.masking import off_policy_sequence_mask
from kl_term.objectives.merged import kl_coefficient_kept

# --- One state: readings and clips -----------------------------------------------------------


def clipped_kl_gradient(states: StaleStates, *, beta: float, epsilon: float) -> Tensor:
    """[N, V]: what the clip leaves of the KL part of the detached reading."""
    kept = _kept_coefficient(states, beta, epsilon)
    return expected_score(states.logits, states.old_logits.softmax(-1) * kept)


def silenced_mass(states: StaleStates, *, beta: float, epsilon: float) -> pd.DataFrame:
    """Share of the KL's force that the clip removes, for each state.

    A token's force is its probability times its coefficient. ``silenced`` is the share at clipped
    tokens, ``opposing`` the part of it that pulled against the token's move since it was sampled.
    """
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in states[:3])
    force = logp.exp() * (logp - ref_logp)
    lost = (_kept_coefficient(states, beta, epsilon) == 0) & (force != 0)
    against = lost & (force * (logp - old_logp) > 0)
    size = force.abs()
    return pd.DataFrame(
        {
            name: (torch.where(where, size, 0.0).sum(-1) / size.sum(-1)).numpy()
            for name, where in (("silenced", lost), ("opposing", against))
        }
    )


def _kept_coefficient(states: StaleStates, beta: float, epsilon: float) -> Tensor:
    logps = (x.log_softmax(-1) for x in states[:3])
    everywhere = torch.ones_like(states.logits, dtype=torch.bool)
    clip = {"beta": beta, "epsilon_low": epsilon, "epsilon_high": epsilon}
    return kl_coefficient_kept(*logps, states.advantages, everywhere, **clip)


def reading_curves(
    distances: Tensor, *, count: int, vocab_size: int, beta: float, epsilon: float, seed: int
) -> pd.DataFrame:
    """Relative error of the KL part against the reverse KL's gradient, as samples age.

    Three readings without clip, and ``clipped``: the detached one inside the clip, the policy
    moving along the advantage. Staleness is the median KL of sampler from policy (nats).
    """
    rows = []
    for distance in distances.tolist():
        for name in ("old", "detached", "attached", "clipped"):
            states = stale_states(
                count, vocab_size, distance, seed=seed, along_advantage=name == "clipped"
            )
            if name == "clipped":
                gradient = clipped_kl_gradient(states, beta=beta, epsilon=epsilon)
            else:
                gradient = merged_kl_gradient(states, reading=name)
            exact = exact_kl_gradient(states.logits, states.ref_logits, direction="reverse")
            error = relative_error(gradient, exact)
            rows.append({"name": name, "staleness": _staleness(states)} | band(error))
    return pd.DataFrame(rows)


def silenced_curves(
    distances: Tensor,
    betas: tuple[float, ...],
    *,
    count: int,
    vocab_size: int,
    epsilon: float,
    seed: int,
) -> pd.DataFrame:
    """Silenced and opposing share of the KL's force against staleness, moving either way."""
    rows = []
    for move in TITLES:
        for distance in distances.tolist():
            along = move == "along the advantage"
            states = stale_states(count, vocab_size, distance, seed=seed, along_advantage=along)
            for beta in betas:
                lost = silenced_mass(states, beta=beta, epsilon=epsilon)
                row = {"move": move, "beta": beta, "staleness": _staleness(states)}
                row |= {f"{k}_{q}": lost[k].quantile(q / 100) for k in lost for q in (10, 50, 90)}
                rows.append(row)
    return pd.DataFrame(rows)


def _staleness(states: StaleStates) -> float:
    return reverse_kl(states.old_logits, states.logits).median().item()


# --- Stale sequences: weights, credits and masks ---------------------------------------------


def weight_errors(
    tables: Policies, samplers: Tensor, sequences: Sequences, *, level: str, credit: str
) -> Tensor:
    """[M]: relative error of a ratio level and credit, on stale sequences, against each sequence
    KL's gradient."""
    errors = []
    for logits, ref_logits, old_logits in zip(*tables, samplers, strict=True):
        costs = log_ratios(logits, ref_logits, sequences)
        owed = reward_to_go(costs) if credit == "to_go" else costs
        logps = (token_logp(x, sequences) for x in (logits, old_logits))
        ratio = importance_ratio(*logps, sequences.mask, level=level)
        credits = torch.where(ratio == 0.0, 0.0, ratio * owed)
        found = credit_moments(logits, sequences, credits, old_logits).mean
        errors.append(flat_error(found, sequence_kl_gradient(logits, ref_logits, sequences)))
    return torch.tensor(errors)


def sequence_weight_curves(
    tables: Policies, sequences: Sequences, distances: Tensor, *, seed: int
) -> pd.DataFrame:
    """Errors of each weight and credit as samples age, by the median sequence KL of sampler from
    policy (nats)."""
    rows = []
    for distance in distances.tolist():
        samplers = moved_logits(tables.logits, distance, seed=seed)
        pairs = zip(samplers, tables.logits, strict=True)
        staleness = torch.stack([sequence_kl(*pair, sequences) for pair in pairs]).median().item()
        for level, credit in WEIGHT_LOOKS:
            errors = weight_errors(tables, samplers, sequences, level=level, credit=credit)
            rows.append({"level": level, "credit": credit, "staleness": staleness} | band(errors))
    return pd.DataFrame(rows)


def mask_cases(
    sequences: Sequences, vocab_size: int, count: int, distance: float, *, seed: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random tables [states, vocab], their samplers, and a standardised advantage [N] of each
    sequence."""
    olds, steps = random_tables(sequences, vocab_size, count, spread=1.0, seed=seed)
    rewards, _ = random_policies(count, len(sequences.tokens), spread=1.0, seed=seed + 1)
    return [
        (old + distance * step, old, standardised(reward, sequence_probability(old, sequences)))
        for old, step, reward in zip(olds, steps, rewards, strict=True)
    ]


def mask_rows(
    cases: list[tuple[Tensor, Tensor, Tensor]], sequences: Sequences, delta: float
) -> pd.DataFrame:
    """Bias and spread of the masked token-ratio policy gradient, a row a case.

    ``bias`` is squared and in units of the on-policy gradient's square, as is the ``variance``
    (trace) of one sequence; ``masked`` is the probability of a masked sequence.
    """

    def row(logits: Tensor, old_logits: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        logp, old_logp = token_logp(logits, sequences), token_logp(old_logits, sequences)
        kept = off_policy_sequence_mask(logp, old_logp, advantages, sequences.mask, delta=delta)
        whole = by_token(advantages, sequences)
        exact = credit_moments(logits, sequences, whole).mean
        ratio = importance_ratio(logp, old_logp, sequences.mask, level="token")
        credit = torch.where(kept, ratio * whole, 0.0)
        mean, variance = credit_moments(logits, sequences, credit, old_logits)
        unit = exact.square().sum()
        gone = sequences.mask.any(-1) & ~kept.any(-1)
        return {
            "bias": (mean - exact).square().sum() / unit,
            "variance": variance / unit,
            "masked": sequence_probability(old_logits, sequences) @ gone.to(unit.dtype),
        }

    return measured(row, *zip(*cases, strict=True))


# --- What it draws ---------------------------------------------------------------------------

STALENESS = r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)"

#: How each reading of the merged KL is drawn, and each weight and credit over sequences.
READING_LOOKS = {
    name: style.line(of, linestyle=dashes, label=label, markevery=4)
    for name, of, dashes, label in (
        ("old", "k1", "--", r"$\pi_{\mathrm{old}}$ inside"),
        ("detached", "k2", "-", "$\\pi_\\theta$ inside,\nno clip"),
        ("clipped", "reverse", "-", "$\\pi_\\theta$ inside,\nclipped"),
    )
}
WEIGHT_LOOKS = {
    (level, credit): {"color": style.COLOURS[of], "linestyle": dashes, "label": label}
    for level, credit, of, dashes, label in (
        ("token", "immediate", "none", "-", "token, own"),
        ("prefix", "immediate", "none", "--", "prefix, own"),
        ("token", "to_go", "forward", "-", "token, to go"),
        ("prefix", "to_go", "forward", "--", "prefix, to go"),
        ("sequence", "to_go", "exact", "-", "sequence, to go"),
    )
}

#: Title of each way in which the policy left its sampler.
TITLES = {"along the advantage": "moved along $A$", "random": "moved at random"}


def draw_readings(curves: pd.DataFrame) -> Figure:
    """Error of the merged KL's expected gradient against staleness, by reading."""
    labels = {"xlabel": STALENESS, "ylabel": "relative error of the\nKL's expected gradient"}
    looks = {"kind": "name", "looks": READING_LOOKS, "ylim": (-0.05, 1.25)}
    return style.lines(curves, "staleness", **looks, **labels, **style.P10_TO_P90)


def draw_silenced(curves: pd.DataFrame) -> Figure:
    """Share of the KL's force that the clip removes, by beta and by how the policy moved."""
    colours = [style.COLOURS[name] for name in ("reverse", "none", "forward")]
    of_beta = dict(zip(sorted(curves.beta.unique()), colours, strict=False))
    looks = {b: {"color": c, "label": rf"$\beta$ = {b:g}"} for b, c in of_beta.items()}
    panels = {"panel": "move", "titles": TITLES, "ylim": (-0.02, 1.02)}
    panels |= {"band_of": ("silenced_10", "silenced_90")}
    labels = {"xlabel": STALENESS, "ylabel": "share of the KL's force silenced"}
    shown = {"kind": "beta", "looks": looks} | panels | labels
    figure = style.lines(curves, "staleness", "silenced_50", **shown)
    smallest = curves[curves.beta == min(of_beta)]
    for axes, move in zip(figure.axes, TITLES, strict=True):
        rows = smallest[smallest.move == move]
        axes.plot(rows.staleness, rows.opposing_50, color=colours[0], linestyle=":")
    return figure


def draw_sequence_weights(curves: pd.DataFrame) -> Figure:
    """Error against the sequence KL's gradient as samples age, by ratio level and credit."""
    labels = {"xlabel": STALENESS, "ylabel": "relative error of the\nexpected gradient"}
    looks = {"kind": ["level", "credit"], "looks": WEIGHT_LOOKS, "ylim": (-0.03, None)}
    return style.lines(curves, "staleness", **looks, **labels, height=4.2)


def draw_masking(table: pd.DataFrame) -> Figure:
    """Mean squared error of the averaged gradient against the number of sequences."""
    figure, axes = style.subplots(height=3.7)
    count = np.logspace(0, 3.5, 60)
    colours = [style.COLOURS[name] for name in ("none", "forward", "minimax01", "reverse")]
    for row, colour in zip(table.itertuples(), colours, strict=False):
        label = "no mask" if np.isinf(row.delta) else rf"$\delta$ = {row.delta:g}"
        axes.loglog(count, row.bias + row.variance / count, color=colour, label=label)
    axes.set_xlabel("sequences averaged (log scale)")
    axes.set_ylabel("squared error over the squared\nexact gradient (log scale)")
    style.label_line_ends(axes)
    return figure


# --- The claims it decides -------------------------------------------------------------------

BETA, EPSILON = 0.04, 0.2
TRAINED_BETA = 0.3  #: of the recorded runs that are compared


def stale(distance: float = 0.5, **options) -> StaleStates:
    """The states of the claims; ``options`` as in :func:`stale_states`."""
    return stale_states(100, 16, distance, seed=70, **options)


def stale_trees() -> tuple[Policies, Tensor]:
    """Twenty pairs of tabular policies over ragged sequences, and their stale samplers."""
    tables = random_tables(RAGGED, 3, 20, spread=1.0, seed=71)
    return tables, moved_logits(tables.logits, 0.5, seed=72)


@claim("S3-29")
def weighted_k3() -> Finding:
    """V3.2's term, attached and detached: its gradients and its value against the KLs, at one
    state and over sequences; and recorded runs."""
    pair, old_logits = Policies(*stale()[:2]), stale().old_logits
    gradient = {
        w: expected_gradient(*pair, old_logits, estimator="k3", weighting=w)
        for w in ("none", "attached", "detached")
    }
    reverse, forward = (exact_kl_gradient(*pair, direction=d) for d in ("reverse", "forward"))
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in (*pair, old_logits))
    weighted = kl_loss(logp, ref_logp, old_logp=old_logp, estimator="k3", weighting="attached")
    value, plain = ((old_logp.exp() * x).sum(-1) for x in (weighted, k3(logp, ref_logp)))
    tables, samplers = stale_trees()
    value_errors = []
    for *at, of_sampler in zip(*tables, samplers, strict=True):
        logps = [token_logp(x, RAGGED) for x in (*at, of_sampler)]
        options = {"estimator": "k3", "weighting": "attached", "mask": RAGGED.mask}
        terms = kl_loss(*logps[:2], old_logp=logps[2], **options) * RAGGED.mask
        estimate = sequence_probability(of_sampler, RAGGED) @ terms.sum(-1)
        value_errors.append((estimate / sequence_kl(*at, RAGGED) - 1).abs())
    figures = {
        "value_error": largest(value - reverse_kl(*pair)),
        "value_error_unweighted": median((plain / reverse_kl(*pair) - 1).abs()),
        "attached_to_reverse": error_of(gradient["attached"], reverse, worst=True),
        "detached_to_forward": error_of(gradient["detached"], forward, worst=True),
        "detached_to_reverse": error_of(gradient["detached"], reverse),
        "unweighted_to_reverse": error_of(gradient["none"], reverse),
        "sequence_value_error": median(torch.stack(value_errors)),
    }
    finals = recorded("staleness").finals
    for metric in ("own_accuracy", "reverse_kl"):
        gain = difference(finals, "k3_attached_lag_16", "k3_lag_16", metric)
        figures |= gain.figures(f"trained_{metric}")
    ends = weighted_at_equal_kl()
    names = {"": "mean", "_low": "low", "_high": "high"}
    figures |= {f"trained_equal_kl{end}": ends[name] for end, name in names.items()}
    one_state = figures["value_error"] < EXACT and figures["attached_to_reverse"] < EXACT
    everywhere = figures["detached_to_reverse"] < EXACT and figures["sequence_value_error"] < EXACT
    return Finding(judge(one_state and everywhere, one_state), figures)


@claim("S3-31")
def masked_sequences() -> Finding:
    """The masking rule against its words token by token; bias and variance of the gradient, over
    every sequence of a tree; and recorded runs."""
    cases = mask_cases(RAGGED, 3, 40, 0.5, seed=73)
    rule_broken = 0
    for *tables, advantages in cases:
        logp, old_logp = (token_logp(x, RAGGED) for x in tables)
        kept = off_policy_sequence_mask(logp, old_logp, advantages, RAGGED.mask, delta=0.2)
        for row, advantage in enumerate(advantages.tolist()):
            gaps = (old_logp - logp)[row][RAGGED.mask[row]]
            masked = advantage < 0 and gaps.mean().item() > 0.2
            rule_broken += bool(kept[row].any()) == masked
    free, strict = (mask_rows(cases, RAGGED, delta) for delta in (math.inf, 0.2))
    used = strict.masked > 0
    ratio = (strict / free)[used].quantile(interpolation="lower")
    figures = {
        "rule_broken": float(rule_broken),
        "share_variance_lower": (strict.variance < free.variance)[used].mean(),
        "share_bias_higher": (strict.bias > free.bias)[used].mean(),
        "variance_ratio": ratio.variance,
        "bias_ratio": ratio.bias,
        "bias_limit": strict.bias[used].quantile(interpolation="lower"),
    }
    finals = recorded("stale_masking").finals
    saved = difference(finals, "reinforce_mask_0.1", "reinforce", "own_accuracy")
    beside_clip = difference(finals, "token_mask_0.1", "token", "own_accuracy")
    figures |= saved.figures("trained_unclipped") | beside_clip.figures("trained_clipped")
    always = figures["share_bias_higher"] == 0.0 and saved.above and beside_clip.above
    sometimes = rule_broken == 0 and figures["share_variance_lower"] > 0.5
    return Finding(judge(sometimes and always, sometimes), figures)


@claim("S4-25")
def unweighted_loss() -> Finding:
    """The printed loss and its siblings, fresh and stale, against the KL's gradient; and the sum
    over the vocabulary with either weight."""
    figures = {}
    for age, states in (("fresh", stale(0.0)), ("stale", stale())):
        exact = reverse_kl_gradient(states.logits, states.ref_logits)
        for name in ("k1", "k2", "k3"):
            gradient = expected_gradient(*states[:3], estimator=name)
            figures[f"{name}_{age}"] = error_of(gradient, exact)
    figures["full_vocabulary"] = error_of(full_vocabulary(states, "policy"), exact, worst=True)
    figures["full_vocabulary_old_weights"] = error_of(full_vocabulary(states, "sampler"), exact)
    valid = {name: figures[f"{name}_fresh"] < EXACT for name in ("k1", "k2", "k3")}
    stale_wrong = all(figures[f"{name}_stale"] > 0.05 for name in valid)
    as_printed = valid["k1"] and figures["full_vocabulary_old_weights"] < EXACT
    partly = valid["k2"] and figures["full_vocabulary"] < EXACT
    return Finding(judge(as_printed and stale_wrong, partly and stale_wrong), figures)


def full_vocabulary(states: StaleStates, weights: str) -> Tensor:
    """Gradient of the log-ratio summed over the vocabulary under the policy or the sampler."""

    def total(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        probability = logp.exp() if weights == "policy" else states.old_logits.softmax(-1)
        return (probability * (logp - states.ref_logits.log_softmax(-1))).sum()

    return grad(total)(states.logits)


@claim("S4-26")
def readings_of_the_merged_kl() -> Finding:
    """Each reading's gradient without clip against the reverse KL's, or the difference of two;
    and recorded runs."""
    states, unmoved = stale(), stale(0.0)
    exact, of_unmoved = (reverse_kl_gradient(x.logits, x.ref_logits) for x in (states, unmoved))
    drift = reverse_kl_gradient(states.logits, states.old_logits)
    detached, attached, old = (
        merged_kl_gradient(states, reading=r) for r in ("detached", "attached", "old")
    )
    old_fresh = merged_kl_gradient(unmoved, reading="old")
    figures = {
        "detached": error_of(detached, exact, worst=True),
        "attached": error_of(attached, exact, worst=True),
        "old": error_of(old, exact),
        "old_identity": error_of(old, exact - drift, worst=True),
        "old_fresh": error_of(old_fresh, of_unmoved, worst=True),
    }
    finals = recorded("three_ways").finals
    for reading in ("old", "attached"):
        pair = (f"merged_{reading}", "merged_detached", "accuracy")
        figures |= difference(finals, *pair, beta=TRAINED_BETA).figures(f"trained_{reading}")
    under_policy = max(figures["detached"], figures["attached"]) < EXACT
    under_sampler = figures["old"] < EXACT
    return Finding(judge(under_policy and under_sampler, under_policy), figures)


@claim("S4-27")
def clipped_merged_kl() -> Finding:
    """The merged objective with and without clip against reward minus KL, the share of the KL's
    force that is lost, and recorded runs."""
    states = stale(along_advantage=True)
    reward = expected_score(states.logits, states.logits.softmax(-1) * states.advantages)
    exact = reward - BETA * reverse_kl_gradient(states.logits, states.ref_logits)
    clip = {"epsilon_low": EPSILON, "epsilon_high": EPSILON}
    options = {"beta": BETA, "reading": "detached"}
    lost = silenced_mass(states, beta=BETA, epsilon=EPSILON).median()
    over_sequences = weight_errors(*stale_trees(), RAGGED, level="token", credit="immediate")
    figures = {
        "unclipped": error_of(merged_gradient(states, **options, **NO_CLIP), exact, worst=True),
        "clipped": error_of(merged_gradient(states, **options, **clip), exact),
        "clipped_kl_part": _way_errors()["off_policy_clipped"],
        "silenced": lost.silenced,
        "opposing": lost.opposing,
        "sequences_unclipped": median(over_sequences),
    }
    finals = recorded("three_ways").finals
    pair = ("merged_detached", "merged_detached_wide", "accuracy")
    figures |= difference(finals, *pair, beta=TRAINED_BETA).figures("trained_clip")
    unclipped = figures["unclipped"] < EXACT
    correct = figures["clipped"] < EXACT and figures["sequences_unclipped"] < EXACT
    return Finding(judge(unclipped and correct, unclipped), figures)


@claim("S4-xp")
def merging_like_terms() -> Finding:
    """The clipped surrogates of reward and KL, added, against that of their sum: token by token,
    split by whether the two pull the same way."""
    states = stale(along_advantage=True)
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in states[:3])
    pull = -(logp - ref_logp)  # beta = 1: the KL's advantage

    def clipped(advantages: Tensor) -> Tensor:
        """What multiplies the score under PPO's minimum."""
        options = {"old_logp": old_logp, "mask": torch.ones_like(logp, dtype=torch.bool)}
        clip = {"epsilon_low": EPSILON, "epsilon_high": EPSILON}
        return score_coefficients(logp, advantages=advantages, **options, **clip)

    added = clipped(states.advantages) + clipped(pull)
    gap = (added - clipped(states.advantages + pull)).abs() > EXACT
    together = states.advantages * pull > 0
    inside = ((logp - old_logp).exp() - 1).abs() <= EPSILON
    figures = {
        "differs_same_sign": share(gap[together]),
        "differs_inside_clip": share(gap[inside]),
        "differs_opposite_sign": share(gap[~together & ~inside]),
    }
    sometimes = figures["differs_same_sign"] == 0 and figures["differs_inside_clip"] == 0
    return Finding(judge(not bool(gap.any()), sometimes), figures)


@claim("S4-40")
def three_implementations() -> Finding:
    """The three ways to have a KL, and credit to go, against the exact gradients: one token,
    then ragged sequences."""
    estimates = kl_estimates(stale_trees()[0], RAGGED).groupby(["vocabulary", "credit"])
    errors = estimates.error.quantile(interpolation="lower")
    figures = _way_errors() | {
        "sequence_own_credit": errors["sampled", "immediate"],
        "sequence_to_go": errors["sampled", "to_go"],
        "sequence_full_vocabulary": errors["full", "immediate"],
    }
    one_token = ("full_vocabulary", "on_policy_k2", "off_policy_unclipped")
    sometimes = max(figures[name] for name in one_token) < EXACT
    others = ("off_policy_clipped", "sequence_own_credit", "sequence_full_vocabulary")
    always = max(figures[name] for name in others) < EXACT
    return Finding(judge(sometimes and always, sometimes), figures)


def _way_errors() -> dict[str, float]:
    """Error of each way's KL gradient for one token a response: the largest, clipped the median."""
    states, on_policy = stale(along_advantage=True), stale(0.0)
    exact = reverse_kl_gradient(states.logits, states.ref_logits)
    of_on_policy = reverse_kl_gradient(on_policy.logits, on_policy.ref_logits)
    k2 = expected_gradient(*on_policy[:2], estimator="k2")
    unclipped = merged_kl_gradient(states, reading="detached")
    clipped = clipped_kl_gradient(states, beta=BETA, epsilon=EPSILON)
    return {
        "full_vocabulary": error_of(full_vocabulary(states, "policy"), exact, worst=True),
        "on_policy_k2": error_of(k2, of_on_policy, worst=True),
        "off_policy_unclipped": error_of(unclipped, exact, worst=True),
        "off_policy_clipped": error_of(clipped, exact),
    }


@claim("S4-xo")
def best_way_overall() -> Finding:
    """The error of each way's KL gradient; and recorded accuracy of the merged KL less that of
    the full vocabulary at equal KLs, and less that of k2 on large fresh batches at equal
    cost."""
    figures = _way_errors()
    del figures["off_policy_unclipped"]
    bands = {}
    for reading in ("old", "detached"):
        bands[f"{reading}_to_full"] = at_equal_kl("three_ways", f"merged_{reading}", "exact_loss")
        for cost in ("completions", "passes"):
            less = less_large_batches(f"merged_{reading}", cost)
            bands[f"{reading}_to_large_at_{cost}"] = less
    for name, interval in bands.items():
        figures |= interval.figures(name)
    ahead = [interval.above for interval in bands.values()]
    return Finding(judge(all(ahead), any(ahead)), figures)
