r"""Chapter 14: what the KL terms of training frameworks optimise, as read from public sources.

Policies stay near enough to their reference that no clamp binds, so that a name in ``descends`` is
a statement about the formula; what the clamps do is asked token by token.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pandas as pd
import torch

from analysis.chapters.ch14_frameworks.trainers import OPTIONS, Option
from analysis.chapters.ch14_frameworks.trainers.huggingface import trl_grpo
from analysis.evidence.policies import (
    SAME,
    flat_error,
    medians,
    moved_logits,
    normal_draws,
    random_tables,
)
from kl_term.audit.batches import Batch
from kl_term.audit.readings import Part
from kl_term.audit.slopes import Advantages, slopes
from kl_term.audit.states import (
    Formula,
    States,
    coefficient,
    dead_zones_of,
    descends,
    known_gradients,
    mean_gradient,
)
from kl_term.audit.targets import NEITHER
from kl_term.audit.trees import Tree, expected_gradient, visited_gradient
from kl_term.kl.enumeration import cosine, relative_error
from kl_term.kl.sequences import enumerate_sequences
from kl_term.objectives.advantages import group_centre, group_normalise, leave_one_out
from kl_term.objectives.ordering import kl_then_leave_one_out, kl_then_normalise, normalise_then_kl

# What the chapter computes.


def states(count: int, vocab_size: int, *, drift: float, staleness: float, seed: int) -> States:
    """References with Gaussian logits, policies ``drift`` away, samplers ``staleness`` behind."""
    ref_logits = normal_draws((count, vocab_size), seed=seed)
    logits = moved_logits(ref_logits, drift, seed=seed + 1)
    return States(logits, ref_logits, moved_logits(logits, staleness, seed=seed + 2))


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
            found = descends(gradient, known, tolerance=SAME)
            row[f"{case}_descends"] = NEITHER if found.known == NEITHER else found.said
            row[f"{case}_error"] = relative_error(gradient, known["reverse KL"]).median().item()
            row[f"{case}_cosine"] = cosine(gradient, known["reverse KL"]).median().item()
        rows.append(row)
    return pd.DataFrame(rows)


def dead_zones(options: Iterable[Option] = OPTIONS) -> pd.DataFrame:
    """Log-ratios (nats) below and above which an option's coefficient is exactly zero on fresh
    samples; NaN where there is no such zone."""
    rows = []
    for option in options:
        below, above = dead_zones_of(
            option.loss,
            furthest=30.0,
            count=60_001,
            reference_is_sampler=option.reference_is_sampler,
        )
        row = {"framework": option.framework, "setting": option.setting}
        rows.append(row | {"below": below, "above": above})
    return pd.DataFrame(rows)


# Where the KL meets the normalisation of rewards.

#: Name -> where it was read, and the advantages. For the exchange rate it does not matter that a
#: KL in the loss is differentiated.
PLACEMENTS: dict[str, tuple[str, Advantages]] = {
    "before the group's std": ("verl, KL in reward", partial(kl_then_normalise, eps=1e-6)),
    "after the group's std": ("OpenRLHF group_norm", partial(normalise_then_kl, eps=1e-9)),
    "loss, beside the group's std": ("TRL, verl, slime: KL loss", normalise_then_kl),
    "before leave-one-out": ("TRL RLOO", kl_then_leave_one_out),
    "after leave-one-out": ("OpenRLHF rloo", lambda r, kl, *, beta: leave_one_out(r) - beta * kl),
    "after centring": ("OpenRLHF dr_grpo", lambda r, kl, *, beta: group_centre(r) - beta * kl),
    "ignored": ("slime GRPO, kl-coef", lambda r, kl, *, beta: group_normalise(r, eps=1e-6)),
}


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


def _mean_row(formula: Formula, batch: Batch) -> Part:
    """A formula summed over the tokens of an answer, the mean over answers."""
    three = (batch.logp, batch.ref_logp, batch.old_logp)
    return Part(formula(*three), coefficient(formula, *three) / batch.rows)


def level_errors(*, staleness: float, seed: int) -> pd.DataFrame:
    """Median relative error of TRL's corrected KL by the ratio's level, against the per-token
    reverse KL at the states that the sampler visits."""
    sequences = enumerate_sequences(3, 4)
    tables = random_tables(sequences, 3, 20, spread=1.0, seed=seed)
    noise = normal_draws(tables.logits.shape, seed=seed + 1)
    unpaid = torch.zeros(len(sequences.mask)).double()
    rows = []
    for samples, distance in (("fresh", 0.0), ("stale", staleness)):
        for logits, ref_logits, step in zip(*tables, noise, strict=True):
            at = Tree(sequences, logits, ref_logits, logits - distance * step, unpaid)
            exact = visited_gradient(at, direction="reverse")
            for level in ("token", "sequence"):
                part = partial(_mean_row, partial(trl_grpo, bias_correction=True, level=level))
                error = flat_error(expected_gradient(part, at, separable=True), exact)
                rows.append({"samples": samples, "level": level, "error": error})
    return medians(rows, "samples", "level", interpolation="lower")
