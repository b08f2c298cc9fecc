"""Arms with a part that another of their parts would never read are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.training.arms import Arm

#: Objectives over whole completions: they read rewards, and no advantage.
OVER_COMPLETIONS = ("mirror_descent", "dpo")


def refuse_ignored(arm: Arm) -> None:
    """Nothing that an arm asks for may go unread.

    Raises:
        ValueError: it would; the message says which part, and what to set.
    """
    if arm.advantage.level != "outcome":
        _of_steps(arm)
    if arm.kl.placement == "reward" and arm.advantage.kl_order == "before":
        _before_the_baseline(arm)
    if arm.objective.kind in OVER_COMPLETIONS:
        _over_completions(arm)


def _of_steps(arm: Arm) -> None:
    if arm.shaping != type(arm.shaping)():
        raise ValueError(
            f"level={arm.advantage.level!r} reads step rewards: shaping the outcome changes nothing"
        )


def _before_the_baseline(arm: Arm) -> None:
    advantage = arm.advantage
    if advantage.level != "outcome" or advantage.baseline in ("zero", "shortest_right"):
        raise ValueError(
            "kl_order='before' puts the KL into an outcome reward, and this advantage reads none: "
            "set kl_order='after'"
        )


def _over_completions(arm: Arm) -> None:
    kind, correction = f"kind={arm.objective.kind!r}", arm.correction
    if arm.kl.placement == "reward" and arm.advantage.kl_order == "after":
        raise ValueError(f"{kind} reads rewards, no advantages: set kl_order='before'")
    if arm.distillation is not None and arm.distillation.kl.placement == "reward":
        raise ValueError(f"{kind} reads rewards, no advantages: distil with placement='loss'")
    if arm.advantage.level != "outcome":
        raise ValueError(f"{kind} is over whole completions: leave level alone")
    masks = correction.mask_truncated or correction.sequence_mask_delta is not None
    if masks or correction.mismatch != "none":
        raise ValueError(
            f"{kind} is over whole completions: of correction it takes only keep_sampling_mask"
        )
