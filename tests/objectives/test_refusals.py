"""What the objectives refuse, each naming the argument; see also tests/kl/test_guard.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.aggregation import token_mean_weight, token_weights
from kl_term.objectives.credit import fold_kl, process_supervision, reward_to_go
from kl_term.objectives.difficulty import difficulty_weight
from kl_term.objectives.filtering import kept_fraction, repeats
from kl_term.objectives.gae import generalised_advantage
from kl_term.objectives.guidance import annealed
from kl_term.objectives.imitation import imitation_cost
from kl_term.objectives.lengths import length_penalty, soft_overlong
from kl_term.objectives.losses import policy_loss
from kl_term.objectives.masking import off_policy_sequence_mask
from kl_term.objectives.merged import merged_loss
from kl_term.objectives.mirror_descent import log_partition
from kl_term.objectives.mismatch import mismatch_weight
from kl_term.objectives.ordering import ORDERS
from kl_term.objectives.preference import dpo_loss
from kl_term.objectives.process import best_of_n, early_stop, path_score

ROW, ROWS, EVERY = torch.ones(4), torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)
HOLES = torch.tensor([True, True, False, True])
BETA = "beta must be finite and >= 0"
SAMPLED = {"old_logp": ROWS, "advantages": ROWS, "mask": EVERY}
#: Options of a normalisation, named by their first.
OUT_OF_RANGE: list[dict[str, float]] = [
    *({"ddof": ddof} for ddof in (2, -1)),
    *({"eps": eps} for eps in (-1e-9, math.nan, math.inf)),
    *({"std_min": low} for low in (-0.1, math.nan)),
    *({"std_max": high} for high in (0.0, math.nan)),
    {"std_min": 2.0, "std_max": 1.0},
]

REFUSED: list[tuple[str, Callable[[], object]]] = [
    *((next(iter(how)), lambda how=how: group_normalise(ROW, **how)) for how in OUT_OF_RANGE),
    *(
        ("epsilon_low", lambda e=e: policy_loss(ROWS, **SAMPLED, epsilon_low=e))
        for e in (-0.1, 1.1, math.nan)
    ),
    *(
        ("epsilon_high", lambda e=e: policy_loss(ROWS, **SAMPLED, epsilon_high=e))
        for e in (-0.1, math.nan)
    ),
    ("mask", lambda: token_weights(torch.tensor(True), "token_mean")),
    ("completions >= 1", lambda: token_mean_weight(torch.ones(2) / 2, 0)),
    ("length_probability", lambda: token_mean_weight(torch.ones(2, 2) / 2, 3)),
    ("floating", lambda: token_mean_weight(torch.tensor([0, 1]), 3)),
    *(("gamma", lambda g=g: reward_to_go(ROW, gamma=g)) for g in (-0.1, 1.1, math.nan)),
    *(("beta", lambda b=b: fold_kl(ROW[:2], ROWS, EVERY, beta=b)) for b in (-0.1, math.inf)),
    (r"give one a row, .*, or one a token", lambda: fold_kl(ROW[:1], ROWS, EVERY, beta=0.1)),
    ("lengths must be", lambda: process_supervision(ROWS, [[0], [0]], object())),
    ("group_size", lambda: difficulty_weight(ROW / 2, 1)),
    ("probabilities", lambda: difficulty_weight(ROW + 1, 4)),
    ("probabilities", lambda: kept_fraction(ROW + 1, 4)),
    ("mask", lambda: generalised_advantage(ROW, ROW, HOLES)),
    ("mask", lambda: path_score(ROW, HOLES.flip(-1), "last")),
    ("gamma", lambda: fold_kl(ROW[:2], ROWS, EVERY, beta=0.1, gamma=0.5)),
    ("times", lambda: repeats(torch.arange(4), period=1, times=1)),
    ("group_size", lambda: kept_fraction(torch.tensor(0.5), 0)),
    ("lam", lambda: generalised_advantage(ROWS, ROWS, EVERY, lam=1.5)),
    ("gamma", lambda: generalised_advantage(ROWS, ROWS, EVERY, gamma=-0.1)),
    ("total", lambda: annealed(1, 0, start=1.0, end=0.0)),
    ("recovery", lambda: imitation_cost(0.1, 5, 1.1)),
    ("horizon", lambda: imitation_cost(0.1, 0, 0.5)),
    ("weight", lambda: length_penalty(ROW, ROW, weight=-1.0)),
    ("buffer", lambda: soft_overlong(ROW, max_length=10, buffer=11)),
    ("delta", lambda: off_policy_sequence_mask(ROWS, ROWS, ROW[:2], EVERY, delta=-0.1)),
    (
        "give one a sequence",
        lambda: off_policy_sequence_mask(ROWS, ROWS, ROWS, EVERY, delta=0.1),
    ),
    (BETA, lambda: merged_loss(ROWS, ROWS, ROWS, ROW[:2], EVERY, beta=-1.0, reading="old")),
    ("tau", lambda: log_partition(ROW, ROW, tau=0.0)),
    ("bound must be at least 1", lambda: mismatch_weight(ROWS, ROWS, EVERY, bound=0.9)),
    *((BETA, lambda o=o: o(ROW, ROW, beta=-1.0)) for o in ORDERS.values()),
    *(("at least two", lambda o=o: o(ROW[:1], ROW[:1], beta=0.5)) for o in ORDERS.values()),
    *(("beta", lambda b=b: dpo_loss(*[ROW] * 4, beta=b)) for b in (0.0, -0.1, math.inf)),
    ("without steps", lambda: best_of_n(ROWS, ~EVERY)),
    ("patience", lambda: early_stop(ROWS, patience=0)),
]


@pytest.mark.parametrize(("named", "call"), REFUSED)
def test_what_is_refused_is_named(named: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=named):
        call()
