"""The result of an audit: verdict, findings, table, the JSON of the contract, a notebook cell."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from kl_term.audit.expectations import Expectations
from kl_term.audit.findings import Finding
from kl_term.audit.names import Level
from kl_term.audit.policy_part import PolicyPart
from kl_term.audit.targets import NEITHER, NOTHING, Minimised
from kl_term.kl.term import KLTerm


class Row(NamedTuple):
    """One line of the table."""

    question: str
    answer: str
    number: float | None = None


@dataclass(frozen=True)
class Audit:
    """What a loss is, what it minimises, and what is wrong with it."""

    name: str  #: of the function
    kind: str  #: ``loss`` or ``reward``
    guessed: dict[str, str]  #: argument -> role, where the spelling decided
    term: KLTerm | None
    aggregation: str | None
    scale: float | None  #: the coefficient found over the one asked for
    expected: Expectations
    policy: PolicyPart | None
    findings: tuple[Finding, ...]
    table: tuple[Row, ...]

    @property
    def minimises(self) -> dict[str, dict[str, str]]:
        """By samples (fresh, stale) and level (state, sequence)."""
        return self.expected.names

    @property
    def verdict(self) -> str:
        """In one sentence."""
        what = self.term.name if self.term else "no KL term of ours"
        how = f" under {self.aggregation}" if self.aggregation else ""
        fresh, stale = (self.expected[s]["state"] for s in ("fresh", "stale"))
        on_stale = "the same" if fresh == stale or fresh.said == stale.said else stale.said
        first = self.findings[0] if self.findings else None
        worst = f"; {first.severity}: {first.says}" if first and first.severity != "note" else ""
        return (
            f"{self.name} is {what}{how}; on fresh samples it minimises {fresh.said}, on stale "
            f"ones {on_stale}{worst}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The contract of the command."""
        return {
            "term": self.term.name if self.term else None,
            "aggregation": self.aggregation,
            "scale": _number(self.scale),
            "minimises": self.minimises,
            "findings": [finding._asdict() for finding in self.findings],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.guessed:
            pairs = (f"{name} is {role}" for name, role in self.guessed.items())
            lines.append(f"guessed: {', '.join(pairs)}")
        lines += [f"  {row.question}: {row.answer}" for row in self.table]
        for finding in self.findings:
            lines.append(f"{finding.severity} {finding.code}: {finding.says}")
            lines.append(
                f"   {finding.advice}" + (f" ({finding.theorem})" if finding.theorem else "")
            )
        return "\n".join(lines if self.findings else [*lines, "nothing found"])

    def _repr_html_(self) -> str:
        def cells(*texts: str) -> str:
            return "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in texts) + "</tr>"

        table = "".join(cells(row.question, row.answer) for row in self.table)
        found = "".join(
            cells(f.severity, f.code, f.says, f.advice, f.theorem or "") for f in self.findings
        )
        return (
            f"<p>{html.escape(self.verdict)}</p><table>{table}</table>"
            f"<table>{found or cells('nothing found')}</table>"
        )


def rows_of(expected: Expectations) -> list[Row]:
    """The expected gradients, by samples and level."""
    levels: dict[Level, str] = {"state": "a state", "sequence": "whole answers"}
    found = []
    for samples in ("fresh", "stale"):
        for level, words in levels.items():
            at = expected[samples][level]
            found.append(Row(f"minimises, {samples}, {words}", _said(at), _number(at.scale)))
        if expected.visited[samples]:
            found.append(Row(f"at the visited states, {samples}", str(expected.visited[samples])))
    return found


def _said(at: Minimised) -> str:
    if at.name == NEITHER:
        return f"neither ({at.from_reverse:.2g} from the reverse KL's gradient)"
    return at.said if at.name == NOTHING or "sampler" in at.name else f"{at.said}"


def _number(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    rounded = round(value, 9)
    return float(rounded)
