"""The page of derived costs: tables of :mod:`analysis.chapters.ch12_model_costs`."""

from __future__ import annotations

import pandas as pd

from analysis.chapters.ch12_model_costs import (
    ABLATION,
    H100,
    LOGIT_PASSES,
    REASONING,
    Gpu,
    Workload,
    table,
)
from analysis.chapters.ch12_performance import floors, load
from analysis.report.numbers import format_value
from analysis.report.tables import as_markdown, as_text
from analysis.training.pretrained.config import LoraConfig

_COLUMNS = {
    "model": ("model", ""),
    "parameters": ("weights (millions)", ",.0f"),
    "adapters": ("a run's adapters (millions)", ".1f"),
    "teraflops": ("teraflop an update", ",.0f"),
    "seconds": ("seconds an update", ".2g"),
    "sampling": ("of it sampling", ".0%"),
    "per_hour": ("run-updates a GPU-hour", ",.0f"),
    "per_hour_float32": ("in float32", ",.0f"),
}
_CPU_COLUMNS = {
    "width": ("width", "d"),
    "gflops": ("gigaflop/s reached by the best product", ".0f"),
    "flops_ms": ("derived at that rate (ms)", ".2f"),
    "ratio": ("measured, times as long", ".1f"),
    "share": ("share of the rate", ".0%"),
}


def costs_page() -> str:
    """The page as MyST text."""
    lora = LoraConfig()
    return "\n".join(
        [
            "# What an update costs, by model size",
            "",
            "Nothing on this page was measured on a GPU. Every number of the first two tables is "
            "**derived**: operations and bytes are counted from the shape of the model, then "
            "divided by the published rates of a GPU. {doc}`/book/scale` says how such a sweep is "
            "run.",
            "",
            "## An ablation: many runs, short answers",
            "",
            *_section(ABLATION, lora),
            "## A reasoning run: one run, long answers",
            "",
            *_section(REASONING, lora),
            "## What is assumed",
            "",
            *_assumptions(H100, lora),
            "",
            "## The same count where it can be checked",
            "",
            "The tiny policy was timed on one CPU core beside the best matrix product that the "
            "core computes ({doc}`/book/_run/12_performance`). Counted in the same way, an update "
            "takes at least the derived time. The last column is what the tables above have to "
            "assume for a GPU. It is smaller here, and grows with the width: small products reach "
            "less of the rate than large ones.",
            "",
            _markdown(as_text(_checked(), _CPU_COLUMNS)),
            "",
        ]
    )


def _section(load: Workload, lora: LoraConfig) -> list[str]:
    """What is computed, and the table."""
    return [
        f"Runs: {load.runs}, of rank {lora.rank} on all projections. For each "
        f"{load.num_prompts} prompts of {load.prompt_length} tokens and {load.group_size} "
        f"completions of {load.completion_length} tokens. One {H100.name}.",
        "",
        _markdown(as_text(_rounded(table(load, lora)), _COLUMNS)),
        "",
    ]


def _rounded(costs: pd.DataFrame) -> pd.DataFrame:
    """Weights in millions; what depends on assumptions to two digits."""
    millions = {name: costs[name] / 1e6 for name in ("parameters", "adapters")}
    vague = ("teraflops", "per_hour", "per_hour_float32")
    return costs.assign(**millions, **{n: [float(f"{v:.2g}") for v in costs[n]] for n in vague})


def _assumptions(gpu: Gpu, lora: LoraConfig) -> list[str]:
    def tera(value: float) -> str:
        return format_value("rate", value / 1e12, ".3g")

    return [
        f"- An {gpu.name} computes {tera(gpu.bfloat16_flops)} dense teraflop/s in bfloat16 and "
        f"{tera(gpu.float32_flops)} in float32, and moves {tera(gpu.bandwidth)} TB/s, by its "
        "maker's data sheet.",
        f"- Of the arithmetic {format_value('share', gpu.flops_share, '.0%')} is reached, of the "
        f"bandwidth {format_value('share', gpu.bandwidth_share, '.0%')}. Times scale with the "
        "inverse of these shares.",
        "- Frozen products and attention are in bfloat16, or in float32 in the last column. The "
        "head, the adapters and the log-softmax are in float32 in both, as this package computes "
        "them: bfloat16 noise in the logits would swamp a small KL.",
        "- One optimizer step an update, on-policy. Runs share the frozen weights, and the "
        "completions of a group share their prompt.",
        "- Sampling reads all weights once a token, and the cache of each completion. Logits are "
        f"passed over {sum(LOGIT_PASSES.values())} times.",
        "- Nothing waits for a verifier, for the launch of a kernel, or for memory that is not "
        "there. Real runs are slower. Memory is not checked: the logits of all runs are the "
        "largest tensor.",
    ]


def _checked() -> pd.DataFrame:
    """The recorded CPU benchmark, one process."""
    least = floors(load())
    return least[least["processes"] == 1].assign(share=lambda rows: 1.0 / rows["ratio"])


def _markdown(frame: pd.DataFrame) -> str:
    shown = frame.reset_index()
    return as_markdown([str(name) for name in shown], shown.astype(str).to_numpy().tolist())
