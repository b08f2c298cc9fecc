"""What runs on learned rewards of few and many labels show of the truth, which they never saw.

The designs of :mod:`analysis.studies.presets.proxies`; gold is the task's own reward.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.interpolate import PchipInterpolator

from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.recorded import recorded
from analysis.evidence.training_figures import KL_TERMS, bands
from analysis.records import statistics
from analysis.records.statistics import Interval
from analysis.records.summaries import by_variant
from kl_term import style

#: Design -> labels that its reward models were fitted to.
LABELS = {"proxy_1k": 1_000, "proxy_5k": 5_000, "proxy_20k": 20_000}
#: Term -> estimator and placement, which say how it is drawn.
TERMS = {
    "none": KL_TERMS["none"],
    "exact_loss": KL_TERMS["exact_loss"],
    "k2_loss": KL_TERMS["k2_loss"],
    "k1_reward": KL_TERMS["k1_reward"],
    "k3_loss": KL_TERMS["k3_loss"],
    "forward_loss": ("forward", "loss"),
}
#: Terms that descend the reverse KL.
REVERSE = ("exact_loss", "k2_loss", "k1_reward", "k3_loss_attached_prefix")
#: The coefficient of the exact KL that is drawn over training, and one at which terms differ.
DRAWN, COMPARED = 1.0, 0.2

#: Of :func:`numbers`: how it is written, where two decimals do not fit.
SPECS = {"half_lost": ".0f", "best_beta": "g", "k3_loss_kl": ".1f"}


def ends(preset: str) -> pd.Series:
    """Means over the starts of a design, by ``metric``, ``variant`` and ``beta``."""
    metrics = ["final_gold", "final_proxy", "final_reverse_kl"]
    table = by_variant(recorded(preset).finals, metrics)
    return table.set_index(["metric", "variant", "beta"])["mean"]


def without_term(preset: str) -> pd.DataFrame:
    """``gold`` and ``proxy`` of the runs without a term, mean over the starts, by ``update``."""
    curves = recorded(preset).curves.query("variant == 'none'")
    return curves.groupby("update")[["gold", "proxy"]].mean()


def numbers(preset: str) -> dict[str, float]:
    """What the prose says of the means of one design.

    Where runs begin, in their first window, and end without a term, and by which update half of
    what is lost was lost; the ``best`` of the exact KL's coefficients and the ``worst``; and the
    exact KL and k3 as a loss at one coefficient.
    """
    gold, proxy, kl = (ends(preset)[f"final_{name}"] for name in ("gold", "proxy", "reverse_kl"))
    curve = without_term(preset)
    first, last = curve.iloc[0], float(gold["none"].iloc[0])
    lost = curve.index[curve["gold"] < (first["gold"] + last) / 2]
    best, worst = float(gold["exact_loss"].idxmax()), float(gold["exact_loss"].idxmin())
    found = {
        "start_gold": first["gold"],
        "start_proxy": first["proxy"],
        "none_gold": last,
        "none_proxy": proxy["none"].iloc[0],
        "half_lost": int(lost[0]),
        "best_beta": best,
        "best_gold": gold["exact_loss"][best],
        "worst_gold": gold["exact_loss"][worst],
    }
    for name in ("exact_loss", "k3_loss"):
        found[f"{name}_gold"] = gold[name][COMPARED]
        found[f"{name}_kl"] = kl[name][COMPARED]
    return {key: float(value) for key, value in found.items()}


# --- Differences over the starts that no design names: chosen after the runs ------------------


def gained(preset: str, beta: float) -> Interval:
    """Gold of the exact KL's final policies less that of their own first window."""
    run = recorded(preset)
    curves, finals = (
        table[(table["variant"] == "exact_loss") & (table["beta"] == beta)].set_index("seed")
        for table in (run.curves, run.finals)
    )
    first = curves.loc[curves["update"] == curves["update"].min(), "gold"]
    return statistics.interval((finals["final_gold"] - first).to_numpy())


def of_labels(preset: str, other: str) -> Interval:
    """Gold without a KL term less that under another design, on the same starts."""
    finals = (recorded(name).finals.query("variant == 'none'") for name in (preset, other))
    own, others = (table.set_index("seed")["final_gold"] for table in finals)
    return statistics.interval((own - others).to_numpy())


def over_stopped(preset: str) -> Interval:
    """Gold of the exact KL's final policies less that of a run without a term, stopped at their KL.

    The latter is read off each start's own run, linearly in the root of the KL. A window's KL is
    read as it begins, its gold over all of it, so that gold stands at the mean of its KL and the
    next one's. Averaged over the coefficients whose KL that run passes, then over the starts.
    """
    run = recorded(preset)
    differences = []
    for seed, path in run.curves.query("variant == 'none'").groupby("seed"):
        path = path.sort_values("update")
        kl, gold = path["reverse_kl"].to_numpy(), path["gold"].to_numpy()[:-1]
        way = np.sqrt(np.maximum.accumulate((kl[:-1] + kl[1:]) / 2))
        own = run.finals[(run.finals["variant"] == "exact_loss") & (run.finals["seed"] == seed)]
        reached = np.sqrt(own["final_reverse_kl"].to_numpy())
        passed = (way[0] <= reached) & (reached <= way[-1])
        lost = own["final_gold"].to_numpy() - np.interp(reached, way, gold)
        if passed.any():
            differences.append(float(lost[passed].mean()))
    return statistics.interval(np.array(differences))


def below_the_curve(preset: str, variant: str) -> Interval:
    """Gold of a term's final policies less that of the sampled and exact terms of the reverse KL.

    Near the reference, at the two largest coefficients. Of each start these terms are one curve in
    the root of the KL, through their means at each coefficient (a monotone cubic).
    """
    finals = recorded(preset).finals
    pooled = finals[finals["variant"].isin(REVERSE)].groupby(["seed", "beta"], as_index=False)
    pooled = pooled[["final_reverse_kl", "final_gold"]].mean()
    near = sorted(pooled["beta"].unique())[-2:]
    differences = []
    for seed, points in pooled.groupby("seed"):
        points = points.sort_values("final_reverse_kl")
        curve = PchipInterpolator(points["final_reverse_kl"] ** 0.5, points["final_gold"])
        own = finals[(finals["variant"] == variant) & (finals["seed"] == seed)]
        own = own[own["beta"].isin(near)]
        of_curve = curve(own["final_reverse_kl"] ** 0.5)
        differences.append(float((own["final_gold"] - of_curve).mean()))
    return statistics.interval(np.array(differences))


def draw_over_training(preset: str) -> Figure:
    """Proxy on the left, gold on the right, over training: no KL term, and the exact KL."""
    run = recorded(preset)
    kept = run.curves[run.curves["beta"].isin((0.0, DRAWN))]
    looks = {
        "none": style.line(*TERMS["none"], label=NAMES["none"]),
        "exact_loss": style.line(*TERMS["exact_loss"], label=rf"exact KL, $\beta = {DRAWN:g}$"),
    }
    figure, panels = style.subplots(1, 2, height=3.7)
    titles = {"proxy": "The proxy, seen", "gold": "The truth, unseen"}
    for panel, (metric, title) in zip(panels, titles.items(), strict=True):
        bands(panel, kept, metric, looks)
        panel.set(title=title, xlabel="update", ylabel=f"mean {metric} reward")
    panels[1].legend(loc="center right")
    return figure


def draw_gold() -> Figure:
    """Gold over the KL at the end, a panel a design; each line a term, each point a coefficient."""
    figure, panels = style.subplots(1, len(LABELS), height=4.2, sharey=True, squeeze=False)
    for axes, (preset, labels) in zip(panels.flat, LABELS.items(), strict=True):
        table = by_variant(recorded(preset).finals, ["final_gold", "final_reverse_kl"])
        table = table.set_index(["metric", "variant"])
        for name, drawn in TERMS.items():
            x, y = (table.loc[(m, [name]), :] for m in ("final_reverse_kl", "final_gold"))
            bars = {"xerr": style.bars(x), "yerr": style.bars(y), "elinewidth": 1.0}
            axes.errorbar(x["mean"], y["mean"], **bars, **style.line(*drawn, label=NAMES[name]))
        axes.axhline(without_term(preset)["gold"].iloc[0], color=style.QUIET, linestyle=":")
        axes.set(xscale="log", title=f"{labels:,} labels")
        style.plain_numbers(axes.xaxis)
    panels[0, 0].set_ylabel("true reward at the end")
    figure.supxlabel("exact reverse KL at the end (nats a token), log scale", fontsize="medium")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), ncols=3, loc="outside upper center")
    return figure
