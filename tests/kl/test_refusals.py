"""What the functions of ``kl`` refuse, each naming the argument; of every one: test_guard.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kl_term.kl.enumeration import expected_gradient
from kl_term.kl.estimators import k3_clip
from kl_term.kl.fixed_points import penalty_equilibrium, reverse_kl_optimum
from kl_term.kl.gaussians import moments
from kl_term.kl.mirror_steps import mirror_step
from kl_term.kl.sequences import enumerate_sequences, token_logp
from kl_term.kl.surrogates import kl_loss
from kl_term.kl.term import KLTerm
from kl_term.kl.truncation import keep_top, tempered

ROW, ROWS = torch.ones(4), torch.ones(2, 4)
TREE = enumerate_sequences(2, 2)
TABLE = torch.zeros(TREE.num_states, 2)
K1 = KLTerm(estimator="k1", placement="reward")
STEP = "must be finite and > 0"

REFUSED: list[tuple[str, Callable[[], object]]] = [
    *(
        ("max_ratio", lambda cap=cap: k3_clip(ROW, ROW, max_ratio=cap))
        for cap in (0.0, -1.0, math.nan, math.inf)
    ),
    ("q_std", lambda: moments(0, 0.0, 0, 1)),
    ("p_std", lambda: moments(0, 1, 0, -1.0)),
    ("q_mean", lambda: moments(math.nan, 1, 0, 1)),
    ("q_mean must be finite", lambda: moments(math.inf, 1, 0, 1)),
    ("old_logp is needed", lambda: kl_loss(ROW, ROW, weighting="attached")),
    ("old_logp would go unread", lambda: kl_loss(ROW, ROW, old_logp=ROW)),
    ("ratio='prefix' would go unread", lambda: kl_loss(ROW, ROW, ratio="prefix")),
    ("k3_loss has no penalty", lambda: KLTerm().penalty(ROW, ROW)),
    ("k1_reward has no loss", lambda: K1.loss(ROW, ROW)),
    ("old_logp is needed", lambda: KLTerm(weighting="attached").loss(ROW, ROW)),
    (
        "estimator must be one of",
        lambda: expected_gradient(ROW, ROW, estimator="minimax01", placement="reward"),
    ),
    (r"logits must be a table \[3, vocab\]", lambda: token_logp(TABLE[:2], TREE)),
    ("eos must be a token", lambda: enumerate_sequences(3, 2, eos=3)),
    ("vocab_size >= 2", lambda: enumerate_sequences(1, 2)),
    ("beta", lambda: reverse_kl_optimum(ROWS, ROWS, beta=0.0)),
    ("k2", lambda: penalty_equilibrium(ROWS, ROWS, ROWS > 0, beta=1.0, estimator="k1")),
    ("support", lambda: penalty_equilibrium(ROWS, ROWS, ROWS > 9, beta=1.0, estimator="k2")),
    (STEP, lambda: mirror_step(ROW, ROW, ROW, beta=0.0, step_size=1.0)),
    (STEP, lambda: mirror_step(ROW, ROW, ROW, beta=1.0, step_size=-1.0)),
    *(
        ("top_", lambda options=options: keep_top(ROW, **options))
        for options in ({"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1})
    ),
    ("temperature", lambda: tempered(ROW, 0.0)),
]


@pytest.mark.parametrize(("named", "call"), REFUSED)
def test_what_is_refused_is_named(named: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=named):
        call()
