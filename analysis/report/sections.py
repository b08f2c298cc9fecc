"""What the sections of a chapter open with, and how many words and numbers its reader meets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.report.prose import markdown_tokens

if TYPE_CHECKING:
    from markdown_it.token import Token

#: Sections whose title says all that an opening sentence would.
TITLED = {"Appendix", "Exercises", "Proofs"}
_FOLDED = {"dropdown", "exercise", "exercise-start", "solution", "solution-start"}
_UNSEEN = {"remove-cell", "parameters"}
_WORD = re.compile(r"[^\W\d_][\w'\u2019-]*")
_NUMBER = re.compile(r"(?<![\w.])\d(?:[\d,.]*\d)?")
_SENTENCE = re.compile(r".+?[.!?][)\"\u201d]*(?:\s|$)", re.DOTALL)
_POINTS_ON = re.compile(r"Below\b|Here (?:is|are)\b|The (?:figure|list|table) below\b")


class Block(NamedTuple):
    """A piece of a chapter: a ``title``, a paragraph of ``prose``, a ``cell`` of a table, or
    something ``else``, such as a figure, a box, a formula or a list, which may hold prose."""

    kind: str
    text: str


def unopened(notebook: Mapping[str, Any]) -> list[str]:
    """The titles of the sections that do not open with a sentence that says something.

    Such a section opens with a figure, a box, a formula, a list, a table or another title; with
    words that lead up to one of these; or with nothing at all.
    """
    blocks = [*_blocks(notebook), Block("else", "")]
    return [
        title.text
        for title, after in pairwise(blocks)
        if title.kind == "title" and title.text not in TITLED and not _says_something(after)
    ]


def words_and_numbers(notebook: Mapping[str, Any]) -> tuple[int, int]:
    """How many words a reader meets on the way to the appendix, and how many numbers.

    Captions, boxes and tables count; code, formulas and what is folded do not. A number in a table
    stands where one looks it up, and counts as a word of none.
    """
    words = numbers = 0
    for block in _blocks(notebook):
        if block == Block("title", "Appendix"):
            break
        words += len(_WORD.findall(block.text))
        numbers += len(_NUMBER.findall(block.text)) if block.kind != "cell" else 0
    return words, numbers


def _says_something(block: Block) -> bool:
    return (
        block.kind == "prose"
        and _SENTENCE.match(block.text) is not None
        and not _POINTS_ON.match(block.text)
    )


def _blocks(notebook: Mapping[str, Any]) -> Iterator[Block]:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            yield from _of_markdown("".join(cell["source"]))
        elif not _UNSEEN & set(cell["metadata"].get("tags", ())):
            yield Block("else", "")
            figure = cell["metadata"].get("mystnb", {}).get("figure", {})
            for block in _of_markdown(figure.get("caption", "")):
                yield block._replace(kind="else")


def _of_markdown(text: str) -> Iterator[Block]:
    kind = "prose"
    for token in markdown_tokens(text):
        if token.type in ("fence", "colon_fence"):
            name, _, title = token.info.strip().partition("}")
            yield Block("else", title)
            if name[1:] not in _FOLDED and "math" not in name and name[:1] == "{":
                body = re.sub(r"^\s*:[\w-]+:.*$", "", token.content, flags=re.MULTILINE)
                yield from (block._replace(kind="else") for block in _of_markdown(body))
        elif token.type == "inline":
            yield Block(kind, _said(token))
        elif token.type == "substitution_block":
            yield Block("prose", "It says something.")
        elif token.type.endswith(("_list_open", "table_open", "math_block")):
            yield Block("else", "")
        kind = _kind_after(token, kind)


def _kind_after(token: Token, kind: str) -> str:
    kinds = {"heading_open": "title", "td_open": "cell", "th_open": "cell"}
    return kinds.get(token.type, "prose" if token.type.endswith("_close") else kind)


def _said(token: Token) -> str:
    """The words of a line, a 1 for a number that is glued, an x for any other role or formula."""
    pieces = []
    for child in token.children or ():
        if child.type in ("text", "softbreak"):
            pieces.append(child.content or " ")
        elif child.type == "myst_role":
            pieces.append("1" if child.meta["name"] in ("glue:text", "given") else "_")
        elif child.type == "substitution_inline":
            pieces.append("It says something." if not pieces else "_")
        elif child.type in ("math_inline", "math_inline_double", "code_inline"):
            pieces.append("_")
    return "".join(pieces)
