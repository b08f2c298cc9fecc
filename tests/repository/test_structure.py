"""The house keeps its order: floors, thin notebooks, bare lower floors."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(p for house in ("kl_term", "analysis") for p in (ROOT / house).rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
assert MODULES and NOTEBOOKS, "an empty parametrisation would pass"

# These floors run on a machine that has nothing but torch and a few small packages.
BARE_FLOORS = ("kl_term/kl", "kl_term/objectives", "analysis/training")
OURS = {"kl_term", "analysis"}
BARE = {"torch", "numpy", "pydantic", "tqdm", "safetensors", *OURS} | sys.stdlib_module_names


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text())["cells"]
    return [
        cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()
    ]


def imported(path: Path) -> set[str]:
    """The top-level packages a module imports, however deep in it."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            packages.add(node.module.partition(".")[0])
    return packages


@pytest.mark.parametrize("floor", BARE_FLOORS)
def test_lower_floors_need_little(floor: str) -> None:
    paths = [path for path in MODULES if path.is_relative_to(ROOT / floor)]
    assert paths
    found = {name(path): imported(path) - BARE for path in paths}
    assert not {path: packages for path, packages in found.items() if packages}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_committed_notebook_was_run(path: Path) -> None:
    """nbval passes a notebook without stored outputs, so that must not be committed."""
    cells = code_cells(path)
    assert cells
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any(output["output_type"] in ("display_data", "execute_result") for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs), "a warning on the page"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_committed_notebook_is_clean(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert "papermill" not in notebook["metadata"]
    for cell in notebook["cells"]:
        assert {"papermill", "execution"}.isdisjoint(cell["metadata"])
        assert "injected-parameters" not in cell["metadata"].get("tags", ())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_parameters_are_declared(path: Path) -> None:
    from analysis.report.parameters import declared_parameters

    parameters = declared_parameters(json.loads(path.read_text()), name(path))
    assert parameters["profile"].default == "quick"
