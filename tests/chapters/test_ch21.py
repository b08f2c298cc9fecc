"""The evidence of the guide: variants of their presets, quoted with intervals, as recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import analysis
from analysis.chapters import ch21_guide
from analysis.chapters.ch21_guide import EVIDENCE, evidence
from analysis.evidence import predictions
from analysis.records.metrics import METRICS
from analysis.studies.presets import make_preset

NOTEBOOK = Path(analysis.__path__[0]).parent / "notebooks" / "21_guide.ipynb"


@pytest.mark.parametrize("key", EVIDENCE)
def test_a_line_compares_variants_of_a_preset_with_ten_seeds(key):
    line = EVIDENCE[key]
    preset = make_preset(line.preset, {})
    names = {variant.name for variant in preset.variants}
    assert {line.variant, line.other} <= names and line.metric in METRICS
    assert len(preset.seeds) >= 10


def test_every_line_is_quoted_with_its_interval():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for key in EVIDENCE:
        assert f"`{key}`" in text, key


def test_a_line_is_judged_by_the_count_of_all_lines():
    """Each would differ on its own; counted with the others not all do."""
    table = evidence().set_index("key")
    alone = table["p"] < 0.05
    corrected = table["p"] * len(table) < 0.05
    assert ((table["verdict"] == "differs") == corrected).all()
    assert set(table.loc[alone & ~corrected, "verdict"]) <= {"suggestive", "equivalent"}
    assert (alone & ~corrected).any()
    assert table.loc["kl_or_none", "verdict"] == "differs"
    assert table.loc["kl_or_none_half", "verdict"] == "equivalent"


def test_differences_are_those_of_the_recorded_runs():
    table = evidence().set_index("key")
    assert len(table) == len(EVIDENCE) and (table["seeds"] >= 10).all()
    assert (table["low"] <= table["mean"]).all() and (table["mean"] <= table["high"]).all()
    assert table.loc["k3_reward", "mean"] < -0.2 < table.loc["kl_or_none_half", "mean"]


@pytest.mark.slow
def test_each_prediction_that_is_recorded_is_quoted_and_has_a_number():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for design, rows in ch21_guide.quoted().items():
        assert rows["mean"].notna().all()
        for key in rows["key"]:
            assert f"`{design}_{key}`" in text, key


def test_a_quoted_prediction_that_no_design_makes_is_refused(monkeypatch):
    judged = {"equal_kl": predictions.OTHERWISE["equal_kl"]}
    monkeypatch.setattr(predictions, "OTHERWISE", judged)
    monkeypatch.setattr(ch21_guide, "QUOTED", {"equal_kl": ("k1_loss_none_reward", "k9_loss")})
    with pytest.raises(ValueError, match="equal_kl: no prediction has the key k9_loss"):
        ch21_guide.quoted()
