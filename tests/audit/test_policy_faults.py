"""What is wrong with policy losses of the fifth set, by hand; the audit is not asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.audit.losses import held_out_fifth_broken as broken

#: Log-probs of two answers of three tokens and one, the second padded; above and below minus one.
LOGP = torch.tensor([[-0.3, -2.1, -1.4], [-0.7, -0.5, -0.9]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
ADVANTAGES = torch.tensor([0.8, -1.7], dtype=torch.float64)
BY_TOKEN = ADVANTAGES[:, None].expand_as(LOGP)


def slopes(loss, logp: Tensor = LOGP) -> Tensor:
    """The gradient by each log-prob, on fresh samples and without a KL."""
    leaf = logp.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(leaf, logp), leaf)
    return gradient


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_live_weight_turns_tokens_below_one_in_e():
    def loss(logp: Tensor, old: Tensor) -> Tensor:
        batch = {"logprobs": logp, "old_logprobs": old, "ref_logprobs": old}
        batch |= {"loss_mask": MASK, "advantages": ADVANTAGES}
        return broken.cispo_objective(batch, broken.CispoConfig(kl_coef=0.0))[0]

    right = torch.where(MASK, -BY_TOKEN, 0.0) / 16
    same(slopes(loss), right * (1 + LOGP))
    assert (slopes(loss) * right)[0, 1] < 0 < (slopes(loss) * right)[0, 0]


def test_a_band_without_one_leaves_negative_advantages_out():
    def loss(logp: Tensor, old: Tensor) -> Tensor:
        inputs = {"per_token_logps": logp, "old_per_token_logps": old, "ref_per_token_logps": old}
        inputs |= {"completion_mask": MASK, "advantages": ADVANTAGES}
        return broken.dapo_compute_loss(inputs)

    same(slopes(loss), torch.where(MASK, -BY_TOKEN.clamp(min=0), 0.0) / 4)


def test_a_weight_raised_to_its_cap_doubles_the_policy_loss():
    def loss(logp: Tensor, old: Tensor) -> Tensor:
        return broken.TruncatedISLoss(0.0)(logp, old, old, old, BY_TOKEN, MASK)[0]

    same(slopes(loss), 2 * torch.where(MASK, -BY_TOKEN, 0.0) / 4)


def test_the_first_token_of_an_answer_takes_the_advantage_of_the_one_before():
    def loss(logp: Tensor, old: Tensor) -> Tensor:
        ends = torch.tensor([0, 3, 4])
        return broken.flat_grpo_loss(logp, old, old, ADVANTAGES, ends, kl_coef=0.0)

    same(slopes(loss, LOGP[MASK]), -ADVANTAGES[[0, 0, 0, 0]] / 16)


@pytest.mark.parametrize("more", [0, 2])
def test_a_log_ratio_over_the_width_fades_as_the_batch_is_padded(more: int):
    def loss(logp: Tensor, old: Tensor) -> Tensor:
        config = broken.GSPOConfig(kl_beta=0.0)
        return broken.gspo_policy_loss(logp, old, old, mask, ADVANTAGES, config)[0]

    pad = torch.nn.functional.pad
    mask = pad(MASK, (0, more))
    wanted = torch.where(mask, -ADVANTAGES[:, None], 0.0) / (2 * (3 + more))
    same(slopes(loss, pad(LOGP, (0, more))), wanted)


def test_returns_of_the_past_pay_the_score_to_the_last_token_alone():
    batch = {"scores": ADVANTAGES, "log_probs": LOGP, "ref_log_probs": LOGP, "response_mask": MASK}
    paid = broken.compute_returns(batch, broken.RewardConfig())
    same(paid, torch.tensor([[0.0, 0.0, 0.8], [-1.7, 0.0, 0.0]], dtype=torch.float64))


def test_a_mask_cut_at_the_wrong_end_counts_padding_and_not_the_first_token():
    generator = torch.Generator().manual_seed(3)
    logits, ref_logits = torch.randn(2, 2, 5, 4, generator=generator, dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 0, 3, 1], [3, 1, 2, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]])
    leaf = logits.requires_grad_(True)
    loss, _ = broken.causal_pg_loss(leaf, ref_logits, tokens, mask, ADVANTAGES)
    (gradient,) = torch.autograd.grad(loss, leaf)
    reads = gradient.abs().sum(-1) > 0  # position t gives token t + 1
    assert reads.tolist() == [[False, True, True, False, False], [False, True, False, False, False]]
    assert mask[:, 1:].bool().tolist() == [[True, True, False, False], [True, False, False, False]]
