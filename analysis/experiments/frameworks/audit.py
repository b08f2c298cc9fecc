r"""Expected gradient of each framework's KL term, enumerated beside the exact ones.

Policies stay near enough to their reference that no clamp binds, so that a name in ``descends``
is a statement about the formula; what the clamps do is asked separately, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import SAME, drifted_logits
from analysis.experiments.frameworks.options import OPTIONS, Loss, Option
from analysis.kl.enumeration import cosine, exact_kl_gradient, relative_error


class States(NamedTuple):
    """Triples of categorical policies, one a row [N, V]."""

    logits: Tensor
    ref_logits: Tensor
    old_logits: Tensor


def states(count: int, vocab_size: int, *, drift: float, staleness: float, seed: int) -> States:
    """References with Gaussian logits, policies ``drift`` away, samplers ``staleness`` behind."""
    generator = torch.Generator().manual_seed(seed)
    ref_logits = torch.randn(count, vocab_size, generator=generator, dtype=torch.float64)
    (logits,) = drifted_logits(ref_logits, torch.tensor([drift]).double(), seed=seed + 1)
    (old_logits,) = drifted_logits(logits, torch.tensor([staleness]).double(), seed=seed + 2)
    return States(logits, ref_logits, old_logits)


def coefficient(loss: Loss, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """Derivative of a per-token loss by the log-prob of that token, by autograd."""
    with torch.enable_grad():
        leaf = logp.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf, ref_logp, old_logp).sum(), leaf)
    return gradient


def mean_gradient(loss: Loss, at: States) -> Tensor:
    """[N, V]: expected gradient by the logits under the sampler, by summing over the vocabulary."""
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in at)
    weighted = old_logp.exp() * coefficient(loss, logp, ref_logp, old_logp)
    return weighted - logp.exp() * weighted.sum(-1, keepdim=True)


def chi_square_gradient(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Gradient of half the chi-square divergence of the policy *from the reference*, by autograd.

    The value is half the sum of ``policy^2 / reference``, which differs by a constant.
    """
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return _gradient(lambda logp: 0.5 * (2 * logp - ref_logp).exp().sum(), logp)


def total_variation_gradient(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Gradient of twice the total variation distance, the sum of ``|policy - reference|``."""
    logp, reference = logits.log_softmax(-1), ref_logits.softmax(-1)
    return _gradient(lambda logp: (logp.exp() - reference).abs().sum(), logp)


def _gradient(function: Callable[[Tensor], Tensor], logp: Tensor) -> Tensor:
    """By the logits, which normalised log-probs are as well."""
    leaf = logp.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf.log_softmax(-1)), leaf)
    return gradient


def known_gradients(at: States) -> dict[str, Tensor]:
    """Exact gradients that a term may turn out to have, by the name the tables use."""
    reverse, forward = (
        exact_kl_gradient(at.logits, at.ref_logits, direction=d) for d in ("reverse", "forward")
    )
    return {
        "reverse KL": reverse,
        "forward KL": forward,
        "half (reverse + forward)": (reverse + forward) / 2,
        "half (reverse − forward)": (reverse - forward) / 2,
        "2 total variation": total_variation_gradient(at.logits, at.ref_logits),
        "half χ²(π‖ref)": chi_square_gradient(at.logits, at.ref_logits),
    }


def descends(gradient: Tensor, known: dict[str, Tensor]) -> str:
    """The exact gradient that a mean gradient equals at every state, ``nothing`` or ``neither``."""
    scale = known["reverse KL"].norm(dim=-1)
    if bool((gradient.norm(dim=-1) < SAME * scale).all()):
        return "nothing"
    same = [name for name, g in known.items() if bool((relative_error(gradient, g) < SAME).all())]
    return same[0] if same else "neither"


def audit(at: States, options: Iterable[Option] = OPTIONS) -> pd.DataFrame:
    """What each option descends, on fresh and on stale samples, with its median relative error.

    Errors are against the reverse KL. An option whose reference is its sampler has no fresh case:
    at the sampler itself there is nothing to descend.
    """
    fresh = at._replace(old_logits=at.logits)
    rows = []
    for option in options:
        row = {"framework": option.framework, "setting": option.setting, "default": option.default}
        cases = {"fresh": fresh, "stale": at}
        if option.reference_is_sampler:
            cases = {"stale": at._replace(old_logits=at.ref_logits)}
        for case, where in cases.items():
            known = known_gradients(where)
            gradient = mean_gradient(option.loss, where)
            row[f"{case}_descends"] = descends(gradient, known)
            row[f"{case}_error"] = relative_error(gradient, known["reverse KL"]).median().item()
            row[f"{case}_cosine"] = cosine(gradient, known["reverse KL"]).median().item()
        rows.append(row)
    return pd.DataFrame(rows)


def dead_zones(
    options: Iterable[Option] = OPTIONS, *, furthest: float = 30.0, points: int = 60_001
) -> pd.DataFrame:
    """Log-ratios beyond which an option's coefficient is exactly zero on fresh samples (nats).

    ``below`` and ``above`` are NaN where there is no such zone within ``furthest``. Coefficients
    that vanish everywhere a finite range is asked of (nothing to see) do not occur.
    """
    log_ratio = torch.linspace(-furthest, furthest, points, dtype=torch.float64)
    logp = torch.full_like(log_ratio, -furthest - 1)
    rows = []
    for option in options:
        if option.reference_is_sampler:
            old_logp, ref_logp = logp - log_ratio, logp - log_ratio
        else:
            old_logp, ref_logp = logp, logp - log_ratio
        alive = (coefficient(option.loss, logp, ref_logp, old_logp) != 0).nonzero().flatten()
        first, last = alive[0].item(), alive[-1].item()
        rows.append(
            {
                "framework": option.framework,
                "setting": option.setting,
                "below": log_ratio[first].item() if first > 0 else torch.nan,
                "above": log_ratio[last].item() if last < points - 1 else torch.nan,
            }
        )
    return pd.DataFrame(rows)


def staleness_curves(
    options: Iterable[Option],
    stalenesses: Iterable[float],
    *,
    count: int,
    vocab_size: int,
    drift: float,
    seed: int,
) -> pd.DataFrame:
    """Median relative error against the reverse KL's gradient as the sampler falls behind."""
    rows = []
    for staleness in stalenesses:
        at = states(count, vocab_size, drift=drift, staleness=staleness, seed=seed)
        exact = exact_kl_gradient(at.logits, at.ref_logits, direction="reverse")
        behind = at.old_logits.log_softmax(-1) - at.logits.log_softmax(-1)
        kl = (at.old_logits.softmax(-1) * behind).sum(-1).median().item()
        for option in options:
            error = relative_error(mean_gradient(option.loss, at), exact)
            rows.append(
                {
                    "framework": option.framework,
                    "setting": option.setting,
                    "staleness": kl,
                    "median": error.median().item(),
                }
            )
    return pd.DataFrame(rows)
