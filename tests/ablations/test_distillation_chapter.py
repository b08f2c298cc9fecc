"""The chapter's own computations, against the trainer's metrics and by hand."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from analysis.experiments.ablations.recording import Recorded
from analysis.experiments.chapters import distillation
from analysis.training.tasks import END, FILLER


def test_completions_are_of_the_arms_asked_for_and_on_the_same_prompts(two_digits):
    table = distillation.completions_after(
        two_digits, ("k2_loss", "supervised"), updates=2, prompts=4
    )
    assert table["arm"].tolist() == ["k2_loss"] * 4 + ["supervised"] * 4
    assert table["prompt"].tolist()[:4] == table["prompt"].tolist()[4:]
    assert [sorted(p) for p in table["prompt"]] == [list(s[:-1]) for s in table["sorted"]]
    assert table["sorted"].str.endswith(".").all() and (table["completion"].str.len() == 5).all()


def test_tokens_as_text():
    assert distillation.as_text(torch.tensor([FILLER, 0, 9, 14, END])) == "_09?."


def test_costs_by_threshold(two_digits):
    rows = [
        {"arm": arm, "seed": seed, "update": update, "own_accuracy": value}
        for arm, speed in (("grpo", 0.01), ("k2_loss", 0.02))
        for seed in (0, 1)
        for update, value in [(0, 0.0), (20, 20 * speed), (40, 40 * speed)]
    ]
    recorded = Recorded(two_digits, pd.DataFrame(rows), pd.DataFrame(), {})
    table = distillation.cost_table(recorded, "grpo", ["k2_loss"], [0.2]).set_index("unit")
    # crossed 20 updates after the first window's middle (10), against 10: 30 over 20
    assert table.loc["updates", "mean"] == pytest.approx(1.5)
    assert table.loc["tokens", "mean"] == pytest.approx(1.5)
    assert table.loc["flops", "mean"] == pytest.approx(1.5 * 3 / 4)
