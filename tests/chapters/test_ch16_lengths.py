"""Lengths under averages of tokens: the tilt is the flow it stands for, and figures say so."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from analysis.chapters import ch16_objectives as ch16
from analysis.experiments import initial_policy, recording
from analysis.experiments.presets.designed import aggregation_length

LENGTHS = np.array([2.0, 5.0, 9.0, 10.0, 11.0, 15.0])
MASS = np.array([0.05, 0.05, 0.3, 0.3, 0.25, 0.05])


def test_the_tilt_is_where_the_natural_flow_of_the_loss_leads() -> None:
    """Integrated: probabilities move by minus their own 1/|o| above its mean."""
    tau, kl = ch16.tilted(LENGTHS, MASS, 11.5)

    def flow(_: float, share: np.ndarray) -> np.ndarray:
        weight = 1 / LENGTHS
        return -share * (weight - share @ weight)

    end = solve_ivp(flow, (0.0, tau), MASS, rtol=1e-10, atol=1e-14).y[:, -1]
    assert end @ LENGTHS == pytest.approx(11.5, abs=1e-6)
    assert end @ np.log(end / MASS) == pytest.approx(kl, abs=1e-7)
    other_way = solve_ivp(lambda t, s: -flow(t, s), (0.0, tau), MASS, rtol=1e-10, atol=1e-14)
    assert other_way.y[:, -1] @ LENGTHS < MASS @ LENGTHS, "the flipped sign shortens"


def test_a_tilt_at_the_start_costs_nothing_and_a_length_out_of_reach_is_refused() -> None:
    assert ch16.tilted(LENGTHS, MASS, MASS @ LENGTHS) == (0.0, pytest.approx(0.0))
    for mean in (9.0, 15.0):
        with pytest.raises(ValueError, match="mean must be"):
            ch16.tilted(LENGTHS, MASS, mean)


def test_the_recorded_starts_are_all_there() -> None:
    table = initial_policy.recorded_lengths()
    preset = aggregation_length()
    counted = table.groupby("start")["completions"].sum()
    assert list(counted.index) == list(range(preset.config.start.count))
    assert set(counted) == {initial_policy.NUM_PROMPTS * preset.config.group_size}
    assert table["length"].max() <= preset.config.task.completion_length


def test_sampling_a_start_counts_its_answers() -> None:
    preset = aggregation_length()
    start = preset.config.start.model_copy(update={"updates": 1, "count": 2})
    short = preset.model_copy(update={"config": preset.config.model_copy(update={"start": start})})
    table = initial_policy.lengths(short, num_prompts=3)
    assert set(table.groupby("start")["completions"].sum()) == {3 * preset.config.group_size}


def test_what_was_walked_is_read_from_the_stored_curves() -> None:
    with (recording.RESULTS / "aggregation_length_cpu" / "curves.csv").open(newline="") as lines:
        rows = [r for r in csv.DictReader(lines) if r["variant"] == "only_k1_mean"]

    def mean(metric: str, update: int) -> float:
        return np.mean([float(r[metric]) for r in rows if int(r["update"]) == update])

    along = ch16.walked()
    (found,) = along[(along["average"] == "mean") & (along["update"] == 20)].to_dict("records")
    assert found["length"] == pytest.approx(mean("length", 20))
    kl = (mean("reverse_kl", 20) + mean("reverse_kl", 30)) / 2 * mean("length", 20)
    assert found["kl"] == pytest.approx(kl)
