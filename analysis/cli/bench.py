"""``analysis bench``: how fast training is on this machine, beside what it could be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import torch
import tyro

from analysis.errors import Refused
from analysis.experiments.benchmark import device as device_benchmark
from analysis.experiments.benchmark import language, recorded
from analysis.experiments.benchmark.contenders import TRL_PYTHON, trl_version
from analysis.experiments.benchmark.journal import Journal
from analysis.experiments.benchmark.measure import (
    BenchmarkConfig,
    floors,
    medians,
    ratios,
    run,
)
from analysis.experiments.language_models.config import LanguageConfig
from analysis.experiments.language_models.presets import SHORT, SMOLLM2, model_of


def bench(
    rounds: int = 15,
    widths: tuple[int, ...] = BenchmarkConfig().widths,
    directory: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    language_model: tyro.conf.FlagCreatePairsOff[bool] = False,
    weights: str | None = None,
) -> None:
    """Time the population, a plain trainer and TRL in turns, and what the machine does at best.

    Takes some minutes and two cores; keep the machine otherwise idle. TRL is timed if the Python
    named by KL_TERM_TRL_PYTHON, or this one, can import it. Each finished round is kept: if it is
    stopped, the same command goes on.

    Args:
        rounds: turns of each contender, on the CPU.
        widths: of the model.
        directory: where the recorded benchmark goes; by default results/benchmark_cpu or _cuda.
        device: cuda times populations on one GPU, without the others.
        language_model: time adapters on SmolLM2-135M beside transformers instead: one and four
            members on one core, or 24 on a GPU, there beside the others.
        weights: of the language model: hub, packaged (from the extra smollm2) or a local folder; by
            default packaged on the CPU, hub on a GPU.
    """
    if weights is not None and not language_model:
        raise Refused("--weights are of --language-model: give both")
    if device == "cuda":
        language_config = _with_weights(SMOLLM2.config, weights) if language_model else None
        _bench_device(
            widths, directory or recorded.RECORDED.parent / "benchmark_cuda", language_config
        )
        return
    if language_model:
        _bench_language(_with_weights(SHORT.config, weights), "cpu", (1, 4), rounds, directory)
        return
    directory = directory or recorded.RECORDED
    try:
        version = trl_version()
        config = BenchmarkConfig(rounds=rounds, widths=widths, with_trl=version is not None)
        print(f"TRL {version or f'not found: name a Python that has it in {TRL_PYTHON}'}")
        journal = Journal(directory)
        benchmark = run(config, _say, journal)
    except ValueError as error:
        raise Refused(str(error)) from None
    recorded.save(benchmark, directory)
    journal.end()
    table, relative = medians(benchmark), ratios(benchmark)
    columns = ["ms", "low", "high", "tokens"]
    print(table.set_index(["width", "contender"])[columns].round(1).to_string())
    print(relative.drop(columns="kind").set_index(["width", "contender"]).round(2).to_string())
    print(floors(benchmark).round(2).to_string(index=False))
    print(f"written to {directory}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _with_weights(config: LanguageConfig, weights: str | None) -> LanguageConfig:
    return config if weights is None else config.model_copy(update={"model": model_of(weights)})


def _bench_device(
    widths: tuple[int, ...], directory: Path, language_config: LanguageConfig | None
) -> None:
    if not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU here")
    loads = device_benchmark.tiny_loads(widths=widths)
    if language_config is not None:
        loads.append(device_benchmark.Load("SmolLM2-135M adapters", language_config, 24, updates=5))
    journal = Journal(directory)
    try:
        benchmark = device_benchmark.run(loads, torch.device("cuda"), _say, journal)
    except ValueError as error:
        raise Refused(str(error)) from None
    recorded.save_device(benchmark, directory)
    journal.end()
    for table in (benchmark.populations, benchmark.phases, benchmark.machine):
        print(table.round(3).to_string(index=False))
    print(f"written to {directory}")
    if language_config is not None:
        folder = directory.with_name("benchmark_smollm2_cuda")
        _bench_language(language_config, "cuda", (24,), 5, folder)


def _bench_language(
    config: LanguageConfig, device: str, members: tuple[int, ...], rounds: int, folder: Path | None
) -> None:
    config = config.model_copy(update={"cosine_every": 0})
    folder = folder or recorded.RECORDED_LANGUAGE
    if device == "cpu":
        torch.set_num_threads(1)
    journal = Journal(folder)
    try:
        benchmark = language.run(config, torch.device(device), members, rounds, _say, journal)
    except ValueError as error:
        raise Refused(str(error)) from None
    recorded.save_language(benchmark, folder)
    journal.end()
    print(language.summary(benchmark).round(2).to_string(index=False))
    print(f"written to {folder}")
