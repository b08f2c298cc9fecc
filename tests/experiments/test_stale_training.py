"""Costs and peaks of recorded curves, on tables whose answers are known."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from analysis.experiments.ablations.ablation import ARM_COLUMNS
from analysis.experiments.ablations.recording import Recorded
from analysis.experiments.chapters import stale_training as study
from analysis.training.config import RunConfig
from analysis.training.metrics import METRICS


def curves(values: list[float], every: int) -> pd.DataFrame:
    """One member with one value of every metric in each window."""
    fields = dict.fromkeys(ARM_COLUMNS, "none") | {"beta": 0.0, "seed": 0}
    return pd.DataFrame(
        {**fields, "update": every * place, **dict.fromkeys(METRICS, value)}
        for place, value in enumerate(values)
    )


def test_passes_are_counted_forward_by_forward():
    # sampling, reference, backward of the first step; then forward and backward of three more
    assert study.passes_per_completion(4) == 1 + 1 + 2 + 3 * (1 + 2)
    assert study.passes_per_completion(1) == 4
    assert study.passes_per_completion(4, replay=False) == 1 + 1 + 4 * (1 + 2)
    with pytest.raises(ValueError, match="num_iterations"):
        study.passes_per_completion(0)


def test_costs_are_those_at_the_end_of_a_window():
    config = RunConfig(updates=10, num_prompts=3, group_size=2, num_iterations=2, log_every=4)
    table = study.with_costs(curves([0.1, 0.2, 0.3], 4), config)
    assert table["completions"].tolist() == [24, 48, 60]  # the last window has two updates
    assert table["passes"].tolist() == [7 * 24, 7 * 48, 7 * 60]
    assert table["recomputed"].tolist() == [8 * 24, 8 * 48, 8 * 60]


def test_finals_within_a_cost_do_not_read_what_came_later():
    config = RunConfig(updates=12, num_prompts=3, group_size=2, log_every=4)
    table = study.with_costs(curves([0.1, 0.2, 0.9], 4), config)
    within = study.final_within(table, "completions", 48, share=0.5)
    assert within["accuracy"].item() == 0.2
    with pytest.raises(ValueError, match="no window within completions=10: its first ends at 24"):
        study.final_within(table, "completions", 10)


def test_finals_within_a_cost_are_of_each_arms_own_windows():
    long, short = (
        curves(values, every).assign(arm=arm, cost=lambda table: table["update"] + 1)
        for arm, values, every in (("long", [0.1, 0.2], 30), ("short", [0.3, 0.4, 0.5], 10))
    )
    within = study.final_within(pd.concat([long, short]), "cost", 15, share=0.5)
    assert within.set_index("arm")["accuracy"].to_dict() == {"long": 0.1, "short": 0.4}


def test_the_peak_is_over_a_members_own_windows():
    table = pd.concat([curves([1.0, 7.0, 2.0], 5), curves([3.0, 4.0, 1.0], 5).assign(seed=1)])
    assert study.peaks(table, "gradient_norm")["gradient_norm"].tolist() == [7.0, 4.0]


def recorded(arm: str, config: RunConfig, values: list[float]) -> Recorded:
    preset = SimpleNamespace(config=config)
    table = curves(values, config.log_every).assign(arm=arm, beta=0.3)
    return Recorded(preset, table, table, {})


def test_ways_are_compared_where_the_cheaper_one_ends():
    config = RunConfig(updates=20, num_prompts=2, group_size=2, num_iterations=4, log_every=10)
    several = recorded("merged_old", config, [0.1, 0.2])
    config = RunConfig(updates=60, num_prompts=4, group_size=2, log_every=10)
    large = recorded("k2_loss", config, [0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    ways = study.costed_ways(several, large)
    assert set(ways["arm"]) == {"merged_old", study.LARGE_BATCH}
    # 80 completions and 1040 passes, against 80 and 320 in every window of the large batches
    drawn = study.at_equal_cost(ways, "completions", 0.3).set_index("arm")["accuracy"]
    assert drawn.to_dict() == {"merged_old": 0.2, study.LARGE_BATCH: 0.3}
    passed = study.at_equal_cost(ways, "passes", 0.3).set_index("arm")["accuracy"]
    assert passed.to_dict() == {"merged_old": 0.2, study.LARGE_BATCH: 0.5}
