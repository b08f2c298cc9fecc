"""How far trained policies are from the reference where the reference goes, skill by skill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.training_figures import KL_TERMS
from analysis.records import summaries
from analysis.records.retention import Retention
from kl_term import style


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


def from_no_kl(finals: pd.DataFrame, variants: Iterable[str]) -> pd.DataFrame:
    """Rows of ``none`` and of the variants, and for each variant a copy of those of ``none``,
    where its curve over beta begins."""
    none = finals[finals["variant"] == "none"]
    kept = [finals[finals["variant"] == variant] for variant in variants]
    starts = [none.assign(variant=variant) for variant in variants]
    return pd.concat([none, *starts, *kept], ignore_index=True)


def draw(table: pd.DataFrame, shown: Sequence[tuple[str, float]]) -> Figure:
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
