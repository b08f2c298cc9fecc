"""The worlds that the page shows, and its pictures of them."""

from __future__ import annotations

import pandas as pd
import torch
from matplotlib.figure import Figure

from analysis.chapters.ch22_proxy.worlds import (
    OPTIMA,
    World,
    independent,
    normal_mass,
    of_calibration,
    student_mass,
    truth_curve,
)
from kl_term import style

_GRID = torch.linspace(-4, 4, 81, dtype=torch.float64)
_BETAS = (10 ** torch.linspace(2, -2, 121, dtype=torch.float64)).tolist()
#: The page's bent calibration curve: the truth is the proxy, less three tenths of its square.
BEND = 0.3


def worlds() -> dict[str, World]:
    """The worlds of the figures: how the error of the proxy comes about, in words."""
    mass, heavy = normal_mass(_GRID), 10 * _GRID
    return {
        "bent": of_calibration(
            2 * _GRID, normal_mass(2 * _GRID), 2 * _GRID - BEND * (2 * _GRID) ** 2
        ),
        "light": independent(_GRID, mass, _GRID, mass),
        "heavy": independent(_GRID, mass, heavy, student_mass(heavy, 2.0)),
    }


def curves() -> pd.DataFrame:
    """Truth and proxy over the KL in every world, for every divergence."""
    tables = [
        truth_curve(world, divergence, _BETAS).assign(world=name)
        for name, world in worlds().items()
        for divergence in OPTIMA
    ]
    return pd.concat(tables, ignore_index=True)


def at_kl(table: pd.DataFrame, kl: float) -> dict[str, pd.Series]:
    """World -> the truth of each divergence at the coefficient that comes nearest to a KL."""
    nearest = (table.kl - kl).abs().groupby([table.world, table.divergence]).idxmin()
    found = table.loc[nearest].set_index("divergence")
    return {str(world): rows["truth"] for world, rows in found.groupby("world")}


_LOOKS = {
    "reverse": style.line("k2", marker="", label="reverse KL"),
    "forward": style.line("k3", marker="", label="forward KL"),
    "chi_square": style.line("exact", marker="", label="chi-square"),
}


def draw_exploit(table: pd.DataFrame) -> Figure:
    """The share of an exploit over its probability under the reference, a line a divergence."""
    return style.lines(
        table,
        "probability",
        "share",
        kind="divergence",
        looks=_LOOKS,
        xlabel="probability under the reference, log scale",
        ylabel="share at the optimum",
        legend="center left",
        xscale="log",
        ylim=(-0.03, 1.03),
    )


_TITLES = {"bent": "High scores are errors", "heavy": "Rare, huge errors"}


def draw(table: pd.DataFrame, most: float = 4.0) -> Figure:
    """The truth over the KL, for two kinds of error, and the proxy of the reverse KL in grey."""
    figure, panels = style.subplots(1, 2, height=3.9)
    for axes, (world, title) in zip(panels, _TITLES.items(), strict=True):
        of_world = table[(table.world == world) & (table.kl <= most)]
        for divergence, look in _LOOKS.items():
            found = of_world[of_world.divergence == divergence]
            axes.plot(found.kl, found.truth, **look)
        proxy = of_world[of_world.divergence == "reverse"]
        axes.plot(proxy.kl, proxy.proxy, color=style.QUIET, linestyle=":", label="proxy")
        axes.set(title=title, xlabel="KL to the reference (nats)")
        axes.set_ylim(-1.2, 2.0)
    panels[0].set_ylabel("mean under the policy")
    panels[1].legend(loc="lower right")
    return figure
