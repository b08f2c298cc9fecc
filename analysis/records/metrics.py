"""The glossary of what every update logs, per run."""

from __future__ import annotations

#: Cheap: the mean over all updates of a logging window.
WINDOW_METRICS: dict[str, str] = {
    "reward": "Mean reward of the update's finished completions, without shaping or KL penalty.",
    "accuracy": "Share of the update's finished completions that are right as a whole.",
    "length": "Mean number of counted tokens of a finished completion.",
    "right_length": "The same over the right completions; NaN if there is none.",
    "wrong_length": "The same over the wrong completions; NaN if there is none.",
    "own_accuracy": "Accuracy of completions of the policy itself, whoever samples for training.",
    "own_length": "Length of completions of the policy itself, whoever samples for training.",
    "gradient_norm": "Euclidean norm of the run's gradient before clipping.",
    "clip_fraction": "Share of tokens whose gradient the ratio clip changes.",
    "ratio_ess": "Effective sample size of the token ratios to the sampler, as a share of tokens.",
    "used_fraction": "Share of tokens whose policy term no mask or filter leaves out.",
}

#: Over the whole vocabulary or against the reference: at the first update of a logging window.
POLICY_METRICS: dict[str, str] = {
    "reverse_kl": "Exact KL of the policy from its first reference, at visited states.",
    "forward_kl": "Exact KL of the first reference from the policy, at the same states.",
    "k1": "Mean of the estimator k1 over the sampled tokens; a moving reference is where it is.",
    "k2": "Mean of the estimator k2, likewise.",
    "k3": "Mean of the estimator k3, likewise.",
    "entropy": "Exact entropy of the policy over the vocabulary, at visited states.",
    "teacher_kl": "Exact KL of the policy from the teacher, full vocabulary; NaN without one.",
    "kl_cosine": "Cosine of the run's KL gradient with the exact reverse KL's, over all weights.",
}

#: Name -> one-line definition. Within an update, a metric is the mean over its optimizer steps and
#: over counted tokens; KLs, estimators and entropy are in nats per token. ``kl_cosine`` is of the
#: first optimizer step; it is NaN without a KL term, while the policy is the reference, and in the
#: windows where ``cosine_every`` asks for none.
METRICS: dict[str, str] = WINDOW_METRICS | POLICY_METRICS

#: Beside ``reward``, which is then the proxy, where runs train on a reward model; cheap as well.
PROXY_METRICS: dict[str, str] = {
    "gold": "Mean reward of the task itself, which the run does not see.",
    "proxy": "Mean reward by the reward model, which the run is trained on.",
}

#: Beside these, where the reward model has several members; cheap as well.
ENSEMBLE_METRICS: dict[str, str] = {
    "spread": "Standard deviation of the members' scores of an answer, mean over answers.",
    "beyond": "Share of answers with a larger spread than nineteen in twenty of the start's.",
    "all_members": "Mean reward by all members alike, whichever of them the run is trained on.",
}

#: Where runs log their coefficient; cheap as well.
COEFFICIENT_METRICS: dict[str, str] = {
    "coefficient": "Coefficient of the KL term, which a controller may move.",
}

#: Where runs log it; cheap as well.
CONTROL_METRICS: dict[str, str] = {
    "control": "Weight of the KL term's control variate, which earlier batches may fit; 1 is k3.",
}

#: After the last update, on ``final_answers`` answers of prompts drawn for the purpose.
FINAL_METRICS: dict[str, str] = {
    "final_reward": "Mean reward of the final policy's own answers.",
    "final_accuracy": "Share of them that are right as a whole.",
    "final_reverse_kl": "Exact KL of the final policy from its first reference, at visited states.",
    "final_forward_kl": "Exact KL of the first reference from the final policy, same states.",
    "final_kl_error": "Standard error of final_reverse_kl, over rollouts of an update's size.",
}

#: The same, where runs train on a reward model.
FINAL_PROXY_METRICS: dict[str, str] = {
    "final_gold": "Mean reward of the task itself of the final policy's own answers.",
    "final_proxy": "Mean reward of these answers by the reward model.",
}

#: Every name that a table may have.
KNOWN_METRICS: tuple[str, ...] = (
    *METRICS,
    *PROXY_METRICS,
    *ENSEMBLE_METRICS,
    *COEFFICIENT_METRICS,
    *CONTROL_METRICS,
    *FINAL_METRICS,
    *FINAL_PROXY_METRICS,
)

#: Those that are NaN where they are undefined; the others are finite in a healthy run.
PARTIAL_METRICS: tuple[str, ...] = ("kl_cosine", "teacher_kl", "right_length", "wrong_length")


def logged_metrics(
    *, members: int, coefficient: bool = False, control: bool = False
) -> tuple[str, ...]:
    """What every update of a run logs: how many reward models has it, and which numbers of its KL
    term does it want?"""
    asked = ((PROXY_METRICS, members > 0), (ENSEMBLE_METRICS, members > 1))
    asked = (*asked, (COEFFICIENT_METRICS, coefficient), (CONTROL_METRICS, control))
    return (*METRICS, *(name for names, wanted in asked if wanted for name in names))
