"""How much of its reference probability a token keeps, by how far its reward is behind."""

from __future__ import annotations

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.chapters.ch05_fixed_points.fixed_points import OPTIMA, Problems, ascent_ends
from kl_term import style
from kl_term.kl.term import KLTerm

#: What each law is called at the end of its line.
LAW_LABELS = {"k2": "$k_2$ loss,\n$k_1$ reward", "k3": "$k_3$ loss", "minimax01": "MiniMax-01"}

#: Lowest tilt drawn: a token that is given up falls through it.
FLOOR = 1e-6


def tilt_curves(gaps: Tensor, *, beta: float, steps: int) -> pd.DataFrame:
    """How much of its reference probability a token keeps, against how far its reward is behind.

    Two tokens, alike under the reference. A row a law and gap: the worse token's share of its
    reference probability in ``closed`` form and after ``ascent``.
    """
    rewards = torch.stack([torch.zeros_like(gaps), -gaps], dim=-1)
    ref_logits = torch.full_like(rewards, 0.5).log()
    step_size = 0.5 * min(1.0, 1.0 / (beta + gaps.max().item()))
    options = {"beta": beta, "steps": steps, "step_size": step_size}
    frames = []
    for law in LAW_LABELS:
        term = KLTerm(estimator=law)
        ends = ascent_ends(Problems(rewards, ref_logits), ref_logits[None], term, **options)[0]
        closed = OPTIMA[term](rewards, ref_logits, beta=beta).exp()
        columns = {"gap": gaps, "closed": closed[:, 1] / 0.5, "ascent": ends[:, 1] / 0.5}
        frames.append(pd.DataFrame(columns).assign(law=law))
    return pd.concat(frames, ignore_index=True)


def plot_tilts(curves: pd.DataFrame, beta: float, ascended: pd.DataFrame) -> Figure:
    """How much of its reference probability a worse token keeps, by law and reward gap."""
    figure, axes = style.subplots(height=4.0)
    for law, place in {"k2": (7.2, 3e-3), "k3": (9.0, 0.2), "minimax01": (1.2, 4e-6)}.items():
        curve, points = (table[table.law == law] for table in (curves, ascended))
        kept = curve.closed.where(curve.closed > 0, FLOOR / 10)
        axes.plot(curve.gap / beta, kept, **style.line(law, marker="", label=LAW_LABELS[law]))
        points = points[points.closed > FLOOR]
        hollow = {"linestyle": "none", "label": "_ascent", "markerfacecolor": "white"}
        look = style.line(law, **hollow, clip_on=False, zorder=4)
        axes.plot(points.gap / beta, points.ascent, **look)
        style.note(axes, LAW_LABELS[law], place, colour=law, va="bottom")
    axes.set(yscale="log", ylim=(FLOOR, 2.0), xlim=(0, (curves.gap / beta).max()))
    axes.set_xlabel(r"how far the token's reward is behind, in units of $\beta$")
    axes.set_ylabel("share of its reference\nprobability kept (log scale)")
    return figure
