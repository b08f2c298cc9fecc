"""Runs without a kernel: when they are stale, how they are published, and who may write."""

from __future__ import annotations

import concurrent.futures
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.report.notebooks import execution
from analysis.report.notebooks.jobs import Limits, stale_jobs
from analysis.report.notebooks.stored import refresh_notebooks
from analysis.report.provenance import ledger_problems, read_provenance, store_ledger
from kl_term.errors import UserError
from kl_term.files import replace_file, sealed
from tests.pipeline.conftest import DEFAULTS, Change, Workspace, edit, remove

#: Imports one module, reads one result, and has a child that says so.
READS = "# stub\nreads.write_text('results/a.csv\\n')\n"
CODE = "from kl_term.kl import terms"


def reasons(workspace: Workspace, **options: object) -> list[str]:
    return [reason for _, reason in stale_jobs(workspace.project, workspace.plan(**options))]


@pytest.fixture
def ran(workspace: Workspace) -> Workspace:
    (workspace.project.results / "a.csv").write_text("1")
    workspace.notebook("01_a", CODE, READS)
    workspace.run()
    assert reasons(workspace) == []
    return workspace


def write(path: str, text: str) -> Change:
    def change(workspace: Workspace) -> None:
        file = workspace.project.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return change


def notebook(*code: str, **options: str) -> Change:
    return lambda workspace: workspace.notebook("01_a", *code, **options)


def tear(workspace: Workspace) -> None:
    path = workspace.project.runs / "01_a.json"
    path.write_bytes(path.read_bytes()[:100])


def reversion(workspace: Workspace) -> None:
    """As another version would have written it."""
    path = workspace.project.runs / "01_a.json"
    path.write_bytes(sealed(json.loads(path.read_text()) | {"version": 2}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (notebook("x = 2", READS), "the notebook changed"),
        (notebook(CODE, READS, prose="# Other"), "the notebook changed"),
        (
            notebook(CODE, READS, parameters=DEFAULTS.replace("n: int = 1", "n: int = 2")),
            "the notebook changed",
        ),
        (write("kl_term/kl/terms.py", "value = 2\n"), "the code that it imports changed"),
        (write("results/a.csv", "2"), "results/a.csv changed"),
        (remove("results/a.csv"), "results/a.csv changed"),
        (write("requirements.lock", "tqdm==2\n"), "requirements.lock or torch changed"),
        (edit("book/_run/01_a.ipynb", "terms", "words"), "edited after the run"),
        (tear, "no readable provenance"),
        (reversion, "no readable provenance"),
        (edit("book/_run/01_a.json", '"n": 1', '"n": 9'), "no readable provenance"),
        (remove("book/_run/01_a.ipynb"), "never run"),
    ],
)
def test_a_change_of_an_input_makes_the_run_stale(
    ran: Workspace, change: Change, reason: str
) -> None:
    change(ran)
    (found,) = reasons(ran)
    assert reason in found
    ran.run()
    assert reasons(ran) == []


@pytest.mark.parametrize(
    "change",
    [
        write("analysis/cli/main.py", "import os\n"),
        write("kl_term/kl/other.py", "value = 2\n"),
        write("kl_term/kl/terms.py", '"""Doc."""\n\nvalue = 1  # why\n'),
        write("results/b.csv", "2"),
        write("results/b/manifest.json", "{}"),
    ],
)
def test_what_a_run_does_not_use_leaves_it_current(ran: Workspace, change: Change) -> None:
    change(ran)
    assert reasons(ran) == []


def test_other_parameters_are_another_run(ran: Workspace) -> None:
    assert reasons(ran, texts={"n": "1"}) == []
    (reason,) = reasons(ran, texts={"n": "2"})
    assert "other parameters" in reason


def test_provenance_says_what_ran(workspace: Workspace) -> None:
    workspace.notebook("01_a")
    workspace.run(texts={"profile": "full", "n": "3"})
    provenance = read_provenance(workspace.project.runs / "01_a.json")
    assert provenance is not None
    assert provenance.notebook == "notebooks/01_a.ipynb"
    assert provenance.profile == "full"
    assert provenance.parameters == {"n": 3, "rate": 0.5, "label": "a", "profile": "full"}
    assert set(provenance.inputs) == {"notebook", "parameters", "code", "environment"}
    assert provenance.threads == 1 and provenance.device.startswith("CPU (")
    assert provenance.finished_at.utcoffset() is not None


def test_refresh_copies_outputs_and_leaves_the_run_current(ran: Workspace) -> None:
    source = ran.project.notebooks / "01_a.ipynb"
    assert refresh_notebooks(ran.project) == [source]
    assert json.loads(source.read_text())["cells"][2]["execution_count"] == 3
    assert reasons(ran) == []
    assert refresh_notebooks(ran.project) == []
    ran.run(texts={"n": "2"})
    with pytest.raises(UserError, match="01_a: other parameters"):
        refresh_notebooks(ran.project)


def test_refresh_of_one_notebook_asks_for_the_run_of_no_other(ran: Workspace) -> None:
    source = ran.project.notebooks / "01_a.ipynb"
    (ran.project.notebooks / "02_b.ipynb").write_bytes(source.read_bytes())
    with pytest.raises(UserError, match="02_b: it was never run"):
        refresh_notebooks(ran.project)
    assert refresh_notebooks(ran.project, ["01"]) == [source]


def test_success_is_published_and_nothing_else_left(workspace: Workspace) -> None:
    workspace.notebook("01_a", "x = 1")
    workspace.notebook("02_b", "x = 2")
    workspace.project.runs.mkdir(parents=True)
    (workspace.project.runs / ".01_a.ipynb.12345.tmp").write_text("torn by a kill")
    workspace.run()
    assert {p.name for p in workspace.project.runs.iterdir() if p.is_file()} == {
        f"{name}.{end}" for name in ("01_a", "02_b") for end in ("ipynb", "json")
    }


def test_failure_names_the_cell_keeps_the_old_output_and_lets_others_finish(
    ran: Workspace,
) -> None:
    old = (ran.project.runs / "01_a.ipynb").read_bytes()
    ran.notebook("01_a", "# stub\nfail('E')")
    ran.notebook("02_b")
    with pytest.raises(UserError, match=r"^01_a: cell 3 \(`# stub`\) raised E; see book/_run/fail"):
        ran.run()
    assert (ran.project.runs / "01_a.ipynb").read_bytes() == old
    assert (ran.project.runs / "02_b.ipynb").is_file()
    assert "raised E" in json.loads((ran.project.runs / "failed/01_a.json").read_text())["reason"]
    ran.notebook("01_a", "x = 1")
    ran.run()
    assert not (ran.project.runs / "failed/01_a.json").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), 9)", r"cell 3 .* ended its runner \(exit -9\)"),
        ("sys.exit('no luck')", r"cell 3 .* ended its runner \(exit 1\): no luck"),
        ("time.sleep(60)", r"cell 3 .* fell silent"),
        ("cell['outputs'] = ['x' * 3000]", r"cell 3 .* wrote more than 0.002 MB of output"),
        (
            "source.write_text(source.read_text().replace('# Title', '# Other'))",
            "changed while it ran",
        ),
        ("output.write_text(json.dumps(notebook)); os._exit(0)", "cell 3 was not executed"),
    ],
)
def test_a_run_that_goes_wrong_is_not_published(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(execution, "SILENCE_GRACE_SECONDS", 0.3)
    workspace.notebook("01_a", f"# stub\n{code}")
    limits = Limits(jobs=1, timeout=2.0 if "silent" in message else 60.0, cap=2000)
    with pytest.raises(UserError, match=message) as refusal:
        workspace.run(limits=limits)
    assert "\n" not in str(refusal.value)
    assert not (workspace.project.runs / "01_a.ipynb").exists()


@pytest.mark.parametrize("silent", [1, 2])
def test_a_kernel_that_never_answers_is_started_once_more(
    workspace: Workspace, tmp_path: Path, silent: int
) -> None:
    tries = tmp_path / "tries"
    workspace.notebook(
        "01_a",
        f"# stub\nwith open({str(tries)!r}, 'a') as file:\n    print(file=file)\n"
        f"if len(open({str(tries)!r}).read()) <= {silent}:\n"
        '    raise RuntimeError("Kernel didn\'t respond in 60 seconds")',
    )
    if silent == 1:
        workspace.run()
    else:
        with pytest.raises(UserError, match="RuntimeError: Kernel didn't respond"):
            workspace.run()
    assert tries.read_text() == "\n\n"


def test_second_runner_waits_and_names_the_holder(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.notebook("01_a")
    lock = workspace.project.runs / ".locks" / "01_a.lock"
    script = (
        "import pathlib\n"
        "from analysis.report.processes import exclusive\n"
        f"with exclusive(pathlib.Path({str(lock)!r}), print):\n"
        "    print('held', flush=True); input()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"

        class Release(io.StringIO):
            """The holder lets go as soon as the other says that it waits."""

            def write(self, text: str) -> int:
                if f"01_a  waiting for process {holder.pid}" in text:
                    holder.communicate(b"\n")
                return super().write(text)

        monkeypatch.setattr(sys, "stderr", Release())
        workspace.run()
        assert holder.returncode == 0, "nobody waited"
    assert (workspace.project.runs / "01_a.ipynb").is_file()


@pytest.mark.parametrize("place", ["pyproject.toml", "pyproject.toml/inside", "/proc/nowhere"])
def test_unwritable_output_fails_before_any_work(
    workspace: Workspace, place: str, tmp_path: Path
) -> None:
    flag = tmp_path / "ran"
    workspace.notebook("01_a", f"# stub\npathlib.Path({str(flag)!r}).touch()")
    with pytest.raises(UserError, match="cannot be written"):
        workspace.run(directory=workspace.project.root / place)
    assert not flag.exists()


def test_folder_in_the_way_fails_before_any_work(workspace: Workspace) -> None:
    workspace.notebook("01_a")
    (workspace.project.runs / "01_a.ipynb").mkdir(parents=True)
    with pytest.raises(UserError, match="a folder is in the way"):
        workspace.run()


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="is no regular file"):
            replace_file(place, b"new")
    assert (tmp_path / "pipe").is_fifo()


def test_a_planted_link_is_replaced_and_its_target_is_not(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(b"theirs")
    path = tmp_path / "out"
    path.symlink_to(tmp_path / "theirs")
    for name in (f".out.{os.getpid()}.tmp", ".out.tmp"):  # names that one might guess
        (tmp_path / name).symlink_to(tmp_path / "theirs")
    replace_file(path, b"mine")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"
    assert path.read_bytes() == b"mine" and not path.is_symlink()


def test_a_name_that_is_taken_is_not_written_through(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("kl_term.files.secrets.token_hex", lambda count: "known")
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / ".out.known.tmp").symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="out: cannot be written"):
        replace_file(tmp_path / "out", b"mine")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"
    assert (tmp_path / ".out.known.tmp").is_symlink()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_file_keeps_its_mode_and_a_new_one_has_the_umask_s(tmp_path: Path, umask: int) -> None:
    path, private = tmp_path / "new", tmp_path / "private"
    private.write_bytes(b"log-probs")
    private.chmod(0o600)
    before = os.umask(umask)
    try:
        replace_file(path, b"1")
        replace_file(private, b"2")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_threads_that_write_one_file_leave_one_of_their_contents(tmp_path: Path) -> None:
    path = tmp_path / "out"
    contents = [bytes([65 + k]) * 20_000 for k in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: replace_file(path, data), contents * 4))
    assert path.read_bytes() in contents
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_full_disk_keeps_the_old_file_and_names_path_and_size(tmp_path: Path) -> None:
    path = tmp_path / "out.ipynb"
    replace_file(path, b"old")
    script = (  # a file size limit stands in for a full disk: the write fails halfway
        "import pathlib, resource, signal, sys\n"
        "from kl_term.files import replace_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "replace_file(pathlib.Path(sys.argv[1]), b'x' * 5000)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert child.returncode != 0
    assert "out.ipynb" in child.stderr and "no room for 5,000 bytes" in child.stderr
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.ipynb"]


def test_the_book_needs_a_ledger_recomputed_since_the_last_change(workspace: Workspace) -> None:
    project = workspace.project
    assert ledger_problems(project) == []  # no ledger, nothing to check
    project.claims.write_text("[]")
    (project.package / "chapters").mkdir()
    (project.package / "chapters" / "ch01.py").write_text("from kl_term.kl import terms\n")
    (project.results / "a.csv").write_text("1")
    assert "never recomputed" in ledger_problems(project)[0]
    store_ledger(project, {}, ["results/a.csv"])
    write("analysis/cli/main.py", "import os\n")(workspace)
    write("results/b.csv", "1")(workspace)
    assert ledger_problems(project) == []
    for path, text in (
        ("kl_term/kl/terms.py", "value = 2\n"),
        ("results/a.csv", "2"),
        ("book/claims.yaml", "[1]"),
        ("requirements.lock", "tqdm==2"),
    ):
        write(path, text)(workspace)
        assert "changed since" in ledger_problems(project)[0]
        store_ledger(project, {}, ["results/a.csv"])
    store_ledger(project, {"S4-12": "recorded 'fails', recomputed 'holds if'"}, [])
    assert ledger_problems(project) == [
        "book/claims.yaml: S4-12: recorded 'fails', recomputed 'holds if'"
    ]
    stored = project.runs / "claims.json"
    for text in (stored.read_text().replace("S4-12", "S4-13"), "[" * 100_000):
        stored.write_text(text)
        assert "never recomputed" in ledger_problems(project)[0]
