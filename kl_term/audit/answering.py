"""Answer a request: load the function, audit it, compare it with what is expected."""

from __future__ import annotations

from kl_term.audit.auditing import audit
from kl_term.audit.loading import load
from kl_term.audit.report import Audit
from kl_term.audit.request import Answer, Request


def answer(request: Request) -> Answer:
    """Load the function, audit it, compare it with what is expected."""
    found = audited(request)
    return Answer(
        text=str(found),
        report=found.to_dict(),
        page=page_of(found),
        failed=tuple(failures(found, request)),
    )


def audited(request: Request) -> Audit:
    """The audit of the function that a request names."""
    return audit(
        load(request.target),
        names=request.names,
        beta_name=request.beta_name,
        beta=request.beta,
        factory=request.factory,
        kind=request.kind,
    )


def failures(found: Audit, request: Request) -> list[str]:
    """Expectations that do not hold, and findings that are not allowed, a line each."""
    lines = []
    where = "at a state" if request.level == "state" else "over whole answers"
    for samples in {request.samples: 0, "stale": 0} if request.stale_too else (request.samples,):
        name = found.minimises[samples][request.level]
        if request.expect is not None and name != request.expect:
            lines.append(f"minimises {name} on {samples} samples {where}, not {request.expect}")
    term = found.term.name if found.term else "none"
    if request.term is not None and term != request.term:
        lines.append(f"is {term}, not {request.term}")
    if request.aggregation is not None and found.aggregation != request.aggregation:
        lines.append(f"is aggregated by {found.aggregation}, not {request.aggregation}")
    lines += [
        f"{f.severity} {f.code}: {f.says}"
        for f in found.findings
        if {f.code, f.severity} & {*request.fail_on}
    ]
    return lines


def page_of(found: Audit) -> str:
    """One HTML file."""
    style = (
        "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;line-height:1.5}"
        "table{border-collapse:collapse;margin:1rem 0}td{border:1px solid #ccc;padding:.3rem .6rem}"
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>Audit of a loss</title><style>{style}</style></head><body>"
        f"<h1>Audit of a loss</h1>{found._repr_html_()}</body></html>\n"
    )
