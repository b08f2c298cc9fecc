"""The plugins of pytest: nbval on dead and silent kernels, and skips that are failures."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from pathlib import Path

import nbformat
import nbval.kernel
import numpy as np
import pytest
from PIL import Image

from tests.pipeline import nbval_alive
from tests.pipeline.conftest import make_notebook

ROOT = Path(__file__).parents[2]


def nbval_of(notebook: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env"),
            *("-p", "tests.pipeline.nbval_alive", "--nbval-cell-timeout=600"),
            *("--rootdir", notebook.parent, notebook),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,  # half of what bare nbval would wait
        check=False,
    )


@pytest.mark.slow
def test_nbval_notices_a_dead_kernel(tmp_path: Path) -> None:
    notebook = make_notebook("import os\nos.kill(os.getpid(), 9)")
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.execution_count = index
    nbformat.write(notebook, tmp_path / "dies.ipynb")
    done = nbval_of(tmp_path / "dies.ipynb")
    assert done.returncode == 1, done.stdout
    assert "the kernel died in this cell" in done.stdout


def picture(*places: int, width: int = 60) -> str:
    """A white image with some black pixels, as a notebook stores it."""
    pixels = np.full((50, width, 3), 255, dtype=np.uint8)
    pixels.reshape(-1, 3)[list(places)] = 0
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "png")
    return base64.b64encode(data.getvalue()).decode()


def test_figures_are_compared_pixel_by_pixel() -> None:
    assert nbval_alive.same_figure(picture(1, 2, 3), picture(1, 2, 4))
    assert not nbval_alive.same_figure(picture(*range(100)), picture())
    assert not nbval_alive.same_figure(picture(), picture(width=61))


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [True, False])
def test_a_replaced_figure_is_noticed(tmp_path: Path, replaced: bool) -> None:
    drawn = picture(*range(100))
    notebook = make_notebook(
        f"import base64\nfrom IPython.display import Image\nImage(base64.b64decode({drawn!r}))"
    )
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.execution_count = index
    stored = {
        "image/png": picture() if replaced else drawn,
        "text/plain": "<IPython.core.display.Image object>",
    }
    notebook.cells[2].outputs = [nbformat.v4.new_output("execute_result", stored)]
    nbformat.write(notebook, tmp_path / "figure.ipynb")
    done = nbval_of(tmp_path / "figure.ipynb")
    assert done.returncode == replaced, done.stdout
    assert ("is not the one that this cell draws" in done.stdout) == replaced


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_kernel_that_never_answers_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    tries = []

    def start(**options):
        tries.append(options)
        if len(tries) <= silent:
            raise RuntimeError("Kernel didn't respond in 60 seconds")
        return "manager", "client"

    monkeypatch.setattr(nbval_alive, "_start_new_kernel", start)
    if silent < 2:
        assert nbval.kernel.start_new_kernel(cwd="here") == ("manager", "client")
    else:
        with pytest.raises(RuntimeError, match="didn't respond"):
            nbval.kernel.start_new_kernel(cwd="here")
    assert tries == [{"cwd": "here"}] * min(2, silent + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "status"), [("ray is not installed", 1), ("set FRAMEWORK_SOURCES to a folder", 0)]
)
def test_a_skip_fails_the_run_unless_no_index_has_what_is_missing(
    tmp_path: Path, reason: str, status: int
) -> None:
    path = tmp_path / "test_peer.py"
    path.write_text(f"import pytest\ndef test_peer(): pytest.skip({reason!r})\n")
    plugin = ("-p", "tests.pipeline.nothing_skipped")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout
    assert (reason in done.stdout.rpartition("nothing should be here")[2]) or not status
