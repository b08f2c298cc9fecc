"""What is compared at equal KL is what the design names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from analysis.evidence import equal_kl
from analysis.evidence.recorded import recorded
from analysis.studies.presets import make_preset


def test_a_design_of_final_policies_is_compared_by_their_own_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert equal_kl.compared("equal_kl") == ("reward", "reverse_kl")
    preset = make_preset("equal_kl_half_step", {})
    monkeypatch.setattr(equal_kl, "recorded", lambda name: SimpleNamespace(preset=preset))
    assert equal_kl.compared("any") == ("final_reward", "final_reverse_kl")


def test_its_curves_are_drawn_from_these_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers under other names draw the same picture."""
    drawn = []
    for renamed in (False, True):
        run, runs = recorded("equal_kl"), equal_kl.recorded_runs("equal_kl")
        if renamed:
            names = {"reward": "final_reward", "reverse_kl": "final_reverse_kl"}
            design = run.preset.design.model_copy(update={"equal": "final_reverse_kl"})
            preset = run.preset.model_copy(update={"design": design})
            run, runs = (
                each._replace(preset=preset, finals=each.finals.rename(columns=names))
                for each in (run, runs)
            )
        monkeypatch.setattr(equal_kl, "recorded", lambda name, run=run: run)
        monkeypatch.setattr(equal_kl, "recorded_runs", lambda name, runs=runs: runs)
        equal_kl.fit.cache_clear()
        (axes,) = equal_kl.draw_curves(("k2_loss",)).axes
        drawn.append([line.get_xydata().tolist() for line in axes.lines])
    equal_kl.fit.cache_clear()
    assert drawn[0] == drawn[1] and len(drawn[0]) > 3
