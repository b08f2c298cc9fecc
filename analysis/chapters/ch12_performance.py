"""Chapter 12: how fast a population trains, and what an update costs on larger models.

Times are those of recorded benchmarks, which ``python -m benchmarks`` writes. Costs on models of a
size that no page of this book trains are derived, not measured: arithmetic and memory traffic of a
population of adapters on one frozen Llama, counted phase by phase from their shapes, over the
published rates of a GPU times the share assumed to be reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from analysis import style
from analysis.experiments import recording
from analysis.experiments.recording import read_manifest, recorded_table
from analysis.training.config import StartConfig, TrainConfig
from analysis.training.counting import (
    FLOAT_BYTES,
    OPTIMIZER_PASSES,
    generated_tokens,
    run_update,
)
from analysis.training.pretrained.config import PROJECTIONS, LlamaConfig, LoraConfig
from analysis.training.tiny.policy import PolicyConfig
from analysis.training.tiny.tasks import SortTask

# --- How long updates took ------------------------------------------------------------------------

RECORDED = recording.RESULTS / "benchmark_cpu"
#: The same on another make of processor.
RECORDED_SECOND = recording.RESULTS / "benchmark_cpu_second"
RECORDED_LANGUAGE = recording.RESULTS / "benchmark_smollm2_cpu"
#: Populations on one GPU, and whether its numbers are the CPU's.
RECORDED_GPU = recording.RESULTS / "benchmark_cuda"
RECORDED_GPU_LANGUAGE = recording.RESULTS / "benchmark_smollm2_cuda"
RECORDED_AGREEMENT = recording.RESULTS / "agreement_cuda"
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
    """A recorded benchmark; raises as :func:`analysis.experiments.recording.recorded_table`."""
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


def by_processor(benchmarks: Mapping[str, Benchmark]) -> pd.DataFrame:
    """One row per width and benchmark of the whole machine with TRL: ``gflops`` of one core, ``ms``
    per run-update of the population in two processes, how many times as long the best ``plain``
    trainer and ``trl`` take, and how many times its arithmetic one process takes (``floor``).
    """
    rows = []
    for name, benchmark in benchmarks.items():
        relative, times = ratios(benchmark), medians(benchmark)
        least = floors(benchmark).set_index(["width", "processes"])
        for width, ms in times[times["trainer"] == POPULATION].set_index("width")["ms"].items():
            alone = least.loc[(width, 1)]
            row = {"width": width, "processor": name, "gflops": alone["gflops"], "ms": ms}
            row |= {kind: best(relative, kind, width)["ratio"] for kind in ("plain", "trl")}
            rows.append(row | {"floor": alone["ratio"]})
    return pd.DataFrame(rows).sort_values("width", kind="stable", ignore_index=True)


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


# --- What an update costs on larger models --------------------------------------------------------

BFLOAT16_BYTES = 2
#: How often logits are read or written: softmax and its sum, to draw from; log-softmax; log-softmax
#: and the KL, forward and backward.
LOGIT_PASSES = {"sampling": 3, "reference": 2, "training": 8}


def llama(
    width: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool = True
) -> LlamaConfig:
    """A shape whose heads divide its width."""
    return LlamaConfig(
        vocab_size=vocab,
        width=width,
        inner=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        norm_eps=1e-5,
        rope_theta=1e5,
        tied=tied,
    )


#: Shapes of published models, from their ``config.json``; the few biases of Qwen2.5 are left out.
MODELS: dict[str, LlamaConfig] = {
    "SmolLM2-135M": llama(576, 1536, 30, 9, 3, 49152),
    "SmolLM2-360M": llama(960, 2560, 32, 15, 5, 49152),
    "SmolLM2-1.7B": llama(2048, 8192, 24, 32, 32, 49152),
    "Qwen2.5-0.5B": llama(896, 4864, 24, 14, 2, 151936),
    "Qwen2.5-1.5B": llama(1536, 8960, 28, 12, 2, 151936),
    "Qwen2.5-7B": llama(3584, 18944, 28, 28, 4, 152064, tied=False),
}


class Workload(NamedTuple):
    """One update of a population."""

    runs: int
    num_prompts: int
    group_size: int
    prompt_length: int
    completion_length: int

    @property
    def prompt_tokens(self) -> int:
        """Each prompt is read once for its whole group."""
        return self.runs * self.num_prompts * self.prompt_length

    @property
    def sequences(self) -> int:
        return self.runs * self.num_prompts * self.group_size

    @property
    def completion_tokens(self) -> int:
        return self.sequences * self.completion_length

    @property
    def completion_pairs(self) -> int:
        """Pairs of a completion's token and one that it sees, itself included."""
        length, steps = self.prompt_length, self.completion_length
        return self.sequences * (steps * length + steps * (steps + 1) // 2)

    @property
    def pairs(self) -> int:
        """The same of all tokens, those of the prompts included."""
        length = self.prompt_length
        prompts = self.runs * self.num_prompts * length * (length + 1) // 2
        return prompts + self.completion_pairs


#: Like the preset ``smollm2``: eight variants of three seeds on one-line answers.
ABLATION = Workload(24, 12, 8, 40, 6)
#: One run on worked solutions.
REASONING = Workload(1, 64, 8, 256, 512)


class Gpu(NamedTuple):
    """Rates that its maker publishes, and the shares of them that are assumed to be reached."""

    name: str
    bfloat16_flops: float  #: per second, dense
    float32_flops: float  #: per second, without tensor cores
    bandwidth: float  #: bytes per second
    flops_share: float = 0.4
    bandwidth_share: float = 0.6


H100 = Gpu("H100 SXM", 989e12, 67e12, 3.35e12)


class Phase(NamedTuple):
    """Work between two points at which everything waits."""

    product_flops: float  #: of frozen products and attention, in the type chosen for them
    exact_flops: float  #: of the head and the adapters, always in float32
    bytes: float  #: of weights and caches, read while products are computed
    logit_bytes: float  #: of passes over the vocabulary, which wait for the products

    def seconds(self, gpu: Gpu, products: str) -> float:
        """The longer of arithmetic and memory traffic, and then the passes over the logits."""
        rate = {"bfloat16": gpu.bfloat16_flops, "float32": gpu.float32_flops}[products]
        flops = (self.product_flops / rate + self.exact_flops / gpu.float32_flops) / gpu.flops_share
        bandwidth = gpu.bandwidth * gpu.bandwidth_share
        return max(flops, self.bytes / bandwidth) + self.logit_bytes / bandwidth


def block_weights(model: LlamaConfig) -> int:
    """Frozen weights of all projections, head and embedding aside."""
    shapes = (model.projection_shape(name) for name in PROJECTIONS)
    return model.num_layers * sum(rows * columns for rows, columns in shapes)


def parameters(model: LlamaConfig) -> int:
    """All weights, norms included."""
    norms = (2 * model.num_layers + 1) * model.width
    tables = (1 if model.tied else 2) * model.vocab_size * model.width
    return block_weights(model) + tables + norms


def adapter_weights(model: LlamaConfig, lora: LoraConfig) -> int:
    """Of one run."""
    shapes = (model.projection_shape(name) for name in lora.targets)
    return model.num_layers * lora.rank * sum(rows + columns for rows, columns in shapes)


def phases(
    model: LlamaConfig, load: Workload, lora: LoraConfig, products: str = "bfloat16"
) -> Mapping[str, Phase]:
    """One on-policy update: sampling, reference, training and optimizer.

    Two operations a weight and token in a forward pass; a backward pass through frozen weights
    costs one more, and through attention and adapters two more. Sampling reads the weights once a
    step, and what the completions have seen so far; logits are passed over as in ``LOGIT_PASSES``.
    Norms, softmax and everything elementwise count as free, and activations as kept in the cache.
    """
    frozen, head = block_weights(model), model.vocab_size * model.width
    adapters = adapter_weights(model, lora)
    tokens = load.prompt_tokens + load.completion_tokens
    product_bytes = {"bfloat16": BFLOAT16_BYTES, "float32": FLOAT_BYTES}[products]
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * load.pairs
    blocks = 2 * frozen * tokens
    logits = 2 * head * load.completion_tokens
    adapted = 2 * adapters * tokens
    weight_bytes = product_bytes * frozen + FLOAT_BYTES * head
    run_bytes = FLOAT_BYTES * adapters * load.runs
    token_cache = 2 * product_bytes * model.num_layers * model.num_kv_heads * model.head_dim
    cache = token_cache * load.completion_pairs
    steps = load.completion_length + 1  # the prompts are one
    vocabulary = FLOAT_BYTES * model.vocab_size * load.completion_tokens
    passes = {name: count * vocabulary for name, count in LOGIT_PASSES.items()}
    return {
        "sampling": Phase(
            blocks + attention,
            logits + adapted,
            steps * (weight_bytes + run_bytes) + cache,
            passes["sampling"],
        ),
        "reference": Phase(blocks + attention, logits, weight_bytes, passes["reference"]),
        "training": Phase(
            2 * blocks + 3 * attention,
            2 * logits + 3 * adapted,
            2 * (weight_bytes + run_bytes),
            passes["training"],
        ),
        "optimizer": Phase(0, 0, OPTIMIZER_PASSES * run_bytes, 0),
    }


def model_costs(load: Workload, lora: LoraConfig) -> pd.DataFrame:
    """One row per model: ``parameters``; ``adapters`` of one run; ``teraflops`` of an update of the
    population; its ``seconds`` on an :data:`H100` with products in bfloat16, the ``sampling`` share
    of them, and ``per_hour`` and ``per_hour_float32``: run-updates per GPU-hour with either type.
    """
    rows = []
    for name, model in MODELS.items():
        work = phases(model, load, lora)
        seconds = {phase: part.seconds(H100, "bfloat16") for phase, part in work.items()}
        total = sum(seconds.values())
        in_float32 = phases(model, load, lora, "float32").values()
        slow = sum(part.seconds(H100, "float32") for part in in_float32)
        rows.append(
            {
                "model": name,
                "parameters": parameters(model),
                "adapters": adapter_weights(model, lora),
                "teraflops": sum(p.product_flops + p.exact_flops for p in work.values()) / 1e12,
                "seconds": total,
                "sampling": seconds["sampling"] / total,
                "per_hour": 3600.0 * load.runs / total,
                "per_hour_float32": 3600.0 * load.runs / slow,
            }
        )
    return pd.DataFrame(rows)


# --- What it draws --------------------------------------------------------------------------------

#: Colours and markers of the two sizes.
LOOKS = {32: "k2", 64: "k1"}
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
        look = style.line(LOOKS.get(width, "k3"), label="population, one core")
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
