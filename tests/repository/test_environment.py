"""One list of dependencies: pyproject.toml. Everything else is derived from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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


def test_torch_is_locked_by_hash_from_either_index() -> None:
    """The package index has a wheel a Python and platform; a runner takes the CPU's."""
    lock, cuda = (ROOT / "torch.lock").read_text(), (ROOT / "cuda.lock").read_text()
    (pin,) = pins(lock)
    assert pin in pins((ROOT / "constraints.txt").read_text())
    digests = re.findall(r"--hash=sha256:([0-9a-f]{64})", lock)
    assert len(set(digests)) == len(digests) > 20
    blocks = re.split(r"\n(?=\S)", cuda.strip())
    assert all("--hash=sha256:" in block and "sys_platform == 'linux'" in block for block in blocks)
    assert all(re.match(r"nvidia-|cuda-|triton", block) for block in blocks)


def test_the_bill_of_materials_lists_what_the_locks_hold() -> None:
    command = [sys.executable, "packaging/bill_of_materials.py"]
    locks = ["requirements.lock", "torch.lock", "cuda.lock"]
    made = subprocess.run([*command, *locks], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = json.loads(made.stdout)["components"]
    held = {
        pin.partition(";")[0].strip() for lock in locks for pin in pins((ROOT / lock).read_text())
    }
    assert {f"{each['name']}=={each['version']}" for each in listed} == held
    digests = [found for each in listed for found in each["externalReferences"][0]["hashes"]]
    text = "".join((ROOT / lock).read_text() for lock in locks)
    assert len(digests) == text.count("--hash=sha256:")


def test_lock_holds_a_hash_for_every_package_and_no_torch() -> None:
    blocks = re.split(r"\n(?=\S)", LOCK.strip())
    assert all("--hash=sha256:" in block for block in blocks)
    names = {block.partition("==")[0] for block in blocks}
    assert not any(name.startswith(("torch", "nvidia-", "triton", "cuda-")) for name in names)
    assert "hatchling" in names  # the package itself is built without isolation
