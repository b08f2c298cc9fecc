"""What a log shows: every cause is reachable, and what a row names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from analysis.report.audit_findings import all_findings
from analysis.report.index_terms import all_terms
from analysis.report.project import Project
from analysis.report.prose import typed_numbers
from analysis.report.symptoms import (
    FILE,
    TRAINERS,
    index_terms,
    load_symptoms,
    reason,
    shown_cause,
    split,
    symptoms_page,
    thread_name,
)
from kl_term.diagnosis.causes import CAUSES
from kl_term.errors import UserError
from tests.released import source_of

BOOK = Project(Path(__file__).parents[2])
SYMPTOMS = load_symptoms(BOOK)
#: Every cause of every symptom.
ROWS = [(name, cause) for name, each in SYMPTOMS.symptoms.items() for cause in each.causes]


def test_every_finding_of_the_diagnosis_is_reached_from_a_symptom() -> None:
    reached = {split(cause)[0] for _, cause in ROWS}
    assert {cause.code for cause in CAUSES} <= reached
    assert len(SYMPTOMS.symptoms) >= 14


def test_every_case_of_a_finding_that_says_another_thing_is_reached() -> None:
    reached = {cause for _, cause in ROWS}
    whole = {cause for cause in reached if " " not in cause}
    for cause in CAUSES:
        for case in {} if isinstance(cause.title, str) else cause.title:
            assert f"{cause.code} {case}" in reached or cause.code in whole, (cause.code, case)


@pytest.fixture(scope="module")
def anchors() -> set[str]:
    """The labels and the headings of all chapters."""
    found = set()
    for path in BOOK.notebooks.glob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            found.add(cell["metadata"].get("mystnb", {}).get("figure", {}).get("name"))
            found |= set(re.findall(r"^:label: (\S+)$", text, re.MULTILINE))
            found |= set(re.findall(r"^\((sec-\S+)\)=$", text, re.MULTILINE))
            sections = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
            found |= {re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in sections}
    return found


@pytest.mark.parametrize(("symptom", "cause"), ROWS)
def test_what_a_row_names_exists(symptom: str, cause: str, anchors: set[str]) -> None:
    shown = shown_cause(SYMPTOMS, cause)
    assert shown.title and shown.says and "{" not in shown.title
    assert re.search(
        "check_run|kl-term|config|log|length|score|KL falls|wrong answers", shown.tells
    )
    if shown.why is not None:
        page, _, label = shown.why.partition("#")
        assert page == "answer" or (BOOK.notebooks / f"{page}.ipynb").is_file()
        assert not label or label in anchors
        assert "{eq}" not in reason(shown.why)
    audited = {finding.code for finding in all_findings()}
    for code in re.findall(r"`kl-term audit`: `([\w-]+)`", shown.tells):
        assert code in audited
    for code in re.findall(r"`kl-term diagnose`: `([\w-]+)`", shown.tells):
        assert code in {found.code for found in CAUSES}


def test_what_check_run_prints_is_what_rows_read() -> None:
    source = (BOOK.library / "diagnosis/check_run.py").read_text(encoding="utf-8")
    for cause in SYMPTOMS.causes.values():
        if cause.tells.startswith("`check_run`"):
            for name in re.findall(r"`([^`]+)`", cause.tells)[1:]:
                known = {split(found)[0] for _, found in ROWS}
                assert name in source or name.startswith("kl-term") or name in known, name


def test_the_page_shows_each_symptom_with_its_causes() -> None:
    page = symptoms_page(BOOK)
    for name, symptom in SYMPTOMS.symptoms.items():
        assert f"(log-{name})=\n## {symptom.title}\n" in page
        section = page.partition(f"(log-{name})=")[2].partition("\n(log-")[0]
        assert len(re.findall(r"^\d+\. \*\*", section, re.MULTILINE)) == len(symptom.causes)
        assert all(f"({address})" in section for address in symptom.asked)
        assert len(symptom.causes) > 4 or "{dropdown}" not in section
    assert thread_name("https://github.com/huggingface/trl/issues/2703") == "huggingface/trl #2703"


def test_no_number_is_typed_in_its_prose() -> None:
    texts = [text for s in SYMPTOMS.symptoms.values() for text in (s.title, s.says)]
    texts += [text for c in SYMPTOMS.causes.values() for text in (c.title, c.says, c.tells)]
    texts += [what for s in SYMPTOMS.symptoms.values() for what in s.asked.values()]
    for text in texts:
        assert not list(typed_numbers(text, maths=False)), text
    assert list(typed_numbers("at 0.25 nats", maths=False))


def test_it_stands_behind_the_answer_and_the_guide() -> None:
    first = yaml.safe_load(BOOK.toc.read_text(encoding="utf-8"))["parts"][0]["chapters"]
    pages = [page["file"] for page in first[:3]]
    assert pages == ["book/answer", "book/_run/21_guide", "book/_generated/symptoms"]


def test_what_a_log_shows_stands_in_the_index() -> None:
    terms = all_terms(BOOK)
    assert "negative kl" in terms["_generated/symptoms#log-kl-negative"]
    assert "KL 为负" in all_terms(BOOK, chinese=True)["_generated/symptoms#log-kl-negative"]
    assert index_terms(BOOK).keys() <= terms.keys()


def broken(tmp_path: Path, change) -> str:
    data = yaml.safe_load((BOOK.book / FILE).read_text(encoding="utf-8"))
    change(data)
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / FILE).write_text(yaml.dump(data, allow_unicode=True))
    with pytest.raises(UserError) as refusal:
        load_symptoms(Project(tmp_path))
    return str(refusal.value)


def without(code: str):
    def change(data):
        for symptom in data["symptoms"].values():
            symptom["causes"] = [c for c in symptom["causes"] if split(c)[0] != code]
        data["settings"].pop(code, None)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("unseen-mass"), "no symptom leads to the finding unseen-mass"),
        (without("centred"), "causes: centred: no symptom names it"),
        (
            lambda data: data["symptoms"]["kl-zero"]["causes"].append("audit:none-such"),
            "kl-zero: no finding and no row 'audit:none-such'",
        ),
        (
            lambda data: data["symptoms"]["kl-zero"]["causes"].append("negative-kl so"),
            "kl-zero: negative-kl has no case 'so'",
        ),
        (lambda data: data["settings"]["weak"].pop("verl"), "settings: weak: give a line for each"),
        (
            lambda data: data["settings"].update(nothing=dict.fromkeys(TRAINERS, "none")),
            "settings: nothing: no symptom names it",
        ),
        (lambda data: data["symptoms"]["kl-zero"].update(asked={"a": "b"}), "a is no address"),
    ],
)
def test_what_is_refused(tmp_path: Path, change, said: str) -> None:
    assert said in broken(tmp_path, change)


def sources(package: str) -> str:
    root = source_of(package, package)
    kept = [*root.rglob("trainer/config/**/*.yaml"), *root.rglob("cli/train_ppo_ray.py")]
    kept += root.rglob("trainer/*config.py")
    return "\n".join(path.read_text(encoding="utf-8") for path in kept)


def named_settings(trainer: str) -> set[str]:
    lines = (row[trainer] for row in SYMPTOMS.settings.values())
    return {name for line in lines for name in re.findall(r"`([^`]+)`", line) if "/" not in name}


@pytest.mark.peers
def test_settings_are_those_of_trl() -> None:
    fields = sources("trl")
    for setting in named_settings("TRL") - {"peft_config"}:  # an argument of the trainer
        assert re.search(rf"^    {setting.split('=')[0]}: ", fields, re.MULTILINE), setting


@pytest.mark.peers
def test_settings_are_those_of_verl() -> None:
    config = source_of("verl", "verl/trainer/config/_generated_ppo_trainer.yaml")
    whole = yaml.safe_load(config.read_text())
    for setting in named_settings("verl"):
        at = whole
        for part in setting.split("=")[0].split("."):
            assert part in at, setting
            at = at[part]


@pytest.mark.peers
def test_settings_are_those_of_openrlhf() -> None:
    arguments = sources("openrlhf")
    for setting in named_settings("OpenRLHF"):
        assert f'"{setting.split()[0]}"' in arguments, setting
