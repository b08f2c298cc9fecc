"""One Gaussian fitted to two bumps, in both directions of the KL."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from analysis.chapters.ch10_dpo.preferences import minimise
from analysis.evidence.claims import Finding, claim, judge
from kl_term import style


def mixture(means: tuple[float, float] = (-2.0, 2.0)) -> MixtureSameFamily:
    """Two Gaussians of weights 0.7 and 0.3 and of standard deviation one half."""
    weights, places = torch.tensor([[0.7, 0.3], means], dtype=torch.float64)
    return MixtureSameFamily(Categorical(weights), _normal(places, 0.5))


def _normal(mean: Tensor | float, std: Tensor | float) -> Normal:
    return Normal(*(torch.as_tensor(x, dtype=torch.float64) for x in (mean, std)))


def gaussian_kl(target: MixtureSameFamily, mean: Tensor, std: Tensor, direction: str) -> Tensor:
    """KL of a Gaussian from the target (``reverse``) or of the target from it, by the trapezoid
    rule."""
    grid = torch.linspace(-12, 12, 801, dtype=torch.float64)
    log_p, log_q = target.log_prob(grid), _normal(mean, std).log_prob(grid)
    if direction == "reverse":
        log_p, log_q = log_q, log_p
    return torch.trapezoid(log_p.exp() * (log_p - log_q), grid)


def fits(target: MixtureSameFamily, starts: Iterable[float] = (-2.0, 0.0, 2.0)) -> pd.DataFrame:
    """Gaussians of least KL in both directions, from several starting means: ``mean``, ``std``,
    ``kl``."""
    rows = []
    for direction, start in itertools.product(("forward", "reverse"), starts):

        def kl(at: Tensor, direction: str = direction) -> Tensor:
            return gaussian_kl(target, at[0], at[1].exp(), direction)

        best = minimise(kl, torch.tensor([start, 0.0], dtype=torch.float64))
        row = {"direction": direction, "start": start, "mean": best[0].item()}
        rows.append(row | {"std": best[1].exp().item(), "kl": kl(best).item()})
    return pd.DataFrame(rows)


def density_curves(target: MixtureSameFamily, table: pd.DataFrame) -> pd.DataFrame:
    """The mixture and the best Gaussian of each direction on a grid."""
    grid = torch.linspace(-5.0, 5.0, 401, dtype=torch.float64)
    best = table.loc[table.groupby("direction").kl.idxmin()].set_index("direction")
    curves = {name: _normal(row["mean"], row["std"]) for name, row in best.iterrows()}
    densities = {"mixture": target, **curves}
    frame = {name: density.log_prob(grid).exp().numpy() for name, density in densities.items()}
    return pd.DataFrame({"x": grid.numpy(), **frame})


def plot_projection(curves: pd.DataFrame) -> Figure:
    """The mixture and the best Gaussian in either direction."""
    figure, axes = style.subplots(height=3.5)
    axes.fill_between(curves.x, curves.mixture, color="#D9D9D9", linewidth=0)
    axes.annotate("teacher", (2.75, 0.12), color=style.QUIET)
    for direction, place in (("forward", (-0.9, 0.25)), ("reverse", (-1.35, 0.62))):
        axes.plot(curves.x, curves[direction], color=style.COLOURS[direction])
        style.note(
            axes, f"best in {style.LABELS[direction]}", place, colour=direction, va="baseline"
        )
    axes.set_ylim(bottom=0)
    axes.set(xlabel="x", ylabel="density")
    return figure


@claim("S3-14")
def covering_and_seeking() -> Finding:
    """One Gaussian fitted to two bumps and to two that overlap, in both directions."""
    found = fits(mixture(), starts=(-2.0, 2.0)).set_index(["direction", "start"])
    forward, left, right = (
        found.loc[key] for key in (("forward", -2.0), ("reverse", -2.0), ("reverse", 2.0))
    )
    overlapping = fits(mixture(means=(-0.4, 0.4)), starts=(0.0,))["mean"]
    figures = {
        "forward_mean": forward["mean"],
        "forward_std": forward["std"],
        "reverse_mean": left["mean"],
        "reverse_std": left["std"],
        "reverse_kl": left["kl"],
        "reverse_other_minimum": right["kl"],
        "overlapping_mean_gap": abs(overlapping[0] - overlapping[1]),
    }
    covers = abs(figures["forward_mean"] + 0.8) < 1e-3 and figures["forward_std"] > 1.5
    seeks = abs(figures["reverse_mean"] + 2) < 0.01 and figures["reverse_std"] < 0.6
    seeks_always = figures["overlapping_mean_gap"] > 0.1
    return Finding(judge(covers and seeks and seeks_always, covers and seeks), figures)
