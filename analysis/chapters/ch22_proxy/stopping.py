"""Several reward models: who rewards a run, and which of them says when to stop, in chapter 22.

The design of :mod:`analysis.studies.presets.ensembles`. Gold is the task's own reward, which no run
and none of the rules sees but the one that names the peak.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.interpolate import PchipInterpolator

from analysis.evidence.recorded import recorded
from analysis.records import statistics
from analysis.records.preset import KL_BUDGET, SPREAD_BUDGET
from analysis.records.statistics import Interval
from analysis.records.variants import PENALTY
from kl_term import style
from kl_term.numbers import with_interval

ENSEMBLE = "proxy_ensemble"
#: Ensemble -> what tables and figures call it.
KINDS = {
    "first": "one model",
    "mean": "mean of four",
    "worst": "least of four",
    "penalised": "mean less two spreads",
}
#: Variant -> what tables call it.
NAMES = {
    **{f"none_{kind}": f"no KL term, {called}" for kind, called in KINDS.items()},
    **{kind: f"exact KL, {called}" for kind, called in KINDS.items()},
    "growing": "exact KL while the spread is grown",
    "beyond": "exact KL where the spread is large",
}
#: The runs on which rules are compared: one model rewards, and the others look on.
WATCHED = "none_first"
#: Terms that act on some answers only, and their coefficient.
SOME, STRONG = ("growing", "beyond"), 1.0
#: Rule -> what the table calls it.
RULES = {
    "peak": "the truth is highest (nobody sees it)",
    "others": "the other models' mean is highest",
    "careful": "the mean of all less two spreads is highest",
    "spread": "before the spread has grown by half",
    "kl": "before the KL exceeds its budget",
    "end": "never",
}


def stops(run: pd.DataFrame, members: int) -> dict[str, int]:
    """Rule -> the place of the window at which it stops a run on the first of its models.

    ``spread`` and ``kl`` stop as training goes; ``others`` and ``careful`` choose among all windows
    afterwards, as somebody who kept them all would.

    Args:
        run: its windows, in order.
        members: models that score each answer.
    """
    spread, mean = run["spread"].to_numpy(), run["all_members"].to_numpy()
    others = (members * mean - run["proxy"].to_numpy()) / (members - 1)
    return {
        "peak": int(run["gold"].to_numpy().argmax()),
        "others": int(others.argmax()),
        "careful": int((mean - PENALTY * spread).argmax()),
        "spread": _last(spread <= SPREAD_BUDGET * spread[0]),
        "kl": _last(run["reverse_kl"].to_numpy() <= KL_BUDGET),
        "end": len(run) - 1,
    }


def _last(within: np.ndarray) -> int:
    """The last place before the first False; the last of all if there is none."""
    return int(np.logical_and.accumulate(within).sum()) - 1


def stopped(variant: str = WATCHED) -> pd.DataFrame:
    """A row per seed and rule: ``update``, ``reverse_kl`` and ``gold`` where it stops."""
    recording = recorded(ENSEMBLE)
    members = recording.preset.config.members
    rows = []
    for seed, run in recording.curves.query("variant == @variant").groupby("seed"):
        ordered = run.sort_values("update")
        for rule, place in stops(ordered, members).items():
            window = ordered.iloc[place]
            kept = {name: window[name] for name in ("update", "reverse_kl", "gold")}
            rows.append({"seed": seed, "rule": rule, **kept})
    return pd.DataFrame(rows)


def rules() -> pd.DataFrame:
    """A row per rule: mean ``update`` and ``kl`` over the starts, ``gold`` kept there and how much
    ``less`` than the peak that is, in the mean; with intervals as text in ``kept`` and ``lost``."""
    table = stopped()
    golds = table.pivot(index="seed", columns="rule", values="gold")
    found = []
    for rule, called in RULES.items():
        own = table[table["rule"] == rule]
        gold, less = (
            statistics.interval(values.to_numpy())
            for values in (golds[rule], golds[rule] - golds["peak"])
        )
        found.append(
            {
                "rule": rule,
                "called": called,
                "update": own["update"].mean(),
                "kl": own["reverse_kl"].mean(),
                "gold": gold.mean,
                "less": less.mean,
                "kept": with_interval(gold._asdict(), ".2f"),
                "lost": None if rule == "peak" else with_interval(less._asdict(), "+.2f"),
            }
        )
    return pd.DataFrame(found)


def over(rule: str, other: str) -> Interval:
    """Truth that one rule keeps less that of another, over the starts."""
    golds = stopped().pivot(index="seed", columns="rule", values="gold")
    return statistics.interval((golds[rule] - golds[other]).to_numpy())


def at_the_end(variant: str, beta: float = 0.0) -> float:
    """Gold of a variant's final policies, mean over the starts."""
    finals = recorded(ENSEMBLE).finals
    own = finals[(finals["variant"] == variant) & (finals["beta"] == beta)]
    return float(own["final_gold"].mean())


def spread_growth(variant: str = WATCHED) -> float:
    """How many times its first window's the spread of a run's last window is, geometric mean."""
    curves = recorded(ENSEMBLE).curves.query("variant == @variant").sort_values("update")
    ends = curves.groupby("seed")["spread"].agg(["first", "last"])
    return float(np.exp(np.log(ends["last"] / ends["first"]).mean()))


def off_the_curve(*variants: str) -> Interval:
    """Gold of final policies less that of runs on one model at the same KL, over the starts.

    Of each start these are one curve in the root of the KL: a monotone cubic through the first
    window, at the reference, and its runs with the term and without. Policies beyond its end are
    left out.
    """
    recording = recorded(ENSEMBLE)
    finals, differences = recording.finals, []
    for seed, first in recording.curves.query("variant == 'first' and update == 0").groupby("seed"):
        of_seed = finals[finals["seed"] == seed]
        points = of_seed[of_seed["variant"].isin(("first", WATCHED))]
        points = points.sort_values("final_reverse_kl")
        roots = np.array([0.0, *points["final_reverse_kl"] ** 0.5])
        curve = PchipInterpolator(roots, [first["gold"].mean(), *points["final_gold"]])
        own = of_seed[of_seed["variant"].isin(variants)]
        own = own[own["final_reverse_kl"] ** 0.5 <= roots[-1]]
        if len(own):
            of_curve = curve(own["final_reverse_kl"] ** 0.5)
            differences.append(float((own["final_gold"] - of_curve).mean()))
    return statistics.interval(np.array(differences))


def draw() -> Figure:
    """Truth and spread over training without a KL term, and truth over the KL at the end.

    A line per ensemble; over the KL its points are its coefficients, and grey ones are terms that
    act on some answers only.
    """
    figure, axes = style.subplots(2, 2, height=6.6)
    *panels, rest = axes.flat
    curves, finals = recorded(ENSEMBLE).curves, recorded(ENSEMBLE).finals
    for (kind, called), look in zip(KINDS.items(), style.SERIES, strict=False):
        own = curves[curves["variant"] == f"none_{kind}"].groupby("update")
        for panel, metric in zip(panels, ("gold", "spread"), strict=False):
            line = own[metric].mean()
            panel.plot(line.index, line, **look | {"marker": "", "label": called})
        ends = finals[finals["variant"].isin((kind, f"none_{kind}"))].groupby(["variant", "beta"])
        points = ends[["final_reverse_kl", "final_gold"]].mean().sort_values("final_reverse_kl")
        panels[2].plot(points["final_reverse_kl"], points["final_gold"], **look)
    some = finals[finals["variant"].isin(SOME)].groupby("variant")
    some = some[["final_reverse_kl", "final_gold"]].mean()
    panels[2].scatter(some["final_reverse_kl"], some["final_gold"], color=style.QUIET, zorder=3)
    panels[0].set(title="The truth, unseen", xlabel="update", ylabel="true reward", ylim=(0, 1))
    panels[1].set(title="Their disagreement", xlabel="update", ylabel="spread")
    panels[1].set_ylim(bottom=0)
    panels[2].set(title="One curve", xlabel="KL at the end (nats)", xscale="log", ylim=(0, 1))
    panels[2].set_ylabel("true reward at the end")
    style.plain_numbers(panels[2].xaxis)
    rest.axis("off")
    rest.legend(*panels[0].get_legend_handles_labels(), loc="center")
    return figure
