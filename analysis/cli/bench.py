"""``analysis bench``: how fast training is on this machine, beside what it could be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import tyro
from pydantic import ValidationError

from analysis.errors import Refused
from analysis.experiments.ablations.folders import check_target
from analysis.experiments.benchmark import device as device_benchmark
from analysis.experiments.benchmark import language, recorded
from analysis.experiments.benchmark.contenders import TRL_PYTHON, trl_version
from analysis.experiments.benchmark.journal import Journal
from analysis.experiments.benchmark.measure import (
    WIDTHS,
    BenchmarkConfig,
    floors,
    medians,
    ratios,
    run,
)
from analysis.experiments.language_models.config import LanguageConfig
from analysis.experiments.language_models.presets import SHORT, SMOLLM2, model_of


def bench(
    rounds: int | None = None,
    widths: tuple[int, ...] | None = None,
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
        rounds: turns of each contender; by default 15, of a language model on a GPU 5.
        widths: of the tiny policy; by default 32 and 64.
        directory: where the recorded benchmark goes; by default results/benchmark_cpu or _cuda, of
            a language model results/benchmark_smollm2_cpu or _cuda. On a GPU its turns come after
            the others and go beside DIRECTORY, with _smollm2 added to its name.
        device: cuda times populations on one GPU, without the others.
        language_model: time adapters on SmolLM2-135M beside transformers instead: one and four
            members on one core, or 24 on a GPU, there beside the others.
        weights: of the language model: hub, packaged (from the extra smollm2) or a local folder; by
            default packaged on the CPU, hub on a GPU.
    """
    if weights is not None and not language_model:
        raise Refused("--weights are of --language-model: give both")
    if rounds is not None and device == "cuda" and not language_model:
        raise Refused("--rounds are turns, and on a GPU only --language-model takes turns")
    if rounds is not None and rounds < 1:
        raise Refused(f"--rounds must be at least 1, not {rounds}")
    try:
        widths_given = BenchmarkConfig(widths=widths or WIDTHS).widths
    except ValidationError as error:
        raise Refused(
            f"--widths: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None
    if widths is not None and language_model and device == "cpu":
        raise Refused("--widths are of the tiny policy, which --language-model leaves out")
    config = _language_config(device, weights) if language_model else None
    if device == "cuda":
        _bench_device(
            widths_given, directory or recorded.RECORDED.with_name("benchmark_cuda"), config
        )
        directory = directory and directory.with_name(f"{directory.name}_smollm2")
    elif config is None:
        _bench_cpu(widths_given, rounds or BenchmarkConfig().rounds, directory or recorded.RECORDED)
    if config is not None:
        _bench_language(config, device, rounds, directory)


def _bench_cpu(widths: tuple[int, ...], rounds: int, directory: Path) -> None:
    with _journal(directory) as journal:
        version = trl_version()
        config = BenchmarkConfig(rounds=rounds, widths=widths, with_trl=version is not None)
        print(f"TRL {version or f'not found: name a Python that has it in {TRL_PYTHON}'}")
        benchmark = run(config, _say, journal)
        recorded.save(benchmark, directory)
    table, relative = medians(benchmark), ratios(benchmark)
    columns = ["ms", "low", "high", "tokens"]
    print(table.set_index(["width", "contender"])[columns].round(1).to_string())
    print(relative.drop(columns="kind").set_index(["width", "contender"]).round(2).to_string())
    print(floors(benchmark).round(2).to_string(index=False))
    print(f"written to {directory}")


@contextmanager
def _journal(directory: Path) -> Iterator[Journal]:
    """That of a benchmark which the block measures and writes to ``directory``."""
    check_target(directory)
    journal = Journal(directory)
    try:
        yield journal
    except ValueError as error:
        raise Refused(str(error)) from None
    journal.end()


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _language_config(device: str, weights: str | None) -> LanguageConfig:
    """That of the recorded runs, without the metric that costs another gradient."""
    config = (SMOLLM2 if device == "cuda" else SHORT).config
    config = config.model_copy(update={"cosine_every": 0})
    return config if weights is None else config.model_copy(update={"model": model_of(weights)})


def _bench_device(
    widths: tuple[int, ...], directory: Path, language_config: LanguageConfig | None
) -> None:
    if not torch.cuda.is_available():
        raise Refused("--device cuda: torch sees no GPU here")
    loads = device_benchmark.tiny_loads(widths=widths)
    if language_config is not None:
        loads.append(device_benchmark.Load("SmolLM2-135M adapters", language_config, 24, updates=5))
    with _journal(directory) as journal:
        benchmark = device_benchmark.run(loads, torch.device("cuda"), _say, journal)
        recorded.save_device(benchmark, directory)
    for table in (benchmark.populations, benchmark.phases, benchmark.machine):
        print(table.round(3).to_string(index=False))
    print(f"written to {directory}")


def _bench_language(
    config: LanguageConfig, device: str, rounds: int | None, folder: Path | None
) -> None:
    members, usual = ((24,), 5) if device == "cuda" else ((1, 4), BenchmarkConfig().rounds)
    folder = folder or recorded.RECORDED.with_name(f"benchmark_smollm2_{device}")
    if device == "cpu":
        torch.set_num_threads(1)
    with _journal(folder) as journal:
        benchmark = language.run(
            config, torch.device(device), members, rounds or usual, _say, journal
        )
        recorded.save_language(benchmark, folder)
    print(language.summary(benchmark).round(2).to_string(index=False))
    print(f"written to {folder}")
