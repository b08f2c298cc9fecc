"""The size of a Llama, the adapters of a run, how it is computed, and the run they make."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from analysis.training.config import RunConfig
from kl_term.schema import Schema

#: Projections of a block that may carry an adapter, by their names in a checkpoint.
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION_PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS: tuple[Projection, ...] = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
#: Those that read the same input are computed as one product.
GROUPS: dict[str, tuple[Projection, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class LlamaConfig(Schema):
    """The architecture: RMSNorm, rotary positions, grouped queries, a gated MLP, no biases."""

    vocab_size: int = Field(ge=2)
    width: int = Field(ge=1)
    #: Width of the MLP.
    inner: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    #: Heads of keys and values; each serves ``num_heads / num_kv_heads`` heads of queries.
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    #: Is the output layer the token embedding?
    tied: bool

    @model_validator(mode="after")
    def _kv_heads_divide_heads(self) -> LlamaConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        return self

    def projection_shape(self, name: Projection) -> tuple[int, int]:
        """(out, in) of a projection, as checkpoints store it."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (queries, self.width),
            "k_proj": (keys, self.width),
            "v_proj": (keys, self.width),
            "o_proj": (self.width, queries),
            "gate_proj": (self.inner, self.width),
            "up_proj": (self.inner, self.width),
            "down_proj": (self.width, self.inner),
        }[name]


class LoraConfig(Schema):
    """The adapters of one run: on each target ``y + alpha / rank * (x A) B``."""

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    targets: tuple[Projection, ...] = Field(default=PROJECTIONS, min_length=1)
    #: Of A, which all runs share at the start; B starts at zero.
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _targets_differ(self) -> LoraConfig:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets names a projection twice: {list(self.targets)}")
        return self


class ForwardConfig(Schema):
    """How the frozen model is computed; adapters, residual stream, head and log-softmax keep the
    run's precision, because rounding noise in the logits swamps a small KL."""

    #: Of the frozen products and the attention. ``full`` is the run's precision.
    products: Literal["full", "bfloat16"] = "full"
    #: ``sdpa`` is torch's fused attention; ``explicit`` is products and a softmax.
    attention: Literal["explicit", "sdpa"] = "explicit"


class PretrainedConfig(RunConfig):
    """A population of adapters on a frozen model."""

    lora: LoraConfig = LoraConfig()
    forward: ForwardConfig = ForwardConfig()
