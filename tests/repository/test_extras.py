"""What each extra promises, from the built wheel in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "analysis" / "diagnosis" / "examples"
TORCH = "torch==2.13.0"

DIAGNOSE = """
import pandas
frame = pandas.read_csv("heavy_tail.csv.gz")
frame.to_parquet("dump.parquet")
from analysis.cli.main import main
assert main(["diagnose", "dump.parquet", "--page", "page.html", "--json", "report.json"]) == 0
import json
(first, *_) = json.load(open("report.json"))["findings"]
assert first["code"] == "heavy-tail" and first["evidence"]["tail index k"] > 0.7, first
assert open("page.html").read().count("<img") >= 3
"""
TRL = """
from trl import GRPOConfig
from analysis.integrations.trl import KLGRPOTrainer, KLTerm
from analysis.errors import UserError
try:
    KLGRPOTrainer("model", print, GRPOConfig("out", beta=0.0, use_cpu=True), kl_term=KLTerm())
except UserError as refusal:
    assert "has no effect" in str(refusal)
else:
    raise SystemExit("a term without a coefficient was accepted")
"""
RAY = """
from analysis.cli.main import main
small = ["-o", "num_seeds=1", "-o", "updates=10", "--workers", "1"]
assert main(["sweep", "quick", *small, "--ray-address", "local", "--store", "runs"]) == 0
"""


def run(*command: object, folder: Path) -> None:
    """A command in a folder, without this checkout on its path."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=alone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        folder,
        ROOT,
        folder=folder,
    )
    (built,) = folder.glob("kl_term-*.whl")
    return built


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize(("extra", "script"), [("diagnose", DIAGNOSE), ("trl", TRL), ("ray", RAY)])
def test_an_extra_does_what_it_promises(
    wheel: Path, tmp_path: Path, extra: str, script: str
) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", TORCH, f"{wheel}[{extra}]", folder=tmp_path)
    (tmp_path / "heavy_tail.csv.gz").write_bytes((EXAMPLES / "heavy_tail.csv.gz").read_bytes())
    (tmp_path / "script.py").write_text(script)
    run(python, "script.py", folder=tmp_path)


def test_the_wheel_holds_the_package_alone() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"]["include"] == ["analysis*"]
    imports = subprocess.run(
        ["git", "grep", "-lE", r"^(from|import) benchmarks", "--", "analysis"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert imports.stdout == "", "nothing in the wheel may need what is not in it"


def test_another_package_of_this_name_is_refused_in_one_line(tmp_path: Path) -> None:
    """As where both are installed: the other's ``__init__`` beside our modules."""
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "__init__.py").write_text(
        f"__path__.append({str(ROOT / 'analysis')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import analysis.cli.main"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("analysis: several packages have this name (") and "kl-term" in line
    assert f"unset PYTHONPATH={tmp_path}, or install each on its own" in line
