"""Sweeps on a reward model: stored, cut into any shards, recorded, reproduced; what is read off."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.records import recording
from analysis.records.config import RewardModel
from analysis.records.designs import golds_of_disagreement, golds_of_stopping, with_derived
from analysis.records.preset import Preset
from analysis.records.tidy import RUN_COLUMNS
from analysis.studies.presets import PRESETS
from analysis.sweeps import in_process, reproduction
from analysis.sweeps.pools import LocalPool
from analysis.sweeps.record import record_sweep
from analysis.sweeps.store import Store, with_checksum, without_checksum
from analysis.sweeps.sweep import run_sweep
from tests.experiments.tiny import Heard, make_tiny
from tests.trees import on_one_thread

MODEL = RewardModel(labels=20, width=8, updates=3, batch_size=8)


def tiny() -> Preset:
    made = make_tiny(10)
    changes = {
        "reward_model": MODEL,
        "start": made.config.start.model_copy(update={"count": 2}),
        "final_answers": 8,
        "log_every": 2,
    }
    return made.model_copy(update={"config": made.config.model_copy(update=changes)})


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory):
    """A finished sweep, and its store."""
    store = Store(tmp_path_factory.mktemp("proxies"))
    with on_one_thread():
        return store, run_sweep(tiny(), store, Heard(), LocalPool(workers=1), runs_per_shard=4)


def test_a_sweep_has_the_digits_of_one_process_whatever_its_shards(stored) -> None:
    with on_one_thread():
        straight = in_process.run(tiny())
    for place, (_, of_run) in enumerate(straight.curves.groupby(list(RUN_COLUMNS), sort=False)):
        for name in ("gold", "proxy", "reverse_kl", "reward"):
            logged = np.array(stored[1][place].metrics[name], dtype=np.float32)
            np.testing.assert_array_equal(logged, of_run[name].to_numpy().astype(np.float32))


def test_a_recorded_sweep_is_read_and_reproduced_gold_and_proxy_included(
    stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny_cpu"
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    record_sweep(tiny(), stored[1], folder)
    read = recording.load(folder)
    assert read.preset.config == tiny().config
    assert {"gold", "proxy"} <= set(read.curves) & set(read.finals)
    assert {"final_gold", "final_proxy"} <= set(read.finals)
    averaged = recording.by_start(read)
    assert {"gold", "final_gold"} <= set(averaged.finals)
    with on_one_thread():
        assert reproduction.reproduce(folder).agrees
    changed = read.curves.assign(gold=read.curves["gold"] + 1e-3)
    recording.save(read._replace(curves=changed), folder)
    with on_one_thread():
        again = reproduction.reproduce(folder, runs=1)
    assert set(again.mismatches["metric"]) == {"gold"}


def test_a_stored_run_without_its_gold_is_refused(stored) -> None:
    run = stored[1][0]
    short = {name: values for name, values in run.metrics.items() if name != "gold"}
    read = without_checksum(with_checksum(run), type(run))
    assert read.metrics["gold"] == run.metrics["gold"]
    with pytest.raises(ValueError, match="metric gold is missing"):
        with_checksum(run.model_copy(update={"metrics": short}))


def test_where_a_run_could_have_been_stopped() -> None:
    """Against loops over the windows; a KL that comes back under the budget counts no more."""
    golds = {0: (0.8, 0.9, 0.7, 0.6), 1: (0.8, 0.7, 0.9, 0.95), 2: (0.5, 0.6, 0.7, 0.8)}
    kls = {0: (0.0, 0.05, 0.2, 0.09), 1: (0.0, 0.3, 0.05, 0.05), 2: (0.0, 0.01, 0.02, 0.1)}
    rows = [
        {
            **dict.fromkeys(RUN_COLUMNS, "a"),
            "seed": seed,
            "update": 10 * w,
            "gold": gold,
            "reverse_kl": kl,
        }
        for seed in golds
        for w, (gold, kl) in enumerate(zip(golds[seed], kls[seed], strict=True))
    ]
    found = golds_of_stopping(pd.DataFrame(rows).sample(frac=1, random_state=1))
    for seed in golds:
        stopped = math.nan
        for gold, kl in zip(golds[seed], kls[seed], strict=True):
            if kl > 0.1:
                break
            stopped = gold
        of_seed = {name: values.xs(seed, level="seed").item() for name, values in found.items()}
        assert of_seed == {"peak_gold": max(golds[seed]), "budget_gold": stopped}
    assert found["budget_gold"].tolist() != found["peak_gold"].tolist()


def test_where_a_disagreement_would_have_stopped_a_run() -> None:
    """Against loops over the windows; a spread that comes back under the budget counts no more."""
    rng = np.random.default_rng(3)
    rows = [
        {
            **dict.fromkeys(RUN_COLUMNS, "a"),
            "seed": seed,
            "update": 10 * window,
            "gold": rng.random(),
            "spread": (1.0, 1.9, 2.1, 0.5)[(window + seed) % 4] if window else 1.0,
            "all_members": 6 * rng.random(),
        }
        for seed in range(6)
        for window in range(4)
    ]
    curves = pd.DataFrame(rows)
    found = golds_of_disagreement(curves.sample(frac=1, random_state=1), budget=2.0)
    for seed, of_seed in curves.groupby("seed"):
        windows = of_seed.to_dict("records")
        stopped = math.nan
        for window in windows:
            if window["spread"] > 2.0 * windows[0]["spread"]:
                break
            stopped = window["gold"]
        careful = max(windows, key=lambda window: window["all_members"] - 2 * window["spread"])
        got = {name: values.xs(seed, level="seed").item() for name, values in found.items()}
        assert got == {"spread_gold": stopped, "careful_gold": careful["gold"]}
    assert found["spread_gold"].tolist() != curves.groupby("seed")["gold"].last().tolist()


def test_derived_golds_stand_beside_the_final_rows(stored) -> None:
    with on_one_thread():
        trained = in_process.run(tiny())
    derived = with_derived(trained)
    assert (derived["peak_gold"] >= derived["budget_gold"]).all()
    assert "peak_gold" not in with_derived(in_process.run(make_tiny(2)))


def test_the_three_designs_differ_in_their_labels_alone() -> None:
    presets = [PRESETS[f"proxy_{labels}"]() for labels in ("1k", "5k", "20k")]
    assert [p.config.reward_model.labels for p in presets] == [1_000, 5_000, 20_000]
    configs = {p.config.model_copy(update={"reward_model": None}) for p in presets}
    assert len(configs) == 1 and len({p.variants for p in presets}) == 1
    assert {p.seeds for p in presets} == {presets[0].seeds} and presets[0].config.start.count == 10
    assert all(p.design.equal == "final_reverse_kl" and p.design.pilots for p in presets)
