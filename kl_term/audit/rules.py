"""From what was measured of a loss to findings: what is wrong, what to change, and why."""

from __future__ import annotations

from collections.abc import Iterator

from kl_term.audit.expectation_rules import of_expectation
from kl_term.audit.facts import Facts
from kl_term.audit.findings import Finding
from kl_term.audit.number_rules import notes, of_numerics
from kl_term.audit.policy_rules import of_policy
from kl_term.audit.structure_rules import of_call, of_divisor, of_structure
from kl_term.audit.term_rules import of_term


def findings_of(facts: Facts) -> Iterator[Finding]:
    """All findings; the caller sorts them by severity, and keeps this order within one."""
    yield from of_call(facts)
    yield from of_structure(facts)
    yield from of_term(facts)
    yield from of_divisor(facts)
    yield from of_numerics(facts)
    yield from of_policy(facts)
    yield from of_expectation(facts)
    yield from notes(facts)
