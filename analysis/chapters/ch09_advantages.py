"""Chapter 9: what the group does to the reward, ``1/|o|`` to a KL loss, and steps to a credit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis.evidence.claims import EXACT, Finding, band, claim, judge, largest
from analysis.evidence.clip_slopes import clip_slopes
from analysis.evidence.length_weights import DIRECTIONS, weight_errors
from analysis.evidence.policies import (
    RAGGED,
    SPREAD,
    Policies,
    all_groups,
    by_token,
    flat_error,
    group_moments,
    measured,
    moved_logits,
    random_returns,
    random_tables,
)
from analysis.evidence.reasoning import (
    Reasoning,
    fixed_length_chain,
    open_length_chain,
    prm_scores,
    state_values,
)
from analysis.evidence.recorded import difference, recorded
from analysis.records import estimator_tail
from analysis.studies.presets.language import smollm2_short
from kl_term import style
from kl_term.kl.credit import credit_moments
from kl_term.kl.enumeration import cosine
from kl_term.kl.estimators import k3
from kl_term.kl.ratio_objectives import ratio_objective_gradient
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
from kl_term.kl.surrogates import kl_loss
from kl_term.objectives.advantages import (
    group_centre,
    group_normalise,
    leave_one_out,
    process_supervision,
)
from kl_term.objectives.aggregation import aggregate, token_weights
from kl_term.objectives.difficulty import arcsine_objective, difficulty_weight, normalised_objective
from kl_term.objectives.filtering import informative_groups, kept_fraction, repeats
from kl_term.objectives.guidance import current_segment
from kl_term.objectives.lengths import length_penalty, relative_length_reward
from kl_term.objectives.losses import policy_loss
from kl_term.objectives.process import (
    PATH_SCORES,
    early_stop,
    falls_in_a_row,
    marginal_rewards,
    path_score,
)

# --- What the chapter computes -----------------------------------------------------------------

Advantage = Callable[[Tensor], Tensor]

#: Advantages by the name the chapter calls them.
ADVANTAGES: dict[str, Advantage] = {
    "reward itself": lambda rewards: rewards,
    "minus the mean": group_centre,
    "minus the others' mean": leave_one_out,
    "normalised": group_normalise,
}


def random_bandits(count: int, vocab_size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """One-step problems: logits and rewards in [0, 1], both [count, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(count, vocab_size, generator=generator, dtype=torch.float64)
    return logits, torch.rand(count, vocab_size, generator=generator, dtype=torch.float64)


def baseline_table(logits: Tensor, rewards: Tensor, group_sizes: Iterable[int]) -> pd.DataFrame:
    """Each advantage's expected gradient against the true one, over several problems.

    ``factor`` is the length along the true gradient (median), ``factor_spread`` its range over the
    problems, ``rest`` the largest entry of what it leaves, ``angle`` the largest angle to the true
    gradient (degrees), ``noise`` the median number of groups for a signal-to-noise ratio of one
    over the reward's own.
    """
    exact = expected_score(logits, logits.softmax(-1) * rewards)
    rows = []
    for size in group_sizes:
        noises = []
        for name, advantage in ADVANTAGES.items():
            moments = [
                group_moments(*problem, size, advantage)
                for problem in zip(logits, rewards, strict=True)
            ]
            mean, trace_var = (torch.stack(x) for x in zip(*moments, strict=True))
            noises.append(trace_var / mean.square().sum(-1))
            factor = (mean * exact).sum(-1) / exact.square().sum(-1)
            row = {
                "factor": factor.median(),
                "factor_spread": factor.max() - factor.min(),
                "rest": (mean - factor.unsqueeze(-1) * exact).abs().max(),
                "angle": cosine(mean, exact).clamp(-1, 1).acos().rad2deg().max(),
                "noise": (noises[-1] / noises[0]).median(),
            }
            row = {column: value.item() for column, value in row.items()}
            rows.append({"advantage": name, "group_size": size} | row)
    return pd.DataFrame(rows)


def difficulty_curves(success: Tensor, group_sizes: Iterable[int], *, eps: float) -> pd.DataFrame:
    """Weight of a prompt and objective ascended, by group size; ``inf`` marks the limit."""
    laws = (difficulty_weight, normalised_objective)
    curves = {size: [of(success, size, ddof=0, eps=eps) for of in laws] for size in group_sizes}
    curves[math.inf] = [1 / (success * (1 - success)).sqrt(), arcsine_objective(success)]
    return pd.concat(
        [
            pd.DataFrame({"group_size": n, "success": success, "weight": w, "objective": o})
            for n, (w, o) in curves.items()
        ],
        ignore_index=True,
    )


#: Groups of four whose rewards differ by noise, by a little, and by right and wrong.
NOISE_GROUPS = {
    "rounding": [0.99999, 1.00001, 0.99999, 1.00001],
    "a reward model's noise": [0.70, 0.71, 0.69, 0.70],
    "right and wrong": [0.0, 1.0, 0.0, 1.0],
}


def amplification_table() -> pd.DataFrame:
    """Largest advantage of each group under each way of dividing."""
    divisions = {
        "std": partial(group_normalise, eps=0.0),
        "std, ddof 0": partial(group_normalise, eps=0.0, ddof=0),
        "std + 1e-4": group_normalise,
        "clipped at 0.1": partial(group_normalise, eps=0.0, std_min=0.1),
        "nothing": group_centre,
    }
    groups = torch.tensor(list(NOISE_GROUPS.values()), dtype=torch.float64)
    largest_of = {how: divide(groups).abs().amax(-1) for how, divide in divisions.items()}
    return pd.DataFrame({"group": list(NOISE_GROUPS)} | largest_of)


def textbook_normalise(rewards: Tensor, *, eps: float) -> Tensor:
    """The formula as printed, in the dtype it is given: what an implementation must not do."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + eps)


def batch_curves(tables: Policies, sequences: Sequences, sizes: Iterable[int]) -> pd.DataFrame:
    """:func:`weight_errors` by the number of completions that are averaged together: quantiles."""
    rows = []
    for size in sizes:
        for estimator, errors in weight_errors(tables, sequences, completions=size).items():
            quantiles = band(torch.tensor(errors))
            rows.append({"completions": size, "estimator": estimator, **quantiles})
    return pd.DataFrame(rows)


def recorded_spread() -> pd.DataFrame:
    """How much :math:`1/|o|` varies within a prompt on the recorded language model.

    ``variation`` is its deviation within prompts over its mean; ``equal_kl`` the KL of a completion
    (nats) at which the push of k1 is as large as the pull of k2; ``kl`` the recorded one.
    """
    group_size, rows = smollm2_short().config.group_size, []
    for variant, after in estimator_tail.recorded().items():
        log_ratio = after.dump["logp"] - after.dump["ref_logp"]
        by_row = log_ratio.groupby(after.dump["sequence"])
        weight = 1 / by_row.size()
        within = weight.groupby(weight.index // group_size).var().mean()
        variation = math.sqrt(within) / weight.mean()
        rows.append((variant, variation, variation**2 / 2, by_row.sum().mean()))
    return pd.DataFrame(rows, columns=["variant", "variation", "equal_kl", "kl"])


def credit_gradient(problem: Reasoning, credit: Tensor) -> Tensor:
    """[states, vocab]: expected policy gradient of a credit [N, T]."""
    return credit_moments(problem.logits, problem.sequences, credit).mean


def credit_variants(problem: Reasoning, *, seed: int) -> dict[str, Tensor]:
    """Credit [N, T] of every token under outcome and process rewards."""
    values = state_values(problem)
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(values.shape, generator=generator, dtype=values.dtype)
    whole = by_token(problem.outcome, problem.sequences)
    variants = {"outcome": whole, "outcome minus its mean": whole - values[0]}
    for name, table in (("perfect", values), ("random", random)):
        rewards = marginal_rewards(prm_scores(problem, table, problem.outcome), table[0].item())
        rewards = torch.where(problem.sequences.mask, rewards, 0.0)
        variants[f"{name} PRM, to go"] = reward_to_go(rewards)
        variants[f"{name} PRM, immediate"] = rewards
    return variants


def credit_table(problem: Reasoning, *, seed: int) -> pd.DataFrame:
    """Bias and variance of the policy gradient under each credit, enumerated.

    ``bias`` is relative to the gradient of the success probability; ``variance`` is one path's
    trace over the outcome's.
    """
    moments = {
        name: credit_moments(problem.logits, problem.sequences, credit)
        for name, credit in credit_variants(problem, seed=seed).items()
    }
    exact, outcome_var = moments["outcome"]
    rows = [
        (name, flat_error(mean, exact), (trace_var / outcome_var).item())
        for name, (mean, trace_var) in moments.items()
    ]
    return pd.DataFrame(rows, columns=["credit", "bias", "variance"])


def choice_accuracy(scores: Tensor, probability: Tensor, outcome: Tensor, number: int) -> float:
    """Probability that the best-scored of ``number`` independent paths is a solved one, ties
    broken evenly."""
    _, level = scores.unique(return_inverse=True)
    mass = torch.bincount(level, weights=probability)
    solved = torch.bincount(level, weights=probability * outcome)
    below = functional.pad(mass.cumsum(0), (1, 0))
    best = below[1:] ** number - below[:-1] ** number
    return (best * solved / mass).sum().item()


def best_of_n_curves(
    problem: Reasoning, numbers: Iterable[int], *, noise: float, seeds: int
) -> pd.DataFrame:
    """Exact accuracy of choosing by each path score, a mean over PRMs: the true value of each
    prefix with Gaussian noise on its logit."""
    values = state_values(problem).clamp(0.02, 0.98)
    final = problem.outcome.clamp(0.02, 0.98)
    probability = sequence_probability(problem.logits, problem.sequences)
    rows = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        table, ends = (
            (x.logit() + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sigmoid()
            for x in (values, final)
        )
        scores = prm_scores(problem, table, ends)
        for how in PATH_SCORES:
            of_path = path_score(scores, problem.sequences.mask, how)
            rows += [
                (how, number, choice_accuracy(of_path, probability, problem.outcome, number))
                for number in numbers
            ]
    table = pd.DataFrame(rows, columns=["how", "number", "accuracy"])
    return table.groupby(["how", "number"], sort=False, as_index=False).mean()


def stopping_table(
    problem: Reasoning, patiences: Iterable[int], *, noise: float, seed: int
) -> pd.DataFrame:
    """What early stopping saves and loses, enumerated, by patience; the last row never stops.

    Expected steps, ``tokens``; the share ``lost`` of stopped paths that would have been solved; and
    solved paths per thousand steps, ``rate``, when stopped paths are resampled.
    """
    table = moved_logits(state_values(problem), noise, seed=seed)
    scores = prm_scores(problem, table, problem.outcome)
    steps = problem.sequences.mask.shape[-1]
    inner = scores[:, :-1]  # after the last step there is nothing left to stop
    probability = sequence_probability(problem.logits, problem.sequences)
    rows = []
    for patience in [*patiences, steps]:
        options = {"patience": patience, "initial": table[0].item()}
        stopped = falls_in_a_row(inner, **options).any(-1)
        taken = torch.where(stopped, early_stop(inner, **options), steps).double()
        share, tokens = (probability @ x for x in (stopped.double(), taken))
        lost, solved = (probability @ (x * problem.outcome) for x in (stopped, ~stopped))
        row = {
            "tokens": tokens,
            "lost": lost / share if share > 0 else lost,
            "solved": solved,
            "rate": 1000 * solved / tokens,
        }
        rows.append({"patience": patience} | {name: x.item() for name, x in row.items()})
    return pd.DataFrame(rows)


# --- What it draws -----------------------------------------------------------------------------

#: From light to dark as a number grows; the last is the limit.
SHADES = ("#5E9BD1", "#2F74B5", "#1B5590", "#0E3560", "#111111")


def draw_difficulty(curves: pd.DataFrame) -> Figure:
    """Weight of a prompt by how often it is solved, and the objective ascended instead of that."""
    figure, (weight, objective) = style.subplots(1, 2, height=3.9)
    for shade, (size, curve) in zip(SHADES, curves.groupby("group_size"), strict=False):
        look = {
            "color": SHADES[-1] if math.isinf(size) else shade,
            "linestyle": "--" if math.isinf(size) else "-",
            "label": "$G \\to \\infty$" if math.isinf(size) else f"$G = {size:.0f}$",
        }
        weight.plot(curve.success, curve.weight, **look)
        objective.plot(curve.success, curve.objective / curve.objective.max(), **look)
    weight.set(ylim=(0, 6), title="weight of a prompt")
    style.guide(weight, y=1)
    weight.legend(loc="upper center", labelspacing=0.25, handlelength=1.6)
    objective.plot([0, 1], [0, 1], color=style.QUIET, linewidth=1, linestyle=":")
    objective.set(title="objective", ylabel="share of its value at $p = 1$")
    figure.supxlabel("probability $p$ that an answer is right", fontsize="medium")
    return figure


def draw_aggregation(curves: pd.DataFrame) -> Figure:
    """Share of a KL loss's gradient that is no KL's, by the completions averaged together."""
    looks = {
        estimator: style.line(estimator, label=f"{style.LABELS[estimator]} against the {kl} KL")
        for estimator, kl in DIRECTIONS.items()
    }
    labels = {"xlabel": "completions in the token mean (log scale)", "legend": "lower left"}
    labels |= {"ylabel": "share of the gradient\nthat is not the KL's (log scale)"}
    shown = {"kind": "estimator", "looks": looks, "ylim": (2e-4, 2)} | style.LOG_LOG
    figure = style.lines(curves, "completions", **shown, **labels, **style.P10_TO_P90)
    (axes,) = figure.axes
    style.note(
        axes,
        "GRPO: each completion\nby itself, $1/|o|$",
        (1, curves["median"][curves.completions == curves.completions.min()].max()),
        offset=(30, 26),
        va="center",
        arrowprops={"arrowstyle": "-", "color": style.QUIET},
    )
    sizes = sorted(curves.completions.unique())[::2]
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    return figure


def draw_best_of_n(curves: pd.DataFrame) -> Figure:
    """Accuracy of the chosen path against the number of paths, by path score and PRM."""
    named = {"last": "last", "sum": "sum of raw scores", "mean": "mean", "min": "min"}
    named |= {"product": "product"}
    series = zip(named.items(), style.SERIES, strict=True)
    looks = {"kind": "how", "looks": {how: {**x, "label": text} for (how, text), x in series}}
    looks |= {"panel": "prm", "titles": {name: f"{name} PRM" for name in curves.prm.unique()}}
    labels = {"xlabel": "number $N$ of paths (log scale)", "legend": "lower right"}
    labels |= {"ylabel": "probability that the\nchosen path is solved", "ylim": (0.3, 1.03)}
    figure = style.lines(curves, "number", "accuracy", **looks, **labels)
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
    return figure


def draw_early_stop(tables: dict[str, pd.DataFrame]) -> Figure:
    """Solved paths per token and paths wrongly stopped, by patience."""
    figure, (rate, lost) = style.subplots(1, 2, height=3.6)
    for look, (name, table) in zip(style.SERIES, tables.items(), strict=False):
        never = table.rate.iloc[-1]
        stopping = table.iloc[:-1]
        rate.plot(stopping.patience, stopping.rate / never, **look, label=name)
        lost.plot(stopping.patience, stopping.lost, **look, label=name)
    style.guide(rate, y=1, linestyle="-")
    rate.set_ylabel("solved paths per token\n(never stopping = 1)")
    lost.set_ylabel("stopped paths that would\nhave been solved")
    lost.legend(loc="upper right", fontsize=10)
    for axes in (rate, lost):
        axes.set_xticks(stopping.patience)
        axes.set_ylim(bottom=0)
    figure.supxlabel("falls in a row before a path is stopped", fontsize="medium")
    return figure


# --- The claims it decides ---------------------------------------------------------------------


def binary_groups(size: int) -> Tensor:
    """[2^G, G]: every group of binary rewards."""
    return all_groups((0.0, 1.0), size).double()


def amplification(groups: Tensor, **bounds: float) -> Tensor:
    """Advantage over deviation from the group's mean."""
    return group_normalise(groups, eps=0.0, **bounds) / group_centre(groups)


@claim("S1-2")
def group_normalisation() -> Finding:
    """All binary groups of eight against the printed formula; bounds; token gradients."""
    size = 8
    groups = binary_groups(size)
    printed = textbook_normalise(groups, eps=0.0)
    defined = printed.isfinite().all(-1)
    ours = group_normalise(groups, eps=0.0)
    bounds = {ddof: group_normalise(groups, eps=0.0, ddof=ddof).abs().max() for ddof in (0, 1)}
    logp, mask = torch.zeros(size, 5).double(), torch.ones(size, 5, dtype=torch.bool)
    fixed = {"old_logp": logp, "advantages": ours[1], "mask": mask, "aggregation": "token_mean"}
    gradient = grad(lambda at: policy_loss(at, **fixed).loss)(logp)
    figures = {
        "formula_error": largest((printed - ours)[defined]),
        "largest_sum": largest(ours.sum(-1)),
        "bound_error": max(
            abs(bounds[0].item() - (size - 1) ** 0.5),
            abs(bounds[1].item() - (size - 1) / size**0.5),
        ),
        "broadcast_error": largest(gradient + ours[1][:, None] / mask.numel()),
        "undefined_groups": float((~defined).sum()),
        "ddof_ratio": (bounds[0] / bounds[1]).item(),
    }
    identities = max(list(figures.values())[:4]) < EXACT
    return Finding(judge(identities and figures["undefined_groups"] == 0, identities), figures)


@claim("S1-5")
def baseline_and_scale() -> Finding:
    """All V^G groups (V=4, G=2..4): factor, direction, variance and weight by difficulty."""
    table = baseline_table(*random_bandits(12, 4, seed=0), (2, 3, 4)).set_index("advantage")
    factors = {"minus the mean": 1 - 1 / table.group_size, "minus the others' mean": 1.0}
    errors = {}
    for name, factor in factors.items():
        found = table.assign(error=(table.factor - factor).abs()).loc[name]
        errors[name] = found[["error", "factor_spread", "rest"]].max(axis=None)
    hard, easy = difficulty_weight(torch.tensor([0.05, 0.5], dtype=torch.float64), 16)
    ratio, rewards = [], torch.tensor([1.0, 0.0], dtype=torch.float64)
    for success in (0.3, 0.9):
        logits = torch.tensor([success, 1 - success], dtype=torch.float64).log()
        names = ("minus the others' mean", "reward itself")
        others, plain = (
            group_moments(logits, rewards, 4, ADVANTAGES[name]).trace_var.item() for name in names
        )
        ratio.append(others / plain)
    figures = {
        "centre_factor_error": errors["minus the mean"],
        "leave_one_out_error": errors["minus the others' mean"],
        "normalised_cosine": math.cos(math.radians(table.angle["normalised"].max())),
        "variance_ratio_hard": ratio[0],
        "variance_ratio_easy": ratio[1],
        "weight_ratio": (hard / easy).item(),
    }
    baseline = max(figures["centre_factor_error"], figures["leave_one_out_error"]) < EXACT
    reduces_always = max(ratio) < 1
    only_scale = 1 - figures["normalised_cosine"] < EXACT and abs(hard / easy - 1) < 1e-3
    return Finding(judge(baseline and reduces_always and bool(only_scale), baseline), figures)


@claim("S3-3")
def clip_higher() -> Finding:
    """Gradient of the clipped loss at given ratios, forty steps on one sampled token, and
    recorded runs."""
    symmetric, higher = (clip_slopes(1.0, (1.0, 1.25), epsilon=high) for high in (0.2, 0.28))
    growth = {
        (p, high): _grown_probability(p, high) / p for p in (0.01, 0.9) for high in (0.2, 0.28)
    }
    figures = {
        "first_step_difference": abs(symmetric[0] - higher[0]),
        "gradient_symmetric": -symmetric[1],
        "gradient_higher": -higher[1],
        "rare_growth_symmetric": growth[0.01, 0.2],
        "rare_growth_higher": growth[0.01, 0.28],
        "likely_growth_difference": growth[0.9, 0.28] - growth[0.9, 0.2],
    }
    finals = recorded("clip_higher").finals
    for clip, metric in (("higher", "entropy"), ("higher", "accuracy"), ("wide", "entropy")):
        figures |= difference(finals, clip, "symmetric", metric).figures(f"{clip}_{metric}")
    helps_rare = figures["rare_growth_higher"] - figures["rare_growth_symmetric"] > 0.01
    at_once = figures["first_step_difference"] > EXACT
    return Finding(judge(helps_rare and at_once, helps_rare), figures)


@claim("S3-4")
def dynamic_sampling() -> Finding:
    """Kept fraction by enumerating all groups; the advantage of the others with and without eps;
    and recorded runs."""
    errors, printed = [], {0.0: [], 1e-4: []}
    for size in (2, 4, 8):
        groups = binary_groups(size)
        kept = informative_groups(groups)
        for p in (0.1, 0.5, 0.9):
            chance = (groups * p + (1 - groups) * (1 - p)).prod(-1)
            formula = kept_fraction(torch.tensor(p, dtype=torch.float64), size)
            errors.append(largest(chance @ kept.double() - formula))
        for eps, advantages in printed.items():
            advantages += textbook_normalise(groups[~kept], eps=eps).flatten().tolist()
    figures = {
        "fraction_error": max(errors),
        "undefined_share_without_eps": sum(map(math.isnan, printed[0.0])) / len(printed[0.0]),
        "advantage_with_eps": max(map(abs, printed[1e-4])),
        "kept_at_p10_of_8": kept_fraction(torch.tensor(0.1, dtype=torch.float64), 8).item(),
    }
    finals = recorded("near_ties").finals
    dropped = difference(finals, "drop_uniform", "group_std", "accuracy")
    noisy = difference(finals, "drop_uniform_noisy", "group_std_noisy", "accuracy")
    left_out = difference(finals, "group_std", "drop_uniform", "used_fraction")
    figures |= dropped.figures("trained_gain") | noisy.figures("trained_gain_noisy")
    figures |= {"trained_share_left_out": left_out.mean}
    undefined_without = figures["undefined_share_without_eps"] == 1
    undefined_with = figures["advantage_with_eps"] != 0
    formula_right = figures["fraction_error"] < EXACT
    return Finding(
        judge(undefined_without and undefined_with, undefined_without and formula_right), figures
    )


@claim("S3-5")
def length_price() -> Finding:
    """Normalised advantages of a long answer, by the price of a token and the group; and
    recorded runs."""
    lengths = torch.tensor([400.0, 100.0, 100.0, 400.0], dtype=torch.float64)
    all_right = torch.ones(4, dtype=torch.float64)
    mixed = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)

    def of_long(rewards: Tensor, price: float, sizes: Tensor = lengths) -> float:
        return group_normalise(length_penalty(rewards, sizes, weight=price), eps=0.0)[0].item()

    figures = {
        "all_right_cheap": of_long(all_right, 1e-6),
        "all_right_dear": of_long(all_right, 1e-1),
        "equal_lengths": of_long(all_right, 1e-2, torch.full_like(lengths, 250.0)),
        "long_right_cheap": of_long(mixed, 1e-6),
        "long_right_dear": of_long(mixed, 1e-2),
    }
    finals = recorded("length_growth").finals
    shorter = difference(finals, "linear_price", "grpo", "length")
    figures |= shorter.figures("trained_length")
    figures |= difference(finals, "linear_price", "grpo", "accuracy").figures("trained_accuracy")
    discourages = figures["all_right_cheap"] < 0 and figures["long_right_dear"] < 0
    discourages = discourages and shorter.below
    price_matters = abs(figures["all_right_cheap"] - figures["all_right_dear"]) > 1e-6
    always = price_matters and figures["equal_lengths"] < 0 and figures["long_right_cheap"] < 0
    return Finding(judge(always, discourages), figures)


@claim("S4-31")
def noise_example() -> Finding:
    """The example of the seed under both degrees of freedom, with eps, and in float32."""
    rewards, printed = torch.tensor(NOISE_GROUPS["rounding"], dtype=torch.float32), 0.8660
    table = amplification_table().set_index("group").loc["rounding"]
    figures = {
        "ddof1": table["std"],
        "by_hand": 1e-5 / (4e-10 / 3) ** 0.5,
        "ddof0": table["std, ddof 0"],
        "with_eps": table["std + 1e-4"],
        "float32": textbook_normalise(rewards, eps=0.0)[1].item(),
    }
    agree = [abs(figures[k] - printed) < 5e-5 for k in ("ddof1", "ddof0", "with_eps")]
    return Finding(judge(all(agree), agree[0]), figures)


@claim("S4-32")
def clipped_std() -> Finding:
    """Largest amplification, advantage over deviation, with and without a lower bound; and
    recorded runs."""
    noise = torch.logspace(-9, 0, 19, dtype=torch.float64)
    rewards = noise[:, None] * torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    clipped = {"std_min": 0.1, "std_max": 1.0}
    figures = {
        "bound_at_min": largest(amplification(rewards, **clipped)),
        "unbounded_at_zero": largest(amplification(rewards, std_min=0.0, std_max=1.0)),
        "largest_advantage_at_max": largest(group_normalise(100 * rewards[-1], eps=0.0, **clipped)),
    }
    finals = recorded("near_ties").finals
    gain = difference(finals, "std_min_noisy", "group_std_noisy", "accuracy")
    figures |= gain.figures("trained_gain")
    bounded = figures["bound_at_min"] <= 10 * (1 + 1e-12)
    bounded_at_zero = figures["unbounded_at_zero"] <= 10
    return Finding(judge(bounded and bounded_at_zero, bounded), figures)


@claim("S4-33")
def variance_of_bounded_rewards() -> Finding:
    """Extremes of the variance on [0, 1]: it is convex, so they sit at the binary groups."""
    population, sample = [], []
    for size in range(2, 13):
        right = torch.arange(size + 1, dtype=torch.float64)[:, None]
        groups = (torch.arange(size) < right).to(torch.float64)  # one of each number of right
        population.append(groups.var(-1, correction=0).max())
        sample.append(groups.var(-1, correction=1).max())
    generator = torch.Generator().manual_seed(0)
    interior = torch.rand(20_000, 2, generator=generator, dtype=torch.float64)
    least = min(amplification(binary_groups(size)[1:-1]).min() for size in (2, 3, 8))
    figures = {
        "population_max": torch.stack(population).max().item(),
        "sample_max": torch.stack(sample).max().item(),
        "sample_max_of_8": sample[6].item(),
        "interior_max": interior.var(-1, correction=1).max().item(),
        "least_amplification": least.item(),
    }
    below_one = max(figures["sample_max"], figures["population_max"], figures["interior_max"]) < 1
    amplifies = figures["least_amplification"] > 1
    return Finding(judge(below_one and amplifies, below_one), figures)


@claim("S4-xb")
def smaller_variance_larger_amplification() -> Finding:
    """Amplification of one shape of group at shrinking scales, without eps and with std_min."""
    shape = torch.tensor([0.0, 1.0, 0.2, 0.7], dtype=torch.float64)
    groups = torch.logspace(0, -6, 13, dtype=torch.float64)[:, None] * shape
    plain = amplification(groups).mean(-1)
    floored = amplification(groups, std_min=0.1).mean(-1)
    figures = {
        "amplification_times_std_error": largest(plain * groups.std(-1) - 1),
        "least_growth": (plain[1:] / plain[:-1]).min().item(),
        "least_growth_with_floor": (floored[1:] / floored[:-1]).min().item(),
    }
    grows = figures["least_growth"] > 1 and figures["amplification_times_std_error"] < 1e-8
    return Finding(judge(grows, False), figures)


def _grown_probability(start: float, epsilon_high: float) -> float:
    """Probability of one good token after forty ascent steps on the same sample."""
    logits = torch.tensor([start, 1 - start], dtype=torch.float64).log()
    old = logits.log_softmax(-1)[:1]
    fixed = {"advantages": torch.ones(1).double(), "mask": torch.ones(1, dtype=torch.bool)}
    fixed |= {"old_logp": old, "epsilon_high": epsilon_high}
    slope = grad(lambda at: policy_loss(at.log_softmax(-1)[:1], **fixed).loss)
    for _ in range(40):
        logits = logits - 0.02 * slope(logits)
    return logits.softmax(-1)[0].item()


BETA = 0.04
EPSILON = 0.2


def _batch(seed: int) -> tuple[Tensor, ...]:
    """Log-probs of policy, sampler and reference, advantages and a ragged mask: 6 rows of 5."""
    generator = torch.Generator().manual_seed(seed)
    logp, old_logp, ref_logp = -torch.rand(3, 6, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([5, 3, 1, 4, 2, 5])
    return logp, old_logp, ref_logp, advantages, torch.arange(5) < lengths[:, None]


def _token_objective(
    logp: Tensor, old_logp: Tensor, ref_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The token form by the package: loss and k3, aggregated as the printed sums are."""
    loss = policy_loss(logp, old_logp=old_logp, advantages=advantages, mask=mask).loss
    penalty = aggregate(kl_loss(logp, ref_logp, mask=mask), mask, "seq_mean_token_mean")
    return -(loss + BETA * penalty)


@claim("S0-1")
def grpo_objective() -> Finding:
    """The printed double sum, token by token in Python, against the package; garbage as padding."""
    logp, old_logp, ref_logp, advantages, mask = _batch(141)
    rows = []
    for i, advantage in enumerate(advantages.tolist()):
        terms = []
        for t in range(int(mask[i].sum())):
            ratio = math.exp(logp[i, t] - old_logp[i, t])
            log_r = float(ref_logp[i, t] - logp[i, t])
            kl = math.exp(log_r) - log_r - 1
            clipped = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
            terms.append(min(ratio * advantage, clipped * advantage) - BETA * kl)
        rows.append(sum(terms) / len(terms))
    printed = sum(rows) / len(rows)
    ours = _token_objective(logp, old_logp, ref_logp, advantages, mask).item()
    padding = zip((logp, old_logp, ref_logp), (torch.nan, -torch.inf, 1e9), strict=True)
    garbage = [torch.where(mask, x, g) for x, g in padding]
    padded = _token_objective(*garbage, advantages, mask).item()
    flipped = _token_objective(logp, old_logp, 2 * logp - ref_logp, advantages, mask).item()
    figures = {
        "printed_error": abs(ours - printed),
        "padding_change": abs(padded - ours),
        "flipped_kl_error": abs(flipped - printed),
    }
    agrees = max(figures["printed_error"], figures["padding_change"]) < EXACT
    return Finding(judge(agrees, figures["printed_error"] < EXACT), figures)


@claim("S1-1")
def sequence_form() -> Finding:
    """The printed sequence form by hand against the package, and its k3's mean and gradient
    against both KLs of sequences."""
    logp, old_logp, _, advantages, mask = _batch(151)
    ratio = torch.where(mask, logp - old_logp, 0.0).sum(-1).exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    printed = torch.minimum(ratio * advantages, clipped * advantages).mean()
    options = {"advantages": advantages, "mask": mask, "kind": "sequence"}
    ours = -policy_loss(logp, old_logp=old_logp, **options).loss

    def of_k3(logits: Tensor, ref: Tensor) -> dict[str, float | Tensor]:
        """Errors of the mean and of the gradient of k3 on whole sequences."""
        per_sequence = k3(*(token_logp(x, RAGGED).sum(-1) for x in (logits, ref)))
        mean = sequence_probability(logits, RAGGED) @ per_sequence
        gradient = expected_sequence_gradient(logits, ref, RAGGED, estimator="k3", level="sequence")
        return {"value": (mean - sequence_kl(logits, ref, RAGGED)).abs()} | {
            way: flat_error(gradient, sequence_kl_gradient(logits, ref, RAGGED, direction=way))
            for way in ("forward", "reverse")
        }

    found = measured(of_k3, *random_tables(RAGGED, 3, 4, spread=SPREAD, seed=152))
    figures = {
        "printed_error": (ours - printed).abs().item(),
        "value_error": found.value.max(),
        "forward_gradient_error": found.forward.max(),
        "reverse_gradient_error": found.reverse.min(),
    }
    defined = max(figures["printed_error"], figures["value_error"]) < EXACT
    return Finding(judge(defined and figures["forward_gradient_error"] < EXACT, defined), figures)


@claim("S3-1")
def sum_over_tokens() -> Finding:
    """Sum and mean over tokens against the gradient of the mean return, of several lengths and
    of one; what the mean does to a k2 loss; and recorded lengths of wrong answers."""
    errors = {}
    for name, sequences in (("ragged", RAGGED), ("fixed", enumerate_sequences(3, 3))):
        logits = random_tables(sequences, 3, 1, spread=SPREAD, seed=161).logits[0]
        returns = random_returns(sequences, seed=162)
        exact = ratio_objective_gradient(logits, logits, sequences, returns)
        whole = by_token(returns, sequences)
        for mode in ("seq_mean_token_sum", "seq_mean_token_mean"):
            weights = token_weights(sequences.mask, mode, dtype=returns.dtype) * len(returns)
            gradient = credit_moments(logits, sequences, weights * whole).mean
            direction = gradient / gradient.norm() * exact.norm()
            errors[f"{name}_{mode.rsplit('_')[-1]}_error"] = flat_error(direction, exact)
    pairs = random_tables(RAGGED, 3, 40, spread=1.5, seed=163)
    errors["kl_off_under_mean"] = weight_errors(pairs, RAGGED).k2.median()
    finals = recorded("length_growth").finals
    finals = finals.assign(excess=finals["wrong_length"] - finals["right_length"])
    figures = errors | difference(finals, "grpo", "token_sum", "excess").figures("trained_excess")
    sums = max(errors["ragged_sum_error"], errors["fixed_sum_error"], errors["fixed_mean_error"])
    differ = errors["ragged_mean_error"] > EXACT
    return Finding(judge(sums < EXACT and differ, sums < EXACT), figures)


@claim("S1-12")
def process_supervision_formula() -> Finding:
    """Exact per-token lists against the printed formula in plain Python; equal step rewards; and
    recorded runs."""
    steps, ends, lengths = [[0.2, 0.9, 0.4], [0.7, 0.1]], [[1, 3, 6], [2, 4]], [7, 6]
    every = [reward for row in steps for reward in row]
    mean, std = statistics.fmean(every), statistics.stdev(every)
    by_hand = [
        [
            math.fsum((r - mean) / std for r, end in zip(row, of_row, strict=True) if end >= t)
            for t in range(length)
        ]
        for row, of_row, length in zip(steps, ends, lengths, strict=True)
    ]
    rewards = [torch.tensor(row, dtype=torch.float64) for row in steps]
    ours = process_supervision(rewards, ends, lengths, eps=0.0)
    error = max(
        largest(row[: len(hand)] - torch.tensor(hand, dtype=torch.float64))
        for row, hand in zip(ours, by_hand, strict=True)
    )
    own_rows = [(r - r.mean()) / r.std() for r in rewards]
    first_token = abs(own_rows[1].sum().item() - by_hand[1][0])
    equal = torch.full((2, 3), 0.5)
    printed = (equal - equal.mean()) / equal.std()
    figures = {
        "formula_error": error,
        "per_output_statistics_differ": first_token,
        "undefined_equal": float((~printed.isfinite()).all()),
        "first_token_sum": ours[:, 0].sum().item(),
    }
    gain = difference(recorded("process").finals, "process", "outcome", "accuracy")
    figures |= gain.figures("trained_gain")
    exact = error < EXACT < first_token
    return Finding(judge(exact and not figures["undefined_equal"], exact), figures)


@claim("S3-19")
def marginal_prm_reward() -> Finding:
    """A random PRM on an enumerated chain: totals, discounting, and what the gradient ascends."""
    problem = fixed_length_chain(5, 3, right=0.55, spread=0.7, seed=0)
    generator = torch.Generator().manual_seed(1)
    table = torch.rand(problem.sequences.num_states, generator=generator, dtype=torch.float64)
    final = torch.rand(len(problem.outcome), generator=generator, dtype=torch.float64)
    scores = prm_scores(problem, table, final)
    rewards = marginal_rewards(scores, table[0].item())
    by_hand = sum(scores[:, t] - (scores[:, t - 1] if t else table[0]) for t in range(5))
    exact = grad(lambda at: sequence_probability(at, problem.sequences) @ final)(problem.logits)
    discounted = reward_to_go(rewards, gamma=0.9)[:, 0]
    figures = {
        "total_error": largest(rewards.sum(-1) - by_hand),
        "total_minus_final": largest(rewards.sum(-1) - final),
        "prompt_score": table[0].item(),
        "total_from_zero_error": largest(marginal_rewards(scores).sum(-1) - final),
        "discounted_gap": largest(discounted - by_hand),
        "gradient_error": largest(credit_gradient(problem, reward_to_go(rewards)) - exact),
    }
    identity = max(figures[k] for k in ("total_error", "total_from_zero_error", "gradient_error"))
    always = identity < EXACT and figures["total_minus_final"] < EXACT
    return Finding(judge(always, identity < EXACT), figures)


@claim("S3-20")
def prm_against_orm() -> Finding:
    """Enumerated bias and variance of the policy gradient under six credits; and recorded runs."""
    tables = []
    for seed in range(10):
        problem = fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=seed)
        tables.append(credit_table(problem, seed=seed + 1).set_index("credit"))
    bias, variance = (pd.DataFrame(t[column] for t in tables) for column in ("bias", "variance"))
    against_mean = variance["random PRM, to go"] / variance["outcome minus its mean"]
    figures = {
        "perfect_variance": variance["perfect PRM, immediate"].max(),
        "perfect_bias": bias["perfect PRM, immediate"].max(),
        "random_over_mean_variance": against_mean.median(),
        "random_immediate_bias": bias["random PRM, immediate"].median(),
        "random_to_go_bias": bias["random PRM, to go"].max(),
    }
    gain = difference(recorded("process").finals, "marginal", "outcome", "accuracy")
    figures |= gain.figures("trained_gain")
    perfect = figures["perfect_variance"] < 1 and figures["perfect_bias"] < EXACT
    perfect = perfect and gain.above
    any_prm = figures["random_over_mean_variance"] < 1
    return Finding(judge(perfect and any_prm, perfect), figures)


@claim("S1-xa")
def outcome_credit_sees_the_future() -> Finding:
    """A reward that only the last step decides, broadcast: expected gradient against autograd."""
    problem = fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    last_only = problem.sequences.tokens[:, -1].to(torch.float64) * problem.outcome
    probability = sequence_probability(problem.logits, problem.sequences)
    exact = grad(lambda at: sequence_probability(at, problem.sequences) @ last_only)(problem.logits)
    centred = (last_only - probability @ last_only).unsqueeze(-1)
    centred = centred.expand(problem.sequences.mask.shape)
    myopic = torch.zeros_like(centred)
    myopic[:, -1] = centred[:, -1]
    figures = {
        "broadcast_error": largest(credit_gradient(problem, centred) - exact),
        "first_token_gradient": exact[0].norm().item(),
        "first_token_gradient_myopic": credit_gradient(problem, myopic)[0].norm().item(),
    }
    ignores_future = figures["broadcast_error"] > EXACT
    return Finding(judge(ignores_future, False), figures)


@claim("S3-27")
def partial_rollout() -> Finding:
    """A cut path finished later against one scored by a value: bias of the gradient; and
    recorded runs."""
    problem = fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    cut = 3
    values = state_values(problem)
    mask, states = problem.sequences.mask, problem.sequences.states
    sampled_at = torch.arange(mask.shape[-1]).expand(mask.shape) // cut
    first, second = (current_segment(mask, sampled_at, n) for n in (0, 1))
    whole = by_token(problem.outcome, problem.sequences)
    exact = credit_gradient(problem, whole)
    early, late = exact.clone(), exact.clone()
    early[2**cut - 1 :] = 0.0
    late[: 2**cut - 1] = 0.0

    def bootstrap_bias(table: Tensor) -> float:
        at_cut = torch.where(first, table[states[:, cut]].unsqueeze(-1), 0.0)
        return flat_error(credit_gradient(problem, at_cut), early)

    continued = credit_gradient(problem, torch.where(second, whole, 0.0))
    figures = {
        "continued_bias": flat_error(continued, late),
        "bootstrap_bias": bootstrap_bias(moved_logits(values, 0.2, seed=1)),
        "bootstrap_bias_exact_value": bootstrap_bias(values),
    }
    finals = recorded("partial_rollouts").finals
    for name, other in (("trained_budget", "whole"), ("trained_all_segments", "budget_8_current")):
        figures |= difference(finals, "budget_8_all", other, "own_accuracy").figures(name)
    continuing_needs_no_value = figures["continued_bias"] < EXACT
    value_is_free = figures["bootstrap_bias"] < EXACT
    return Finding(judge(value_is_free, not continuing_needs_no_value), figures)


@claim("S3-28")
def kimi_length_recipe() -> Finding:
    """The loop detector, and the report's length reward beside a penalty per token."""
    loop = torch.tensor([4, 7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 9])
    stop = repeats(loop, period=4, times=3).nonzero().flatten()
    correct = torch.tensor([True, True, False, False])
    lengths = torch.tensor([400.0, 100.0, 100.0, 400.0], dtype=torch.float64)
    relative = relative_length_reward(correct, lengths)
    task = correct.to(torch.float64)
    dear = length_penalty(task, lengths, weight=0.01)
    scaled = relative_length_reward(correct, 10 * lengths)
    figures = {
        "loop_found_at": float(stop[0]),
        "loops_found": float(len(stop)),
        "short_wrong_bonus": relative[2].item(),
        "short_over_long_right": (relative[1] - relative[0]).item(),
        "scale_error": largest(scaled - relative),
        "wrong_over_right_penalty": (group_normalise(dear)[2] - group_normalise(dear)[0]).item(),
        "wrong_over_right_relative": (task + relative)[2].item() - (task + relative)[0].item(),
    }
    detector = figures["loops_found"] == 1 and figures["loop_found_at"] == 10
    shortens = figures["short_over_long_right"] > 0 and figures["short_wrong_bonus"] <= 0
    same = figures["wrong_over_right_penalty"] <= 0
    return Finding(judge(detector and shortens and same, detector and shortens), figures)


@claim("S3-36")
def best_of_n_scores() -> Finding:
    """Exact accuracy of the best of 16 by path score: PRM right, and PRM noisy on its logit."""
    problem = open_length_chain(7, right=0.55, stop=0.25)

    def accuracy(noise: float, seeds: int) -> dict[str, float]:
        table = best_of_n_curves(problem, [1, 16], noise=noise, seeds=seeds)
        return table.set_index(["how", "number"]).accuracy

    right, noisy = accuracy(0.0, 1), accuracy(4.0, 6)
    one = (sequence_probability(problem.logits, problem.sequences) @ problem.outcome).item()
    figures = {
        "one": right["last", 1],
        "last": right["last", 16],
        "any_of_16": 1 - (1 - one) ** 16,
        "sum_raw": right["sum", 16],
        "last_noisy": noisy["last", 16],
        "sum_raw_noisy": noisy["sum", 16],
        "min_noisy": noisy["min", 16],
    }
    marginal = abs(figures["last"] - figures["any_of_16"]) < EXACT
    raw = abs(figures["sum_raw"] - figures["any_of_16"]) < EXACT
    return Finding(judge(marginal and raw, marginal), figures)


@claim("S3-37")
def early_stopping() -> Finding:
    """Every path of eight steps: tokens saved, solvable paths lost, solved paths per token."""
    problem = fixed_length_chain(8, 5, right=0.6)
    perfect = stopping_table(problem, [1, 2, 3], noise=0.0, seed=0).set_index("patience")
    noisy = stopping_table(problem, [1, 2, 3], noise=0.3, seed=0).set_index("patience")
    falling = torch.tensor([0.6, 0.5, 0.4, 0.7], dtype=torch.float64)
    rule = early_stop(falling, patience=2, initial=0.6)
    whole = perfect.rate[8]
    figures = {
        "rule_stops_after": float(rule),
        "saved_share_patience3": 1 - perfect.tokens[3] / 8,
        "lost_patience3": perfect.lost[3],
        "rate_gain_patience3": perfect.rate[3] / whole,
        "rate_gain_patience2": perfect.rate[2] / whole,
        "rate_gain_patience2_noisy": noisy.rate[2] / whole,
    }
    pays = [v > 1 for k, v in figures.items() if k.startswith("rate_gain")]
    return Finding(judge(all(pays), any(pays) and figures["rule_stops_after"] == 3), figures)
