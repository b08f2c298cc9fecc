"""Chapter 12: how fast a population trains.

Times are those of recorded benchmarks, which ``python -m benchmarks`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from analysis.records.config import PolicyConfig, SortTask, StartConfig, TrainConfig
from analysis.records.manifests import RESULTS, read_manifest, recorded_table
from analysis.training.counting import generated_tokens, run_update
from kl_term import style

# --- How long updates took ------------------------------------------------------------------------

RECORDED = RESULTS / "benchmark_cpu"
RECORDED_LANGUAGE = RESULTS / "benchmark_smollm2_cpu"
#: Populations on one GPU, and whether its numbers are the CPU's.
RECORDED_GPU = RESULTS / "benchmark_cuda"
RECORDED_GPU_LANGUAGE = RESULTS / "benchmark_smollm2_cuda"
RECORDED_AGREEMENT = RESULTS / "agreement_cuda"
TABLES = ("rounds", "machine", "phases")

#: The trainer to which the others are compared, and the baseline of the language model.
POPULATION = "population of 24, 2 processes"
TRANSFORMERS = "transformers"
#: Of the bootstrap of a median.
RESAMPLES = 2000

#: What is timed: the untrained policy, for time does not depend on what it has learned.
LARGEST = TrainConfig(
    task=SortTask(end_token=True),
    policy=PolicyConfig(width=64, mlp_factor=4),
    start=StartConfig(updates=0),
    learning_rate=2e-3,
)


def of_width(width: int) -> TrainConfig:
    """``LARGEST`` with another number of channels."""
    policy = PolicyConfig(**LARGEST.policy.model_dump() | {"width": width})
    return LARGEST.model_copy(update={"policy": policy})


class Benchmark(NamedTuple):
    """What the rounds gave, as tidy tables, and the manifest of the recording."""

    rounds: pd.DataFrame  #: round, width, trainer, kind, runs, processes, threads, seconds
    machine: pd.DataFrame  #: round, processes, flops_per_second, bytes_per_second, of all processes
    phases: pd.DataFrame  #: width, runs, phase, share
    manifest: Mapping[str, Any] | None = None


def load(directory: Path = RECORDED) -> Benchmark:
    """A recorded benchmark; raises as :func:`analysis.records.recorded_table`."""
    tables = (recorded_table(directory, f"{name}.csv") for name in TABLES)
    return Benchmark(*tables, read_manifest(directory))


def load_language(directory: Path = RECORDED_LANGUAGE) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Rounds (round, trainer, runs, seconds) of the language model's, and its manifest."""
    return recorded_table(directory, "rounds.csv"), read_manifest(directory)


class OnGpu(NamedTuple):
    """What one GPU did; the tables of ``benchmarks.device``, TRL there, and its kernels."""

    populations: pd.DataFrame  #: name, runs, graphs, ms (per run-update), tokens, gigabytes
    trl: pd.DataFrame  #: name, precision, seconds (per update of its one run)
    kernels: pd.DataFrame  #: name, runs, kernels, busy_ms, ms, of an update without graphs
    device: str


def load_gpu(directory: Path = RECORDED_GPU) -> OnGpu:
    """The recorded benchmark of a GPU; raises as :func:`load`."""
    tables = (recorded_table(directory, f"{name}.csv") for name in OnGpu._fields[:-1])
    return OnGpu(*tables, read_manifest(directory)["device"].removeprefix("cuda, "))


def beside_trl(found: OnGpu) -> pd.DataFrame:
    """``populations`` with ``how`` they are launched and ``ratio``: how many times as long TRL
    takes per run-update at the same batch; NaN where it was not timed."""
    table = found.populations
    trl = {
        row["name"] + (f", {row['precision']}" if "SmolLM2" in row["name"] else ""): row["seconds"]
        for row in found.trl.to_dict("records")
    }
    how = np.where(table["graphs"], "graphs", "direct")
    return table.assign(how=how, ratio=1e3 * table["name"].map(trl) / table["ms"])


def medians(benchmark: Benchmark) -> pd.DataFrame:
    """One row per width and trainer: ``ms`` per run-update (median over rounds, with its 95%
    bootstrap interval) and generated ``tokens`` per second."""
    rows = []
    for (width, name), group in benchmark.rounds.groupby(["width", "trainer"], sort=False):
        first = group[["kind", "runs", "processes", "threads"]].iloc[0].to_dict()
        first["runs"] *= first["processes"]
        ms = median_interval(1e3 * group["seconds"], "ms")
        tokens = 1e3 * generated_tokens(of_width(width)) / ms["ms"]
        rows.append({"width": width, "trainer": name, **first, **ms, "tokens": tokens})
    return pd.DataFrame(rows)


def ratios(benchmark: Benchmark) -> pd.DataFrame:
    """How many times longer each trainer takes than the population: the median over rounds of the
    ratio within a round, with its 95% bootstrap interval."""
    wide = benchmark.rounds.pivot(index=["width", "round"], columns="trainer", values="seconds")
    kinds = benchmark.rounds.groupby("trainer", sort=False)["kind"].first()
    return pd.DataFrame(
        {
            "width": width,
            "trainer": name,
            "kind": kind,
            **median_interval(group[name] / group[POPULATION], "ratio"),
        }
        for width, group in wide.groupby(level="width")
        for name, kind in kinds.items()
    )


def best(table: pd.DataFrame, kind: str, width: int) -> pd.Series:
    """The fastest trainer of a kind: its row of :func:`medians` or of :func:`ratios`.

    Raises:
        ValueError: none of that kind was timed.
    """
    rows = table[(table["kind"] == kind) & (table["width"] == width)]
    if rows.empty:
        raise ValueError(f"no trainer of kind {kind!r} at width {width}")
    return rows.loc[rows["ratio" if "ratio" in rows else "ms"].idxmin()]


def floors(benchmark: Benchmark) -> pd.DataFrame:
    """One row per width and number of processes: the least ``ms`` per run-update that the
    measured rates allow, for its arithmetic (``flops_ms``) and its memory traffic (``bytes_ms``),
    and how many times longer the population takes (``ratio``, by round, with its interval)."""
    names = {1: "population of 24", 2: POPULATION}
    timed = benchmark.rounds.set_index(["width", "trainer", "round"])["seconds"].sort_index()
    rows = []
    for (width, processes), group in benchmark.machine.groupby(["width", "processes"]):
        work, rates = run_update(of_width(width)), group.set_index("round")
        arithmetic = work.flops / rates["flops_per_second"]
        ratio = timed[width, names[processes]] / arithmetic
        rows.append(
            {
                "width": width,
                "processes": processes,
                "flops_ms": 1e3 * arithmetic.median(),
                "bytes_ms": 1e3 * (work.bytes / rates["bytes_per_second"]).median(),
                "gflops": rates["flops_per_second"].median() / 1e9,
                "gbytes": rates["bytes_per_second"].median() / 1e9,
                **median_interval(ratio.dropna(), "ratio"),
            }
        )
    return pd.DataFrame(rows)


def median_interval(values: pd.Series, name: str) -> dict[str, float]:
    """The median under ``name``; ``low`` and ``high`` are its 95% percentile bootstrap."""
    if not len(values):
        return {"low": np.nan, name: np.nan, "high": np.nan}
    picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values.to_numpy()[picks], axis=1), [2.5, 97.5])
    return {"low": low, name: values.median(), "high": high}


def language_summary(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row per trainer and number of runs: ``seconds`` per run-update, and ``ratio``,
    how many times as long transformers take, by round, with its 95% interval ``low`` to ``high``.
    """
    wide = rounds.pivot(index="round", columns=["trainer", "runs"], values="seconds")
    return pd.DataFrame(
        {
            "trainer": name,
            "runs": count,
            "seconds": seconds.median(),
            **median_interval(wide[TRANSFORMERS, 1] / seconds, "ratio"),
        }
        for (name, count), seconds in wide.items()
    )


# --- What it draws --------------------------------------------------------------------------------

#: Baseline -> its name and line style.
BASELINES = {"plain": ("plain trainer, at its best", "--"), "trl": ("TRL, at its best", ":")}


def time_over_runs(benchmark: Benchmark) -> Figure:
    """Milliseconds per run-update over the number of runs, one panel a size."""
    table, least = medians(benchmark), floors(benchmark)
    alone = table[(table["kind"] == "population") & (table["processes"] == 1)]
    widths = sorted(table["width"].unique())
    height = 3.3 * len(widths)
    figure, panels = style.subplots(len(widths), 1, height=height, sharex=True, squeeze=False)
    for panel, width in zip(panels[:, 0], widths, strict=True):
        rows = alone[alone["width"] == width].sort_values("runs")
        look = style.line("k2", label="population, one core")
        panel.errorbar(rows["runs"], rows["ms"], yerr=style.bars(rows, "ms"), **look)
        for kind, (label, dashes) in BASELINES.items():
            if (table["kind"] == kind).any():
                row = best(table, kind, width)
                panel.axhline(row["ms"], color="#5A5A5A", linestyle=dashes, label=label)
        floor = least[(least["width"] == width) & (least["processes"] == 1)]
        panel.axhline(floor["flops_ms"].item(), color="#111111", label="arithmetic, one core")
        panel.set(xscale="log", yscale="log", ylabel="ms per run-update")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        counts = table.loc[table["kind"] == "population", "runs"].unique()
        panel.xaxis.set_major_locator(FixedLocator(sorted(counts)))
        panel.set_title(f"{width} channels")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    panels[-1, 0].set_xlabel("runs trained together (both axes log)")
    return figure
