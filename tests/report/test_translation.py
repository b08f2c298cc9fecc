"""The edition in another language: nothing missing, nothing stale, nothing altered."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import yaml
from docutils import nodes
from docutils.utils import new_document
from sphinx_proof.nodes import proof_node

from analysis.report.edition import IN_ENGLISH, UNTRANSLATED, stage
from analysis.report.project import Project, find_project
from analysis.report.translation import (
    begin_proofs,
    catalogue_path,
    catalogues,
    load,
    pieces,
    problems,
    translated,
    update,
)
from kl_term.errors import UserError

PAGE = """\
---
orphan: true
---
# A title
(sec-label)=
## A heading, with $x^2$

A paragraph over
two lines with {eq}`kl_loss`.

| a | b |
|---|---|
| one | two |

$$
not = words
$$

```{prf:theorem} The name
:label: thm-one

Let it be. Then

$$ (label)
\\E = 0
$$
```

::::{grid} 1 2
:gutter: 3
:::{grid-item-card} Card title
- an item
- another
:::
::::

```{figure} a.png
:alt: What it shows
:name: fig-a

The caption.
```

```python
code = "no words"
```
"""
WORDS = [
    "# A title",
    "## A heading, with $x^2$",
    "A paragraph over two lines with {eq}`kl_loss`.",
    "| a | b | |---|---| | one | two |",
    "The name",
    "Let it be. Then",
    "Card title",
    "- an item - another",
    "What it shows",
    "The caption.",
]


@pytest.fixture(scope="module")
def book():
    return find_project(Path(__file__).parent)


def test_only_what_a_reader_reads_is_translated():
    assert pieces(PAGE) == WORDS
    assert translated(PAGE, lambda piece: piece) == PAGE
    upper = translated(PAGE, lambda piece: piece.upper())
    assert "WHAT IT SHOWS" in upper and ":name: fig-a" in upper and "not = words" in upper
    assert upper.count("\n") == PAGE.count("\n")


def test_the_pages_that_were_promised_are_translated_whole_and_none_is_stale(book):
    promised = {"answer", "index", "ledger", "menu", "00_start", "01_estimators", "02_gradients"}
    promised |= {
        "03_k3_counterexample",
        "04_grpo_ablation",
        "22_proxy_rewards",
        "symptoms",
        "trl",
        "verl",
        "audit",
        "explore",
        "13_diagnose_run",
        "14_frameworks",
        "21_guide",
    }
    assert promised <= set(catalogues(book))
    assert list(problems(book)) == []


SENTENCE = "By {eq}`kl_loss` it is 2.5 nats."


@pytest.fixture
def one_page(tmp_path):
    project = Project(tmp_path)
    project.book.mkdir()
    (project.book / "index.md").write_text(f"# First\n\n{SENTENCE}\n")
    update(project, "index")
    return project


def _translate(project, said):
    catalogue_path(project, "index").write_text(
        f'msgid "# First"\nmsgstr "# Eins"\n\nmsgid "{SENTENCE}"\nmsgstr "{said}"\n'
    )


def test_what_a_translation_lacks_or_alters_is_told(one_page):
    told = list(problems(one_page))
    assert len(told) == 2 and all("not translated" in line for line in told)
    _translate(one_page, "{eq}`kl_penalty` 2.5")
    (told,) = problems(one_page)
    assert "roles, formulas or links differ" in told
    _translate(one_page, "{eq}`kl_loss` 2.5 nat")
    assert list(problems(one_page)) == []


def test_a_number_that_the_source_has_not_is_told(one_page):
    _translate(one_page, "{eq}`kl_loss` 2.6 nat")
    (told,) = problems(one_page)
    assert "numbers the source has not, 2.6" in told


def test_a_paragraph_that_changed_is_stale_until_the_catalogue_is_updated(one_page):
    _translate(one_page, "{eq}`kl_loss` 2.5 nat")
    (one_page.book / "index.md").write_text("# First\n\nOtherwise.\n")
    assert any("no longer in the book" in line for line in problems(one_page))
    assert update(one_page, "index") == (2, 1)
    assert not any("no longer" in line for line in problems(one_page))


def test_titles_may_lag_behind(one_page):
    (one_page.root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters: [{file: book/a}]\n"
    )
    (one_page.book / "a.md").write_text("# Second\n\nText.\n")
    assert update(one_page, "titles") == (1, 1)
    assert not any("titles" in line for line in problems(one_page))


def test_a_proof_begins_in_the_language_of_the_edition():
    for language, said in (("en", "Proof. It is."), ("zh_CN", "证明。It is.")):
        paragraph = nodes.paragraph("", "Proof. It is.")
        document = new_document("")
        document += proof_node("", nodes.admonition("", paragraph))
        begin_proofs(SimpleNamespace(config=SimpleNamespace(language=language)), document)
        assert paragraph.astext() == said


def test_a_catalogue_of_no_page_and_a_broken_one_are_refused(one_page):
    with pytest.raises(UserError, match="no page nowhere"):
        update(one_page, "nowhere")
    catalogue_path(one_page, "index").write_text('msgid "open\n')
    with pytest.raises(UserError, match=r"index\.po"):
        load(one_page, "index")


def test_an_edition_has_the_runs_of_the_book_and_its_own_words(book, tmp_path):
    stage(book, tmp_path / "zh")
    config = (tmp_path / "zh/_config.yml").read_text(encoding="utf-8")
    assert "language: zh_CN" in config
    assert "# KL 项" in (tmp_path / "zh/book/index.md").read_text(encoding="utf-8")
    untranslated = (tmp_path / "zh/book/notation.md").read_text(encoding="utf-8")
    assert untranslated.startswith("# 记号与约定\n") and UNTRANSLATED in untranslated
    toc = yaml.safe_load((tmp_path / "zh/_toc.yml").read_text(encoding="utf-8"))
    menu = {entry["file"]: entry for part in toc["parts"] for entry in part["chapters"]}
    assert menu["book/notation"]["title"] == f"记号与约定{IN_ENGLISH}"
    assert "title" not in menu["book/answer"] and "title" not in menu["book/_generated/symptoms"]
    symptoms = (tmp_path / "zh/book/_generated/symptoms.md").read_text(encoding="utf-8")
    headings = [line for line in symptoms.splitlines() if line.startswith("#")]
    assert len(headings) > 10 and all(re.search(r"[一-龥]", line) for line in headings)
    assert "没有打开。**" in symptoms and "。。" not in symptoms
    assert not re.search(r"[一-龥`）][.;](\*\*|\s)", symptoms)
    for run in book.runs.glob("0[0-4]_*.ipynb"):
        ours, theirs = (
            nbformat.read(path, as_version=4).cells
            for path in (run, tmp_path / "zh/book/_run" / run.name)
        )
        assert [cell.get("outputs") for cell in ours] == [cell.get("outputs") for cell in theirs]
        assert ours[0].source != theirs[0].source
