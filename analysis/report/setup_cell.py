"""The first cell of a notebook that is opened away from a checkout, such as on Colab.

It exists where ``address.yaml`` names a repository, fetches that, and installs the package from it.
Beside a checkout, and on Binder, which installs ``environment.yml``, it does nothing.
"""

from __future__ import annotations

from typing import Any

from analysis.report.address import load_address
from analysis.report.project import Project

TAG = "setup"
FOLDER = "kl-term"


def setup_source(url: str, branch: str) -> str:
    """The code of the cell.

    An editable install is seen by the next process only, hence the path.
    """
    return f'''\
# Away from a checkout, as on Colab: fetch the book, and install its package.
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("analysis") is None:
    if not os.path.isdir("{FOLDER}"):
        clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", {branch!r}]
        subprocess.run([*clone, {url!r}, "{FOLDER}"], check=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--editable"]
    subprocess.run([*install, "./{FOLDER}[book]"], check=True)
    os.chdir("{FOLDER}")
    sys.path.insert(0, os.getcwd())'''.replace("'", '"')


def with_setup(notebook: dict[str, Any], project: Project) -> dict[str, Any]:
    """A notebook with the cell that its project's address asks for, or without one."""
    cells = [c for c in notebook["cells"] if TAG not in c["metadata"].get("tags", ())]
    address = load_address(project)
    if address.repository:
        source = setup_source(address.repository, address.branch)
        cell = {
            "cell_type": "code",
            "execution_count": None,
            "id": TAG,
            "metadata": {"tags": [TAG, "remove-cell"]},
            "outputs": [],
            "source": source.splitlines(keepends=True),
        }
        cells = [cell, *cells]
    return notebook | {"cells": cells}
