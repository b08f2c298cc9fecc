"""How a trainer is entered: one function, its formula, under a decorator that says what was read.

:func:`loss` enters a term that is differentiated, :func:`charge` one that is taken off the reward
or the advantage. Both hold for one *path* of the KL through a trainer, with its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from kl_term.audit.states import Formula

#: Of the sampler's log-probs, the reference's and the mask, each [..., G, T] for the G answers of a
#: group: what is taken off each token's advantage [..., G, T], per unit of beta.
Charge = Callable[[Tensor, Tensor, Tensor], Tensor]


class Source(NamedTuple):
    """A framework as it was read."""

    framework: str
    repository: str
    file: str
    version: str  #: release, or commit
    date: str  #: of the commit, or when the release was read


@dataclass(frozen=True)
class Path:
    """One way of the KL through a trainer, as it was read."""

    source: Source
    placement: str  #: ``loss`` or ``reward``
    formula: Callable[..., Tensor]
    #: Name -> flags of the formula. The first is what the trainer takes where nothing is said.
    settings: Mapping[str, Mapping[str, Any]]
    #: The coefficient as shipped; 0 where the path is off until somebody asks for it.
    beta: float
    flag: str  #: what chooses the setting
    #: How tokens become one number: a name in ``DIVISORS`` of the chapter's answers.
    divisor: str = "token_mean"
    since: str = ""  #: the first release, or date, that was seen to do this
    remark: str = ""  #: what else decides, in one sentence
    remedy: str = ""  #: the one line that changes the default, where it is not the reverse KL
    cure: str = ""  #: the setting that this line makes of it, if the trainer has one
    #: Where its maintainers discuss it: ``owner/name#number status``, as the stored copies say.
    threads: tuple[str, ...] = ()
    #: Settings for which the samples are the reference's own.
    samples_of_reference: tuple[str, ...] = ()
    #: No default at all: an option that has to be named.
    no_default: bool = field(default=False)

    @property
    def framework(self) -> str:
        return self.source.framework

    @property
    def default(self) -> str | None:
        return None if self.no_default else next(iter(self.settings))

    @property
    def is_on(self) -> bool:
        return self.beta > 0

    def bound(self, setting: str) -> Callable[..., Tensor]:
        """The formula of one setting."""
        return partial(self.formula, **self.settings[setting])


class Option(NamedTuple):
    """One setting of a framework's KL term in the loss."""

    framework: str
    setting: str
    loss: Formula
    default: bool  #: what the framework uses once its KL loss is on
    reference_is_sampler: bool

    @classmethod
    def of(cls, path: Path) -> tuple[Option, ...]:
        return tuple(
            cls(
                path.framework,
                setting,
                path.bound(setting),
                setting == path.default,
                setting in path.samples_of_reference,
            )
            for setting in path.settings
        )


PATHS: list[Path] = []


def loss(read: str, settings: Mapping[str, Mapping[str, Any]], **said: Any) -> Callable:
    """Enters the term of a KL loss.

    Args:
        read: framework, repository, file, release or commit, and date, between spaces.
        settings, said: as in :class:`Path`.
    """
    return _enter(read, "loss", settings, said)


def charge(read: str, settings: Mapping[str, Mapping[str, Any]], **said: Any) -> Callable:
    """Enters what is taken off the advantages; else as :func:`loss`."""
    return _enter(read, "reward", settings, said)


def _enter(read: str, placement: str, settings: Mapping, said: Mapping[str, Any]) -> Callable:
    source = Source(*read.split())

    def entered(formula: Callable) -> Callable:
        PATHS.append(Path(source, placement, formula, settings, **said))
        return formula

    return entered
