"""How a KL enters training, as a choice along every axis on which trainers differ.

This is the only description of a KL term in the project: what is trained, recorded, audited and
named on a page reads it. It computes nothing, and needs no torch: :mod:`kl_term.kl.term` has what
a choice is worth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, ValidationError, model_validator

from kl_term.errors import first_problem
from kl_term.kl.names import (
    TOKEN_NAMES,
    VALUES,
    VOCABULARY_NAMES,
    Correction,
    Credit,
    Estimator,
    Fitted,
    Level,
    Placement,
    Ratio,
    Support,
    Value,
    Weighting,
)
from kl_term.schema import Extended


class KLChoice(Extended):
    """How a KL to a reference enters training, apart from its coefficient; by default GRPO's own.

    Fields that have no meaning for a choice must be left at their defaults.
    """

    later: ClassVar = ("control", "top_k", "support", "correction")

    #: ``none`` measures the KL and leaves it out of the objective. ``exact`` and ``forward`` are
    #: the reverse and the forward KL over the vocabulary at each visited state. ``cross_entropy``
    #: is minus the log-prob of the sampled token: supervised, if a teacher samples.
    estimator: Estimator = "k3"
    placement: Placement = "loss"
    #: Of the log-ratio in the estimator: a token's, or the whole completion's.
    level: Level = "token"
    #: Off-policy weight of the loss: see :func:`kl_term.kl.surrogates.kl_loss`.
    weighting: Weighting = "none"
    #: Of the weight, at level ``token``: see :func:`kl_term.kl.importance.importance_ratio`.
    ratio: Ratio = "token"
    #: In the reward at level ``token``: a token pays for itself and all that follow, for itself
    #: alone, or for the whole completion.
    credit: Credit = "to_go"
    #: Estimator that a loss reports while ``estimator`` gives its gradient; None = the same.
    value: Value | None = None
    #: Weight of the control variate :math:`r - 1` of k3 under the attached prefix ratio: 1 is k3, 0
    #: is k1 in the reward to go. ``fitted`` takes it from the batches before, by
    #: :class:`kl_term.kl.control.ControlFit`.
    control: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | Fitted = 1.0
    #: Of ``exact`` and ``forward``: a sum over so many of the likeliest tokens; None = over all.
    top_k: int | None = Field(default=None, ge=1)
    #: Whose likeliest tokens, and what makes a divergence of their sum: see
    #: :func:`kl_term.kl.top_k.top_k_divergence`.
    support: Support = "reference"
    correction: Correction = "tail"

    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            """Raises: ValueError: one line on the first field that does not fit."""
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise ValueError(f"{type(self).__name__}: {first_problem(error)}") from None

        __init__.__pydantic_base_init__ = True  # as a field it is validated with its place

    def __eq__(self, other: object) -> bool:
        """One choice, whether or not it can compute what it is worth."""
        return isinstance(other, KLChoice) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(tuple(self.model_dump().values()))

    @model_validator(mode="after")
    def _consistent(self) -> KLChoice:
        for field, why in self._without_meaning():
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field}={getattr(self, field)!r} has no meaning {why}")
        if self.placement == "reward" and self.estimator not in VALUES:
            raise ValueError(
                f"estimator={self.estimator!r} works in the loss only: in the reward use one of "
                f"{list(VALUES)}"
            )
        if self.estimator not in VALUES and self.weighting == "attached":
            raise ValueError(
                f"weighting='attached' would differentiate the value of {self.estimator}, which "
                "has a gradient only: set weighting to 'none' or 'detached'"
            )
        return self

    def _without_meaning(self) -> list[tuple[str, str]]:
        """Fields that this choice gives no meaning to, and why."""
        if self.estimator == "none":
            fields = ("placement", "level", "weighting", "ratio", "credit", "value")
            return [(field, "without an estimator") for field in (*fields, *self.later)]
        found = []
        if self.placement == "reward":
            found += [("weighting", "in the reward: the policy loss has the ratio already")]
            found += [("value", "in the reward, which is a value alone")]
        else:
            found += [("credit", "in the loss")]
        if self.estimator not in VALUES:
            found += [("level", f"for {self.estimator}, which belongs to a token")]
            found += [("value", f"for {self.estimator}, which is no estimator of sampled tokens")]
        if self.estimator not in TOKEN_NAMES:
            found += [("weighting", f"for {self.estimator}, which is not weighted by a ratio")]
        if self.weighting == "none":
            found += [("ratio", "without a weighting")]
        if (self.estimator, self.weighting, self.ratio) != ("k3", "attached", "prefix"):
            found += [("control", "but for k3 under the attached prefix ratio")]
        if self.estimator not in VOCABULARY_NAMES:
            found += [("top_k", f"for {self.estimator}, which sums over no tokens")]
        if self.top_k is None:
            found += [(field, "without top_k") for field in ("support", "correction")]
        if self.level == "sequence":
            found += [("ratio", "at level sequence: it is the completion's")]
            found += [("credit", "at level sequence: it is the completion's")]
        return found

    @property
    def name(self) -> str:
        """Such as ``none``, ``k3_loss``, ``k3_loss_attached_prefix`` or ``exact_loss_top_8``."""
        if self.estimator == "none":
            return "none"
        apart = {"estimator", "placement", "value", *self.later}
        rest = self.model_dump(exclude=apart, exclude_defaults=True)
        shown = [] if self.value is None else ["shows", self.value]
        if self.control != 1.0:
            number = self.control if self.control == "fitted" else f"{self.control:g}"
            shown = ["control", number, *shown]
        if self.top_k is not None:
            own = {"support": self.support, "correction": self.correction}
            of_sum = (v for n, v in own.items() if v != type(self).model_fields[n].default)
            shown = ["top", str(self.top_k), *of_sum]
        return "_".join([self.estimator, self.placement, *rest.values(), *shown])

    @property
    def at_one_state(self) -> dict[str, str]:
        """The axes that mean something at one state, for :mod:`kl_term.kl.enumeration`."""
        return self.model_dump(include={"estimator", "placement", "weighting"})

    @property
    def reads_logits(self) -> bool:
        return self.estimator in VOCABULARY_NAMES
