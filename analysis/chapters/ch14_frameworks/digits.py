"""What floating point leaves of k3: digits that cancel near the reference, overflow far from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.optimize import bisect
from torch import Tensor

from analysis.evidence.naive_k3 import naive_k3
from kl_term import style
from kl_term.kl.estimators import k3

# What the chapter computes.

Estimator = Callable[[Tensor, Tensor], Tensor]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
#: Those narrower than the one that errors are measured against.
NARROW = ("bfloat16", "float16", "float32")


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


def representable(dtype: torch.dtype, log_ratios: Tensor) -> Tensor:
    """Log-ratios rounded to a type, without those that round to zero."""
    rounded = log_ratios.to(dtype)
    return rounded[rounded != 0]


def relative_errors(form: Estimator, dtype: torch.dtype, log_ratios: Tensor) -> Tensor:
    """Relative error of a form of k3 at log-ratios representable in a type, against float64."""
    rounded = representable(dtype, log_ratios)
    exact = k3(rounded.double(), torch.zeros_like(rounded, dtype=torch.float64))
    return (form(rounded, torch.zeros_like(rounded)).double() / exact - 1).abs()


def negative_share(form: Estimator, dtype: torch.dtype, log_ratios: Tensor) -> float:
    """Share of log-ratios at which a form of a quantity that is never negative comes out so."""
    rounded = representable(dtype, log_ratios)
    return (form(rounded, torch.zeros_like(rounded)) < 0).double().mean().item()


def error_curves(log_ratios: Tensor, *, bins: int) -> pd.DataFrame:
    """Median relative error of each form in each type over bins of the log-ratio's size (nats)."""
    curves = []
    for form, dtype in itertools.product(FORMS, NARROW):
        size = representable(DTYPES[dtype], log_ratios).double().abs().log10()
        error = pd.Series(relative_errors(FORMS[form], DTYPES[dtype], log_ratios).numpy())
        medians = error.groupby(pd.cut(size.numpy(), bins), observed=True).median()
        middles = [10**interval.mid for interval in medians.index]
        curve = {"form": form, "dtype": dtype, "size": middles, "error": medians.to_numpy()}
        curves.append(pd.DataFrame(curve))
    return pd.concat(curves, ignore_index=True)


def overflow_threshold(dtype: torch.dtype) -> float:
    r"""The largest :math:`\log r` at which ``exp`` is still finite in a type, by bisection."""

    def finite(log_ratio: float) -> bool:
        return torch.tensor(log_ratio, dtype=torch.float64).to(dtype).exp().isfinite().item()

    return edge_of(finite, 1000.0)


def edge_of(alive: Callable[[float], bool], far: float) -> float:
    """Where a condition that holds near 0 and not at ``far`` ends."""
    return bisect(lambda x: 1.0 if alive(x) else -1.0, 1e-3, far, xtol=1e-12)


# What it draws.

#: Line style of each way of computing k3; the colour is k3's everywhere.
FORM_STYLES = {"naive": ":", "expm1": "--", "widened": "-"}


def cancellation(curves: pd.DataFrame) -> Figure:
    """Relative error of three forms of k3 against the size of the log-ratio, one panel a type."""
    figure, panels = style.subplots(1, len(NARROW), sharey=True, height=3.7)
    by_form = curves.groupby(["dtype", "form"])
    for axes, dtype in zip(panels, NARROW, strict=True):
        for form, dashes in FORM_STYLES.items():
            curve = by_form.get_group((dtype, form)).sort_values("size")
            look = style.line("k3", marker="", linestyle=dashes, label=form)
            axes.loglog(curve["size"], curve.error.clip(lower=1e-9), **look)
        axes.set_xticks([1e-3, 1e-2])
        axes.set_title(dtype)
    panels[0].set_ylabel("relative error (log scale)")
    panels[0].legend(loc="center left", bbox_to_anchor=(0.0, 0.64), handlelength=2.0)
    figure.supxlabel("size of the log-ratio (nats, log scale)", fontsize="medium")
    return figure
