"""Building the book: check everything, build aside, swap in on success."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.errors import Refused
from analysis.files import sha256_file, write_durably
from analysis.report.book_config import config_problems
from analysis.report.locking import Claim
from analysis.report.pages import missing_pages, prose_pages, run_problems, toc_pages
from analysis.report.project import Project
from analysis.report.prose import prose_problems
from analysis.report.provenance import hash_json, shared_inputs
from analysis.report.records import readme_problems
from analysis.report.results import verify_results
from analysis.report.settled import ledger_problems

FINGERPRINT = ".fingerprint"

Generator = Callable[[Project, Path], None]
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
        "texlive-fonts-recommended texlive-fonts-extra tex-gyre fonts-freefont-otf xindy",
    ),
}


def book_generators() -> Mapping[str, Generator]:
    """The pages written from the code and the runs, by file name."""
    from analysis.report import equations
    from analysis.report.costs_page import write_costs
    from analysis.report.errata import write_errata
    from analysis.report.glossary import write_glossary
    from analysis.report.ledger_page import write_ledger
    from analysis.report.methods_page import write_methods
    from analysis.report.status import write_status

    def write_equations(project: Project, path: Path) -> None:
        try:
            equations.write_index(path, project.root)
        except ValueError as error:
            raise Refused(str(error)) from None

    return {
        "costs.md": write_costs,
        "equations.md": write_equations,
        "errata.md": write_errata,
        "ledger.md": write_ledger,
        "methods.md": write_methods,
        "metrics.md": write_glossary,
        "status.md": write_status,
    }


def problems(project: Project) -> list[str]:
    """Everything that keeps the book from being built, one line each."""
    verify_results(project)
    return [
        *config_problems(project),
        *missing_pages(project),
        *run_problems(project),
        *ledger_problems(project),
        *prose_problems(project, prose_pages(project)),
        *readme_problems(project),
    ]


def fingerprint(project: Project) -> str:
    """Digest of everything the built book is a function of."""
    skipped = (project.generated, project.runs / "failed", project.runs / ".locks")
    files = {
        project.config,
        project.toc,
        *(path for path in project.book.rglob("*") if path.is_file()),
        *(page.with_suffix(".md") for page in toc_pages(project)),
    }
    hashes = {
        project.relative(path): sha256_file(path)
        for path in files
        if path.is_file() and not any(path.is_relative_to(folder) for folder in skipped)
    }
    return hash_json([hashes, shared_inputs(project)])


def build_book(
    project: Project,
    builder: Builder,
    *,
    render: Renderer | None = None,
    generators: Mapping[str, Generator] | None = None,
) -> Path:
    """Build the book unless it is up to date, and return the file to open.

    Args:
        render: renders the project with a builder's name into a folder; jupyter-book by default.
        generators: `book_generators` by default.

    Raises:
        Refused: the book may not be built or does not render; the earlier book is untouched.
    """
    for program in builder.needs:
        if shutil.which(program) is None:
            raise Refused(f"{program} is not installed, and a PDF needs it: {builder.advice}")
    with Claim(project.build / f".{builder.folder}.lock") as claim:
        if not claim.acquire():
            raise Refused(f"{project.relative(project.build)}/ is being built by {claim.holder()}")
        target = project.build / builder.folder
        _recover(target)
        if found := problems(project):
            raise Refused("\n".join(found))
        inputs = fingerprint(project)
        stored = target / FINGERPRINT
        if stored.is_file() and stored.read_text() == inputs and _products(target, builder):
            print("the book is up to date", file=sys.stderr)
        else:
            started = time.monotonic()
            _rebuild(project, builder, target, inputs, render, generators)
            print(f"built in {time.monotonic() - started:.0f} s", file=sys.stderr)
        return _products(target, builder)[0]


def _rebuild(
    project: Project,
    builder: Builder,
    target: Path,
    inputs: str,
    render: Renderer | None,
    generators: Mapping[str, Generator] | None,
) -> None:
    if render is None:
        from analysis.report.rendering import render_book as render
    project.generated.mkdir(parents=True, exist_ok=True)
    for name, generate in (book_generators() if generators is None else generators).items():
        generate(project, project.generated / name)
    aside = project.build / f".building-{builder.folder}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        render(project, builder.name, aside)
        built = aside / "_build" / builder.folder
        if not _products(built, builder):
            raise Refused(f"jupyter-book made no {builder.product}; see _build/build.log")
        if fingerprint(project) != inputs:
            raise Refused("a source of the book changed while it was built; build again")
        write_durably(built / FINGERPRINT, inputs.encode())
        if builder.name == "html":
            write_durably(built / ".nojekyll", b"")
        _swap(built, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _products(folder: Path, builder: Builder) -> list[Path]:
    return sorted(folder.glob(builder.product))


def _swap(new: Path, target: Path) -> None:
    """Put folder ``new`` in the place of ``target``; an interruption leaves one of them whole."""
    old = _old(target)
    shutil.rmtree(old, ignore_errors=True)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, old)
        os.rename(new, target)
    finally:
        _recover(target)
    shutil.rmtree(old, ignore_errors=True)


def _recover(target: Path) -> None:
    """Undo a swap that was interrupted halfway."""
    if not target.exists() and _old(target).exists():
        os.rename(_old(target), target)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")
