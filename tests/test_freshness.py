"""What makes a result stale: code that it imports and files that it opened, and nothing else."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.freshness import (
    ROOT,
    changed_read,
    code_alone,
    code_sha256,
    import_closure,
    imported_files,
    reads_sha256,
    track_reads,
)

MODULES = {
    "analysis/__init__.py": '__version__ = "1"\n',
    "kl_term/__init__.py": "from kl_term import kl\n",
    "kl_term/kl/__init__.py": '_HOMES = {"k3": "estimators", "entropy": "divergences"}\n',
    "kl_term/kl/estimators.py": '"""Doc."""\nfrom kl_term.checks import check\nk3 = 1\n',
    "kl_term/kl/divergences.py": "entropy = 1\n",
    "kl_term/checks.py": "def check():\n    from analysis import late\n",
    "analysis/late.py": "x = 1\n",
    "kl_term/kl/front.py": '_HOMES = {"entropy": "divergences"}\nown = 1\n',
    "analysis/typed.py": "if TYPE_CHECKING:\n    from kl_term.kl.divergences import entropy\n",
    "analysis/near.py": "from . import late\nfrom .cli import main\n",
    "analysis/cli/main.py": "from kl_term.kl import k3, entropy\n",
    "benchmarks/measure.py": "import torch, kl_term.kl\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("from kl_term.kl import k3", "kl_term/kl/estimators kl_term/checks analysis/late"),
        ("from kl_term import k3", "kl_term/kl/estimators kl_term/checks analysis/late"),
        (
            "from kl_term.kl.estimators import k3 as k",
            "kl_term/kl/estimators kl_term/checks analysis/late",
        ),
        (
            "from kl_term.kl import estimators",
            "kl_term/kl/estimators kl_term/checks analysis/late",
        ),
        ("from kl_term.kl.front import entropy", "kl_term/kl/divergences"),
        ("from kl_term.kl.front import own", "kl_term/kl/front"),
        ("from analysis import typed", "analysis/typed"),
        (
            "from analysis import near",
            "analysis/near analysis/late analysis/cli/main kl_term/kl/estimators "
            "kl_term/kl/divergences kl_term/checks",
        ),
        ("from analysis import __version__", "analysis/__init__"),
        ("import numpy, pandas.api", ""),
        ("def f():\n    import analysis.late", "analysis/late"),
    ],
)
def test_the_closure_holds_what_is_imported(tree: Path, source: str, files: str) -> None:
    expected = sorted(f"{name}.py" for name in files.split())
    assert list(import_closure(imported_files(source, tree), tree)) == expected


@pytest.mark.parametrize("imported", ["kl_term.kl", "kl_term"])
def test_a_package_means_all_that_it_loads_when_asked_for(tree: Path, imported: str) -> None:
    (tree / "benchmarks/measure.py").write_text(f"import torch, {imported}\n")
    found = import_closure(["benchmarks/measure.py"], tree)
    assert {"kl_term/kl/estimators.py", "kl_term/kl/divergences.py"} < set(found)


@pytest.mark.parametrize(
    ("name", "old", "new", "stale"),
    [
        ("analysis/cli/main.py", "\n", "\nimport sys\n", False),
        ("kl_term/kl/divergences.py", "= 1", "= 2", False),
        ("analysis/__init__.py", '"1"', '"2"', False),
        ("kl_term/kl/estimators.py", "Doc.", "Documentation.", False),
        ("kl_term/kl/estimators.py", "k3 = 1", "k3 = (1)  # why", False),
        ("kl_term/kl/estimators.py", "k3 = 1", "k3 = 2", True),
        ("analysis/late.py", "x = 1", "x = 2", True),
    ],
)
def test_only_a_changed_line_that_is_imported_makes_stale(
    tree: Path, name: str, old: str, new: str, stale: bool
) -> None:
    def now() -> str:
        return code_sha256(import_closure(["kl_term/kl/estimators.py"], tree), tree)

    before, path = now(), tree / name
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(1, 1))  # two writes within one tick of the clock
    assert (now() != before) == stale


def test_a_file_of_the_package_is_listed_if_python_loads_it() -> None:
    script = (
        "import sys, kl_term.kl.surrogates, kl_term.objectives.losses\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('kl_term.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    loaded = {Path(file).relative_to(ROOT).as_posix() for file in done.stdout.split()}
    starts = ("kl_term/kl/surrogates.py", "kl_term/objectives/losses.py")
    loaded = {file for file in loaded if "__init__" not in file}
    assert loaded - {"kl_term/lazy.py"} <= set(import_closure(starts)), "it only looks names up"


def code_of(source: str) -> str:
    return code_alone(ast.parse(source))


def test_code_is_what_runs() -> None:
    source = 'def f(x):\n    """Doc."""\n    return x + 1  # why\n'
    same = '"""Module."""\n\ndef f(x):\n    return (x + 1)\n'
    assert code_of(source) == code_of(same)
    assert code_of(source) != code_of(source.replace("+ 1", "+ 2"))
    for code, other in (('[""]', "[]"), ("f(None)", "f()"), ("f'{x}'", "f'{x!r}'"), ("a", "'a'")):
        assert code_of(f"y = {code}") != code_of(f"y = {other}")


def test_every_python_spells_the_code_alike() -> None:
    # Nested quotes, a format that is an expression, empty parts, a class, a lambda, a slice.
    source = """
class A(B, metaclass=C):
    x: int = 1
    def f(self, *a, k=None, **o):
        return f"{', '.join(a):<{k}}" + f"{self.x!r:}{''}" + u"t", a[1:, ...], lambda v, /: -v
"""
    digest = hashlib.sha256(code_of(source).encode()).hexdigest()
    assert digest.startswith("d88c5c8db381"), "runs recorded on another Python would look stale"


def test_files_that_are_opened_and_results_that_are_listed_are_inputs(tree: Path) -> None:
    for name in ("results/a/table.csv", "results/b/table.csv", "analysis/example.csv"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("1")
    with track_reads(tree) as reads:
        (tree / "results/a/table.csv").read_text()
        (tree / "analysis/late.py").read_text()
        (tree / "analysis/example.csv").read_bytes()
        (tree / "made.csv").write_text("2")
        list((tree / "results").iterdir())
        with pytest.raises(OSError, match="none"):
            (tree / "results/none.csv").read_bytes()
    (tree / "results/b/table.csv").read_text()
    recorded = reads_sha256(reads.paths, tree)
    assert set(recorded) == {
        "results",
        "results/a/table.csv",
        "results/none.csv",
        "analysis/example.csv",
    }
    assert changed_read(recorded, tree) is None
    (tree / "results/b/table.csv").write_text("2")
    assert changed_read(recorded, tree) is None
    (tree / "results/c").mkdir()
    assert changed_read(recorded, tree) == "results"
    (tree / "results/c").rmdir()
    (tree / "results/a/table.csv").write_text("2")
    assert changed_read(recorded, tree) == "results/a/table.csv"
