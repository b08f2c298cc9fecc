"""What tells one run of a population from another: its variant, along every axis of the methods.

A variant is a composition. Each part has a default that is plain GRPO without a KL term, so a
variant names only what it changes:

>>> Variant(kl=KLChoice(estimator="k2"), beta=0.1).name
'k2_loss'
>>> Variant(label="clip_higher", objective=Objective(epsilon_high=0.28)).name
'clip_higher'
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from kl_term.kl.choice import KLChoice
from kl_term.kl.names import Level, Value
from kl_term.schema import Extended, Schema


def _choice_alone(value: Any) -> Any:
    """Of a :class:`kl_term.kl.term.KLTerm` what it chooses: recorded variants compare equal."""
    return KLChoice(**dict(value)) if isinstance(value, KLChoice) else value


#: How a KL enters; a KLTerm may be given.
Choice = Annotated[KLChoice, BeforeValidator(_choice_alone)]


class Objective(Schema):
    """The policy term of the loss."""

    #: A kind of :mod:`kl_term.objectives.losses`, or an objective over whole completions:
    #: ``mirror_descent`` (against the sampler) or ``dpo`` (best against worst of each group).
    kind: Literal[
        "grpo",
        "gspo",
        "cispo",
        "reinforce",
        "sequence",
        "grpo_off_policy",
        "mirror_descent",
        "dpo",
    ] = "grpo"
    epsilon_low: float = Field(default=0.2, ge=0, le=1)
    epsilon_high: float = Field(default=0.2, ge=0)
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ] = "seq_mean_token_mean"
    #: Of ``grpo_off_policy``: whose log-ratio the advantage holds, and does autograd see it?
    reading: Literal["old", "detached", "attached"] = "old"
    #: ``tau`` of mirror descent, ``beta`` of DPO: reward per nat.
    tau: float = Field(default=1.0, gt=0)


class Advantage(Schema):
    """From the rewards of a group to what each token is worth."""

    #: A function of :mod:`kl_term.objectives.advantages`; ``zero`` leaves the reward out, and
    #: ``shortest_right`` is 1 for the completion that rejection sampling keeps, 0 for the others.
    baseline: Literal[
        "group_normalise", "group_centre", "leave_one_out", "zero", "shortest_right"
    ] = "group_normalise"
    #: ``outcome``: one reward a completion. ``process``: every right position is a step reward,
    #: normalised over the group. ``marginal``: what each token adds to a process score, to go.
    level: Literal["outcome", "process", "marginal"] = "outcome"
    ddof: Literal[0, 1] = 1
    eps: float = Field(default=1e-4, ge=0)
    std_min: float | None = Field(default=None, ge=0)
    std_max: float | None = Field(default=None, gt=0)
    #: Leave groups of equal rewards out of every mean, as dynamic sampling does.
    drop_uniform_groups: bool = False
    #: Is a KL in the reward subtracted ``after`` the baseline, or ``before`` it, summed over the
    #: completion? See :mod:`kl_term.objectives.ordering`.
    kl_order: Literal["after", "before"] = "after"

    @model_validator(mode="after")
    def _consistent(self) -> Advantage:
        if self.level != "outcome" and self.baseline not in ("group_normalise", "group_centre"):
            raise ValueError(f"level={self.level!r} brings its own baseline: leave baseline alone")
        if self.std_min is not None and self.std_max is not None and self.std_min > self.std_max:
            raise ValueError(f"std_min={self.std_min} exceeds std_max={self.std_max}")
        return self


class Shaping(Schema):
    """What is added to the reward of the task."""

    #: See :mod:`kl_term.objectives.lengths`; ``relative`` is Kimi k1.5's.
    length: Literal["none", "linear", "relative", "soft_overlong"] = "none"
    #: Reward per token of ``linear``; factor of the two others.
    weight: float = Field(default=0.0, ge=0)
    #: Of ``soft_overlong``: tokens before the longest completion at which it begins.
    buffer: int = Field(default=1, ge=1)
    #: Uniform noise of this width, as of a reward model that cannot tell equal answers apart.
    noise: float = Field(default=0.0, ge=0)


class Sampler(Schema):
    """Who samples, and how that differs from the policy that is trained."""

    by: Literal["policy", "teacher"] = "policy"
    #: Updates by which the sampling weights lag behind.
    staleness: int = Field(default=0, ge=0)
    #: Of the sampler over the trainer's: other than 1, the two disagree.
    temperature: float = Field(default=1.0, gt=0)
    #: Only the smallest set of likeliest tokens with this probability is sampled.
    top_p: float = Field(default=1.0, gt=0, le=1)
    #: Stop a completion that has repeated a block of up to ``repeat_period`` tokens so often;
    #: 0 = never.
    repeat_times: int = Field(default=0, ge=0)
    repeat_period: int = Field(default=1, ge=1)
    #: New tokens of a completion per update; the rest is sampled in later ones. 0 = no limit.
    budget: int = Field(default=0, ge=0)
    #: Of a completion sampled over several updates: all its tokens, or those of the last update.
    train_on: Literal["all", "current"] = "all"

    @model_validator(mode="after")
    def _consistent(self) -> Sampler:
        if self.repeat_times == 1:
            raise ValueError("repeat_times=1 would stop every completion: give at least 2, or 0")
        if self.by == "teacher" and self.staleness:
            raise ValueError("staleness is the policy's: the teacher does not change")
        if self.budget and (self.by == "teacher" or self.mismatched or self.staleness):
            raise ValueError("budget is for a sampler that is the trained policy itself")
        if self.train_on != "all" and not self.budget:
            raise ValueError("train_on is for partial rollouts: give a budget")
        return self

    @property
    def mismatched(self) -> bool:
        """Does it draw from another distribution than its own weights at the run's temperature?"""
        return self.temperature != 1.0 or self.top_p < 1.0

    @property
    def off_policy(self) -> bool:
        """Does it draw from something else than the policy as it is now?"""
        return self.by == "teacher" or self.mismatched or self.staleness > 0

    @property
    def shares_activations(self) -> bool:
        """Are its activations those of the first optimizer step?"""
        return self.by == "policy" and self.staleness == 0 and self.budget == 0


class Correction(Schema):
    """What is done about samples that are not the policy's own."""

    #: Weights between trainer and sampler: see :mod:`kl_term.objectives.mismatch`.
    mismatch: Literal["none", "truncated", "masked"] = "none"
    mismatch_level: Level = "token"
    #: Largest weight; ``masked`` also drops weights below its inverse.
    bound: float = Field(default=2.0, ge=1)
    #: Mean log-ratio, nats per token, from which a bad completion is left out; None = never.
    sequence_mask_delta: float | None = Field(default=None, ge=0)
    #: Leave out completions that were cut at the longest length (overlong filtering).
    mask_truncated: bool = False
    #: Restrict the policy to the tokens that top-p left to the sampler.
    keep_sampling_mask: bool = False


class Distillation(Schema):
    """A second KL term, to the teacher."""

    #: Any but ``none``; its reference is the teacher. By default on-policy distillation.
    kl: Choice = KLChoice(estimator="k1", placement="reward", credit="immediate")
    weight: float = Field(default=1.0, gt=0)
    #: Weight reached after ``anneal_updates``; None = constant.
    weight_end: float | None = Field(default=None, ge=0)
    anneal_updates: int = Field(default=1, ge=1)
    #: Only completions whose reward is below this are taught; None = all.
    only_below: float | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Distillation:
        if self.kl.estimator == "none":
            raise ValueError("distillation with estimator='none': leave distillation out")
        if self.kl.control == "fitted":
            raise ValueError("control='fitted' is for the KL to the reference: give a number")
        return self


class Truncation(Schema):
    """Bounds of the prefix ratio that weighs a KL loss: see
    :func:`kl_term.kl.truncated_prefix.truncated_prefix_coefficients`."""

    #: Largest value of the ratio, whose gradient is kept; None = any.
    cap: float | None = Field(default=None, gt=0)
    #: Last tokens whose ratios are multiplied; None = all of them.
    window: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _truncates(self) -> Truncation:
        if self.cap is None and self.window is None:
            raise ValueError("truncation without cap and window bounds nothing: leave it out")
        return self


class MovingReference(Schema):
    """A reference that follows the policy: its weights are averaged with the policy's now and then.

    TRL calls the two ``ref_model_sync_steps`` and ``ref_model_mixup_alpha``.
    """

    #: Updates from one average to the next.
    every: int = Field(ge=1)
    #: Of the policy in the average; 1 is a reset.
    weight: float = Field(default=1.0, gt=0, le=1)


class Controller(Schema):
    """A coefficient that follows the KL: a rule of :mod:`kl_term.objectives.controllers`.

    Each update measures the KL of its rollout, moves the policy, then the coefficient.
    """

    rule: Literal["proportional", "doubling", "multiplier"] = "proportional"
    #: Of what is read, nats per token.
    target: float = Field(gt=0)
    #: The estimator that is read, over the reference that the run has.
    reads: Value = "k1"
    #: Of ``proportional``, in updates.
    horizon: float = Field(default=10.0, gt=0.2)
    #: Of ``multiplier``.
    rate: float = Field(default=1.0, gt=0)


#: Spreads that ``penalised`` takes off. The least of four normal scores lies one below their mean
#: on average, so this is about twice as careful as ``worst``.
PENALTY = 2.0
#: What a run is rewarded with where its reward model has several members: the score of the
#: ``first``, the ``mean``, the least (``worst``), or the mean less twice their spread
#: (``penalised``): see :mod:`analysis.training.ensembles`.
Ensemble = Literal["first", "mean", "worst", "penalised"]


class Variant(Extended):
    """One way to train."""

    later: ClassVar = ("reference", "controller", "kl_from", "ensemble", "kl_on", "truncation")

    #: Name in tables and figures; by default it says how the KL enters.
    label: str = ""
    #: How the KL to the reference enters.
    kl: Choice = KLChoice(estimator="none")
    #: Coefficient of the KL term. Negative rewards divergence: of use in tests only.
    beta: float = 0.0
    objective: Objective = Objective()
    advantage: Advantage = Advantage()
    shaping: Shaping = Shaping()
    sampler: Sampler = Sampler()
    correction: Correction = Correction()
    distillation: Distillation | None = None
    #: None = the start, for good.
    reference: MovingReference | None = None
    #: None = ``beta``, for good; else that is where it begins.
    controller: Controller | None = None
    #: Updates before which the coefficient is zero.
    kl_from: int = Field(default=0, ge=0)
    #: Which of a reward model's members reward the run; None = as the reward model says.
    ensemble: Ensemble | None = None
    #: Answers on which the KL term acts: ``all``; all of an update whose members disagree more
    #: than at the start, in the mean (``growing``); those on which they disagree more than on
    #: nineteen in twenty answers of the start (``beyond``).
    kl_on: Literal["all", "growing", "beyond"] = "all"
    #: Of a KL loss under the attached prefix ratio; None = the whole product.
    truncation: Truncation | None = None

    @model_validator(mode="after")
    def _kl_is_consistent(self) -> Variant:
        if self.kl.estimator == "none" and self.beta != 0.0:
            raise ValueError(f"beta={self.beta} with kl.estimator='none': name an estimator")
        if self.kl.estimator == "cross_entropy":
            raise ValueError("estimator='cross_entropy' is for distillation")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Variant:
        merged = self.objective.kind == "grpo_off_policy" and self.kl.estimator != "none"
        if merged and self.kl != KLChoice(estimator="k1", placement="reward", credit="immediate"):
            raise ValueError(
                "kind='grpo_off_policy' holds its KL as k1 in the reward, of each token its own: "
                "set kl=KLChoice(estimator='k1', placement='reward', credit='immediate')"
            )
        if merged and self.advantage.kl_order != "after":
            raise ValueError("kind='grpo_off_policy' charges tokens: set kl_order='after'")
        if self.correction.keep_sampling_mask and (
            self.sampler.top_p == 1.0 or self.sampler.temperature != 1.0
        ):
            raise ValueError("keep_sampling_mask needs a sampler with top_p < 1 and temperature 1")
        terms = [self.kl, *([] if self.distillation is None else [self.distillation.kl])]
        whole = any(term.level == "sequence" or term.ratio != "token" for term in terms)
        if self.sampler.train_on == "current" and whole:
            raise ValueError(
                "train_on='current' leaves out tokens that level='sequence' and ratio read: use "
                "level='token' with ratio='token'"
            )
        if self.correction.mismatch != "none" and not self.sampler.mismatched:
            raise ValueError(
                "a mismatch correction needs a sampler whose temperature or top_p differs"
            )
        if self.correction.mismatch != "none" and self.correction.keep_sampling_mask:
            raise ValueError("keep_sampling_mask leaves no mismatch to correct: choose one of them")
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Variant:
        refuse_ignored(self)
        return self

    @property
    def separate_kl(self) -> KLChoice | None:
        """The KL to the reference as a term of its own; None without one, or in the objective."""
        merged = self.objective.kind == "grpo_off_policy"
        return None if merged or self.kl.estimator == "none" else self.kl

    @property
    def name(self) -> str:
        """The label, or the name of the KL term; without beta."""
        return self.label or self.kl.name


#: The one KL term whose ratio a truncation bounds.
PREFIX_RATIO = KLChoice(estimator="k3", weighting="attached", ratio="prefix")
#: Objectives over whole completions: they read rewards, and no advantage.
OVER_COMPLETIONS = ("mirror_descent", "dpo")


def refuse_ignored(variant: Variant) -> None:
    """Nothing that a variant asks for may go unread.

    Raises:
        ValueError: it would; the message says which part, and what to set.
    """
    if variant.advantage.level != "outcome":
        _of_steps(variant)
    if variant.kl.placement == "reward" and variant.advantage.kl_order == "before":
        _before_the_baseline(variant)
    if variant.objective.kind in OVER_COMPLETIONS:
        _over_completions(variant)
    if variant.reference and variant.kl.estimator == "none" and variant.objective.kind != "dpo":
        raise ValueError("reference moves and nothing reads it: name a kl.estimator")
    if variant.controller is not None:
        _controlled(variant)
    if variant.kl_from and variant.separate_kl is None:
        raise ValueError(f"kl_from={variant.kl_from} switches a KL term on, and there is none")
    if variant.truncation is not None and variant.separate_kl != PREFIX_RATIO:
        raise ValueError(
            "truncation bounds the ratio of k3 under the attached prefix ratio: set "
            "kl=KLChoice(estimator='k3', weighting='attached', ratio='prefix')"
        )
    if variant.kl_on != "all" and variant.separate_kl is None:
        raise ValueError(f"kl_on={variant.kl_on!r} chooses where a KL term acts: there is none")


def _controlled(variant: Variant) -> None:
    if variant.separate_kl is None:
        raise ValueError("controller moves the coefficient of a KL term, and there is none")
    if variant.kl_from:
        raise ValueError(f"kl_from={variant.kl_from} and a controller both set the coefficient")
    if variant.beta <= 0 and variant.controller.rule != "multiplier":
        raise ValueError(f"a {variant.controller.rule} controller cannot leave beta={variant.beta}")


def _of_steps(variant: Variant) -> None:
    if variant.shaping != type(variant.shaping)():
        raise ValueError(
            f"level={variant.advantage.level!r} reads step rewards: shaping changes nothing"
        )


def _before_the_baseline(variant: Variant) -> None:
    advantage = variant.advantage
    if advantage.level != "outcome" or advantage.baseline in ("zero", "shortest_right"):
        raise ValueError(
            "kl_order='before' puts the KL into an outcome reward, and this advantage reads none: "
            "set kl_order='after'"
        )


def _over_completions(variant: Variant) -> None:
    kind, correction = f"kind={variant.objective.kind!r}", variant.correction
    if variant.kl.placement == "reward" and variant.advantage.kl_order == "after":
        raise ValueError(f"{kind} reads rewards, no advantages: set kl_order='before'")
    if variant.distillation is not None and variant.distillation.kl.placement == "reward":
        raise ValueError(f"{kind} reads rewards, no advantages: distil with placement='loss'")
    if variant.advantage.level != "outcome":
        raise ValueError(f"{kind} is over whole completions: leave level alone")
    masks = correction.mask_truncated or correction.sequence_mask_delta is not None
    if masks or correction.mismatch != "none":
        raise ValueError(
            f"{kind} is over whole completions: of correction it takes only keep_sampling_mask"
        )


def refuse_verifier(variant: Variant) -> None:
    """A run on a reward model does not see what the verifier says.

    Raises:
        ValueError: this variant would; the message says which part reads it.
    """
    advantage = variant.advantage
    reads = {
        f"level={advantage.level!r}": advantage.level != "outcome",
        "baseline='shortest_right'": advantage.baseline == "shortest_right",
        "length='relative'": variant.shaping.length == "relative",
    }
    for part in (part for part, read in reads.items() if read):
        raise ValueError(
            f"variant {variant.name!r}: {part} reads the verifier, which runs with a reward_model "
            "do not see"
        )


def refuse_members(variant: Variant, members: int) -> None:
    """What reads the disagreement of reward models needs several.

    Raises:
        ValueError: this variant does and there are none or one; the message says which part.
    """
    reads = {
        f"ensemble={variant.ensemble!r}": variant.ensemble is not None,
        f"kl_on={variant.kl_on!r}": variant.kl_on != "all",
    }
    for part in (part for part, read in reads.items() if read and members < 2):
        raise ValueError(
            f"variant {variant.name!r}: {part} reads several reward models, and there is "
            f"{'one' if members else 'none'}: set reward_model with 2 members or more"
        )
