"""The recorded benchmarks: their tables in ``results/``, sealed by manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.experiments.ablations import recording
from analysis.experiments.ablations.folders import read_manifest, write_folder
from analysis.experiments.ablations.stamp import Stamp
from analysis.experiments.benchmark.contenders import trl_version
from analysis.experiments.benchmark.device import DeviceBenchmark
from analysis.experiments.benchmark.language import PLAIN, LanguageBenchmark
from analysis.experiments.benchmark.measure import Benchmark, BenchmarkConfig
from analysis.experiments.language_models.config import LanguageConfig

RECORDED = recording.RECORDED.parent / "benchmark_cpu"
RECORDED_LANGUAGE = recording.RECORDED.parent / "benchmark_smollm2_cpu"
TABLES = ("rounds", "machine", "phases")


class RecordedBenchmark(NamedTuple):
    """A benchmark, read back."""

    benchmark: Benchmark
    manifest: dict[str, Any]


def save(benchmark: Benchmark, directory: Path = RECORDED) -> None:
    """Write a benchmark to ``directory``, replacing what it held."""
    stamp = benchmark.stamp
    trl = {"trl": trl_version()} if benchmark.config.with_trl else {}
    write_folder(
        directory,
        {f"{name}.csv": getattr(benchmark, name) for name in TABLES},
        {
            "preset": "benchmark",
            "seeds": [],
            "device": stamp.device,
            "versions": stamp.versions | trl,
            "source": stamp.source,
            "configuration": benchmark.config.model_dump(mode="json"),
        },
    )


def load(directory: Path = RECORDED) -> RecordedBenchmark:
    """Read a recorded benchmark, after checking its files against the manifest.

    Raises:
        ValueError: a file is missing or is not the one that was recorded.
    """
    manifest = read_manifest(directory)
    tables = (pd.read_csv(directory / f"{name}.csv") for name in TABLES)
    config = BenchmarkConfig.model_validate_json(json.dumps(manifest["configuration"]))
    stamp = Stamp(**{name: manifest[name] for name in Stamp.model_fields})
    return RecordedBenchmark(Benchmark(config, *tables, stamp), manifest)


def save_language(benchmark: LanguageBenchmark, directory: Path = RECORDED_LANGUAGE) -> None:
    """Write the benchmark of a language model to ``directory``, replacing what it held."""
    stamp = benchmark.stamp
    write_folder(
        directory,
        {"rounds.csv": benchmark.rounds},
        {
            "preset": "language_benchmark",
            "seeds": [],
            "device": stamp.device,
            "versions": stamp.versions | {PLAIN: benchmark.transformers},
            "source": stamp.source,
            "configuration": benchmark.config.model_dump(mode="json"),
        },
    )


def load_language(directory: Path = RECORDED_LANGUAGE) -> LanguageBenchmark:
    """Read the benchmark of a language model, after checking its files against the manifest.

    Raises:
        ValueError: a file is missing or is not the one that was recorded.
    """
    manifest = read_manifest(directory)
    config = LanguageConfig.model_validate_json(json.dumps(manifest["configuration"]))
    versions = dict(manifest["versions"])
    transformers = versions.pop(PLAIN)
    stamp = Stamp(source=manifest["source"], device=manifest["device"], versions=versions)
    return LanguageBenchmark(config, pd.read_csv(directory / "rounds.csv"), stamp, transformers)


def save_device(benchmark: DeviceBenchmark, directory: Path) -> None:
    """Write the benchmark of a device to ``directory``, replacing what it held."""
    stamp = benchmark.stamp
    names = ("populations", "phases", "machine")
    write_folder(
        directory,
        {f"{name}.csv": getattr(benchmark, name) for name in names},
        {
            "preset": "device_benchmark",
            "seeds": [],
            "device": stamp.device,
            "versions": stamp.versions,
            "source": stamp.source,
        },
    )
