"""The coefficient of a sampled token: its sign, and its published plot."""

from __future__ import annotations

from functools import partial

import torch
from torch.func import grad

from analysis.evidence.claims import EXACT, Finding, claim, judge, largest, share
from analysis.evidence.policies import Coefficient, lowered, pairs
from kl_term.kl.surrogates import gradient_coefficient, kl_loss


def coefficient_of(estimator: str) -> Coefficient:
    """The coefficient that autograd gives the estimator as a loss."""
    return partial(gradient_coefficient, estimator=estimator)


@claim("S4-17")
def the_sign_of_one_k2_step() -> Finding:
    """One descent step of the k2 loss on every token that the reference prefers."""
    falls = lowered(*pairs(), coefficient_of("k2"), step_size=0.1)
    logp, ref_logp = (x.log_softmax(-1) for x in pairs())
    preferred = ref_logp > logp
    figures = {
        "lowered_where_ref_is_larger": share(falls[preferred]),
        "lowered_where_ref_is_smaller": share(falls[~preferred]),
    }
    towards = figures["lowered_where_ref_is_larger"]
    return Finding(judge(towards == 1.0, towards > 0), figures)


@claim("S4-23")
def the_published_coefficient_plot() -> Finding:
    """The printed curves on the printed grid against autograd through the losses."""
    grid = torch.linspace(-3, 2, steps=400, dtype=torch.float64)
    logp = grid[grid <= 0]
    ref_logp = torch.full_like(logp, -0.7)
    printed = {
        "k2": logp + 0.7,
        "k3": 1 - torch.exp(ref_logp - logp),
        "minimax01": logp.exp() - ref_logp.exp(),
    }
    slopes = {
        name: grad(lambda at, name=name: kl_loss(at, ref_logp, estimator=name).sum())(logp)
        for name in printed
    }
    figures = {
        "error": max(largest(slopes[name] - curve) for name, curve in printed.items()),
        "share_above_zero": share(grid > 0),
        "k1_loss_gap": largest(coefficient_of("k1")(logp, ref_logp) - printed["k2"]),
        "k3_at_minus_3": printed["k3"][0].item(),
        "k3_over_k2_at_minus_3": (printed["k3"][0] / printed["k2"][0]).item(),
    }
    right = figures["error"] < EXACT
    as_drawn = figures["share_above_zero"] == 0 and figures["k1_loss_gap"] < EXACT
    return Finding(judge(right and as_drawn, right), figures)
