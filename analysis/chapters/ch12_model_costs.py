"""What an update costs on models of a size that no page of this book trains: derived, not measured.

Arithmetic and memory traffic of a population of adapters on one frozen Llama, counted phase by
phase from their shapes, over the published rates of a GPU times the share assumed to be reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from analysis.training.counting import FLOAT_BYTES, OPTIMIZER_PASSES
from analysis.training.pretrained.config import PROJECTIONS, LlamaConfig, LoraConfig

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
    def pairs(self) -> int:
        """Pairs of a token and one that it sees, itself included."""
        length, steps = self.prompt_length, self.completion_length
        prompts = self.runs * self.num_prompts * length * (length + 1) // 2
        return prompts + self.sequences * (steps * length + steps * (steps + 1) // 2)


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
    seen = load.sequences * (
        load.completion_length * load.prompt_length
        + load.completion_length * (load.completion_length + 1) // 2
    )
    cache = 2 * product_bytes * model.num_layers * model.num_kv_heads * model.head_dim * seen
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


def table(load: Workload, lora: LoraConfig | None = None, gpu: Gpu = H100) -> pd.DataFrame:
    """One row per model: ``parameters``; ``adapters`` of one run; ``teraflops`` of an update of the
    population; its ``seconds`` with products in bfloat16, the ``sampling`` share of them, and
    ``per_hour`` and ``per_hour_float32``: run-updates per GPU-hour with either type."""
    lora = lora or LoraConfig()
    rows = []
    for name, model in MODELS.items():
        work = phases(model, load, lora)
        seconds = {phase: part.seconds(gpu, "bfloat16") for phase, part in work.items()}
        total = sum(seconds.values())
        in_float32 = phases(model, load, lora, "float32").values()
        slow = sum(part.seconds(gpu, "float32") for part in in_float32)
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
