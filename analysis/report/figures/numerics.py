"""Figures of the chapter on floating point: cancellation near the reference, clamps far from it."""

from __future__ import annotations

import pandas as pd
import torch
from matplotlib.figure import Figure

from analysis.experiments.chapters.numerics import clamped_coefficient
from analysis.kl.estimators import k2, k3
from analysis.report import style

#: Line style of each way of computing k3; the colour is k3's everywhere.
FORM_STYLES = {"naive": ":", "expm1": "--", "widened": "-"}


def cancellation(curves: pd.DataFrame) -> Figure:
    """Relative error of three forms of k3 against the size of the log-ratio, one panel a type."""
    dtypes = ("bfloat16", "float16", "float32")
    figure, panels = style.subplots(1, len(dtypes), sharey=True, height=3.7)
    for axes, dtype in zip(panels, dtypes, strict=True):
        for form, line_style in FORM_STYLES.items():
            curve = curves[(curves.form == form) & (curves["dtype"] == dtype)].sort_values("size")
            axes.plot(
                curve["size"],
                curve.error.clip(lower=1e-9),
                color=style.COLOURS["k3"],
                linestyle=line_style,
                label=form,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([1e-3, 1e-2])
        axes.set_title(dtype)
    panels[0].set_ylabel("relative error (log scale)")
    panels[0].legend(loc="center left", bbox_to_anchor=(0.0, 0.64), handlelength=2.0)
    figure.supxlabel("size of the log-ratio (nats, log scale)", fontsize="medium")
    return figure


def clamps(lowest: float, highest: float) -> Figure:
    """Gradient coefficient of k2 and k3 with the value clamped at 10, and without."""
    log_ratios = torch.linspace(lowest, highest, 1201, dtype=torch.float64)
    figure, axes = style.subplots(height=3.7)
    for name, estimator in (("k2", k2), ("k3", k3)):
        free = clamped_coefficient(log_ratios, estimator)
        clamped = clamped_coefficient(log_ratios, estimator, value_bound=10.0)
        look = {**style.line(name), "marker": ""}
        axes.plot(log_ratios, free, **{**look, "linestyle": ":", "label": "_"})
        axes.plot(log_ratios, clamped, **{**look, "label": f"{look['label']} clamped"})
    axes.set_ylim(-16, 7)
    axes.set_xlabel(r"$\log \pi_\theta - \log \pi_{\mathrm{ref}}$ of the sampled token (nats)")
    axes.set_ylabel(r"coefficient of $\nabla \log \pi_\theta$")
    axes.annotate("dead zones: no pull back", (lowest, 0.6), fontsize=11.5)
    axes.legend(loc="lower right")
    return figure
