r"""Closed-form moments of the estimators between two Gaussians: no sampling, infinities included.

For :math:`q = N(\mu_q, \sigma_q^2)`, :math:`p = N(\mu_p, \sigma_p^2)` and :math:`x \sim q`, the
log-ratio :math:`l = \log q(x) - \log p(x)` is a quadratic :math:`a + b z + c z^2` of a standard
normal :math:`z`, so k1 and k2 have polynomial moments. k3 adds :math:`r = p/q`, whose second
moment exists exactly when :math:`2 \sigma_q^2 > \sigma_p^2`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, checked
from kl_term.shapes import AnyFloats


class Moments(NamedTuple):
    """Mean and variance of one sample (nats, nats squared); the variance may be ``inf``."""

    mean: float | Tensor
    var: float | Tensor


@checked
def moments(
    q_mean: float | Tensor,
    q_std: float | Tensor,
    p_mean: float | Tensor,
    p_std: float | Tensor,
) -> dict[str, Moments]:
    r"""Mean and variance of k1, k2, k3 and k4 with samples from q, in closed form.

    .. math:: \mathrm{Var}[k_3] = \mathrm{Var}[k_1] + \chi^2(p \Vert q)
        - 2\,[\mathrm{KL}(p \Vert q) + \mathrm{KL}(q \Vert p)]

    Equation: ``moments``
    Sampler: :math:`x \sim q`.

    Args:
        q_mean, q_std: the sampled Gaussian (the policy).
        p_mean, p_std: the other one (the reference).
            Numbers, or tensors that broadcast together.

    Returns:
        ``{"k1": Moments(mean, var), "k2": ..., "k3": ..., "k4": ...}``: floats if every argument
        is a number, else float64 tensors. The means of k1, k3, k4 are KL(q || p); that of k3 is
        so even where its variance is infinite. That variance is the difference above, no less than
        0: near equal Gaussians it is right to float64's precision times :math:`\mathrm{Var}[k_1]`
        or, if larger, times the relative difference of the standard deviations.

    Raises:
        ValueError: if a standard deviation is not positive or an argument is not finite.
    """
    arguments = {"q_mean": q_mean, "q_std": q_std, "p_mean": p_mean, "p_std": p_std}
    as_tensors = {name: _finite(name, value) for name, value in arguments.items()}
    for name in ("q_std", "p_std"):
        if not bool((as_tensors[name] > 0).all()):
            raise ValueError(f"{name} must be > 0, got {arguments[name]!r}")
    q_m, q_s, p_m, p_s = torch.broadcast_tensors(*as_tensors.values())

    coefficients = _log_ratio_polynomial(q_m, q_s, p_m, p_s)
    l1, l2, l4 = (_mean_of_power(coefficients, power) for power in (1, 2, 4))
    # Var[b z + c z^2] = b^2 + 2 c^2: no subtraction of large numbers.
    var_k1 = coefficients[1].square() + 2 * coefficients[2].square()
    symmetric_kl = l1 + gaussian_kl(p_m, p_s, q_m, q_s)
    var_k3 = var_k1 + gaussian_chi_square(q_m, q_s, p_m, p_s) - 2 * symmetric_kl
    table = {
        "k1": Moments(l1, var_k1),
        "k2": Moments(l2 / 2, (l4 - l2.square()) / 4),
        "k3": Moments(l1, var_k3.clamp(min=0.0)),
        "k4": Moments(l1, var_k3.clamp(min=0.0)),
    }
    if any(isinstance(value, Tensor) for value in arguments.values()):
        return table
    return {name: Moments(float(mean), float(var)) for name, (mean, var) in table.items()}


@checked
def gaussian_kl(q_mean: AnyFloats, q_std: AnyFloats, p_mean: AnyFloats, p_std: AnyFloats) -> Tensor:
    r"""KL divergence of two Gaussians.

    .. math:: \mathrm{KL}(q \Vert p) = \log\frac{\sigma_p}{\sigma_q}
        + \frac{\sigma_q^2 + (\mu_q - \mu_p)^2}{2 \sigma_p^2} - \frac12

    Equation: ``gaussian_kl``

    Args:
        q_mean, q_std, p_mean, p_std: tensors that broadcast together.

    Returns:
        Their broadcast shape, nats.
    """
    dtype = at_least_float32(q_mean).dtype  # of all: squares overflow in float32 and below
    q_mean, q_std, p_mean, p_std = (x.double() for x in (q_mean, q_std, p_mean, p_std))
    a, _, c = _log_ratio_polynomial(q_mean, q_std, p_mean, p_std)
    return (a + c).to(dtype)


@checked
def gaussian_chi_square(
    q_mean: AnyFloats, q_std: AnyFloats, p_mean: AnyFloats, p_std: AnyFloats
) -> Tensor:
    r"""Chi-square divergence of p from q: the variance of :math:`r = p/q` under q.

    .. math:: \chi^2(p \Vert q) = \frac{\sigma_q^2}{\sigma_p \sqrt{2\sigma_q^2 - \sigma_p^2}}
        \exp\frac{(\mu_q - \mu_p)^2}{2\sigma_q^2 - \sigma_p^2} - 1
        \quad\text{if } 2\sigma_q^2 > \sigma_p^2, \text{ else } \infty

    Equation: ``gaussian_chi_square``

    Args, Returns: as :func:`gaussian_kl`.
    """
    dtype = at_least_float32(q_mean).dtype
    q_mean, q_std, p_mean, p_std = (x.double() for x in (q_mean, q_std, p_mean, p_std))
    spread = 2 * q_std.square() - p_std.square()
    exists = ~(spread <= 0)  # NaN stays visible
    spread = torch.where(exists, spread, 1.0)
    widths = torch.log(p_std / q_std) + 0.5 * torch.log(spread / q_std.square())  # 0 if equal
    log_second_moment = (q_mean - p_mean).square() / spread - widths
    value = torch.expm1(log_second_moment)
    return torch.where(exists | value.isnan(), value, torch.inf).to(dtype)


@checked
def k3_variance_is_finite(q_std: float, p_std: float) -> bool:
    r"""Whether the variance of k3 exists: the sampler must be wide enough for the reference.

    .. math:: \mathrm{Var}_q[k_3] < \infty \iff 2 \sigma_q^2 > \sigma_p^2

    Equation: ``k3_variance_is_finite``
    """
    scale = -math.frexp(max(abs(q_std), abs(p_std)))[1]  # a power of two: exact, no overflow
    return 2 * math.ldexp(q_std, scale) ** 2 > math.ldexp(p_std, scale) ** 2


def _finite(name: str, value: float | Tensor) -> Tensor:
    tensor = torch.as_tensor(value, dtype=torch.float64)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return tensor


def _log_ratio_polynomial(
    q_mean: Tensor, q_std: Tensor, p_mean: Tensor, p_std: Tensor
) -> list[Tensor]:
    """Coefficients [a, b, c] of ``log q(x) - log p(x)`` in ``z = (x - q_mean) / q_std``."""
    shift = (q_mean - p_mean) / p_std
    scale = q_std / p_std
    return [
        0.5 * shift.square() - torch.log(scale),
        shift * scale,
        0.5 * (scale - 1) * (scale + 1),
    ]


def _mean_of_power(coefficients: list[Tensor], power: int) -> Tensor:
    """E[(a + b z + c z^2)^power] from the moments of a standard normal: 1, 0, 1, 0, 3, 0, 15..."""
    product = [torch.ones_like(coefficients[0])]
    for _ in range(power):
        longer = [torch.zeros_like(product[0]) for _ in range(len(product) + 2)]
        for i, left in enumerate(product):
            for j, right in enumerate(coefficients):
                longer[i + j] = longer[i + j] + left * right
        product = longer
    even = range(0, len(product), 2)
    terms = (product[degree] * math.prod(range(degree - 1, 0, -2)) for degree in even)
    return sum(terms, torch.zeros_like(product[0]))
