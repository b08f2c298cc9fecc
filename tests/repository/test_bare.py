"""A bare GPU box has torch, numpy, pydantic, safetensors and tqdm: what runs there, and what says
what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from analysis.cli.main import COMMANDS, EXTRAS

#: What the floors above, the book and the tests use, and a bare box does not have.
ABSENT = [
    "IPython",
    "hypothesis",
    "ipykernel",
    "matplotlib",
    "myst_nb",
    "nbformat",
    "pandas",
    "papermill",
    "psutil",
    "pytest",
    "reasoning_gym",
    "scipy",
    "seaborn",
    "sphinx",
    "transformers",
    "trl",
    "tyro",
    "yaml",
]

BOX = """
import importlib, pkgutil, sys

class BareBox:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in absent:
            raise ModuleNotFoundError(f'{name} is not on a bare box', name=name)

absent = set(sys.argv[1].split(','))
sys.meta_path.insert(0, BareBox())
"""

FLOORS = """
count = 0
for floor in ('kl', 'objectives', 'training'):
    package = importlib.import_module(f'analysis.{floor}')
    for module in pkgutil.walk_packages(package.__path__, f'analysis.{floor}.'):
        importlib.import_module(module.name)
        count += 1
try:
    import pandas
except ModuleNotFoundError:
    print(count)
"""


COMMAND = """
from analysis.cli.main import main

sys.exit(main([sys.argv[2], '--help']))
"""


def on_a_bare_box(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BOX + code, ",".join(ABSENT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_lowest_floors_import_on_a_bare_box():
    child = on_a_bare_box(FLOORS)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 30


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_it_lacks_in_one_line(command):
    child = on_a_bare_box(COMMAND, command)
    assert child.returncode == 1
    (line,) = child.stderr.splitlines()
    extra = EXTRAS.get(command, "book")
    assert "is not installed" in line and f"pip install -e '.[{extra}]'" in line
