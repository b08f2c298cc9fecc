"""The book in Chinese: catalogues of its paragraphs.

A catalogue ``book/locale/zh_CN/<page>.po`` (gettext) holds the paragraphs of one page and
their translations, from which `analysis.report.edition` makes the book in Chinese. A paragraph
without a translation stays English. ``analysis translate`` brings the catalogues up to date.

The module is a Sphinx extension too: it links each page to the same page of the other edition.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from babel.messages.catalog import Catalog
from babel.messages.pofile import PoFileError, read_po, write_po
from docutils import nodes
from sphinx.application import Sphinx
from sphinx_proof.nodes import proof_node

from analysis.report.pages import toc_pages
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from kl_term.errors import UserError
from kl_term.files import replace_file

#: As Sphinx knows the language; folder of the site and tag of its pages; its name in itself.
CODE, FOLDER, NAME = "zh_CN", "zh", "中文"
_PROOF = "证明。"

#: What a translation maps a piece of the source to.
Translate = Callable[[str], str]

_FENCE = re.compile(r"\s*(?P<marks>`{3,}|:{3,})(?:\{(?P<name>[\w:+.-]+)\}[ \t]*(?P<title>.*)|.*)")
_OPTION = re.compile(r"(\s*:(?P<name>[\w-]+):[ \t]*)(?P<value>.*)")
#: No prose: comments, labels, rules.
_STRUCTURE = re.compile(r"\s*(%|<!--|\([\w-]+\)=\s*$|-{3,}\s*$|\+\+\+)")
#: Directives whose body is no prose, those whose first line is a title, and options that are read.
_VERBATIM = {"math", "literalinclude", "code-block", "code-cell", "bibliography", "eval-rst"}
_TITLED = re.compile(r"prf:\w+|grid-item-card|admonition|dropdown|exercise")
_READ_OPTIONS = ("alt", "caption")
#: Catalogues that may lag behind the book: what they lack is shown in English.
LAGGING = ("conditions", "ledger", "symptoms", "titles")
#: The catalogue of the words in the figures of translated chapters.
FIGURES = "figures"
#: What a translation must keep: roles with their targets, formulas, addresses of links, advice and
#: its conditions.
_KEPT = re.compile(r"\{[\w:]+\}`[^`]*`|\$[^$\n]+\$|(?<=\]\()[^)\s]+|\{\{[^{}]+\}\}|\[\[[^|\]]+")
PAGE_TITLE = re.compile(r"^# .*$", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z]{2}")
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")


def pieces(text: str) -> list[str]:
    """The pieces of MyST text that a reader reads, as `key` writes them."""
    return _noted(lambda note: translated(text, note))


def _noted(walk: Callable[[Translate], object]) -> list[str]:
    """What ``walk`` would have translated."""
    found: list[str] = []

    def note(piece: str) -> str:
        found.append(key(piece))
        return piece

    walk(note)
    return found


def key(piece: str) -> str:
    """A piece of text whatever its line breaks."""
    return " ".join(piece.split())


def translated(text: str, translate: Translate) -> str:
    """MyST text with each piece of prose replaced: a paragraph, list, table, heading or title."""
    lines, fences, paragraph, into = text.split("\n"), [], [], []

    def end() -> None:
        if paragraph:
            source = "\n".join(paragraph)
            indent = re.match(r"\s*", paragraph[0])[0]
            chosen = translate(source)
            kept = chosen == source
            into.extend(paragraph if kept else [indent + line for line in chosen.split("\n")])
            paragraph.clear()

    front = bool(lines) and lines[0] == "---"
    maths = options = False
    for number, line in enumerate(lines):
        verbatim = bool(fences) and fences[-1][1]
        fence = _FENCE.fullmatch(line)
        if front:
            front = number == 0 or line != "---"
        elif fence and fences and line.strip() == fences[-1][0]:
            end()
            fences.pop()
        elif verbatim:
            pass
        elif fence:
            end()
            name = fence["name"] or ""
            code = not name and fence["marks"][0] == "`"
            fences.append((fence["marks"], code or name in _VERBATIM))
            options = True
            if _TITLED.fullmatch(name) and fence["title"]:
                line = line[: fence.start("title")] + translate(fence["title"])
            into.append(line)
            continue
        elif maths or line.lstrip().startswith("$$"):
            end()
            maths = line.count("$$") % 2 != maths
        elif options and (option := _OPTION.fullmatch(line)):
            read = option["name"] in _READ_OPTIONS
            into.append(option[1] + (translate(option["value"]) if read else option["value"]))
            continue
        elif not line.strip() or _STRUCTURE.match(line):
            end()
        elif line.startswith("#"):
            end()
            line = translate(line)
        else:
            options = False
            paragraph.append(line)
            continue
        options = False
        into.append(line)
    end()
    return "\n".join(into)


def translated_notebook(notebook: nbformat.NotebookNode, translate: Translate) -> None:
    """Replace the prose of a notebook, and the captions and descriptions of its figures."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = translated(cell.source, translate)
            continue
        shown = cell.metadata.get("mystnb", {})
        for part, name in (("figure", "caption"), ("image", "alt")):
            if shown.get(part, {}).get(name):
                shown[part][name] = translate(shown[part][name])


def catalogue_path(project: Project, page: str) -> Path:
    """Where the catalogue of a page lies: the page is its file's name without a suffix."""
    return project.book / "locale" / CODE / f"{page}.po"


def catalogues(project: Project) -> list[str]:
    """The pages that have a catalogue, and ``menu``."""
    return sorted(path.stem for path in catalogue_path(project, "menu").parent.glob("*.po"))


def load(project: Project, page: str) -> dict[str, str]:
    """The translations of a page, by `key`; those that are fuzzy or empty are left out."""
    path = catalogue_path(project, page)
    try:
        catalogue = read_po(io.BytesIO(path.read_bytes()), abort_invalid=True)
    except (PoFileError, ValueError) as error:
        raise UserError(f"{project.relative(path)}: {error}") from None
    except FileNotFoundError:
        return {}
    return {str(m.id): str(m.string) for m in catalogue if m.id and m.string and not m.fuzzy}


def translator(translations: Mapping[str, str]) -> Translate:
    """What replaces a piece by its translation, and leaves it where there is none."""
    return lambda piece: translations.get(key(piece), piece)


def texts(project: Project, page: str) -> list[str]:
    """All pieces of a page in English, in order, once each.

    ``menu`` are the headings of ``_toc.yml``; ``titles`` those of the pages without a catalogue;
    ``ledger`` and ``symptoms`` the texts from which their pages are written, ``conditions`` those
    of verdicts; ``figures`` the words in figures of translated chapters;
    ``advice`` the rows that translated pages show.
    """
    if page == "menu":
        found = [key(caption) for caption in _captions(load_yaml(project.toc, "_toc.yml"))]
    elif page == "titles":
        found = list(_titles(project))
    elif page == FIGURES:
        found = list(_figure_words(project))
    elif page == "conditions":
        from analysis.report.ledger import load_ledger

        found = [key(claim.condition) for claim in load_ledger(project)]
    elif page == "advice":
        from analysis.report.advice_page import shown_texts

        found = [key(piece) for piece in shown_texts(project, catalogues(project))]
    elif page == "ledger":
        from analysis.report.ledger_page import translatable

        found = [key(piece) for piece in translatable(project)]
    elif page == "symptoms":
        from analysis.report.symptoms import translatable

        found = [key(piece) for piece in translatable(project)]
    elif (path := project.notebooks / f"{page}.ipynb").is_file():
        notebook = nbformat.read(path, as_version=4)
        found = _noted(lambda note: translated_notebook(notebook, note))
    else:
        path = project.book / f"{page}.md"
        if not path.is_file():
            raise UserError(f"book/locale: no page {page}; rename or delete its catalogues")
        found = pieces(path.read_text(encoding="utf-8"))
    read = {piece: _KEPT.sub("", piece.replace("[[", "")) for piece in found}
    return [piece for piece, words in read.items() if _WORD.search(words)]


def update(project: Project, page: str) -> tuple[int, int]:
    """Bring a catalogue up to date: pieces that are new come empty, those that went leave.

    Returns:
        The numbers of pieces, and of those without a translation.
    """
    known = load(project, page)
    catalogue = Catalog(locale=CODE)
    sources = texts(project, page)
    for source in sources:
        catalogue.add(source, known.get(source, ""))
    written = io.BytesIO()
    write_po(written, catalogue, width=100, omit_header=True)
    path = catalogue_path(project, page)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, written.getvalue())
    return len(sources), sum(source not in known for source in sources)


def problems(project: Project) -> Iterator[str]:
    """What is altered in a catalogue, and missing or stale in one that keeps up, a line each."""
    for page in catalogues(project):
        known, sources = load(project, page), texts(project, page)
        label, keeps_up = f"{CODE}/{page}.po", page not in LAGGING
        for source in sources:
            if source not in known:
                if keeps_up:
                    yield f"{label}: not translated: {source[:80]}"
            elif _kept(source) != _kept(known[source]):
                yield f"{label}: roles, formulas or links differ: {source[:80]}"
            elif extra := set(_DIGITS.findall(known[source])) - set(_DIGITS.findall(source)):
                yield f"{label}: numbers the source has not, {', '.join(extra)}: {source[:80]}"
        for stale in known.keys() - set(sources) if keeps_up else ():
            yield f"{label}: no longer in the book: {stale[:80]}"


def _kept(piece: str) -> set[str]:
    """What no translation may change; of a reference with words of its own only the target."""
    return {re.sub(r"`.*<(.*)>`", r"`\1`", found) for found in _KEPT.findall(piece)}


def _titles(project: Project) -> Iterator[str]:
    """The headings of the pages that are written by hand and have no catalogue."""
    for page in toc_pages(project):
        notebook, text = project.notebooks / f"{page.name}.ipynb", page.with_suffix(".md")
        if catalogue_path(project, page.name).is_file():
            continue
        if notebook.is_file():
            cells = nbformat.read(notebook, as_version=4).cells
            yield next(PAGE_TITLE.search(c.source)[0] for c in cells if c.cell_type == "markdown")
        elif text.is_file() and page.parent == project.book:
            yield PAGE_TITLE.search(text.read_text(encoding="utf-8"))[0]


def _figure_words(project: Project) -> Iterator[str]:
    """The words in the figures of the chapters that have a catalogue, as they are stored."""
    from analysis.report.figure_data import WORDS

    for page in catalogues(project):
        path = project.notebooks / f"{page}.ipynb"
        if path.is_file():
            for cell in nbformat.read(path, as_version=4).cells:
                for output in cell.get("outputs", ()):
                    yield from output.get("metadata", {}).get("image/png", {}).get(WORDS, ())


def _captions(toc: Mapping[str, Any]) -> Sequence[str]:
    return [part["caption"] for part in toc.get("parts", ()) if part.get("caption")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.connect("doctree-read", begin_proofs)
    app.connect("html-page-context", link_other_edition, priority=910)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def is_translated(app: Sphinx) -> bool:
    """Is it an edition in another language, in a folder of the site that has the data?"""
    return app.config.language == CODE


def begin_proofs(app: Sphinx, doctree: nodes.document) -> None:
    """Begin proofs in the language of the edition; sphinx-proof knows one."""
    for proof in doctree.findall(proof_node) if is_translated(app) else ():
        first = next(iter(proof.findall(nodes.Text)))
        first.parent.replace(first, nodes.Text(re.sub(r"^Proof\.\s*", _PROOF, first)))


def link_other_edition(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """A button to the same page in the other language, and the links that search engines read."""
    if doctree is None:
        return
    up = "../" * pagename.count("/")
    name, tag, address = NAME, FOLDER, f"{up}{FOLDER}/{pagename}.html"
    if is_translated(app):
        name, tag, address = "English", "en", f"{up}../{pagename}.html"
    button = {"type": "link", "url": address, "text": name, "tooltip": name, "icon": ""}
    buttons = context.setdefault("header_buttons", [])
    buttons.insert(0, button | {"label": "language-button"})
    link = f'<link rel="alternate" hreflang="{tag}" href="{address}" />'
    context["metatags"] = "\n".join([context.get("metatags", ""), link])
