"""Everything that was measured of a loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kl_term.audit.expectations import Expectations
from kl_term.audit.identity import Identity
from kl_term.audit.invariants import Invariants
from kl_term.audit.numerics import Numerics
from kl_term.audit.policy_part import PolicyPart
from kl_term.audit.readings import Reading
from kl_term.audit.supports import Supports
from kl_term.audit.targets import NEITHER, NOTHING, Minimised
from kl_term.audit.temperatures import Tempered

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
    supports: Supports
    #: What is descended has no name, and is a divergence all the same.
    unnamed_divergence: bool = False
    unnamed_size: float = 1.0  #: its gradient over that of the reverse KL
    #: Given the reference's likeliest tokens alone, it pushes where both policies agree.
    top_k_pushes: bool = False
    #: Temperatures of its defaults that were set to one, since at these it is no known divergence.
    one_sided: tuple[str, ...] = ()  #: temperatures of one that divide one side's logits alone
    tempered: Tempered = field(default_factory=lambda: Tempered({}))

    @property
    def at_state(self) -> Minimised:
        return self.expected["fresh"]["state"]

    @property
    def scale(self) -> float | None:
        """The coefficient found over the one asked for: of the term, else of what is minimised."""
        if not self.invariants.linear_in_beta:
            return None
        if self.identity.match is not None and self.identity.weights_known:
            return self.identity.match.scale
        if self.at_state.name in (NOTHING, NEITHER):
            return None
        return self.at_state.scale

    @property
    def policy_scale(self) -> float:
        """The factor of the policy loss, where it is one of ours; else NaN."""
        return self.policy.scale if self.policy and self.policy.kind else math.nan

    @property
    def has_own_coefficient(self) -> bool:
        """Whether a whole loss takes no coefficient and none was asked for: it holds one."""
        whole = self.policy is not None or self.reading.kind == "reward"
        return whole and not self.reading.foreign.has_beta and self.reading.beta == 1.0

    @property
    def inside_the_spread(self) -> bool:
        """Whether the KL of a reward is divided by what reads the KL, in a loss that makes its
        advantages itself too."""
        made = "rewards" in self.reading.foreign.reads and self.invariants.reads_others
        return (self.reading.kind == "reward" or made) and not self.invariants.linear_in_beta

    @property
    def asks_for_no_reference(self) -> bool:
        """Whether it is a KL to the sampler because it takes no reference."""
        asks = self.reading.foreign.reads & {"ref_logp", "ref_logits", "ref_topk_logp"}
        return self.identity.fault == "to-the-sampler" and not asks

    @property
    def has_no_kl(self) -> bool:
        """Whether a policy loss takes neither a reference nor a coefficient, and has no KL."""
        asks = {"ref_logp", "ref_logits", "ref_topk_logp", "ref_log_ratio"}
        policy = self.policy is not None and self.policy.has_gradient
        takes = self.reading.foreign.has_beta or bool(self.reading.foreign.reads & asks)
        return policy and not takes and not self.identity.has_gradient

    @property
    def counted_twice(self) -> bool:
        """Whether one coefficient acts in the loss and in the reward.

        The policy's own price of a token times its score is also half of a symmetric KL: there the
        reverse KL must be found at twice its strength.
        """
        if self.identity.twice is None:
            return False
        other = self.identity.twice[1]
        if other.term.credit != "immediate" or "sampler" in other.written:
            return True
        return self.at_state.name == "reverse KL" and abs(self.at_state.scale) > 1.5
