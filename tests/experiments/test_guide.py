"""The evidence of the guide: arms of their presets, quoted with intervals, as recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import analysis
from analysis.experiments.ablations.catalogue import make_preset
from analysis.experiments.chapters.guide import COMPARISONS, EVIDENCE, evidence
from analysis.training.metrics import METRICS

NOTEBOOK = Path(analysis.__path__[0]).parent / "notebooks" / "21_guide.ipynb"


@pytest.mark.parametrize("key", EVIDENCE)
def test_a_line_compares_arms_of_a_preset_with_ten_seeds(key):
    line = EVIDENCE[key]
    preset = make_preset(line.preset, {})
    names = {arm.name for arm in preset.arms}
    assert {line.arm, line.other} <= names and line.metric in METRICS
    assert len(preset.seeds) >= 10


def test_every_line_is_quoted_with_its_interval():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for key in EVIDENCE:
        for name in (key, f"{key}_low", f"{key}_high"):
            assert f"`{name}`" in text, name


def test_a_line_is_judged_by_the_count_of_its_chapter():
    chapters = {
        source.group(1): int(counted.group(1))
        for notebook in NOTEBOOK.parent.glob("*.ipynb")
        for text in [notebook.read_text(encoding="utf-8")]
        if (counted := re.search(r'"comparisons = (\d+)', text))
        for source in [re.match(r"(\d+)", notebook.name)]
    }
    assert set(chapters) == {"04", "16", "17", "18", "19", "20"}
    of = {"full": "04", "starts": "19", "process": "16", "staleness": "17", "kdrl": "18"}
    assert {name: COMPARISONS[name] for name in of} == {n: chapters[c] for n, c in of.items()}
    assert set(COMPARISONS) == {line.preset for line in EVIDENCE.values()}
    table = evidence().set_index("key")
    assert table.loc["weight_k3", "verdict"] == "suggestive", "it would differ on its own"
    assert table.loc["any_leash", "verdict"] == "differs"
    assert table.loc["any_leash_half", "verdict"] == "equivalent"


def test_differences_are_those_of_the_recorded_members():
    table = evidence().set_index("key")
    assert len(table) == len(EVIDENCE) and (table["seeds"] >= 10).all()
    assert (table["low"] <= table["mean"]).all() and (table["mean"] <= table["high"]).all()
    assert table.loc["k3_reward", "mean"] < -0.2 < table.loc["k1_reward", "mean"]
