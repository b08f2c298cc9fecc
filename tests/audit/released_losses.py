"""Losses of released packages under the argument names of their trainers, called as those do.

Nothing of a loss is written here: each function hands its tensors to the package's own code, which
is the installed one.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.released import functions_of


def trl_loss(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
    *,
    loss_type="dapo",
    use_bias_correction_kl=True,
    importance_sampling_level="token",
):
    """``GRPOTrainer._compute_loss`` of a trainer on one device without gradient accumulation."""
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is not installed")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            per_token_logps,
            torch.zeros_like(per_token_logps),
            None,
        ),
        args=SimpleNamespace(
            use_bias_correction_kl=use_bias_correction_kl, delta=None, steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type=loss_type,
        max_completion_length=8,
        importance_sampling_level=importance_sampling_level,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(reduce=lambda x, **k: x, gather=lambda x: x, num_processes=1),
        _metrics={"train": defaultdict(list)},
    )
    mask = completion_mask.long()
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
        "advantages": advantages,
        "old_per_token_logps": old_per_token_logps,
        "ref_per_token_logps": ref_per_token_logps,
    }
    return module.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def trl_loss_uncorrected(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
):
    """``use_bias_correction_kl=False``, the default before 1.10."""
    return trl_loss(
        per_token_logps,
        old_per_token_logps,
        ref_per_token_logps,
        advantages,
        completion_mask,
        beta,
        use_bias_correction_kl=False,
    )


def trl_gspo_loss(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
):
    """``importance_sampling_level="sequence"`` with the corrected KL."""
    return trl_loss(
        per_token_logps,
        old_per_token_logps,
        ref_per_token_logps,
        advantages,
        completion_mask,
        beta,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )


def liger_loss(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    attention_mask,
    beta=0.04,
):
    """What Liger's fused loss computes of a chunk, at its defaults."""
    module = pytest.importorskip(
        "liger_kernel.chunked_loss.grpo_loss", reason="liger-kernel is not installed"
    )
    return module.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        per_token_logps=per_token_logps,
        attention_mask=attention_mask.to(per_token_logps.dtype),
        advantages=advantages,
        full_attention_mask=attention_mask.to(per_token_logps.dtype),
        ref_per_token_logps=ref_per_token_logps,
        old_per_token_logps=old_per_token_logps,
        beta=beta,
    )


@functools.cache
def _verl():
    """verl's own functions by name, in one namespace."""
    sums = functions_of("verl", "verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    verl_F = SimpleNamespace(masked_sum=sums[0], masked_mean=sums[1])
    names = ("kl_penalty_forward", "kl_penalty", "agg_loss", "compute_policy_loss_vanilla")
    found = functions_of(
        "verl", "verl/trainer/ppo/core_algos.py", *names, verl_F=verl_F, AlgoConfig=_Batch
    )
    return SimpleNamespace(**{each.__name__: each for each in (*sums, *found)})


def verl_loss(
    log_prob,
    old_log_prob,
    ref_log_prob,
    advantages,
    response_mask,
    kl_loss_coef=0.001,
    *,
    kl_loss_type="low_var_kl",
    loss_agg_mode="token-mean",
):
    """``ppo_loss``: the policy loss, and the KL penalty under the same aggregation."""
    verl = _verl()
    response_mask = response_mask.bool()
    pg_loss, _ = verl.compute_policy_loss_vanilla(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=SimpleNamespace(
            clip_ratio=0.2,
            clip_ratio_low=None,
            clip_ratio_high=None,
            global_batch_info={},
            get=lambda name, default: default,
        ),
    )
    kld = verl.kl_penalty(logprob=log_prob, ref_logprob=ref_log_prob, kl_penalty=kl_loss_type)
    kl_loss = verl.agg_loss(loss_mat=kld, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    return pg_loss + kl_loss * kl_loss_coef


def verl_loss_k3_plus(
    log_prob, old_log_prob, ref_log_prob, advantages, response_mask, kl_loss_coef=0.001
):
    """``kl_loss_type: k3+``."""
    return verl_loss(
        log_prob,
        old_log_prob,
        ref_log_prob,
        advantages,
        response_mask,
        kl_loss_coef,
        kl_loss_type="k3+",
    )


def verl_loss_kl(
    log_prob, old_log_prob, ref_log_prob, advantages, response_mask, kl_loss_coef=0.001
):
    """``kl_loss_type: kl``, by the mean of the completions' means."""
    return verl_loss(
        log_prob,
        old_log_prob,
        ref_log_prob,
        advantages,
        response_mask,
        kl_loss_coef,
        kl_loss_type="kl",
        loss_agg_mode="seq-mean-token-mean",
    )


def verl_rewards(token_level_scores, old_log_probs, ref_log_prob, response_mask, kl_coef=0.001):
    """``apply_kl_penalty``, at its default estimator."""
    (apply,) = functions_of(
        "verl",
        "verl/trainer/ppo/ray_trainer.py",
        "apply_kl_penalty",
        core_algos=_verl(),
        masked_mean=_verl().masked_mean,
    )
    batch = SimpleNamespace(
        batch=_Batch(
            response_mask=response_mask,
            token_level_scores=token_level_scores,
            old_log_probs=old_log_probs,
            ref_log_prob=ref_log_prob,
        )
    )
    apply(batch, SimpleNamespace(value=kl_coef, update=lambda **k: None))
    return batch.batch["token_level_rewards"]


class _Batch(dict):
    @property
    def batch_size(self):
        return self["response_mask"].shape[:1]


@functools.cache
def _openrlhf():
    (masked_mean,) = functions_of("openrlhf", "openrlhf/models/utils.py", "masked_mean")
    utils = functions_of(
        "openrlhf",
        "openrlhf/models/utils.py",
        "compute_approx_kl",
        "compute_reward",
        KL_IS_WEIGHT_CLIP=10.0,
    )
    losses = functions_of(
        "openrlhf",
        "openrlhf/models/loss.py",
        "aggregate_loss",
        "PolicyLoss",
        masked_mean=masked_mean,
        nn=nn,
    )
    return SimpleNamespace(**{each.__name__: each for each in (*utils, *losses)})


def openrlhf_loss(
    log_probs,
    old_log_probs,
    ref_log_probs,
    advantages,
    action_mask,
    kl_coef=0.01,
    *,
    kl_estimator="k3",
    unbiased_gradient=True,
):
    """The actor's step with ``algo.kl.use_loss``: policy loss, and the aggregated KL."""
    openrlhf = _openrlhf()
    actor_loss, *_ = openrlhf.PolicyLoss()(log_probs, old_log_probs, advantages, action_mask)
    kl = openrlhf.compute_approx_kl(
        log_probs,
        ref_log_probs,
        log_probs_old=old_log_probs,
        kl_estimator=kl_estimator,
        unbiased_gradient=unbiased_gradient,
    )
    return actor_loss + openrlhf.aggregate_loss(kl, action_mask) * kl_coef


def openrlhf_loss_legacy(
    log_probs, old_log_probs, ref_log_probs, advantages, action_mask, kl_coef=0.01
):
    """``kl_estimator: k1`` without the flag."""
    return openrlhf_loss(
        log_probs,
        old_log_probs,
        ref_log_probs,
        advantages,
        action_mask,
        kl_coef,
        kl_estimator="k1",
        unbiased_gradient=False,
    )


def openrlhf_rewards(reward, action_log_probs, base_action_log_probs, action_mask, kl_coef=0.01):
    """``compute_reward`` of the KL that the experience maker computes."""
    openrlhf = _openrlhf()
    kl = openrlhf.compute_approx_kl(action_log_probs, base_action_log_probs)
    return openrlhf.compute_reward(reward, kl_coef, kl, action_mask=action_mask)
