"""Which average of the KL each trainer logs, and what moves by it: facts as read, no code."""

from __future__ import annotations

from typing import NamedTuple

#: Averages of a log, and what each divides by.
AVERAGES = {
    "tokens": "all tokens of the batch",
    "micro-batch": "all tokens of a micro-batch of all processes; then a mean over micro-batches",
    "completions": "each completion's own tokens; then a mean over completions",
}


class Log(NamedTuple):
    """One KL curve of a trainer."""

    framework: str
    version: str  #: release or commit, and where it was read
    metric: str
    shows: str  #: the estimator, as shipped and by what it is chosen
    average: str  #: a name in AVERAGES
    drives: str = ""  #: the adaptive coefficient that follows it, if one can be switched on


LOGS = (
    Log(
        "TRL, GRPO",
        "1.16.0, `grpo_trainer.py:3268`",
        "`kl`",
        "k3, times the ratio to the sampler",
        "micro-batch",
    ),
    Log("TRL, RLOO", "1.16.0, `rloo_trainer.py:1716`", "`kl`", "k1", "tokens"),
    Log(
        "verl, KL in the reward",
        "0.9.1, `ray_trainer.py:108`",
        "`actor/reward_kl_penalty`",
        "`kl_penalty`, k1",
        "completions",
        drives="`kl_ctrl.type: adaptive`",
    ),
    Log(
        "verl, KL in the loss",
        "0.9.1, `workers/utils/losses.py:136`",
        "`actor/kl_loss`",
        "`kl_loss_type`, k3",
        "tokens",
    ),
    Log(
        "OpenRLHF, KL in the reward",
        "0.11.2, `experience_maker.py:215`",
        "`kl`",
        "`--algo.kl.estimator`, k1",
        "completions",
        drives="`--algo.kl.target`",
    ),
    Log(
        "OpenRLHF, KL in the loss",
        "0.11.2, `ppo_actor.py:331`",
        "`kl`",
        "`--algo.kl.estimator`",
        "tokens",
    ),
    Log(
        "ROLL",
        "8eb27cc2, `utils/functionals.py:632`",
        "`critic/kl`",
        "`kl_penalty`, k1",
        "completions",
        drives="`AdaptiveKLController`",
    ),
    Log(
        "SkyRL",
        "a9564572e, `workers/worker.py:1077`",
        "`policy_kl`",
        "`kl_estimator_type`",
        "completions",
    ),
    Log(
        "NeMo-RL",
        "7ea279abf, `loss_functions.py:507`",
        "`kl_penalty`",
        "`reference_policy_kl_type`",
        "tokens",
    ),
    Log(
        "slime",
        "624b824a8, `megatron_utils/loss.py:1128`",
        "`train/kl_loss`",
        "`--kl-loss-type`",
        "completions",
    ),
)
