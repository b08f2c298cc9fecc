"""What printing changes, where it can be seen without TeX."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pandas as pd
from docutils import nodes
from docutils.utils import new_document
from sphinx import addnodes
from sphinx.util import texescape
from sphinx_proof import nodes as proof_nodes

from analysis.report import on_paper


def proof() -> tuple[nodes.document, nodes.Element]:
    box = proof_nodes.proof_node("", nodes.admonition("", nodes.paragraph(text="Proof. It is.")))
    document = new_document("")
    document += nodes.section("", box, docname="book/a")
    return document, box


def test_on_paper_a_proof_is_text_that_ends_with_a_square() -> None:
    for kind, boxes in (("latex", 0), ("html", 1)):
        document, _ = proof()
        app = SimpleNamespace(builder=SimpleNamespace(format=kind))
        on_paper.set_proofs(app, document, "book/a")
        assert len(list(document.findall(proof_nodes.proof_node))) == boxes
        (paragraph,) = document.findall(nodes.paragraph)
        assert paragraph.astext().startswith("Proof. It is.")
        assert bool(list(paragraph.findall(nodes.raw))) == (kind == "latex")


def test_a_theorem_in_latex_is_labelled_by_its_page() -> None:
    _, box = proof()
    assert on_paper._page_of(None, box, "section") == "book/a"
    assert on_paper._page_of(None, nodes.paragraph(), "section") is None


def test_theorems_are_numbered_by_chapter_and_figures_by_what_latex_counts() -> None:
    for kind, meanwhile in (("latex", 1), ("html", 2)):
        config = SimpleNamespace(numfig_secnum_depth=2)
        app = SimpleNamespace(builder=SimpleNamespace(format=kind), config=config)
        on_paper.number_by_chapter(app)
        assert config.numfig_secnum_depth == meanwhile
        on_paper.number_by_part_again(app, None)
        assert config.numfig_secnum_depth == 2


def test_what_is_looked_up_or_touched_stays_on_the_site() -> None:
    for kind, left in (("latex", ["book/answer"]), ("html", ["book/answer", "book/explore"])):
        names = ["book/answer", "book/explore"]
        document = new_document("")
        document += addnodes.toctree("", includefiles=names, entries=[(None, n) for n in names])
        app = SimpleNamespace(
            builder=SimpleNamespace(format=kind), env=SimpleNamespace(docname="book/index")
        )
        on_paper.leave_pages_out(app, document)
        (toctree,) = document.findall(addnodes.toctree)
        assert toctree["includefiles"] == left
        assert [name for _, name in toctree["entries"]] == left


def test_a_data_frame_is_a_table_whose_first_column_is_not_repeated() -> None:
    texescape.init()  # as the builder does
    keys = pd.MultiIndex.from_tuples([("a_b", "k1"), ("a_b", "k2")], names=["who", "which"])
    table = on_paper.latex_table(pd.DataFrame({"50% of": ["0.5", "−1"]}, index=keys).to_html())
    assert r"\begin{tabular}{llr}" in table
    assert r"\bfseries who & \bfseries which & \bfseries 50\% of\\" in table
    assert "a\\_b & k1 & 0.5\\\\\n & k2 & −1" in table


def test_a_table_is_no_wider_than_the_page() -> None:
    frame = pd.DataFrame({"short": ["1"], "long": ["words " * 60], "also": ["more " * 50]})
    table = on_paper.latex_table(frame.to_html(index=False))
    shares = [float(share) for share in re.findall(r"p\{([\d.]+)\\linewidth\}", table)]
    assert len(shares) == 2 and 0.8 < sum(shares) < 1


def test_other_outputs_keep_their_headings_and_lists() -> None:
    found = on_paper.printed(
        "<section><h3>One</h3><p>Two <b>3</b></p><ul><li>a</li><li>b</li></ul>"
    )
    assert [part.astext() for part in found] == ["One", "Two 3", "a\n\nb"]
    assert isinstance(found[-1], nodes.bullet_list)


def test_outputs_that_the_site_folds_are_named_in_one_line() -> None:
    cells = [
        nodes.container(nb_element="cell_code", hide_mode="output", prompt_show=f"Show {what}")
        for what in ("the costs", "the rest")
    ]
    document = new_document("")
    document += [nodes.paragraph("", "Before."), *cells]
    for cell in cells:
        on_paper._name_folded(cell)
    assert document[-1].astext() == "On the site: the costs; the rest."
    assert len(document) == 2


def test_a_long_table_of_prose_breaks_over_pages_and_its_names_break() -> None:
    for words, classes in ((2, []), (800, ["longtable", "colwidths-given"])):
        cells = [nodes.entry("", nodes.paragraph("", text)) for text in ("a", "word " * words)]
        cells[0][0] += nodes.literal("", "use_it")
        link = addnodes.pending_xref("", nodes.literal("", "thm-one"))
        cells[0][0] += link
        body = nodes.tbody("", nodes.row("", *cells))
        columns = [nodes.colspec(colwidth=50) for _ in cells]
        table = nodes.table("", nodes.tgroup("", *columns, body))
        on_paper._fit(table)
        assert table["classes"] == classes
        assert link[0].children == [nodes.Text("thm-one")]
        name, _ = table.findall(nodes.literal)
        assert [part.astext() for part in name] == ["use_", r"\allowbreak{}", "it"]
        narrow, wide = (column["colwidth"] for column in columns)
        assert (narrow < wide) == bool(classes)
