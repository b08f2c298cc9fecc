"""The figures of chapter 5 show the data they are given, in the book's colours."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.experiments.chapters import fixed_points as study
from analysis.experiments.chapters import flows, one_state, single_samples
from analysis.kl.term import KLTerm
from analysis.report import style
from analysis.report.figures import fixed_points as figures


def term(estimator: str, placement: str = "loss", *, weighting: str = "none") -> KLTerm:
    return KLTerm(estimator=estimator, placement=placement, weighting=weighting)


def colours(axes) -> set[str]:
    return {line.get_color() for line in axes.get_lines()}


def title(axes) -> str:
    return axes.get_title(loc="left") or axes.get_title()


def test_tilts_draw_each_law_and_its_ascent():
    gaps = torch.linspace(0, 3, 4, dtype=torch.float64)
    curves = study.tilt_curves(gaps, beta=0.5, best_share=0.5, steps=50)
    (axes,) = figures.tilts(curves, 0.5, curves).axes
    assert axes.get_yscale() == "log"
    assert {style.COLOURS[k] for k in study.LAWS} <= colours(axes)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["$k_3$ loss"].get_xdata()[-1] == pytest.approx(6.0)


def test_flows_mark_every_end_once():
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    paths = {
        arm: flows.flow_paths(
            arm, flows.simplex_grid(3), reference.log(), frames=40, growth=1.15, step_size=0.05
        ).numpy()
        for arm in (
            term("k2"),
            term("k3", "reward"),
            term("k3"),
        )
    }
    panels = figures.simplex_flows(paths, reference.numpy()).axes
    assert [title(axes) for axes in panels[:3]] == [
        "$k_2$ loss",
        "$k_3$ reward",
        "$k_3$ loss",
    ]
    ends = [
        next(line for line in axes.get_lines() if line.get_marker() == "o") for axes in panels[:3]
    ]
    assert len(ends[0].get_xdata()) == 1
    assert ends[0].get_xdata()[0] == pytest.approx(0.3 + 0.1, abs=1e-3)
    assert len(ends[1].get_xdata()) > 3


def test_penalties_stand_side_by_side_a_row_a_dynamics():
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    paths = flows.penalty_paths(
        reference.log(), flows.simplex_grid(3), ("k2", "k3"), frames=40, seed=1
    )
    arrays = {key: path.numpy() for key, path in paths.items()}
    panels = figures.penalty_dynamics(arrays, reference.numpy()).axes
    assert [title(axes) for axes in panels[:3]] == [
        "$k_2$, natural flow",
        "$k_3$, natural flow",
        "$k_2$, plain flow",
    ]
    ends = [next(line for line in axes.get_lines() if line.get_marker() == "o") for axes in panels]
    assert len(ends[1].get_xdata()) > 3 == len(ends[3].get_xdata())


def test_walks_and_bands():
    table = single_samples.walk_table(
        single_samples.WALKS,
        vocab_size=4,
        runs=8,
        steps=20,
        step_size=0.1,
        checkpoints=2,
        seed=0,
    )
    (axes,) = figures.walks(table).axes
    assert len(axes.collections) == len(single_samples.WALKS)
    frames = table[table.walk == "k1"].assign(term="k2")
    sizes = [frames.assign(step_size=size) for size in (0.1, 1.0)]
    panels = figures.anchored(pd.concat(sizes)).axes
    assert [title(axes) for axes in panels] == ["step 0.1", "step 1"]


def test_noise_is_purple_where_k3_is_noisier():
    table = one_state.noise_map(16, 5)
    figure = figures.noise(table)
    (mesh,) = [c for c in figure.axes[0].collections if hasattr(c, "get_clim")][:1]
    assert mesh.norm(0.0) == pytest.approx(0.5)
    assert np.asarray(mesh.get_array()).max() == pytest.approx(min(3.0, table.to_numpy().max()))
    red, green, blue, _ = mesh.cmap(mesh.norm(2.0))
    assert blue > green
    assert blue > red
