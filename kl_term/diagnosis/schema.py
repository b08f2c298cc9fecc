"""The contracts of a diagnosis: rollouts and settings in, a report of findings out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from kl_term.diagnosis.units import Units, find_units
from kl_term.errors import UserError
from kl_term.kl.choice import KLChoice

Floats = NDArray[np.float64]
Integers = NDArray[np.integer]
Severity = Literal["error", "warning", "note"]
#: ``plain`` is a loop of one's own, which clamps nothing.
Framework = Literal["unknown", "plain", "trl", "verl", "openrlhf"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Rollouts:
    """The counted tokens of a dump, sorted by sequence and position. Log-probs in nats.

    Optional columns are None where the dump lacks them. ``old_logp`` falls back to ``logp``.
    """

    logp: Floats  #: [N], under the trained policy
    old_logp: Floats  #: [N], under the policy as the trainer knew it when sampling
    ref_logp: Floats  #: [N], under the reference
    sequence: Integers  #: [N], from 0, ascending
    position: Integers  #: [N], within the sequence
    sampler_logp: Floats | None = None  #: [N], as reported by the inference engine
    entropy: Floats | None = None  #: [N], of the trained policy at the token's state, nats
    advantage: Floats | None = None  #: [N]
    reward: Floats | None = None  #: [N]
    step: Integers | None = None  #: [N]
    group: Integers | None = None  #: [N], equal for completions of one prompt
    token: Integers | None = None  #: [N], ids in the vocabulary
    kl_term: Floats | None = None  #: [N], what the KL adds to the loss or takes from the reward
    padding: Integers | None = None  #: [N], padding tokens left of the prompt
    lag: Integers | None = None  #: [N], updates since the weights that drew the token
    version: Integers | None = None  #: [N], number of these weights, which rises with the updates
    rows: int = 0  #: rows of the dump, counted or not
    has_old_logp: bool = True
    sequence_names: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)  #: unknown column -> nearest known name
    filled: int = 0  #: of them, such as held a filler, a number that no log-prob is
    filler: float = 0.0  #: the filler that most of them held
    unscored: int = 0  #: tokens for which the engine gave no log-prob: they have ``old_logp``'s

    def __post_init__(self) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                if column.shape != (len(self.logp),):
                    shape = (len(self.logp),)
                    raise ValueError(f"{name} has shape {column.shape}: logp has {shape}")
                if column.dtype.kind == "f" and np.isnan(column).any():
                    raise ValueError(f"{name} holds NaN")

    @property
    def tokens(self) -> int:
        return len(self.logp)

    @property
    def sequences(self) -> int:
        return int(self.sequence[-1]) + 1 if self.tokens else 0

    @cached_property
    def lengths(self) -> Integers:
        """[S], tokens of each sequence."""
        return np.bincount(self.sequence)

    @property
    def first(self) -> Integers:
        """[S], index of each sequence's first token."""
        return self.last - self.lengths + 1

    @property
    def last(self) -> Integers:
        """[S], index of each sequence's last token."""
        return np.cumsum(self.lengths) - 1

    @cached_property
    def units(self) -> Units:
        """Which rows are one completion, and which completions answer one prompt."""
        return find_units(self)

    @property
    def by_completion(self) -> Integers:
        """[N], the code of each token's completion."""
        return self.units.completion[self.sequence]

    @property
    def by_prompt(self) -> Integers:
        """[N], the code of each token's prompt; of its completion where there is one prompt."""
        units = self.units
        return (units.prompt if units.prompt.any() else units.completion)[self.sequence]

    def sums(self, values: Floats) -> Floats:
        """[S], over the tokens of each sequence."""
        return np.bincount(self.sequence, weights=values)

    def means(self, values: Floats) -> Floats:
        """[S], over the tokens of each sequence."""
        return self.sums(values) / self.lengths

    @property
    def behaviour_logp(self) -> Floats:
        """[N], under whatever drew the tokens: the inference engine's if dumped."""
        return self.old_logp if self.sampler_logp is None else self.sampler_logp


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Settings(_Frozen):
    """What the trainer did with these log-probs, as far as the user says so."""

    framework: Framework = "unknown"
    #: The run's KL term; None = unknown.
    kl: KLChoice | None = None
    epsilon_low: float = Field(default=0.2, gt=0, lt=1)
    epsilon_high: float = Field(default=0.2, gt=0)
    #: What the clip holds: the ratio of a token, or that of its whole sequence (GSPO).
    ratio_level: Literal["token", "sequence"] = "token"
    #: Completions of a prompt; None = as many as the largest group has.
    group_size: int | None = Field(default=None, ge=2)
    #: Optimizer steps on one rollout: in a run's first one, old policy and reference are one.
    rollout_steps: int = Field(default=1, ge=1)
    resamples: int = Field(default=1000, ge=100, le=100_000)
    seed: int = Field(default=0, ge=0)
    #: Does a controller move the coefficient of the KL term by design?
    adaptive: bool = False
    #: 0, or the number of this look at a run that is diagnosed again and again: its intervals are
    #: wider, so that all looks together err as often as one.
    look: int = Field(default=0, ge=0)

    @property
    def in_reward(self) -> bool:
        """Whether the run's KL term is taken from the reward."""
        return self.kl is not None and self.kl.placement == "reward"

    @property
    def bootstrap(self) -> dict[str, int]:
        """How intervals are resampled."""
        return {"resamples": self.resamples, "seed": self.seed, "look": self.look}


def described_term(
    estimator: str | None, placement: str | None = None, weighting: str | None = None
) -> KLChoice | None:
    """The KL term that a user describes, ``unknown`` as None; None without an estimator.

    Raises:
        UserError: a placement or weighting without an estimator, or axes that do not go together.
    """
    axes = {"estimator": estimator, "placement": placement, "weighting": weighting}
    given = {name: value for name, value in axes.items() if value not in (None, "unknown")}
    if given and "estimator" not in given:
        raise UserError(f"{next(iter(given))} describes a KL term: name its estimator too")
    try:
        return KLChoice(**given) if given else None
    except ValueError as error:
        raise UserError(str(error).replace("KLChoice", "the KL term", 1)) from None


class Interval(_Frozen):
    """A mean over counted tokens and its 95% interval over prompts or completions."""

    value: float
    low: float
    high: float

    def clear_of(self, value: float) -> bool:
        """Does it lie twice as far from a value as the interval reaches (four standard errors)?"""
        reach = self.value - self.low if self.value > value else self.high - self.value
        return abs(self.value - value) > 2 * reach


Evidence = dict[str, float | int | str]


class Shown(NamedTuple):
    """What shows a cause."""

    evidence: Evidence
    severity: Severity | None = None  #: another than the cause's own
    words: Mapping[str, str] = MappingProxyType({})  #: for the braces of its title and advice
    case: str = ""  #: which of its titles and advices, where it has several


class KLEstimate(_Frozen):
    """The KL to the reference by one estimator from one kind of sample (nats per token)."""

    estimator: str
    samples: Literal["logged", "sampling", "reweighted"]
    interval: Interval


class Tail(_Frozen):
    """Tail index of a ratio: its moments exist below ``1 / k``."""

    ratio: str
    k: float | None
    threshold: float  #: above it neither a mean nor its interval can be trusted
    unfitted: str = ""  #: why k is None


class Finding(_Frozen):
    """One thing that is wrong, what shows it, and what to change."""

    code: str
    severity: Severity
    title: str
    evidence: dict[str, float | int | str]
    advice: str
    chapter: str  #: notebook of the book, and ``#label`` inside it
    settings: dict[str, str] = Field(default_factory=dict)  #: trainer -> the line that changes it


class Identity(_Frozen):
    """A ratio whose mean over the sampled tokens is one if the columns are what they say."""

    ratio: str
    mean: Interval


class SequenceShare(_Frozen):
    """A sequence that carries much of the KL."""

    sequence: str
    tokens: int
    kl_sum: float  #: nats, by k3
    share: float  #: of the sum over all sequences


class StepKL(_Frozen):
    """The logged KL of one step or run of steps."""

    step: int
    tokens: int
    k1: float
    k3: float


class Report(_Frozen):
    """A whole diagnosis."""

    format: Literal[1] = 1
    source: str
    tokens: int
    rows: int
    sequences: int
    steps: int
    settings: Settings
    ignored_columns: dict[str, str]
    estimates: list[KLEstimate]
    tails: list[Tail]
    identities: list[Identity]
    top_sequences: list[SequenceShare]
    by_step: list[StepKL]
    intervals: dict[str, Interval]
    measurements: dict[str, float]
    not_measured: dict[str, str]  #: quantity -> why
    findings: list[Finding]

    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]


#: Sequences and tokens below which a bootstrap interval is an anecdote, and so are the shares of
#: rounded values.
FEWEST_FOR_INTERVALS = (5, 100)


class Measured(NamedTuple):
    """What the findings are decided from."""

    rollouts: Rollouts
    settings: Settings
    estimates: list[KLEstimate]
    tails: list[Tail]
    identities: list[Identity]
    top_sequences: list[SequenceShare]
    by_step: list[StepKL]
    intervals: dict[str, Interval]
    numbers: dict[str, float]

    @property
    def enough(self) -> bool:
        """Whether the dump is large enough for its intervals to decide anything."""
        fewest = FEWEST_FOR_INTERVALS
        return self.rollouts.sequences >= fewest[0] and self.rollouts.tokens >= fewest[1]

    def estimate(self, estimator: str, samples: str = "logged") -> Interval:
        """One interval of the table of estimates."""
        return next(
            e.interval for e in self.estimates if e.estimator == estimator and e.samples == samples
        )

    def tail(self, ratio: str) -> Tail | None:
        return next((tail for tail in self.tails if tail.ratio == ratio), None)

    def identity(self, ratio: str) -> Interval | None:
        return next((i.mean for i in self.identities if i.ratio == ratio), None)
