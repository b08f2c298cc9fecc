"""Chapter 4's pictures of recorded differences: the rows that the text names, from the tables."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.chapters.ch04_grpo import at_equal_kl, one_beta
from analysis.records import recording


def test_differences_at_one_coefficient_are_means_over_seeds_and_one_was_predicted() -> None:
    table = one_beta.accuracies()
    for row in table.to_dict("records"):
        finals = recording.load(recording.folder_of(row["design"])).finals
        ends = finals[finals["beta"].isin((0.0, one_beta.BETA))].groupby("variant")["accuracy"]
        found = ends.mean()[row["variant"]] - ends.mean()[row["other"]]
        assert row["mean"] == pytest.approx(found, abs=1e-12)
    assert table["outcome"].tolist() == ["open", "holds", "open", "open", "open"]
    assert table["low"].gt(0).tolist() == [True, False, False, False, False]


def test_ratios_of_kls_are_drawn_on_a_log_scale_and_all_hold() -> None:
    assert set(at_equal_kl.ratios()["outcome"]) == {"holds"}
    (axes,) = at_equal_kl.draw_ratios().axes
    labels = [float(label.get_text()) for label in axes.get_xticklabels()]
    assert axes.get_xticks() == pytest.approx(np.log(labels), abs=1e-12)
    (band,) = axes.patches
    assert band.get_x() + band.get_width() == pytest.approx(np.log(1.25))


def test_the_nearer_half_costs_more() -> None:
    table = at_equal_kl.halves().set_index("key")["mean"]
    for name in ("k2_loss", "k3_loss"):
        assert table[f"near_{name}"] < table[f"far_{name}"] < 0
    assert (
        table["k3_loss_k2"]
        == at_equal_kl.against("k3_loss", "k2_loss", preset="equal_kl_large")["mean"]
    )
