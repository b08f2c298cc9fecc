"""Figures of the chapter on the full vocabulary: what it costs and what noise it removes."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.report import style

#: Colour, marker and label of each way of computing a KL loss.
METHODS = {
    "sampled": ("k2", "sampled token"),
    "naive": ("none", "full, logits stored"),
    "chunked": ("reverse", "full, in blocks"),
    "liger": ("forward", "full, Liger"),
}


def benchmark(table: pd.DataFrame) -> Figure:
    """Peak memory and CPU time of forward and backward against the vocabulary, by method."""
    figure, panels = style.subplots(1, 2, height=3.9)
    for method, (name, label) in METHODS.items():
        rows = table[table.method == method].sort_values("vocab")
        if rows.empty:
            continue
        look = {"color": style.COLOURS[name], "marker": style.MARKERS[name], "label": label}
        panels[0].loglog(rows.vocab, rows.peak_bytes / 2**30, **look)
        panels[1].loglog(rows.vocab, rows.seconds, **look)
    panels[0].set_title("peak memory (GiB)")
    panels[1].set_title("CPU time (seconds)")
    for axes, ticks in zip(panels, ((0.1, 0.3, 1, 3), (0.2, 0.5, 1, 2, 5)), strict=True):
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([8192, 32768, 131072], ["8k", "32k", "131k"])
        axes.minorticks_off()
    panels[0].legend(loc="upper left", fontsize=10)
    figure.supxlabel("vocabulary (both scales logarithmic)", fontsize="medium")
    return figure


def noise(table: pd.DataFrame) -> Figure:
    """Sampled tokens that one token with the full vocabulary is worth, against the vocabulary."""
    figure, axes = style.subplots(height=3.7)
    drifts = sorted(table.drift.unique())
    shades = dict(zip(drifts, ("-", "--", ":"), strict=False))
    for (arm, drift), rows in table.groupby(["arm", "drift"]):
        look = {**style.line(arm), "linestyle": shades[drift]}
        kl = rows.kl.median()
        axes.loglog(rows.vocab, rows.tokens, **{**look, "label": f"{look['label']}, {kl:.2g} nats"})
    axes.set_ylim(4, 400)
    axes.set_yticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
    axes.set_xticks(sorted(table.vocab.unique()), [f"{v:,}" for v in sorted(table.vocab.unique())])
    axes.minorticks_off()
    axes.set_xlabel("vocabulary (both scales logarithmic)")
    axes.set_ylabel("sampled tokens worth\none with the full vocabulary")
    style.label_line_ends(axes)
    return figure
