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
from analysis.experiments.benchmark.measure import (
    BenchmarkConfig,
    floors,
    medians,
    ratios,
    run,
)
from analysis.experiments.language_models.config import LanguageConfig
from analysis.experiments.language_models.presets import SHORT, SMOLLM2


def bench(
    rounds: int = 15,
    widths: tuple[int, ...] = BenchmarkConfig().widths,
    directory: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    language_model: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Time the population, a plain trainer and TRL in turns, and what the machine does at best.

    Takes some minutes and two cores; keep the machine otherwise idle. TRL is timed if the Python
    named by KL_TERM_TRL_PYTHON, or this one, can import it.

    Args:
        rounds: turns of each contender, on the CPU.
        widths: of the model.
        directory: where the recorded benchmark goes; by default results/benchmark_cpu or _cuda.
        device: cuda times populations on one GPU, without the others.
        language_model: time adapters on SmolLM2-135M beside transformers instead: one and four
            members with the packaged weights on one core, or 24 on a GPU, there beside the others.
    """
    if device == "cuda":
        _bench_device(
            widths, directory or recorded.RECORDED.parent / "benchmark_cuda", language_model
        )
        return
    if language_model:
        _bench_language(SHORT.config, "cpu", (1, 4), rounds, directory)
        return
    directory = directory or recorded.RECORDED
    try:
        version = trl_version()
        config = BenchmarkConfig(rounds=rounds, widths=widths, with_trl=version is not None)
        print(f"TRL {version or f'not found: name a Python that has it in {TRL_PYTHON}'}")
        benchmark = run(config, lambda text: print(text, file=sys.stderr))
    except ValueError as error:
        raise Refused(str(error)) from None
    recorded.save(benchmark, directory)
    table, relative = medians(benchmark), ratios(benchmark)
    columns = ["ms", "low", "high", "tokens"]
    print(table.set_index(["width", "contender"])[columns].round(1).to_string())
    print(relative.drop(columns="kind").set_index(["width", "contender"]).round(2).to_string())
    print(floors(benchmark).round(2).to_string(index=False))
    print(f"written to {directory}")


def _bench_device(widths: tuple[int, ...], directory: Path, language_model: bool) -> None:
    if not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU here")
    loads = device_benchmark.tiny_loads(widths=widths)
    if language_model:
        loads.append(device_benchmark.Load("SmolLM2-135M adapters", SMOLLM2.config, 24, updates=5))
    try:
        benchmark = device_benchmark.run(
            loads, torch.device("cuda"), lambda text: print(text, file=sys.stderr)
        )
    except ValueError as error:
        raise Refused(str(error)) from None
    recorded.save_device(benchmark, directory)
    for table in (benchmark.populations, benchmark.phases, benchmark.machine):
        print(table.round(3).to_string(index=False))
    print(f"written to {directory}")
    if language_model:
        folder = directory.with_name("benchmark_smollm2_cuda")
        _bench_language(SMOLLM2.config, "cuda", (24,), 5, folder)


def _bench_language(
    config: LanguageConfig, device: str, members: tuple[int, ...], rounds: int, folder: Path | None
) -> None:
    config = config.model_copy(update={"cosine_every": 0})
    folder = folder or recorded.RECORDED_LANGUAGE
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        benchmark = language.run(
            config, torch.device(device), members, rounds, lambda text: print(text, file=sys.stderr)
        )
    except ValueError as error:
        raise Refused(str(error)) from None
    recorded.save_language(benchmark, folder)
    print(language.summary(benchmark).round(2).to_string(index=False))
    print(f"written to {folder}")
