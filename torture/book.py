"""The making of a small book, killed at any instant: the next one finishes it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import nbformat
import psutil
import yaml

from analysis.cli.claims import claims
from analysis.report.build import BUILDERS, FINGERPRINT, build_book
from analysis.report.notebooks.jobs import Limits, plan, stale_jobs
from analysis.report.notebooks.runs import run_jobs
from analysis.report.project import Project, find_project, select_notebooks
from kl_term.files import sha256_file
from torture.mutations import QUICK
from torture.outcome import Outcome

#: What `make book` does, in this order.
STAGES = ("run", "claims", "build")
WHOLE, ONE, ALL = "book's making killed", "process of it killed", "all of it killed"
#: Seconds that nothing which was left behind may live on.
PATIENCE = 60.0
_TOC = """\
format: jb-book
root: book/index
chapters:
  - file: book/_run/01_first
  - file: book/_run/02_second
"""
_CONFIG = """\
title: Small
only_build_toc_files: true
exclude_patterns: [".*", ".*/**", _build, scratch]
execute:
  execute_notebooks: "off"
"""
_CELLS = ("n: int = 3", "import time\ntime.sleep(0.2)", "sum(range(n))")


def small_book(root: Path) -> Project:
    """Two notebooks, the claims that are decided in no time, and a page; nothing of it made."""
    here, project = find_project(Path(__file__).parent), Project(root)
    for folder in (project.notebooks, project.book, project.results, root / "scratch"):
        folder.mkdir(parents=True)
    (root / "pyproject.toml").touch()
    shutil.copy(here.lock, project.lock)
    project.toc.write_text(_TOC)
    project.config.write_text(_CONFIG)
    (project.book / "index.md").write_text("# Small\n\nA page.\n")
    rows = yaml.safe_load(here.claims.read_text(encoding="utf-8"))
    project.claims.write_text(yaml.safe_dump([row for row in rows if row["id"] in QUICK]))
    for name in ("01_first", "02_second"):
        cells = [
            nbformat.v4.new_code_cell(source, id=f"cell-{n}") for n, source in enumerate(_CELLS)
        ]
        cells[0].metadata["tags"] = ["parameters"]
        title = nbformat.v4.new_markdown_cell(f"# {name}", id="title")
        nbformat.write(
            nbformat.v4.new_notebook(cells=[title, *cells]), project.notebooks / f"{name}.ipynb"
        )
    return project


def make_book(root: Path, said: Connection) -> None:
    """What `make book` does, in a process of its own; says which stage begins."""
    os.chdir(root)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(root / "scratch")
    project = find_project(root)
    said.send("run")
    jobs = plan(project, select_notebooks(project, []), directory=project.runs)
    run_jobs(project, [job for job, _ in stale_jobs(project, jobs)], Limits())
    said.send("claims")
    claims()
    said.send("build")
    build_book(project, BUILDERS["html"], generators={})


def book(count: int, chance: random.Random, say: Callable[[str], None]) -> list[Outcome]:
    """SIGKILL to the making, to a process that it started, or to all of them at once.

    An instant is so many changes on disk after a stage has begun. A book that was killed up to
    four times is made undisturbed, and its pages are compared with those of one never killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torture.book"])
    tried, lost, silent = Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        project = small_book(Path(folder, "book"))
        left: list[psutil.Process] = []

        def started() -> tuple[BaseProcess, Connection]:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=make_book, args=(project.root, sender))
            process.start()
            receiver.poll(None)
            return process, receiver

        process, receiver = started()
        usual = _watch(process, receiver, project)
        expected = _pages(project)
        assert process.exitcode == 0 and expected, "the small book does not build"
        while tried.total() < count:
            for made in (project.runs, project.build):
                shutil.rmtree(made)
            finished: dict[Path, bytes] = {}
            for _ in range(min(chance.randrange(1, 5), count - tried.total())):
                process, receiver = started()
                stage = chance.choice(STAGES)
                _watch(process, receiver, project, stage, chance.randrange(usual[stage] + 1))
                process.join(chance.uniform(0.0, 0.1))
                finished |= _finished(project)
                killed, family = _kill(process, chance)
                process.join()
                if not killed:
                    break  # it had come to its end
                tried[killed] += 1
                left += family
            process, receiver = started()
            process.join()
            silent += process.exitcode != 0 or _pages(project) != expected
            silent += any(project.build.glob(".building-*")) + any(project.runs.glob(".*.tmp"))
            lost += sum(path.read_bytes() != data for path, data in finished.items())
            say(f"{tried.total()} of {count} kills of a book")
        silent += len(psutil.wait_procs(left, timeout=PATIENCE)[1])
    return [
        Outcome(WHOLE, tried[WHOLE], lost, silent),
        *(Outcome(kind, tried[kind], 0, 0) for kind in (ONE, ALL)),
    ]


def _watch(
    process: BaseProcess, receiver: Connection, project: Project, stage: str = "", news: int = 0
) -> Counter[str]:
    """Wait for the end, or for so many changes on disk in a stage; how many each stage had."""
    counted: Counter[str] = Counter()
    now, before = "", _state(project)
    while process.is_alive():
        try:
            while receiver.poll():
                now = receiver.recv()
        except EOFError:  # it is ending
            process.join()
            break
        if stage and now == stage and counted[now] >= news:
            break
        process.join(0.01)
        after = _state(project)
        counted[now] += after != before
        before = after
    return counted


def _state(project: Project) -> dict[str, int]:
    """Every file that is being made, with its size."""
    found = {}
    for made in (project.runs, project.build, project.root / "scratch"):
        for folder, _, names in os.walk(made):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # just gone
                    found[path] = os.stat(path).st_size
    return found


def _finished(project: Project) -> dict[Path, bytes]:
    """The runs that are published and current, with their provenance."""
    jobs = plan(project, select_notebooks(project, []), directory=project.runs)
    stale = {job.name for job, _ in stale_jobs(project, jobs)}
    files = [job.files for job in jobs if job.name not in stale]
    return {path: path.read_bytes() for file in files for path in (file.output, file.provenance)}


def _pages(project: Project) -> dict[str, str]:
    html = project.build / "html"
    return {
        path.relative_to(html).as_posix(): sha256_file(path)
        for path in html.rglob("*")
        if path.is_file() and path.name != FINGERPRINT  # which holds when the runs were finished
    }


def _kill(process: BaseProcess, chance: random.Random) -> tuple[str, list[psutil.Process]]:
    """Kill; what was killed, if it still lived, and whom it had started."""
    try:
        root = psutil.Process(process.pid)
        family = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return "", []
    victims = {WHOLE: [root], ALL: [root, *family], ONE: [chance.choice(family or [root])]}
    kind = chance.choice([WHOLE, ALL, *([ONE] if family else [])])
    for victim in victims[kind]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    return kind, family
