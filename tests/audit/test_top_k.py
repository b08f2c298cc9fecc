"""Losses that are given the teacher's likeliest tokens: what they are with all, and with some."""

from __future__ import annotations

import pytest
import torch

from kl_term.audit import audit
from kl_term.audit.readings import read
from kl_term.audit.spellings import role_of
from kl_term.audit.top_k import pushes_at_reference
from kl_term.kl.top_k import support_divergence

pytestmark = pytest.mark.slow


def from_logits(direction, correction):
    def loss(
        policy_logits, top_k_teacher_log_probs, top_k_teacher_indices, answer_mask, kd_coef=1.0
    ):
        of = policy_logits.log_softmax(-1).gather(-1, top_k_teacher_indices)
        kl = support_divergence(
            of, top_k_teacher_log_probs, direction=direction, correction=correction
        )
        return kd_coef * torch.where(answer_mask.bool(), kl, 0.0).sum() / answer_mask.sum()

    return loss


def from_log_probs(direction, correction):
    def loss(student_topk_logps, teacher_topk_logps, answer_mask):
        kl = support_divergence(
            student_topk_logps, teacher_topk_logps, direction=direction, correction=correction
        )
        return torch.where(answer_mask.bool(), kl, 0.0).sum() / answer_mask.sum()

    return loss


@pytest.mark.parametrize("made", [from_logits, from_log_probs])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("correction", ["none", "unnormalised", "tail", "renormalised"])
def test_only_without_a_correction_it_pushes_where_both_agree(made, direction, correction):
    assert pushes_at_reference(read(made(direction, correction))) == (correction == "none")


def unguarded_tail(student_topk_logps, teacher_topk_logps, answer_mask):
    """Of all tokens no mass is left, and its log is minus infinity."""

    def with_rest(logp):
        return torch.cat([logp, torch.log1p(-logp.exp().sum(-1, keepdim=True))], -1)

    of, to = with_rest(student_topk_logps), with_rest(teacher_topk_logps)
    return ((of.exp() * (of - to)).sum(-1) * answer_mask).sum() / answer_mask.sum()


def test_a_class_for_the_rest_is_given_all_tokens_but_one():
    reading = read(unguarded_tail)
    assert reading.foreign.kept == -1
    assert not pushes_at_reference(reading)
    found = audit(unguarded_tail)
    assert found.minimises["fresh"]["state"] == "reverse KL"
    assert not [f for f in found.findings if f.severity != "note"]


def test_a_truncated_reverse_kl_is_an_error_and_a_forward_one_a_note():
    found = audit(from_logits("reverse", "none"))
    assert found.minimises["fresh"]["state"] == "reverse KL"  # with all tokens
    assert [f.code for f in found.findings if f.severity == "error"] == ["no-known-divergence"]
    found = audit(from_logits("forward", "none"))
    assert {f.severity for f in found.findings} == {"note"}
    assert "not-zero-at-reference" in [f.code for f in found.findings]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("teacher_topk_logprobs", "ref_topk_logp"),
        ("topk_logits", "ref_topk_logp"),
        ("ref_top_k_log_probs", "ref_topk_logp"),
        ("student_topk_logps", "topk_logp"),
        ("teacher_topk_token_ids", "topk_ids"),
        ("top_k_indices", "topk_ids"),
        ("top_k", None),
    ],
)
def test_a_spelling_of_a_top_k_has_its_role(name, role):
    assert role_of(name) == role
