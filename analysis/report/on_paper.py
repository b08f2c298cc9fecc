"""What the book needs where it is printed.

A Sphinx extension, for LaTeX only.

* Pages that only make sense on a screen, or that nobody reads through, stay on the site.
* Tables that notebooks print are set as tables; LaTeX would get them as lines of text.
* Where the site folds an output, paper says what the site has.
* A proof is running text; theorems are numbered, and labelled, by the page they stand on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import docname_join, texescape
from sphinx_proof import nodes as proof_nodes
from sphinxcontrib.bibtex.nodes import bibliography as bibliography_node

#: Pages of the site only: something to touch, and what is looked up by name.
EXPLORE = "book/explore"
ON_THE_SITE = re.compile(
    rf"{EXPLORE}|book/_generated/(api_\w+|status|methods|diagnosis_quality|errata)"
)
BIBLIOGRAPHY = "book/bibliography"
_LONG_ROWS, _LONG_TEXT = 30, 1500  # what a table of code, or of prose, may have on one page
_LINE = 110  # characters of a table's size
_GAP = 2  # characters between columns
_NUMBER = re.compile(r"[-−+]?[\d.,]+(%| ?× ?10\S+)?|∞|–|")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.add_post_transform(PrintOutputs)
    app.connect("doctree-read", leave_pages_out, priority=900)
    app.connect("builder-inited", label_theorems_by_page)
    app.connect("builder-inited", number_by_chapter, priority=900)
    app.connect("env-check-consistency", number_by_part_again)
    app.connect("doctree-resolved", set_proofs)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def leave_pages_out(app: Sphinx, doctree: nodes.document) -> None:
    """Take the pages that stay on the site out of the contents.

    The list of works has a heading of its own.
    """
    if app.builder.format != "latex":
        return
    if app.env.docname == BIBLIOGRAPHY:
        doctree[:] = list(doctree.findall(bibliography_node))
    for toctree in doctree.findall(addnodes.toctree):
        for part, name in (("includefiles", lambda f: f), ("entries", lambda entry: entry[1])):
            toctree[part] = [one for one in toctree[part] if not ON_THE_SITE.fullmatch(name(one))]


class PrintOutputs(SphinxPostTransform):
    """Set what cells show, before MyST-NB chooses a format that LaTeX knows."""

    default_priority = 3
    formats = ("latex",)

    def run(self, **_: Any) -> None:
        for cell in list(self._containers("cell_code")):
            if cell.get("hide_mode") == "output":
                _name_folded(cell)
        for bundle in list(self._containers("mime_bundle")):
            for shown in bundle.children:
                if shown.get("mime_type") == "text/html":
                    bundle.replace_self(printed(shown.astext()))
                    break
        for paragraph in list(self.document.findall(nodes.paragraph)):
            if _only_points_at_explorers(paragraph):
                paragraph.parent.remove(paragraph)
        self._name_pages_left_out()
        for table in self.document.findall(nodes.table):
            _fit(table)

    def _name_pages_left_out(self) -> None:
        for link in list(self.document.findall(addnodes.pending_xref)):
            page = docname_join(link.get("refdoc", ""), link["reftarget"])
            if link["reftype"] == "doc" and ON_THE_SITE.fullmatch(page):
                said = link.astext() if link["refexplicit"] else self.env.titles[page].astext()
                link.replace_self(nodes.emphasis("", said))

    def _containers(self, kind: str) -> Iterator[nodes.Element]:
        for container in self.document.findall(nodes.container):
            if container.get("nb_element") == kind:
                yield container


def _name_folded(cell: nodes.Element) -> None:
    """Replace a folded output by a line that names it; lines that follow each other are one."""
    what = re.sub("^Show ", "", cell["prompt_show"])
    before = cell.parent[cell.parent.index(cell) - 1]
    if isinstance(before, nodes.paragraph) and "folded" in before["classes"]:
        before[0][0] = nodes.Text(f"{before.astext()[:-1]}; {what}.")
        cell.parent.remove(cell)
    else:
        said = nodes.emphasis("", f"On the site: {what}.")
        cell.replace_self(nodes.paragraph("", "", said, classes=["folded"]))


def _fit(table: nodes.table) -> None:
    """Let names in a table of prose break; a long one too, its columns as wide as their text."""
    for name in table.findall(nodes.literal):
        if isinstance(name.parent, addnodes.pending_xref):
            continue
        first, *others = re.split(r"(?<=[-_./=])(?=\w)", name.astext())
        name[:] = [nodes.Text(first)]
        for part in others:
            name += [nodes.raw("", r"\allowbreak{}", format="latex"), nodes.Text(part)]
    rows = [[len(cell.astext()) for cell in row] for row in table.findall(nodes.row)]
    if sum(map(sum, rows)) > _LONG_TEXT:
        table["classes"] = ["longtable", "colwidths-given"]
        columns = zip(table.findall(nodes.colspec), zip(*rows, strict=True), strict=True)
        for spec, lengths in columns:
            spec["colwidth"] = max(8, round(sum(lengths) ** 0.5))


def _only_points_at_explorers(paragraph: nodes.paragraph) -> bool:
    links = [f"/{link['reftarget']}" for link in paragraph.findall(addnodes.pending_xref)]
    return len(links) == 1 and links[0].endswith(f"/{EXPLORE}") and len(paragraph.children) <= 4


def printed(html: str) -> list[nodes.Node]:
    """The table in an output, or its headings, paragraphs and lists."""
    if found := re.search(r"<table.*?</table>", html, re.DOTALL):
        return [nodes.raw("", latex_table(found[0]), format="latex")]
    parts: list[nodes.Node] = []
    for name, text in re.findall(r"<(h\d|p|li)\b[^>]*>(.*?)</\1>", html, re.DOTALL):
        said = "".join(ElementTree.fromstring(f"<p>{text}</p>").itertext())
        if name == "li":
            if not parts or not isinstance(parts[-1], nodes.bullet_list):
                parts.append(nodes.bullet_list())
            parts[-1] += nodes.list_item("", nodes.paragraph("", said))
        else:
            shown = nodes.strong("", said) if name[0] == "h" else nodes.Text(said)
            parts.append(nodes.paragraph("", "", shown))
    return parts


def latex_table(html: str) -> str:
    """A data frame's HTML as a LaTeX table as wide as its text, at most as the page."""
    table = ElementTree.fromstring(html.replace("&nbsp;", " "))
    head, body = (_grid(table.findall(f"{part}/tr")) for part in ("thead", "tbody"))
    if len(head) == 2 and all(not (a and b) for a, b in zip(*head, strict=True)):
        head = [[a or b for a, b in zip(*head, strict=True)]]  # the second has the index's names
    columns = list(zip(*head, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    room = _LINE - _GAP * len(columns)
    most = max(w for w in range(max(widths), 4, -1) if sum(min(w, x) for x in widths) <= room)
    kinds = [
        rf">{{\raggedright\arraybackslash}}p{{{most / _LINE:.3f}\linewidth}}"
        if width > most
        else ("r" if all(map(_NUMBER.fullmatch, column[len(head) :])) else "l")
        for width, column in zip(widths, columns, strict=True)
    ]
    long = len(body) > _LONG_ROWS
    begin, end = (
        (r"\begin{longtable}", r"\end{longtable}")
        if long
        else (r"\begin{center}\begin{tabular}", r"\end{tabular}\end{center}")
    )
    return "\n".join(
        [
            r"\begingroup\footnotesize\setlength{\tabcolsep}{3.5pt}",
            rf"{begin}{{{''.join(kinds)}}}",
            r"\toprule",
            *(_line(row, r"\bfseries ") for row in head),
            r"\midrule" + (r"\endhead" if long else ""),
            *map(_line, body),
            r"\bottomrule",
            rf"{end}\endgroup",
        ]
    )


def _line(cells: list[str], style: str = "") -> str:
    return " & ".join(style + texescape.escape(cell, "xelatex") for cell in cells) + r"\\"


def _grid(rows: list[ElementTree.Element]) -> list[list[str]]:
    """The cells of rows; one that spans several stands in the first."""
    grid: list[list[str | None]] = [[] for _ in rows]
    for number, row in enumerate(rows):
        for cell in row:
            down, across = (int(cell.get(name, 1)) for name in ("rowspan", "colspan"))
            at = next((i for i, c in enumerate(grid[number]) if c is None), len(grid[number]))
            for line in range(number, number + down):
                filled = [*grid[line], *[None] * max(0, at + across - len(grid[line]))]
                filled[at : at + across] = [""] * across
                grid[line] = filled
            grid[number][at] = " ".join("".join(cell.itertext()).split())
    return [[cell or "" for cell in row] for row in grid]


def number_by_chapter(app: Sphinx) -> None:
    """Number theorems on paper as on the site, 3.4: Jupyter Book adds a level for the parts.

    Only while they are numbered: for figures LaTeX counts the part as that level.
    """
    if app.builder.format == "latex":
        app.kl_depth = app.config.numfig_secnum_depth
        app.config.numfig_secnum_depth = 1


def number_by_part_again(app: Sphinx, env: Any) -> None:
    """Give LaTeX back the depth that :func:`number_by_chapter` took."""
    if app.builder.format == "latex":
        app.config.numfig_secnum_depth = app.kl_depth


def label_theorems_by_page(app: Sphinx) -> None:
    """Name the page of a theorem in LaTeX by the file it came from.

    sphinx-proof finds it by the page's title, and not where smart quotes have changed that.
    """
    proof_nodes.find_parent = _page_of


def _page_of(env: Any, node: nodes.Element, tag: str) -> str | None:
    while node is not None and "docname" not in node.attributes:
        node = node.parent
    return None if node is None else node["docname"]


def set_proofs(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """On paper a proof is text that ends with a square, and no box without a title."""
    if app.builder.format != "latex":
        return
    for proof in list(doctree.findall(proof_nodes.proof_node)):
        parts = list(proof.children)
        if len(parts) == 1 and isinstance(parts[0], (nodes.section, nodes.admonition)):
            parts = list(parts[0].children)
        if parts and isinstance(parts[-1], nodes.paragraph):
            parts[-1] += nodes.raw("", r"\hfill$\square$", format="latex")
        proof.replace_self(parts)
