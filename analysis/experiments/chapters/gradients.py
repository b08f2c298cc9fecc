"""What each KL term optimises in expectation, enumerated: the tables and curves of chapter 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import (
    cosine,
    exact_kl_gradient,
    expected_gradient,
    gradient_moments,
    relative_error,
)
from analysis.kl.sequences import (
    Sequences,
    expected_sequence_gradient,
    sequence_kl_gradient,
    visited_kl_gradient,
)
from analysis.kl.term import KLTerm

#: Below this relative error two enumerated gradients are the same gradient.
SAME = 1e-9


LOSS_AND_REWARD = tuple(
    KLTerm(estimator=estimator, placement=placement)
    for placement in ("loss", "reward")
    for estimator in ("k1", "k2", "k3")
)


class Policies(NamedTuple):
    """Pairs of categorical policies, one a row."""

    logits: Tensor  #: [N, V], the trained policy
    ref_logits: Tensor  #: [N, V], its reference


def random_policies(count: int, vocab_size: int, *, spread: float, seed: int) -> Policies:
    """Independent policies and references: Gaussian logits of standard deviation ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = spread * torch.randn(
        2, count, vocab_size, generator=generator, dtype=torch.float64
    )
    return Policies(logits, ref_logits)


def drifted_logits(logits: Tensor, distances: Tensor, *, seed: int) -> Tensor:
    """[D, N, V]: each policy moved ``distance`` along its own random direction of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    return logits + distances[:, None, None] * direction


def derivation_errors(policies: Policies) -> pd.DataFrame:
    """Each line of the derivation of the reverse KL's gradient against autograd through the KL.

    The lines are enumerated from the Jacobian of the softmax, action by action. Returns the
    largest absolute difference over all policies, and the same with the sign flipped.
    """
    logits, ref_logits = policies
    leaf = logits.clone().requires_grad_(True)
    (by_autograd,) = torch.autograd.grad(reverse_kl(leaf, ref_logits).sum(), leaf)
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    jacobian = torch.diag_embed(policy) - policy[:, :, None] * policy[:, None, :]  # d pi_a / d z_b
    score = jacobian / policy[:, :, None]  # d log pi_a / d z_b
    lines = {
        "product rule": (jacobian * log_ratio[:, :, None] + jacobian).sum(1),
        "probabilities sum to one": (jacobian * log_ratio[:, :, None]).sum(1),
        "log-derivative": (policy[:, :, None] * score * log_ratio[:, :, None]).sum(1),
        "closed form": exact_kl_gradient(logits, ref_logits, direction="reverse"),
    }
    return pd.DataFrame(
        {
            "line": name,
            "error": (value - by_autograd).abs().max().item(),
            "error_flipped": (value + by_autograd).abs().max().item(),
        }
        for name, value in lines.items()
    )


def one_state_table(policies: Policies, terms: Iterable[KLTerm] = LOSS_AND_REWARD) -> pd.DataFrame:
    """Expected on-policy gradient of each term beside the exact gradients of both KLs.

    Cosine and relative error are medians over the policies; ``optimises`` names the exact
    gradient that the term equals at *every* policy, to a relative error of ``SAME``.
    """
    exact = {d: exact_kl_gradient(*policies, direction=d) for d in ("reverse", "forward")}
    exact["reverse − forward"] = exact["reverse"] - exact["forward"]
    rows = []
    for term in terms:
        gradient = expected_gradient(*policies, **term.at_one_state)
        rows.append({**term.at_one_state, **_compare(gradient, exact)})
    return pd.DataFrame(rows)


def drift_curves(
    ref_logits: Tensor,
    distances: Tensor,
    *,
    seed: int,
    terms: Iterable[KLTerm] = LOSS_AND_REWARD,
) -> pd.DataFrame:
    """Relative error against the reverse KL's gradient as the policy leaves its reference.

    Returns a tidy frame: the term, ``kl`` (median reverse KL, nats) and the 10th, 50th and 90th
    percentile of the error over the references.
    """
    moved = drifted_logits(ref_logits, distances, seed=seed)
    fixed = ref_logits.expand_as(moved)
    kl = reverse_kl(moved, fixed).median(dim=-1).values
    exact = exact_kl_gradient(moved, fixed, direction="reverse")
    frames = []
    for term in terms:
        error = relative_error(expected_gradient(moved, fixed, **term.at_one_state), exact)
        frames.append(_quantile_frame(term, "kl", kl, error))
    return pd.concat(frames, ignore_index=True)


def staleness_curves(
    policies: Policies, distances: Tensor, *, seed: int, terms: Iterable[KLTerm]
) -> pd.DataFrame:
    """Relative error against the reverse KL's gradient as the sampler falls behind the policy.

    As :func:`drift_curves`, with ``staleness`` the median KL of the sampler from the policy (nats).
    """
    old_logits = drifted_logits(policies.logits, distances, seed=seed)
    logits, ref_logits = (x.expand_as(old_logits) for x in policies)
    staleness = reverse_kl(old_logits, logits).median(dim=-1).values
    exact = exact_kl_gradient(logits, ref_logits, direction="reverse")
    frames = []
    for term in terms:
        gradient = expected_gradient(logits, ref_logits, old_logits, **term.at_one_state)
        frames.append(
            _quantile_frame(term, "staleness", staleness, relative_error(gradient, exact))
        )
    return pd.concat(frames, ignore_index=True)


def noise_table(policies: Policies, terms: Iterable[KLTerm]) -> pd.DataFrame:
    """Samples that each on-policy term needs for a signal-to-noise ratio of one.

    The trace of one sample's gradient covariance over the squared norm of its own mean: median
    and 90th percentile over the policies.
    """
    rows = []
    for term in terms:
        mean, trace_var = gradient_moments(*policies, **term.at_one_state)
        samples = trace_var / mean.square().sum(-1)
        rows.append(
            {
                **term.at_one_state,
                "samples_median": samples.median().item(),
                "samples_p90": samples.quantile(0.9).item(),
            }
        )
    return pd.DataFrame(rows)


def random_tables(
    sequences: Sequences, vocab_size: int, count: int, *, spread: float, seed: int
) -> Policies:
    """``count`` pairs of tabular autoregressive policies: logits [count, states, vocab]."""
    flat = random_policies(count, sequences.num_states * vocab_size, spread=spread, seed=seed)
    return Policies(*(x.unflatten(-1, (sequences.num_states, vocab_size)) for x in flat))


#: Placement, level, attached ratio and credit of the sequence table, in reading order.
SEQUENCE_CHOICES = (
    {"placement": "loss", "level": "token", "credit": "immediate"},
    {"placement": "loss", "level": "token", "ratio": "prefix", "credit": "immediate"},
    {"placement": "loss", "level": "sequence", "credit": "immediate"},
    {"placement": "reward", "level": "token", "credit": "immediate"},
    {"placement": "reward", "level": "token", "credit": "to_go"},
    {"placement": "reward", "level": "sequence", "credit": "immediate"},
)


def sequence_table(tables: Policies, sequences: Sequences) -> pd.DataFrame:
    """On-policy terms over whole sequences against the exact gradients of the sequence KL.

    ``optimises`` also knows the *visited* KL: per-token KL with the visited states held fixed.
    """
    exact = {
        f"{direction}{suffix}": _per_pair(
            partial(gradient, sequences=sequences, direction=direction), tables
        )
        for suffix, gradient in (
            ("", sequence_kl_gradient),
            (" (visited)", visited_kl_gradient),
        )
        for direction in ("reverse", "forward")
    }
    for suffix in ("", " (visited)"):
        exact[f"reverse − forward{suffix}"] = exact[f"reverse{suffix}"] - exact[f"forward{suffix}"]
    rows = []
    for estimator in ("k1", "k2", "k3"):
        for choice in SEQUENCE_CHOICES:
            expected = partial(
                expected_sequence_gradient,
                sequences=sequences,
                estimator=estimator,
                weighting="attached" if "ratio" in choice else "none",
                **choice,
            )
            gradient = _per_pair(expected, tables)
            row = {"estimator": estimator, "ratio": "none", **choice}
            rows.append(row | _compare(gradient, exact))
    return pd.DataFrame(rows)


def _per_pair(gradient: Callable[[Tensor, Tensor], Tensor], tables: Policies) -> Tensor:
    """[count, states * vocab]: a gradient of tables, for each pair of them."""
    return torch.stack([gradient(*pair).flatten() for pair in zip(*tables, strict=True)])


def _compare(gradient: Tensor, exact: dict[str, Tensor]) -> dict[str, object]:
    """Medians of cosine and error against both KLs, the gradient it equals, how often it points
    away from the reference (descending it *raises* the reverse KL)."""
    same = [name for name, g in exact.items() if bool((relative_error(gradient, g) < SAME).all())]
    vanishes = bool((gradient.norm(dim=-1) < SAME * exact["reverse"].norm(dim=-1)).all())
    row: dict[str, object] = {}
    for name in ("reverse", "forward"):
        angle = torch.nan if vanishes else cosine(gradient, exact[name]).median().item()
        row[f"cosine_{name}"] = angle
        row[f"error_{name}"] = relative_error(gradient, exact[name]).median().item()
    angles = cosine(gradient, exact["reverse"])
    row["cosine_p10"], row["cosine_p90"] = (angles.quantile(q).item() for q in (0.1, 0.9))
    row["share_away"] = torch.nan if vanishes else (angles < 0).double().mean().item()
    row["optimises"] = "nothing" if vanishes else (same[0] if same else "neither")
    return row


def _quantile_frame(term: KLTerm, axis: str, position: Tensor, error: Tensor) -> pd.DataFrame:
    low, mid, high = torch.quantile(
        error, torch.tensor([0.1, 0.5, 0.9], dtype=error.dtype), dim=-1
    ).numpy()
    return pd.DataFrame(
        {
            **term.at_one_state,
            axis: position.numpy(),
            "p10": low,
            "median": mid,
            "p90": high,
        }
    )
