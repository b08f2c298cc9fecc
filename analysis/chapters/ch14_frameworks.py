r"""Chapter 14: what the KL terms of training frameworks optimise, as read from public sources.

Policies stay near enough to their reference that no clamp binds, so that a name in ``descends`` is
a statement about the formula; what the clamps do is asked token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad

from analysis.chapters.frameworks import OPTIONS, Option
from analysis.chapters.frameworks.huggingface import trl_grpo
from analysis.chapters.frameworks.registry import Loss
from analysis.chapters.policies import (
    SAME,
    flat_error,
    medians,
    moved_logits,
    normal_draws,
    random_tables,
)
from kl_term.kl.enumeration import cosine, exact_kl_gradient, relative_error
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    enumerate_sequences,
    sequence_probability,
    token_logp,
    visited_kl_gradient,
)
from kl_term.objectives.advantages import group_centre, group_normalise, leave_one_out
from kl_term.objectives.ordering import kl_then_leave_one_out, kl_then_normalise, normalise_then_kl

# What the chapter computes.


class States(NamedTuple):
    """Triples of categorical policies, one a row [N, V]."""

    logits: Tensor
    ref_logits: Tensor
    old_logits: Tensor


def states(count: int, vocab_size: int, *, drift: float, staleness: float, seed: int) -> States:
    """References with Gaussian logits, policies ``drift`` away, samplers ``staleness`` behind."""
    ref_logits = normal_draws((count, vocab_size), seed=seed)
    logits = moved_logits(ref_logits, drift, seed=seed + 1)
    return States(logits, ref_logits, moved_logits(logits, staleness, seed=seed + 2))


def coefficient(loss: Loss, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """Derivative of a per-token loss by the log-prob of that token, by autograd."""
    return grad(lambda at: loss(at, ref_logp, old_logp).sum())(logp)


def mean_gradient(loss: Loss, at: States) -> Tensor:
    """[N, V]: expected gradient by the logits under the sampler, by summing over the vocabulary."""
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in at)
    return expected_score(at.logits, old_logp.exp() * coefficient(loss, logp, ref_logp, old_logp))


def known_gradients(at: States) -> dict[str, Tensor]:
    """Exact gradients that a term may turn out to have, by the name the tables use."""
    logp, ref_logp = at.logits.log_softmax(-1), at.ref_logits.log_softmax(-1)
    reverse, forward = (
        exact_kl_gradient(at.logits, at.ref_logits, direction=d) for d in ("reverse", "forward")
    )
    variation = logp.exp() * (logp - ref_logp).sign()  # of the sum of |policy - reference|
    chi_square = (2 * logp - ref_logp).exp()  # of half the sum of policy^2 / reference
    return {
        "reverse KL": reverse,
        "forward KL": forward,
        "half (reverse + forward)": (reverse + forward) / 2,
        "half (reverse − forward)": (reverse - forward) / 2,
        "2 total variation": expected_score(at.logits, variation),
        "half χ²(π‖ref)": expected_score(at.logits, chi_square),
    }


def descends(gradient: Tensor, known: dict[str, Tensor]) -> str:
    """The exact gradient that a mean gradient equals at every state, ``nothing`` or ``neither``."""
    if (gradient.norm(dim=-1) < SAME * known["reverse KL"].norm(dim=-1)).all():
        return "nothing"
    same = (name for name, g in known.items() if (relative_error(gradient, g) < SAME).all())
    return next(same, "neither")


def audit(at: States, options: Iterable[Option] = OPTIONS) -> pd.DataFrame:
    """What each option descends, fresh and stale, with its median relative error to the reverse
    KL's.

    An option whose reference is its sampler has no fresh case: there is nothing to descend.
    """
    rows = []
    for option in options:
        row = {"framework": option.framework, "setting": option.setting, "default": option.default}
        cases = {"fresh": at._replace(old_logits=at.logits), "stale": at}
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


def dead_zones(options: Iterable[Option] = OPTIONS) -> pd.DataFrame:
    """Log-ratios (nats) below and above which an option's coefficient is exactly zero on fresh
    samples; NaN where there is no such zone."""
    furthest = 30.0
    log_ratio = torch.linspace(-furthest, furthest, 60_001, dtype=torch.float64)
    logp = torch.full_like(log_ratio, -furthest - 1)
    ref_logp = logp - log_ratio
    rows = []
    for option in options:
        old_logp = ref_logp if option.reference_is_sampler else logp
        alive = log_ratio[coefficient(option.loss, logp, ref_logp, old_logp) != 0]
        low, high = alive.min().item(), alive.max().item()
        rows.append(
            {
                "framework": option.framework,
                "setting": option.setting,
                "below": low if low > -furthest else torch.nan,
                "above": high if high < furthest else torch.nan,
            }
        )
    return pd.DataFrame(rows)


# Where the KL meets the normalisation of rewards. In a group with rewards R and sequence KLs K the
# advantage is linear in both once its own standard deviation is known: A = a (R - mean) - b K up to
# a constant. b / a is the beta that a reader of the code believes to have set, b the force of the
# KL on the policy.

Placement = Callable[..., Tensor]  # of rewards, kl and beta

#: Name -> where it was read, and the advantages. For the exchange rate it does not matter that a
#: KL in the loss is differentiated.
PLACEMENTS: dict[str, tuple[str, Placement]] = {
    "before the group's std": ("verl, KL in reward", partial(kl_then_normalise, eps=1e-6)),
    "after the group's std": ("OpenRLHF group_norm", partial(normalise_then_kl, eps=1e-9)),
    "loss, beside the group's std": ("TRL, verl, slime: KL loss", normalise_then_kl),
    "before leave-one-out": ("TRL RLOO", kl_then_leave_one_out),
    "after leave-one-out": ("OpenRLHF rloo", lambda r, kl, *, beta: leave_one_out(r) - beta * kl),
    "after centring": ("OpenRLHF dr_grpo", lambda r, kl, *, beta: group_centre(r) - beta * kl),
    "ignored": ("slime GRPO, kl-coef", lambda r, kl, *, beta: group_normalise(r, eps=1e-6)),
}


def slopes(placement: Placement, rewards: Tensor, kl: Tensor, beta: float) -> tuple[float, float]:
    """Slopes of the advantages by reward and by minus the KL, over the group (least squares).

    Raises:
        ValueError: if the advantages are not linear in both, or the group cannot tell them apart.
    """
    columns = [kl - kl.mean()]
    if rewards.std() > 0:
        columns.append(rewards - rewards.mean())
    design = torch.stack([*columns, torch.ones_like(kl)], dim=-1)
    advantages = placement(rewards, kl, beta=beta)
    if torch.linalg.matrix_rank(design) < design.shape[-1]:
        raise ValueError("rewards and kl of the group are proportional: give another group")
    fit = torch.linalg.lstsq(design, advantages.unsqueeze(-1)).solution.squeeze(-1)
    if (design @ fit - advantages).abs().max() > 1e-9:
        raise ValueError("the placement is not linear in rewards and kl")
    fit = torch.where(fit.abs() < 1e-12, 0.0, fit)  # rounding of the fit, not a slope
    by_reward = fit[1].item() if len(columns) == 2 else torch.nan
    return by_reward, 0.0 - fit[0].item()


def exchange_table(beta: float, *, group_size: int, kl_spread: float, seed: int) -> pd.DataFrame:
    """By placement, exchange rate and force of the KL over beta, with half, one or none right;
    KLs have standard deviation ``kl_spread`` nats."""
    kl = kl_spread * normal_draws((group_size,), seed=seed)
    rows = []
    for name, (used_by, placement) in PLACEMENTS.items():
        row = {"placement": name, "used_by": used_by}
        for label, right in (("half", group_size // 2), ("one", 1), ("none", 0)):
            rewards = (torch.arange(group_size) < right).double()
            by_reward, by_kl = slopes(placement, rewards, kl, beta)
            row |= {f"rate_{label}": by_kl / by_reward / beta, f"force_{label}": by_kl / beta}
        rows.append(row)
    return pd.DataFrame(rows)


# A ratio of the whole sequence on the KL of one token, enumerated over every sequence.


def level_errors(*, staleness: float, seed: int) -> pd.DataFrame:
    """Median relative error of TRL's corrected KL by the ratio's level, against the per-token
    reverse KL at the states that the sampler visits."""
    sequences = enumerate_sequences(3, 4)
    tables = random_tables(sequences, 3, 20, spread=1.0, seed=seed)
    noise = normal_draws(tables.logits.shape, seed=seed + 1)
    rows = []
    for samples, distance in (("fresh", 0.0), ("stale", staleness)):
        for logits, ref_logits, step in zip(*tables, noise, strict=True):
            old_logits = logits - distance * step
            exact = visited_kl_gradient(logits, ref_logits, sequences, old_logits)
            fixed = [token_logp(x, sequences) for x in (ref_logits, old_logits)]
            chance = sequence_probability(old_logits, sequences)
            for level in ("token", "sequence"):
                trl = partial(trl_grpo, bias_correction=True, level=level)

                def mean(at: Tensor, trl=trl, fixed=fixed, chance=chance) -> Tensor:
                    return chance @ trl(token_logp(at, sequences), *fixed).sum(-1)

                error = flat_error(grad(mean)(logits), exact)
                rows.append({"samples": samples, "level": level, "error": error})
    return medians(rows, "samples", "level", interpolation="lower")
