"""What a run is made of: the variant and seed of each run, and what all runs share."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from analysis.records.metrics import logged_metrics
from analysis.records.variants import Ensemble, Variant
from kl_term.schema import Extended, Schema

NUM_DIGIT_TOKENS = 10
VOCAB_SIZE = 16
SEPARATOR = 10
END = 11
FILLER = 12


class Run(Schema):
    """One run of the population."""

    variant: Variant
    #: Of prompts and sampling; the starting policy is shared. Equal seeds see equal noise.
    seed: int = Field(ge=0)


class StartConfig(Schema):
    """The supervised policies from which runs start, and which are their references."""

    #: Of the first start; the next ones follow.
    seed: int = Field(default=0, ge=0)
    #: How many starts there are: a run takes that of its seed modulo their number.
    count: int = Field(default=1, ge=1)
    updates: int = Field(default=110, ge=0)
    batch_size: int = Field(default=128, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    #: Fewest and most fillers of its examples; None = as many as the task allows.
    fillers: tuple[int, int] | None = None


class RunConfig(Schema):
    """What all runs of a population share, whatever the policy."""

    updates: int = Field(default=300, ge=1)
    num_prompts: int = Field(default=12, ge=1)
    group_size: int = Field(default=6, ge=2)
    #: Passes over each rollout; from the second on the samples are stale.
    num_iterations: int = Field(default=1, ge=1)
    #: Parts into which the prompts of a rollout are split, one optimizer step each.
    num_minibatches: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    learning_rate: float = Field(default=4e-4, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    #: Updates in a logging window: see :mod:`analysis.training.metrics`.
    log_every: int = Field(default=5, ge=1)
    #: Updates between measurements of ``kl_cosine``, a multiple of ``log_every``; 0 = none.
    cosine_every: int = Field(default=0, ge=0)
    #: Fresh answers on which the policy is measured after its last update; 0 = none.
    final_answers: int = Field(default=0, ge=0)
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
    def proxied(self) -> bool:
        """Do runs train on a reward model, and not see the reward of their task?"""
        return False

    @property
    def members(self) -> int:
        """Reward models that score each answer; 0 where the task itself does."""
        return 0

    @property
    def logs(self) -> tuple[str, ...]:
        """What every update logs."""
        return logged_metrics(members=self.members)


class PolicyConfig(Schema):
    """The size of a tiny policy."""

    #: A multiple of four floats: else where a run stands decides which vector instructions it
    #: meets, and it is not its solo run to the bit.
    width: int = Field(default=32, ge=4, multiple_of=4)
    num_layers: int = Field(default=2, ge=1)
    num_heads: int = Field(default=4, ge=1)
    #: Width of the MLP over the width of the residual stream.
    mlp_factor: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> PolicyConfig:
        if self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide width={self.width}")
        return self


class SortTask(Schema):
    """Sort the digits of the prompt: a task whose reward can be verified.

    Of 16 tokens, 0..9 are the digits, 10 opens the completion (``SEPARATOR``), 11 closes it where
    the task has an end token (``END``), and 12 is a ``FILLER`` that may stand before the answer
    where the task leaves room for it; the others mean nothing and are always wrong. The completion
    is right when what follows its fillers is the sorted prompt, token for token.
    """

    num_digits: int = Field(default=8, ge=2, le=64)
    #: Must the completion be closed by an end token? Then lengths vary and masks matter.
    end_token: bool = False
    #: Fillers that fit before the answer: length that is neither rewarded nor punished.
    max_fillers: int = Field(default=0, ge=0, le=64)
    #: ``exact``: 1 for the sorted prompt, else 0. ``graded``: the share of right positions.
    reward: Literal["exact", "graded"] = "exact"

    @model_validator(mode="after")
    def _fillers_need_an_end(self) -> SortTask:
        if self.max_fillers and not self.end_token:
            raise ValueError("max_fillers needs end_token=True: lengths vary")
        return self

    @property
    def prompt_length(self) -> int:
        return self.num_digits

    @property
    def answer_length(self) -> int:
        """Tokens of a right completion without fillers."""
        return self.num_digits + self.end_token

    @property
    def completion_length(self) -> int:
        """Tokens of the longest right completion, which is also the longest that is sampled."""
        return self.max_fillers + self.answer_length


class RewardModel(Schema):
    """A proxy of the task's reward, fitted to answers of a start and trained on by its runs."""

    #: Labelled answers, or labelled pairs of answers to one prompt.
    labels: int = Field(default=1000, ge=2)
    #: ``scores``: least squares on each answer's reward. ``pairs``: Bradley-Terry on which of two
    #: has the higher one.
    kind: Literal["scores", "pairs"] = "scores"
    #: Standard deviation of a normal error in each reward that a label is made of.
    noise: float = Field(default=0.0, ge=0)
    #: Of its residual stream; a multiple of its four heads.
    width: int = Field(default=32, ge=4, multiple_of=4)
    #: Models that are fitted to the same labels, from other weights and in another order.
    members: int = Field(default=1, ge=1)
    #: What a run is rewarded with whose variant does not say.
    ensemble: Ensemble = "mean"
    updates: int = Field(default=300, ge=1)
    batch_size: int = Field(default=128, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)

    @model_validator(mode="after")
    def _of_several(self) -> RewardModel:
        if self.ensemble != "mean" and self.members == 1:
            raise ValueError(
                f"ensemble={self.ensemble!r} is of several scores: give 2 members or more"
            )
        return self


class TeacherConfig(Schema):
    """A policy trained on right completions, to learn from."""

    start: StartConfig = StartConfig(updates=600)
    #: Its size; None = that of the policy.
    policy: PolicyConfig | None = None


class TrainConfig(RunConfig, Extended):
    """A population of tiny policies, trained from scratch."""

    later: ClassVar = ("reward_model", "log_coefficient", "log_control")

    task: SortTask = SortTask()
    policy: PolicyConfig = PolicyConfig()
    start: StartConfig = StartConfig()
    #: None where no variant has one.
    teacher: TeacherConfig | None = None
    #: What runs are rewarded by in place of the task; None = by the task itself.
    reward_model: RewardModel | None = None
    #: Log the coefficient of the KL term, which a controller moves?
    log_coefficient: bool = False
    #: Log the weight of its control variate, which earlier batches may fit?
    log_control: bool = False

    @property
    def logs(self) -> tuple[str, ...]:
        asked = {"coefficient": self.log_coefficient, "control": self.log_control}
        return logged_metrics(members=self.members, **asked)

    @property
    def proxied(self) -> bool:
        return self.reward_model is not None

    @property
    def members(self) -> int:
        return 0 if self.reward_model is None else self.reward_model.members

    @model_validator(mode="after")
    def _one_teacher(self) -> TrainConfig:
        if self.teacher is not None and self.teacher.start.count > 1:
            raise ValueError("the teacher is one policy: leave its start's count at 1")
        return self

    @model_validator(mode="after")
    def _fillers_fit(self) -> TrainConfig:
        starts = [self.start, *([self.teacher.start] if self.teacher else [])]
        for low, high in [start.fillers for start in starts if start.fillers]:
            if not 0 <= low <= high <= self.task.max_fillers:
                raise ValueError(
                    f"fillers=({low}, {high}) must lie in 0 .. max_fillers={self.task.max_fillers}"
                )
        return self
