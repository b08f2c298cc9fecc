"""Prose holds no number typed by hand: those of the runs are glued, and README.md quotes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.report.advice import prose as prose_of_advice
from analysis.report.pages import run_pages
from analysis.report.project import Project
from analysis.report.provenance import RunFiles, read_notebook
from kl_term.errors import UserError

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

_NUMBER = re.compile(
    r"""(?<![\w.])(?:
        (?:\d[\d,]*)?\.\d+(?:[eE][-+\u2212]?\d+)?(?:\s?\\?%)?   # 0.04, .5, 1.5e-3, 12.5 %
      | \d[\d,]*(?:\s?\\?%|\s?per\s?cent\b)                 # 12 %, 12 percent
      | \d+[eE][-+\u2212]?\d+\b                                  # 1e-3
    | (?<![,/-])(?!(?:19|20)(?!00)\d\d\b)\d[\d,]*\d(?![\w%]|-\w)    # 24, 1,000, but no year or date
    )""",
    re.VERBOSE,
)
_ADDRESS = re.compile(r"https?://[^\s)>\]]+|\b(?:arXiv|doi):\s*[\w./-]+")
_ORDINAL = re.compile(
    r"\b(?:appendix|chapter|equation|figure|page|part|section|step|table|theorem)s?\s\d+\b", re.I
)
_MATHS = {"math_inline", "math_inline_double", "math_block", "math_block_label", "amsmath"}
#: Directives whose body is no prose, and those whose argument is a path.
_VERBATIM = {"bibliography", "code", "code-block", "code-cell", "csv-table", "eval-rst", "image"}
_VERBATIM |= {"include", "literalinclude", "raw", "tableofcontents", "toctree"}
_WITH_PATH = {"figure", "glue", "glue:any", "glue:figure", "glue:text", "glue:math"}
_DIRECTIVE = re.compile(r"\{(?P<name>[\w:+.-]+)\}(?P<argument>.*)")
#: Around a quoted number in README.md, which GitHub renders without our tools.
_QUOTE = re.compile(
    r"<!--\s*glue:\s*(?P<name>[\w.-]+)::(?P<key>[\w.-]+)\s*-->(?P<text>.*?)<!--\s*/glue\s*-->",
    re.DOTALL,
)
_MARKER = re.compile(r"<!--\s*glue:[^>]*-->")


def typed_numbers(text: str, *, maths: bool) -> Iterator[tuple[int, str]]:
    """The numbers typed in MyST prose, with their lines.

    Left alone are single digits, years, and what numbers a chapter, an equation or a figure.

    Args:
        maths: whether numbers inside formulas are allowed.
    """
    for line, piece in _prose(text, 1, maths=maths):
        for match in _NUMBER.finditer(_ORDINAL.sub("", _ADDRESS.sub("", piece))):
            yield line, match.group()


def _prose(text: str, first: int, *, maths: bool) -> Iterator[tuple[int, str]]:
    """The pieces of text that a reader sees as words, each with its line."""
    for token in markdown_tokens(text):
        line = first + (token.map[0] if token.map else 0)
        if token.type in ("fence", "colon_fence"):
            yield from _directive(token, line, maths=maths)
        elif token.type in _MATHS and not maths:
            yield line, token.content
        for child in token.children or ():
            is_maths = child.type in _MATHS or child.meta.get("name") == "math"
            if child.type in ("text", "image") or (is_maths and not maths):
                yield line, child.content
            line += child.type in ("softbreak", "hardbreak")


def _directive(token: Token, line: int, *, maths: bool) -> Iterator[tuple[int, str]]:
    match = _DIRECTIVE.fullmatch(token.info.strip())
    if match is None or match["name"] in _VERBATIM or (maths and match["name"] == "math"):
        return
    if match["name"] not in _WITH_PATH:
        yield line, match["argument"]
    lines = token.content.split("\n")
    options = 0
    while options < len(lines) and re.match(r"\s*:[\w-]+:", lines[options]):
        options += 1
    body = "\n".join(lines[options:])
    if match["name"] == "math":
        yield line + 1 + options, body
    else:
        yield from _prose(body, line + 1 + options, maths=maths)


def markdown_tokens(text: str) -> list[Token]:
    """MyST markdown as the book's parser reads it."""
    return _parser().parse(text)


@cache
def _parser() -> MarkdownIt:
    from markdown_it.renderer import RendererHTML
    from myst_parser.config.main import MdParserConfig
    from myst_parser.parsers.mdit import create_md_parser

    extensions = {"amsmath", "colon_fence", "deflist", "dollarmath", "substitution", "tasklist"}
    config = MdParserConfig(enable_extensions=extensions, dmath_double_inline=True)
    return create_md_parser(config, RendererHTML)


def prose_problems(project: Project) -> list[str]:
    """The numbers typed in the prose of the book, one line each."""
    pieces = [
        (project.relative(path), path.read_text(encoding="utf-8"), False)
        for path in sorted(project.book.rglob("*.md"))
        if not path.is_relative_to(project.runs) and not path.is_relative_to(project.generated)
    ]
    pieces += [(label, text, False) for label, text in prose_of_advice(project)]
    for run in run_pages(project):
        source = project.notebooks / f"{run.name}.ipynb"
        if source.is_file():
            pieces += [(label, text, True) for label, text in _prose_of(project, source)]
    return [
        f"{label}:{line}: the number {number} is typed by hand; glue it from a run, "
        f"or write {{given}}`{number}` if it is a setting"
        for label, text, maths in pieces
        for line, number in typed_numbers(text, maths=maths)
    ]


def _prose_of(project: Project, source: Path) -> Iterator[tuple[str, str]]:
    """The pieces of prose in a notebook, each with the label to put before a line number."""
    label = project.relative(source)
    for index, cell in enumerate(read_notebook(source, label)["cells"], start=1):
        if cell["cell_type"] == "markdown":
            yield f"{label}:cell {index}", "".join(cell["source"])
        figure = cell["metadata"].get("mystnb", {}).get("figure", {})
        if isinstance(figure, dict) and figure.get("caption"):
            yield f"{label}:cell {index} caption", str(figure["caption"])


def records_of(notebook: Mapping[str, Any]) -> dict[str, str]:
    """What an executed notebook recorded, by key."""
    found = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            key = output.get("metadata", {}).get("scrapbook", {}).get("name")
            if key is not None:
                data = output.get("data", {})
                texts = ("".join(v) for kind, v in data.items() if kind.endswith("text/plain"))
                text = next(texts, "")
                found[key] = str(ast.literal_eval(text)) if text[:1] in ("'", '"') else text
    return found


def readme_problems(project: Project) -> list[str]:
    """The quoted numbers of README.md that differ from the runs, one line each."""
    if not project.readme.is_file():
        return []
    text = project.readme.read_text(encoding="utf-8")
    problems = []
    quotes = list(_QUOTE.finditer(text))
    if len(quotes) != len(_MARKER.findall(text)):
        problems.append(
            "README.md: close each <!-- glue: notebook::key --> with <!-- /glue --> and name both"
        )
    for quote in quotes:
        name, key, quoted = quote["name"], quote["key"], quote["text"].strip()
        where = f"README.md:{text.count(chr(10), 0, quote.start()) + 1}"
        output = RunFiles(project.runs, name).output
        try:
            recorded = records_of(read_notebook(output, project.relative(output))).get(key)
        except UserError:
            recorded = None
        if recorded is None:
            problems.append(f"{where}: {name} records no {key!r}")
        elif recorded != quoted:
            problems.append(f"{where}: {name}::{key} is {recorded}, not {quoted!r}")
    return problems
