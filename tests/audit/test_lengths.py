"""Answers in lists, with lengths that may count the prompt, and with ids of padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kl_term.audit import audit
from kl_term.audit.identity import identify
from kl_term.audit.layout import PAD
from kl_term.audit.layouts import HIGH, probe_of
from kl_term.audit.lengths import counts_the_prompt
from kl_term.audit.readings import read


def k2(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def gap_of(batch):
    return torch.where(batch.mask, batch.logp - batch.ref_logp, 0.0)


def gradient_of(loss, **how):
    """Of the KL, and the log-ratio of the counted tokens that k2 has at each."""
    reading = read(loss, **how)
    batch = probe_of(reading.foreign)
    return reading, batch, reading.kl(batch).gradient


# Lists -----------------------------------------------------------------------------------------


def per_answer(divide):
    def loss(
        log_probs: list[Tensor],
        ref_log_probs: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        kl_coef: float = 0.1,
    ):
        token = k2(torch.cat(log_probs), torch.cat(ref_log_probs)).split(response_lengths)
        sizes = zip(token, total_lengths, response_lengths, strict=True)
        return kl_coef * torch.stack([x.sum() / divide(t, r) for x, t, r in sizes]).mean()

    return loss


@pytest.mark.parametrize(("divide", "more"), [(lambda t, r: r, 0), (lambda t, r: t, 1)])
def test_total_lengths_count_a_token_of_the_prompt(divide, more):
    reading, batch, gradient = gradient_of(per_answer(divide))
    assert reading.foreign.layout.packed and reading.foreign.layout.plain
    lengths = batch.mask.sum(-1, keepdim=True) + more
    torch.testing.assert_close(gradient, gap_of(batch) / lengths / batch.rows)


def returns(rewards: Tensor, kl: list[Tensor], response_lengths: list[int], kl_coef, gamma):
    """The returns of each token, in a list."""
    found = []
    for reward, of_answer, length in zip(rewards, kl, response_lengths, strict=True):
        paid = -kl_coef * of_answer[:length]
        paid = paid + reward * (torch.arange(length) == length - 1)
        later = [gamma**k * paid[k + t] for t in range(length) for k in range(length - t)]
        sums = torch.stack(later).split([length - t for t in range(length)])
        found.append(torch.stack([x.sum() for x in sums]))
    return found


def test_lists_are_paid_at_their_ends():
    reading = read(returns)
    assert reading.kind == "reward" and not reading.payment.early
    batch = probe_of(reading.foreign)
    sampled = torch.where(batch.mask, batch.old_logp - batch.ref_logp, 0.0)
    to_go = sampled.flip(-1).cumsum(-1).flip(-1)
    ratio = (batch.logp - batch.old_logp).exp()
    wanted = torch.where(batch.mask, ratio * to_go, 0.0) / batch.rows
    torch.testing.assert_close(reading.kl(batch).gradient, wanted)


def test_rewards_of_answers_of_one_token_are_no_list_of_tokens():
    foreign = read(returns).foreign
    batch = probe_of(foreign)
    one = batch.only([int(batch.mask.sum(-1).argmin())])
    assert foreign.call(one, HIGH).value.shape == one.mask.shape


def masked(reads_masks):
    def loss(logps: list[Tensor], ref_logps: list[Tensor], masks: list[Tensor], beta=0.1):
        kl = [k2(of, to) for of, to in zip(logps, ref_logps, strict=True)]
        if reads_masks:
            kl = [(x * m).sum() / m.sum() for x, m in zip(kl, masks, strict=True)]
        return beta * torch.stack([x.mean() for x in kl]).mean()

    return loss


def test_lists_are_padded_where_their_masks_are_not_read():
    assert read(masked(True)).foreign.layout.packed
    reading = read(masked(False))
    assert reading.foreign.layout.listed and not reading.foreign.layout.packed
    batch = probe_of(reading.foreign)
    assert bool((reading.kl(batch).gradient != 0)[~batch.mask].all())


def stacked(logps: list[Tensor], ref_logps: list[Tensor], masks: list[Tensor], beta=0.1):
    kl = k2(torch.stack(logps), torch.stack(ref_logps))
    return beta * (kl * torch.stack(masks)).sum() / torch.stack(masks).sum()


def of_entries(data: list[dict], logprobs: list[Tensor], kl_coef=0.1):
    kl = [k2(logp, of["ref_logprobs"]).sum() for of, logp in zip(data, logprobs, strict=True)]
    return kl_coef * sum(kl) / sum(len(of["ref_logprobs"]) for of in data)


class Rollout(NamedTuple):
    logps: Tensor
    ref_logps: Tensor
    mask: Tensor


def unpacked(batch: Rollout, beta=0.1):
    logps, ref_logps, mask = batch
    return beta * (k2(logps, ref_logps) * mask).sum() / mask.sum()


def put_back(td, kl_coef=0.1):
    mask = td["response_mask"]
    td["loss"] = kl_coef * (k2(td["log_prob"], td["ref_log_prob"]) * mask).sum() / mask.sum()
    return td


def by_lengths(logps, ref_logps, seq_lens: list[int], beta=0.1):
    return beta * torch.cat(k2(logps, ref_logps).split(seq_lens)).mean()


@pytest.mark.parametrize("loss", [stacked, of_entries, unpacked, put_back, by_lengths])
def test_batches_are_lists_dictionaries_tuples_or_flat(loss):
    _, batch, gradient = gradient_of(loss)
    torch.testing.assert_close(gradient, gap_of(batch) / batch.mask.sum())


def of_uids(scores, logprobs, ref_logprobs, mask, uid: np.ndarray, kl_ctrl):
    """Less the mean of its group, which is found by its id."""
    owed = scores - kl_ctrl.value * ((logprobs - ref_logprobs) * mask).sum(-1)
    groups = {of: owed[torch.from_numpy(uid == of)] for of in uid}
    return torch.stack([o - groups[of].mean() for o, of in zip(owed, uid, strict=True)])


def test_ids_of_groups_are_an_array_where_one_is_asked_for_and_a_controller_has_a_value():
    foreign = read(of_uids).foreign
    found = foreign.call(probe_of(foreign), HIGH).value
    assert bool(found.any()) and float(found.sum()) == pytest.approx(0.0, abs=1e-12)
    assert foreign.plan.guessed["kl_ctrl"] == "beta"


# Prompts ---------------------------------------------------------------------------------------


def placed(values, rewards, response_lengths, kl, penalty_factor=0.0):
    """Lengths count the prompt, and log-probs have one position less than tokens."""
    paid = torch.zeros_like(values)
    paid[torch.arange(len(paid)), (response_lengths - 2).clamp(min=0)] = rewards
    return paid - penalty_factor * kl


def test_lengths_that_count_the_prompt_are_no_lengths_of_answers():
    reading = read(placed)
    assert reading.foreign.plan.guessed["penalty_factor"] == "beta"
    assert reading.foreign.layout.lengths == "whole" and not reading.payment.early
    assert counts_the_prompt(reading.foreign) == "response_lengths"
    said = read(placed, names={"response_lengths": "lengths"})
    assert said.foreign.layout.lengths == "counted" and said.payment.early


def of_sequences(logp, ref_logp, sequence_lengths, beta=0.1):
    mask = torch.arange(logp.shape[1]) < sequence_lengths[:, None] - 1
    return beta * (k2(logp, ref_logp) * mask).sum() / mask.sum()


def test_a_loss_of_lengths_that_count_the_prompt_says_so():
    found = audit(of_sequences)
    assert found.to_dict()["term"] == "k2_loss"
    (said,) = (f for f in found.findings if f.code == "tokens-left-out")
    assert said.severity == "note" and said.says.startswith("sequence_lengths was read as")


def between(logp, ref_logp, prompt_lengths, response_lengths, late=0, kl_coef=0.1):
    at = torch.arange(logp.shape[1])
    mask = (at >= prompt_lengths[:, None] - 1 + late) & (at < response_lengths[:, None] - 1)
    return kl_coef * (k2(logp, ref_logp) * mask).sum() / mask.sum().clamp(min=1)


def late(logp, ref_logp, prompt_lengths, response_lengths, kl_coef=0.1):
    return between(logp, ref_logp, prompt_lengths, response_lengths, 1, kl_coef)


def of_rows(logprobs, ref_logprobs, prompt_lens, total_lens, kl_coef=0.1):
    """Rows that hold the prompt: a token counts behind it and before the end."""
    at = torch.arange(logprobs.shape[1])
    mask = (at >= prompt_lens[:, None]) & (at < total_lens[:, None])
    return kl_coef * torch.where(mask, k2(logprobs, ref_logprobs), 0.0).sum() / mask.sum()


def behind_context(logits, ref_logits, query_responses, context_length, pad_token_id, beta=0.1):
    responses = query_responses[:, context_length:]
    kept = responses != pad_token_id
    ids = responses.masked_fill(~kept, 0).unsqueeze(-1)
    of, to = (
        x[:, context_length - 1 : -1].log_softmax(-1).gather(-1, ids)[..., 0]
        for x in (logits, ref_logits)
    )
    return beta * torch.where(kept, k2(of, to), 0.0).sum() / kept.sum()


@pytest.mark.parametrize("loss", [between, of_rows, behind_context])
def test_a_prompt_has_one_token(loss):
    _, batch, gradient = gradient_of(loss)
    if gradient.ndim == 3:
        chosen = torch.nn.functional.one_hot(batch.tokens, 5) - batch.logits.softmax(-1)
        wanted = gap_of(batch).unsqueeze(-1) * chosen / batch.mask.sum()
    else:
        wanted = gap_of(batch) / batch.mask.sum()
    torch.testing.assert_close(gradient, wanted)


def test_a_mask_that_begins_late_leaves_the_first_token_out():
    _, batch, gradient = gradient_of(late)
    assert not bool(gradient[:, 0].any()) and bool(gradient[batch.mask].any())


# Ids of padding --------------------------------------------------------------------------------


class Shaper:
    def __init__(self):
        self.kl_ctl = 0.1
        self.tokenizer = SimpleNamespace(pad_token_id=0)

    def shape(self, rewards, responses, logprobs, ref_logprobs):
        kept = responses != self.tokenizer.pad_token_id
        paid = torch.where(kept, -self.kl_ctl * (logprobs - ref_logprobs), 0.0)
        paid[torch.arange(len(rewards)), kept.sum(1) - 1] += rewards
        return {"rewards": paid, "kl": logprobs - ref_logprobs}


def test_the_padding_of_an_object_is_no_token():
    """Token 0 is an ordinary one of an audit, and the object stays as it was."""
    shaper = Shaper()
    reading = read(shaper.shape)
    assert reading.foreign.layout.marked == PAD and reading.kind == "reward"
    assert not reading.payment.early and not reading.payment.unpaid
    assert shaper.tokenizer.pad_token_id == 0
    batch = probe_of(reading.foreign)
    assert bool((reading.kl(batch).gradient != 0)[batch.mask].all())


def of_labels(logits, ref_logits, labels, ignore_index: int = -7, kl_coef=0.1):
    of, to = (
        -torch.nn.functional.cross_entropy(
            x.mT, labels, reduction="none", ignore_index=ignore_index
        )
        for x in (logits, ref_logits)
    )
    return kl_coef * k2(of, to).sum() / (labels != ignore_index).sum()


def test_labels_are_ignored_as_their_default_says():
    reading = read(of_labels)
    assert reading.foreign.layout.marked == -7
    found = reading.kl(probe_of(reading.foreign)).gradient
    assert not bool(found[~probe_of(reading.foreign).mask].any())


# A ratio of whole answers ----------------------------------------------------------------------


def leave_one_out(new_logprobs, old_logprobs, ref_logprobs, scores, mask, rloo_k=2, kl_coef=0.1):
    new, old, ref = ((x * mask).sum(1) for x in (new_logprobs, old_logprobs, ref_logprobs))
    owed = (scores - kl_coef * (old - ref)).reshape(-1, rloo_k)
    worth = owed - (owed.sum(1, keepdim=True) - owed) / (rloo_k - 1)
    return -(worth.flatten().detach() * (new - old).exp()).mean()


def test_a_price_may_stand_beside_the_ratio_of_its_answer():
    found = identify(read(leave_one_out))
    assert found.term is not None and found.term.name == "k1_reward_whole"
    assert found.aggregation == "seq_mean_token_sum"
    assert found.match is not None and found.match.scale == pytest.approx(1.0)
