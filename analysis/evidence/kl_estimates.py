"""Estimators of the gradient of a sequence KL, by vocabulary and credit."""

from __future__ import annotations

import pandas as pd

from analysis.evidence.policies import Policies, flat_error, log_ratios
from kl_term.kl.credit import credit_moments, weighted_moments
from kl_term.kl.full_vocabulary import full_vocabulary_gradients
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import Sequences, sequence_kl_gradient, sequence_probability


def kl_estimates(tables: Policies, sequences: Sequences) -> pd.DataFrame:
    """Four estimators of a KL gradient on each pair, by vocabulary and credit: ``error`` against
    the sequence KL's gradient, and ``samples``, sequences until signal = noise."""
    rows = []
    for pair in zip(*tables, strict=True):
        exact = sequence_kl_gradient(*pair, sequences)
        costs = log_ratios(*pair, sequences)
        probability = sequence_probability(pair[0], sequences)
        moments = {
            ("sampled", "immediate"): credit_moments(pair[0], sequences, costs),
            ("sampled", "to_go"): credit_moments(pair[0], sequences, reward_to_go(costs)),
        }
        for credit in ("immediate", "to_go"):
            gradients = full_vocabulary_gradients(*pair, sequences, credit=credit)
            moments["full", credit] = weighted_moments(probability, gradients)
        for key, (mean, trace_var) in moments.items():
            samples = (trace_var / mean.square().sum()).item()
            rows.append((*key, flat_error(mean, exact), samples))
    return pd.DataFrame(rows, columns=["vocabulary", "credit", "error", "samples"])
