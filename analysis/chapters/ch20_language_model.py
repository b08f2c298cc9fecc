"""Chapter 20: what the recorded runs on a language model say, beside those of the tiny policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.recorded import recorded
from analysis.evidence.training_figures import KL_TERMS
from analysis.records import designs, estimator_tail, statistics, summaries, tidy
from analysis.records.preset import Expected
from analysis.records.retention import Retention
from analysis.records.summaries import pairs_of
from kl_term import style

# --- What the chapter computes ----------------------------------------------------------------


def from_no_kl(finals: pd.DataFrame, variants: Iterable[str]) -> pd.DataFrame:
    """Rows of ``none`` and of the variants, and for each variant a copy of those of ``none``,
    where its curve over beta begins."""
    none = finals[finals["variant"] == "none"]
    kept = [finals[finals["variant"] == variant] for variant in variants]
    starts = [none.assign(variant=variant) for variant in variants]
    return pd.concat([none, *starts, *kept], ignore_index=True)


def readings(curves: pd.DataFrame) -> pd.DataFrame:
    """What a log shows as the KL, ``sampled``, over what it is, ``exact``: a ``ratio`` a run,
    window and estimator.

    Means over the same completions, at the sampled tokens and over the vocabulary at their states,
    from the first step on.
    """
    moved = curves[curves["update"] > 0]
    long = moved.melt("reverse_kl", list(estimator_tail.NAMES), "estimator", "sampled")
    long = long.rename(columns={"reverse_kl": "exact"})
    return long.assign(ratio=long["sampled"] / long["exact"])


def elsewhere(kept: Retention, finals: pd.DataFrame) -> pd.DataFrame:
    """What trained runs still are at states of the reference, beside their KL ``on_task``.

    A row a run of ``finals`` and skill: its ``forward_kl``, and ``right`` and ``gained`` over the
    reference, NaN where there is no right answer.
    """
    keys = ["variant", "beta", "seed"]
    of_task = finals[[*keys, "reverse_kl"]].rename(columns={"reverse_kl": "on_task"})
    runs = kept.runs.astype({"beta": float}).drop(columns=["reverse_kl", "states"])
    start = runs["skill"].map(kept.reference.set_index("skill")["right"])
    table = runs.assign(gained=runs["right"] - start)
    return table.merge(of_task, on=keys, validate="many_to_one")


def by_skill(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A column of :func:`elsewhere` by skill, variant and beta, in their order: the ``mean`` over
    the seeds, and their range from ``low`` to ``high``."""
    grouped = table.groupby(["skill", "variant", "beta"], sort=False)[metric]
    return grouped.agg(mean="mean", low="min", high="max").reset_index()


def elsewhere_at_equal(table: pd.DataFrame, variant: str, other: str, level: float) -> pd.DataFrame:
    """KL to the reference of two variants on each skill where they agree on the task, at ``level``.

    Along each variant's curve over beta, seed by seed: ``ratio``, the geometric mean over the
    seeds, NaN unless all reach the level, and its range ``low`` to ``high``.
    """
    both, rows = [variant, other], []
    for skill, part in table.groupby("skill", sort=False):
        logs = from_no_kl(part.assign(log=np.log(part["forward_kl"])), both)
        reached = summaries.at_equal(logs, both, level=level, of="on_task", metric="log")
        wide = reached.pivot(index="seed", columns="variant", values="log")
        gap = (wide[variant] - wide[other]).to_numpy()
        ratio, low, high = np.exp([gap.mean(), gap.min(), gap.max()])
        rows.append({"skill": skill, "ratio": ratio, "low": low, "high": high})
    return pd.DataFrame(rows)


# --- The longest runs -------------------------------------------------------------------------

#: The recording of 200 updates, and the two variants whose runs end low in it.
LATE, LOW = "smollm2", ("k3_reward", "k2_reward")


def late() -> dict[str, float]:
    """What k3 in the reward costs after 200 updates: a comparison chosen after the runs.

    Three seeds are fewer than an interval takes.

    Returns:
        ``mean``: its accuracy less that without a KL term, over seeds; ``least`` and ``most`` of
        one seed; ``best``: its best run's accuracy; ``worst_other``: the worst of the six variants
        not in :data:`LOW`; ``rank_p``: the chance that three runs drawn from these are the three
        lowest, as they are; ``detected``: the difference that three seeds of this spread show with
        a power of 0.8.
    """
    finals = recorded(LATE).finals
    wide = finals.pivot(index="seed", columns="variant", values="accuracy")
    gap = (wide["k3_reward"] - wide["none"]).to_numpy()
    others = wide.drop(columns=list(LOW)).to_numpy().ravel()
    lowest = wide["k3_reward"].max() < others.min()
    return {
        "mean": gap.mean(),
        "least": gap.max(),
        "most": gap.min(),
        "best": wide["k3_reward"].max(),
        "worst_other": others.min(),
        "rank_p": 1.0 / math.comb(len(gap) + len(others), len(gap)) if lowest else math.nan,
        "detected": statistics.detectable(gap.std(ddof=1), len(gap)),
    }


def averaged_over_training() -> dict[str, float]:
    """k3 in the reward less no KL term in accuracy averaged over training, at one coefficient."""
    runs = designs.with_derived(recorded("smollm2_short"))
    return summaries.paired(runs, [("k3_reward", "none", "average")]).to_dict("records")[0]


def late_predictions() -> pd.DataFrame:
    """The four predictions of that recording, in their order: ``prediction``, ``found`` and
    ``outcome``. They are sentences, so how each is asked was chosen after the runs."""
    run = recorded(LATE)
    asked = pairs_of("k1_loss/none k2_loss/exact_loss k3_loss/k2_loss", "reverse_kl")
    rows = summaries.paired(run.finals, asked).to_dict("records")
    wide = run.finals.pivot(index="seed", columns="variant", values="reverse_kl")
    found = [
        f"{row['mean']:+.2f} nats, seeds from {gap.min():+.2f} to {gap.max():+.2f}"
        for row in rows
        for gap in [wide[row["variant"]] - wide[row["other"]]]
    ]
    ways: tuple[Expected, ...] = ("equivalent", "equivalent", "above")
    margin = math.log(statistics.KL_RATIO_MARGIN)
    outcomes = [designs.outcome(row, how, margin) for row, how in zip(rows, ways, strict=True)]
    start = run.curves.query("update == 0").set_index(["variant", "seed"])["accuracy"]
    gained = run.finals.set_index(["variant", "seed"])["accuracy"] - start
    least = gained.groupby("variant").min()
    others = least.drop("k3_reward").min()
    found.append(
        f"least gain {least['k3_reward']:+.2f} with k₃ in the reward, {others:+.2f} without"
    )
    rises = "open" if others <= 0.0 else "refuted" if least["k3_reward"] > 0.0 else "holds"
    said = zip(run.preset.predictions, found, [*outcomes, rises], strict=True)
    return pd.DataFrame(said, columns=["prediction", "found", "outcome"])


# --- What the page compares, and what its prose says of it ------------------------------------

BETA = 0.3
#: What is compared at one coefficient, in KL and in accuracy.
PAIRS = " ".join(f"{name}/none" for name in KL_TERMS if name != "none")
PAIRS += " k2_loss/exact_loss k3_loss/k2_loss k1_reward/exact_loss"
#: k3 under the attached ratio of the prefix, compared at that coefficient too.
PREFIX = "k3_loss_attached_prefix"
#: Part of the page, in keys of numbers -> in the table of all comparisons.
PARTS = {
    "one": "at one coefficient",
    "jumps": "fluctuation",
    "prefix": "with the prefix ratio",
}


def ends() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Last quarter of each run: at one coefficient, and at the others."""
    return _ends_of("smollm2_short"), _ends_of("smollm2_coefficients")


def _ends_of(preset: str) -> pd.DataFrame:
    return tidy.final(recorded(preset).curves, share=0.25)


def compared() -> pd.DataFrame:
    """Every comparison of the page, seed by seed, judged together: a page that asks many questions
    finds some differences by chance.

    Returns:
        Rows of :func:`analysis.records.summaries.judged`, with their ``part`` of the page,
        ``key`` within it, and ``spec``, a number format.
    """
    finals = ends()[0]
    jumping = ("gradient_norm", "reverse_kl")
    jumps = summaries.fluctuation(recorded("smollm2_short").curves, jumping)
    parts = {
        "one": summaries.paired(finals, pairs_of(PAIRS, "reverse_kl", "accuracy")),
        "jumps": summaries.paired(jumps, pairs_of("k3_loss/k2_loss", *jumping)),
        "prefix": summaries.paired(
            pd.concat([finals, _ends_of("smollm2_prefix_short")], ignore_index=True),
            pairs_of(f"{PREFIX}/k1_reward {PREFIX}/none", "reverse_kl", "accuracy"),
        ),
    }
    table = pd.concat([rows.assign(part=name) for name, rows in parts.items()], ignore_index=True)
    key = table["variant"] + "_" + table["other"] + "_" + table["metric"]
    return summaries.judged(table.assign(key=key, spec="+.2f"), len(table))


#: Verdict -> the part and key of the comparisons of which the prose states it.
SAYS = {
    "differs": {
        "one": ["k3_loss_none_reverse_kl", "k3_loss_none_accuracy"],
    },
    "equivalent": {
        "one": [
            "k1_loss_none_reverse_kl",
            "k2_loss_exact_loss_reverse_kl",
            "k1_reward_exact_loss_reverse_kl",
            "k2_reward_none_reverse_kl",
            "k3_reward_none_reverse_kl",
        ],
        "prefix": [f"{PREFIX}_k1_reward_reverse_kl", f"{PREFIX}_k1_reward_accuracy"],
    },
    "suggestive": {
        "one": ["k2_loss_none_reverse_kl", "k2_loss_none_accuracy"],
        "prefix": [f"{PREFIX}_none_reverse_kl"],
    },
    "unresolved": {
        "prefix": [f"{PREFIX}_none_accuracy"],
        "one": [
            "exact_loss_none_accuracy",
            "k1_reward_none_accuracy",
            "k3_reward_none_accuracy",
        ],
        "jumps": ["k3_loss_k2_loss_gradient_norm", "k3_loss_k2_loss_reverse_kl"],
    },
}


def check_verdicts(table: pd.DataFrame) -> None:
    """Refuse, by a ValueError, comparisons whose verdicts are not those that the prose states."""
    found = table.set_index(["part", "key"])["verdict"].to_dict()
    wrong = [
        f"{part}: {key}: the text says {word}, the runs {found.get((part, key), 'nothing')}"
        for word, parts in SAYS.items()
        for part, keys in parts.items()
        for key in keys
        if found.get((part, key)) != word
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


# --- What it draws ----------------------------------------------------------------------------


def draw_late() -> Figure:
    """Accuracy at the end of the longest runs: a point a run, a row a variant."""
    finals = recorded(LATE).finals
    variants = list(dict.fromkeys(finals["variant"]))
    figure, axes = style.subplots(height=1.0 + 0.3 * len(variants))
    for place, name in enumerate(variants):
        values = finals.loc[finals["variant"] == name, "accuracy"]
        look = style.line(*KL_TERMS[name]) | {"linestyle": "none", "label": ""}
        axes.plot(values, [place] * len(values), **look)
    style.guide(axes, x=late()["worst_other"])
    axes.set_yticks(range(len(variants)), [NAMES[name] for name in variants])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy in the last tenth of 200 updates")
    return figure


#: The upper edge of the panels of :func:`readings`.
HIGHEST = 3.0


def readings_figure(table: pd.DataFrame) -> Figure:
    """What each of :func:`readings` shows over the exact KL, a panel an estimator."""
    names = list(table["estimator"].unique())
    figure, panels = style.subplots(len(names), 1, height=5.6, sharex=True, sharey=True)
    for panel, name in zip(panels, names, strict=True):
        rows = table[table["estimator"] == name]
        look = style.line(name)
        shown = rows["ratio"].clip(upper=HIGHEST)  # what lies above is drawn at the edge
        panel.scatter(rows["exact"], shown, 16, look["color"], marker=look["marker"], alpha=0.45)
        panel.axhline(1.0, color="#5A5A5A", linewidth=1.0)
        panel.set(title=look["label"], ylabel="reading / exact", xscale="log")
        panel.set_xticks([0.05, 0.1, 0.2, 0.5])
        style.plain_numbers(panel.xaxis)
    panels[-1].set_xlabel("exact reverse KL (nats per token), log scale")
    return figure


def elsewhere_figure(table: pd.DataFrame, shown: Sequence[tuple[str, float]]) -> Figure:
    """How far policies are from the reference by :func:`by_skill`, a row a skill, a marker a
    variant and beta; larger for a larger beta."""
    skills = list(table["skill"].unique())
    rows = table.set_index(["variant", "beta", "skill"]).sort_index()
    figure, axes = style.subplots(height=1.4 + 0.45 * len(skills))
    for index, (variant, beta) in enumerate(shown):
        called = NAMES[variant] + (f", $\\beta$={beta:g}" if beta else "")
        look = style.line(*KL_TERMS[variant], label=called)
        rank = sum(other < beta for name, other in shown if name == variant)
        values = rows.loc[(variant, beta)].loc[skills]
        places = [place + 0.8 * ((index + 0.5) / len(shown) - 0.5) for place in range(len(skills))]
        axes.errorbar(
            values["mean"],
            places,
            xerr=style.bars(values, "mean"),
            **look | {"linestyle": "none"},
            markersize=6 + 4 * rank,
        )
    for place in range(1, len(skills)):
        axes.axhline(place - 0.5, color="#E4E4E4", linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.set(xscale="log", xlabel="forward KL at the reference's states (nats per token)")
    axes.set_yticks(range(len(skills)), skills)
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    return figure
