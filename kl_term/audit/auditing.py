"""The whole audit of a function, in the order in which its parts are decided."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from kl_term.audit.arguments import name_of
from kl_term.audit.calling import one_line
from kl_term.audit.expectations import Expectations, expectations
from kl_term.audit.facts import Facts
from kl_term.audit.findings import ordered
from kl_term.audit.identity import identify
from kl_term.audit.invariants import invariants
from kl_term.audit.numbers import fixed_with
from kl_term.audit.numerics import numerics
from kl_term.audit.parts import said
from kl_term.audit.policy_part import NOWHERE, PolicyPart, policy_part
from kl_term.audit.readings import Kind, Reading, read
from kl_term.audit.report import Audit, Row, rows_of
from kl_term.audit.rules import findings_of
from kl_term.audit.supports import supports
from kl_term.audit.targets import NEITHER
from kl_term.audit.temperatures import (
    Tempered,
    compared,
    divides_logits,
    one_sided,
    temperatures_of,
)
from kl_term.audit.top_k import pushes_at_reference
from kl_term.audit.unnamed import is_divergence, size_of
from kl_term.errors import UserError
from kl_term.plain_checks import check_positive

#: Seconds after which the audit says what it is doing.
PATIENCE = 3.0


def audit(
    loss: Callable[..., Any],
    *,
    names: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
    beta_name: str | None = None,
    beta: float = 1.0,
    factory: bool = False,
    kind: Kind | None = None,
) -> Audit:
    """What a loss, or a function that shapes rewards, minimises, and what is wrong with it.

    Args:
        loss: any callable. It returns a number, tokens [B, T], answers [B], or a tuple or object
            with the loss first.
        names: argument -> role, one of :data:`kl_term.audit.arguments.ROLES`, where the spelling
            does not say it.
        given: argument -> value, passed as it is.
        beta_name: the argument that is the KL coefficient; with dots, inside one that is given.
        beta: the coefficient that was asked for, of a function that takes none.
        factory: the function makes the loss, given ``beta_name``.
        kind: ``loss`` or ``reward``, where rewards to rewards or advantages; None finds out.

    Raises:
        UserError: one line, where the function cannot be called or answers no two times alike.
    """
    check_positive("beta", beta)
    with torch.random.fork_rng(devices=[]), uncompiled():

        def at_one(values: Mapping[str, float]) -> Reading:
            fixed = fixed_with(reading.foreign, dict.fromkeys(values, 1.0))
            own = dict(given or {}) | {path.partition(".")[0]: None for path in values}
            own = {name: fixed[name] for name in own}
            return _read(loss, names, own, beta_name, beta, factory, kind)

        try:
            reading = _read(loss, names, given, beta_name, beta, factory, kind)
            tick = Progress()
            tempered = Tempered({})
            if values := divides_logits(reading):
                tempered = compared(reading, at_one(values), values)
                reading = at_one(values)
            facts = _measured(reading, tick)
            if not values and (values := _off_at_default(facts)):
                tempered, reading = Tempered(values), at_one(values)
                facts = _measured(reading, tick)
            facts = replace(facts, tempered=tempered)
        except UserError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            raise UserError(f"{name_of(loss)}: {one_line(error)}") from error
    return _result(facts)


def uncompiled() -> AbstractContextManager[object]:
    """What ``torch.compile`` has wrapped runs as it was written: compiling it once more for each
    type and shape takes minutes and changes no verdict."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


class Progress:
    """Says what is being done once the audit takes longer than a reader's patience."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, doing: str) -> None:
        if time.monotonic() - self._start > PATIENCE:
            print(f"audit: {doing} ...", file=sys.stderr, flush=True)


def _read(
    loss: Callable[..., Any],
    names: Mapping[str, str] | None,
    given: Mapping[str, Any] | None,
    beta_name: str | None,
    beta: float,
    factory: bool,
    kind: Kind | None,
) -> Reading:
    return read(
        loss,
        names=names,
        given=given,
        beta_name=beta_name,
        beta=beta,
        factory=factory,
        kind=kind,
    )


def _measured(reading: Reading, tick: Callable[[str], None]) -> Facts:
    tick("which term it is")
    identity = identify(reading)
    tick("what it must not do")
    found = invariants(reading)
    expected = expectations(reading, symmetric=not found.depends_on_order, tick=tick)
    tick("where it loses its gradient")
    numbers = numerics(reading)
    tick("its policy part")
    policy = policy_part(reading)
    unnamed = expected["fresh"]["state"].name == NEITHER and is_divergence(reading)
    return Facts(
        reading,
        identity,
        expected,
        found,
        numbers,
        policy,
        supports(reading),
        unnamed_divergence=unnamed,
        unnamed_size=size_of(reading) if unnamed else 1.0,
        top_k_pushes=pushes_at_reference(reading),
        one_sided=one_sided(reading) if found.zero_at_reference else (),
    )


def _off_at_default(facts: Facts) -> dict[str, float]:
    """The temperatures, not one, at which a loss with the right minimum is no known divergence."""
    if facts.at_state.name != NEITHER or not facts.invariants.zero_at_reference:
        return {}
    return temperatures_of(facts.reading.foreign)


def _result(facts: Facts) -> Audit:
    reading = facts.reading
    return Audit(
        name=reading.foreign.name,
        kind=reading.kind,
        guessed={str(n): str(r) for n, r in reading.foreign.plan.guessed.items()},
        term=facts.identity.term,
        aggregation=None if facts.invariants.reads_padding == "KL" else facts.identity.aggregation,
        scale=facts.scale,
        expected=facts.expected,
        policy=facts.policy,
        findings=ordered(findings_of(facts)),
        table=tuple(_table(facts, facts.expected)),
    )


def _table(facts: Facts, expected: Expectations) -> list[Row]:
    identity = facts.identity
    rows = [Row("term", identity.term.name if identity.term else "none of ours")]
    if facts.reading.foreign.by_logits and any(facts.reading.foreign.layout.prompted):
        rows.append(Row("logits", "predict the next token: one position before the answer"))
    if facts.reading.foreign.parts is not None:
        rows.append(Row("read as the loss", said(facts.reading.foreign.parts)))
    if identity.match and identity.term is None:
        near = ", near the reference" if identity.only_near else ""
        rows.append(Row(f"has the gradient of{near}", identity.match.name, identity.match.scale))
    if identity.value_of and identity.term is None:
        rows.append(
            Row("shows the value of", identity.value_of.name, identity.value_of.value_scale)
        )
    if identity.nearest:
        error = identity.nearest.error
        rows.append(Row("nearest term", f"{identity.nearest.name}, off by {error:.2g}", error))
    rows.append(Row("aggregation", identity.aggregation or "none of ours"))
    if facts.scale is not None:
        rows.append(Row("coefficient over the one asked for", f"{facts.scale:.6g}", facts.scale))
    return [*rows, *rows_of(expected), *_of_policy(facts.policy)]


def _clipped(below: float, above: float) -> str:
    """Where a clip leaves no gradient: ratios have no side below 0, nor above infinity."""
    if (below, above) == NOWHERE:
        return "no gradient at any ratio"
    sides = [f"below {below:.3g}"] if below > 0 else []
    sides += [f"above {above:.3g}"] if above < math.inf else []
    return f"no gradient at ratios {' and '.join(sides)}" if sides else "a gradient at every ratio"


def _of_policy(policy: PolicyPart | None) -> list[Row]:
    if policy is None or not policy.has_gradient:
        return []
    kind = policy.kind or "none of ours"
    rows = [Row("policy loss", f"{kind}, {policy.aggregation or 'no aggregation of ours'}")]
    for sign, (below, above) in (policy.clips or {}).items():
        rows.append(Row(f"{sign} advantage", _clipped(below, above)))
    if policy.ascends_reward is not None:
        answer = "that of the reward" if policy.ascends_reward else "not that of the reward"
        rows.append(Row("expected policy gradient over answers", answer))
    return rows
