"""The lines that change what a finding names about sampler, engine and versions, by trainer.

Names of settings are those of the trainers' own sources, as released or, where nothing is released,
as read in August 2026: AReaL 4aef98d8d, SkyRL a9564572e, prime-rl 559b44772, NeMo-RL 7ea279abf,
slime 624b824a8.
"""

from __future__ import annotations

TRAINERS = (
    "TRL",
    "verl",
    "verl, fully async",
    "OpenRLHF",
    "AReaL",
    "SkyRL",
    "prime-rl",
    "NeMo-RL",
    "slime",
)
#: No setting does it: released code has no such fault, or it is in what the user wrote.
NONE = "none"

_NOWHERE = dict.fromkeys(TRAINERS, NONE)
#: Weigh by old policy over engine, truncated.
_CORRECTED = {
    "TRL": "`vllm_importance_sampling_correction=True`",
    "verl": "`algorithm.rollout_correction.rollout_is=token`",
    "verl, fully async": "`algorithm.rollout_correction.bypass_mode=False`, "
    "`algorithm.rollout_correction.rollout_is=token`",
    "OpenRLHF": "`--algo.advantage.is_correction_level token`",
    "AReaL": "`actor.use_decoupled_loss=True`",
    "SkyRL": "`trainer.algorithm.off_policy_correction.tis_ratio_type=token`",
    "prime-rl": "`trainer.loss.dppo_mask_low`, `trainer.loss.dppo_mask_high`",
    "NeMo-RL": "`loss_fn.use_importance_sampling_correction=True`, "
    "`loss_fn.truncated_importance_sampling_type=tis`",
    "slime": "`--use-tis`",
}
#: Sample from the whole distribution.
_ALL_TOKENS = {
    "TRL": "`top_p=1.0`, `top_k=0`, `min_p=None`",
    "verl": "`actor_rollout_ref.rollout.top_p=1`, `actor_rollout_ref.rollout.top_k=-1`",
    "verl, fully async": "`actor_rollout_ref.rollout.top_p=1`, "
    "`actor_rollout_ref.rollout.top_k=-1`",
    "OpenRLHF": "`--rollout.top_p 1.0`",
    "AReaL": "`gconfig.top_p=1.0`",
    "SkyRL": "`generator.sampling_params.top_p=1.0`",
    "prime-rl": NONE,
    "NeMo-RL": "`policy.generation.top_p=1.0`",
    "slime": "`--rollout-top-p 1.0`",
}
#: Keep the log-probs of the weights that sampled.
_OLD_OF_SAMPLER = {
    "TRL": NONE,
    "verl": "`algorithm.rollout_correction.bypass_mode=True`",
    "verl, fully async": "`algorithm.rollout_correction.bypass_mode=True`",
    "OpenRLHF": NONE,
    "AReaL": "`actor.recompute_logprob=False`, `actor.use_decoupled_loss=False`",
    "SkyRL": NONE,
    "prime-rl": NONE,
    "NeMo-RL": NONE,
    "slime": "`--use-rollout-logprobs`",
}
#: By code, or by code and case where the cases of a finding are changed in different places.
LINES: dict[str, dict[str, str]] = {
    "sampler-filled": {
        **_NOWHERE,
        "verl": "`actor_rollout_ref.rollout.calculate_log_probs=True`",
        "verl, fully async": "`actor_rollout_ref.rollout.calculate_log_probs=True`",
        "SkyRL": "`generator.sampling_params.logprobs=1`",
    },
    "old-not-sampler": _OLD_OF_SAMPLER,
    "other-sampler": _ALL_TOKENS,
    "ratio-is-one again": {**_OLD_OF_SAMPLER, "NeMo-RL": "`loss_fn.force_on_policy_ratio=False`"},
    "ratio-is-one behind": {
        **_CORRECTED,
        "verl": "`algorithm.rollout_correction.bypass_mode=True`",
        "verl, fully async": "`algorithm.rollout_correction.bypass_mode=True`",
        "prime-rl": NONE,
        "slime": "`--use-rollout-logprobs`",
    },
    "train-inference-mismatch other": _CORRECTED,
    "train-inference-mismatch start": _NOWHERE,
    "train-inference-mismatch weights": _CORRECTED,
    "train-inference-mismatch raw": {
        **_NOWHERE,
        "verl": "`actor_rollout_ref.rollout.logprobs_mode=processed_logprobs`",
        "verl, fully async": "`actor_rollout_ref.rollout.logprobs_mode=processed_logprobs`",
        "NeMo-RL": "`policy.generation.vllm_cfg.logprobs_mode=processed_logprobs`",
    },
    "train-inference-mismatch truncated": _ALL_TOKENS,
    "weights-behind": {
        "TRL": "`max_staleness` and `weight_sync_steps` of `AsyncGRPOConfig`",
        "verl": NONE,
        "verl, fully async": "`async_training.staleness_threshold`, "
        "`async_training.trigger_parameter_sync_step`",
        "OpenRLHF": "`--train.async_queue_size 1`",
        "AReaL": "`rollout.max_head_offpolicyness`",
        "SkyRL": "`trainer.fully_async.max_staleness_steps`",
        "prime-rl": "`orchestrator.max_off_policy_steps`",
        "NeMo-RL": "`grpo.async_grpo.max_trajectory_age_steps`",
        "slime": "`--update-weights-interval 1`",
    },
    "weights-behind later": _CORRECTED,
    "stale-samples": {
        "TRL": "`num_iterations=1`, a smaller `steps_per_generation`",
        "verl": "`actor_rollout_ref.actor.ppo_epochs=1`, a larger "
        "`actor_rollout_ref.actor.ppo_mini_batch_size`",
        "verl, fully async": "a smaller `async_training.trigger_parameter_sync_step`",
        "OpenRLHF": "`--train.max_epochs 1`, a larger `--train.batch_size`",
        "AReaL": "`actor.ppo_n_minibatches=1`",
        "SkyRL": "`trainer.update_epochs_per_batch=1`, a larger `trainer.policy_mini_batch_size`",
        "prime-rl": "a smaller `orchestrator.max_off_policy_steps`",
        "NeMo-RL": "a larger `policy.train_global_batch_size`",
        "slime": "`--num-steps-per-rollout 1`",
    },
    "heavy-weights": _CORRECTED,
}


def lines_of(code: str, case: str = "") -> dict[str, str]:
    """The line of each trainer; empty where a finding is not about sampler, engine or versions."""
    return LINES.get(f"{code} {case}") or LINES.get(code) or {}


def told(code: str, case: str, framework: str) -> dict[str, str]:
    """The lines that a report shows: of the run's own trainer where it is known, of all otherwise.

    A loop of one's own has none.
    """
    own = {} if framework == "plain" else lines_of(code, case)
    return {
        trainer: line
        for trainer, line in own.items()
        if line != NONE and (framework == "unknown" or trainer.lower().startswith(framework))
    }
