"""The number of a chapter is that of its notebook, wherever the menu has it.

A Sphinx extension. Sphinx numbers pages in the order of the menu, so that a chapter that moves
takes the number of another one, and text that names a chapter is wrong. Here ``book/_run/22_*`` is
chapter 22, its sections 22.1 and 22.2, its figures and theorems likewise; no other page has a
number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.environment.collectors.toctree import TocTreeCollector
from sphinx.errors import ExtensionError
from sphinx_external_toc.collectors import disable_builtin_toctree_collector

_CHAPTER = re.compile(r"(?:.*/)?(\d\d)_\w+")

Number = tuple[int, ...]


def chapter_of(page: str) -> int | None:
    """The chapter that a page is, by the first two digits of its file's name, or None."""
    found = _CHAPTER.fullmatch(page)
    return None if found is None else int(found[1])


class ChapterNumbers(TocTreeCollector):
    """Numbers sections by the names of files; figures then follow as Sphinx has them follow."""

    def assign_section_numbers(self, env: BuildEnvironment) -> list[str]:
        """Number the sections of every chapter.

        Returns:
            The pages whose numbers changed.

        Raises:
            ExtensionError: a chapter with several titles, or a number that two chapters have.
        """
        before, env.toc_secnumbers = env.toc_secnumbers, {}
        pages: dict[int, str] = {}
        for page, contents in sorted(env.tocs.items()):
            chapter = chapter_of(page)
            if chapter is None:
                continue
            if len(_entries(contents)) != 1:
                raise ExtensionError(f"{page}: a chapter has one title")
            if chapter in pages:
                raise ExtensionError(f"{pages[chapter]} and {page}: both are chapter {chapter}")
            pages[chapter] = page
            numbers = env.toc_secnumbers[page] = {}
            for number, reference in _numbered(contents, (), chapter):
                reference["secnumber"] = list(number)
                numbers[reference["anchorname"]] = number
            env.titles[page]["secnumber"] = [chapter]
        return [page for page, numbers in env.toc_secnumbers.items() if numbers != before.get(page)]


def _entries(contents: nodes.Node) -> list[nodes.list_item]:
    return [item for item in contents.children if isinstance(item, nodes.list_item)]


def _numbered(
    contents: nodes.Node, above: Number, first: int = 1
) -> Iterator[tuple[Number, nodes.reference]]:
    """The headings of a page's contents, each with its number."""
    for place, item in enumerate(_entries(contents), start=first):
        number = (*above, place)
        for part in item.children:
            if isinstance(part, addnodes.compact_paragraph):
                yield number, part[0]
            elif isinstance(part, nodes.bullet_list):
                yield from _numbered(part, number)


def number_on_paper(app: Sphinx, doctree: nodes.document) -> None:
    """Let LaTeX, which counts by itself, give a chapter its number, and the page after it none."""
    chapter = chapter_of(app.env.docname)
    if app.builder.format != "latex" or chapter is None:
        return
    begin = rf"\setcounter{{secnumdepth}}{{2}}\setcounter{{chapter}}{{{chapter - 1}}}"
    doctree.insert(0, nodes.raw("", begin, format="latex"))
    doctree.append(nodes.raw("", r"\setcounter{secnumdepth}{-1}", format="latex"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx), in place of what else numbers sections."""
    disable_builtin_toctree_collector(app)
    app.add_env_collector(ChapterNumbers)
    app.connect("doctree-read", number_on_paper, priority=950)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
