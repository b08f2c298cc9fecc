"""The noise of one sampled KL gradient at one state, and what stale samples do to it: chapter 5."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import SAME, Policies
from analysis.kl.enumeration import exact_kl_gradient, gradient_moments, relative_error
from analysis.kl.term import KLTerm


def noise_ratio(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """One sample's gradient variance (trace) under the k3 loss over that under the k2 loss.

    Where policy and reference are equal both vanish, and the ratio is its limit, one.
    """
    k2, k3 = (gradient_moments(logits, ref_logits, estimator=k).trace_var for k in ("k2", "k3"))
    silent = (k2 <= 0) & (k3 <= 0)
    return torch.where(silent, 1.0, k3 / torch.where(silent, 1.0, k2))


def noise_map(resolution: int, vocab_size: int) -> pd.DataFrame:
    """log10 of :func:`noise_ratio` by the log-odds of one token, policy (rows) and reference.

    The other tokens share the rest equally, under both.
    """
    odds = torch.linspace(-7, 7, resolution, dtype=torch.float64)
    policy, ref = torch.meshgrid(odds, odds, indexing="ij")
    rest = torch.full((*policy.shape, vocab_size - 1), -math.log(vocab_size - 1)).to(odds.dtype)
    pair = (torch.cat([x.unsqueeze(-1), rest], dim=-1) for x in (policy, ref))
    return pd.DataFrame(noise_ratio(*pair).log10(), index=odds.tolist(), columns=odds.tolist())


def stale_table(policies: Policies, old_logits: Tensor, terms: Iterable[KLTerm]) -> pd.DataFrame:
    """Per-sample variance and error of each term's expected gradient against both exact KLs,
    on samples of the policy itself and of an older one; medians over the rows.

    A term in the reward has two rows: the policy gradient without its ratio and with it.
    """
    exact = {d: exact_kl_gradient(*policies, direction=d) for d in ("reverse", "forward")}
    rows = []
    for axes in (axes for term in terms for axes in _weighted(term)):
        row: dict[str, object] = {**axes}
        for name, old in (("fresh", policies.logits), ("stale", old_logits)):
            moments = gradient_moments(*policies, old, **axes)
            errors = {d: relative_error(moments.mean, g) for d, g in exact.items()}
            vanishes = bool((moments.mean.norm(dim=-1) < SAME).all())
            same = [d for d, error in errors.items() if bool((error < SAME).all())]
            row[f"{name}_optimises"] = "nothing" if vanishes else (same or ["neither"])[0]
            row[f"{name}_variance"] = moments.trace_var.median().item()
        rows.append(row)
    return pd.DataFrame(rows)


def _weighted(term: KLTerm) -> list[dict[str, str]]:
    if term.placement == "loss":
        return [term.at_one_state]
    return [term.at_one_state | {"weighting": weighting} for weighting in ("none", "detached")]
