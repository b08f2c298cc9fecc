"""The figures of chapter 6."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.chapters.ch06_sequences.ratios import WEIGHTS
from kl_term import style
from kl_term.kl.prefix import PRODUCT

EXPECTED_ERROR = "relative error of the\nexpected gradient"


#: Colour and label of each critic of GAE, and of each memory of a policy.
CRITIC_LOOKS = {
    "zero": {"color": "#9A5B00", "marker": "o", "label": "no critic"},
    "exact": {"color": "#111111", "marker": "o", "label": "discounted critic"},
    "scaled": {"color": "#3D5A9E", "marker": "o", "label": "scaled critic"},
}


MEMORY_LOOKS = {
    0.0: {"color": "#3D5A9E", "marker": "o", "label": "mixes fast"},
    5.0: {"color": "#9A5B00", "marker": "o", "label": "repeats\nitself"},
}


#: Estimator that colours each way to the sequence KL's gradient, its line style and its label.
WAY_LOOKS: dict[str, dict[str, str]] = {
    way: {"color": style.COLOURS[colour], "linestyle": dashes, "label": label}
    for way, colour, dashes, label in (
        ("k1 prefix", "k1", "-", "$k_1$ prefix loss"),
        (PRODUCT, "none", ":", "reward, product"),
        ("k1 reward to go", "k1", "--", "$k_1$ reward"),
        ("k3 prefix", "k3", "-", "$k_3$ prefix loss"),
        ("full vocabulary prefix", "exact", "-", "full vocabulary"),
    )
}


def draw_gae(curves: pd.DataFrame) -> Figure:
    """Error of the KL's gradient through GAE against lambda, one panel a discount."""
    gammas = sorted(curves.gamma.unique(), reverse=True)
    panels = {"panel": "gamma", "titles": {g: rf"$\gamma = {g:g}$" for g in gammas}}
    panels |= {"ylim": (-0.04, 1.4), "xticks": [0, 0.5, 1], "height": 3.7}
    labels = {"xlabel": r"$\lambda$ of GAE", "ylabel": EXPECTED_ERROR}
    looks = {"kind": "critic", "looks": CRITIC_LOOKS}
    return style.lines(curves, "lam", **looks, **labels, **panels, **style.P10_TO_P90)


def draw_lengths(curves: pd.DataFrame) -> Figure:
    """Error of a token-weighted loss against the length, for a short and for a long memory."""
    labels = {"xlabel": "tokens in a sequence (log scale)", "ylabel": EXPECTED_ERROR}
    looks = {"kind": "stickiness", "looks": MEMORY_LOOKS, "xscale": "log", "ylim": (-0.02, None)}
    figure = style.lines(curves, "length", **looks, **labels, **style.P10_TO_P90)
    return _binary_scale(figure, curves.length.unique())


def draw_noise(curves: pd.DataFrame) -> Figure:
    """Sequences until signal equals noise against their length, fresh and stale."""
    fresh_product = (curves.staleness == 0) & (curves.way == PRODUCT)  # there the product is one
    shown = curves[(curves.length > 1) & ~fresh_product]
    titles = {0.0: "fresh samples", curves.staleness.max(): "stale samples"}
    looks = {"kind": "way", "looks": WAY_LOOKS, "panel": "staleness", "titles": titles}
    labels = {"xlabel": "tokens in a sequence (log scale)"}
    labels |= {"ylabel": "sequences until signal\nequals noise (log scale)"}
    figure = style.lines(shown, "length", "samples", **looks, **labels, **style.LOG_LOG, height=4.6)
    return _binary_scale(figure, (2, 16, 128, 512))


def _binary_scale(figure: Figure, ticks: Iterable[int]) -> Figure:
    """The figure with powers of two along the axis, and these numbers written out."""
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(ticks), [str(n) for n in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    return figure


SPREAD_LOOKS = {
    "product": {"color": "#111111", "label": "product"},
    "token": {"color": "#3D5A9E", "label": "one token"},
    "geometric": {"color": "#7A3E9D", "label": "GSPO"},
}


def draw_spreads(curves: pd.DataFrame) -> Figure:
    """Standard deviation of a sequence's weight against its length, both axes logarithmic."""
    shown = curves.melt("length", list(SPREAD_LOOKS)).query("value < 1e4")
    labels = {"xlabel": "tokens in a sequence (log scale)"}
    labels |= {"ylabel": "standard deviation of the\nweight (log scale)"}
    looks = {"kind": "variable", "looks": SPREAD_LOOKS}
    return style.lines(shown, "length", "value", **looks, **labels, **style.LOG_LOG)


def draw_weights(table: pd.DataFrame) -> Figure:
    """Bias and noise of seven off-policy weights, a row each."""
    columns = {
        "bias": "bias\n(relative error)",
        "noise": "noise of a sequence\n(norms of the gradient)",
    }
    shown = table.assign(label=table.weight.map(WEIGHTS))
    return style.lollipops(shown, "label", columns, colour="#3D5A9E")
