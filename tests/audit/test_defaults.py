"""Numbers that a caller leaves at their defaults: sizes of groups, divisors, optional counts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kl_term.audit import audit


@dataclass
class Rollouts:
    completions_per_prompt: int = 2


def leave_one_out(rewards, logprobs, ref_logprobs, response_mask, config, kl_coef=0.1, sign=1):
    size = config.completions_per_prompt
    gap = torch.where(response_mask, logprobs - ref_logprobs, 0.0).detach().sum(1)
    groups = (rewards - sign * kl_coef * gap).reshape(-1, size)
    return ((groups - groups.mean(1, keepdim=True)) * size / (size - 1)).reshape(-1)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_size_of_groups_is_read_in_a_configuration_whatever_it_is_called(sign):
    def loss(rewards, logprobs, ref_logprobs, response_mask, config, kl_coef=0.1):
        return leave_one_out(rewards, logprobs, ref_logprobs, response_mask, config, kl_coef, sign)

    found = audit(loss, given={"config": Rollouts()}, beta_name="kl_coef")
    loud = [finding.code for finding in found.findings if finding.severity != "note"]
    assert loud == ([] if sign == 1 else ["sign"])
    assert found.to_dict()["term"] == "k1_reward_whole" and found.scale == pytest.approx(sign)


@pytest.mark.parametrize("clipped", [True, False])
def test_a_guess_that_makes_numbers_nan_keeps_its_default(clipped):
    def loss(logprobs, old_logprobs, advantages, response_mask, output_tokens=None):
        ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
        if not clipped:
            ratio = ratio.detach()
        bound = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        total = response_mask.sum() if output_tokens is None else output_tokens
        return -torch.where(response_mask, bound, 0.0).sum() / total

    loud = [finding.code for finding in audit(loss).findings if finding.severity != "note"]
    assert loud[:1] == ([] if clipped else ["no-gradient"])


class BothKLs:
    """A share of each KL over the vocabulary, divided by a length that its caller may say."""

    share = 0.5

    def __init__(self, coef: float = 1.0, max_length: int = 8) -> None:
        self.coef, self.max_length = coef, max_length

    def __call__(self, logits, ref_logits, mask):
        gap = logits.log_softmax(-1) - ref_logits.detach().log_softmax(-1)
        both = (logits.softmax(-1) - ref_logits.detach().softmax(-1)) * gap
        kept = torch.where(mask, self.share * both.sum(-1), 0.0)
        return self.coef * kept.sum() / (len(mask) * self.max_length)


class TooLittle(BothKLs):
    share = 0.3


@pytest.mark.parametrize(("made", "loud"), [(BothKLs, []), (TooLittle, ["scale"])])
def test_the_length_that_divides_two_kls_is_the_makers_number(made, loud):
    found = audit(made, factory=True, beta_name="coef")
    assert [finding.code for finding in found.findings if finding.severity != "note"] == loud
