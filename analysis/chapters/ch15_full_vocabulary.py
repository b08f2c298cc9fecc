"""Chapter 15: what a KL over the full vocabulary costs, and what noise it removes.

Operations are counted per token, in multiply-adds times two. A step is: forward of policy and
reference, backward of the policy; attention scores and sampling are left out.

Variances are enumerated, of gradients by the unembedding ``[V, d]`` that all states share: a state
with hidden vector h contributes ``g h^T``, g its gradient by the logits.
``python -m benchmarks.full_vocabulary`` records time and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.records.language import PROJECTIONS, LlamaConfig
from analysis.records.manifests import RESULTS, recorded_table
from kl_term import style
from kl_term.kl.chunked import Chunks
from kl_term.kl.divergences import entropy
from kl_term.kl.enumeration import exact_kl_gradient, gradient_moments

# What the chapter computes.

RECORDED = RESULTS / "full_vocabulary_cpu"
RECORDED_GPU = RESULTS / "full_vocabulary_cuda"
TABLE = "benchmark.csv"

#: Elementary operations per logit of a KL and its gradient beyond the two log-softmaxes that the
#: log-prob of the sampled token needs anyway: difference, product, sum; and the same backward.
PER_LOGIT = 10

#: Blocks of logits that the backward pass of the chunked form holds at one time.
LOGIT_BLOCKS = 8


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
    "Llama-2-7B": llama(4096, 11_008, 32, 32, 32, 32_000, tied=False),
    "Qwen2.5-7B": llama(3584, 18944, 28, 28, 4, 152064, tied=False),
}


def block_weights(model: LlamaConfig) -> int:
    """Frozen weights of all projections, head and embedding aside."""
    shapes = (model.projection_shape(name) for name in PROJECTIONS)
    return model.num_layers * sum(rows * columns for rows, columns in shapes)


def parameters(model: LlamaConfig) -> int:
    """All weights but norms: the embedding counts once more where it is not tied."""
    return block_weights(model) + model.width * model.vocab_size * (1 if model.tied else 2)


def recorded(directory: Path = RECORDED) -> pd.DataFrame:
    """CPU time and peak memory by method and vocabulary; raises as ``recorded_table``."""
    return recorded_table(directory, TABLE)


def operations_table() -> pd.DataFrame:
    """Share of a step that the full vocabulary adds, stored and chunked, counted per token.

    A step has two forwards and one backward, twice a forward; the chunked form computes the logits
    of both policies again for its backward.
    """
    rows = []
    for name, model in MODELS.items():
        head = model.width * model.vocab_size
        forward = block_weights(model) + head
        step, extra = 4 * 2 * forward, PER_LOGIT * model.vocab_size
        row = {"model": name, "parameters": parameters(model), "head_share": head / forward}
        rows.append(row | {"stored": extra / step, "chunked": (2 * 2 * head + extra) / step})
    return pd.DataFrame(rows)


def block_bytes(width: int, chunks: Chunks) -> int:
    """Of the chunked form's blocks in float32: logits, and widened rows of both unembeddings and
    a gradient's. The vocabulary does not occur."""
    return 4 * chunks.vocab * (LOGIT_BLOCKS * chunks.tokens + 3 * width)


def memory_table(
    models: Mapping[str, LlamaConfig] = MODELS, *, tokens: int, tensors: float
) -> pd.DataFrame:
    """Bytes at the peak for a micro-batch of ``tokens``.

    ``one`` tensor of logits; the ``naive`` form, which holds so many ``tensors`` of them; the
    ``chunked`` form with hidden states and their gradients; ``weights`` with gradients and Adam.
    """
    return pd.DataFrame(
        {
            "model": name,
            "one": 4 * tokens * model.vocab_size,
            "naive": tensors * 4 * tokens * model.vocab_size,
            "chunked": block_bytes(model.width, Chunks()) + 2 * 4 * tokens * model.width,
            "weights": 16 * parameters(model),
        }
        for name, model in models.items()
    )


#: Sampled losses and the KL whose gradient is their mean on fresh samples. k3 times the live ratio
#: has, on fresh samples, every coefficient of k2.
VARIANTS = {"k2": "reverse", "k3": "forward"}


class Batch(NamedTuple):
    """States of a language-like policy and its reference."""

    hidden: Tensor  #: [N, d]
    logits: Tensor  #: [N, V]
    ref_logits: Tensor  #: [N, V]


def language_like(
    states: int,
    vocab_size: int,
    *,
    width: int,
    exponent: float,
    sharpness: float,
    drift: float,
    seed: int,
) -> Batch:
    """States whose next tokens follow a power law, ``exponent`` over ranks, each in an order of its
    own.

    Hidden state times unembedding has deviation ``sharpness``; the policy's logits moved by
    ``drift``.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = normal(states, width)
    scale = 1 / width**0.5
    frequency = -exponent * torch.arange(1, vocab_size + 1, dtype=torch.float64).log()
    ref_logits = frequency + sharpness * scale * hidden @ normal(width, vocab_size)
    logits = ref_logits + drift * scale * hidden @ normal(width, vocab_size)
    return Batch(hidden, logits, ref_logits)


def variance_parts(batch: Batch, *, variant: str) -> dict[str, float]:
    """Variance of a term's gradient ``within`` and ``between`` states of equal weight: traces, over
    tokens of the policy."""
    exact = exact_kl_gradient(batch.logits, batch.ref_logits, direction=VARIANTS[variant])
    spread = gradient_moments(batch.logits, batch.ref_logits, estimator=variant).trace_var
    squared_width = batch.hidden.square().sum(-1)
    mean = exact.T @ batch.hidden / len(batch.hidden)
    second = (exact.square().sum(-1) * squared_width).mean()
    return {
        "within": (spread * squared_width).mean().item(),
        "between": (second - mean.square().sum()).item(),
    }


def noise_table(vocab_sizes: Iterable[int], *, states: int, **shape: float) -> pd.DataFrame:
    """Per vocabulary and variant: the share of the variance that the full vocabulary removes,
    ``removed``, and how many sampled ``tokens`` are worth one with it."""
    rows = []
    for vocab_size in vocab_sizes:
        batch = language_like(states, vocab_size, **shape)
        at = {"vocab": vocab_size, "entropy": entropy(batch.ref_logits).mean().item()}
        rows += [at | {"variant": v, **variance_parts(batch, variant=v)} for v in VARIANTS]
    table = pd.DataFrame(rows)
    total = table.within + table.between
    return table.assign(removed=table.within / total, tokens=total / table.between)


# What it draws.

#: Colour, marker and label of each way of computing a KL loss.
METHODS = {
    "sampled": ("k2", "sampled token"),
    "naive": ("none", "full, logits stored"),
    "chunked": ("reverse", "full, in blocks"),
    "liger": ("forward", "full, Liger"),
}


def benchmark(table: pd.DataFrame) -> Figure:
    """Peak memory and CPU time of forward and backward against the vocabulary, by method."""
    figure, panels = style.subplots(1, 2, height=3.9)
    by_method = table.sort_values("vocab").groupby("method")
    for method in (name for name in METHODS if name in by_method.groups):
        name, label = METHODS[method]
        rows = by_method.get_group(method)
        look = {"color": style.COLOURS[name], "marker": style.MARKERS[name], "label": label}
        panels[0].loglog(rows.vocab, rows.peak_bytes / 2**30, **look)
        panels[1].loglog(rows.vocab, rows.seconds, **look)
    panels[0].set_title("peak memory (GiB)")
    panels[1].set_title("CPU time (seconds)")
    for axes, ticks in zip(panels, ((0.1, 0.3, 1, 3), (0.2, 0.5, 1, 2, 5)), strict=True):
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([8192, 32768, 131072], ["8k", "32k", "131k"])
        axes.minorticks_off()
    panels[0].legend(loc="upper left", fontsize=10)
    figure.supxlabel("vocabulary (both scales logarithmic)", fontsize="medium")
    return figure
