"""Losses of packed rows: named with the ids of their sequences, an error without."""

from __future__ import annotations

import pytest
import torch

from kl_term.audit import audit
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import aggregate
from kl_term.objectives.losses import policy_loss

PREFIX = KLTerm(estimator="k1", weighting="attached", ratio="prefix")


def with_ids(logp, ref_logp, old_logp, advantages, sequence_ids, beta=0.1):
    counted = torch.ones_like(logp, dtype=torch.bool)
    packing = {"sequence_ids": sequence_ids}
    kl = PREFIX.loss(logp, ref_logp, old_logp=old_logp, **packing)
    mode = "seq_mean_token_sum"
    policy = policy_loss(
        logp, old_logp=old_logp, advantages=advantages, mask=counted, aggregation=mode, **packing
    )
    return policy.loss + beta * aggregate(kl, counted, mode, **packing)


def across_sequences(logp, ref_logp, old_logp, advantages, cu_seqlens, beta=0.1):
    kl = PREFIX.loss(logp, ref_logp, old_logp=old_logp)  # one row, so one sequence
    policy = -(logp - old_logp).exp() * advantages
    return (policy + beta * kl).sum() / (len(cu_seqlens) - 1)


def test_a_packed_loss_with_ids_is_named():
    found = audit(with_ids)
    assert (found.term.name, found.aggregation) == (PREFIX.name, "seq_mean_token_sum")
    assert found.minimises["stale"]["sequence"] == "reverse KL"
    assert not [finding for finding in found.findings if finding.severity != "note"]


@pytest.mark.slow
def test_a_packed_loss_that_looks_across_its_sequences_is_an_error():
    found = audit(across_sequences)
    assert found.findings[0].code == "reads-other-answers"
    assert found.findings[0].severity == "error"
