"""Claims on printed objectives, against formulas written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.experiments.claims import sequences_objectives
from analysis.objectives.losses import policy_loss


def test_token_form_of_two_answers_by_hand():
    """Lengths 2 and 1; the first answer's first token is clipped, its second is not."""
    logp = torch.log(torch.tensor([[0.6, 0.3], [0.2, 0.9]], dtype=torch.float64))
    old_logp = torch.log(torch.tensor([[0.4, 0.3], [0.4, 0.1]], dtype=torch.float64))
    mask = torch.tensor([[True, True], [True, False]])
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    output = policy_loss(logp, old_logp=old_logp, advantages=advantages, mask=mask)
    by_hand = ((1.2 * 2 + 1.0 * 2) / 2 + max(0.5, 0.8) * -1) / 2
    assert -output.loss.item() == pytest.approx(by_hand, abs=1e-12)
    finding = sequences_objectives.grpo_objective()
    assert finding.verdict == "holds"
    assert finding.figures["padding_change"] == 0.0
    assert finding.figures["flipped_kl_error"] > 1e-5


def test_sequence_form_by_hand():
    logp = torch.log(torch.tensor([[0.6, 0.3]], dtype=torch.float64))
    old_logp = torch.log(torch.tensor([[0.5, 0.4]], dtype=torch.float64))
    mask = torch.ones(1, 2, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.float64)
    output = policy_loss(logp, old_logp=old_logp, advantages=one, mask=mask, kind="sequence")
    assert -output.loss.item() == pytest.approx(0.18 / 0.20, abs=1e-12)
    token = policy_loss(logp, old_logp=old_logp, advantages=one, mask=mask)
    assert -token.loss.item() == pytest.approx((1.2 + 0.75) / 2, abs=1e-12)
    finding = sequences_objectives.sequence_form()
    assert finding.verdict == "holds"
    assert finding.figures["reverse_gradient_error"] > 0.1


def test_sum_and_mean_over_tokens_differ_by_the_length():
    """One binary choice: stop with return 1, or go on for a second token with return 1.

    The mean return is constant, so its gradient is zero: the sum agrees, the mean over tokens
    prefers the short answer.
    """
    stop = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    p = stop.detach()
    answers = [(p, stop.log(), 1), (1 - p, (1 - stop).log(), 2)]  # probability, log-prob, length
    total = sum(probability * logp for probability, logp, _ in answers)
    mean = sum(probability * logp / length for probability, logp, length in answers)
    by_sum, by_mean = (
        torch.autograd.grad(x, stop, retain_graph=True)[0].item() for x in (total, mean)
    )
    assert by_sum == pytest.approx(0.0, abs=1e-12)
    assert by_mean == pytest.approx(0.5)
    finding = sequences_objectives.sum_over_tokens()
    assert finding.verdict == "holds"
    assert finding.figures["ragged_mean_error"] > 0.1 > 1e-12 > finding.figures["fixed_mean_error"]


def test_sum_and_mean_over_tokens_agree_for_rewards_on_answers_of_one_length():
    """Old statement: they agree only if all answers have one length; for some rewards they do."""
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logp = (logits + torch.tensor([0.7, -0.4, 0.0]).double()).log_softmax(-1)
    lengths = torch.tensor([1, 2, 2]).double()
    gradients = []
    for rewards in (torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])):
        score = logp.exp().detach() * rewards.double() * logp
        gradients.append(
            [
                torch.autograd.grad((score / by).sum(), logits, retain_graph=True)[0]
                for by in (1.0, lengths)
            ]
        )
    (of_one, its_mean), (total, mean) = gradients
    torch.testing.assert_close(its_mean, of_one / 2, rtol=0, atol=1e-15)
    assert of_one.norm() > 0.1
    assert torch.linalg.matrix_rank(torch.stack([total, mean])) == 2  # no constant for this reward


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (3.0, 1.2)])
def test_cispo_weight_by_hand(ratio, weight):
    logp = torch.tensor([[math.log(ratio * 0.2)]], dtype=torch.float64, requires_grad=True)
    old_logp = torch.tensor([[math.log(0.2)]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.float64)
    policy_loss(
        logp, old_logp=old_logp, advantages=-3 * one, mask=mask, kind="cispo"
    ).loss.backward()
    assert logp.grad.item() == pytest.approx(3 * weight)
    finding = sequences_objectives.cispo_weight()
    assert finding.verdict == "holds"
    assert finding.figures["silenced_share"] == 0.0 < finding.figures["silenced_share_ppo"]


def test_cispo_weighs_tokens_and_gspo_sequences():
    logp = torch.log(torch.tensor([[0.22, 0.36]], dtype=torch.float64)).requires_grad_()
    old_logp = torch.log(torch.tensor([[0.2, 0.4]], dtype=torch.float64))
    mask, one = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    slopes = {}
    for kind in ("cispo", "gspo"):
        loss = policy_loss(
            logp, old_logp=old_logp, advantages=-one, mask=mask, kind=kind
        ).per_token.sum()
        slopes[kind] = torch.autograd.grad(loss, logp)[0][0].tolist()
    assert slopes["cispo"] == pytest.approx([1.1, 0.9])
    assert slopes["gspo"] == pytest.approx([math.sqrt(0.99)] * 2)


def test_other_kinds_are_not_what_is_printed(monkeypatch):
    true = policy_loss

    def token_form(*args, kind="grpo", **options):
        return true(*args, kind="grpo", **options)

    monkeypatch.setattr(sequences_objectives, "policy_loss", token_form)
    assert sequences_objectives.sequence_form().verdict == "fails"
    monkeypatch.setattr(sequences_objectives, "EPSILON", 0.1)
    assert sequences_objectives.cispo_weight().verdict == "fails"


def test_a_flipped_kl_is_not_the_printed_objective(monkeypatch):
    true = sequences_objectives.kl_loss
    monkeypatch.setattr(sequences_objectives, "kl_loss", lambda *a, **k: -true(*a, **k))
    assert sequences_objectives.grpo_objective().verdict == "fails"
