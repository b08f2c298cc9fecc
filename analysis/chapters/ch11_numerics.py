"""Chapter 11: what floating point does to a KL term: cancellation, overflow, clamps, dead zones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.optimize import bisect
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import Finding, claim, judge, largest, median
from analysis.evidence.naive_k3 import naive_k3
from kl_term import style
from kl_term.kl.estimators import k2, k3
from kl_term.kl.surrogates import gradient_coefficient

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

    return _edge(finite, 1000.0)


def _edge(alive: Callable[[float], bool], far: float) -> float:
    """Where a condition that holds near 0 and not at ``far`` ends."""
    return bisect(lambda x: 1.0 if alive(x) else -1.0, 1e-3, far, xtol=1e-12)


def clamped_coefficient(
    log_ratios: Tensor, estimator: Estimator, *, value_bound: float = torch.inf
) -> Tensor:
    """Gradient coefficient of an estimator whose value is clamped, by autograd: zero where the
    clamp binds, a dead zone."""
    fixed = torch.zeros_like(log_ratios)
    return grad(lambda at: estimator(at, fixed).clamp(-value_bound, value_bound).sum())(log_ratios)


def dead_zones() -> pd.DataFrame:
    """The ratio r > 1, and its logarithm, beyond which a clamp of the value at 10 kills k2, k3."""
    rows = []
    for name, estimator in (("k2", k2), ("k3", k3)):

        def alive(log_ratio: float, estimator: Estimator = estimator) -> bool:
            at = torch.tensor([-log_ratio], dtype=torch.float64)
            return clamped_coefficient(at, estimator, value_bound=10.0).item() != 0

        edge = _edge(alive, 50.0)
        rows.append({"estimator": name, "ratio": math.exp(edge), "log_ratio": edge})
    return pd.DataFrame(rows)


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


def clamps(lowest: float, highest: float) -> Figure:
    """Gradient coefficient of k2 and k3 with the value clamped at 10, and without."""
    log_ratios = torch.linspace(lowest, highest, 1201, dtype=torch.float64)
    figure, axes = style.subplots(height=3.7)
    for name, estimator in (("k2", k2), ("k3", k3)):
        free = style.line(name, marker="", linestyle=":", label="_")
        axes.plot(log_ratios, clamped_coefficient(log_ratios, estimator), **free)
        clamped = clamped_coefficient(log_ratios, estimator, value_bound=10.0)
        label = f"{style.LABELS[name]} clamped"
        axes.plot(log_ratios, clamped, **style.line(name, marker="", label=label))
    axes.set_ylim(-16, 7)
    axes.set_xlabel(r"$\log \pi_\theta - \log \pi_{\mathrm{ref}}$ of the sampled token (nats)")
    axes.set_ylabel(r"coefficient of $\nabla \log \pi_\theta$")
    axes.annotate("dead zones: no pull back", (lowest, 0.6), fontsize=11.5)
    axes.legend(loc="lower right")
    return figure


# What it decides. The line that is printed is the one of ``naive_k3``.

LOGP = torch.linspace(-9.0, -0.1, 90, dtype=torch.float64)[:, None].expand(90, 90).contiguous()
REF_LOGP = LOGP.T.contiguous()


@claim("S2-2")
def the_printed_line_is_k3() -> Finding:
    """Value and gradient of the printed line against k3, and against k3 with the sign flipped."""
    printed = naive_k3(LOGP, REF_LOGP)
    gradient = grad(lambda at: naive_k3(at, REF_LOGP).sum())(LOGP)
    by_hand = 1 - torch.exp(REF_LOGP - LOGP)
    figures = {
        "value_error": largest(printed - k3(LOGP, REF_LOGP)) / largest(printed),
        "gradient_error": largest(gradient - by_hand) / largest(by_hand),
        "flipped": largest(printed - k3(REF_LOGP, LOGP)) / largest(printed),
    }
    same = max(figures["value_error"], figures["gradient_error"]) < 1e-12 < figures["flipped"]
    return Finding(judge(always=same, sometimes=False), figures)


@claim("S2-3")
def the_printed_line_is_a_second_order_expansion() -> Finding:
    """The printed line against its own second-order expansion, which is k2, at two distances."""
    ref_logp = torch.tensor([0.01, 5.0], dtype=torch.float64)
    logp = torch.zeros_like(ref_logp)
    near, far = (naive_k3(logp, ref_logp) / k2(logp, ref_logp)).tolist()
    return Finding(
        judge(always=math.isclose(far, 1.0, rel_tol=1e-9), sometimes=False),
        {"ratio_near": near, "ratio_far": far},
    )


@claim("S2-4")
def the_printed_line_is_stabler_and_smoother() -> Finding:
    """Float32 error near the reference, overflow far from it, and growth of the coefficient."""
    naive, widened = (
        relative_errors(FORMS[form], torch.float32, small_log_ratios())
        for form in ("naive", "widened")
    )
    points, slopes = torch.tensor([-5.0 - 1e-5, -5.0 + 1e-5], dtype=torch.float64), {}
    for name in ("k2", "k3"):  # central differences of the coefficient
        low, high = gradient_coefficient(points, torch.zeros_like(points), estimator=name)
        slopes[name] = ((high - low) / 2e-5).item()
    figures = {
        "median_error_naive": median(naive),
        "median_error_expm1": median(widened),
        "overflow_at": overflow_threshold(torch.float32),
        "slope_k2": slopes["k2"],
        "slope_k3": slopes["k3"],
    }
    stable = largest(naive) < 0.01 and math.isinf(figures["overflow_at"])
    smooth = slopes["k3"] <= slopes["k2"]
    return Finding(judge(always=stable and smooth, sometimes=stable or smooth), figures)
