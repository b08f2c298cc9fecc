"""Everything that was measured of a loss."""

from __future__ import annotations

from dataclasses import dataclass

from kl_term.audit.expectations import Expectations
from kl_term.audit.identity import Identity
from kl_term.audit.invariants import Invariants
from kl_term.audit.numerics import Numerics
from kl_term.audit.policy_part import PolicyPart
from kl_term.audit.readings import Reading
from kl_term.audit.targets import NEITHER, NOTHING, Minimised

#: The theorem on what each estimator descends.
GRADIENTS = "02_gradients#thm-expected-gradients"


@dataclass(frozen=True)
class Facts:
    """Everything that was measured."""

    reading: Reading
    identity: Identity
    expected: Expectations
    invariants: Invariants
    numerics: Numerics
    policy: PolicyPart | None

    @property
    def at_state(self) -> Minimised:
        return self.expected["fresh"]["state"]

    @property
    def scale(self) -> float | None:
        """The coefficient found over the one asked for: of the term, else of what is minimised."""
        if self.identity.match is not None and self.identity.weights_known:
            return self.identity.match.scale
        if self.at_state.name in (NOTHING, NEITHER):
            return None
        return self.at_state.scale
