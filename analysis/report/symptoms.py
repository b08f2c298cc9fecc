"""The page "What your log shows": symptoms, what each can be, and the line to change.

``book/symptoms.yaml`` has the symptoms with the codes of their causes, most likely first. What a
cause is called, what to do about it and where it is proved is read from the diagnosis and from the
audit; a row of the file says it only where no finding does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from pydantic import Field, ValidationError

from analysis.report.audit_findings import HOLE, all_findings
from analysis.report.diagnosis_quality import evidence_of
from analysis.report.generated import render, section_link, texts_of
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from kl_term.audit.findings import Finding
from kl_term.diagnosis.causes import CAUSES, Text
from kl_term.diagnosis.trainers import LINES, lines_of
from kl_term.errors import UserError, first_problem
from kl_term.schema import Schema

FILE = "symptoms.yaml"
#: The trainers of which each row of settings says the line, or that there is none.
TRAINERS = ("TRL", "verl", "OpenRLHF")
_AUDIT = "audit:"
#: What the labels of boxes and figures begin with; others are headings.
_LABELLED = ("thm-", "prop-", "lem-", "cor-", "def-", "rem-", "fig-", "sec-")


class OwnCause(Schema):
    """What no finding names."""

    title: str
    says: str
    tells: str  #: the line that tells it apart
    why: str  #: page, or page#label


class Symptom(Schema):
    """What a log shows."""

    title: str
    says: str  #: what to know first
    terms: list[str] = Field(min_length=1)  #: what a reader types into the search
    chinese: list[str] = Field(min_length=1)  #: the same in Chinese
    asked: dict[str, str]  #: address of a public thread, and what it asked
    causes: list[str] = Field(min_length=1)  #: codes, most likely first


class Symptoms(Schema):
    """The whole file."""

    words: dict[str, str]  #: what fills the holes of the findings, by name or by code
    causes: dict[str, OwnCause]
    settings: dict[str, dict[str, str]]  #: cause -> trainer -> line
    symptoms: dict[str, Symptom]


class Shown(NamedTuple):
    """A cause as a symptom shows it."""

    title: str
    says: str
    tells: str
    why: str | None
    settings: dict[str, str]


def load_symptoms(project: Project) -> Symptoms:
    """The symptoms, checked.

    Raises:
        UserError: a cause, a case or a trainer that does not exist, or a row that nothing shows; a
            line each.
    """
    label = f"book/{FILE}"
    try:
        loaded = Symptoms.model_validate(load_yaml(project.book / FILE, label))
    except ValidationError as error:
        raise UserError(f"{label}: {first_problem(error)}") from None
    if problems := [f"{label}: {problem}" for problem in _problems(loaded)]:
        raise UserError("\n".join(problems))
    return loaded


def symptoms_page(project: Project, translate: Callable[[str], str] = str) -> str:
    """The page as MyST text, in the words that ``translate`` gives."""
    loaded = load_symptoms(project)
    shown = {
        name: [shown_cause(loaded, cause) for cause in symptom.causes]
        for name, symptom in loaded.symptoms.items()
    }
    return render(
        "symptoms.md",
        _=translate,
        symptoms=loaded.symptoms,
        causes=shown,
        thread=thread_name,
        reason=reason,
    )


def translatable(project: Project) -> Iterator[str]:
    """The texts of the page that are translated, in English, those of a symptom together."""
    loaded = load_symptoms(project)
    yield from texts_of("symptoms.md")
    for symptom in loaded.symptoms.values():
        yield from (symptom.title, symptom.says)
        for cause in (shown_cause(loaded, code) for code in symptom.causes):
            yield from (cause.title, cause.says, cause.tells, *cause.settings.values())
        yield from symptom.asked.values()


def index_terms(project: Project, *, chinese: bool = False) -> dict[str, list[str]]:
    """What a reader types into the search, by the place on the page that answers it."""
    return {
        f"_generated/symptoms#{anchor(name)}": s.terms + s.chinese * chinese
        for name, s in load_symptoms(project).symptoms.items()
    }


def anchor(name: str) -> str:
    """The label of a symptom's section."""
    return f"log-{name}"


def thread_name(address: str) -> str:
    """``https://github.com/huggingface/trl/issues/2703`` as ``huggingface/trl #2703``."""
    *_, owner, repository, _, number = address.split("/")
    return f"{owner}/{repository} #{number}"


def reason(section: str) -> str:
    """A link to where a cause is explained: a box, an exercise, a figure, or a heading."""
    page, _, label = section.partition("#")
    if label.startswith("ex-"):
        return f"{{ref}}`{label}`"
    if label and not label.startswith(_LABELLED):
        return f"[chapter {int(page[:2])}](../_run/{page}.ipynb#{label})"
    return section_link(section)


def shown_cause(loaded: Symptoms, name: str) -> Shown:
    """A cause, from the finding that names it or from the file."""
    code, case = split(name)
    settings = loaded.settings.get(code) or lines_of(code, case)
    if (own := loaded.causes.get(code)) is not None:
        return Shown(own.title, own.says, own.tells, own.why, settings)
    if code.startswith(_AUDIT):
        finding = _audited()[code]
        said, advised = (
            _sentence(text.replace(HOLE, loaded.words.get(code, HOLE)))
            for text in (finding.says, finding.advice)
        )
        tells = f"`kl-term audit`: `{finding.code}`"
        return Shown(said.rstrip("."), advised, tells, finding.theorem, settings)
    cause = next(cause for cause in CAUSES if cause.code == code)
    evidence = evidence_of(cause)
    tells = f"`kl-term diagnose`: `{code}`" + (f", by {evidence[0]}" if evidence else "")
    title = _said(cause.title, case).format_map(loaded.words)
    return Shown(title, _said(cause.advice, case), tells, cause.chapter, settings)


def split(name: str) -> tuple[str, str]:
    """The code of a cause and its case: ``negative-kl exchanged``."""
    code, _, case = name.partition(" ")
    return code, case


def _said(text: Text, case: str) -> str:
    if isinstance(text, str):
        return text
    return text[case] if case else next(iter(text.values()))


@cache
def _audited() -> dict[str, Finding]:
    """The findings of the audit by code; the first of a code is its worst."""
    return {_AUDIT + finding.code: finding for finding in reversed(all_findings())}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _problems(loaded: Symptoms) -> Iterator[str]:
    diagnosed = {cause.code: cause for cause in CAUSES}
    known = {*loaded.causes, *diagnosed, *_audited()}
    used = set()
    for name, symptom in loaded.symptoms.items():
        for code, case in map(split, symptom.causes):
            used.add(code)
            if code not in known:
                yield f"{name}: no finding and no row {code!r}"
            elif case and not _has_case(diagnosed.get(code), case):
                yield f"{name}: {code} has no case {case!r}"
        for address in symptom.asked:
            if not address.startswith("https://"):
                yield f"{name}: {address} is no address"
    for code, lines in loaded.settings.items():
        if code not in used:
            yield f"settings: {code}: no symptom names it"
        if code in {split(name)[0] for name in LINES}:
            yield f"settings: {code}: the diagnosis says its lines"
        if set(lines) != set(TRAINERS):
            yield f"settings: {code}: give a line for each of {', '.join(TRAINERS)}, or say none"
    for code in sorted(set(diagnosed) - used):
        yield f"no symptom leads to the finding {code}"
    for code in sorted(set(loaded.causes) - used):
        yield f"causes: {code}: no symptom names it"


def _has_case(cause: object, case: str) -> bool:
    texts = (getattr(cause, "title", ""), getattr(cause, "advice", ""))
    return any(not isinstance(text, str) and case in text for text in texts)
