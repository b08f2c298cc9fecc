"""From what was measured of a loss to findings: what is wrong, what to change, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kl_term.audit.candidates import Match
from kl_term.audit.expectations import Expectations
from kl_term.audit.findings import Finding
from kl_term.audit.identity import Identity
from kl_term.audit.invariants import Invariants
from kl_term.audit.numerics import Numerics
from kl_term.audit.policy_part import PolicyPart
from kl_term.audit.readings import Reading
from kl_term.audit.targets import NEITHER, NOTHING, Minimised

_GRADIENTS = "02_gradients#thm-expected-gradients"
#: Inside this log-ratio (nats) a clamp takes gradients that training meets.
_MET = 9.5


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
    def known(self) -> Match | None:
        return self.identity.match or self.identity.under_fault

    @property
    def scale(self) -> float | None:
        """The coefficient found over the one asked for: of the term, else of what is minimised."""
        if self.identity.match is not None and self.identity.weights_known:
            return self.identity.match.scale
        if self.at_state.name in (NOTHING, NEITHER):
            return None
        return self.at_state.scale


def findings_of(facts: Facts) -> Iterator[Finding]:
    """All findings; the caller sorts them by severity, and keeps this order within one."""
    yield from _of_call(facts)
    yield from _of_structure(facts)
    yield from _of_term(facts)
    yield from _of_divisor(facts)
    yield from _of_numerics(facts)
    yield from _of_policy(facts)
    yield from _of_expectation(facts)
    yield from _notes(facts)


def _of_call(facts: Facts) -> Iterator[Finding]:
    if not facts.invariants.acts:
        yield Finding(
            "beta-does-nothing",
            "error",
            "the KL coefficient changes neither the value nor the gradient",
            "add the KL, times the coefficient, to what is returned",
            _GRADIENTS,
        )
    elif not facts.identity.has_gradient and facts.reading.kind == "loss":
        into = ", ".join(sorted(facts.invariants.leaks))
        went = f" (it goes into {into})" if into else ""
        value = facts.identity.value_of
        shows = f", though its value is that of {value.name}" if value else ""
        yield Finding(
            "no-gradient",
            "error",
            f"the KL has no gradient by the policy{went}{shows}: it moves no weight",
            "compute the KL outside no_grad, from the policy's log-probs before any detach",
            _GRADIENTS,
        )
    elif not facts.identity.has_gradient:
        yield Finding(
            "kl-not-paid",
            "error",
            "the KL changes no reward of a counted token",
            "subtract the coefficient times the log-ratio from the rewards",
            "08_reward_side#prop-control-reward",
        )
    for note in sorted(facts.reading.foreign.notes):
        yield Finding(
            "modifies-arguments",
            "warning",
            f"it {note}: the caller's tensors are other ones afterwards",
            "work on a copy (torch.where or masked_fill instead of assignment)",
        )


def _of_structure(facts: Facts) -> Iterator[Finding]:
    found = facts.invariants
    if found.reads_constant_logit:
        yield Finding(
            "wrong-axis",
            "error",
            "a constant added to all logits of a position changes the KL: its numbers are no "
            "distribution over tokens",
            "take log_softmax over the last axis, the vocabulary",
        )
    if found.reads_padding:
        yield Finding(
            "reads-padding",
            "error",
            f"masked positions change the {found.reads_padding}",
            "mask every per-token term before it is summed, and divide by the mask's sum",
        )
    if found.depends_on_order:
        yield Finding(
            "row-order",
            "error",
            "the order of the answers, or where they are cut, changes the loss",
            "sum over all answers before dividing; pass the total number of tokens of the batch",
        )
    if facts.identity.has_gradient and not found.reads_reference:
        yield Finding(
            "reference-not-read",
            "error",
            "the reference does not change the KL" + _in_its_place(facts),
            "give the reference's log-probs to the KL",
            "05_fixed_points#thm-regularised-optimum",
        )


def _in_its_place(facts: Facts) -> str:
    name = facts.at_state.name
    if name == "negative entropy":
        return ": it is an entropy bonus"
    return ": it is a KL to the sampler" if facts.identity.fault == "to-the-sampler" else ""


_FAULTS: dict[str, tuple[str, str, str | None]] = {
    "exchanged": (
        "policy and reference are in each other's place in {term}",
        "exchange the two arguments",
        "14_frameworks#prop-transposed-k3",
    ),
    "score-term": (
        "{term} is weighed with a live ratio to itself, which adds its value times the score",
        "detach the ratio of k2, or keep the live ratio for k3",
        "14_frameworks#prop-live-ratio",
    ),
    "kl-ratio-to-reference": (
        "the ratio that weighs the KL is to the reference, not to the sampler",
        "divide by the log-probs of the policy that sampled",
        "02_gradients#thm-off-policy-weights",
    ),
    "shifted-reference": (
        "the log-probs of policy and reference are of different tokens, one position apart",
        "shift both by the same number of positions",
        None,
    ),
    "pointwise-kl-div": (
        "the log-ratio of the sampled token is weighed with its probability once more: that is "
        "a summand of the KL over the vocabulary, on one sampled token",
        "use k2, or k3 with a live ratio, on sampled tokens; F.kl_div on whole rows of logits",
        _GRADIENTS,
    ),
    "absolute": (
        "the absolute log-ratio descends twice the total variation",
        "use k2: its gradient is that of the reverse KL",
        "14_frameworks#prop-dead-zones",
    ),
    "positive-part": (
        "the log-ratio is cut at zero: tokens that the reference prefers cost nothing",
        "leave the sign: a log-ratio may be negative, its mean is not",
        "01_estimators#thm-unbiased",
    ),
}


def _of_term(facts: Facts) -> Iterator[Finding]:
    identity = facts.identity
    if identity.fault in _FAULTS and identity.under_fault is not None:
        says, advice, theorem = _FAULTS[identity.fault]
        theorem = "02_gradients#thm-expected-gradients" if identity.fault == "absolute" else theorem
        severity = "warning" if identity.fault in ("absolute", "score-term") else "error"
        name = identity.under_fault.term.estimator
        yield Finding(identity.fault, severity, says.format(term=name), advice, theorem)
    if identity.twice is not None:
        one, other = (m.name for m in identity.twice)
        yield Finding(
            "counted-twice",
            "error",
            f"one coefficient acts twice: as {one} and as {other}",
            "keep the KL in the loss or in the reward, not in both",
            "05_fixed_points#thm-potentials",
        )
    scale = facts.scale
    if scale is not None and scale < 0:
        yield Finding(
            "sign",
            "error",
            "the KL has the wrong sign: it is maximised",
            "add the KL to a loss that is minimised, subtract it from a reward",
            "08_reward_side#thm-penalty-sign",
        )
    if facts.identity.has_gradient and facts.at_state.name == NOTHING and not identity.only_near:
        yield Finding(
            "minimises-nothing",
            "error",
            "the expected gradient of the KL is zero: it knows no reference",
            "use k2 as a loss, or k1 in the reward",
            _GRADIENTS,
        )
    yield from _of_ratio(facts)
    if identity.match is not None and identity.match.term.placement == "reward":
        yield from _of_price(facts, identity.match)
    if scale is not None and abs(abs(scale) - 1) > 10 * facts.reading.tolerance + 1e-6:
        if identity.fault != "absolute" and identity.twice is None:
            policy = facts.policy.scale if facts.policy and facts.policy.kind else math.nan
            alike = abs(scale - policy) < 1e-4 * abs(scale)  # a divisor of the whole loss
            yield Finding(
                "scale",
                "note" if alike else "warning",
                f"the coefficient that acts is {abs(scale):.4g} times the one asked for",
                f"multiply the KL by {1 / abs(scale):.4g}, or say so beside the coefficient",
                None,
            )


def _of_ratio(facts: Facts) -> Iterator[Finding]:
    match = facts.identity.match
    if match is None or match.term.level == "sequence" or match.term.placement != "loss":
        return
    if match.term.ratio == "geometric":
        yield Finding(
            "ratio-of-another-level",
            "error",
            "the mean ratio of the whole answer weighs the KL of each token: neither the KL of "
            "tokens nor that of answers",
            "weigh the KL with the ratio of its own token",
            "06_sequences#thm-geometric-weight",
        )
    elif match.term.ratio == "sequence" and match.term.weighting == "detached":
        yield Finding(
            "ratio-of-another-level",
            "warning",
            "the ratio of the whole answer, detached, weighs the KL of each token",
            "weigh the KL with the ratio of its own token, or attach the ratio of the prefix",
            "06_sequences#thm-prefix-ratio",
        )


def _of_price(facts: Facts, match: Match) -> Iterator[Finding]:
    if match.term.estimator != "k1":
        yield Finding(
            "estimator-in-reward",
            "warning",
            f"{match.term.estimator} in the reward has the gradient of no KL: only k1 has that of "
            "the reverse KL there",
            "subtract the log-ratio itself (k1)",
            "05_fixed_points#thm-k3-plain-flow",
        )
    elif match.term.credit == "immediate" and facts.reading.kind == "reward":
        yield Finding(
            "credit",
            "warning",
            "a token pays for its own KL and not for the KL of the tokens that it leads to",
            "sum the KL of each token and of all that follow",
            "02_gradients#thm-sequence-kl-gradient",
        )


def _of_divisor(facts: Facts) -> Iterator[Finding]:
    found, identity = facts.invariants, facts.identity
    if not found.linear_in_beta:
        if facts.reading.kind == "reward":
            yield Finding(
                "inside-the-std",
                "warning",
                "the spread of the group divides the KL: where all answers are equally good, only "
                "the KL is left, at a strength that no coefficient sets",
                "subtract the KL after the rewards were divided by their spread, or do not divide",
                "08_reward_side#thm-orders",
            )
        else:
            yield Finding(
                "beta-not-linear",
                "warning",
                "twice the coefficient is not twice the KL",
                "multiply the KL by the coefficient outside of clips and divisions",
                "08_reward_side#thm-conversion",
            )
    if not identity.has_gradient or found.reads_padding or found.depends_on_order:
        return
    if found.depends_on_width:
        yield Finding(
            "padding-width",
            "warning",
            f"more padding changes the {found.depends_on_width}: it is divided by the width of the tensor",
            "divide by the number of counted tokens, or by the longest completion allowed",
            "09_advantages#prop-token-mean",
        )
    if abs(found.doubled - 2) < 1e-3 and facts.reading.shape == "number":
        yield Finding(
            "sum-over-batch",
            "warning",
            "the KL is a sum over the batch: with twice the answers it is twice as strong",
            "divide by the number of answers, or of counted tokens",
            "09_advantages#prop-token-mean",
        )
    elif abs(found.doubled - 1) > 1e-3 and facts.reading.kind == "loss":
        yield Finding(
            "divisor",
            "error",
            f"the divisor is none of the aggregations: of a batch twice as large the KL is "
            f"{found.doubled:.3g} times as strong",
            "divide once, by the number of counted tokens",
            "09_advantages#prop-token-mean",
        )
    elif not identity.weights_known:
        yield Finding(
            "divisor",
            "warning",
            "the weights of the tokens are those of no aggregation",
            "divide by the number of counted tokens of the batch, or of each answer",
            "09_advantages#thm-completion-weight",
        )


def _of_numerics(facts: Facts) -> Iterator[Finding]:
    n = facts.numerics
    edges = [abs(edge) for edge in (n.dead_below, n.dead_above) if not math.isnan(edge)]
    if edges and facts.identity.has_gradient:
        sides = []
        if not math.isnan(n.dead_below):
            sides.append(f"below {n.dead_below:.3g}")
        if not math.isnan(n.dead_above):
            sides.append(f"above {n.dead_above:.3g}")
        yield Finding(
            "dead-zone",
            "warning" if min(edges) < _MET else "note",
            f"no gradient at log-ratios to the reference {' and '.join(sides)} nats",
            "clamp the log-ratio beyond what training meets, not the value; or clamp nothing",
            "11_numerics#prop-dead-zones",
        )
    if n.stale_overflow == "NaN":
        yield Finding(
            "overflow",
            "note",
            "a ratio to the sampler that overflows makes the loss or its gradient NaN",
            "bound the log-ratio before the exponential, and select with torch.where before it",
            None,
        )


def _of_policy(facts: Facts) -> Iterator[Finding]:
    policy = facts.policy
    if policy is None:
        return
    if not policy.has_gradient:
        yield Finding(
            "policy-no-gradient",
            "error",
            "the advantages have no gradient: only the KL moves the weights",
            "let the gradient through the ratio: exp(logp - old_logp), with logp not detached",
            None,
        )
        return
    if policy.reads_other_advantages:
        yield Finding(
            "policy-axis",
            "error",
            "an answer reads the advantages of other answers",
            "give one advantage an answer its own axis: advantages.unsqueeze(-1)",
            None,
        )
    if policy.kind == "ratio to the reference":
        yield Finding(
            "policy-ratio",
            "error",
            "the policy's ratio is to the reference, not to the sampler",
            "divide by the log-probs of the policy that sampled",
            "02_gradients#thm-off-policy-weights",
        )
    wrong = policy.scale < 0 if policy.kind else policy.right_signs < 0.05
    if wrong:
        yield Finding(
            "policy-sign",
            "error",
            "the policy's gradient has the sign of minus the advantage: the reward is minimised",
            "minimise minus the objective",
            None,
        )
    yield from _of_clip(policy)
    kl = facts.identity.aggregation
    if policy.kind and kl and policy.aggregation and kl != policy.aggregation:
        yield Finding(
            "aggregations-differ",
            "warning",
            f"the KL is aggregated by {kl} and the policy loss by {policy.aggregation}: the "
            "coefficient depends on the lengths",
            "aggregate both alike",
            "09_advantages#prop-token-mean",
        )


def _of_clip(policy: PolicyPart) -> Iterator[Finding]:
    if policy.clips is None:
        return
    wrong = []
    if policy.clips["positive"][0] > 0:
        wrong.append("a positive advantage is clipped below")
    if policy.clips["negative"][1] < 1.9:
        wrong.append("a negative advantage is clipped above")
    if wrong:
        yield Finding(
            "policy-clip",
            "error",
            f"{' and '.join(wrong)}: a token that moved the wrong way is not brought back",
            "take the minimum of the free and the clipped product, both times the advantage",
            "06_sequences#thm-ppo-clip",
        )


#: What is a divergence with the right minimum, and not the one that is asked for.
_OTHERS = ("E[k2]", "half chi-square", "half chi-square of the reference", "total variation")


def _of_expectation(facts: Facts) -> Iterator[Finding]:
    identity, at_state = facts.identity, facts.at_state
    if not identity.has_gradient or not facts.invariants.reads_reference:
        return
    mixed_up = identity.fault or identity.twice or facts.invariants.reads_constant_logit
    if not facts.invariants.zero_at_reference and not mixed_up and at_state.name != NOTHING:
        yield Finding(
            "not-zero-at-reference",
            "error",
            "where policy and reference agree it still pushes",
            "give both the same temperature, mask and tokens",
            None,
        )
    elif at_state.name == NEITHER and not _explained(facts):
        yield Finding(
            "no-known-divergence",
            "error",
            "its expected gradient is that of no known divergence",
            "use k2 as a loss, or k1 in the reward",
            _GRADIENTS,
        )
    elif at_state.name in _OTHERS and identity.fault not in ("exchanged", "absolute"):
        yield Finding(
            "another-divergence",
            "warning",
            f"on fresh samples it descends {at_state.said}, which is no KL",
            "k2: without weight, or with a detached one; k3: with a live ratio",
            "14_frameworks#prop-live-ratio",
        )
    elif at_state.name == "forward KL":
        shows = identity.match.term.value if identity.match else None
        yield Finding(
            "forward-kl",
            "note",
            "on fresh samples it descends the forward KL" + (f" while it shows {shows}" if shows else ""),
            "for the reverse KL use k2, or k3 with a live ratio",
            _GRADIENTS,
        )


def _explained(facts: Facts) -> bool:
    """Whether another finding says already why nothing known is descended."""
    identity, found = facts.identity, facts.invariants
    mixed_up = identity.fault or identity.twice or found.reads_constant_logit or found.reads_padding
    of_price = identity.match is not None and identity.match.term.placement == "reward"
    return bool(
        mixed_up or of_price or identity.only_near or not found.linear_in_beta or _clamped(facts)
    )


def _clamped(facts: Facts) -> bool:
    return not (math.isnan(facts.numerics.dead_below) and math.isnan(facts.numerics.dead_above))


def _notes(facts: Facts) -> Iterator[Finding]:
    found = facts.invariants
    foreign = facts.reading.foreign
    if "advantages" in foreign.roles and foreign.layout.advantages == "token":
        yield Finding(
            "advantages-by-token",
            "note",
            "it takes advantages [B, T]: one an answer, [B], is refused, or broadcast along the "
            "tokens where there are as many tokens as answers",
            "expand one advantage an answer to its tokens before, or unsqueeze it inside",
        )
    if found.poisoned_by:
        yield Finding(
            "poisoned-padding",
            "note",
            f"{found.poisoned_by} at a masked position reaches the loss",
            "select with torch.where before any arithmetic: zero times NaN is NaN",
        )
    if found.needs_mask:
        yield Finding(
            "no-mask",
            "note",
            "it returns one number and takes no mask: padding cannot be left out",
            "take a mask, or give it counted tokens only",
        )
    stale = facts.expected["stale"]["state"]
    if facts.reading.kind == "loss" and facts.at_state.name not in (NOTHING, NEITHER):
        if stale.name != facts.at_state.name:
            yield Finding(
                "stale",
                "note",
                f"on stale samples it descends {stale.said}",
                "weigh k2 with a detached ratio, or k1 and k3 with a live one",
                "02_gradients#thm-off-policy-weights",
            )
    if found.depends_on_cut:
        yield Finding(
            "micro-batches",
            "note",
            "the mean over micro-batches is not that of the batch",
            "divide by the tokens of the whole batch",
            "09_advantages#prop-token-mean",
        )
    if found.leaks:
        yield Finding(
            "gradient-into-constants",
            "note",
            f"a gradient reaches {', '.join(sorted(found.leaks))} where these have a graph",
            "detach what is constant",
        )
    if facts.numerics.overflow:
        yield Finding(
            "overflow-far",
            "note",
            f"a log-ratio of 100 nats is {facts.numerics.overflow} in float32",
            "bound the log-ratio before the exponential",
            None,
        )
    worst = facts.numerics.digits.get(("float32", 1e-6))
    if worst is not None and worst > 0.01:
        yield Finding(
            "digits",
            "note",
            f"in float32 its value is off by {worst:.0%} at a KL of 1e-6",
            "write k3 with expm1",
            "11_numerics#thm-k3-positive",
        )
