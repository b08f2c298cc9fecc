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

from analysis.report.build import BUILDERS

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


def make(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("MAKELEVEL", "MAKEFLAGS")} | settings,
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout with nothing but what the first rule of the Makefile reads."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    locks = ("requirements.lock", "torch.lock", "cuda.lock", "constraints.txt")
    for name in ("Makefile", "pyproject.toml", *locks):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("genuine", [True, False])
def test_only_the_locked_hash_installs_and_a_torn_environment_is_made_anew(
    wheel: Path, bare: Path, genuine: bool
) -> None:
    bin_folder = bare / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    if not genuine:  # as a late kill leaves it: pip answers, and a package has half of its files
        (bin_folder / "python").write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
        (bin_folder / "python").chmod(0o755)
    (bare / ".venv.unfinished").touch()
    (bare / ".venv" / "torn").touch()
    digest = hashlib.sha256(wheel.read_bytes() if genuine else b"other").hexdigest()
    (bare / "requirements.lock").write_text(f"tampered==1.0 \\\n    --hash=sha256:{digest}\n")
    done = make(bare, ".venv/.ready", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheel.parent))
    assert done.returncode != 0  # there is no torch at this index
    assert bool(list((bare / ".venv").rglob("tampered.py"))) == genuine
    assert ("[2/3] torch" in done.stdout) == genuine
    assert ("DO NOT MATCH THE HASHES" in done.stderr) != genuine
    assert not (bare / ".venv" / ".ready").exists() and (bare / ".venv.unfinished").exists()
    assert not (bare / ".venv" / "torn").exists()


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


def test_a_pdf_without_tex_is_refused_in_one_line_before_anything_is_installed(bare: Path) -> None:
    done = make(bare, "pdf", "PATH=" + str(bare / "empty"), "SHELL=/bin/sh")
    assert done.returncode != 0
    said = done.stdout.splitlines()
    assert said == [f"make pdf needs TeX and finds no xelatex: {BUILDERS['pdflatex'].advice}"]
    assert not (bare / ".venv").exists()


def test_serve_without_a_book_says_what_to_do(bare: Path) -> None:
    done = make(bare, "serve")
    assert done.returncode != 0 and "run make book" in done.stdout


def test_clean_keeps_the_environment(bare: Path) -> None:
    for folder in (".venv", "_build", "book/_run", "book/_generated"):
        (bare / folder).mkdir(parents=True)
    assert make(bare, "clean").returncode == 0
    assert sorted(path.name for path in bare.iterdir() if path.is_dir()) == [".venv", "book"]
