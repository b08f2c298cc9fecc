"""A diagnosis as frames for a notebook, as lines for a terminal, and as one HTML file."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from analysis.diagnosis.reports import NEVER_MEASURED
from analysis.diagnosis.schema import Finding, Report, Rollouts
from analysis.report.numbers import format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}}
img{{max-width:100%;height:auto}}table{{border-collapse:collapse;margin:1rem 0}}
td,th{{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #ddd}}
.error{{border-left:.4rem solid #A13405}}.warning{{border-left:.4rem solid #AA9112}}
.note{{border-left:.4rem solid #226BCB}}section{{padding-left:1rem;margin:1.2rem 0}}
h3{{margin:0}}.table{{overflow-x:auto}}
</style></head><body>
{body}
</body></html>
"""


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
    text += [f"ignored column {name!r}{_nearest(near)}" for name, near in _ignored(report)]
    for rank, finding in enumerate(report.findings, start=1):
        shown = "; ".join(f"{name} {_number(value)}" for name, value in finding.evidence.items())
        text += [
            f"{rank}. {finding.severity} {finding.code}: {finding.title}",
            f"   {shown}",
            f"   {finding.advice}",
            f"   explained in {chapter(finding)}",
        ]
    if not report.findings:
        text.append("nothing found")
    absent = [name for name in report.not_measured if name not in NEVER_MEASURED]
    if absent:
        unchecked = "; ".join(f"{name} ({report.not_measured[name]})" for name in absent)
        text.append(f"not checked: {unchecked}")
    return "\n".join(text)


def chapter(finding: Finding) -> str:
    """Where a finding is explained: a chapter of the book, and a label on its page."""
    notebook, _, label = finding.chapter.partition("#")
    return f"notebooks/{notebook}.ipynb" + (f", {label}" if label else "")


def sequences_table(report: Report) -> pd.DataFrame:
    """The sequences with the largest share of the KL."""
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
    rows = {name.replace("_", " "): _number(value) for name, value in report.measurements.items()}
    for tail in report.tails:
        shown = tail.fitted_with if tail.k is None else f"{tail.k:.2f} ({tail.fitted_with})"
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
    from analysis.chapters import ch13_diagnose_run as figures  # needs matplotlib; lines do not

    parts = [f"<h1>Diagnosis of {escape(report.source)}</h1>"]
    parts.append(
        f"<p>{report.tokens:,} counted tokens of {report.rows:,} rows, "
        f"{report.sequences:,} sequences, {report.steps:,} steps. Nats per token.</p>"
    )
    parts += [
        f"<p>Ignored column <code>{escape(name)}</code>{escape(_nearest(near))}.</p>"
        for name, near in _ignored(report)
    ]
    parts.append("<h2>What to change, in order</h2>")
    parts.append(findings_html(report))
    parts += ["<h2>The KL</h2>", _image(figures.estimates(report), "KL by estimator")]
    parts += [
        _image(figures.log_ratios(rollouts), "Histogram of log-ratios"),
        _image(figures.where(report, rollouts), "KL by step and position"),
    ]
    gap = figures.gaps(report)
    if gap is not None:
        parts.append(_image(gap, "KL between sampler, old policy and policy"))
    if report.top_sequences:
        parts += ["<h2>Sequences that carry the KL</h2>", _table(sequences_table(report), False)]
    parts += ["<h2>Measured</h2>", _table(measurements_table(report), True)]
    missing = "".join(
        f"<li>{escape(name)}: {escape(why)}</li>" for name, why in report.not_measured.items()
    )
    parts.append(f"<h2>Not measured</h2><ul>{missing}</ul>")
    return _PAGE.format(title=escape(f"Diagnosis of {report.source}"), body="\n".join(parts))


def findings_html(report: Report, *, book: str | None = None) -> str:
    """Findings in order, each with its evidence, what to change and a link to the reason.

    ``book`` is the prefix of the pages of a built book; by default chapters are named.
    """
    sections = [_section(finding, book) for finding in report.findings]
    return "\n".join(sections) or "<p>Nothing found.</p>"


def _section(finding: Finding, book: str | None) -> str:
    shown = "".join(
        f"<li>{escape(name)}: {escape(_number(value))}</li>"
        for name, value in finding.evidence.items()
    )
    page, _, label = finding.chapter.partition("#")
    why = f"Explained in {escape(chapter(finding))}."
    if book is not None:
        place = f"{book}{page}.html{'#' + label if label else ''}"
        why = f'<a href="{escape(place)}">Why</a>'
    return (
        f'<section class="{escape(finding.severity)}"><h3>{escape(finding.title)}</h3>'
        f"<p>{escape(finding.severity)} <code>{escape(finding.code)}</code></p><ul>{shown}</ul>"
        f"<p>{escape(finding.advice)} {why}</p></section>"
    )


def _table(frame: pd.DataFrame, index: bool) -> str:
    return f'<div class="table">{frame.to_html(border=0, index=index)}</div>'


def _image(figure: Figure, alt: str) -> str:
    from analysis import style

    data = base64.b64encode(style.png(figure)).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def _number(value: float | int | str) -> str:
    if isinstance(value, float) and value != value:
        return "–"
    return format_value("value", value, "" if isinstance(value, int | str) else ".3g")


def _ignored(report: Report) -> list[tuple[str, str]]:
    return sorted(report.ignored_columns.items())


def _nearest(near: str) -> str:
    return f" (nearest known name: {near})" if near else ""
