r"""What a full-vocabulary KL costs beside the rest of a training step: operations and bytes.

Counted per token, in multiply-adds times two; attention scores, which grow with the context and
would make the share of the KL smaller, are left out. A step is: forward of policy and reference,
backward of the policy. Sampling, which costs at least another forward, is left out too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from analysis.kl.chunked import Chunks

#: Elementary operations per logit of a KL and its gradient beyond the two log-softmaxes that the
#: log-prob of the sampled token needs anyway: difference, product, sum; and the same backward.
PER_LOGIT = 10

#: Blocks of logits that the backward pass of the chunked form holds at one time.
LOGIT_BLOCKS = 8


class Model(NamedTuple):
    """Shape of a Llama-like decoder."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocab: int
    tied: bool

    @property
    def body(self) -> int:
        """Weights of the products of all layers; norms and biases are thousandths of it."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp_width)

    @property
    def head(self) -> int:
        """Weights of the unembedding."""
        return self.width * self.vocab

    @property
    def parameters(self) -> int:
        """All of them: the embedding counts once more where it is not tied."""
        return self.body + self.head * (1 if self.tied else 2)


MODELS = (
    Model("SmolLM2-135M", 576, 30, 9, 3, 64, 1536, 49_152, tied=True),
    Model("Llama-2-7B", 4096, 32, 32, 32, 128, 11_008, 32_000, tied=False),
    Model("Qwen2.5-7B", 3584, 28, 28, 4, 128, 18_944, 152_064, tied=False),
)


def step_operations(model: Model) -> int:
    """Per token: two forwards and one backward, which is twice a forward."""
    return 4 * 2 * (model.body + model.head)


def extra_operations(model: Model, *, chunked: bool) -> int:
    """Per token: what the full vocabulary adds to a step that has the sampled token's log-probs.

    Logits of policy and reference are there already. The chunked form throws them away and computes
    both again for its backward.
    """
    recomputed = 2 * 2 * model.head if chunked else 0
    return recomputed + PER_LOGIT * model.vocab


def operations_table(models: Iterable[Model] = MODELS) -> pd.DataFrame:
    """Share of a step that the full vocabulary adds, stored and chunked."""
    return pd.DataFrame(
        {
            "model": model.name,
            "parameters": model.parameters,
            "head_share": model.head / (model.body + model.head),
            "stored": extra_operations(model, chunked=False) / step_operations(model),
            "chunked": extra_operations(model, chunked=True) / step_operations(model),
        }
        for model in models
    )


def block_bytes(width: int, chunks: Chunks) -> int:
    """Of the chunked form's blocks in float32: logits, and three of the unembeddings' rows.

    Those are the widened rows of policy and reference and the gradient of the former. The
    vocabulary does not occur.
    """
    return 4 * chunks.vocab * (LOGIT_BLOCKS * chunks.tokens + 3 * width)


def memory_table(
    models: Iterable[Model] = MODELS,
    *,
    tokens: int,
    tensors: float,
    optimizer_bytes: int = 16,
) -> pd.DataFrame:
    """Bytes at the peak for ``tokens`` at a time.

    Args:
        models: shapes.
        tokens: in one micro-batch.
        tensors: how many tensors [tokens, vocab] of float32 the naive form holds, as measured.
        optimizer_bytes: per parameter, of weights, gradients and Adam in mixed precision.

    Returns:
        Per model: ``one`` tensor of logits, the ``naive`` peak, the ``chunked`` peak with hidden
        states of the reference and gradients of those of the policy, and the ``weights``.
    """
    return pd.DataFrame(
        {
            "model": model.name,
            "one": 4 * tokens * model.vocab,
            "naive": tensors * 4 * tokens * model.vocab,
            "chunked": block_bytes(model.width, Chunks()) + 2 * 4 * tokens * model.width,
            "weights": optimizer_bytes * model.parameters,
        }
        for model in models
    )
