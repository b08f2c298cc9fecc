"""A preset: a population to train, and what it is expected to show.

``@preset`` puts a function in :data:`PRESETS` under its own name. ``analysis sweep NAME -o
parameter=value`` changes a parameter of the function, a field of what its runs share, or seeds.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator, validate_call

from analysis.experiments.language.model import LanguageConfig
from analysis.training.config import Run, StartConfig, TrainConfig, Variant
from analysis.training.metrics import METRICS
from analysis.training.variants import Advantage
from kl_term.checks import check_choice
from kl_term.errors import first_problem
from kl_term.kl.term import KLTerm
from kl_term.schema import Schema

#: Of a mean difference.
Expected = Literal["equivalent", "above", "below"]


#: Metrics beside those of a logging window: see :func:`analysis.experiments.designs.with_derived`.
DERIVED = ("average", "excess", "log_peak_gradient")

#: Coefficients of variants that have no KL term to a reference.
AT_END = (0.0,)
#: In place of coefficients: along the KL that both variants reach.
EQUAL_KL = "equal KL"


class Prediction(Schema):
    """What two variants are expected to show in one metric, as data that a test can judge."""

    variant: str
    other: str
    metric: str
    #: Of the mean difference; in ``reverse_kl``, of that of logarithms.
    expected: Expected
    #: Coefficients over which a seed's difference is averaged, the variant without a KL term
    #: standing for itself at each; empty = along equal KL, by the fit of the design.
    betas: tuple[float, ...] = ()
    why: str

    @property
    def sentence(self) -> str:
        """The prediction in words."""
        where = "at equal reverse KL"
        if self.betas:
            where = "over beta = " + ", ".join(f"{beta:g}" for beta in self.betas)
        if self.betas == AT_END:
            where = "at the end"
        how = {"equivalent": "equivalent to"}.get(self.expected, self.expected)
        return f"{self.variant} is {how} {self.other} in {self.metric} {where}: {self.why}."


#: ``variants how other: metric``, and behind ``at`` the coefficients, if not along equal KL.
_PREDICTION = re.compile(r"(.+) ([=<>]) (\S+): (\S+)(?: at (.+))?")
_HOW: dict[str, Expected] = {"=": "equivalent", "<": "below", ">": "above"}


def predict(reasons: Mapping[str, str], *, at: tuple[float, ...] = ()) -> tuple[Prediction, ...]:
    """Predictions by their shortest spelling, each with its reason.

    >>> predict({"k2_loss k3_loss < none: reverse_kl at 0.3 1": "both descend a KL"})

    is one prediction of k2 and one of k3: each is below ``none`` in reverse KL, averaged over the
    two coefficients; ``=`` is equivalent, ``>`` above. Behind ``at`` may stand ``equal KL``; where
    nothing does, coefficients are those of the argument, by default none: at equal KL.

    Raises:
        ValueError: another spelling.
    """
    found = []
    for spelling, why in reasons.items():
        match = _PREDICTION.fullmatch(spelling)
        if match is None:
            raise ValueError(f"a prediction reads 'a b < other: metric at 0.1 1', not {spelling!r}")
        variants, how, other, metric, betas = match.groups(default="")
        found += [
            Prediction(
                variant=variant,
                other=other,
                metric=metric,
                expected=_HOW[how],
                betas=_coefficients(betas) if betas else at,
                why=why,
            )
            for variant in variants.split()
        ]
    return tuple(found)


def _coefficients(spelled: str) -> tuple[float, ...]:
    if spelled == EQUAL_KL:
        return ()
    try:
        return tuple(float(beta) for beta in spelled.split())
    except ValueError:
        raise ValueError(
            f"behind 'at' stand coefficients, such as 0.1 1, or {EQUAL_KL!r}, not {spelled!r}"
        ) from None


class Pilot(Schema):
    """Runs made before the design was written, on seeds and starts that it does not use."""

    tried: str
    runs: int = Field(ge=1)
    seen: str
    chosen: str


class Design(Schema):
    """What a population is to decide, and how: written before its runs."""

    question: str
    #: The quantity that decides, and how it is compared.
    outcome: str
    #: Two values of the outcome this close count as one, in its unit.
    margin: float = Field(gt=0)
    predictions: tuple[Prediction, ...] = Field(min_length=1)
    #: When it ends, and what is left out.
    stopping: str
    pilots: tuple[Pilot, ...] = Field(min_length=1)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The predictions in words."""
        return tuple(prediction.sentence for prediction in self.predictions)

    def at(self, beta: float) -> Design:
        """The same at another coefficient, where a preset's parameter says so."""
        moved = [
            p if p.betas in ((), AT_END) else p.model_copy(update={"betas": (beta,)})
            for p in self.predictions
        ]
        return self.model_copy(update={"predictions": tuple(moved)})


class Preset(Schema):
    """A population: variants x seeds, what its runs share, and what it is expected to show."""

    name: str = ""  #: that of its function: see :func:`preset`
    config: TrainConfig | LanguageConfig
    variants: tuple[Variant, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    #: Stated before the run, from theory and from searches on other seeds.
    predictions: tuple[str, ...]
    #: None of populations that were recorded before there were designs.
    design: Design | None = None
    #: Recorded before, with this configuration on these seeds: predictions compare with its
    #: variants too, and with those that it is beside.
    beside: Preset | None = None

    @model_validator(mode="after")
    def _predictions_compare_what_is_trained(self) -> Preset:
        coefficients: dict[str, set[float]] = {variant.name: set() for variant in self.compared}
        for variant in self.compared:
            if variant.kl.estimator != "none":
                coefficients[variant.name].add(variant.beta)
        for prediction in self.design.predictions if self.design else ():
            said = f"of the prediction {prediction.sentence!r}"
            check_choice(f"metric {said}", prediction.metric, (*METRICS, *DERIVED))
            for name in (prediction.variant, prediction.other):
                check_choice(f"variant {said}", name, coefficients)
                own = coefficients[name] or set(prediction.betas)
                for beta in sorted(set(prediction.betas) - own):
                    raise ValueError(f"{name} has betas {sorted(own)}, not {beta:g} {said}")
        return self

    @model_validator(mode="after")
    def _variants_have_names_of_their_own(self) -> Preset:
        keys = [(variant.name, variant.beta) for variant in self.variants]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"two variants share name and beta {twice[0]}: give them labels")
        return self

    @property
    def compared(self) -> tuple[Variant, ...]:
        """Its variants, and those of what it stands beside."""
        return self.variants + (self.beside.compared if self.beside else ())

    @property
    def runs(self) -> tuple[Run, ...]:
        """Variants in order, the seeds of each together."""
        return tuple(
            Run(variant=variant, seed=seed) for variant in self.variants for seed in self.seeds
        )


#: Name -> a function from parameters to the preset.
PRESETS: dict[str, Callable[..., Preset]] = {}

#: A parameter that every preset has: the first of its seeds, which follow each other. A range that
#: no other preset uses makes a second, independent sample of the same runs.
FIRST_SEED = "first_seed"
#: Of one population; more is a slip of the keyboard, and its list of runs alone takes minutes.
MOST_SEEDS = 10_000


def preset(function: Callable[..., Preset]) -> Callable[..., Preset]:
    """Register a function from parameters to a population: its name is that of the preset."""
    checked = validate_call(function, config=ConfigDict(allow_inf_nan=False))

    @functools.wraps(function)
    def named(**parameters: Any) -> Preset:
        return checked(**parameters).model_copy(update={"name": function.__name__})

    PRESETS[function.__name__] = named
    return named


def make_preset(name: str, overrides: Mapping[str, Any]) -> Preset:
    """The preset of that name, some of its parameters replaced.

    Args:
        name: one of :data:`PRESETS`.
        overrides: of the preset's function; of any preset ``first_seed``, ``num_seeds`` and the
            fields of its configuration, such as ``updates``.

    Raises:
        ValueError: an unknown preset or parameter, or a value that does not fit.
    """
    check_choice("preset", name, PRESETS)
    own = inspect.signature(PRESETS[name]).parameters
    given = {parameter: value for parameter, value in overrides.items() if parameter in own}
    others = {parameter: value for parameter, value in overrides.items() if parameter not in own}
    try:
        made = PRESETS[name](**given)
        shared = type(made.config).model_fields
        for parameter in others:
            known = dict.fromkeys((*own, FIRST_SEED, "num_seeds", *shared))
            check_choice(f"parameter of preset {name!r}", parameter, known)
        fields = made.config.model_dump() | {n: v for n, v in others.items() if n in shared}
        config = type(made.config).model_validate(fields, strict=False)
        return made.model_copy(update={"config": config, "seeds": _seeds(made.seeds, **others)})
    except ValidationError as error:
        raise ValueError(f"preset {name!r}: {first_problem(error)}") from None


@validate_call
def _seeds(
    usual: tuple[int, ...],
    *,
    first_seed: Annotated[int, Field(ge=0)] | None = None,
    num_seeds: Annotated[int, Field(ge=1)] | None = None,
    **_: Any,
) -> tuple[int, ...]:
    first = usual[0] if first_seed is None else first_seed
    return fresh_seeds(first, len(usual) if num_seeds is None else num_seeds)


def fresh_seeds(first: int, count: int) -> tuple[int, ...]:
    """Seeds from ``first`` on; each preset has its own range, which no search has seen.

    Runs that are compared with another preset's seed by seed take theirs: ``other().seeds``.

    Raises:
        ValueError: none, or more than ``MOST_SEEDS``.
    """
    if count < 1:
        raise ValueError(f"num_seeds must be at least 1, not {count}")
    if count > MOST_SEEDS:
        raise ValueError(f"num_seeds must be at most {MOST_SEEDS:,}, not {count:,}")
    return tuple(range(first, first + count))


NO_KL = Variant()
#: The group's mean taken off, over its standard deviation; and nothing divided.
GROUP_STD = Advantage()
CENTRED = Advantage(baseline="group_centre")


def kl_variants(beta: float) -> tuple[Variant, ...]:
    """Seven ways to use the KL at one beta: k1, k2, k3, exact as loss; k1, k2, k3 in reward."""
    losses = [Variant(kl=KLTerm(estimator=name), beta=beta) for name in ("k1", "k2", "k3", "exact")]
    rewards = [
        Variant(kl=KLTerm(estimator=name, placement="reward"), beta=beta)
        for name in ("k1", "k2", "k3")
    ]
    return (*losses, *rewards)


#: Found by search on seeds 0 to 2: a step size at which the policy drifts far enough for the KL
#: term to matter. At half of it accuracy rises in every variant but k3 in the reward, and the
#: variants differ less.
CONFIG = TrainConfig(start=StartConfig(updates=150), learning_rate=2e-3, cosine_every=50)


def train_config(**changes: Any) -> TrainConfig:
    """``CONFIG`` with some fields changed, validated."""
    return TrainConfig(**(CONFIG.model_dump() | changes))
