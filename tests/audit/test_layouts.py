"""In which shapes tensors are given, and which numbers of a caller divide a loss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kl_term.audit import audit
from kl_term.audit.invariants import filled
from kl_term.audit.layouts import probe_of
from kl_term.audit.readings import read
from kl_term.audit.spellings import role_of
from kl_term.audit.temperatures import compared, divides_logits, one_sided
from kl_term.errors import UserError

pytestmark = pytest.mark.slow


def k2(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def mean(x, mask):
    return (x * mask).sum() / mask.sum()


def loud(loss):
    return [f.code for f in audit(loss).findings if f.severity != "note"]


def of_sequences(logp, prox_logp, ref_logp, advantages, answer_mask, kl_beta=0.1, masked=False):
    """One advantage an answer, which is the mean over its tokens."""
    lengths = answer_mask.sum(-1)
    ratio = (((logp - prox_logp) * answer_mask).sum(-1) / lengths).exp()
    worth = advantages * answer_mask if masked else advantages
    surrogate = ratio * (worth.sum(-1) / lengths)
    return kl_beta * mean(k2(logp, ref_logp), answer_mask) - surrogate.mean()


def test_advantages_that_a_loss_sums_along_the_tokens_are_given_by_token():
    """One an answer would be summed over the answers, and padding never be seen."""
    reading = read(of_sequences)
    assert reading.foreign.layout.advantages == "token"
    batch = probe_of(reading.foreign)
    values = [reading.whole(b, 0.0).value for b in (batch, filled(batch, torch.tensor(1.5)))]
    assert not torch.allclose(*values)


def of_answers(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
    surrogate = (logp - old_logp).exp() * (advantages - advantages.mean()).unsqueeze(-1)
    return mean(beta * k2(logp, ref_logp) - surrogate, mask)


def test_advantages_that_are_centred_stay_one_an_answer():
    assert read(of_answers).foreign.layout.advantages == "row"


def restarting(logps, old_logps, ref_logps, advs, keep_mask, position_ids, kl_coef=0.1):
    """A flat pack: positions restart with each answer, and a mask leaves some tokens out."""
    ids = (position_ids == 0).cumsum(0) - 1
    per_token = (kl_coef * k2(logps, ref_logps) - (logps - old_logps).exp() * advs) * keep_mask
    return logps.new_zeros(int(ids.max()) + 1).index_add(0, ids, per_token).mean()


def from_lists(trainer_logps, rollout_logps, ref_logps, advantages, kl_coef=0.1):
    flat = [torch.cat(x) for x in (trainer_logps, rollout_logps, ref_logps, advantages)]
    per_token = kl_coef * k2(flat[0], flat[2]) - (flat[0] - flat[1]).exp() * flat[3]
    answers = per_token.split([len(x) for x in trainer_logps])
    return torch.stack([x.sum() for x in answers]).mean()


def by_keyword(policy_logps, loss_mask, **extra):
    surrogate = (policy_logps - extra["old_logps"]).exp() * extra.get("advantages")
    kl = extra.get("kl_coef", 0.1) * k2(policy_logps, extra.pop("ref_logps"))
    return ((kl - surrogate) * loss_mask).sum(-1).mean()


def beside_a_record(action_log_probs, rollout, config):
    """What a batch holds under the policy's name was recorded when the answers were drawn."""
    tensors = rollout.batch
    ratio = (action_log_probs - tensors["action_log_probs"]).exp()
    kl = config.kl_ctl * k2(action_log_probs, tensors["ref_log_probs"])
    return ((kl - ratio * tensors["advantages"]) * tensors["action_mask"]).sum(-1).mean()


@pytest.mark.parametrize("loss", [restarting, from_lists, by_keyword, beside_a_record])
def test_tensors_come_in_the_shapes_of_trainers(loss):
    found = audit(loss)
    assert not [f.code for f in found.findings if f.severity != "note"]
    assert (found.term.name, found.aggregation) == ("k2_loss", "seq_mean_token_sum")
    assert found.scale == pytest.approx(1.0)
    assert (found.policy.kind, found.policy.live_ratio) == ("grpo", True)


def of_labels(divisor):
    def loss(student_logits, teacher_logits, labels, kd_coef=1.0):
        of, to = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        kl, counted = (of.exp() * (of - to)).sum(-1), labels != -100
        return kd_coef * torch.where(counted, kl, 0.0).sum() / divisor(counted)

    return loss


def test_labels_say_what_is_counted():
    assert loud(of_labels(lambda counted: counted.sum())) == []
    assert "padding-width" in loud(of_labels(lambda counted: counted.numel()))


def by_length(logps, ref_logps, mask, beta=0.1, max_response_length=512):
    return beta * (k2(logps, ref_logps) * mask).sum() / (len(mask) * max_response_length)


def by_caller(logps, ref_logps, mask, beta=0.1, loss_norm=4, shift=2.0):
    return beta * (k2(logps, ref_logps) * mask).sum() / loss_norm + 0.0 * shift


def by_steps(logps, ref_logps, mask, beta=0.1, grad_steps=4):
    return beta * mean(k2(logps, ref_logps), mask) / grad_steps


def by_nobody(logps, ref_logps, mask, beta=0.1, clip=0.2):
    return beta * mean(k2(logps, ref_logps), mask) / 4 + 0.0 * clip


def test_a_default_that_divides_the_loss_is_the_callers_number():
    assert read(by_length).foreign.divisors == {"max_response_length": 512}
    assert read(by_caller).foreign.divisors == {"loss_norm": 4}
    assert [loud(loss) for loss in (by_length, by_caller)] == [[], []]
    assert [loud(loss) for loss in (by_steps, by_nobody)] == [["scale"], ["scale"]]


def tempered(shift):
    """Of the policy's logits at a temperature; the others' log-probs changed in some way."""

    def loss(logits, token_ids, old_logps, ref_logps, advantages, mask, temperature=0.6, beta=0.1):
        logp = (logits / temperature).log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]
        old_logps, ref_logps = shift(old_logps, ref_logps, temperature)
        ratio = (logp - old_logps).exp()
        return mean(beta * k2(logp, ref_logps) - ratio * advantages[:, None], mask)

    return loss


@pytest.mark.parametrize(
    ("shift", "ratio_off", "kl_off"),
    [
        (lambda old, ref, t: (old, ref), False, False),
        (lambda old, ref, t: (old / t, ref), True, False),
        (lambda old, ref, t: (old, ref / t), False, True),
    ],
)
def test_log_probs_are_those_at_the_temperature_of_the_logits(shift, ratio_off, kl_off):
    own = read(tempered(shift))
    assert divides_logits(own) == {"temperature": 0.6}
    found = compared(own, read(tempered(shift), given={"temperature": 1.0}), {"temperature": 0.6})
    assert (found.ratio_off, found.kl_off) == (ratio_off, kl_off)


def test_a_ratio_that_is_never_one_is_an_error():
    assert loud(tempered(lambda old, ref, t: (old, ref))) == []
    assert loud(tempered(lambda old, ref, t: (old / t, ref)))[0] == "policy-ratio"


def cooled(both):
    def loss(student_logits, teacher_logits, mask, temperature=1.0, beta=0.1):
        other = temperature if both else 1.0
        of = (student_logits / temperature).log_softmax(-1)
        to = (teacher_logits / other).log_softmax(-1)
        return beta * mean((of.exp() * (of - to)).sum(-1), mask)

    return loss


def test_a_temperature_of_one_is_tried_at_another():
    assert one_sided(read(cooled(True))) == ()
    assert one_sided(read(cooled(False))) == ("temperature",)
    assert loud(cooled(False))[0] == "not-zero-at-reference"


def with_a_baseline(scores, logprobs, ref_logprobs, mask, kl_coef=0.1):
    """The log-ratio of an answer is a price, less what the others pay."""
    kl = ((logprobs - ref_logprobs) * mask).sum(-1).detach()
    owed = scores - kl_coef * kl
    others = (owed.sum() - owed) / (len(owed) - 1)
    return -((owed - others) * (logprobs * mask).sum(-1)).mean()


def test_a_baseline_of_prices_reads_other_answers_and_is_right():
    assert loud(with_a_baseline) == []


def of_inverse(rewards, pi_logprobs, ref_logprobs, mask, kl_coef=0.1):
    gap = pi_logprobs - ref_logprobs
    return rewards - kl_coef * ((gap.exp() - 1 - gap) * mask).sum(-1)


def test_a_price_that_is_no_log_ratio_is_named_as_such():
    assert loud(of_inverse)[0] == "estimator-in-reward"


def k1_on_policy(lp, lp_ref, rewards, answer_mask, beta=0.1):
    worth = (rewards - rewards.mean()).unsqueeze(-1) - beta * (lp - lp_ref)
    return -(((lp - lp.detach()).exp() * worth) * answer_mask).sum(-1).mean()


def test_k1_with_a_ratio_to_itself_is_right_where_the_policy_samples():
    assert loud(k1_on_policy) == []


def test_a_kl_beside_the_log_probs_of_both_is_asked_for():
    def kto(policy_logps, ref_logps, kl, mask, beta=0.1):
        return 1 - torch.sigmoid(beta * (((policy_logps - ref_logps) * mask).sum(-1) - kl)).mean()

    with pytest.raises(UserError, match="cannot tell what argument 'kl' is"):
        read(kto)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("student_lp", "logp"),
        ("rollout_lp", "old_logp"),
        ("teacher_lp", "ref_logp"),
        ("global_valid_toks", "count"),
        ("loss_denominator", "count"),
        ("document_ids", "sequence_ids"),
        ("algo_config", "config"),
        ("trajectory", "inputs"),
        ("kl_factor", "beta"),
    ],
)
def test_more_spellings(name, role):
    assert role_of(name) == role


def test_a_namespace_of_defaults_is_a_configuration():
    def loss(logp, ref_logp, mask, options=SimpleNamespace(kl_coef=0.1)):  # noqa: B008
        return options.kl_coef * mean(k2(logp, ref_logp), mask)

    assert read(loss).foreign.beta_path == "options.kl_coef"


def generalised(student_logits, teacher_logits, labels, beta=0.5):
    """Between the forward KL and the reverse one, as in generalised knowledge distillation."""
    of, to = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    middle = (beta * to.exp() + (1 - beta) * of.exp()).log()
    terms = beta * to.exp() * (to - middle) + (1 - beta) * of.exp() * (of - middle)
    counted = labels != -100
    return terms.sum(-1)[counted].sum() / counted.sum()


def test_a_mixing_weight_is_no_coefficient():
    found = audit(generalised)
    assert "beta" not in found.guessed
    assert found.minimises["fresh"]["state"] == "Jensen-Shannon"
    assert found.scale == pytest.approx(1.0)
    assert not [f for f in found.findings if f.severity != "note"]


def immediate(advantages, sampling_logprobs, base_logprobs, mask, kl_coef=0.1):
    return (advantages.unsqueeze(-1) - kl_coef * (sampling_logprobs - base_logprobs)) * mask


def immediate_of_rewards(rewards, sampling_logprobs, base_logprobs, mask, kl_coef=0.1):
    return immediate(rewards, sampling_logprobs, base_logprobs, mask, kl_coef)


def test_advantages_are_summed_no_more_and_rewards_are():
    assert [loud(loss) for loss in (immediate, immediate_of_rewards)] == [[], ["credit"]]


def by_another_length(logp, ref_logp, mask, total_lengths, response_lengths, beta=0.1):
    return beta * ((k2(logp, ref_logp) * mask).sum(-1) / total_lengths).mean()


def test_where_no_aggregation_fits_no_one_coefficient_acts():
    assert loud(by_another_length) == ["divisor"]


def in_groups(inside):
    def loss(logps, old_logps, ref_logps, rewards, mask, beta=0.1):
        price = beta * ((old_logps - ref_logps) * mask).sum(-1)
        worth = rewards - price if inside else rewards
        worth = (worth - worth.mean()) / (worth.std() + 1e-4)
        worth = worth if inside else worth - (price - price.mean())
        return -((logps - old_logps).exp() * worth[:, None] * mask).sum(-1).mean()

    return loss


def test_a_loss_that_makes_its_advantages_may_divide_its_kl_by_the_spread_too():
    assert loud(in_groups(inside=True)) == ["inside-the-std"]
    assert loud(in_groups(inside=False)) == []
