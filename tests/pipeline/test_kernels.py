"""The real runner: papermill, kernels, and the ways in which they fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import analysis
from analysis.report import kernel_server
from analysis.report.notebooks.jobs import Limits
from analysis.report.provenance import read_provenance
from kl_term.errors import UserError
from tests.pipeline.conftest import Workspace

pytestmark = pytest.mark.slow

NASTY = 'it\'s "quoted" {braces}\n\\n new line; import os é∞'
CODE = {
    "01_ok": [
        "import os, sys; open('../results/a.csv').read()",
        "print(sys.prefix); print(os.environ['OMP_NUM_THREADS']); print(repr(label)); print(n)",
    ],
    "02_raises": ["x = 1\n", "y = 1 / 0"],
    "03_dies": ["import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"],
    "04_hangs": ["# waits\nimport time; time.sleep(600)"],
    "05_floods": ["print('x' * 3_000_000)"],
    "06_exits": ["raise SystemExit(3)"],
    "07_exits_well": ["raise SystemExit(0)", "x = 1"],
    "08_script": ["from IPython.display import HTML; HTML('<script>alert(1)</script>')"],
    "09_refuses": [
        "from pydantic import BaseModel, NonNegativeFloat",
        "class Run(BaseModel):\n    beta: NonNegativeFloat\n",
        "Run(beta=-1)",
    ],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, dict[str, str]]:
    """A project in which every notebook above was run once, and the message of each failure.

    Jupyter is set to the kernel of another interpreter.
    """
    workspace = Workspace(tmp_path_factory.mktemp("kernels") / "a project")
    other = workspace.project.root / "jupyter"
    (other / "kernels/python3").mkdir(parents=True)
    argv = ["/usr/bin/other-python", "-m", "ipykernel_launcher"]
    spec = {"argv": argv, "display_name": "Other", "language": "python"}
    (other / "kernels/python3/kernel.json").write_text(json.dumps(spec))
    (workspace.project.results / "a.csv").write_text("1")
    for name, code in CODE.items():
        workspace.notebook(name, *code)
    limits = Limits(jobs=2, timeout=5, cap=1_000_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(other))
        with pytest.raises(UserError) as refusal:
            workspace.run(limits=limits, texts={"label": NASTY, "n": "7"})
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
    provenance = read_provenance(workspace.project.runs / "01_ok.json")
    assert provenance is not None and list(provenance.reads) == ["results/a.csv"]


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
        ("07_exits_well", "cell 3 stores the error SystemExit"),
        ("08_script", "cell 3 stores a script (text/html)"),
        ("09_refuses", "cell 5 (`Run(beta=-1)`) raised ValidationError: beta: Input should be gre"),
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


def start_cli(
    workspace: Workspace, *, served: bool = False
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """``analysis run`` hanging in a cell that has a child of its own, and all its processes.

    ``served``: with notebooks enough, behind that one, to be worth a server of kernels.
    """
    if served:
        for name in ("02_b", "03_c"):
            workspace.notebook(name, "x = 1")
    ready = workspace.project.root / "ready"
    ready.unlink(missing_ok=True)
    workspace.notebook(
        "01_a",
        "import pathlib, subprocess, time\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(600)",
    )
    runner = subprocess.Popen(
        [sys.executable, "-m", "analysis", "run", "--jobs=1"],
        cwd=workspace.project.notebooks,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(analysis.__file__).parents[1])},
    )
    deadline = time.monotonic() + 300
    while not ready.exists():
        assert time.monotonic() < deadline and runner.poll() is None
        time.sleep(0.05)
    family = psutil.Process(runner.pid).children(recursive=True)
    # Papermill's process, the kernel, its sleep; the server, and who asked it for the kernel.
    assert len(family) == (5 if served else 3)
    return runner, family


def ended(process: psutil.Process) -> bool:
    """Whether a process runs no more; when its entry leaves the table is init's business."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_leaves_no_child_and_no_torn_file(
    real_workspace: Workspace, signum: signal.Signals
) -> None:
    workspace = real_workspace
    workspace.notebook("01_a", "x = 1")
    workspace.run()
    published = workspace.project.runs / "01_a.ipynb"
    old = published.read_bytes()
    seconds = 2 if signum != signal.SIGKILL else 5  # nobody is left to be prompt
    for _ in range(5):  # something else may keep the machine busy for a while
        runner, family = start_cli(workspace)
        sent = time.monotonic()
        runner.send_signal(signum)
        while not all(ended(process) for process in family):
            assert time.monotonic() < sent + 60
            time.sleep(0.02)
        took = time.monotonic() - sent
        _, said = runner.communicate(timeout=60)
        assert published.read_bytes() == old
        if signum != signal.SIGKILL:
            assert runner.returncode == 128 + signum
            assert "earlier outputs are as they were" in said and "Traceback" not in said
        if took < seconds:
            break
    else:
        pytest.fail(f"children lived on for more than {seconds} s")


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")
def test_no_kernel_of_a_server_outlives_the_run(real_workspace: Workspace) -> None:
    runner, family = start_cli(real_workspace, served=True)
    runner.send_signal(signal.SIGKILL)
    runner.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while not all(ended(process) for process in family):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")
@pytest.mark.parametrize("alive", [True, False])
def test_a_kernel_is_forked_where_a_server_answers(
    real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    if not alive:
        monkeypatch.setattr(
            kernel_server, "sys", SimpleNamespace(platform="linux", executable="/bin/false")
        )
    for name in ("01_a", "02_b", "03_c"):
        real_workspace.notebook(
            name,
            "import sys; found = 'torch' in sys.modules, 'analysis' in sys.modules\n"
            "import pandas; print(*found, pandas.get_option('display.max_columns'))",
        )
    real_workspace.run()
    for name in ("01_a", "02_b", "03_c"):
        (shown,) = real_workspace.executed(name)["cells"][-1]["outputs"]
        assert "".join(shown["text"]) == f"{alive} False 20\n"
