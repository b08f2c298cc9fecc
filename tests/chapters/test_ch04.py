"""What chapter 4 trains live: the tiny policy as ever, or SmolLM2 from wherever it can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.chapters.ch04_grpo.live import device_of, live_preset, training
from analysis.records.language import FolderModel, HubModel, PackagedModel
from analysis.records.preset import Preset
from analysis.records.variants import Variant
from analysis.report.parameters import Parameter
from analysis.studies.presets.kl_terms import quick
from analysis.studies.presets.language import smollm2
from analysis.studies.presets.parts import NO_KL
from analysis.sweeps import in_process
from kl_term.errors import UserError
from kl_term.kl.term import KLTerm
from tests.packaged import needs_packaged_weights


def test_without_parameters_it_is_the_quick_preset() -> None:
    assert live_preset("tiny") == quick()
    assert len(live_preset("tiny", profile="full").seeds) == 10
    assert len(live_preset("tiny", profile="full", num_seeds=12).seeds) == 12


def test_every_parameter_reaches_the_tiny_preset() -> None:
    chosen = {"num_seeds": 2, "updates": 7, "beta": 0.7, "learning_rate": 0.5}
    assert live_preset("tiny", **chosen) == quick(**chosen)


def test_smollm2_is_small_on_a_cpu_and_the_preset_in_full() -> None:
    assert live_preset("smollm2-135m", profile="full") == smollm2()
    small = live_preset("smollm2-135m")
    assert (small.config.updates, len(small.seeds), small.variants) == (10, 1, smollm2().variants)
    assert small.config.learning_rate == smollm2().config.learning_rate
    chosen = live_preset(
        "smollm2-135m", num_seeds=2, updates=3, beta=0.7, learning_rate=0.5, profile="full"
    )
    assert (len(chosen.seeds), chosen.config.updates, chosen.config.learning_rate) == (2, 3, 0.5)
    assert {variant.beta for variant in chosen.variants[1:]} == {0.7}
    assert chosen.config.group_size == smollm2().config.group_size


@pytest.mark.parametrize(
    ("weights", "model"),
    [
        ("hub", HubModel()),
        ("packaged", PackagedModel()),
        ("/some/folder", FolderModel(path="/some/folder")),
    ],
)
def test_weights_come_from_the_hub_a_package_or_a_folder(
    weights: str, model: HubModel | PackagedModel | FolderModel
) -> None:
    assert live_preset("smollm2-135m", weights=weights).config.model == model


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="tiny"):
        live_preset("foo")
    with pytest.raises(ValueError, match="profile"):
        live_preset("tiny", profile="slow")
    with pytest.raises(ValueError, match="'tiny' is trained from scratch"):
        live_preset("tiny", weights="packaged")
    with pytest.raises(UserError, match="policy is one of tiny, smollm2-135m, not 'foo'"):
        Parameter("policy", "str", "tiny").check("foo", "04")


def test_the_tiny_policy_trains_on_the_cpu() -> None:
    assert device_of(live_preset("tiny")) == "cpu"


@pytest.mark.slow
def test_a_run_as_short_as_that_of_smollm2_is_drawn() -> None:
    preset = live_preset("tiny", updates=10, num_seeds=1)
    config = preset.config.model_copy(update={"log_every": 1, "cosine_every": 0})
    curves = in_process.run(preset.model_copy(update={"config": config})).curves
    for figure in (training(curves, name, name) for name in ("accuracy", "reverse_kl")):
        assert [len(line.get_xdata()) for line in figure.axes[0].get_lines()[:5]] == [10] * 5


@needs_packaged_weights
def test_smollm2_trains_on_packaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two variants and one update; the weights are unpacked into a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fields = live_preset("smollm2-135m", weights="packaged", updates=2).model_dump()
    fields["variants"] = (NO_KL, Variant(kl=KLTerm(estimator="exact"), beta=0.1))
    live = in_process.run(Preset.model_validate(fields))
    assert not live.failures and len(live.curves) == 4
    start, after = (live.curves.query("update == @at") for at in (0, 1))
    assert (start["reverse_kl"].abs() < 1e-5).all()
    assert (after["reverse_kl"] > 1e-3).all()


@pytest.mark.slow
def test_a_point_of_a_curve_averages_whole_windows() -> None:
    preset = quick(updates=48, num_seeds=1)
    config = preset.config.model_copy(update={"log_every": 4})
    short = in_process.run(preset.model_copy(update={"config": config}))
    figure = training(short.curves, "accuracy", "accuracy")
    line = figure.axes[0].get_lines()[0]
    assert list(line.get_xdata()) == [4 * window + 2 for window in range(12)]


@pytest.mark.slow
def test_without_a_term_accuracy_rises_above_four_tenths() -> None:
    """What figure 4.1's alternative text says; once it said: stays between 0.3 and 0.4.

    Kernels of three kinds of processors reach 0.42, 0.44 and 0.49, at other updates each.
    """
    shown = quick()
    preset = shown.model_copy(update={"variants": tuple(v for v in shown.variants if v == NO_KL)})
    (line, *_) = training(in_process.run(preset).curves, "accuracy", "accuracy").axes[0].get_lines()
    accuracy = line.get_ydata()
    assert len(accuracy) == 15
    assert 0.3 < accuracy[0] < 0.375 and 0.4 < accuracy.max() < 0.525
    assert accuracy.min() > 0.25
