"""Several reward models: who rewards a run, and which of them says when to stop, in chapter 22.

The design of :mod:`analysis.studies.presets.ensembles`. Gold is the task's own reward, which no run
and none of the rules sees but the one that names the peak.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.recorded import recorded
from analysis.records import statistics
from analysis.records.preset import KL_BUDGET, SPREAD_BUDGET
from analysis.records.statistics import Interval
from analysis.records.variants import PENALTY
from kl_term import style

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
    """A row per rule: mean ``update`` and ``kl`` over the starts, ``gold`` kept there, and how much
    ``less`` than the peak that is, each as ``mean``, ``low`` and ``high`` behind its name."""
    table = stopped()
    golds = table.pivot(index="seed", columns="rule", values="gold")
    found = []
    for rule, called in RULES.items():
        own = table[table["rule"] == rule]
        row = {"rule": rule, "called": called, "update": own["update"].mean()}
        row |= {"kl": own["reverse_kl"].mean()}
        for name, values in (("gold", golds[rule]), ("less", golds[rule] - golds["peak"])):
            of_rule = statistics.interval(values.to_numpy())._asdict()
            row |= {f"{name}_{end}": value for end, value in of_rule.items()}
        found.append(row)
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


def draw() -> Figure:
    """Truth, left, and spread, right, over training without a KL term: a line per ensemble."""
    figure, panels = style.subplots(1, 2, height=4.2)
    curves = recorded(ENSEMBLE).curves
    for (kind, called), look in zip(KINDS.items(), style.SERIES, strict=False):
        own = curves[curves["variant"] == f"none_{kind}"].groupby("update")
        for axes, metric in zip(panels, ("gold", "spread"), strict=True):
            line = own[metric].mean()
            axes.plot(line.index, line, **look | {"marker": "", "label": called})
    panels[0].set(title="The truth, unseen", xlabel="update", ylabel="true reward", ylim=(0, 1))
    panels[1].set(title="The members' disagreement", xlabel="update", ylabel="spread")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, ncols=2, loc="outside upper center")
    return figure
