"""A Llama checkpoint in a local folder: ``config.json`` and ``*.safetensors``, and nothing else.

The names are those of the hub's checkpoints (``model.layers.0.self_attn.q_proj.weight``, ...). A
checkpoint with anything this forward pass does not compute (biases, norms on the queries, another
activation, scaled rotary positions, quantised weights) is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from analysis.records.language import ATTENTION_PROJECTIONS, GROUPS, PROJECTIONS, LlamaConfig
from analysis.training.population import uniforms
from analysis.training.pretrained.folders import _ONLY, CONFIG_FILE, read_config

WEIGHTS_FILE = "model.safetensors"


class FrozenLayer(NamedTuple):
    """One block."""

    attention_norm: Tensor  #: [d]
    mlp_norm: Tensor  #: [d]
    groups: dict[str, Tensor]  #: [out, in] of the projections in each of ``GROUPS``, stacked


class Llama(NamedTuple):
    """The frozen weights that all runs share."""

    config: LlamaConfig
    embedding: Tensor  #: [V, d]
    layers: list[FrozenLayer]
    norm: Tensor  #: [d]
    head: Tensor  #: [V, d]; the embedding itself if tied


def load_llama(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Llama:
    """The model in a folder.

    Raises:
        ValueError: the folder holds no model, a damaged one, or one that is computed differently.
    """
    config = read_config(folder)
    tensors = {name: t.to(device, dtype) for name, t in _read_tensors(folder)}
    if config.tied:  # some checkpoints store the tied head too
        tensors.pop("lm_head.weight", None)
    shapes = _shapes(config)
    # Older checkpoints store the angles, which follow from the configuration.
    stored = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    if missing := shapes.keys() - stored:
        raise ValueError(f"{folder}: no tensor {min(missing)}: the checkpoint is incomplete")
    if unknown := stored - shapes.keys():
        raise ValueError(f"{folder}: tensor {min(unknown)} is none of a plain Llama's")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            found = tuple(tensors[name].shape)
            raise ValueError(f"{folder}: {name} has shape {found}, config.json implies {shape}")
    return _assemble(config, tensors)


def empty_llama(config: LlamaConfig) -> Llama:
    """A model of this size whose weights nobody has set, such as of fake tensors."""
    return _assemble(config, {name: torch.empty(shape) for name, shape in _shapes(config).items()})


def random_llama(
    config: LlamaConfig, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Llama:
    """An untrained model, with weights large enough for its policy not to be uniform."""
    tensors = {}
    for index, (name, shape) in enumerate(_shapes(config).items()):
        drawn = uniforms(seed, "weights", index, (2, math.prod(shape)))
        normal = np.sqrt(-2.0 * np.log1p(-drawn[0])) * np.cos(2.0 * np.pi * drawn[1])
        scale = 0.1 if len(shape) == 1 else 1.0 if "embed" in name else shape[1] ** -0.5
        values = normal * scale + (1.0 if len(shape) == 1 else 0.0)
        tensors[name] = torch.from_numpy(values).view(shape).to(device, dtype)
    return _assemble(config, tensors)


def save_llama(model: Llama, folder: Path) -> None:
    """Write a model as a folder that :func:`load_llama` and transformers read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    fields = {
        **_ONLY,
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=1) + "\n")
    save_file(_disassemble(model), folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors: download the model again")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # no mapping
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): download the model again") from None


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name in a checkpoint -> shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.width)
    }
    for layer in range(config.num_layers):
        shapes[_name(layer, "input_layernorm")] = (config.width,)
        shapes[_name(layer, "post_attention_layernorm")] = (config.width,)
        for projection in PROJECTIONS:
            shapes[_name(layer, projection)] = config.projection_shape(projection)
    shapes["model.norm.weight"] = (config.width,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.width)
    return shapes


def _name(layer: int, part: str) -> str:
    if part in PROJECTIONS:
        part = ("self_attn." if part in ATTENTION_PROJECTIONS else "mlp.") + part
    return f"model.layers.{layer}.{part}.weight"


def _assemble(config: LlamaConfig, tensors: dict[str, Tensor]) -> Llama:
    layers = [
        FrozenLayer(
            tensors[_name(layer, "input_layernorm")],
            tensors[_name(layer, "post_attention_layernorm")],
            {
                group: torch.cat([tensors.pop(_name(layer, name)) for name in projections])
                for group, projections in GROUPS.items()
            },
        )
        for layer in range(config.num_layers)
    ]
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if config.tied else tensors["lm_head.weight"]
    return Llama(config, embedding, layers, tensors["model.norm.weight"], head)


def projections(config: LlamaConfig, layer: FrozenLayer) -> dict[str, Tensor]:
    """[out, in] of each projection, by its name in a checkpoint."""
    parts: dict[str, Tensor] = {}
    for group, names in GROUPS.items():
        sizes = [config.projection_shape(name)[0] for name in names]
        split = layer.groups[group].split(sizes)
        parts |= {name: part.clone() for name, part in zip(names, split, strict=True)}
    return parts


def _disassemble(model: Llama) -> dict[str, Tensor]:
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for index, layer in enumerate(model.layers):
        tensors[_name(index, "input_layernorm")] = layer.attention_norm
        tensors[_name(index, "post_attention_layernorm")] = layer.mlp_norm
        tensors |= {_name(index, n): part for n, part in projections(model.config, layer).items()}
    if not model.config.tied:
        tensors["lm_head.weight"] = model.head
    return tensors
