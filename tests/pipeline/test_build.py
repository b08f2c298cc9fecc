"""What may be published, and how one book replaces another."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from analysis.report import children
from analysis.report.build import (
    BUILDERS,
    FINGERPRINT,
    build_book,
    current_pdf,
    failure_message,
    render_book,
)
from analysis.report.generated_pages import status_page
from analysis.report.pages import output_problems
from analysis.report.processes import exclusive
from analysis.report.project import Project
from analysis.report.provenance import RunFiles, read_provenance, write_provenance
from kl_term.errors import Stopped, UserError
from tests.pipeline.conftest import Change, Workspace, edit, remove

ROOT = Path(__file__).parents[2]
TOC = """\
format: jb-book
root: book/index
chapters:
  - file: book/_run/01_a
  - file: book/_generated/status
"""
CONFIG = "title: T\nonly_build_toc_files: true\nexecute:\n  execute_notebooks: 'off'\n"


def render(project: Project, builder: str, destination: Path) -> None:
    """Stands in for jupyter-book."""
    html = destination / "_build" / "html"
    html.mkdir(parents=True)
    (html / "index.html").write_text((project.book / "index.md").read_text())


def build(workspace: Workspace, **options: Any) -> str:
    chosen = {"render": render, "generators": {"status.md": status_page}} | options
    return build_book(workspace.project, BUILDERS["html"], **chosen).read_text()


def html(workspace: Workspace) -> Path:
    return workspace.project.build / "html"


@pytest.fixture
def book(workspace: Workspace) -> Workspace:
    """A project whose one run is current, ready to build."""
    root = workspace.project.root
    (root / "_toc.yml").write_text(TOC)
    (root / "_config.yml").write_text(CONFIG)
    (workspace.project.book / "index.md").write_text("# First\n")
    workspace.notebook("01_a", "from kl_term.kl import terms; x = 1")
    workspace.run()
    return workspace


def reseal(book: Workspace, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the executed notebook as a run could have, so that only its content is wrong."""
    files = RunFiles(book.project.runs, "01_a")
    notebook = json.loads(files.output.read_text())
    change(notebook)
    files.output.write_text(json.dumps(notebook))
    provenance = read_provenance(files.provenance)
    assert provenance is not None
    digest = hashlib.sha256(files.output.read_bytes()).hexdigest()
    write_provenance(files.provenance, provenance.model_copy(update={"output": digest}))


def test_book_is_built_once_and_again_after_a_change(book: Workspace) -> None:
    calls: list[str] = []

    def counted(project: Project, builder: str, destination: Path) -> None:
        calls.append(builder)
        render(project, builder, destination)

    assert build(book, render=counted) == "# First\n"
    assert build(book, render=counted) == "# First\n"
    assert calls == ["html"]
    assert (html(book) / ".nojekyll").is_file()
    (book.project.book / "index.md").write_text("# Second\n")
    assert build(book, render=counted) == "# Second\n"
    (book.project.package / "cli").mkdir()
    (book.project.package / "cli" / "main.py").write_text("# A comment.\n")
    build(book, render=counted)
    assert calls == ["html"] * 2
    (book.project.library / "kl" / "terms.py").write_text("value = 2\n")
    book.run()
    build(book, render=counted)
    assert calls == ["html"] * 3


def test_a_built_page_that_was_edited_is_built_again(
    book: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    build(book)
    (html(book) / "index.html").write_text("# Edited\n")
    assert build(book) == "# First\n"
    assert "edited since" in capsys.readouterr().err
    (html(book) / "added.png").touch()
    build(book)
    assert not (html(book) / "added.png").exists()


def test_status_page_tells_the_runs(book: Workspace) -> None:
    book.run(texts={"n": "3"})
    build(book)
    page = (book.project.generated / "status.md").read_text()
    assert "| {doc}`/book/_run/01_a` | quick |" in page
    assert "| {doc}`/book/_run/01_a` | `n = 3` |" in page
    assert "No recorded result" in page


def store(output: dict[str, Any]) -> Change:
    return lambda book: reseal(book, lambda nb: nb["cells"][2]["outputs"].append(output))


def data(kind: str, text: str) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": {kind: text}}


def unexecute(book: Workspace) -> None:
    reseal(book, lambda notebook: notebook["cells"][2].update(execution_count=None))


def fail_again(book: Workspace) -> None:
    book.notebook("01_a", "# stub\nfail('E')")
    with pytest.raises(UserError):
        book.run()
    book.notebook("01_a", "from kl_term.kl import terms; x = 1")


def result_without_manifest(book: Workspace) -> None:
    (book.project.results / "gpu").mkdir()
    (book.project.results / "gpu" / "table.csv").touch()


ERROR = {"output_type": "error", "ename": "ZeroDivisionError", "evalue": "", "traceback": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("book/_run/01_a.ipynb"), "book/_run/01_a.ipynb: it was never run; run: analysis"),
        (remove("notebooks/01_a.ipynb"), "there is no notebooks/01_a.ipynb; correct _toc.yml"),
        (edit("notebooks/01_a.ipynb", "x = 1", "x = 2"), "01_a.ipynb: the notebook changed"),
        (fail_again, "01_a.ipynb: its last run failed: cell 3"),
        (unexecute, "01_a.ipynb: cell 3 was not executed"),
        (store(ERROR), "01_a.ipynb: cell 3 stores the error ZeroDivisionError"),
        (store(data("text/html", "<script>x</script>")), "cell 3 stores a script (text/html)"),
        (result_without_manifest, "results/gpu/manifest.json is missing"),
        (
            edit("_config.yml", "title", "tittle"),
            "_config.yml: unknown key tittle; did you mean ti",
        ),
        (edit("_config.yml", "execute_n", "exekute_n"), "unknown key execute.exekute_notebooks"),
        (edit("_config.yml", "title: T", "title: T\ntitle: U"), "_config.yml:2: the key 'title'"),
        (edit("_toc.yml", "root", "rooot"), "_toc.yml: 'root' key not found"),
        (
            edit("_toc.yml", "format", "loop: &a [*a]\nformat"),
            "_toc.yml: no valid YAML",
        ),
        (edit("book/index.md", "First", "First 0.25"), "book/index.md:1: the number 0.25"),
    ],
)
def test_fault_stops_the_build_and_leaves_the_old_book(
    book: Workspace, change: Change, message: str
) -> None:
    build(book)
    change(book)
    with pytest.raises(UserError) as refusal:
        build(book)
    assert message in str(refusal.value)
    assert (html(book) / "index.html").read_text() == "# First\n"


def test_every_problem_is_named_at_once(book: Workspace) -> None:
    edit("book/index.md", "First", "0.25")(book)
    edit("_config.yml", "title", "tittle")(book)
    with pytest.raises(UserError) as refusal:
        build(book)
    assert len(str(refusal.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("kind", "text", "refused"),
    [
        ("text/html", "<p>x</p><SCRIPT src='https://a.org/x.js'></SCRIPT>", True),
        ("text/html", "<script>alert(1)", True),
        ("text/html", "<img src=x onerror=alert(1)>", True),
        ("text/html", "<a href='javascript:alert(1)'>x</a>", True),
        ("text/html", "<iframe src='x'></iframe>", True),
        ("image/svg+xml", "<svg><script>x</script></svg>", True),
        ("application/javascript", "alert(1)", True),
        ("text/html", '<script src="../../_static/widget.js"></script>', False),
        ("text/html", "<table><tr><td>on time</td></tr></table>", False),
        ("text/html", "<style>td { color: red }</style>", False),
        ("text/plain", "<script>shown as text</script>", False),
        ("image/png", "PHNjcmlwdD4=", False),
    ],
)
def test_scripts_in_outputs(kind: str, text: str, refused: bool) -> None:
    cell = {"cell_type": "code", "source": "x", "execution_count": 1, "metadata": {}}
    cell["outputs"] = [data(kind, text)]
    assert bool(list(output_problems({"cells": [cell]}))) == refused


def test_a_child_ends_with_whoever_started_it_and_takes_all_that_it_started(tmp_path: Path) -> None:
    """Else it would go on writing into the folder of the next build."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-P", children.__file__, scratch, "tests.pipeline.stubs:sleeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        sleeps = psutil.Process(int(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(60) == 1
    assert psutil.wait_procs([sleeps], timeout=5)[1] == [] or sleeps.status() == "zombie"
    assert not scratch.exists()


@pytest.mark.parametrize("error", [UserError("broken"), Stopped(15), OSError("disk")])
def test_failed_rendering_leaves_the_old_book(book: Workspace, error: Exception) -> None:
    build(book)

    def fail(project: Project, builder: str, destination: Path) -> None:
        render(project, builder, destination)
        raise error

    (book.project.book / "index.md").write_text("# Second\n")
    with pytest.raises(type(error)):
        build(book, render=fail)
    assert (html(book) / "index.html").read_text() == "# First\n"
    assert {path.name for path in book.project.build.iterdir()} <= {"html", ".html.lock"}


def test_a_failure_in_english_waits_for_no_other_edition(
    book: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (book.project.root / "_config.yml").write_text(
        f"{CONFIG}sphinx: {{config: {{html_theme_options: {{logo: {{text: T}}}}}}}}\n"
    )
    catalogue = book.project.book / "locale/zh_CN/index.po"
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text('msgid "# First"\nmsgstr "# 一"\n')
    monkeypatch.setattr("analysis.report.build.JUPYTER_BOOK", "tests.pipeline.stubs:jupyter_book")
    started = time.monotonic()
    with pytest.raises(UserError, match="WARNING: broken"):
        build(book, render=render_book)
    assert time.monotonic() - started < 60


def test_source_changed_while_building_is_not_published(book: Workspace) -> None:
    def meddle(project: Project, builder: str, destination: Path) -> None:
        render(project, builder, destination)
        (project.book / "index.md").write_text("# Meanwhile\n")

    with pytest.raises(UserError, match="changed while it was built"):
        build(book, render=meddle)
    assert not html(book).exists()


def test_second_builder_is_refused_and_told_by_whom(book: Workspace) -> None:
    with (
        exclusive(book.project.build / ".html.lock", print),
        pytest.raises(UserError, match=rf"is being built by process {os.getpid()}"),
    ):
        build(book)


def test_the_pages_offer_a_pdf_of_the_same_inputs_only(
    book: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_paper(project: Project, builder: str, destination: Path) -> None:
        folder = destination / "_build" / "latex"
        folder.mkdir(parents=True)
        (folder / "kl-term.pdf").write_bytes(b"%PDF")

    renders = []

    def counted(*of: Any) -> None:
        renders.append(of)
        render(*of)

    monkeypatch.setattr(shutil, "which", lambda program: program)
    build(book, render=counted)
    assert current_pdf(book.project) is None
    build_book(book.project, BUILDERS["pdflatex"], render=on_paper, generators={})
    assert current_pdf(book.project) == book.project.build / "latex/kl-term.pdf"
    build(book, render=counted)  # again, for now there is a PDF to offer
    build(book, render=counted)
    assert len(renders) == 2
    (book.project.book / "index.md").write_text("# Second\n")
    assert current_pdf(book.project) is None


def test_pdf_without_tex_says_what_to_install(
    book: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(UserError, match=r"xelatex is not installed.*apt install latexmk"):
        build_book(book.project, BUILDERS["pdflatex"], render=render, generators={})


def test_warnings_are_relative_and_said_once() -> None:
    warning, of_cell = "/a b/x.md:3: WARNING: bad", "/a b/01_a.ipynb:20013: WARNING: bad"
    message = failure_message([warning, "noise", of_cell, warning], Path("/a b"))
    told = ["x.md:3: WARNING: bad", "01_a.ipynb:cell 2:13: WARNING: bad"]
    assert message.splitlines()[:-1] == told


@pytest.mark.slow
def test_real_jupyter_book_refuses_what_sphinx_finds_and_then_builds(book: Workspace) -> None:
    """Twice, so that a cache of the first build cannot hide the second one's warnings."""
    generators = {"status.md": status_page}
    toc = book.project.toc
    toc.write_text(TOC + "  - file: book/nowhere\n")
    (book.project.book / "index.md").write_text(
        "# First\n\nSee {ref}`nowhere` and {doc}`gone` and [here](none.md).\n\n"
        "{glue:text}`_run/01_a.ipynb::gap:s` {py:func}`analysis.nothing`\n"
    )
    for _ in range(2):
        with pytest.raises(UserError) as refusal:
            build_book(book.project, BUILDERS["html"], generators=generators)
        said = str(refusal.value)
        for fault in ("index.md:3: WARNING: undefined label: 'nowhere'", "gone", "none.md", "gap"):
            assert fault in said, fault
        assert "book/nowhere" in said and "analysis.nothing" in said
    toc.write_text(TOC.replace("chapters", "chaptres"))
    with pytest.raises(UserError, match="chaptres"):
        build_book(book.project, BUILDERS["html"], generators=generators)
    toc.write_text(TOC)
    (book.project.book / "index.md").write_text("# First\n\nSee {doc}`/book/_run/01_a`.\n")
    index = build_book(book.project, BUILDERS["html"], generators=generators)
    assert index.is_file() and (html(book) / FINGERPRINT).is_file()
    assert "Title" in (html(book) / "book" / "index.html").read_text()


@pytest.mark.slow
def test_unchanged_book_needs_no_heavy_imports(book: Workspace) -> None:
    """What ``make book`` costs when there is nothing to do is mostly imports."""
    build(book)
    script = (
        "import sys\n"
        "from analysis.cli.main import main\n"
        "assert main(['run']) == 0 and main(['build']) == 0\n"
        "heavy = {'torch', 'papermill', 'sphinx', 'nbformat', 'matplotlib', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=book.project.root,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "01_a  up to date" in done.stderr and "the book is up to date" in done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
