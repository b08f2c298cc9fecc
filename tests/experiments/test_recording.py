from __future__ import annotations

import inspect
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from analysis.records import recording, tidy
from analysis.records.manifests import manifest_of
from analysis.records.metrics import METRICS, PARTIAL_METRICS
from analysis.records.preset import Preset
from analysis.studies.presets import FIRST_SEED, PRESETS, make_preset
from analysis.studies.presets import kl_terms as presets
from analysis.studies.presets.language import llama_smoke
from analysis.studies.presets.parts import NO_KL, kl_variants
from analysis.sweeps import in_process, reproduction
from analysis.sweeps.provenance import source_of, sources_of
from kl_term.files import sealed
from tests.experiments.tiny import make_tiny, trained_alone


@pytest.fixture(scope="module")
def small_preset() -> Preset:
    tiny = make_tiny(6, name="small")
    config = tiny.config.model_copy(update={"log_every": 2, "num_prompts": 3, "group_size": 5})
    return tiny.model_copy(update={"config": config, "variants": (NO_KL, *kl_variants(0.5))})


@pytest.fixture(scope="module")
def trained(small_preset):
    return in_process.run(small_preset)


def test_chunks_do_not_change_the_results(small_preset, trained, monkeypatch):
    monkeypatch.setattr(in_process, "CHUNK", 3)
    pd.testing.assert_frame_equal(in_process.run(small_preset).curves, trained.curves)


def test_final_is_the_mean_over_the_last_windows(trained):
    curves = trained.curves
    one = curves[(curves["variant"] == "k2_loss") & (curves["seed"] == 1)]
    table = tidy.final(curves, share=0.67)  # two of three windows
    row = table[(table["variant"] == "k2_loss") & (table["seed"] == 1)]
    assert row["entropy"].item() == pytest.approx(one["entropy"].iloc[1:].mean())
    assert len(table) == len(trained.preset.runs)


def test_coarser_curves_average_the_windows_of_a_span(trained):
    curves = trained.curves  # windows at 0, 2 and 4
    coarse = tidy.coarsen(curves, 4)
    assert sorted(coarse["update"].unique()) == [0, 4]
    one = curves[(curves["variant"] == "k3_loss") & (curves["seed"] == 1)].set_index("update")
    same = coarse[(coarse["variant"] == "k3_loss") & (coarse["seed"] == 1)].set_index("update")
    assert same["entropy"][0] == pytest.approx(one["entropy"][[0, 2]].mean())
    assert same["entropy"][4] == one["entropy"][4]


def test_cosines_are_averaged_over_training_and_then_over_seeds():
    table = pd.DataFrame(
        {
            "variant": ["none", *4 * ["k2_loss"], *2 * ["k1_loss"]],
            "kl_estimator": ["none", *4 * ["k2"], *2 * ["k1"]],
            "beta": [0.0, *6 * [0.3]],
            "seed": [0, 0, 0, 1, 1, 0, 1],
            "kl_cosine": [np.nan, 0.2, 0.4, 0.9, np.nan, -0.1, 0.1],
        }
    )
    cosines = tidy.kl_cosines(table, 0.3).set_index("variant")
    assert list(cosines.index) == ["k2_loss", "k1_loss"]
    assert cosines.loc["k2_loss", "mean"] == pytest.approx(0.6)  # of 0.3 and 0.9
    assert cosines.loc["k1_loss", "mean"] == pytest.approx(0.0)


def test_an_unknown_beta_is_refused(trained):
    with pytest.raises(ValueError, match="known are"):
        tidy.at_beta(trained.curves, 0.25)


def test_a_recording_reads_back_and_notices_a_change(trained, tmp_path):
    directory = tmp_path / "results" / "small"
    recording.save(trained, directory)
    recording.save(trained, directory)  # replaces
    recorded = recording.load(directory)
    assert recorded.preset == trained.preset
    pd.testing.assert_frame_equal(recorded.curves, trained.curves, rtol=1e-5, check_dtype=False)
    assert [path.name for path in directory.parent.iterdir()] == ["small"]
    manifest = json.loads((directory / "manifest.json").read_text())
    assert set(manifest["files"]) == {"curves.csv", "final.csv"}
    assert manifest["source"] == source_of(trained.preset.config)

    curves = directory / "curves.csv"
    curves.write_text(curves.read_text().replace("0.", "1.", 1))
    with pytest.raises(ValueError, match=r"curves\.csv changed since"):
        recording.load(directory)


def test_a_recording_of_other_variants_says_how_to_make_it_again(trained, tmp_path):
    recording.save(trained, tmp_path / "small")
    fields = manifest_of(tmp_path / "small")
    fields["configuration"]["config"]["kl_credit"] = "to_go"
    (tmp_path / "small" / "manifest.json").write_bytes(sealed(fields))
    with pytest.raises(ValueError, match="record it again with analysis sweep small --record"):
        recording.load(tmp_path / "small")


def test_a_recording_is_read_with_what_it_is_compared_with(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    recording.save(trained, tmp_path / "small_cpu")
    variants, seeds = kl_variants(0.25), trained.preset.seeds[1:]
    changes = {"name": "more", "variants": variants, "seeds": seeds, "beside": trained.preset}
    more = in_process.run(trained.preset.model_copy(update=changes))
    recording.save(more, tmp_path / "more_cpu")
    read = recording.with_others(recording.load(tmp_path / "more_cpu"))
    for table, own, other in zip(read[1:3], more[1:3], trained[1:3], strict=True):
        expected = len(own) + len(other) // len(trained.preset.seeds)
        assert len(table) == expected and set(table["seed"]) == set(seeds)
    assert set(read.finals["beta"]) == {0.0, 0.25, 0.5}

    config = more.preset.config.model_copy(update={"learning_rate": 1e-4})
    with pytest.raises(ValueError, match="trained with different configurations"):
        recording.with_others(
            more._replace(preset=more.preset.model_copy(update={"config": config}))
        )


def test_a_recorded_run_trains_again_alone_to_the_recorded_digits(trained, tmp_path):
    recording.save(trained, tmp_path / "small")
    recorded = recording.load(tmp_path / "small")
    both = trained_alone(recorded, "k3_loss", 0.5, 1, windows=2)
    assert len(both) >= 2 * (len(METRICS) - len(PARTIAL_METRICS))
    assert (both["difference"] <= 1e-5 * both["again"].abs()).all()
    other = trained_alone(recorded, "k3_loss", 0.5, 0, windows=2)
    assert (other["again"] - both["again"]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "imports"),
    [
        (presets.quick().config, "analysis.training.trainer"),
        (llama_smoke().config, "analysis.training.trainer, analysis.training.environment_of"),
    ],
    ids=["tiny", "pretrained"],
)
def test_the_source_of_a_run_is_what_training_imports(config, imports):
    script = (
        f"import sys, analysis, {imports}\n"
        "root = len(analysis.__path__[0]) - len('analysis')\n"
        "ours = ('kl_term.', 'analysis.')\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.startswith(ours)]\n"
        "print(*sorted(f[root:] for f in files if not f.endswith('__init__.py')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded, listed = set(done.stdout.split()), set(sources_of(config))
    assert loaded - {"kl_term/lazy.py"} <= listed, "a file that a run needs is not hashed"
    assert len(listed) > len(sources_of(presets.quick().config)) - 1


@pytest.mark.parametrize("folder", reproduction.find(), ids=lambda folder: folder.name)
def test_a_recording_is_of_its_preset_with_every_run_healthy(folder):
    recorded = recording.load(folder)
    given = {FIRST_SEED: recorded.preset.seeds[0], "num_seeds": len(recorded.preset.seeds)}
    if "weights" in inspect.signature(PRESETS[recorded.preset.name]).parameters:
        given["weights"] = recorded.preset.config.model.kind
    now = make_preset(recorded.preset.name, given)
    assert recorded.preset.model_dump() == now.model_dump()
    assert not recorded.failures
    assert len(recorded.finals) == len(recorded.preset.runs)


def test_a_recording_lies_where_its_name_or_its_preset_says():
    assert recording.folder_of("equal_kl_large").name == "equal_kl_large_cuda"
    assert recording.folder_of("kdrl").name == "kdrl_cpu"
    assert recording.folder_of("three_ways_half_step").name == "three_ways_half_step_cpu"
    assert recording.folder_of("never").name == "never_cpu"
