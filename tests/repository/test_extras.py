"""What the wheel holds and each extra promises, in an environment of its own."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "kl_term" / "diagnosis" / "examples"
TORCH = "torch==2.13.0"

DIAGNOSE = """
import pandas
frame = pandas.read_csv("heavy_tail.csv.gz")
frame.to_parquet("dump.parquet")
from kl_term.cli.main import main
assert main(["diagnose", "dump.parquet", "--page", "page.html", "--json", "report.json"]) == 0
import json
(first, *_) = json.load(open("report.json"))["findings"]
assert first["code"] == "heavy-tail" and first["evidence"]["tail index k"] > 0.7, first
assert open("page.html").read().count("<img") >= 3
"""
TRL = """
from trl import GRPOConfig
from kl_term.integrations.trl import KLGRPOTrainer, KLTerm
from kl_term.errors import UserError
try:
    KLGRPOTrainer("model", print, GRPOConfig("out", beta=0.0, use_cpu=True), kl_term=KLTerm())
except UserError as refusal:
    assert "has no effect" in str(refusal)
else:
    raise SystemExit("a term without a coefficient was accepted")
"""
RAY = """
from analysis.cli.main import main  # of the clone, which is installed editable
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
    of_the_book = extra == "ray"  # sweeps are run from a clone
    package = ("--editable", f"{ROOT}[{extra}]") if of_the_book else (f"{wheel}[{extra}]",)
    run(python, "-m", "pip", "install", "--quiet", TORCH, *package, folder=tmp_path)
    (tmp_path / "heavy_tail.csv.gz").write_bytes((EXAMPLES / "heavy_tail.csv.gz").read_bytes())
    (tmp_path / "script.py").write_text(script)
    run(python, "script.py", folder=tmp_path)


#: A project of a user, whose folders are called as half of all research projects call them.
BESIDE = """
import analysis, benchmarks, tests
assert analysis.mine and benchmarks.mine and tests.mine
import kl_term, os
assert "site" + os.sep in kl_term.__file__, kl_term.__file__
from kl_term import KLTerm, k1, kl_loss, kl_penalty, policy_loss, reverse_kl
import torch
logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
kl_loss(logp, torch.tensor([[-1.5, -1.0]])).sum().backward()
assert logp.grad.abs().min() > 0
import sys
assert not [name for name in sys.modules if name.startswith("analysis.")]
"""


@pytest.mark.slow
def test_the_wheel_holds_the_library_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        scripts = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"kl_term", next(top for top in tops if top.endswith(".dist-info"))}
    assert {"kl_term/py.typed", "kl_term/diagnosis/templates/diagnosis.html"} <= set(names)
    found = configparser.ConfigParser()
    found.read_string(scripts)
    assert {name: dict(found[name]) for name in found.sections()} == {
        "console_scripts": {"kl-term": "kl_term.cli.main:main"},
        "pytest11": {"kl_term": "kl_term.audit.pytest_plugin"},
    }


@pytest.mark.slow
def test_the_library_is_used_beside_folders_of_any_name(wheel: Path, tmp_path: Path) -> None:
    for folder in ("analysis", "benchmarks", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("mine = True\n")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "script.py").write_text(f"import sys\nsys.path.insert(1, {str(site)!r})\n{BESIDE}")
    run(sys.executable, "script.py", folder=tmp_path)


def test_the_library_needs_nothing_of_the_book() -> None:
    pattern = r"^ *(from|import) (analysis|benchmarks|torture|tests)\b"
    imports = subprocess.run(
        ["git", "grep", "-lE", pattern, "--", "kl_term"], cwd=ROOT, capture_output=True, text=True
    )
    assert imports.stdout == ""
