"""CPU time and peak memory of KL losses against the vocabulary, each in a process of its own.

``python -m benchmarks.full_vocabulary`` measures and records; chapter 15 reads what is recorded.
Sums over the likeliest tokens are measured by :mod:`benchmarks.top_k`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from analysis.chapters.ch15_full_vocabulary import RECORDED, TABLE
from analysis.freshness import code_sha256, import_closure
from analysis.records.manifests import write_folder
from analysis.sweeps.provenance import provenance_here
from benchmarks.device import seconds_of
from benchmarks.processes import CHECKOUT, THREAD_LIMITS
from kl_term.kl.chunked import Head, reverse_kl_from_hidden
from kl_term.kl.chunked_top_k import top_k_divergence_from_hidden
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.estimators import k2
from kl_term.kl.top_k import top_k_divergence

VOCABULARIES = (8_192, 32_000, 49_152, 98_304, 152_064)
TOKENS, WIDTH, LIGER_TOKENS = 1024, 128, 256
#: Of sums over the reference's likeliest tokens.
TOP_K = 64


def _sampled(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    """k2 of one sampled token, with the logits stored: what trainers do."""
    taken = torch.arange(len(hidden), device=hidden.device).unsqueeze(-1) % len(weight)
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


def _top_k_naive(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
    logits, top_k = hidden @ weight.T, min(TOP_K, len(weight))
    return top_k_divergence(logits, ref_hidden @ ref_weight.T, top_k=top_k).mean()


def _top_k_chunked(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor
) -> Tensor:
    head, top_k = Head(weight), min(TOP_K, len(weight))
    values = top_k_divergence_from_hidden(hidden, head, ref_hidden, Head(ref_weight), top_k=top_k)
    return values.mean()


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sampled": _sampled,
    "naive": _naive,
    "chunked": _chunked,
    "liger": _liger,
    "top_k_naive": _top_k_naive,
    "top_k_chunked": _top_k_chunked,
}
#: Those that chapter 15 compares.
COMPARED = ("sampled", "naive", "chunked", "liger")


def measure_here(method: str, vocab: int, tokens: int, width: int) -> dict[str, float]:
    """Forward and backward once, in this process: CPU seconds, and bytes above those before.

    Call it in a fresh process, in which no freed memory lies about to be used again. Linux only.
    """
    torch.set_num_threads(1)
    inputs = _inputs(vocab, tokens, width, torch.device("cpu"))
    hidden, weight, ref_hidden, ref_weight = inputs
    METHODS[method](hidden[:2], weight[:9], ref_hidden[:2], ref_weight[:9])  # load what it loads
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    started = time.process_time()
    value = METHODS[method](*inputs)
    value.backward()
    seconds = time.process_time() - started
    peak = _status("VmHWM") - before
    assert weight.grad is not None and bool(weight.grad.isfinite().all())
    return {"value": value.item(), "seconds": seconds, "peak_bytes": peak}


def _inputs(vocab: int, tokens: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """Hidden states [tokens, width] and unembedding [vocab, width], and those of a reference."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device=device).normal_(generator=generator)

    hidden, ref_hidden = normal(tokens, width), normal(tokens, width)
    weight, ref_weight = (normal(vocab, width).mul_(2 / width**0.5) for _ in range(2))
    return hidden.requires_grad_(), weight.requires_grad_(), ref_hidden, ref_weight


def measure_on(
    device: torch.device, method: str, vocab: int, tokens: int, width: int, calls: int = 5
) -> dict[str, Any]:
    """Forward and backward on a GPU: mean seconds, and bytes allocated above those before."""
    inputs = _inputs(vocab, tokens, width, device)

    def both() -> Tensor:
        for tensor in inputs:
            tensor.grad = None
        value = METHODS[method](*inputs)
        value.backward()
        return value.detach()

    value = both().item()
    for tensor in inputs:
        tensor.grad = None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    both()
    peak = torch.cuda.max_memory_allocated(device) - before
    seconds = seconds_of(both, calls, device) / calls
    sizes = {"vocab": vocab, "tokens": tokens, "width": width}
    return {"method": method, **sizes, "value": value, "seconds": seconds, "peak_bytes": peak}


def _status(field: str) -> int:
    """A size in the kernel's account of this process, in bytes."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def measure(method: str, vocab: int, tokens: int, width: int, repeats: int = 1) -> dict[str, Any]:
    """:func:`measure_here` in fresh processes: the fastest of the repeats, and the lowest peak.

    Raises:
        RuntimeError: a child failed; holds the end of what it said.
    """
    sizes = {"vocab": vocab, "tokens": tokens, "width": width}
    runs = []
    for _ in range(repeats):
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.full_vocabulary", method, *map(str, sizes.values())],
            capture_output=True,
            text=True,
            check=False,
            cwd=CHECKOUT,
            env=os.environ | dict.fromkeys(THREAD_LIMITS, "1"),
        )
        if child.returncode:
            raise RuntimeError(f"{method} at a vocabulary of {vocab} failed: {child.stderr[-400:]}")
        runs.append(json.loads(child.stdout))
    best = {name: min(run[name] for run in runs) for name in ("seconds", "peak_bytes")}
    return {"method": method, **sizes, "value": runs[0]["value"], **best}


def record(repeats: int = 3) -> None:
    """Measure every method that can be imported at every vocabulary, and write the table."""
    methods = [m for m in COMPARED if m != "liger" or find_spec("liger_kernel")]
    rows = [measure(m, v, TOKENS, WIDTH, repeats) for v in VOCABULARIES for m in methods]
    source = code_sha256(import_closure(["benchmarks/full_vocabulary.py"]))
    fields = provenance_here(source, threads=1).model_dump()
    if "liger" in methods:
        fields["versions"]["liger-kernel"] = version("liger-kernel")
    fields |= {"preset": "full vocabulary", "seeds": [0], "repeats": repeats}
    write_folder(RECORDED, {TABLE: pd.DataFrame(rows)}, fields)


if __name__ == "__main__":
    if sys.argv[1:]:
        chosen, *numbers = sys.argv[1:]
        print(json.dumps(measure_here(chosen, *map(int, numbers))))
    else:
        record()
