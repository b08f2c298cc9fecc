"""The best Gaussian for a mixture of two, in either direction of the KL."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor


class Mixture(NamedTuple):
    """A mixture of two Gaussians of one standard deviation."""

    weights: tuple[float, float] = (0.7, 0.3)
    means: tuple[float, float] = (-2.0, 2.0)
    std: float = 0.5

    def log_density(self, x: Tensor) -> Tensor:
        """[...], nats."""
        parts = [
            np.log(w) + normal_log_density(x, m, self.std)
            for w, m in zip(self.weights, self.means, strict=True)
        ]
        return torch.logaddexp(*parts)


def normal_log_density(x: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Log-density of a Gaussian, nats."""
    std = torch.as_tensor(std, dtype=x.dtype)
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * np.log(2 * np.pi)


def quadrature(points: int = 801, limit: float = 12.0) -> tuple[Tensor, float]:
    """Grid and spacing; the trapezoid rule is spectrally accurate for these smooth densities."""
    grid = torch.linspace(-limit, limit, points, dtype=torch.float64)
    return grid, 2 * limit / (points - 1)


def gaussian_kls(mixture: Mixture, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """KL of the Gaussian from the mixture (reverse) and of the mixture from it (forward)."""
    grid, spacing = quadrature()
    target = mixture.log_density(grid)
    log_q = normal_log_density(grid, mean, std)
    reverse = (log_q.exp() * (log_q - target)).sum() * spacing
    forward = (target.exp() * (target - log_q)).sum() * spacing
    return reverse, forward


def fit_gaussian(mixture: Mixture, direction: str, start: float) -> dict[str, float]:
    """Mean, standard deviation and KL at the minimum reached from a mean of ``start``."""
    parameters = torch.tensor([start, 0.0], dtype=torch.float64, requires_grad=True)
    which = ("reverse", "forward").index(direction)
    optimiser = torch.optim.LBFGS(
        [parameters], max_iter=100, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = gaussian_kls(mixture, parameters[0], parameters[1].exp())[which]
        value.backward()
        return value

    optimiser.step(closure)
    mean, std = parameters[0].item(), parameters[1].exp().item()
    kls = gaussian_kls(mixture, parameters[0].detach(), parameters[1].detach().exp())
    return {"mean": mean, "std": std, "kl": kls[which].item()}


def fits(mixture: Mixture, starts: tuple[float, ...] = (-2.0, 0.0, 2.0)) -> pd.DataFrame:
    """Minima of both directions from several starts."""
    return pd.DataFrame(
        {"direction": direction, "start": start, **fit_gaussian(mixture, direction, start)}
        for direction in ("forward", "reverse")
        for start in starts
    )


def density_curves(mixture: Mixture, table: pd.DataFrame, *, limit: float = 5.0) -> pd.DataFrame:
    """The mixture and the best Gaussian of each direction on a grid."""
    grid = torch.linspace(-limit, limit, 401, dtype=torch.float64)
    frame = {"x": grid.numpy(), "mixture": mixture.log_density(grid).exp().numpy()}
    for direction, rows in table.groupby("direction"):
        best = rows.loc[rows.kl.idxmin()]
        frame[direction] = normal_log_density(grid, best["mean"], best["std"]).exp().numpy()
    return pd.DataFrame(frame)
