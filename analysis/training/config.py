"""What a run is made of: the arm and seed of each member, and what all members share."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator

from analysis.training.policy import PolicyConfig
from analysis.training.schema import Schema
from analysis.training.tasks import SortTask

LOSS_ESTIMATORS = ("k1", "k2", "k3", "k3_clip", "k4", "minimax01", "exact")
REWARD_ESTIMATORS = ("k1", "k2", "k3", "k3_clip", "k4")


class Arm(Schema):
    """How the KL to the reference enters: the four axes on which implementations differ."""

    #: ``exact`` is the reverse KL summed over the vocabulary at each visited state.
    kl_estimator: Literal["none", "k1", "k2", "k3", "k3_clip", "k4", "minimax01", "exact"]
    kl_placement: Literal["loss", "reward"] = "loss"
    #: Off-policy weight of the KL loss: see :func:`analysis.kl.surrogates.kl_loss`.
    kl_weighting: Literal["none", "attached", "detached"] = "none"
    #: Coefficient of the KL term. Negative rewards divergence: of use in tests only.
    beta: float = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Arm:
        if self.kl_estimator == "none":
            if self.beta != 0.0 or self.kl_placement != "loss" or self.kl_weighting != "none":
                raise ValueError("kl_estimator='none' takes no beta, placement or weighting")
        elif self.kl_placement == "reward":
            if self.kl_estimator not in REWARD_ESTIMATORS:
                raise ValueError(
                    f"kl_estimator={self.kl_estimator!r} works as a loss only; "
                    f"in the reward use one of {list(REWARD_ESTIMATORS)}"
                )
            if self.kl_weighting != "none":
                raise ValueError("kl_weighting is for kl_placement='loss': set it to 'none'")
        elif self.kl_estimator == "exact" and self.kl_weighting != "none":
            raise ValueError("the exact KL samples no token: set kl_weighting to 'none'")
        return self

    @property
    def name(self) -> str:
        """Such as ``none``, ``k3_loss``, ``k1_reward`` or ``k3_loss_attached``; without beta."""
        if self.kl_estimator == "none":
            return "none"
        suffix = "" if self.kl_weighting == "none" else f"_{self.kl_weighting}"
        return f"{self.kl_estimator}_{self.kl_placement}{suffix}"


class Member(Schema):
    """One run of the population."""

    arm: Arm
    #: Of prompts and sampling; the starting policy is shared. Equal seeds see equal noise.
    seed: int = Field(ge=0)


class StartConfig(Schema):
    """The supervised policy from which all members start, and which is their reference."""

    seed: int = Field(default=0, ge=0)
    updates: int = Field(default=110, ge=0)
    batch_size: int = Field(default=128, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)


class RunConfig(Schema):
    """What all members of a population share, whatever the policy."""

    updates: int = Field(default=300, ge=1)
    num_prompts: int = Field(default=12, ge=1)
    group_size: int = Field(default=6, ge=2)
    #: Passes over each rollout; from the second on the samples are stale.
    num_iterations: int = Field(default=1, ge=1)
    #: Parts into which the prompts of a rollout are split, one optimizer step each.
    num_minibatches: int = Field(default=1, ge=1)
    epsilon_low: float = Field(default=0.2, ge=0, le=1)
    epsilon_high: float = Field(default=0.2, ge=0)
    #: Credit of a KL penalty in the reward: a token pays for its own, or for all that follow too.
    kl_credit: Literal["to_go", "immediate"] = "to_go"
    temperature: float = Field(default=1.0, gt=0)
    learning_rate: float = Field(default=4e-4, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    #: Updates in a logging window: see :mod:`analysis.training.metrics`.
    log_every: int = Field(default=5, ge=1)
    #: Updates between measurements of ``kl_cosine``, a multiple of ``log_every``; 0 = none.
    cosine_every: int = Field(default=0, ge=0)
    precision: Literal["float32", "float64"] = "float32"

    @model_validator(mode="after")
    def _minibatches_divide_prompts(self) -> RunConfig:
        if self.num_prompts % self.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.num_minibatches} must divide num_prompts={self.num_prompts}"
            )
        return self

    @model_validator(mode="after")
    def _cosines_begin_windows(self) -> RunConfig:
        if self.cosine_every % self.log_every:
            raise ValueError(
                f"cosine_every={self.cosine_every} must be a multiple of log_every={self.log_every}"
            )
        return self

    @property
    def dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "float64": torch.float64}[self.precision]


class TrainConfig(RunConfig):
    """A population of tiny policies, trained from scratch."""

    task: SortTask = SortTask()
    policy: PolicyConfig = PolicyConfig()
    start: StartConfig = StartConfig()
