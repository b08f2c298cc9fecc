"""Which parts of a MyST text are prose: everything else is blanked, positions stay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Directives whose body or argument is no prose.
_VERBATIM = {
    "bibliography",
    "code",
    "code-block",
    "code-cell",
    "csv-table",
    "eval-rst",
    "image",
    "include",
    "literalinclude",
    "raw",
    "tableofcontents",
    "toctree",
}
_PATH_ARGUMENT = {"figure", "glue", "glue:any", "glue:figure", "glue:text", "glue:math"}

_FENCE = re.compile(
    r"^[ \t>]*(?P<fence>`{3,}|~{3,}|:{3,})[ \t]*(?P<name>\{[^}\n]*\})?(?P<rest>[^\n]*)$"
)
_OPTION = re.compile(r"^[ \t>]*:[\w-]+:")
_SPAN = re.compile(
    r"(?P<role>\{[\w:+.-]+\})?(?<![`\\])(?P<ticks>`+)(?!`)"
    r"(?P<content>(?:(?!\n[ \t]*\n).)+?)(?<!`)(?P=ticks)(?!`)",
    re.DOTALL,
)
_MATHS = re.compile(
    r"""\$\$.+?\$\$
      | \\begin\{(?P<env>[a-z]+\*?)\}.+?\\end\{(?P=env)\}
      | (?<![\\$])\$(?!\s)(?:\\.|[^$\\\n]|\n(?![ \t]*\n))+?(?<!\s)\$(?!\d)""",
    re.VERBOSE | re.DOTALL,
)
_MARKUP = [
    re.compile(pattern, re.DOTALL | re.MULTILINE)
    for pattern in (
        r"\A---\n.*?\n---$",  # front matter
        r"<!--.*?-->",
        r"^%[^\n]*$",  # a MyST comment
        r"<(script|style)\b.*?</\1>",
        r"(?<=\])\([^)\n]*\)",  # a link's target
        r"^\[[^\]\n]+\]:[^\n]*$",
        r"<[a-zA-Z/][^<>]*>",
        r"https?://[^\s)>\]]+",
        r"\b(?:arXiv|doi):\s*[\w./-]+",
        r"\{\{.*?\}\}",
        r"\{[.#\w][^{}\n]*=[^{}\n]*\}",  # attributes such as {width="50%"}
        r"^\([\w:.-]+\)=$",
    )
]


@dataclass(frozen=True)
class _Fence:
    """An open fence: its character, its length, and whether its body is no prose."""

    mark: str
    length: int
    verbatim: bool

    def closed_by(self, fence: str, rest: str) -> bool:
        return fence[0] == self.mark and len(fence) >= self.length and not rest.strip()


def mask_code(text: str, *, maths: bool) -> str:
    """Blank fenced code, directive syntax, code spans and roles; with ``maths``, formulas too."""
    without_fences = _mask_fences(text, maths=maths)

    def blank_span(match: re.Match[str]) -> str:
        return match[0] if match["role"] == "{math}" and not maths else _blank(match)

    return _SPAN.sub(blank_span, without_fences)


def mask_markup(text: str, *, maths: bool) -> str:
    """Blank comments, links, HTML and front matter; with ``maths``, formulas too."""
    for pattern in _MARKUP:
        text = pattern.sub(_blank, text)
    return _MATHS.sub(_blank, text) if maths else text


def code_spans(text: str) -> Iterator[tuple[int, str, str]]:
    """The position, role and content of each code span outside fenced code."""
    text = re.sub(r"<!--.*?-->", _blank, _mask_fences(text, maths=True), flags=re.DOTALL)
    for match in _SPAN.finditer(text):
        yield match.start(), (match["role"] or "").strip("{}"), match["content"]


def _mask_fences(text: str, *, maths: bool) -> str:
    lines = []
    stack: list[_Fence] = []
    in_options = False
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if stack and stack[-1].verbatim:
            if match and not match["name"] and stack[-1].closed_by(match["fence"], match["rest"]):
                stack.pop()
            lines.append(" " * len(line))
        elif match and not _is_inline(match):
            in_options = bool(match["name"])
            kept = _open_or_close(stack, match, maths=maths)
            lines.append(" " * (len(line) - len(kept)) + kept)
        elif in_options and _OPTION.match(line):
            lines.append(" " * len(line))
        else:
            in_options = False
            lines.append(line)
    return "\n".join(lines)


def _is_inline(match: re.Match[str]) -> bool:
    """Whether what looks like a fence is a code span that happens to begin the line."""
    return match["fence"][0] == "`" and "`" in match["rest"]


def _open_or_close(stack: list[_Fence], match: re.Match[str], *, maths: bool) -> str:
    """Update the open fences; the part of the line that is prose."""
    fence, rest = match["fence"], match["rest"]
    if not match["name"]:
        for depth in reversed(range(len(stack))):
            if stack[depth].closed_by(fence, rest):
                del stack[depth:]
                return ""
        stack.append(_Fence(fence[0], len(fence), verbatim=fence[0] != ":"))
        return ""
    name = match["name"].strip("{}")
    verbatim = name in _VERBATIM or (name == "math" and maths)
    stack.append(_Fence(fence[0], len(fence), verbatim))
    return "" if verbatim or name in _PATH_ARGUMENT else rest


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])
