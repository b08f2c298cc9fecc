"""Claims on objectives with one ratio a token: which order of a step each gets right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import EXACT, Finding, claim, judge, largest
from analysis.evidence.policies import (
    RAGGED,
    SPREAD,
    by_token,
    flat_error,
    log_ratios,
    measured,
    moved_logits,
    ragged_tables,
    random_returns,
    random_tables,
)
from kl_term.kl.credit import (
    advantage_table,
    credit_moments,
)
from kl_term.kl.ratio_objectives import (
    performance_difference,
    ratio_objective,
    ratio_objective_gradient,
    token_surrogate,
)
from kl_term.kl.sequences import (
    Sequences,
    enumerate_sequences,
    sequence_probability,
    state_visits,
)

SIZES = (0.005, 0.01, 0.02, 0.04)  #: steps over which an order is measured


ORDER = 0.1  #: how near a measured slope must come to a whole order


def _near(value: float, target: float) -> bool:
    return abs(value - target) < ORDER


def by_step(
    errors: Callable[..., Mapping[str, float | Tensor]],
    *tables: Iterable[Any],
    sizes: Iterable[float] = SIZES,
) -> pd.DataFrame:
    """What ``errors`` finds for each row of the tables after a step of each ``size``."""
    found = (measured(partial(errors, size=size), *tables).assign(size=size) for size in sizes)
    return pd.concat(found)


def order(found: pd.DataFrame, error: str) -> float:
    """Power of the step with which a median error vanishes: least squares over logarithms."""
    middle = found.groupby("size")[error].median()
    return float(np.polyfit(*np.log([middle.index, middle]), deg=1)[0])


@claim("S3-34")
def token_objective_is_first_order() -> Finding:
    """Measured orders of the token objective's error: slopes over steps of four sizes."""
    old_logits = ragged_tables(8, seed=101).logits
    found = by_step(_objective_errors, old_logits, range(102, 110))
    old, returns = old_logits[0], random_returns(RAGGED, seed=103)
    at_sampler = {
        name: ratio_objective_gradient(old, old, RAGGED, returns, objective=name)
        for name in ("sequence", "token", "token_mean")
    }
    figures = {
        "gradient_error_at_sampler": flat_error(at_sampler["token"], at_sampler["sequence"]),
        "value_order": order(found, "value"),
        "gradient_order": order(found, "gradient"),
        "length_mean_error": flat_error(at_sampler["token_mean"], at_sampler["sequence"]),
        "length_mean_order": order(found, "mean_gradient"),
        "error_3_tokens": _token_error(3),
        "error_8_tokens": _token_error(8),
    }
    first_order = (
        figures["gradient_error_at_sampler"] < EXACT
        and _near(figures["value_order"], 2)
        and _near(figures["gradient_order"], 1)
    )
    everywhere = figures["length_mean_error"] < EXACT
    return Finding(judge(first_order and everywhere, first_order), figures)


def _objective_errors(
    old: Tensor, seed: int, size: float, sequences: Sequences = RAGGED
) -> dict[str, Tensor | float]:
    """By how much the linear objective leaves the exact one, and GRPO's gradient the exact one."""
    returns = random_returns(sequences, seed=seed)
    fixed = {"old_logits": old, "sequences": sequences, "returns": returns}
    logits = moved_logits(old, size, seed=seed + 1000)
    promised, gain = (
        ratio_objective(logits, **fixed, objective=name)
        - ratio_objective(old, **fixed, objective=name)
        for name in ("linear", "sequence")
    )
    exact, linear, mean = (
        ratio_objective_gradient(logits, **fixed, objective=name)
        for name in ("sequence", "linear", "token_mean")
    )
    return {
        "value": (promised - gain).abs(),
        "gradient": flat_error(linear, exact),
        "mean_gradient": flat_error(mean, exact),
    }


def _token_error(length: int) -> float:
    """Median relative error of the token gradient at one step size, by length."""
    sequences = enumerate_sequences(2, length)
    tables = random_tables(sequences, 2, 6, spread=SPREAD, seed=104)
    errors = partial(_objective_errors, size=0.2, sequences=sequences)
    return measured(errors, tables.logits, range(105, 111)).gradient.median()


@claim("S3-35")
def two_factors_of_the_ratio() -> Finding:
    """Each factor alone, the first one dropped, and both cancelling, on enumerated sequences."""
    tables = ragged_tables(8, seed=111)
    found = by_step(_factor_errors, *tables, range(8))
    middle = found.groupby("size").median()
    figures = {
        "identity_error": middle.identity.max(),
        "gap_order": order(found, "gap"),
        "stale_order": order(found, "stale"),
        "dropped_order": order(found, "dropped"),
        "dropped_over_kept": (middle.dropped / middle.gap).iloc[-1],
        "cancelled_error": middle.cancelled.max(),
    }
    identity = figures["identity_error"] < EXACT
    each_breaks = all(_near(figures[f"{name}_order"], 1) for name in ("gap", "stale"))
    whatever_the_other = figures["cancelled_error"] > EXACT
    return Finding(judge(identity and each_breaks and whatever_the_other, identity), figures)


def _factor_errors(old: Tensor, direction: Tensor, seed: int, size: float) -> dict[str, float]:
    """Errors of the token ratio, against the product of both factors, where a factor is not one."""
    returns = random_returns(RAGGED, seed=seed)
    moved, sampler = moved_logits(old, size, seed=seed), old + size * direction

    def gradient(logits: Tensor, sampler: Tensor, objective: str) -> Tensor:
        return ratio_objective_gradient(logits, sampler, RAGGED, returns, objective=objective)

    def error(*pair: Tensor) -> float:
        return flat_error(gradient(*pair, "token"), gradient(*pair, "sequence"))

    unweighted = credit_moments(old, RAGGED, by_token(returns, RAGGED), sampler).mean
    first, second, both = (
        log_ratios(*pair, RAGGED).sum(-1).exp()
        for pair in ((old, sampler), (moved, old), (moved, sampler))
    )
    return {
        "gap": error(old, sampler),
        "stale": error(moved, old),
        "cancelled": error(sampler, sampler),
        "dropped": flat_error(unweighted, gradient(old, sampler, "sequence")),
        "identity": largest(first * second / both - 1),
    }


@claim("S4-46")
def token_ratio_surrogate() -> Finding:
    """The surrogate with dropped state ratio against the exact improvement; beside it the
    performance-difference lemma, which keeps the ratio."""
    old_logits = ragged_tables(8, seed=121).logits
    small = by_step(_step_errors, old_logits, range(8))
    large = by_step(_step_errors, old_logits, range(8), sizes=[0.5])
    found = pd.concat([small, large])
    figures = {
        "lemma_error": found.lemma.max(),
        "one_token_error": found.one_token.max(),
        "value_order": order(small, "value"),
        "gradient_order": order(small, "gradient"),
        "gradient_error": large.gradient.median(),
        "largest_value_error": large.share.max(),
    }
    referee_agrees = max(figures["lemma_error"], figures["one_token_error"]) < EXACT
    biased = figures["gradient_error"] > EXACT and _near(figures["value_order"], 2)
    return Finding("fails" if referee_agrees and biased else "holds", figures)


def _step_errors(old: Tensor, seed: int, size: float) -> dict[str, float]:
    """Errors of the surrogate and the lemma after one step, and of a policy of one token."""
    returns, one_token = random_returns(RAGGED, seed=seed), enumerate_sequences(3, 1)
    logits = moved_logits(old, size, seed=seed)
    found = _improvement_errors(logits, old, RAGGED, returns)
    bandit = _improvement_errors(logits[:1], old[:1], one_token, returns[:3])
    return found | {"one_token": bandit["value"]}


def _improvement_errors(
    logits: Tensor, old: Tensor, sequences: Sequences, returns: Tensor
) -> dict[str, float]:
    """Errors of the gain that surrogate and lemma promise, and of the surrogate's gradient."""
    whole = by_token(returns, sequences)
    fixed = (old, sequences, advantage_table(whole, old, sequences))
    change = sequence_probability(logits, sequences) - sequence_probability(old, sequences)
    gain = change @ returns
    value = (token_surrogate(logits, *fixed) - gain).abs()
    gradient = grad(token_surrogate)(logits, *fixed)
    return {
        "value": value.item(),
        "share": (value / gain.abs()).item(),
        "lemma": (performance_difference(logits, *fixed) - gain).abs().item(),
        "gradient": flat_error(gradient, ratio_objective_gradient(logits, old, sequences, returns)),
    }


@claim("S4-xd")
def two_approximations() -> Finding:
    """Orders at which state distribution and advantages leave the sampler's, and their depth."""
    sequences = enumerate_sequences(2, 7)
    depth = torch.zeros(sequences.num_states, dtype=torch.long)
    depth[sequences.states] = torch.arange(7).expand(sequences.states.shape)
    old_logits = random_tables(sequences, 2, 8, spread=SPREAD, seed=131).logits

    def gaps(old: Tensor, seed: int, size: float) -> dict[str, Tensor]:
        returns = random_returns(sequences, seed=seed)
        both = (old, moved_logits(old, size, seed=seed))
        before, after = (state_visits(x, sequences) for x in both)
        whole = by_token(returns, sequences)
        advantages = [advantage_table(whole, x, sequences) for x in both]
        state = (after - before).abs()
        found = {f"depth_{n}": state[depth == n].sum() for n in (1, 6)}
        return found | {"state": state.sum(), "advantage": torch.dist(*advantages)}

    found = by_step(gaps, old_logits, range(8))
    figures = {
        "state_order": order(found, "state"),
        "advantage_order": order(found, "advantage"),
        "depth_growth": found.depth_6.sum() / found.depth_1.sum(),
    }
    first_order = all(_near(figures[f"{k}_order"], 1) for k in ("state", "advantage"))
    uniform = figures["depth_growth"] < 1 + ORDER
    return Finding(judge(first_order and uniform, first_order), figures)
