"""The ledger and the errata as pages: one card an entry, its evidence linked.

Cards are MyST, so every link is checked when the book is built and the page reads without
scripts; ``book/_static/ledger.js`` only adds the filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from analysis.chapters.claims import VERDICTS, Decision, decisions
from analysis.errors import UserError
from analysis.report.ledger import Claim, Source, load_ledger, load_sources
from analysis.report.project import Project

_TEXTS = (
    "The ledger: every claim, decided",
    "Five widely read texts on GRPO make {total} checkable statements: definitions, theorems, "
    "numbers, experiences, methods. Each has a verdict here, the exact condition, the figure it "
    "rests on, and the code that recomputes it. `analysis claims` recomputes them all and fails on "
    "any disagreement; so does the build of this page.",
    "**holds**: true as worded. **holds if**: true in part, or under a condition the source does "
    "not state. **fails**: false as worded. **open**: needs training at a scale this book has not "
    "recorded.",
    "Filter by source, kind and verdict with the buttons above the first claim (they need "
    "JavaScript).",
    "In all: {summary}.",
)
_INTRODUCTION = """\
# {0}

{1}

{sources}

{2}

```{{div}} ledger-filters
{3}
```

{4}
"""
_WORDS = ("source", "implemented in", "recomputed by", "Measured:", "Will be decided by:")
_KINDS = ("definition", "theorem", "numeric", "empirical", "method")
_DESCRIBED = ("Source", "untitled", "which opens with", "by")
_PROOFS = ("thm-", "prop-", "lem-", "cor-", "def-", "rem-")


Translate = Callable[[str], str]


def page_of_ledger(project: Project, translate: Translate = str) -> str:
    """The ledger's page, in the words that ``translate`` gives."""
    claims, functions = load_ledger(project), decisions()
    if missing := [claim.id for claim in claims if claim.id not in functions]:
        raise UserError(f"book/claims.yaml: no function decides {', '.join(missing)}")
    return ledger_page(claims, load_sources(project), functions, translate)


def translatable(project: Project) -> Iterator[str]:
    """The texts of the page that are translated, in English: not the verdicts' conditions."""
    yield from (*_TEXTS, *_WORDS, *_KINDS, *_DESCRIBED, *VERDICTS)
    yield from (source.about for source in load_sources(project))
    yield from (claim.statement for claim in load_ledger(project))


def ledger_page(
    claims: list[Claim],
    sources: list[Source],
    functions: Mapping[str, Decision],
    translate: Translate = str,
) -> str:
    """The page as MyST text."""
    count = Counter(claim.verdict for claim in claims)
    summary = ", ".join(f"{count[one]} {translate(one)}" for one in VERDICTS if count[one])
    texts = (translate(text).format(total=len(claims), summary=summary) for text in _TEXTS)
    introduction = _INTRODUCTION.format(*texts, sources=source_list(sources, translate))
    cards = (_card(claim, functions[claim.id], translate) for claim in claims)
    return "\n".join([introduction, *cards])


def source_list(sources: list[Source], translate: Translate = str) -> str:
    """The sources judged, as a Markdown list."""
    return "\n".join(f"- {_described(source, translate)}" for source in sources)


def section_link(section: str) -> str:
    """A section ``page`` or ``page#label`` as the role that links it."""
    page, _, label = section.partition("#")
    if label.startswith(_PROOFS):
        return f"{{prf:ref}}`{label}`"
    if label.startswith("fig-"):
        return f"{{numref}}`{label}`"
    if label.startswith("sec-"):
        place = f"chapter {int(page[:2])}" if page[:2].isdigit() else page
        return f"{{ref}}`a section of {place} <{label}>`"
    if label:
        return f"equation {{eq}}`{label}`"
    return f"{{doc}}`/book/{'_run/' if page[:2].isdigit() else ''}{page}`"


def code(name: str) -> str:
    """A function by its bare name, linked to the reference."""
    return f"{{py:obj}}`~{name}`"


def _described(source: Source, translate: Translate) -> str:
    word, untitled, opens, by = map(translate, _DESCRIBED)
    parts = [
        f"({source.title_in_english})" if source.title_in_english else "",
        f"{opens} \u201c{source.opens}\u201d" if source.opens else "",
        f"{by} {source.authors}" if source.authors else "",
        source.date,
        f"{{cite}}`{source.cite}`" if source.cite else "",
    ]
    heading = source.heading.replace("Source", word, 1).replace("untitled", untitled, 1)
    named = ", ".join([f"**{heading}**", *filter(None, parts)])
    return f"{named}. {translate(source.about)}".replace("**, (", "** (")


def _card(claim: Claim, decision: Decision, translate: Translate) -> str:
    verdict = claim.verdict.replace(" ", "-")
    classes = f"claim claim-source-{claim.source.lower()} claim-{claim.kind} claim-{verdict}"
    function = f"{decision.__module__}.{decision.__qualname__}"
    source, implemented, recomputed, measured, decided = map(translate, _WORDS)
    evidence = [
        f"{source} {claim.source}, {claim.place}",
        translate(claim.kind),
        f"{implemented} {code(claim.implemented)}" if claim.implemented else "",
        f"{recomputed} {code(function)}",
        section_link(claim.section),
    ]
    lines = [
        f"({claim.id.lower()})=",
        f":::{{div}} {classes}",
        f"**{claim.id}** {translate(claim.statement)}",
        "",
        f"<span class='verdict verdict-{verdict}'>**{translate(claim.verdict)}**</span> "
        f"{translate(claim.condition)}",
        "",
        f"*{measured}* {claim.shown_figure}." if claim.shown_figure else "",
        f"*{decided}* {claim.experiment}" if claim.experiment else "",
        "",
        " · ".join(filter(None, evidence)),
        ":::",
        "",
    ]
    return "\n".join(lines)
