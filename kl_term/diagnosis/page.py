"""A diagnosis as frames for a notebook, as lines for a terminal, and as one HTML file."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_term.diagnosis.reports import NEVER_MEASURED
from kl_term.diagnosis.schema import Finding, Report, Rollouts
from kl_term.numbers import format_value

if TYPE_CHECKING:
    import pandas as pd


def lines(report: Report) -> str:
    """The report for a terminal: the KL, then what to change, in order."""
    logged = [e for e in report.estimates if e.samples == "logged" and e.estimator in ("k1", "k3")]
    text = [
        f"{report.source}: {report.tokens:,} tokens of {report.sequences:,} sequences",
        *(
            f"KL by {e.estimator}: {_number(e.interval.value)} nats per token "
            f"[{_number(e.interval.low)}, {_number(e.interval.high)}]"
            for e in logged
        ),
    ]
    ignored = sorted(report.ignored_columns.items())
    text += [f"ignored column {name!r}{_nearest(near)}" for name, near in ignored]
    for rank, finding in enumerate(report.findings, start=1):
        shown = "; ".join(f"{name} {_number(value)}" for name, value in finding.evidence.items())
        text += [
            f"{rank}. {finding.severity} {finding.code}: {finding.title}",
            f"   {shown}",
            f"   {finding.advice}",
            *_settings(finding),
            f"   explained in {chapter(finding)}",
        ]
    if not report.findings:
        text.append("nothing found")
    absent = [name for name in report.not_measured if name not in NEVER_MEASURED]
    if absent:
        unchecked = "; ".join(f"{name} ({report.not_measured[name]})" for name in absent)
        text.append(f"not checked: {unchecked}")
    return "\n".join(text)


def _settings(finding: Finding) -> list[str]:
    """The lines of settings that change it, on one line, if there are any."""
    told = (f"{trainer}: {line.replace('`', '')}" for trainer, line in finding.settings.items())
    text = "; ".join(told)
    return [f"   in {text}"] if text else []


def chapter(finding: Finding) -> str:
    """Where a finding is explained: a chapter of the book, and a label on its page."""
    notebook, _, label = finding.chapter.partition("#")
    return f"notebooks/{notebook}.ipynb" + (f", {label}" if label else "")


def sequences_table(report: Report) -> pd.DataFrame:
    """The sequences with the largest share of the KL."""
    import pandas as pd  # tables need it; lines do not

    return pd.DataFrame(
        {
            "sequence": s.sequence,
            "tokens": str(s.tokens),
            "summed k3 (nats)": _number(s.kl_sum),
            "share": format_value("share", s.share, ".1%"),
        }
        for s in report.top_sequences
    )


def measurements_table(report: Report) -> pd.DataFrame:
    """Everything else that was measured."""
    import pandas as pd

    rows = {name.replace("_", " "): _number(value) for name, value in report.measurements.items()}
    for tail in report.tails:
        shown = tail.unfitted if tail.k is None else f"{tail.k:.2f}"
        rows[f"tail index of {tail.ratio}, trusted to {tail.threshold:.2f}"] = shown
    intervals = {name.replace("_", " "): interval for name, interval in report.intervals.items()}
    intervals |= {f"mean of {identity.ratio}": identity.mean for identity in report.identities}
    rows |= {
        name: f"{_number(found.value)} [{_number(found.low)}, {_number(found.high)}]"
        for name, found in intervals.items()
    }
    return pd.DataFrame({"measured": rows.keys(), "value": rows.values()}).set_index("measured")


def html_page(report: Report, rollouts: Rollouts) -> str:
    """The whole diagnosis as one file without outside references."""
    from kl_term import style  # which needs matplotlib, as the figures do; lines do not
    from kl_term.diagnosis import figures

    return _render(
        "diagnosis.html",
        **_of_findings(report, None),
        report=report,
        rollouts=rollouts,
        figures=figures,
        png=lambda figure: base64.b64encode(style.png(figure)).decode(),
        nearest=_nearest,
        sequences=sequences_table(report),
        measurements=measurements_table(report),
    )


def findings_html(report: Report, *, book: str | None = None) -> str:
    """Findings in order, each with its evidence, what to change and a link to the reason.

    ``book`` is the prefix of the pages of a built book; by default chapters are named.
    """
    return _render("findings.html", **_of_findings(report, book))


def _render(name: str, **values: Any) -> str:
    from kl_term.templates import environment  # which needs jinja2; lines do not

    return environment(Path(__file__).with_name("templates")).get_template(name).render(values)


def _of_findings(report: Report, book: str | None) -> dict[str, Any]:
    return {"findings": report.findings, "book": book, "number": _number, "chapter": chapter}


def _number(value: float | int | str) -> str:
    if isinstance(value, float) and value != value:
        return "–"
    return format_value("value", value, "" if isinstance(value, int | str) else ".3g")


def _nearest(near: str) -> str:
    return f" (nearest known name: {near})" if near else ""
