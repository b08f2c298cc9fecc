"""The expected gradient of each KL term beside the exact ones: at one state, over sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.claims import error_of, median, share
from analysis.evidence.policies import SAME, Policies
from kl_term.kl.enumeration import cosine, exact_kl_gradient, expected_gradient
from kl_term.kl.sequences import (
    Sequences,
    expected_sequence_gradient,
    sequence_kl_gradient,
    visited_kl_gradient,
)
from kl_term.kl.term import KLTerm

#: Each of the three estimators, as a loss and in the reward.
LOSS_AND_REWARD = tuple(
    KLTerm(estimator=estimator, placement=placement)
    for placement in ("loss", "reward")
    for estimator in ("k1", "k2", "k3")
)

#: The rows of the sequence table by these axes, the ratio attached.
SEQUENCE_AXES = ("placement", "level", "ratio", "credit")
SEQUENCE_ROWS = (
    ("loss", "token", "none", "immediate"),
    ("loss", "token", "prefix", "immediate"),
    ("loss", "sequence", "none", "immediate"),
    ("reward", "token", "none", "immediate"),
    ("reward", "token", "none", "to_go"),
    ("reward", "sequence", "none", "immediate"),
)


def one_state_table(policies: Policies, terms: Iterable[KLTerm] = LOSS_AND_REWARD) -> pd.DataFrame:
    """Expected on-policy gradient of each term beside the reverse KL's: medians over policies.

    ``optimises`` names the exact gradient that the term equals at *every* policy, to ``SAME``.
    """
    exact = {d: exact_kl_gradient(*policies, direction=d) for d in ("reverse", "forward")}
    exact["reverse − forward"] = exact["reverse"] - exact["forward"]
    return pd.DataFrame(
        term.at_one_state | _compare(expected_gradient(*policies, **term.at_one_state), exact)
        for term in terms
    )


def sequence_table(tables: Policies, sequences: Sequences) -> pd.DataFrame:
    """On-policy terms over whole sequences against the exact gradients of the sequence KL and of
    the *visited* KL: per-token KL with the visited states held fixed."""

    def per_pair(gradient: Callable[..., Tensor], **options: str) -> Tensor:
        found = (gradient(*pair, sequences, **options) for pair in zip(*tables, strict=True))
        return torch.stack([x.flatten() for x in found])

    exact = {}
    for suffix, of in (("", sequence_kl_gradient), (" (visited)", visited_kl_gradient)):
        reverse, forward = (per_pair(of, direction=d) for d in ("reverse", "forward"))
        exact |= {f"reverse{suffix}": reverse, f"forward{suffix}": forward}
        exact[f"reverse − forward{suffix}"] = reverse - forward
    rows = []
    for estimator in ("k1", "k2", "k3"):
        for place in SEQUENCE_ROWS:
            choice = {"estimator": estimator, **dict(zip(SEQUENCE_AXES, place, strict=True))}
            ratio = {"weighting": "attached"} if choice["ratio"] == "prefix" else {"ratio": "token"}
            gradient = per_pair(expected_sequence_gradient, **choice | ratio)
            rows.append(choice | _compare(gradient, exact))
    return pd.DataFrame(rows)


def _compare(gradient: Tensor, exact: dict[str, Tensor]) -> dict[str, object]:
    """Medians of cosine and error against the reverse KL, the gradient that it equals, and how
    often descending it *raises* the reverse KL."""
    same = [name for name, g in exact.items() if error_of(gradient, g, worst=True) < SAME]
    angle = cosine(gradient, exact["reverse"])
    vanishes = bool((gradient.norm(dim=-1) < SAME * exact["reverse"].norm(dim=-1)).all())
    return {
        "cosine_reverse": torch.nan if vanishes else median(angle),
        "error_reverse": error_of(gradient, exact["reverse"]),
        "share_away": torch.nan if vanishes else share(angle < 0),
        "optimises": "nothing" if vanishes else (same or ["neither"])[0],
    }
