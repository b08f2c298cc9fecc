"""The spellings of seven frameworks, and of who writes like them, by the role they are given."""

from __future__ import annotations

import pytest
import torch

from kl_term.audit import audit
from kl_term.audit.arguments import plan_call
from kl_term.audit.readings import read
from kl_term.audit.spellings import role_of
from kl_term.errors import UserError

SPELLINGS = {
    "logp": "per_token_logps log_prob log_probs logprobs new_logprobs curr_logprobs"
    " action_log_probs trainer_logprobs policy_logps perTokenLogps log_pi",
    "ref_logp": "ref_per_token_logps ref_log_prob ref_logprobs base_action_log_probs log_probs_base"
    " reference_policy_logprobs teacher_log_probs ref_logps",
    "old_logp": "old_per_token_logps old_log_prob old_log_probs sampling_logprobs behavior_logp"
    " inference_logprobs prev_logprobs generation_logprobs rollout_log_probs vllm_logprobs",
    "mask": "response_mask completion_mask action_mask loss_mask response_masks attention_mask",
    "padding": "padding_mask padding_masks",
    "advantages": "advantages advantage adv returns",
    "rewards": "rewards reward scores r",
    "token_rewards": "token_level_rewards token_level_scores",
    "beta": "beta kl_coef kl_loss_coef init_kl_coef kl_coeff kl_beta kl_weight kl_ctl"
    " reference_policy_kl_penalty kl_penalty_coef",
    "logits": "logits student_logits policy_logits",
    "ref_logits": "ref_logits teacher_logits",
    "tokens": "input_ids completion_ids labels actions",
    "cu_seqlens": "cu_seqlens cu_seq_lens",
    "position_ids": "position_ids",
    "sequence_ids": "sequence_ids seq_ids segment_ids sequence_idx",
    "ref_log_ratio": "ref_log_ratio kl per_token_kl init_policy_kl",
    "last": "valid_score_idxs eos_indices",
    "count": "total_response_len num_items_in_batch loss_scale",
    "width": "max_completion_length max_tokens",
    "clip": "epsilon epsilon_low eps_clip cliprange clip_ratio_high",
    "inputs": "inputs batch model_output data input_data train_batch",
    "lengths": "response_lengths completion_lengths seq_lens",
    "total_lengths": "total_lengths input_lengths full_lens",
    "prompt_lengths": "prompt_lengths query_lens context_lengths",
    "prompt_length": "prompt_len context_length prompt_length",
    "prompt_tokens": "queries query_tensors prompt_tokens",
    "prompt_mask": "prompt_mask query_attn_masks",
    "pad_id": "pad_token_id pad_id padding_idx",
    "ignore_index": "ignore_index label_pad_token_id",
    "discount": "gamma lambd gae_lambda discount_factor",
    "values": "values old_values value_preds vpreds",
    "group_size": "num_generations n_samples_per_prompt group_size num_rollouts n_responses rloo_k",
}


@pytest.mark.parametrize(
    ("name", "role"), [(name, role) for role, names in SPELLINGS.items() for name in names.split()]
)
def test_a_spelling_has_its_role(name, role):
    assert role_of(name) == role


SETTINGS = (
    "loss_type kl_type generator eos loss_agg_mode ppo_kl reward_clip_range get_sapo_token_loss"
    " off_policy_mask_threshold"
)


@pytest.mark.parametrize("name", SETTINGS.split())
def test_other_names_have_none(name):
    assert role_of(name) is None


def test_a_mapping_wins_over_a_guess_and_a_missing_argument_is_named():
    def loss(a, b, w, scale):
        return a, b, w, scale

    names = {"a": "logp", "b": "ref_logp", "w": "mask", "scale": "beta"}
    assert plan_call(loss, names).roles == names
    assert plan_call(loss, names).guessed == {}
    with pytest.raises(UserError, match="cannot tell what argument 'scale' is"):
        plan_call(loss, {name: role for name, role in names.items() if name != "scale"})
    with pytest.raises(ValueError, match="the role of 'a' must be one of"):
        plan_call(loss, {"a": "logprob"})


def test_a_padding_mask_is_read_as_the_loss_reads_it():
    """Under one name, True is the padding in one place and what is counted in another."""

    def marks_padding(logp, ref_logp, padding_mask):
        return torch.where(padding_mask.bool(), 0.0, (logp - ref_logp) ** 2).sum()

    def marks_counted(logp, ref_logp, padding_mask):
        return torch.where(padding_mask.bool(), (logp - ref_logp) ** 2, 0.0).sum()

    assert read(marks_padding).foreign.plan.roles["padding_mask"] == "padding"
    assert read(marks_counted).foreign.plan.roles["padding_mask"] == "mask"


def test_inputs_and_configurations_are_read_by_key_and_attribute():
    def loss(inputs, config):
        gap = inputs["per_token_logps"] - inputs.ref_logprobs
        kept = torch.where(inputs["completion_mask"].bool(), gap**2 / 2, 0.0)
        return config.kl_loss_coef * kept.sum() / inputs["completion_mask"].sum()

    reading = read(loss)
    assert reading.foreign.has_beta
    assert reading.shape == "number"


def kl_of(logp, ref_logp, mask):
    return 0.5 * torch.where(mask.bool(), logp - ref_logp, 0.0) ** 2


def weighted_mean(new_lp_logprobs, teacher_logprobs, loss_weights, kl_coef=0.2):
    kl = kl_of(new_lp_logprobs, teacher_logprobs, loss_weights > 0)
    return kl_coef * (kl * loss_weights).sum() / loss_weights.sum()


def weighted_policy(logprobs, weights):
    return -(logprobs * weights).sum()


def test_weights_are_what_they_do():
    """A mask where they have no policy gradient, advantages where they have."""
    assert read(weighted_mean).foreign.plan.roles["loss_weights"] == "mask"
    assert read(weighted_policy).foreign.plan.roles["weights"] == "advantages"


def distilled(inputs, sign=1.0):
    """The price of a token times its ratio, of the tokens and as much as a batch says."""
    ratio = (inputs.policy_logps - inputs.old_logps).exp()
    price = sign * (inputs.policy_logps - inputs.ref_logps).detach()
    per_token = torch.where(inputs.loss_mask, ratio * price, 0.0)
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights
    return per_token.sum() / inputs.loss_mask.sum()


def distilled_away(inputs):
    return distilled(inputs, sign=-1.0)


def test_weights_of_a_batch_that_turn_the_kl_too_are_no_advantages():
    found = audit(distilled)
    assert found.minimises["fresh"]["state"] == "reverse KL"
    assert not [f for f in found.findings if f.severity != "note"]
    assert next(f.code for f in audit(distilled_away).findings) == "sign"


def weighed_policy(inputs):
    """A KL that the weights do not touch."""
    logps = inputs.policy_logps
    per_token = kl_of(logps, inputs.ref_logps, inputs.loss_mask) - logps * inputs.loss_weights
    return torch.where(inputs.loss_mask, per_token, 0.0).sum() / inputs.loss_mask.sum()


def test_weights_of_a_batch_beside_a_kl_are_advantages():
    assert read(weighed_policy).foreign.bag_roles["loss_weights"] == "advantages"


def weighed_beside(logps, old_logps, ref_logps, advantages, mask, weights, beta=0.1):
    gain = (logps - old_logps).exp() * advantages
    per_token = torch.where(mask, beta * kl_of(logps, ref_logps, mask) - gain, 0.0)
    return (per_token * weights).sum() / mask.sum()


def weighed_away(logps, old_logps, ref_logps, advantages, mask, weights, beta=0.1):
    return weighed_beside(logps, old_logps, ref_logps, -advantages, mask, weights, beta)


def test_weights_beside_advantages_are_what_is_counted():
    assert read(weighed_beside).foreign.plan.roles["weights"] == "mask"
    assert not [f for f in audit(weighed_beside).findings if f.severity != "note"]
    assert next(f.code for f in audit(weighed_away).findings) == "policy-sign"


def test_the_size_of_a_group_is_that_of_the_batch():
    def leave_one_out(scores, sampling_logprobs, ref_logprobs, mask, kl_coef=0.1, n_rollouts=16):
        kl = torch.where(mask.bool(), sampling_logprobs - ref_logprobs, 0.0).sum(-1)
        groups = (scores - kl_coef * kl).unflatten(0, (-1, n_rollouts))
        others = (groups.sum(-1, keepdim=True) - groups) / max(n_rollouts - 1, 1)
        return (groups - others).flatten()

    found = audit(leave_one_out)
    assert found.guessed["n_rollouts"] == "group_size"
    assert found.minimises["fresh"] == {"state": "reverse KL", "sequence": "reverse KL"}


def next_token(logits, ref_logits, input_ids, mask, beta=0.1):
    of = [
        -torch.nn.functional.cross_entropy(x[:, :-1].mT, input_ids[:, 1:], reduction="none")
        for x in (logits, ref_logits)
    ]
    return beta * kl_of(*of, mask[:, 1:]).sum() / mask[:, 1:].sum()


def next_token_of_completions(logits, ref_logits, labels, completion_mask, beta=0.1):
    """The mask is of the answer alone, the tokens have the prompt's before them."""
    of = [
        torch.distributions.Categorical(logits=x[:, :-1]).log_prob(labels[:, 1:])
        for x in (logits, ref_logits)
    ]
    return beta * kl_of(*of, completion_mask).sum() / completion_mask.sum()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [next_token, next_token_of_completions])
def test_logits_that_predict_the_next_token_are_given_the_prompt(loss):
    found = audit(loss)
    assert found.minimises["fresh"]["state"] == "reverse KL"
    assert (found.term.name, found.aggregation) == ("k2_loss", "token_mean")
    assert found.scale == pytest.approx(1.0)
    assert not [f for f in found.findings if f.severity != "note"]


def with_a_critic(logprobs, old_logprobs, ref_logprobs, vpreds, returns, advantages, mask, kl_coef):
    m = mask.bool()
    policy = -torch.where(m, logprobs - old_logprobs, 0.0).exp() * torch.where(m, advantages, 0.0)
    value = torch.nn.functional.mse_loss(vpreds, returns, reduction="none")
    kl = kl_of(logprobs, ref_logprobs, m)
    return torch.where(m, policy + value + kl_coef * kl, 0.0).sum() / m.sum()


def test_a_critics_loss_is_given_values_and_changes_no_verdict():
    reading = read(with_a_critic)
    assert reading.foreign.plan.roles["returns"] == reading.foreign.plan.roles["vpreds"] == "values"
    assert reading.has_policy_part and reading.kind == "loss"


@pytest.mark.slow
def test_two_dictionaries_and_a_configuration_are_read():
    def ppo_loss(config, model_output, data):
        mask = data["response_mask"].bool()
        kl = kl_of(model_output["log_probs"], data["ref_log_prob"], mask)
        return config.kl_loss_coef * kl.sum() / mask.sum(), {"kl": 0.0}

    found = audit(ppo_loss)
    assert (found.term.name, found.aggregation) == ("k2_loss", "token_mean")
