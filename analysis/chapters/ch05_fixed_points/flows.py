"""The exact flow of each KL term alone, without any reward."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from kl_term import style
from kl_term.kl.ascent import Geometry, expected_ascent
from kl_term.kl.term import KLTerm

#: Height of an equilateral triangle of side one.
_HEIGHT = np.sqrt(3) / 2

#: Each frame of a flow lasts so many times as long as the one before: it is fast first, then slow.
GROWTH = 1.1


def simplex_grid(resolution: int) -> Tensor:
    """[S, 3] logits of evenly spaced policies over three tokens, the outermost near the edges."""
    margin = 0.1
    points = [
        (i + margin, j + margin, resolution - i - j + margin)
        for i in range(resolution + 1)
        for j in range(resolution + 1 - i)
    ]
    return torch.tensor(points, dtype=torch.float64).log().log_softmax(-1)


def flow_paths(
    variant: KLTerm,
    starts: Tensor,
    ref_logits: Tensor,
    *,
    frames: int,
    step_size: float,
    geometry: Geometry = "natural",
) -> Tensor:
    """[frames + 1, S, V] probabilities along the exact flow of a variant, with no reward at all."""
    path = [starts.log_softmax(-1)]
    for frame in range(frames):
        end = expected_ascent(
            path[-1],
            torch.zeros_like(starts),
            ref_logits.expand_as(starts),
            beta=1.0,
            steps=round(GROWTH**frame),
            step_size=step_size,
            geometry=geometry,
            **variant.at_one_state,
        )
        path.append(end)
    return torch.stack(path).exp()


def plot_flows(
    paths: Mapping[KLTerm, NDArray[np.float64]], reference: NDArray[np.float64]
) -> Figure:
    """Exact flow [frames, starts, 3] of each variant over the policies of three tokens, without
    any reward: lines from dots to a circle for each different end, and the reference [3]."""
    rows = -(-len(paths) // 2)
    figure, panels = style.subplots(rows, 2, height=2.75 * rows)
    hollow = {"markerfacecolor": "white", "markeredgecolor": "#111111", "markeredgewidth": 1.5}
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, (term, path) in zip(panels.flat, paths.items(), strict=False):
        axes.plot([0, 1, 0.5, 0], [0, 0, _HEIGHT, 0], color=style.QUIET, linewidth=1)
        for name, (x, y), align in (
            ("A", (-0.04, -0.02), "right"),
            ("B", (1.04, -0.02), "left"),
            ("C", (0.5, _HEIGHT + 0.03), "center"),
        ):
            axes.annotate(name, (x, y), ha=align, va="bottom" if name == "C" else "center")
        axes.set(aspect="equal", xlim=(-0.12, 1.12), ylim=(-0.08, _HEIGHT + 0.14))
        colour = style.COLOURS[term.estimator]
        points = {"linestyle": "none", "color": colour}
        x, y = _flat(path)
        axes.plot(x, y, color=colour, linewidth=0.9, alpha=0.7)
        axes.plot(x[0], y[0], marker=".", markersize=2.5, **points)
        _, first = np.unique((16 * path[-1]).round(), axis=0, return_index=True)
        axes.plot(*_flat(path[-1][first]), marker="o", markersize=8, zorder=4, **points)
        at = {"marker": "D", "markersize": 6, "zorder": 5, "linestyle": "none"}
        axes.plot(*_flat(reference), **at, **hollow)
        axes.set_title(f"{style.LABELS[term.estimator]} {term.placement}", fontsize="medium")
    return figure


def _flat(policies: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Barycentric to plane coordinates; tokens A, B, C are the corners."""
    return policies[..., 1] + 0.5 * policies[..., 2], _HEIGHT * policies[..., 2]
