"""Runs of a language model are trained as many at a time as memory holds."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.cli.sweep import sweep
from analysis.records.config import TrainConfig
from analysis.records.language import LlamaConfig
from analysis.studies.presets import make_preset
from analysis.studies.presets.language import llama_smoke
from analysis.sweeps import in_process, memory
from analysis.sweeps import sweep as sweeps
from tests.experiments.tiny import short_llama

CONFIG = llama_smoke().config
LOGITS = 4 * 6 * CONFIG.task.completion_length * CONFIG.model.llama.vocab_size


def test_a_run_is_as_large_as_its_logits_of_one_update():
    assert memory.run_bytes(CONFIG) == memory.BYTES_PER_LOGIT * LOGITS
    twice = CONFIG.model_copy(update={"num_prompts": 2 * CONFIG.num_prompts})
    assert memory.run_bytes(twice) == 2 * memory.run_bytes(CONFIG)


@pytest.mark.parametrize(
    ("runs", "workers", "fitting"), [(5.0, 1, 4), (5.0, 2, 2), (0.1, 1, 1), (100.0, 1, 80)]
)
def test_what_fits_is_a_share_of_what_is_free(monkeypatch, runs, workers, fitting):
    free = round(runs * memory.run_bytes(CONFIG)) + 100
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    assert memory.runs_that_fit(CONFIG, "cpu", workers) == fitting
    for every, share in ((0, 1.5), (5, 3.0)):
        config = CONFIG.model_copy(update={"cosine_every": every})
        fits = memory.runs_that_fit(config, "cpu", workers, graphs=True)
        assert fits == max(
            1, int(memory.SHARE * free / workers / share) // memory.run_bytes(CONFIG)
        )


@pytest.mark.parametrize(
    ("name", "changes", "measured"),
    [
        ("equal_kl", {"width": 32, "mlp_factor": 4}, 5.45e9 / 512),
        ("equal_kl", {"width": 64, "mlp_factor": 4}, 9.29e9 / 512),
    ],
)
def test_a_run_of_the_tiny_policy_is_as_large_as_a_gpu_found_it(name, changes, measured):
    fields = make_preset(name, {}).config.model_dump()
    fields["policy"] |= changes
    fields["task"]["end_token"] = True
    assert memory.run_bytes(TrainConfig.model_validate(fields)) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("name", "workers", "graphs", "least", "most"),
    [
        ("equal_kl_large", 1, True, 512, 10**5),  # of the largest recorded sweep: 512 fitted
        ("long_completions_128", 1, True, 65, 259),  # 65 fitted, 260 did not
        ("aggregation_length_112", 1, True, 60, 239),  # 60 fitted, 240 did not
        ("smollm2", 1, False, 24, 30),  # 24 took 49 GB
        ("smollm2", 1, True, 12, 23),  # 55 GB of tensors for 24, and what lies between blocks
        ("smollm2", 2, False, 12, 16),  # 16 fitted twice
    ],
)
def test_what_fits_into_80_gigabytes(monkeypatch, name, workers, graphs, least, most):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 84_465_090_560)
    monkeypatch.setattr(
        memory, "read_config", lambda folder: LlamaConfig.model_construct(vocab_size=49152)
    )
    monkeypatch.setattr(memory, "folder_of", lambda model: None)
    config = make_preset(name, {}).config
    assert least <= memory.runs_that_fit(config, "cuda:0", workers, graphs=graphs) <= most


def short_of_memory(monkeypatch: pytest.MonkeyPatch, runs: float) -> None:
    free = round(runs * memory.run_bytes(CONFIG) / memory.SHARE) + 100
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)


def test_an_ablation_is_cut_and_its_numbers_stay(monkeypatch):
    sizes = []
    trainer = in_process.PopulationTrainer

    def noted(config, runs, setting):
        sizes.append(len(runs))
        return trainer(config, runs, setting)

    monkeypatch.setattr(in_process, "PopulationTrainer", noted)
    whole = in_process.run(short_llama(2))
    short_of_memory(monkeypatch, 3)
    parts = in_process.run(short_llama(2))
    assert sizes == [8, 3, 3, 2]
    for name in ("accuracy", "reverse_kl", "gradient_norm"):
        np.testing.assert_allclose(whole.curves[name], parts.curves[name], atol=1e-5)


def test_a_sweep_gives_its_workers_what_they_can_hold(monkeypatch, tmp_path, capsys):
    seen = []

    def noted(preset, size):
        seen.append(size)
        return cut(preset, size)

    cut = sweeps.shards_of
    monkeypatch.setattr(sweeps, "shards_of", noted)
    short_of_memory(monkeypatch, 6)
    sweep("llama_smoke", override=("updates=1",), store=tmp_path, workers=2)
    assert seen == [3]  # six runs fit, for two workers
    assert "8 runs finished" in capsys.readouterr().err
