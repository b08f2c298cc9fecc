"""What the chapter shows of the trainers: who minimises what, one row a path, and a line each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd
import torch
from IPython.display import Markdown
from matplotlib.figure import Figure

from analysis.chapters.ch14_frameworks.answers import (
    DIVIDED_BY,
    Known,
    Tree,
    Verdict,
    answers_table,
    batch_gradient,
    judged,
)
from analysis.chapters.ch14_frameworks.trainers.registry import Path
from kl_term import style
from kl_term.audit.targets import NEITHER

#: Verdict of a sum over tokens -> how the page puts it, in the order of the page.
MINIMISED = {
    "reverse KL": "the reverse KL",
    "forward KL": "the forward KL",
    "nothing": "nothing: the reference drops out",
    "half chi-square": "half χ²(π‖ref)",
    "reverse - forward": "reverse KL less forward KL",
    "negative entropy": "minus the entropy: no reference",
    "1 / length": "one over the length: longer answers",
}
OTHER = "no divergence"


def verdicts(paths: Iterable[Path], at: Tree) -> pd.DataFrame:
    """One row a path with a default: what it minimises per token (``summed``: tokens added up),
    fresh and ``stale``, and over whole answers with its own divisor (``divided``)."""
    paths = list(paths)
    own = answers_table(paths, at)
    summed = answers_table((replace(path, divisor="seq_mean_token_sum") for path in paths), at)
    listed = [
        path
        for path in paths
        if path.default is not None and path.default not in path.samples_of_reference
    ]
    return own.assign(
        summed=summed.fresh,
        stale=summed.stale,
        divided=own.fresh,
        beta=[path.beta for path in listed],
        divisor=[DIVIDED_BY[path.divisor] for path in listed],
        minimises=[minimised(verdict) for verdict in summed.fresh],
        over_answers=[minimised(verdict) for verdict in own.fresh],
    )


def minimised(verdict: Verdict) -> str:
    """How the page puts a verdict, whole answers and single tokens alike."""
    return OTHER if verdict.of == NEITHER else MINIMISED.get(verdict.of, verdict.name)


def grouped(table: pd.DataFrame, by: str = "minimises") -> pd.DataFrame:
    """What the defaults minimise, and whose: a star marks a KL that is on as shipped.

    Args:
        by: ``minimises``, per token, or ``over_answers``, with each trainer's own divisor.
    """
    starred = table.framework + table.beta.gt(0).map({True: "*", False: ""})
    rows = []
    for name in (*MINIMISED.values(), OTHER):
        row = {"minimises": name}
        for placement in ("loss", "reward"):
            chosen = (table[by] == name) & (table.placement == placement)
            row[placement] = ", ".join(sorted(starred[chosen], key=str.lower)) or "–"
        if {row["loss"], row["reward"]} != {"–"}:
            rows.append(row)
    return pd.DataFrame(rows)


def one_a_path(table: pd.DataFrame) -> pd.DataFrame:
    """Every default as a page shows it."""

    def short(verdict: Verdict) -> str:
        return "–" if verdict.of == NEITHER else verdict.of

    return table.assign(
        summed=table.summed.map(short),
        stale=table.stale.map(short),
        divided=table.divided.map(short),
        shipped=table.beta.map(lambda beta: f"{beta:g}" if beta else "off"),
    )


def every_price(paths: Iterable[Path], at: Tree) -> pd.DataFrame:
    """Every setting of a KL in the reward, its advantage estimator included, on fresh samples: what
    it minimises when tokens are added up, how strongly in pairs, and with the trainer's divisor."""
    fresh = at.fresh()
    known = Known.at(fresh)
    rows = []
    for path in paths:
        if path.placement == "loss":
            continue
        tokens = replace(path, divisor="seq_mean_token_sum")
        for setting in path.settings:
            summed, divided = (
                judged(batch_gradient(which, setting, fresh, large=True), known)
                for which in (tokens, path)
            )
            rows.append(
                {
                    "framework": path.framework,
                    "setting": setting,
                    "summed": "–" if summed.of == NEITHER else summed.name,
                    "force": summed.scale,
                    "divided": "–" if divided.of == NEITHER else divided.name,
                }
            )
    return pd.DataFrame(rows)


def remedies(paths: Iterable[Path], table: pd.DataFrame) -> Markdown:
    """For each default that is not the reverse KL, the line that changes it, and where its
    maintainers discuss it."""
    wrong = {
        (row.framework, row.placement): row
        for row in table.itertuples()
        if row.minimises != MINIMISED["reverse KL"]
    }
    lines = []
    for path in sorted(paths, key=lambda path: path.framework.lower()):
        row = wrong.get((path.framework, path.placement))
        if row is None or not path.remedy:
            continue
        since = f", since {path.since}" if path.since else ""
        said = [f"**{path.framework}**, KL in the {path.placement} ({path.flag}{since})"]
        said[0] += f": {row.minimises}."
        said += [f"One line: `{path.remedy}`.", path.remark, _linked(path.threads)]
        lines.append("- " + " ".join(part for part in said if part))
    return Markdown("\n".join(lines))


def _linked(threads: Iterable[str]) -> str:
    """Links to threads and what the stored copies say of each."""
    links = []
    for thread in threads:
        name, status = thread.split()
        repository, number = name.split("#")
        address = f"https://github.com/{repository}/issues/{number}"
        links.append(f"[{repository.partition('/')[2]} #{number}]({address}) ({status})")
    return f"Discussed in {', '.join(links)}." if links else ""


def sources(paths: Iterable[Path]) -> pd.DataFrame:
    """What was read, one row a file."""
    rows = {path.source: path.since for path in paths}
    return pd.DataFrame([{**source._asdict(), "since": since} for source, since in rows.items()])


def zones(table: pd.DataFrame) -> pd.DataFrame:
    """Settings by where their clamps leave no gradient.

    See :func:`~analysis.chapters.ch14_frameworks.dead_zones`.
    """
    clamped = table.dropna(subset=["below", "above"], how="all").round(1)
    named = clamped.framework + " " + clamped.setting
    sides = [clamped[side].fillna(torch.inf) for side in ("below", "above")]
    rows = [
        {"below": below, "above": above, "settings": "; ".join(named[group.index])}
        for (below, above), group in named.groupby(sides)
    ]
    return pd.DataFrame(rows).replace(torch.inf, torch.nan)


#: Settings whose names are too long for a figure.
TICKED = {
    "use_bias_correction_kl": "with the flag",
    "without": "without",
    "k3, unbiased_gradient": "unbiased_gradient",
}
#: Colour of what a term descends, by the name the audit gives it.
DESCENDS = {
    "reverse KL": style.COLOURS["reverse"],
    "forward KL": style.COLOURS["forward"],
    "nothing": style.COLOURS["none"],
    "neither KL": style.COLOURS["k1"],
}


def ticks(table: pd.DataFrame, frameworks: Iterable[str] = ("TRL", "verl", "OpenRLHF")) -> Figure:
    """How far each setting of a few trainers is from the reverse KL's gradient: a tick above the
    line on fresh samples, joined to one below it on stale ones; a dot marks the default.

    Args:
        table: of :func:`analysis.chapters.ch14_frameworks.audit`.
        frameworks: in the order of the rows.
    """
    frameworks = list(frameworks)
    floor, tall = 0.03, 0.22
    figure, axes = style.subplots(height=0.95 * len(frameworks) + 1.2)
    for y, framework in enumerate(reversed(frameworks)):
        rows = table[table.framework == framework]
        style.guide(axes, y=y, linestyle="-", color=style.RC["grid.color"])
        for row in rows.itertuples():
            ends = [max(row.fresh_error, floor), max(row.stale_error, floor)]
            colours = [
                DESCENDS.get(name, DESCENDS["neither KL"])
                for name in (row.fresh_descends, row.stale_descends)
            ]
            axes.plot(ends, [y, y], color=style.QUIET, linewidth=1)
            for x, side, colour in zip(ends, (tall, -tall), colours, strict=True):
                axes.plot([x, x], [y, y + side], color=colour, linewidth=2.5)
                if row.default:
                    axes.plot(x, y + side, marker="o", color=colour)
        fresh = rows.fresh_error.clip(lower=floor)
        for _, settings in rows.setting.groupby(fresh.round(2)):
            text = ", ".join(TICKED.get(setting, setting) for setting in settings)
            style.note(axes, text, (fresh[settings.index[0]], y + tall), offset=(4, 5), fontsize=10)
    axes.set_yticks(range(len(frameworks)), list(reversed(frameworks)))
    axes.set_ylim(-0.5, len(frameworks) - 0.3)
    axes.set_xscale("log")
    axes.set_xlim(floor / 1.3, 6)
    axes.set_xticks([floor, 0.1, 0.3, 1, 3], ["exact", "0.1", "0.3", "1", "3"])
    axes.minorticks_off()
    axes.set_xlabel("error of the mean gradient (log scale)")
    axes.grid(False, axis="y")
    for name, colour in DESCENDS.items():
        axes.plot([], [], color=colour, linewidth=2.5, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=4, fontsize=9.5)
    return figure
