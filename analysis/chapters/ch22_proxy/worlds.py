r"""What happens to the truth when a proxy is optimised under a KL term, exactly: chapter 22.

Finitely many answers with a reference, a true reward and a proxy that is the truth plus an error.
The optimum of proxy minus beta times a divergence moves probability by a function of the proxy
alone,

.. math:: \frac{\pi^\ast(y)}{\pi_{\mathrm{ref}}(y)} = g\Big(\frac{R(y) - \lambda}{\beta}\Big), \\
    g(x) = e^x \;(\text{reverse}), \quad -1/x \;(\text{forward}), \quad
    \max(0, 1 + x) \;(\text{half chi-square}),

and everything here follows from that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import chi_square_optimum, forward_kl_optimum, reverse_kl_optimum

#: Divergence -> its optimum: log-probs from rewards, logits of the reference and beta.
OPTIMA = {
    "reverse": reverse_kl_optimum,
    "forward": forward_kl_optimum,
    "chi_square": chi_square_optimum,
}


class World(NamedTuple):
    """Every answer that the reference gives, finitely many."""

    reference: Tensor  #: [Y], probabilities above zero
    truth: Tensor  #: [Y]
    error: Tensor  #: [Y], proxy less truth

    @property
    def proxy(self) -> Tensor:
        return self.truth + self.error


def optimum(world: World, divergence: str, beta: float) -> Tensor:
    """[Y]: the policy that maximises the proxy less beta times a divergence of :data:`OPTIMA`."""
    return OPTIMA[divergence](world.proxy, world.reference.log(), beta=beta).exp()


# --- When the truth rises ---------------------------------------------------------------------


def calibration(world: World) -> pd.DataFrame:
    r"""The mean truth of the reference's answers of one proxy.

    .. math:: m(\rho) = \mathbb{E}_{y \sim \pi_{\mathrm{ref}}}[T(y) \mid R(y) = \rho]

    Returns:
        A row per level, ascending: ``proxy``, ``mass`` under the reference, ``truth``.
    """
    levels, of_level = torch.unique(world.proxy, return_inverse=True)
    mass = torch.zeros_like(levels).index_add(0, of_level, world.reference)
    total = torch.zeros_like(levels).index_add(0, of_level, world.reference * world.truth)
    return pd.DataFrame({"proxy": levels, "mass": mass, "truth": total / mass})


def marginal_weights(world: World, divergence: str, beta: float) -> Tensor:
    r"""Where the next bit of probability is moved: :math:`\pi_{\mathrm{ref}}\, g'`, [Y].

    .. math:: \pi^\ast \;(\text{reverse}), \\
        \frac{(\pi^\ast)^2}{\pi_{\mathrm{ref}}} \;(\text{forward}), \\
        \pi_{\mathrm{ref}}\, [\pi^\ast > 0] \;(\text{half chi-square})
    """
    policy = optimum(world, divergence, beta)
    if divergence == "reverse":
        return policy
    if divergence == "forward":
        return policy.square() / world.reference
    return torch.where(policy > 0, world.reference, 0.0)


def truth_slope(world: World, divergence: str, beta: float) -> float:
    r"""How fast the true reward changes as the coefficient is lowered.

    .. math:: \frac{d}{d(1/\beta)} \mathbb{E}_{\pi^\ast}[T] = \sum_y v(y)\,
        \big(R(y) - \bar R_v\big)\, T(y) = |v|\, \mathrm{Cov}_v(T, R), \\
        v = \pi_{\mathrm{ref}}\, g'

    with :math:`|v|` the sum of :func:`marginal_weights`, and mean and covariance under them
    normalised. So the truth rises exactly as long as the regression of truth on proxy has a
    positive slope among the answers that are being moved.

    Equation: ``truth_slope``
    """
    weights = marginal_weights(world, divergence, beta)
    centre = weights @ world.proxy / weights.sum()
    return float((weights * (world.proxy - centre)) @ world.truth)


def late_loss(world: World) -> float:
    r"""What the truth falls by at last, per unit of beta, under the forward KL.

    .. math:: \mathbb{E}_{\pi^\ast}[T] = T(\text{best}) + \beta \sum_{y \ne \text{best}}
        \frac{\pi_{\mathrm{ref}}(y)}{R_{\max} - R(y)} \\
        \cdot \big(T(y) - T(\text{best})\big) + O(\beta^2)

    where T(best) is the mean truth of the answers of the highest proxy. Under the reverse KL all
    but the best and the second best level are exponentially small by then, and these two decide.

    Equation: ``late_loss``
    """
    gap = world.proxy.max() - world.proxy
    top = torch.where(gap == 0, world.reference, 0.0)
    weight = torch.where(gap > 0, world.reference / gap, 0.0)
    return float(weight @ (world.truth - top @ world.truth / top.sum()))


def clip_level(world: World) -> float:
    r"""The lowest score above which the mean truth is highest: where to clip the proxy.

    .. math:: c = \arg\max_c M(c), \qquad M(c) = \mathbb{E}_{\pi_{\mathrm{ref}}}[T \mid R \ge c]

    Equation: ``clip_level``
    """
    curve = calibration(world).iloc[::-1]
    above = (curve.mass * curve.truth).cumsum() / curve.mass.cumsum()
    return float(curve.proxy[above[::-1].idxmax()])


def clipped(world: World, level: float) -> World:
    """The same answers, and a proxy that no longer rises beyond a level."""
    return world._replace(error=world.proxy.clamp(max=level) - world.truth)


def truth_curve(world: World, divergence: str, betas: Iterable[float]) -> pd.DataFrame:
    """Along the coefficient: ``beta``, ``kl`` (reverse, nats), ``truth`` and ``proxy``."""
    rows = []
    for beta in betas:
        policy = optimum(world, divergence, beta)
        kl = float(reverse_kl(policy.log(), world.reference.log()))
        values = {"truth": float(policy @ world.truth), "proxy": float(policy @ world.proxy)}
        rows.append({"divergence": divergence, "beta": beta, "kl": kl, **values})
    return pd.DataFrame(rows)


# --- Worlds -----------------------------------------------------------------------------------


def independent(truths: Tensor, truth_mass: Tensor, errors: Tensor, error_mass: Tensor) -> World:
    """Errors that do not depend on the truth: every pair is an answer."""
    shape = (len(truths), len(errors))
    return World(
        reference=torch.outer(truth_mass, error_mass).flatten(),
        truth=truths.unsqueeze(-1).expand(shape).flatten(),
        error=errors.expand(shape).flatten(),
    )


def of_calibration(levels: Tensor, mass: Tensor, truth: Tensor) -> World:
    """One answer per level of the proxy, with the mean truth there."""
    return World(reference=mass, truth=truth, error=levels - truth)


def normal_mass(levels: Tensor, scale: float = 1.0) -> Tensor:
    """A normal law on a grid."""
    return torch.softmax(-0.5 * (levels / scale).square(), dim=-1)


def student_mass(levels: Tensor, freedom: float) -> Tensor:
    """Student's t on a grid: tails as a power, cut where the grid ends."""
    return torch.softmax(-0.5 * (freedom + 1) * torch.log1p(levels.square() / freedom), dim=-1)


def tail_world(tail: float, harm: float = 0.0) -> World:
    r"""The world of the explorer: an error whose tail one can drag, and what following it costs.

    .. math:: R = T_0 + E, \qquad T = T_0 - h \max(0, E), \qquad
        P(E) \propto \Big(1 + \frac{E^2}{\nu}\Big)^{-(\nu + 1)/2}, \quad \nu = \frac1{\text{tail}}

    Student's t, from the normal law at a tail of zero on. :math:`T_0` is normal and does not depend
    on the error; with a harm :math:`h` above zero answers of large errors are worse than others.
    """
    truths = torch.linspace(-3, 3, 21, dtype=torch.float64)
    errors = torch.linspace(-12, 12, 121, dtype=torch.float64)
    mass = student_mass(errors, 1 / tail) if tail > 0 else normal_mass(errors)
    world = independent(truths, normal_mass(truths), errors, mass)
    lost = harm * world.error.clamp(min=0)
    return World(world.reference, world.truth - lost, world.error + lost)
