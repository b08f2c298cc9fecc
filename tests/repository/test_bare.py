"""A bare GPU box has torch, numpy, pydantic, safetensors and tqdm: what runs there, and what says
what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from analysis.cli import main as of_the_book
from kl_term.cli import main as of_the_library
from kl_term.cli.program import Program

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
for floor in ('kl_term.kl', 'kl_term.objectives', 'analysis.training'):
    package = importlib.import_module(floor)
    for module in pkgutil.walk_packages(package.__path__, f'{floor}.'):
        importlib.import_module(module.name)
        count += 1
try:
    import pandas
except ModuleNotFoundError:
    print(count)
"""


COMMAND = """
main = importlib.import_module(sys.argv[2]).main
sys.exit(main([sys.argv[3], '--help']))
"""
PROGRAMS = (of_the_book.PROGRAM, of_the_library.PROGRAM)


def on_a_bare_box(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BOX + code, ",".join(ABSENT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_lowest_floors_import_on_a_bare_box():
    child = on_a_bare_box(FLOORS)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 30


@pytest.mark.parametrize(
    ("program", "command"), [(program, name) for program in PROGRAMS for name in program.commands]
)
def test_a_command_names_what_it_lacks_in_one_line(program: Program, command: str) -> None:
    child = on_a_bare_box(COMMAND, f"{program.package}.main", command)
    assert child.returncode == 1
    (line,) = child.stderr.splitlines()
    install = program.install.format(extra=program.extras[command])
    assert line.startswith(f"{program.name}: ") and "is not installed" in line and install in line
