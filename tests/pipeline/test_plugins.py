"""The plugin of nbval: a dead kernel ends its test, and a replaced figure fails it."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from tests.pipeline.conftest import make_notebook

ROOT = Path(__file__).parents[2]
DIES = "import os\nos.kill(os.getpid(), 9)"


def picture(*places: int) -> str:
    """A white image with some black pixels, as a notebook stores it."""
    pixels = np.full((50, 60, 3), 255, dtype=np.uint8)
    pixels.reshape(-1, 3)[list(places)] = 0
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "png")
    return base64.b64encode(data.getvalue()).decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (picture(*range(100)), ""),
        (picture(), "is not the one that this cell draws"),
        (None, "the kernel died in this cell"),
    ],
    ids=["same", "replaced", "dead"],
)
def test_nbval_compares_figures_and_notices_a_dead_kernel(tmp_path: Path, stored, said) -> None:
    drawn = picture(*range(100))
    draws = f"import base64\nfrom IPython.display import Image\nImage(base64.b64decode({drawn!r}))"
    notebook = make_notebook(DIES if stored is None else draws)
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.execution_count = index
    if stored is not None:
        data = {"image/png": stored, "text/plain": "<IPython.core.display.Image object>"}
        notebook.cells[2].outputs = [nbformat.v4.new_output("execute_result", data)]
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env"),
            *("-p", "tests.pipeline.nbval_alive", "--nbval-cell-timeout=600"),
            *("--rootdir", tmp_path, tmp_path / "notebook.ipynb"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,  # half of what bare nbval would wait
        check=False,
    )
    assert done.returncode == bool(said), done.stdout
    assert said in done.stdout


@pytest.mark.slow
def test_a_drawn_order_is_said_and_can_be_drawn_again(tmp_path: Path) -> None:
    lines = [f"def test_{number}():\n    print('ran', {number})\n" for number in range(12)]
    (tmp_path / "test_order.py").write_text("\n".join(lines))

    def order(seed: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-s", "-p", "tests.pipeline.shuffled"]
        found = subprocess.run(
            [*command, "--rootdir", tmp_path, "-c", "/dev/null", tmp_path / "test_order.py"],
            cwd=ROOT,
            env=os.environ | {"KL_TERM_SHUFFLE": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f"KL_TERM_SHUFFLE={seed}" in found
        return re.findall(r"ran (\d+)", found)

    assert order("1") == order("1") != order("2")
    assert sorted(order("1"), key=int) == [str(number) for number in range(12)] != order("1")
