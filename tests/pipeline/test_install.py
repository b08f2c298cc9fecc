"""From a bare checkout: an old Python and a tampered package stop the installation."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from analysis.cli.install import STEPS, Step, bar, locked_packages, run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package of one module, as an index would offer it."""
    path = tmp_path / "tampered-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tampered.py", "x = 1\n")
        info = "tampered-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tampered\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.parametrize("genuine", [True, False])
def test_only_the_locked_hash_installs(
    wheel: Path,
    genuine: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    digest = hashlib.sha256(wheel.read_bytes() if genuine else b"other").hexdigest()
    monkeypatch.chdir(wheel.parent)
    Path("requirements.lock").write_text(f"tampered==1.0 \\\n    --hash=sha256:{digest}\n")
    source = ("--no-index", "--find-links", ".", "--target", "site")
    assert run(Step("locked", (*STEPS[0].arguments, *source)), 1) == genuine
    assert Path("site/tampered.py").exists() == genuine
    said = capsys.readouterr().err
    assert ("done" in said) if genuine else ("DO NOT MATCH THE HASHES" in said)


def test_the_lock_is_installed_with_hashes_and_before_torch() -> None:
    locked, torch, package = (step.arguments for step in STEPS)
    assert {"--require-hashes", "--no-deps", "requirements.lock"} <= set(locked)
    assert torch == ("--constraint", "constraints.txt", "torch")
    assert {"--no-deps", "--no-build-isolation", "--editable"} <= set(package)


def test_bar_and_count() -> None:
    assert bar(1, 4, width=4) == "[#...] 1/4"
    assert bar(9, 4, width=4) == "[####] 9/4"
    lock = "a==1 \\\n    --hash=sha256:x\nb==1 ; python_version < '3.12' \\\n    --hash=sha256:y\n"
    assert locked_packages(lock) == 2


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("MAKELEVEL", "MAKEFLAGS")},
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout with nothing but what the first rule of the Makefile reads."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_old_python_is_refused_in_one_line(bare: Path) -> None:
    old = bare / "python3.9"
    old.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c 'import sys; sys.exit(1)'\n")
    old.chmod(0o755)
    done = make(bare, "book", "PYTHON=./python3.9")
    assert done.returncode != 0
    assert done.stdout == "Python 3.11 or later is needed, and ./python3.9 is older: " + (
        "make PYTHON=python3.12\n"
    )
    assert not (bare / ".venv").exists()


def test_absent_python_is_refused_in_one_line(bare: Path) -> None:
    done = make(bare, "test", "PYTHON=python-of-nobody")
    assert done.returncode != 0
    assert done.stdout.startswith("python-of-nobody not found") and done.stdout.count("\n") == 1


def test_help_is_the_default_and_lists_every_target(bare: Path) -> None:
    said = make(bare).stdout
    for target in ("book", "test", "serve", "pdf", "notebooks", "lint", "lock", "clean"):
        assert f"make {target} " in said


def test_serve_without_a_book_says_what_to_do(bare: Path) -> None:
    done = make(bare, "serve")
    assert done.returncode != 0 and "run make book" in done.stdout


def test_clean_keeps_the_environment(bare: Path) -> None:
    for folder in (".venv", "_build", "book/_run", "book/_generated"):
        (bare / folder).mkdir(parents=True)
    assert make(bare, "clean").returncode == 0
    assert sorted(path.name for path in bare.iterdir() if path.is_dir()) == [".venv", "book"]
