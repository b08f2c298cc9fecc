from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from analysis.experiments.ablations import ablation, folders, presets, recording
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.source import code_alone, source_of, sources_of
from analysis.experiments.language_models.presets import SMOKE
from analysis.training.config import StartConfig
from analysis.training.metrics import METRICS, PARTIAL_METRICS


@pytest.fixture
def small_preset(small_config) -> Preset:
    return Preset(
        name="small",
        config=small_config,
        arms=(presets.NO_KL, *presets.kl_arms(0.5)),
        seeds=(0, 1),
        predictions=(),
    )


@pytest.fixture
def small_ablation(small_preset):
    return ablation.run(small_preset)


@pytest.mark.parametrize(
    "preset", [presets.quick(), presets.FULL, presets.HALF_STEP], ids=lambda preset: preset.name
)
def test_two_updates_of_every_preset(preset):
    start = StartConfig(updates=1)
    config = preset.config.model_copy(update={"updates": 2, "start": start, "log_every": 1})
    short = preset.model_copy(update={"config": config, "seeds": preset.seeds[:1]})
    result = ablation.run(short)
    assert not result.failures
    assert len(result.curves) == 2 * len(preset.arms)
    measured = [name for name in METRICS if name not in PARTIAL_METRICS]
    assert np.isfinite(result.curves[measured].to_numpy()).all()
    assert preset.predictions


def test_quick_parameters_are_validated():
    with pytest.raises(ValueError, match="learning_rate"):
        presets.quick(learning_rate=-1.0)
    with pytest.raises(ValueError, match="beta"):
        presets.quick(beta=float("nan"))
    with pytest.raises(ValueError, match="seeds"):
        presets.quick(num_seeds=0)


def test_chunks_do_not_change_the_results(small_preset, small_ablation, monkeypatch):
    monkeypatch.setattr(ablation, "CHUNK", 3)
    pd.testing.assert_frame_equal(ablation.run(small_preset).curves, small_ablation.curves)


def test_final_is_the_mean_over_the_last_windows(small_ablation):
    curves = small_ablation.curves
    one = curves[(curves["arm"] == "k2_loss") & (curves["seed"] == 1)]
    table = ablation.final(curves, share=0.67)  # two of three windows
    row = table[(table["arm"] == "k2_loss") & (table["seed"] == 1)]
    assert row["entropy"].item() == pytest.approx(one["entropy"].iloc[1:].mean())
    assert len(table) == len(small_ablation.preset.members)


def test_coarser_curves_average_the_windows_of_a_span(small_ablation):
    curves = small_ablation.curves  # windows at 0, 2 and 4
    coarse = ablation.coarsen(curves, 4)
    assert sorted(coarse["update"].unique()) == [0, 4]
    one = curves[(curves["arm"] == "k3_loss") & (curves["seed"] == 1)].set_index("update")
    same = coarse[(coarse["arm"] == "k3_loss") & (coarse["seed"] == 1)].set_index("update")
    assert same["entropy"][0] == pytest.approx(one["entropy"][[0, 2]].mean())
    assert same["entropy"][4] == one["entropy"][4]


def test_cosines_are_averaged_over_training_and_then_over_seeds():
    table = pd.DataFrame(
        {
            "arm": ["none", *4 * ["k2_loss"], *2 * ["k1_loss"]],
            "kl_estimator": ["none", *4 * ["k2"], *2 * ["k1"]],
            "beta": [0.0, *6 * [0.3]],
            "seed": [0, 0, 0, 1, 1, 0, 1],
            "kl_cosine": [np.nan, 0.2, 0.4, 0.9, np.nan, -0.1, 0.1],
        }
    )
    cosines = ablation.kl_cosines(table, 0.3).set_index("arm")
    assert list(cosines.index) == ["k2_loss", "k1_loss"]
    assert cosines.loc["k2_loss", "mean"] == pytest.approx(0.6)  # of 0.3 and 0.9
    assert cosines.loc["k1_loss", "mean"] == pytest.approx(0.0)


def test_an_unknown_beta_is_refused(small_ablation):
    with pytest.raises(ValueError, match="known are"):
        ablation.at_beta(small_ablation.curves, 0.25)


def test_a_recording_reads_back_and_notices_a_change(small_ablation, tmp_path):
    directory = tmp_path / "results" / "small"
    recording.save(small_ablation, directory)
    recording.save(small_ablation, directory)  # replaces
    recorded = recording.load(directory)
    assert recorded.preset == small_ablation.preset
    pd.testing.assert_frame_equal(
        recorded.curves, small_ablation.curves, rtol=1e-5, check_dtype=False
    )
    assert [path.name for path in directory.parent.iterdir()] == ["small"]
    manifest = json.loads((directory / "manifest.json").read_text())
    assert set(manifest["files"]) == {"curves.csv", "final.csv"}
    assert manifest["source"] == source_of(small_ablation.preset.config)

    curves = directory / "curves.csv"
    curves.write_text(curves.read_text().replace("0.", "1.", 1))
    with pytest.raises(ValueError, match=r"curves\.csv is missing or changed"):
        recording.load(directory)


def test_a_recording_of_other_arms_says_how_to_make_it_again(small_ablation, tmp_path):
    recording.save(small_ablation, tmp_path / "small")
    manifest = tmp_path / "small" / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["configuration"]["config"]["kl_credit"] = "to_go"
    manifest.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="record it again with analysis sweep small --record"):
        recording.load(tmp_path / "small")


def test_a_recorded_member_trains_again_alone_to_the_recorded_digits(small_ablation, tmp_path):
    recording.save(small_ablation, tmp_path / "small")
    recorded = recording.load(tmp_path / "small")
    both = recording.rerun(recorded, "k3_loss", 0.5, 1, windows=2)
    assert len(both) >= 2 * (len(METRICS) - len(PARTIAL_METRICS))
    assert (both["difference"] <= 1e-5 * both["again"].abs()).all()
    other = recording.rerun(recorded, "k3_loss", 0.5, 0, windows=2)
    assert (other["again"] - both["again"]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="no member 'k3_loss'"):
        recording.rerun(recorded, "k3_loss", 0.1, 1, windows=2)


@pytest.mark.parametrize(
    ("config", "imports"),
    [
        (presets.quick().config, "analysis.training.trainer"),
        (SMOKE.config, "analysis.training.trainer, analysis.experiments.ablations.settings"),
    ],
    ids=["tiny", "pretrained"],
)
def test_the_source_of_a_run_is_what_training_imports(config, imports):
    script = (
        f"import sys, analysis, {imports}\n"
        "root = analysis.__path__[0]\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.startswith('analysis.')]\n"
        "print(*sorted(f[len(root) + 1:] for f in files if not f.endswith('__init__.py')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded, listed = set(done.stdout.split()), set(sources_of(config))
    assert loaded <= listed, "a file that a run needs is not hashed"
    assert len(listed) > len(sources_of(presets.quick().config)) - 1


def test_comments_do_not_make_a_run_stale_and_code_does():
    source = 'def f(x):\n    """Doc."""\n    return x + 1  # why\n'
    same = '"""Module."""\n\ndef f(x):\n    return (x + 1)\n'
    assert code_alone(source) == code_alone(same)
    assert code_alone(source) != code_alone(source.replace("+ 1", "+ 2"))
    for code, other in (('[""]', "[]"), ("f(None)", "f()"), ("f'{x}'", "f'{x!r}'"), ("a", "'a'")):
        assert code_alone(f"y = {code}") != code_alone(f"y = {other}")


def test_every_python_spells_the_code_alike():
    # Nested quotes, a format that is an expression, empty parts, a class, a lambda, a slice.
    source = """
class A(B, metaclass=C):
    x: int = 1
    def f(self, *a, k=None, **o):
        return f"{', '.join(a):<{k}}" + f"{self.x!r:}{''}" + u"t", a[1:, ...], lambda v, /: -v
"""
    digest = hashlib.sha256(code_alone(source).encode()).hexdigest()
    assert digest.startswith("d88c5c8db381"), "runs recorded on another Python would look stale"


def test_a_failed_save_leaves_the_earlier_recording(small_ablation, tmp_path, monkeypatch):
    directory = tmp_path / "small"
    recording.save(small_ablation, directory)
    before = (directory / "curves.csv").read_bytes()
    monkeypatch.setattr(folders, "sha256_file", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recording.save(small_ablation, directory)
    assert (directory / "curves.csv").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_save_that_cannot_take_its_place_leaves_the_earlier_recording(
    small_ablation, tmp_path, monkeypatch
):
    directory = tmp_path / "small"
    recording.save(small_ablation, directory)
    before = (directory / "curves.csv").read_bytes()
    replace, moved = os.replace, []

    def fail_once(source, target):
        moved.append(source)
        if len(moved) == 2:  # the old one has made way, the new one is to come
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(folders.os, "replace", fail_once)
    with pytest.raises(PermissionError):
        recording.save(small_ablation, directory)
    assert (directory / "curves.csv").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
