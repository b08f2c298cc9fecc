"""CPU time and peak memory of KL losses against the vocabulary, each in a process of its own.

Recorded, because a build must not wait for it::

    python -c "from analysis.experiments.chapters.vocabulary_benchmark import record; record()"
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import analysis
from analysis.experiments.ablations import recording
from analysis.experiments.ablations.folders import read_manifest, read_table, write_folder
from analysis.experiments.ablations.stamp import device_name
from analysis.files import sha256_bytes, sha256_file
from analysis.kl.chunked import Head, reverse_kl_from_hidden
from analysis.kl.divergences import reverse_kl
from analysis.kl.estimators import k2

_PACKAGE = Path(analysis.__path__[0])
RECORDED = recording.RESULTS / "full_vocabulary_cpu"
TABLE = "benchmark.csv"

VOCABULARIES = (8_192, 32_000, 49_152, 98_304, 152_064)
TOKENS, WIDTH, LIGER_TOKENS = 1024, 128, 256

#: What the numbers depend on.
_SOURCES = (
    "kl/chunked.py",
    "kl/vocabulary_blocks.py",
    "kl/divergences.py",
    "kl/estimators.py",
    "experiments/chapters/vocabulary_benchmark.py",
)


def _sampled(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    """k2 of one sampled token, with the logits stored: what trainers do."""
    taken = torch.arange(len(hidden)).unsqueeze(-1) % len(weight)
    logp = (hidden @ weight.T).log_softmax(-1).gather(-1, taken)
    with torch.no_grad():
        ref_logp = (ref_hidden @ ref_weight.T).log_softmax(-1).gather(-1, taken)
    return k2(logp, ref_logp).mean()


def _naive(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    return reverse_kl(hidden @ weight.T, ref_hidden @ ref_weight.T).mean()


def _chunked(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    return reverse_kl_from_hidden(hidden, Head(weight), ref_hidden, Head(ref_weight)).mean()


def _liger(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    """Liger's fused distillation loss at its reverse-KL end, uncompiled, as there is no GPU."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=1.0,
        compiled=False,
        chunk_size=LIGER_TOKENS,
    )
    labels = torch.zeros(len(hidden), dtype=torch.long)
    return loss(hidden, weight, ref_hidden, ref_weight, labels)


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sampled": _sampled,
    "naive": _naive,
    "chunked": _chunked,
    "liger": _liger,
}


def measure_here(method: str, vocab: int, tokens: int, width: int) -> dict[str, float]:
    """Forward and backward once, in this process: CPU seconds, and bytes above those before.

    Call it in a fresh process, in which no freed memory lies about to be used again. Linux only.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(generator=generator)

    hidden, ref_hidden = normal(tokens, width), normal(tokens, width)
    weight, ref_weight = (normal(vocab, width).mul_(2 / width**0.5) for _ in range(2))
    inputs = hidden.requires_grad_(), weight.requires_grad_(), ref_hidden, ref_weight
    METHODS[method](hidden[:2], weight[:9], ref_hidden[:2], ref_weight[:9])  # load what it loads
    before = _start_of_peak()
    started = time.process_time()
    value = METHODS[method](*inputs)
    value.backward()
    seconds = time.process_time() - started
    peak = _status("VmHWM") - before
    assert weight.grad is not None and bool(weight.grad.isfinite().all())
    return {"value": value.item(), "seconds": seconds, "peak_bytes": peak}


def measure(method: str, vocab: int, tokens: int, width: int, repeats: int = 1) -> dict[str, Any]:
    """:func:`measure_here` in fresh processes: the fastest of the repeats, and the lowest peak.

    Raises:
        RuntimeError: a child failed; holds the end of what it said.
    """
    code = (
        "import json; from analysis.experiments.chapters.vocabulary_benchmark import measure_here;"
        f"print(json.dumps(measure_here({method!r}, {vocab}, {tokens}, {width})))"
    )
    runs = []
    for _ in range(repeats):
        child = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        if child.returncode:
            raise RuntimeError(f"{method} at a vocabulary of {vocab} failed: {child.stderr[-400:]}")
        runs.append(json.loads(child.stdout))
    return {
        "method": method,
        "vocab": vocab,
        "tokens": tokens,
        "width": width,
        "value": runs[0]["value"],
        "seconds": min(run["seconds"] for run in runs),
        "peak_bytes": min(run["peak_bytes"] for run in runs),
    }


def record(repeats: int = 3) -> None:
    """Measure every method that can be imported at every vocabulary, and seal the table."""
    methods = [m for m in METHODS if m != "liger" or importlib.util.find_spec("liger_kernel")]
    rows = [measure(m, v, TOKENS, WIDTH, repeats) for v in VOCABULARIES for m in methods]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if "liger" in methods:
        from importlib.metadata import version

        versions["liger-kernel"] = version("liger-kernel")
    fields = {
        "preset": "full vocabulary",
        "seeds": [0],
        "device": device_name(torch.device("cpu"), 1),
        "versions": versions,
        "source": sha256_bytes("".join(sha256_file(_PACKAGE / s) for s in _SOURCES).encode()),
        "repeats": repeats,
    }
    write_folder(RECORDED, {TABLE: pd.DataFrame(rows)}, fields)


def recorded() -> pd.DataFrame:
    """The recorded table, after checking it against its manifest.

    Raises:
        ValueError: the table is missing or is not the one that was recorded.
    """
    read_manifest(RECORDED)
    return read_table(RECORDED / TABLE)


def _start_of_peak() -> int:
    """Forget the peak of this process so far (Linux); its bytes in memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    """A size in the kernel's account of this process, in bytes."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024
