"""The spellings of seven frameworks, and of who writes like them, by the role they are given."""

from __future__ import annotations

import pytest
import torch

from kl_term.audit.arguments import plan_call, role_of
from kl_term.audit.readings import read
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
    "ref_log_ratio": "ref_log_ratio kl",
    "width": "max_completion_length max_tokens",
    "clip": "epsilon epsilon_low eps_clip cliprange clip_ratio_high",
    "inputs": "inputs batch",
}


@pytest.mark.parametrize(
    ("name", "role"), [(name, role) for role, names in SPELLINGS.items() for name in names.split()]
)
def test_a_spelling_has_its_role(name, role):
    assert role_of(name) == role


@pytest.mark.parametrize("name", ["loss_type", "kl_type", "generator", "eos", "loss_agg_mode"])
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
