"""Chapter 19: KL terms on ten and twenty starts, by designs written before the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis import style
from analysis.chapters.ch19_equal_kl import NAMES
from analysis.chapters.claims import recorded
from analysis.chapters.training_figures import KL_TERMS
from analysis.experiments import designs, hierarchical, recording
from analysis.experiments.preset import Prediction
from analysis.experiments.presets.designed import COMPARED, FIGURE2
from analysis.experiments.summaries import KLS, by_variant, fluctuation

# --- What the chapter computes ----------------------------------------------------------------

#: Predictions that are open, as their presets spell them: by the prose of every page, all others of
#: these presets hold.
OPEN: dict[str, set[str]] = {
    "equal_kl": {
        "k3_loss = exact_loss: reward",
        "k1_reward = exact_loss: reward",
        "k1_loss = none: reverse_kl at 0.03, 0.1, 0.3",
    },
    "equal_kl_large": set(),
    "equal_kl_wide": {
        "k2_loss = exact_loss: reward",
        "k3_loss = exact_loss: reward",
        "k1_reward = exact_loss: reward",
    },
    "equal_kl_ended": set(),
    "long_completions": {"k3_loss_attached_prefix = exact_loss: reward"},
    "long_completions_128": {
        "k3_loss_attached_prefix = k1_reward: reward",
        "k1_reward = exact_loss: reward",
        "k3_loss_attached_prefix = exact_loss: reward",
        "k1_reward > exact_loss: gradient_norm at 0.3",
    },
    "aggregation_length": {
        "only_k1_batch_mean = only_k1_sum: length at 1",
        "k1_sum = none_sum: length at 0.1, 0.3, 1",
        "k1_batch_mean = none_batch_mean: length at 0.1, 0.3, 1",
    },
    "aggregation_length_112": set(),
    "smollm2_equal_kl": {"k3_loss < exact_loss: reward", "k3_loss < exact_loss: forward_kl"},
    "stale_starts": {
        "clipped_masked = clipped: reward at 0.3",
        "exact > k2_detached: reward at 0.3",
        "k2 = k2_detached: reward at 0.3",
    },
}
#: Presets that compare the reward of terms at equal KL -> what their setting is called.
SETTINGS = {
    "equal_kl_large": "8 tokens, 20 starts",
    "equal_kl": "8 tokens, 10 starts",
    "equal_kl_wide": "twice the width",
    "equal_kl_ended": "answers that end",
    "long_completions": "32 tokens",
    "long_completions_128": "up to 128 tokens",
}
#: Of this page.
RECORDED = tuple(SETTINGS)
#: Variant -> estimator and placement, which say how it is drawn.
TERMS = KL_TERMS | {"k3_loss_attached_prefix": ("k4", "loss")}

#: Panels of the KL over the coefficient.
PLACED = {
    "KL in the loss": ("k1_loss", "k2_loss", "k3_loss", "exact_loss", "k3_loss_attached_prefix"),
    "KL in the reward": ("k1_reward", "k2_reward", "k3_reward"),
}


@cache
def predictions(preset: str) -> pd.DataFrame:
    """Every prediction of a recorded design beside what was found."""
    return designs.judged_predictions(recorded(preset))


def check_outcomes(preset: str) -> None:
    """Refuse a recording whose outcomes are not those that the prose states.

    Raises:
        ValueError: names the predictions.
    """
    table = predictions(preset)
    found = dict(zip(map(_spelled, table.to_dict("records")), table["outcome"], strict=True))
    said = {key: "open" if key in OPEN[preset] else "holds" for key in {*found, *OPEN[preset]}}
    wrong = [
        f"{key}: the text says {word}, the runs {found.get(key, 'nothing')}"
        for key, word in sorted(said.items())
        if found.get(key) != word
    ]
    if wrong:
        raise ValueError(f"{preset}: {'; '.join(wrong)}")


def _spelled(row: Mapping[str, Any]) -> str:
    sign = {"equivalent": "=", "above": ">", "below": "<"}[row["expected"]]
    at = "" if row["at"] == "equal KL" else f" at {row['at']}"
    return f"{row['variant']} {sign} {row['other']}: {row['metric']}{at}"


def same_elsewhere(preset: str, folder: str) -> bool:
    """Has each prediction the same outcome by a second recording of the preset, in a folder?"""
    again = designs.judged_predictions(recording.load(recording.RESULTS / folder))
    return list(again["outcome"]) == list(predictions(preset)["outcome"])


@cache
def figure2() -> pd.DataFrame:
    """Figure 2 at equal KL: the predictions of its design, of fluctuations in place of rewards."""
    run = recorded("equal_kl")
    metrics = [prediction.metric for prediction in FIGURE2.predictions]
    finals = run.finals.merge(
        np.log(fluctuation(run.curves, metrics).set_index(list(_KEYS))[metrics])
        .add_prefix(_JUMPS)
        .reset_index(),
        on=list(_KEYS),
    )
    rows = []
    for prediction in FIGURE2.predictions:
        read = prediction.model_copy(update={"metric": f"{_JUMPS}{prediction.metric}"})
        rows.append(designs.judged(finals, read, FIGURE2, designs.starts_of(run.preset)))
    return pd.DataFrame(rows)


_JUMPS = "jumps of "
_KEYS = ("variant", "beta", "seed")


def costs() -> pd.DataFrame:
    """Reward less the exact KL's at equal KL, in every recorded setting.

    Returns:
        The rows of :func:`predictions` of a reward at equal KL, one a variant, with ``setting``
        and ``margin``.
    """
    rows = []
    for preset, setting in SETTINGS.items():
        table = predictions(preset)
        kept = table[(table["at"] == "equal KL") & (table["other"] == "exact_loss")]
        margin = recorded(preset).preset.design.margin
        rows.append(kept.drop_duplicates("variant").assign(setting=setting, margin=margin))
    return pd.concat(rows, ignore_index=True)


def unpredicted(preset: str, variant: str, other: str, metric: str, beta: float) -> dict:
    """A comparison that no design names, at one coefficient: a row of :func:`predictions`."""
    run = recorded(preset)
    asked = Prediction(
        variant=variant, other=other, metric=metric, expected="equivalent", betas=(beta,), why=""
    )
    return designs.judged(run.finals, asked, run.preset.design, designs.starts_of(run.preset))


def shown(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Judged predictions as pages quote them.

    Args:
        table: of :func:`predictions`.
        names: variant -> what the page calls it.

    Returns:
        The table with ``key``, ``compared`` and ``spec``, a number format; means and
        ends of KLs and fluctuations are ratios in place of logarithms.
    """
    logs = table["metric"].isin(KLS) & (table["at"] != "equal KL")  # that fit has no logarithm
    of_kl = logs | table["metric"].str.startswith(_JUMPS)
    ratios = {name: table[name].where(~of_kl, np.exp(table[name])) for name in _ENDS}
    key = table["variant"] + "_" + table["other"] + "_" + table["metric"].str.replace(" ", "_")
    between = ["over" if kl else "less" for kl in of_kl]
    return table.assign(
        **ratios,
        key=key,
        compared=[
            f"{names.get(one, one)}, {how} {names.get(other, other)}"
            for one, how, other in zip(table["variant"], between, table["other"], strict=True)
        ],
        spec=np.where(of_kl, ".2f", "+.3f"),
    )


_ENDS = ("mean", "low", "high")


def against(variant: str, other: str, *, preset: str = "equal_kl") -> dict[str, float]:
    """One variant less another in reward at equal KL, by the design's fit."""
    return _fit(preset, variant, other).difference(recorded(preset).preset.design.margin)


def by_half(variant: str, *, preset: str = "equal_kl") -> dict[str, dict[str, float]]:
    """One variant less the exact KL in the ``near`` and the ``far`` half of the log KL compared."""
    fitted, margin = _fit(preset, variant, "exact_loss"), recorded(preset).preset.design.margin
    middle = (fitted.low + fitted.high) / 2
    halves = {"near": fitted._replace(high=middle), "far": fitted._replace(low=middle)}
    return {name: half.difference(margin) for name, half in halves.items()}


def span(preset: str) -> float:
    """By how much the exact KL's own reward changes over the log KL that it shares with k2."""
    fitted = _fit(preset, "k2_loss", "exact_loss")
    reward = fitted.curve(1, np.linspace(fitted.low, fitted.high, 60)).mean
    return float(np.ptp(reward))


@cache
def _fit(preset: str, variant: str, other: str) -> hierarchical.Fit:
    run = recorded(preset)
    return designs.at_equal_kl(run.finals, variant, other, designs.starts_of(run.preset))


def of_starts(finals: pd.DataFrame, starts: int) -> pd.DataFrame:
    """Means over the seeds of each start: rows of runs whose ``seed`` is the start."""
    keys = ["variant", "beta", "kl_estimator", "seed"]
    grouped = finals.assign(seed=finals["seed"] % starts).groupby(keys, sort=False)
    return grouped.mean(numeric_only=True).reset_index()


# --- What it draws ----------------------------------------------------------------------------


def draw_curves(names: Iterable[str] = COMPARED, *, preset: str = "equal_kl") -> Figure:
    """Reward over KL: points are means of a variant at one coefficient, lines the fits.

    Each line is that of the fit against the exact KL, over the central runs of the variant.
    """
    run = recorded(preset)
    figure, axes = style.subplots(height=4.2)
    means = of_starts(run.finals, designs.starts_of(run.preset))
    means = by_variant(means, ["reward", "reverse_kl"]).set_index(["metric", "variant"])
    names = list(names)
    for name in ("none", "exact_loss", *names):
        look = _look(name)
        x, y = (means.loc[(metric, [name]), :] for metric in ("reverse_kl", "reward"))
        bars = {"xerr": style.bars(x), "yerr": style.bars(y), "elinewidth": 1.0}
        axes.errorbar(x["mean"], y["mean"], **bars, **look | {"linestyle": "none"})
        if name == "none":
            continue
        other = names[0] if name == "exact_loss" else "exact_loss"
        own = np.log(run.finals.loc[run.finals["variant"] == name, designs.EQUAL])
        log_kl = np.linspace(*np.percentile(own, hierarchical.CENTRAL), 40)
        mean, low, high = _fit(preset, name, other).curve(0, log_kl)
        axes.plot(np.exp(log_kl), mean, color=look["color"], linestyle=look["linestyle"])
        if name == "exact_loss":
            axes.fill_between(np.exp(log_kl), low, high, color=look["color"], alpha=0.12, lw=0)
    _log_kl(axes)
    axes.set_ylabel("reward at the end")
    axes.legend(ncols=2)
    return figure


def draw_costs(table: pd.DataFrame) -> Figure:
    """Reward at equal KL, less that of the exact KL, one row a setting.

    Args:
        table: of :func:`costs`.
    """
    settings = list(dict.fromkeys(table["setting"]))
    figure, axes = style.subplots(height=1.4 + 0.7 * len(settings))
    seen = set()
    for place, setting in enumerate(settings):
        rows = table[table["setting"] == setting]
        margin = rows["margin"].iloc[0]
        axes.fill_betweenx(
            [place - 0.42, place + 0.42], -margin, margin, color=style.QUIET, alpha=0.12, lw=0
        )
        for shift, (_, row) in zip(
            np.linspace(-0.27, 0.27, len(rows)), rows.iterrows(), strict=True
        ):
            look = _look(row["variant"]) | {"linestyle": "none"}
            look |= {"label": "_"} if row["variant"] in seen else {}
            seen.add(row["variant"])
            ends = [[row["mean"] - row["low"]], [row["high"] - row["mean"]]]
            axes.errorbar(row["mean"], place + shift, xerr=ends, **look)
    axes.axvline(0.0, color=style.QUIET, linewidth=1.0)
    axes.set_yticks(range(len(settings)), settings)
    axes.invert_yaxis()
    axes.set_xlabel("reward, less that of the exact KL, at equal KL")
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    return figure


def draw_kls(finals: pd.DataFrame, names: Mapping[str, tuple[str, ...]]) -> Figure:
    """Reverse KL at the end over the coefficient, one panel a group; dotted: no KL term.

    Args:
        finals: one row per run, or of :func:`of_starts`.
        names: title -> variants.
    """
    figure, panels = style.subplots(
        len(names), 1, height=0.4 + 2.5 * len(names), sharex=True, sharey=True, squeeze=False
    )
    table = by_variant(finals, ["reverse_kl"]).set_index("variant")
    for axes, (title, variants) in zip(panels[:, 0], names.items(), strict=True):
        axes.axhline(table.loc["none", "mean"], color=style.QUIET, linestyle=":")
        for name in variants:
            rows = table.loc[name]
            axes.errorbar(rows["beta"], rows["mean"], yerr=style.bars(rows), **_look(name))
        axes.set(xscale="log", yscale="log", title=title, ylabel="reverse KL (nats)")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(ncols=2)
    panels[-1, 0].set_xlabel(r"coefficient $\beta$, log scale")
    panels[-1, 0].xaxis.set_major_formatter("{x:g}")
    return figure


def _look(variant: str) -> dict[str, Any]:
    return style.line(*TERMS[variant], label=NAMES[variant])


def _log_kl(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("exact reverse KL at the end (nats per token), log scale")
