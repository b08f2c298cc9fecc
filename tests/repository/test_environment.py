"""One list of dependencies: pyproject.toml. Everything else is derived from it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()


def pins(text: str) -> set[str]:
    """The ``name==version ; marker`` lines of a lock or constraints file."""
    lines = (line.rstrip(" \\") for line in text.splitlines())
    return {line for line in lines if line[:1].isalnum()}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_conda_environment_only_points_at_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, inner = environment["dependencies"]
    assert environment["name"] == PYPROJECT["project"]["name"]
    assert python.startswith("python=") and pip == "pip"
    assert inner == {"pip": ["-c constraints.txt", "-e .[book,test]"]}
    version = tuple(int(part) for part in python.removeprefix("python=").split("."))
    assert PYPROJECT["project"]["requires-python"] == f">={version[0]}.{version[1]}"


def test_constraints_are_the_lock_and_torch() -> None:
    constraints = pins((ROOT / "constraints.txt").read_text())
    extra = constraints - pins(LOCK)
    assert pins(LOCK) - constraints == set()
    assert len(extra) == 1
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", extra.pop())


def test_makefile_and_constraints_pin_the_same_torch() -> None:
    (torch,) = re.findall(r"^TORCH\s*:=\s*(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch in pins((ROOT / "constraints.txt").read_text())


@pytest.mark.parametrize("group", ["core", "book", "test"])
def test_every_dependency_is_locked_at_a_version_it_allows(group: str) -> None:
    project = PYPROJECT["project"]
    wanted = project["dependencies"] if group == "core" else project["optional-dependencies"][group]
    locked: dict[str, list[str]] = {}
    for pin in pins((ROOT / "constraints.txt").read_text()):
        name, version = pin.partition(";")[0].split("==")
        locked.setdefault(normalised(name), []).append(version.strip())
    for requirement in map(Requirement, wanted):
        versions = locked[normalised(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_lock_holds_a_hash_for_every_package_and_no_torch() -> None:
    blocks = re.split(r"\n(?=\S)", LOCK.strip())
    assert all("--hash=sha256:" in block for block in blocks)
    names = {block.partition("==")[0] for block in blocks}
    assert not any(name.startswith(("torch", "nvidia-", "triton", "cuda-")) for name in names)
    assert "hatchling" in names  # the package itself is built without isolation
