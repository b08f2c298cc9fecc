"""The three lowest floors import on a bare GPU box: torch, numpy, pydantic, safetensors, tqdm."""

from __future__ import annotations

import subprocess
import sys

#: What the floors above, the book and the tests use, and a bare box does not have.
ABSENT = [
    "IPython",
    "beartype",
    "hypothesis",
    "ipykernel",
    "jaxtyping",
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

CHILD = """
import importlib, pkgutil, sys

absent = set(sys.argv[1:])

class BareBox:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in absent:
            raise ModuleNotFoundError(f'{name} is not on a bare box', name=name)

sys.meta_path.insert(0, BareBox())
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


def test_the_lowest_floors_import_on_a_bare_box():
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *ABSENT], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 30
