"""A preset: a population to train, and what it is to decide and expected to show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from analysis.records.config import Run, TrainConfig
from analysis.records.language import LanguageConfig
from analysis.records.metrics import (
    COEFFICIENT_METRICS,
    CONTROL_METRICS,
    ENSEMBLE_METRICS,
    FINAL_METRICS,
    FINAL_PROXY_METRICS,
    KNOWN_METRICS,
    PROXY_METRICS,
)
from analysis.records.variants import Variant
from kl_term.plain_checks import check_choice
from kl_term.schema import Schema

#: Of a mean difference.
Expected = Literal["equivalent", "above", "below"]


#: Metrics beside those of a logging window: see :func:`analysis.records.designs.with_derived`.
DERIVED = ("average", "excess", "log_peak_gradient")
#: The same of runs on a reward model.
DERIVED_OF_PROXY = ("peak_gold", "budget_gold")

#: Nats a token, exact reverse KL: where somebody stops who has no gold to look at.
KL_BUDGET = 0.1
#: The same where the reward model has several members.
DERIVED_OF_ENSEMBLE = ("spread_gold", "careful_gold")

#: Of a window's mean spread over that of the first one: where somebody stops by it.
SPREAD_BUDGET = 1.5
#: What there is only where the reward model has several members.
OF_ENSEMBLE = (*ENSEMBLE_METRICS, *DERIVED_OF_ENSEMBLE)
#: What there is only where runs train on a reward model.
OF_PROXY = (*PROXY_METRICS, *FINAL_PROXY_METRICS, *DERIVED_OF_PROXY)

#: In place of coefficients: of variants without a KL term, or with one coefficient each.
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
    #: 0 where none was trained, and the design rests on what was known of the start.
    runs: int = Field(ge=0)
    seen: str
    chosen: str

    @property
    def same(self) -> bool:
        """Had it the configuration that the design then kept? It is told by these words.

        What it showed is what such a design predicts, so a prediction that holds is a replication.
        """
        said = f"{self.tried} {self.chosen}"
        return any(words in said for words in _SAME)


#: How a pilot says that its configuration was kept.
_SAME = ("same configuration", "This preset's configuration", "configuration as it was")


class Design(Schema):
    """What a population is to decide, and how: written before its runs."""

    question: str
    #: The quantity that decides, and how it is compared.
    outcome: str
    #: Two values of the outcome this close count as one, in its unit.
    margin: float = Field(gt=0)
    #: The KL that is equal at equal KL.
    equal: Literal["reverse_kl", "final_reverse_kl"] = "reverse_kl"
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

    name: str = ""  #: that of its function
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
            check_choice(
                f"metric {said}",
                prediction.metric,
                (*KNOWN_METRICS, *DERIVED, *DERIVED_OF_PROXY, *DERIVED_OF_ENSEMBLE),
            )
            final = prediction.metric in (*FINAL_METRICS, *FINAL_PROXY_METRICS)
            if final and not self.config.final_answers:
                raise ValueError(f"final_answers is 0, so there is no metric {said}")
            logged = prediction.metric in (*COEFFICIENT_METRICS, *CONTROL_METRICS)
            if logged and prediction.metric not in self.config.logs:
                raise ValueError(f"log_{prediction.metric} is off, so there is no metric {said}")
            of_proxy = prediction.metric in OF_PROXY
            if of_proxy and not self.config.proxied:
                raise ValueError(f"there is no reward_model, so there is no metric {said}")
            if prediction.metric in OF_ENSEMBLE and self.config.members < 2:
                raise ValueError(f"reward_model has no 2 members, so there is no metric {said}")
            for name in (prediction.variant, prediction.other):
                check_choice(f"variant {said}", name, coefficients)
                own = coefficients[name]
                if not own or (len(own) == 1 and prediction.betas == AT_END):
                    continue
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
