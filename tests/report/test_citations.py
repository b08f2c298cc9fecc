"""Citations: each resolves, each work is cited, no two look the same, and priority has a source."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from pybtex.database import BibliographyData, Entry, parse_file, parse_string

from analysis.report.citations import AuthorYearStyle, label, tell_apart
from tests.report.sites import build_site

ROOT = Path(__file__).parents[2]
BIBLIOGRAPHY = ROOT / "book" / "references.bib"
CITATION = re.compile(r"\{cite(?::\w+)?\}`([^`]+)`")
#: A sentence that says who was first: "first shown by", "first derived in", "goes back to".
PRIORITY = re.compile(
    r"\bfirst (?:shown|proved|derived|stated|made|given|named|pointed out)\b"
    r"|\b(?:goes?|went) back to\b"
)
SENTENCE = re.compile(r"(?<=[.:;!?])\s+(?=[A-Z*{$\[(])|\n\s*\n|\n(?=[-|#:])")


def pages() -> dict[str, str]:
    """The prose of the book by file: what is written by hand, and what pages are made from."""
    written = [
        path for pattern in ("*.md", "*.yaml") for path in sorted((ROOT / "book").glob(pattern))
    ]
    prose = {path.name: path.read_text(encoding="utf-8") for path in written}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose[path.name] = "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    return prose


def cited(text: str) -> set[str]:
    """The keys that a text cites."""
    return {key.strip() for keys in CITATION.findall(text) for key in keys.split(",")}


def unsourced(text: str) -> list[str]:
    """The sentences that say who was first and cite nobody."""
    return [
        sentence
        for sentence in SENTENCE.split(text)
        if PRIORITY.search(sentence) and not cited(sentence)
    ]


def works(*authors: str) -> BibliographyData:
    """A bibliography of one work for each list of authors, titled A, B, C in reverse order."""
    titles = reversed("ABCDEF"[: len(authors)])
    return parse_string(
        "".join(
            f"@misc{{w{i}, author = {{{who}}}, title = {{{title}}}, year = {{2025}}}}\n"
            for i, (who, title) in enumerate(zip(authors, titles, strict=True))
        ),
        "bibtex",
    )


def labels(data: BibliographyData) -> dict[str, str]:
    return {entry.key: entry.label for entry in AuthorYearStyle().format_bibliography(data)}


def test_every_work_is_cited():
    assert (
        set(parse_file(BIBLIOGRAPHY).entries) - set().union(*map(cited, pages().values())) == set()
    )


def test_who_was_first_is_said_with_a_source():
    found = {name: unsourced(text) for name, text in pages().items()}
    assert {name: sentences for name, sentences in found.items() if sentences} == {}


def test_each_chapter_says_what_is_known_and_what_is_ours():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if path.name.startswith("21_"):
            continue  # the guide: every line of it links to its chapter
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        _, heading, last = text.partition("## What is known and what is ours\n")
        asked = f"{path.name}: end with '## What is known and what is ours', "
        assert heading and cited(last), f"{asked} cite whose result it is"
        assert "chapter adds" in last, f"{asked} and say what the chapter adds"


def test_no_two_works_of_the_book_print_the_same():
    data = parse_file(BIBLIOGRAPHY)
    before = Counter(map(label, data.entries.values()))
    assert before.most_common(1)[0][1] > 1  # without letters they do
    tell_apart(data.entries.values())
    assert max(Counter(labels(data).values()).values()) == 1
    assert not [name for name in labels(data).values() if "others" in name]


def test_letters_follow_the_titles_and_are_put_once():
    data = works("Liu, Ann and Doe, B and Roe, C", "Roe, D", "Liu, Zoe and Poe, E and Doe, F")
    tell_apart(data.entries.values())
    expected = {"w2": "Liu et al., 2025a", "w0": "Liu et al., 2025b", "w1": "Roe, 2025"}
    assert labels(data) == expected
    assert list(labels(data)) == ["w2", "w0", "w1"]  # the order of the bibliography
    tell_apart(data.entries.values())
    assert labels(data) == expected


def test_pages_and_bibliography_print_the_same_labels(tmp_path):
    works("Liu, A and Doe, B and Roe, C", "Liu, D and Poe, E and Coe, F").to_file(
        str(tmp_path / "references.bib"), "bibtex"
    )
    (tmp_path / "index.rst").write_text(
        "Page\n====\n\nAs :cite:t:`w0` show :cite:p:`w0,w1`.\n\n.. bibliography::\n"
    )
    build_site(
        tmp_path,
        "text",
        extensions=["analysis.report.citations", "sphinxcontrib.bibtex"],
        bibtex_bibfiles=["references.bib"],
        bibtex_default_style="author_year",
        bibtex_reference_style="author_year",
    )
    text = (tmp_path / "out" / "index.txt").read_text(encoding="utf-8")
    on_the_page = "As Liu *et al.* [2025b] show [Liu *et al.*, 2025a, Liu *et al.*, 2025b]."
    assert on_the_page in " ".join(text.split())
    assert [line[:20] for line in text.splitlines() if line.startswith("[Liu")] == [
        "[Liu et al., 2025a] ",
        "[Liu et al., 2025b] ",
    ]


def test_an_entry_has_a_label():
    assert label(Entry("misc", fields={"title": "T", "year": "1999"}, persons={})) == "T, 1999"
