"""Calling jupyter-book, strictly, and saying in few words what it is doing and what it found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from tqdm import tqdm

import analysis
from analysis.errors import Refused
from analysis.report.processes import pinned_environment, stop_tree
from analysis.report.project import Project

_JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"
_STAGE = re.compile(
    r"^(reading sources|writing output|copying images)\.\.\.\s*\[\s*(\d+)%\]|"
    r"^(running xelatex|Running PDF build)"
)
_WARNING = re.compile(r"\b(WARNING|ERROR|SEVERE|CRITICAL)\b|^Extension error|^[\w.]+Error: \S")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def render_book(project: Project, builder: str, destination: Path) -> None:
    """Render the book with every warning an error, nothing cached, into ``destination``/_build.

    The full output of jupyter-book is kept in ``_build/build.log``.

    Raises:
        Refused: it fails; one line a warning, each with its file and line.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _JUPYTER_BOOK, "build", str(project.root)),
            *("--all", "-W", "--keep-going", "-n"),
            *("--builder", builder, "--path-output", str(destination)),
        ],
        cwd=project.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=pinned_environment(
            PYTHONPATH=os.pathsep.join(
                [str(project.root), str(Path(analysis.__file__).parents[1])]
            ),
            PYTHONUNBUFFERED="1",
            NO_COLOR="1",
        ),
    )
    try:
        assert process.stdout is not None
        with open(project.build / "build.log", "w", encoding="utf-8") as log:
            lines = list(_shown(_lines(process.stdout), log))
        failed = process.wait() != 0
    finally:
        if process.poll() is None:
            stop_tree(process.pid)
            process.wait()
    if failed:
        raise Refused(failure_message(lines, project.root))


def failure_message(lines: Iterable[str], root: Path) -> str:
    """The warnings among jupyter-book's output lines, relative to ``root``; else its last lines."""
    lines = [_by_cell(line.replace(f"{root}{os.sep}", "")) for line in lines]
    warnings = [line for line in lines if _WARNING.search(line)]
    said = list(dict.fromkeys(warnings)) or lines[-10:]
    return "\n".join([*said, "the book does not build; the earlier one is untouched"])


def _by_cell(line: str) -> str:
    """MyST-NB numbers the lines of cell k of a notebook from k * 10000."""
    return re.sub(
        r"\.ipynb:(\d+)(\d{4})\b", lambda m: f".ipynb:cell {m[1]}:{int(m[2])}", line, count=1
    )


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Lines ended by a newline or, as progress is, by a carriage return."""
    rest = b""
    while chunk := stream.read1(65536):  # type: ignore[attr-defined]
        *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
        yield from (_ANSI.sub("", line.decode(errors="replace")).strip() for line in lines)
    yield _ANSI.sub("", rest.decode(errors="replace")).strip()


def _shown(lines: Iterable[str], log: IO[str]) -> Iterator[str]:
    """Pass lines through, logging them and showing the stage they belong to."""
    interactive = sys.stderr.isatty()
    seen: set[str] = set()
    with tqdm(
        total=100,
        desc="starting",
        disable=not interactive,
        leave=False,
        bar_format="{desc:<16} {bar:20} {n:.0f} % [{elapsed}]",
    ) as bar:
        for line in lines:
            log.write(line + "\n")
            if match := _STAGE.match(line):
                stage = match[1] or match[3]
                bar.set_description_str(stage)
                bar.n = int(match[2] or 0)
                bar.refresh()
                if not interactive and stage not in seen:
                    print(f"{stage} ...", file=sys.stderr, flush=True)
                seen.add(stage)
            elif line:
                yield line
