"""The real runner: papermill, kernels, and the ways in which they fail."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient.exceptions import DeadKernelError

import analysis
from analysis.errors import Refused
from analysis.report import runner
from analysis.report.notebooks import Limits
from tests.pipeline.conftest import Workspace, make_notebook

NASTY = 'it\'s "quoted" {braces}\n\\n new line; import os é∞'
CODE = {
    "01_ok": [
        "import os, sys",
        "print(sys.prefix); print(os.environ['OMP_NUM_THREADS']); print(repr(label)); print(n)",
    ],
    "02_raises": ["x = 1\n", "y = 1 / 0"],
    "03_dies": ["import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"],
    "04_hangs": ["# waits\nimport time; time.sleep(600)"],
    "05_floods": ["print('x' * 3_000_000)"],
    "06_exits": ["raise SystemExit(3)"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, dict[str, str]]:
    """A project in which every notebook above was run once, and the message of each failure."""
    workspace = Workspace(tmp_path_factory.mktemp("kernels") / "a project")
    for name, code in CODE.items():
        workspace.notebook(name, *code)
    with pytest.raises(Refused) as refusal:
        workspace.run(
            command=None,
            limits=Limits(jobs=2, timeout=5, cap=1_000_000),
            texts={"label": NASTY, "n": "7"},
        )
    messages = dict(line.split(": ", 1) for line in str(refusal.value).splitlines())
    return workspace, messages


def test_own_interpreter_one_thread_and_exact_parameters(
    finished: tuple[Workspace, dict[str, str]],
) -> None:
    workspace, messages = finished
    notebook = workspace.executed("01_ok")
    prefix, threads, label, n = "".join(notebook["cells"][-1]["outputs"][0]["text"]).splitlines()
    assert Path(prefix).resolve() == Path(sys.prefix).resolve()
    assert (threads, label, n) == ("1", repr(NASTY), "7")
    assert "01_ok" not in messages


def test_executed_notebook_holds_no_times_and_no_paths(
    finished: tuple[Workspace, dict[str, str]],
) -> None:
    workspace, _ = finished
    notebook = workspace.executed("01_ok")
    assert set(notebook["metadata"]["papermill"]) == {"parameters", "version"}
    assert all({"papermill", "execution"}.isdisjoint(c["metadata"]) for c in notebook["cells"])
    assert str(workspace.project.root) not in json.dumps(notebook)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("02_raises", "cell 4 (`y = 1 / 0`) raised ZeroDivisionError: division by zero"),
        ("03_dies", "the kernel died in cell 3 (`import os, signal`)"),
        ("04_hangs", "cell 3 (`# waits`) ran longer than the limit of 5 s"),
        ("05_floods", "cell 3 (`print('x' * 3_000_000)`) wrote more than 1 MB of output"),
        ("06_exits", "cell 3 (`raise SystemExit(3)`) raised SystemExit: 3"),
    ],
)
def test_failure_names_the_cell_and_is_never_published(
    finished: tuple[Workspace, dict[str, str]], name: str, message: str
) -> None:
    workspace, messages = finished
    assert messages[name].startswith(message)
    assert messages[name].endswith(f"see book/_run/failed/{name}.ipynb")
    assert not (workspace.project.runs / f"{name}.ipynb").exists()
    assert not (workspace.project.runs / f"{name}.json").exists()
    json.loads((workspace.project.runs / "failed" / f"{name}.ipynb").read_text())


def kernelspec(folder: Path, argv: list[str]) -> None:
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    content = {"argv": argv, "display_name": "Other", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(content))


IMPOSTOR = (
    "import sys; sys.prefix = '/elsewhere'; "
    "from ipykernel.kernelapp import launch_new_instance as start; start()"
)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["/usr/bin/other-python", "-m", "ipykernel_launcher"], "starts /usr/bin/other-python"),
        (["python", "-c", IMPOSTOR, "-f", "{connection_file}"], "the Python of /elsewhere"),
    ],
)
def test_kernel_of_another_interpreter_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    other = workspace.project.root / "jupyter"
    kernelspec(other, argv)
    monkeypatch.setenv("JUPYTER_PATH", str(other))
    workspace.notebook("01_a")
    with pytest.raises(Refused, match=message):
        workspace.run(command=None)
    assert not (workspace.project.runs / "01_a.ipynb").exists()


def start_cli(workspace: Workspace) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """``analysis run`` hanging in a cell that has a child of its own, and all its processes."""
    ready = workspace.project.root / "ready"
    workspace.notebook(
        "01_a",
        "import pathlib, subprocess, time\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(600)",
    )
    runner = subprocess.Popen(
        [sys.executable, "-m", "analysis.cli", "run"],
        cwd=workspace.project.notebooks,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(analysis.__file__).parents[1])},
    )
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert time.monotonic() < deadline and runner.poll() is None
        time.sleep(0.05)
    family = psutil.Process(runner.pid).children(recursive=True)
    assert len(family) == 3  # papermill's process, the kernel, its sleep
    return runner, family


def ended(process: psutil.Process) -> bool:
    """Whether a process runs no more; when its entry leaves the table is init's business."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_leaves_no_child_and_no_torn_file(
    workspace: Workspace, signum: signal.Signals
) -> None:
    workspace.notebook("01_a", "x = 1")
    workspace.run()
    published = workspace.project.runs / "01_a.ipynb"
    old = published.read_bytes()
    runner, family = start_cli(workspace)
    sent = time.monotonic()
    runner.send_signal(signum)
    while not all(ended(process) for process in family):
        assert time.monotonic() < sent + 5
        time.sleep(0.02)
    took = time.monotonic() - sent
    _, said = runner.communicate(timeout=5)
    assert took < (2 if signum != signal.SIGKILL else 5)  # nobody is left to be prompt
    assert published.read_bytes() == old
    if signum != signal.SIGKILL:
        assert runner.returncode == 128 + signum
        assert "earlier outputs are as they were" in said and "Traceback" not in said


def test_nbval_notices_a_dead_kernel(tmp_path: Path) -> None:
    import nbformat

    notebook = make_notebook("import os\nos.kill(os.getpid(), 9)")
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.execution_count = index
    nbformat.write(notebook, tmp_path / "dies.ipynb")
    started = time.monotonic()
    root = Path(analysis.__file__).parents[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env"),
            *("-p", "tests.pipeline.nbval_alive", "--nbval-cell-timeout=600"),
            *("--rootdir", tmp_path, tmp_path / "dies.ipynb"),
        ],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "the kernel died in this cell" in done.stdout
    assert time.monotonic() - started < 30


def execute_here(tmp_path: Path, source: str) -> nbformat.NotebookNode:
    path = tmp_path / "one.ipynb"
    cells = [nbformat.v4.new_code_cell("", metadata={"tags": ["parameters"]})]
    cells.append(nbformat.v4.new_code_cell(source))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    request = {"source": str(path), "cap": 1e6, "timeout": 60, "parameters": {}, "cwd": "."}
    return runner.execute(request, runner.Reporter(io.StringIO()))


@pytest.mark.parametrize(("silent", "answers"), [(1, True), (2, False)])
def test_a_kernel_that_never_answers_is_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: int, answers: bool
) -> None:
    start, tries = runner.WatchedClient.start_new_kernel_client, []

    def start_or_not(client):
        tries.append(client.startup_timeout)
        if len(tries) <= silent:
            raise RuntimeError("Kernel didn't respond in 60 seconds")
        return start(client)

    monkeypatch.setattr(runner.WatchedClient, "start_new_kernel_client", start_or_not)
    if answers:
        done = execute_here(tmp_path, "6 * 7")
        assert done.cells[-1].outputs[0].data["text/plain"] == "42"
    else:
        with pytest.raises(RuntimeError, match="didn't respond"):
            execute_here(tmp_path, "6 * 7")
    assert tries == list(runner.STARTUP_SECONDS)


def test_a_kernel_that_has_answered_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tries = runner.WatchedClient.start_new_kernel_client, []
    monkeypatch.setattr(
        runner.WatchedClient,
        "start_new_kernel_client",
        lambda client: tries.append(client) or start(client),
    )
    with pytest.raises(DeadKernelError):
        execute_here(tmp_path, "import os; os._exit(1)")
    assert len(tries) == 1
