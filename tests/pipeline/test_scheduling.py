"""Publishing, locking, timeouts and failures, with a child program that runs no kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.errors import Refused
from analysis.files import replace_file
from analysis.report import execution
from analysis.report.notebooks import Limits
from tests.pipeline.conftest import Workspace, stub_command


def leftovers(workspace: Workspace) -> list[Path]:
    return [path for path in workspace.project.runs.rglob("*") if ".tmp" in path.name]


def test_success_is_published_and_nothing_else_left(workspace: Workspace) -> None:
    workspace.notebook("01_a", "x = 1")
    workspace.notebook("02_b", "x = 2")
    workspace.run()
    assert {p.name for p in workspace.project.runs.glob("*.*") if p.is_file()} == {
        f"{name}.{end}" for name in ("01_a", "02_b") for end in ("ipynb", "json")
    }
    assert leftovers(workspace) == []


def test_failure_names_the_cell_keeps_old_output_and_lets_others_finish(
    workspace: Workspace,
) -> None:
    workspace.notebook("01_a", "x = 1")
    workspace.run()
    old = (workspace.project.runs / "01_a.ipynb").read_bytes()
    workspace.notebook("01_a", "stub: send(event='failed', kind='cell', message='raised E')")
    workspace.notebook("02_b")
    with pytest.raises(Refused, match=r"^01_a: cell 3 \(`stub: send.*`\) raised E"):
        workspace.run()
    assert (workspace.project.runs / "01_a.ipynb").read_bytes() == old
    assert (workspace.project.runs / "02_b.ipynb").is_file()
    assert (
        "raised E"
        in json.loads((workspace.project.runs / "failed/01_a.json").read_text())["reason"]
    )
    workspace.notebook("01_a", "x = 1")
    workspace.run()
    assert not (workspace.project.runs / "failed/01_a.json").exists()


def test_lost_child_is_a_failure_that_names_the_cell(workspace: Workspace) -> None:
    workspace.notebook("01_a", "stub: import os; os.kill(os.getpid(), 9)")
    with pytest.raises(Refused, match=r"cell 3 .* ended its runner \(exit -9\)"):
        workspace.run()
    assert not (workspace.project.runs / "01_a.ipynb").exists()


def test_silent_child_is_stopped(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "SILENCE_GRACE_SECONDS", 0.3)
    workspace.notebook("01_a", "stub: time.sleep(60)")
    with pytest.raises(Refused, match=r"cell 3 .* fell silent"):
        workspace.run(limits=Limits(jobs=1, timeout=0.2))


def test_source_edited_while_it_ran_is_not_published(workspace: Workspace) -> None:
    path = workspace.project.notebooks / "01_a.ipynb"
    workspace.notebook(
        "01_a",
        "stub: p = pathlib.Path(request['source']); "
        "p.write_text(p.read_text().replace('# Title', '# Other'))",
    )
    with pytest.raises(Refused, match="changed while it ran"):
        workspace.run()
    assert "# Other" in path.read_text()
    assert not (workspace.project.runs / "01_a.ipynb").exists()


def test_second_runner_waits_and_names_the_holder(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.notebook("01_a")
    lock = workspace.project.runs / ".locks" / "01_a.lock"
    script = (
        "import pathlib, sys, time\n"
        "from analysis.report.locking import Claim\n"
        f"claim = Claim(pathlib.Path({str(lock)!r}))\n"
        "assert claim.acquire(); print('held', flush=True); time.sleep(1.0); claim.release()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        workspace.run()
        assert f"01_a: waiting for process {holder.pid}" in capsys.readouterr().err
    assert (workspace.project.runs / "01_a.ipynb").is_file()


@pytest.mark.parametrize("place", ["pyproject.toml", "pyproject.toml/inside", "/proc/nowhere"])
def test_unwritable_output_fails_before_any_work(
    workspace: Workspace, place: str, tmp_path: Path
) -> None:
    flag = tmp_path / "ran"
    workspace.notebook("01_a", f"stub: pathlib.Path({str(flag)!r}).touch()")
    with pytest.raises(Refused, match="cannot be written"):
        workspace.run(directory=workspace.project.root / place)
    assert not flag.exists()


def test_folder_in_the_way_fails_before_any_work(workspace: Workspace) -> None:
    workspace.notebook("01_a")
    (workspace.project.runs / "01_a.ipynb").mkdir(parents=True)
    with pytest.raises(Refused, match="a folder is in the way"):
        workspace.run()


def test_full_disk_keeps_the_old_file_and_names_path_and_size(tmp_path: Path) -> None:
    path = tmp_path / "out.ipynb"
    replace_file(path, b"old")
    script = (  # a file size limit stands in for a full disk: the write fails halfway
        "import pathlib, resource, signal, sys\n"
        "from analysis.files import replace_file\n"
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


def test_leftovers_of_a_killed_runner_are_swept(workspace: Workspace) -> None:
    workspace.notebook("01_a")
    workspace.project.runs.mkdir(parents=True)
    (workspace.project.runs / ".01_a.12345.tmp").write_text("torn")
    workspace.run()
    assert leftovers(workspace) == []


def test_stub_speaks_the_real_protocol(workspace: Workspace) -> None:
    request = execution.Request(
        source=str(workspace.notebook("01_a")),
        parameters={},
        output=str(workspace.project.root / "out"),
        failed=str(workspace.project.root / "failed"),
        cwd=".",
        pythonpath=".",
        timeout=1.0,
        cap=1,
    )
    child = execution.Execution(request, stub_command)
    events = []
    while child.result is None:
        events += child.pump()
    child.close()
    assert [event["event"] for event in events] == ["cell", "cell", "done"]
