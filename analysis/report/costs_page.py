"""The page of derived costs: tables of :mod:`analysis.chapters.ch12_model_costs`."""

from __future__ import annotations

import pandas as pd

from analysis.chapters.ch12_model_costs import ABLATION, H100, LOGIT_PASSES, REASONING, table
from analysis.chapters.ch12_performance import floors, load
from analysis.report.generated import render
from analysis.report.tables import as_text
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
    loads = {
        "An ablation: many runs, short answers": ABLATION,
        "A reasoning run: one run, long answers": REASONING,
    }
    least = floors(load())  # the recorded CPU benchmark
    return render(
        "costs.md",
        gpu=H100,
        lora=lora,
        passes=sum(LOGIT_PASSES.values()),
        workloads=[
            (heading, one, as_text(_rounded(table(one, lora)), _COLUMNS))
            for heading, one in loads.items()
        ],
        checked=as_text(
            least[least["processes"] == 1].assign(share=lambda rows: 1.0 / rows["ratio"]),
            _CPU_COLUMNS,
        ),
    )


def _rounded(costs: pd.DataFrame) -> pd.DataFrame:
    """Weights in millions; what depends on assumptions to two digits."""
    millions = {name: costs[name] / 1e6 for name in ("parameters", "adapters")}
    vague = ("teraflops", "per_hour", "per_hour_float32")
    return costs.assign(**millions, **{n: [float(f"{v:.2g}") for v in costs[n]] for n in vague})
