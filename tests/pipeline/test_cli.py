"""The command line: what is refused, in one line, and what is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.cli.main import PROGRAM, main
from analysis.report.provenance import read_provenance
from tests.pipeline.conftest import Workspace


@pytest.fixture
def checkout(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A project to call ``analysis`` in, with a child program that runs no kernel."""
    workspace.notebook("01_first", "x = 1")
    workspace.notebook("02_second", "x = 2")
    monkeypatch.chdir(workspace.project.notebooks)
    return workspace


def ran(workspace: Workspace) -> set[str]:
    return {path.stem for path in workspace.project.runs.glob("*.ipynb")}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], {"01_first", "02_second"}),
        (["01"], {"01_first"}),
        (["02_second", "01"], {"01_first", "02_second"}),
        (["../notebooks/02_second.ipynb"], {"02_second"}),
        (["02_second.ipynb"], {"02_second"}),
    ],
)
def test_notebooks_are_chosen_by_number_name_or_path(
    checkout: Workspace, names: list[str], expected: set[str]
) -> None:
    assert main(["run", *names]) == 0
    assert ran(checkout) == expected


def test_second_run_does_nothing_unless_forced(
    checkout: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run"])
    capsys.readouterr()
    assert main(["run"]) == 0
    assert capsys.readouterr().err == "01_first  up to date\n02_second  up to date\n"
    assert main(["run", "--force", "01"]) == 0
    assert "1 of 1 notebooks run" in capsys.readouterr().err


def test_parameters_from_file_line_and_profile(checkout: Workspace) -> None:
    path = checkout.project.root / "p.yaml"
    path.write_text("n: 5\nrate: 0.25\n")
    arguments = ["-p", "n=7", "-p", "label=x=y", "--parameters-file", str(path)]
    assert main(["run", "01", *arguments, "--profile", "full"]) == 0
    provenance = read_provenance(checkout.project.runs / "01_first.json")
    assert provenance is not None
    assert provenance.parameters == {"n": 7, "rate": 0.25, "label": "x=y", "profile": "full"}


def test_output_elsewhere_leaves_the_book_alone(checkout: Workspace, tmp_path: Path) -> None:
    assert main(["run", "01", "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "01_first.ipynb").read_text())["cells"]
    assert not checkout.project.runs.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "no command 'rum'; did you mean run?"),
        (["run", "09"], "no notebook '09' in notebooks/; choose from 01_first, 02_second"),
        (["run", "01_frist"], "did you mean 01_first?"),
        (["run", "-p", "m=1"], "notebooks/01_first.ipynb: no parameter 'm'"),
        (["run", "-p", "n=-5"], "parameter n must be at least 1, not -5"),
        (["run", "-p", "api_key=canary"], "api_key looks like a secret"),
        (["run", "-p", "profile=quick", "--profile", "full"], "disagree"),
        (["run", "--jobs", "0"], "--jobs must be at least 1"),
        (["run", "--timeout", "0"], "--timeout must be a positive number"),
        (["run", "--timeout", "inf"], "--timeout must be a positive number"),
        (["run", "--parameters-file", "none.yaml"], "none.yaml: cannot be read"),
        (["build"], "_config.yml: cannot be read"),
        (["refresh"], "01_first: it was never run"),
    ],
)
def test_refusal_is_one_line_and_nothing_runs(
    checkout: Workspace,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "canary" not in said
    assert ran(checkout) == set()


@pytest.mark.parametrize("arguments", [["run", "--bogus"], ["run", "--profile", "fast"], []])
def test_misuse_shows_the_usage(
    checkout: Workspace, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert ran(checkout) == set()
    assert "".join(capsys.readouterr()).strip()


@pytest.mark.parametrize("command", PROGRAM.commands)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: analysis {command}" in capsys.readouterr().out
    main(["--help"])
    assert f"  {command} " in capsys.readouterr().out


def test_outside_a_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run"]) == 1
    assert "cd into a checkout" in capsys.readouterr().err


ROOT = Path(__file__).parents[2]


def analysis(checkout: Workspace, *arguments: str, **settings: str) -> tuple[int, str]:
    """Status and complaints of the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "analysis", *arguments],
        cwd=checkout.project.root,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | settings,
    )
    return done.returncode, done.stderr


def test_what_hides_a_module_of_python_itself_is_named(checkout: Workspace) -> None:
    folder = checkout.project.root / "mine"
    folder.mkdir()
    (folder / "typing.py").write_text("x = 1\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    status, said = analysis(checkout, "run", PYTHONPATH=path)
    assert status == 1 and said.count("\n") == 1
    assert f"unset PYTHONPATH={path}" in said


@pytest.mark.parametrize("module", ["yaml.py", "pydantic.py", "tyro/__init__.py"])
def test_what_hides_an_installed_package_is_named(checkout: Workspace, module: str) -> None:
    hiding = checkout.project.root / "mine" / module
    hiding.parent.mkdir(parents=True)
    hiding.write_text("x = 1\n")
    (checkout.project.root / "p.yaml").write_text("n: 2\n")
    path = os.pathsep.join([str(checkout.project.root / "mine"), str(ROOT)])
    status, said = analysis(checkout, "run", "--parameters-file", "p.yaml", PYTHONPATH=path)
    assert status == 1 and said.count("\n") == 1
    assert f"{hiding} hides the installed {module.partition('/')[0].removesuffix('.py')}" in said


def test_a_terminal_that_knows_no_greek_still_gets_its_answer(checkout: Workspace) -> None:
    plain = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    status, said = analysis(checkout, "run", "-p", "β=1", **plain, PYTHONUTF8="0")
    assert status == 1 and "Traceback" not in said and "no parameter" in said


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000, "{", "[]", '{"cells": [{}], "metadata": {}}'),
        '{"cells": [], "metadata": {}, "nbformat": 3}',
        '{"cells": [], "metadata": null, "nbformat": 4}',
        *(
            f'{{"cells": [{cell}], "metadata": {{}}, "nbformat": 4}}'
            for cell in (
                '{"cell_type": "code", "source": "", "metadata": {"tags": 5}}',
                '{"cell_type": "code", "source": "", "metadata": {"tags": null}}',
                '{"cell_type": "code", "source": "\\ud800", "metadata": {}}',
            )
        ),
    ],
)
def test_a_damaged_notebook_is_one_line(
    checkout: Workspace, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (checkout.project.notebooks / "01_first.ipynb").write_text(text)
    assert main(["run", "01"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("analysis: notebooks/01_first.ipynb: no valid") and said.count("\n") == 1
