"""How far each term's gradient is from the reverse KL's: in the mean, and in one sample."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.claims import median, percentiles
from analysis.evidence.policies import Policies
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import (
    exact_kl_gradient,
    expected_gradient,
    gradient_moments,
    relative_error,
)
from kl_term.kl.term import KLTerm


def error_curves(terms: Iterable[KLTerm], *policies: Tensor) -> pd.DataFrame:
    """Relative error of each term against the reverse KL's gradient, as ``percentiles`` over N.

    ``policies``: the policy, its reference and, unless it is the policy, the sampler, [D, N, V] or
    the same for all D. A row a term and D, with medians of the KLs (nats) of policy from reference,
    ``kl``, and of sampler from policy, ``staleness``.
    """
    logits, ref_logits, *sampler = torch.broadcast_tensors(*policies)
    exact = exact_kl_gradient(logits, ref_logits, direction="reverse")
    kls = {"kl": (logits, ref_logits), "staleness": (sampler[0] if sampler else logits, logits)}
    at = {name: reverse_kl(*pair).median(dim=-1).values for name, pair in kls.items()}
    curves = []
    for term in terms:
        gradient = expected_gradient(logits, ref_logits, *sampler, **term.at_one_state)
        errors = percentiles(relative_error(gradient, exact))
        curves.append(pd.DataFrame({**term.at_one_state, **at, **errors}))
    return pd.concat(curves, ignore_index=True)


def noise_table(policies: Policies, terms: Iterable[KLTerm]) -> pd.DataFrame:
    """Samples for a signal-to-noise ratio of one: trace of one sample's gradient covariance over
    the squared norm of its mean, median over the policies."""
    rows = []
    for term in terms:
        mean, trace_var = gradient_moments(*policies, **term.at_one_state)
        samples = median(trace_var / mean.square().sum(-1))
        rows.append(term.at_one_state | {"samples_median": samples})
    return pd.DataFrame(rows)
