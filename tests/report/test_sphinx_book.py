"""The book's own Sphinx extension, where it can be seen without a build."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from docutils import nodes
from docutils.utils import new_document
from sphinx_proof import nodes as proof_nodes

from analysis.report import sphinx_book

EDIT = {"label": "source-edit-button", "url": "https://h.org/edit/main/book/_run/01.ipynb"}
COLAB = {"text": "Colab", "url": "https://c.org/github/o/r/blob/main/book/_run/01.ipynb"}
SOURCE = {"label": "download-source-button", "url": "../_sources/book/_run/01.ipynb"}
FULL = {"label": "fullscreen", "javascript": "toggle()"}


def buttons(pagename: str) -> list[dict[str, Any]]:
    context = {"header_buttons": [{"type": "group", "buttons": [EDIT, COLAB]}, SOURCE, FULL]}
    sphinx_book.point_links_at_sources(SimpleNamespace(), pagename, "page.html", context, None)
    return context["header_buttons"]


def test_remote_links_name_the_notebook_and_downloads_stay_local() -> None:
    group, source, full = buttons("book/_run/01")
    assert [button["url"] for button in group["buttons"]] == [
        "https://h.org/edit/main/notebooks/01.ipynb",
        "https://c.org/github/o/r/blob/main/notebooks/01.ipynb",
    ]
    assert source == SOURCE
    assert full == FULL


def test_a_generated_page_has_nothing_to_edit() -> None:
    group, *_ = buttons("book/_generated/status")
    assert [button.get("text") for button in group["buttons"]] == ["Colab"]
    assert "book/_run" in EDIT["url"]  # the theme's own buttons are as they were


def test_a_formula_that_a_theorem_announces_is_moved_into_its_box() -> None:
    def page(text: str) -> tuple[nodes.section, nodes.Element]:
        theorem = proof_nodes.NODE_TYPES["theorem"]()
        theorem += nodes.paragraph(text=text)
        formula = nodes.math_block("", "x")
        section = nodes.section(
            "", theorem, nodes.target(), formula, nodes.paragraph(text="After.")
        )
        return section, theorem

    for text, inside in (("The gradient is:", True), ("Let", False), ("Then", False)):
        section, theorem = page(text)
        document = new_document("")
        document += section
        sphinx_book.complete_theorems(SimpleNamespace(), document)
        assert bool(list(theorem.findall(nodes.math_block))) == inside
        assert len(list(document.findall(nodes.math_block))) == 1
        assert section.children[-1].astext() == "After."


def test_a_description_is_one_line_without_markup() -> None:
    said = sphinx_book._one_line("The   \\KL of\n" + "$\\pi$ many words " * 40)
    assert said.startswith("The KL of pi many words") and len(said) <= 204
    assert said.endswith(" ...")


def test_no_node_keeps_the_document_that_it_was_parsed_in() -> None:
    page, parsed = new_document("page"), new_document("parsed")
    parsed += nodes.paragraph()
    parsed[0] += nodes.math("", "x")
    page.extend(parsed.children)
    assert {node.document for node in page.findall()} == {page, parsed}
    sphinx_book.own_nodes(SimpleNamespace(), page)
    assert {node.document for node in page.findall()} == {page}


def test_a_page_is_read_back_once_and_for_the_site_alone() -> None:
    for builder, times in (("html", 1), ("latex", 2)):
        read: list[str] = []
        app = SimpleNamespace(env=SimpleNamespace(get_doctree=read.append))
        sphinx_book.read_back_once(app, SimpleNamespace(format=builder))
        for _ in range(2):
            app.env.get_doctree("book/page")
        assert read == ["book/page"] * times


def test_pages_of_source_draw_the_menu_of_their_depth_once_and_other_pages_their_own() -> None:
    app, drawn = SimpleNamespace(kl_menus={}), []
    for page in ("_modules/a/b", "_modules/c/d", "_modules/e", "book/c", "book/d"):
        context = {"toctree": lambda page=page, **options: drawn.append(page)}
        sphinx_book.share_menu(app, page, "page.html", context, None)
        for _ in range(2):
            context["toctree"](maxdepth=2)
    assert drawn == ["_modules/a/b", "_modules/e", *2 * ["book/c"], *2 * ["book/d"]]
