"""The recorded benchmarks: their tables in ``results/``, sealed by manifests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from analysis.experiments.ablations import recording
from analysis.experiments.ablations.folders import read_manifest, write_folder
from analysis.experiments.ablations.stamp import Stamp
from analysis.experiments.benchmark import measure
from analysis.experiments.benchmark.device import DeviceBenchmark
from analysis.experiments.benchmark.language import PLAIN, LanguageBenchmark
from analysis.experiments.benchmark.measure import Benchmark, BenchmarkConfig
from analysis.experiments.language_models.config import LanguageConfig
from analysis.schema import Schema

RECORDED = recording.RESULTS / "benchmark_cpu"
#: The same on another make of processor.
RECORDED_SECOND = recording.RESULTS / "benchmark_cpu_second"
RECORDED_LANGUAGE = recording.RESULTS / "benchmark_smollm2_cpu"
TABLES = ("rounds", "machine", "phases")


class RecordedBenchmark(NamedTuple):
    """A benchmark, read back."""

    benchmark: Benchmark
    manifest: dict[str, Any]


def save(benchmark: Benchmark, directory: Path = RECORDED) -> None:
    """Write a benchmark to ``directory``, replacing what it held."""
    trl = {} if benchmark.trl is None else {"trl": benchmark.trl}
    _write(benchmark, directory, "benchmark", TABLES, trl, benchmark.config)


def load(directory: Path = RECORDED) -> RecordedBenchmark:
    """Read a recorded benchmark, after checking its files against the manifest.

    Raises:
        ValueError: a file is missing or is not the one that was recorded.
    """
    manifest = read_manifest(directory)
    tables = (pd.read_csv(directory / f"{name}.csv") for name in TABLES)
    config = BenchmarkConfig.model_validate_json(json.dumps(manifest["configuration"]))
    versions = dict(manifest["versions"])
    trl = versions.pop("trl", None)
    stamp = Stamp(source=manifest["source"], device=manifest["device"], versions=versions)
    return RecordedBenchmark(Benchmark(config, *tables, stamp, trl), manifest)


def by_processor(benchmarks: Mapping[str, Benchmark]) -> pd.DataFrame:
    """One row per width and benchmark of the whole machine with TRL: ``gflops`` of one core, ``ms``
    per member-update of the population in two processes, how many times as long the best ``plain``
    trainer and ``trl`` take, and how many times its arithmetic one process takes (``floor``).
    """
    rows = []
    for name, benchmark in benchmarks.items():
        ratios, times = measure.ratios(benchmark), measure.medians(benchmark)
        engine = times[times["contender"] == measure.ENGINE].set_index("width")["ms"]
        floors = measure.floors(benchmark).set_index(["width", "processes"])
        for width in benchmark.config.widths:
            rows.append(
                {
                    "width": width,
                    "processor": name,
                    "gflops": floors.loc[(width, 1), "gflops"],
                    "ms": engine[width],
                    "plain": measure.best(ratios, "plain", width)["ratio"],
                    "trl": measure.best(ratios, "trl", width)["ratio"],
                    "floor": floors.loc[(width, 1), "ratio"],
                }
            )
    return pd.DataFrame(rows).sort_values("width", kind="stable").reset_index(drop=True)


def save_language(benchmark: LanguageBenchmark, directory: Path = RECORDED_LANGUAGE) -> None:
    """Write the benchmark of a language model to ``directory``, replacing what it held."""
    peer = {PLAIN: benchmark.transformers}
    _write(benchmark, directory, "language_benchmark", ("rounds",), peer, benchmark.config)


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
    _write(benchmark, directory, "device_benchmark", ("populations", "phases", "machine"))


def _write(
    benchmark: Benchmark | LanguageBenchmark | DeviceBenchmark,
    directory: Path,
    preset: str,
    tables: Sequence[str],
    peers: Mapping[str, str | None] = MappingProxyType({}),
    config: Schema | None = None,
) -> None:
    """The named tables of a benchmark, and how they came about; ``peers`` are versions to add."""
    stamp = benchmark.stamp
    fields = {
        "preset": preset,
        "seeds": [],
        "device": stamp.device,
        "versions": stamp.versions | dict(peers),
        "source": stamp.source,
    }
    if config is not None:
        fields["configuration"] = config.model_dump(mode="json")
    write_folder(directory, {f"{name}.csv": getattr(benchmark, name) for name in tables}, fields)
