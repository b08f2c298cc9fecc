"""Findings of what a loss minimises in expectation."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kl_term.audit.facts import GRADIENTS, Facts
from kl_term.audit.findings import Finding
from kl_term.audit.targets import NEITHER, NOTHING

#: What is a divergence with the right minimum, and not the one that is asked for.
_OTHERS = ("E[k2]", "half chi-square", "half chi-square of the reference", "total variation")


def of_expectation(facts: Facts) -> Iterator[Finding]:
    identity, at_state = facts.identity, facts.at_state
    yield from _of_top_k(facts)
    if not identity.has_gradient or not facts.invariants.reads_reference:
        return
    mixed_up = identity.fault or identity.twice or facts.invariants.reads_constant_logit
    if math.isnan(at_state.from_reverse):
        return
    if facts.one_sided:
        yield Finding(
            "not-zero-at-reference",
            "error",
            f"where {' or '.join(facts.one_sided)} is not one it pushes where policy and reference "
            "agree: one side alone is divided by it",
            "divide the logits of both by the same temperature",
            "08_reward_side#thm-other-reference",
        )
    if facts.tempered.kl_off and not facts.tempered.ratio_off:
        yield Finding(
            "not-zero-at-reference",
            "error",
            "at its default temperature it still pushes where policy and reference agree",
            "give both the same temperature, mask and tokens",
            None,
        )
    elif not facts.invariants.zero_at_reference and not mixed_up and at_state.name != NOTHING:
        yield Finding(
            "not-zero-at-reference",
            "error",
            "where policy and reference agree it still pushes",
            "give both the same temperature, mask and tokens",
            None,
        )
    elif at_state.name == NEITHER and not _explained(facts) and facts.reading.kind == "reward":
        yield Finding(
            "estimator-in-reward",
            "error",
            "what the reward pays for a token's KL has the gradient of no known divergence: only "
            "k1 has that of the reverse KL there",
            "subtract the log-ratio itself (k1)",
            "05_fixed_points#thm-k3-plain-flow",
        )
    elif at_state.name == NEITHER and not _explained(facts) and facts.unnamed_divergence:
        yield Finding(
            "another-divergence",
            "note",
            "what it descends has no name here; it is least where policy and reference agree, and "
            "rises on the ways that were tried from there",
            "for a KL sum p log(p / q) over the vocabulary",
            GRADIENTS,
        )
    elif at_state.name == NEITHER and not _explained(facts):
        yield Finding(
            "no-known-divergence",
            "error",
            "its expected gradient is that of no known divergence",
            "use k2 as a loss, or k1 in the reward",
            GRADIENTS,
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
            "on fresh samples it descends the forward KL"
            + (f" while it shows {shows}" if shows else ""),
            "for the reverse KL use k2, or k3 with a live ratio",
            GRADIENTS,
        )


def _of_top_k(facts: Facts) -> Iterator[Finding]:
    """Without a correction a sum over some tokens is least elsewhere than at the reference."""
    if not facts.top_k_pushes or not facts.invariants.zero_at_reference:
        return
    if facts.at_state.name == "forward KL":
        yield Finding(
            "not-zero-at-reference",
            "note",
            "given some of the reference's tokens alone it is least where these have all the mass",
            "add the mass of both policies on these tokens, or one class for all others",
            None,
        )
        return
    yield Finding(
        "no-known-divergence",
        "error",
        "given some of the reference's tokens alone it is no divergence: it is not least where "
        "policy and reference agree, and mass flees from these tokens",
        "add the mass of the reference and subtract that of the policy on these tokens, or add one "
        "class for all others",
        None,
    )


def _explained(facts: Facts) -> bool:
    """Whether another finding says already why nothing known is descended."""
    identity, found = facts.identity, facts.invariants
    of_price = identity.match is not None and identity.match.term.placement == "reward"
    reasons = (
        identity.fault,
        identity.twice,
        identity.only_near,
        found.reads_constant_logit,
        found.reads_padding,
        found.shifted,
        found.reads_others,
        found.moves_with_advantage,
        not found.linear_in_beta,
        math.isnan(facts.at_state.from_reverse),
        of_price,
        _clamped(facts),
    )
    return any(map(bool, reasons))


def _clamped(facts: Facts) -> bool:
    return not (math.isnan(facts.numerics.dead_below) and math.isnan(facts.numerics.dead_above))
