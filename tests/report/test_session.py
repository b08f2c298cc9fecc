"""The notebook session: records become exact text, and outputs depend on nothing hidden."""

from __future__ import annotations

import base64
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from analysis.records import choices
from analysis.report import session

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (0.03716, ".4f", "0.0372"),
        (-1.5, ".2f", "−1.50"),
        (-0.0001, ".2f", "0.00"),
        (1.234e-5, ".1e", "1.2 × 10⁻⁵"),
        (2.5e12, ".1e", "2.5 × 10¹²"),
        (float("inf"), ".4f", "∞"),
        (float("-inf"), ".4f", "−∞"),
        (12, "", "12"),
        (12345, ",", "12,345"),
        (0.125, ".1%", "12.5%"),
        (torch.tensor(0.25, dtype=torch.float64), ".2f", "0.25"),
        (torch.tensor([3]), "", "3"),
        ("it's `k3`", "", "it's `k3`"),
    ],
)
def test_value_becomes_this_text(value: object, spec: str, text: str) -> None:
    assert session.format_value("key", value, spec) == text


@pytest.mark.parametrize(
    ("value", "spec", "complaint"),
    [
        (float("nan"), ".2f", "NaN"),
        (0.1, "", "give a format"),
        (0.1, ".2q", "does not apply"),
        (torch.zeros(2), ".2f", "one number, got 2"),
        (None, ".2f", "NoneType"),
        (True, "", "bool"),
    ],
)
def test_unquotable_value_is_refused_by_key(value: object, spec: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        session.format_value("the_key", value, spec)
    assert "the_key" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", ["", "K3", "1st", "a-b", "a b", "a::b", "ünï", "a\n"])
def test_malformed_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="record key"):
        session.record(key, 1)


def test_unknown_profile_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"profile must be one of \['quick', 'full'\], got 'fast'"):
        session.start("fast")


START = "from kl_term import style; from analysis.report import session; session.start('quick')"
PLOT = (
    "figure, axes = style.subplots()\n"
    "axes.plot([0, 1], [0, 1], **style.line('k3'))\n"
    "style.label_line_ends(axes)\n"
    "figure"
)
CELLS = {
    "start": START + "\nimport torch; assert torch.get_num_threads() == 1",
    "record": "session.record('a_key', 1 / 3, '.3f')",
    "figure": PLOT,
    "pyplot": "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); ax.plot([1, 2]); fig",
    "table": "import pandas as pd; pd.DataFrame({'row': range(100)})",
    "bars": "from tqdm import tqdm\nfrom tqdm.auto import tqdm as auto\n"
    "for _ in auto(tqdm(range(3))): pass",
    "once": (ONCE := "get_ipython().run_cell(\"session.record('one', 1)\", store_history=True)"),
    "again": ONCE + ".success",
    "elsewhere": "session.record('one',  1)",
    "loop": "for n in range(2): session.record('two', n)",
}


def run(*cells: str) -> list[list[nbformat.NotebookNode]]:
    """The outputs of each cell, run one after the other in a fresh kernel."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells]
    )
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=60, resources=where, allow_errors=True).execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[nbformat.NotebookNode]]:
    return dict(zip(CELLS, run(*CELLS.values()), strict=True))


def test_a_record_is_hidden_text_under_its_key(outputs) -> None:
    (glued,) = outputs["record"]
    assert glued.data == {"application/papermill.record/text/plain": "'0.333'"}
    assert glued.metadata["scrapbook"]["name"] == "a_key"


@pytest.mark.parametrize("cell", ["figure", "pyplot"])
def test_a_figure_is_shown_once_at_twice_its_size(outputs, cell: str) -> None:
    (shown,) = outputs[cell]
    assert "image/png" in shown.data
    png = base64.b64decode(shown.data["image/png"])
    width = int.from_bytes(png[16:20], "big")
    assert width == 2 * shown.metadata["image/png"]["width"]


def test_a_table_is_shown_whole(outputs) -> None:
    (shown,) = outputs["table"]
    assert shown.data["text/html"].count("<tr") == 101 and "..." not in shown.data["text/plain"]


@pytest.mark.parametrize("cell", ["start", "bars"])
def test_neither_the_start_nor_progress_bars_leave_output(outputs, cell: str) -> None:
    assert outputs[cell] == []


def test_running_a_recording_cell_again_is_allowed(outputs) -> None:
    assert outputs["again"][-1].data["text/plain"] == "True"


@pytest.mark.parametrize(("cell", "key"), [("elsewhere", "one"), ("loop", "two")])
def test_a_key_used_twice_is_refused(outputs, cell: str, key: str) -> None:
    error = outputs[cell][-1]
    assert error.output_type == "error"
    assert f"record key '{key}' is used twice" in error.evalue


@pytest.mark.slow
def test_a_figure_has_the_same_bytes_whatever_the_user_s_matplotlibrc(
    outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 9\nfigure.dpi: 33\n")
    monkeypatch.setenv("MATPLOTLIBRC", str(tmp_path))
    (shown,) = run(START, PLOT)[1]
    assert shown.data == outputs["figure"][0].data


def test_a_misspelt_name_is_refused_by_the_notebook() -> None:
    cells = [
        "",
        "beta: float = 0.1\nn = None  # type: int|None",
        "# Parameters\nbetta = 0.3\n",
        "1",
    ]
    with pytest.raises(ValueError, match="got 'betta'; did you mean 'beta'"):
        session.check_injected(cells)
    session.check_injected([cells[1], "# Parameters\nbeta = 0.3\nn = 5\n", cells[3]])
    session.check_injected([cells[1], cells[3]])  # nothing was injected


def test_the_profiles_are_those_of_the_command() -> None:
    assert session.PROFILES == choices.PROFILES
