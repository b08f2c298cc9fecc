"""What floating point does to the KL term: cancellation, overflow, clamps and their dead zones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.estimators import k2, k3
from analysis.kl.surrogates import gradient_coefficient

Estimator = Callable[[Tensor, Tensor], Tensor]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def naive_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 as it is usually coded, in the type of its inputs: three large terms that cancel."""
    delta = ref_logp - logp
    return torch.exp(delta) - delta - 1


def expm1_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 with ``expm1`` in the type of its inputs, where the package's own also widens."""
    delta = ref_logp - logp
    return torch.expm1(delta) - delta


#: Ways of computing k3, by the name the figures use.
FORMS: dict[str, Estimator] = {"naive": naive_k3, "expm1": expm1_k3, "widened": k3}


def small_log_ratios(smallest: float = 1e-4, largest: float = 2e-3, count: int = 2001) -> Tensor:
    """Log-ratios of both signs, evenly spaced in the logarithm: what one update moves a token."""
    sizes = torch.logspace(math.log10(smallest), math.log10(largest), count, dtype=torch.float64)
    return torch.cat([-sizes.flip(0), sizes])


def relative_errors(form: Estimator, dtype: torch.dtype, log_ratios: Tensor) -> Tensor:
    """Relative error of a form of k3 at log-ratios representable in ``dtype``, against float64.

    Log-ratios that round to zero are left out.
    """
    rounded = log_ratios.to(dtype)
    rounded = rounded[rounded != 0]
    exact = k3(rounded.double(), torch.zeros_like(rounded, dtype=torch.float64))
    return (form(rounded, torch.zeros_like(rounded)).double() / exact - 1).abs()


def negative_share(form: Estimator, dtype: torch.dtype, log_ratios: Tensor) -> float:
    """Share of log-ratios at which a form of a quantity that is never negative comes out so."""
    rounded = log_ratios.to(dtype)
    return (form(rounded, torch.zeros_like(rounded)) < 0).double().mean().item()


def error_curves(log_ratios: Tensor, *, bins: int) -> pd.DataFrame:
    """Median relative error of each form in each type over bins of the log-ratio's size.

    Returns a tidy frame: form, dtype, ``size`` (geometric middle of the bin, nats), ``error``.
    """
    rows = []
    for name, form in FORMS.items():
        for dtype_name, dtype in DTYPES.items():
            if dtype == torch.float64:
                continue
            rounded = log_ratios.to(dtype)
            rounded = rounded[rounded != 0]
            error = relative_errors(form, dtype, log_ratios)
            size = rounded.double().abs().log10()
            which = pd.cut(size.numpy(), bins)
            medians = pd.Series(error.numpy()).groupby(which, observed=True).median()
            rows += [
                {"form": name, "dtype": dtype_name, "size": 10**interval.mid, "error": value}
                for interval, value in medians.items()
            ]
    return pd.DataFrame(rows)


def overflow_threshold(dtype: torch.dtype) -> float:
    """The largest :math:`\\log r` at which ``exp`` is still finite in a type, by bisection."""
    low, high = 0.0, 1000.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        finite = torch.exp(torch.tensor(middle, dtype=torch.float64).to(dtype)).isfinite().item()
        low, high = (middle, high) if finite else (low, middle)
    return low


def coefficient_slopes(log_ratio: float) -> dict[str, float]:
    """Slope of each loss's gradient coefficient in the log-ratio, by central difference."""
    step = 1e-5
    points = torch.tensor([log_ratio - step, log_ratio + step], dtype=torch.float64)
    slopes = {}
    for name in ("k1", "k2", "k3"):
        low, high = gradient_coefficient(points, torch.zeros_like(points), estimator=name)
        slopes[name] = ((high - low) / (2 * step)).item()
    return slopes


def clamped_coefficient(
    log_ratios: Tensor,
    estimator: Estimator,
    *,
    log_ratio_bound: float = torch.inf,
    value_bound: float = torch.inf,
) -> Tensor:
    """Gradient coefficient of an estimator whose log-ratio and value are clamped, by autograd.

    Frameworks clamp one or both against overflow. Where a clamp binds, the gradient is exactly
    zero: a dead zone.
    """
    leaf = log_ratios.clone().requires_grad_(True)
    bounded = leaf.clamp(-log_ratio_bound, log_ratio_bound)
    value = estimator(bounded, torch.zeros_like(bounded)).clamp(-value_bound, value_bound)
    (coefficient,) = torch.autograd.grad(value.sum(), leaf)
    return coefficient


def dead_zone_edge(estimator: Estimator, *, value_bound: float) -> float:
    """The ratio r > 1 beyond which a clamp of the value kills the gradient, by bisection."""
    low, high = 0.0, 50.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        alive = clamped_coefficient(
            torch.tensor([-middle], dtype=torch.float64), estimator, value_bound=value_bound
        )
        low, high = (middle, high) if alive.item() != 0 else (low, middle)
    return math.exp(low)


def dead_zones() -> pd.DataFrame:
    """Edges of the dead zones of value clamps at 10, as log-ratios and as ratios."""
    rows = []
    for name, estimator in (("k2", k2), ("k3", k3)):
        edge = dead_zone_edge(estimator, value_bound=10.0)
        rows.append(
            {"estimator": name, "ratio": edge, "log_ratio": float(torch.tensor(edge).log())}
        )
    return pd.DataFrame(rows)
