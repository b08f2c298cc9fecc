"""Building the book: check everything, render aside, swap in on success."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

import analysis
from analysis.records.manifests import verify_results
from analysis.report.children import child, stop_tree
from analysis.report.pages import config_problems, run_problems, toc_pages
from analysis.report.processes import exclusive, pinned_environment
from analysis.report.project import Project
from analysis.report.prose import prose_problems, readme_problems
from analysis.report.provenance import environment_sha256, hash_json, ledger_problems
from kl_term.errors import UserError
from kl_term.files import (
    replace_file,
    replace_folder,
    restore_folder,
    sha256_file,
    sha256_tree,
)

FINGERPRINT = ".fingerprint"

Renderer = Callable[[Project, str, Path], None]


@dataclass(frozen=True)
class Builder:
    """One way to render the book.

    Attributes:
        name: what jupyter-book calls it.
        folder: where its result lies under ``_build``.
        product: the file in ``folder`` to open, a glob pattern.
        needs: programs that must be on the path, with the way to install them.
    """

    name: str
    folder: str
    product: str
    needs: tuple[str, ...] = ()
    advice: str = ""


BUILDERS = {
    "html": Builder("html", "html", "index.html"),
    "pdflatex": Builder(
        "pdflatex",
        "latex",
        "*.pdf",
        ("xelatex", "latexmk", "xindy"),
        "apt install latexmk texlive-xetex texlive-latex-recommended texlive-latex-extra "
        "texlive-fonts-recommended texlive-fonts-extra texlive-lang-chinese tex-gyre "
        "fonts-freefont-otf xindy",
    ),
}


def build_book(
    project: Project,
    builder: Builder,
    *,
    render: Renderer | None = None,
    generators: Mapping[str, Callable[[Project], str]] | None = None,
) -> Path:
    """Build the book unless it is up to date, and return the file to open.

    What may not be published, or does not render, leaves the earlier book as it is.

    Args:
        render: renders the project with a builder's name into a folder; jupyter-book by default.
        generators: of the pages that are written; by default `generated_pages.GENERATORS`.
    """
    for program in builder.needs:
        if shutil.which(program) is None:
            raise UserError(f"{program} is not installed, and a PDF needs it: {builder.advice}")

    def refuse(holder: str) -> None:
        raise UserError(f"{project.relative(project.build)}/ is being built by {holder}")

    with exclusive(project.build / f".{builder.folder}.lock", refuse):
        target = project.build / builder.folder
        restore_folder(target)
        problems = config_problems(project)
        verify_results(project.results)
        inputs = _inputs(project, builder)
        problems += [*run_problems(project), *ledger_problems(project)]
        stored = target / FINGERPRINT
        current = stored.is_file() and stored.read_text().partition(" ")[0] == inputs
        if not current:
            problems += [*prose_problems(project), *readme_problems(project)]
        if problems:
            raise UserError("\n".join(problems))
        if current and stored.read_text() == _said_of(inputs, target):
            print("the book is up to date", file=sys.stderr)
        else:
            if current:
                print("the built book was edited since: building it again", file=sys.stderr)
            started = time.monotonic()
            project.generated.mkdir(parents=True, exist_ok=True)
            if generators is None:
                from analysis.report.generated_pages import GENERATORS as generators
            for name, generate in generators.items():
                replace_file(project.generated / name, generate(project).encode())
            _rebuild(project, builder, target, inputs, render or render_book)
            print(f"built in {time.monotonic() - started:.0f} s", file=sys.stderr)
        return _products(target, builder)[0]


def fingerprint(project: Project) -> str:
    """Digest of everything the built book is a function of.

    A page may show any source below the command line, with its comments.
    """
    skipped = (project.generated, project.runs / "failed", project.runs / ".locks")
    files = {
        project.config,
        project.toc,
        project.readme,
        project.address,
        *(path for path in project.book.rglob("*") if path.is_file()),
        *(path for path in project.root.glob("notebooks/*.ipynb")),
        *(page.with_suffix(".md") for page in toc_pages(project)),
        *(p for p in project.library.rglob("*.py") if p.parent != project.library / "cli"),
        *(p for p in project.package.rglob("*.py") if p.parent != project.package / "cli"),
        *(project.package / "report" / "templates").glob("*"),
    }
    hashes = {
        project.relative(path): sha256_file(path)
        for path in files
        if path.is_file() and not any(path.is_relative_to(folder) for folder in skipped)
    }
    return hash_json([hashes, sha256_tree(project.results), environment_sha256(project)])


def current_pdf(project: Project) -> Path | None:
    """The book as a PDF, if there is one of the same inputs."""
    folder = project.build / BUILDERS["pdflatex"].folder
    stored, found = folder / FINGERPRINT, _products(folder, BUILDERS["pdflatex"])
    if not found or not stored.is_file():
        return None
    return found[0] if stored.read_text().partition(" ")[0] == fingerprint(project) else None


def _inputs(project: Project, builder: Builder) -> str:
    """The digest of all that a builder's product is a function of: the pages offer the PDF."""
    pdf = current_pdf(project) if builder.name == "html" else None
    said = fingerprint(project)
    return said if pdf is None else hash_json([said, sha256_file(pdf)])


def _rebuild(
    project: Project, builder: Builder, target: Path, inputs: str, render: Renderer
) -> None:
    from analysis.report.translation import FOLDER, catalogues

    aside = project.build / f".building-{builder.folder}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        chinese = None
        if builder.name == "html" and catalogues(project):
            chinese = _staged(project, aside / FOLDER)
        with ThreadPoolExecutor() as pool:
            edition = pool.submit(_edition, chinese, builder, render) if chinese else None
            try:
                render(project, builder.name, aside)
            except BaseException:
                _stop_rendering()
                raise
            built = aside / "_build" / builder.folder
            if not _products(built, builder):
                raise UserError(f"jupyter-book made no {builder.product}; see _build/build.log")
            if edition:
                os.rename(edition.result(), built / FOLDER)
        if _inputs(project, builder) != inputs:
            raise UserError("a source of the book changed while it was built; build again")
        if builder.name == "html":
            replace_file(built / ".nojekyll", b"")
        replace_file(built / FINGERPRINT, _said_of(inputs, built).encode())
        replace_folder(built, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _said_of(inputs: str, built: Path) -> str:
    """The hash of what the book is a function of, and that of the book."""
    return f"{inputs} {sha256_tree(built)}"


def _staged(project: Project, root: Path) -> Project:
    """The sources of the edition in Chinese."""
    from analysis.report.edition import stage

    stage(project, root)
    staged = Project(root)
    staged.build.mkdir()
    return staged


def _edition(staged: Project, builder: Builder, render: Renderer) -> Path:
    """Render the edition in Chinese, and return its folder."""
    try:
        render(staged, builder.name, staged.root)
    except UserError as refusal:
        raise UserError(f"in Chinese:\n{refusal}") from None
    return staged.build / builder.folder


def _products(folder: Path, builder: Builder) -> list[Path]:
    return sorted(folder.glob(builder.product))


#: The program that renders.
JUPYTER_BOOK = "jupyter_book.cli.main:main"
_STAGE = re.compile(r"(reading sources|writing output|copying images)\.\.\.\s*\[\s*(\d+)%\]")
_WARNING = re.compile(r"\b(WARNING|ERROR|SEVERE|CRITICAL)\b|^Extension error|^[\w.]+Error: \S")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: The processes that render an edition now.
_RENDERING: set[int] = set()


def _stop_rendering() -> None:
    """Stop what is rendered: a book that failed in English waits for no other edition."""
    for pid in tuple(_RENDERING):
        stop_tree(pid)


def render_book(project: Project, builder: str, destination: Path) -> None:
    """Render the book with every warning an error, nothing cached, into ``destination``/_build.

    The full output of jupyter-book is kept in ``_build/build.log``.
    """
    packages = [str(project.root), str(Path(analysis.__file__).parents[1])]
    with child(
        *(JUPYTER_BOOK, "build", str(project.root), "--all", "-W", "--keep-going", "-n"),
        *("--builder", builder, "--path-output", str(destination)),
        cwd=project.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,  # a carriage return, which ends a line of progress, ends one here
        errors="replace",
        env=pinned_environment(
            PYTHONPATH=os.pathsep.join(packages), PYTHONUNBUFFERED="1", NO_COLOR="1"
        ),
    ) as process:
        _RENDERING.add(process.pid)
        try:
            with open(project.build / "build.log", "w", encoding="utf-8") as log:
                lines = list(_shown(process.stdout, log))
            failed = process.wait() != 0
        finally:
            _RENDERING.discard(process.pid)
    if failed:
        raise UserError(failure_message(lines, project.root))


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


def _shown(lines: Iterable[str], log: IO[str]) -> Iterator[str]:
    """Pass lines through, logging them; show how far the stage is that they belong to."""
    with tqdm(
        total=100,
        desc="starting",
        disable=not sys.stderr.isatty(),
        leave=False,
        bar_format="{desc:<16} {bar:20} {n:.0f} % [{elapsed}]",
    ) as bar:
        for line in (_ANSI.sub("", line).strip() for line in lines):
            log.write(line + "\n")
            if match := _STAGE.match(line):
                bar.set_description_str(match[1], refresh=False)
                bar.n = int(match[2])
                bar.refresh()
            elif line:
                yield line
