"""What runs on learned rewards of few and many labels show of the truth, which they never saw.

The designs of :mod:`analysis.studies.presets.proxies`; gold is the task's own reward.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.recorded import recorded
from analysis.evidence.training_figures import KL_TERMS, bands
from analysis.records.summaries import by_variant
from kl_term import style

#: Design -> labels that its reward models were fitted to.
LABELS = {"proxy_1k": 1_000, "proxy_5k": 5_000}
#: Term -> estimator and placement, which say how it is drawn.
TERMS = {
    "none": KL_TERMS["none"],
    "exact_loss": KL_TERMS["exact_loss"],
    "k2_loss": KL_TERMS["k2_loss"],
    "k1_reward": KL_TERMS["k1_reward"],
    "k3_loss": KL_TERMS["k3_loss"],
    "forward_loss": ("forward", "loss"),
}
#: The coefficient of the exact KL that is drawn over training.
BETA = 0.4


def ends(preset: str) -> pd.DataFrame:
    """Means over the starts of a design, indexed by ``metric``, ``variant`` and ``beta``."""
    metrics = ["final_gold", "final_proxy", "final_reverse_kl"]
    table = by_variant(recorded(preset).finals, metrics)
    return table.set_index(["metric", "variant", "beta"])["mean"]


def begins(preset: str) -> dict[str, float]:
    """``gold`` and ``proxy`` of the first logging window of the runs without a term, mean over the
    starts."""
    curves = recorded(preset).curves.query("variant == 'none'")
    first = curves[curves["update"] == curves["update"].min()]
    return first[["gold", "proxy"]].mean().to_dict()


def numbers(preset: str) -> dict[str, float]:
    """What the prose says of one design's means: where runs begin, where they end without a term
    and with the exact KL, and by which update half of what is lost without a term was lost."""
    table, first = ends(preset), begins(preset)
    gold, kl = table["final_gold"], table["final_reverse_kl"]
    curve = recorded(preset).curves.query("variant == 'none'").groupby("update")["gold"].mean()
    half = (first["gold"] + gold["none"].iloc[0]) / 2
    exact = gold["exact_loss"]
    return {
        "start_gold": first["gold"],
        "start_proxy": first["proxy"],
        "none_gold": gold["none"].iloc[0],
        "none_proxy": table["final_proxy"]["none"].iloc[0],
        "none_kl": kl["none"].iloc[0],
        "best_beta": exact.idxmax(),
        "best_gold": exact.max(),
        "best_kl": kl["exact_loss"][exact.idxmax()],
        "half_lost": curve.index[np.argmax(curve.to_numpy() < half)],
    }


def draw_over_training(preset: str) -> Figure:
    """Proxy on the left, gold on the right, over training: no KL term, and the exact KL."""
    run = recorded(preset)
    kept = run.curves[run.curves["beta"].isin((0.0, BETA))]
    looks = {
        "none": style.line(*TERMS["none"], label=NAMES["none"]),
        "exact_loss": style.line(*TERMS["exact_loss"], label=rf"exact KL, $\beta = {BETA:g}$"),
    }
    figure, panels = style.subplots(1, 2, height=3.7)
    titles = {"proxy": "What the runs see", "gold": "The truth, which they do not see"}
    for panel, (metric, title) in zip(panels, titles.items(), strict=True):
        bands(panel, kept, metric, looks)
        panel.set(title=title, xlabel="update", ylabel=f"mean {metric} reward")
    panels[1].legend(loc="lower left")
    return figure


def draw_gold() -> Figure:
    """Gold over the KL at the end, a panel a design; each line a term, each point a coefficient."""
    figure, panels = style.subplots(1, len(LABELS), height=4.2, sharey=True)
    for axes, (preset, labels) in zip(panels, LABELS.items(), strict=True):
        table = by_variant(recorded(preset).finals, ["final_gold", "final_reverse_kl"])
        table = table.set_index(["metric", "variant"])
        for name, drawn in TERMS.items():
            x, y = (table.loc[(m, [name]), :] for m in ("final_reverse_kl", "final_gold"))
            bars = {"xerr": style.bars(x), "yerr": style.bars(y), "elinewidth": 1.0}
            axes.errorbar(x["mean"], y["mean"], **bars, **style.line(*drawn, label=NAMES[name]))
        axes.axhline(begins(preset)["gold"], color=style.QUIET, linestyle=":")
        axes.set(xscale="log", title=f"{labels:,} labels", xlabel="exact reverse KL (nats a token)")
        style.plain_numbers(axes.xaxis)
    panels[0].set_ylabel("true reward at the end")
    panels[0].legend(loc="lower left")
    return figure
