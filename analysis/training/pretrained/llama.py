r"""A population of adapters on one frozen Llama, behind the interface of the tiny policy.

Architecture: token embedding; blocks of causal attention with rotary positions and grouped queries,
and of a gated MLP :math:`W_{down}(\mathrm{silu}(W_{gate} x) \odot W_{up} x)`, each behind
an RMSNorm and with a residual connection; a last RMSNorm; an output layer, tied or not.

Runs share the frozen weights, so all their rows go through one large product; their adapters
are batched products (:mod:`analysis.training.pretrained.lora`). Without adapters the same forward
pass is the reference policy.

Prompts of different lengths are padded on the left with ``PAD``. A padded position is seen by no
other, and a token's rotary position counts from the first real one, so padding changes nothing.
What all prompts begin with, such as solved examples, is read once for a run.

Shapes: M runs, P prompts, G completions of each, T tokens, L prompt tokens, R rows (all tokens
of a run), K heads of keys and values, D channels a head, d channels, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.training.pretrained.attention import (
    KeyValue,
    Rotation,
    Visible,
    causal,
    causal_behind_padding,
    explicit,
    fused,
    rotate,
    rotation,
)
from analysis.training.pretrained.config import ForwardConfig, LoraConfig
from analysis.training.pretrained.lora import Adapters, Lora, frozen_product
from analysis.training.pretrained.weights import FrozenLayer, Llama

#: Stands before the first token of a prompt that is shorter than the longest.
PAD = -1


class Prefix(NamedTuple):
    """The prompts as completions see them."""

    layers: list[KeyValue]  #: [M, P, K, 1, L, D] each
    real: Tensor  #: [M, P, L] bool, False at padding


class _Reading(NamedTuple):
    """What all layers need to know of the tokens they read."""

    shape: torch.Size  #: M, P, G, T
    rotation: Rotation
    visible: Visible
    start: int  #: where the tokens stand in ``cache``


class LlamaPolicy:
    """The forward pass of frozen weights with adapters; it holds no weights of runs.

    Args:
        model: frozen weights, from :mod:`analysis.training.pretrained.weights`.
        lora: the adapters of a run.
        forward: type of the frozen products, and how attention is computed.
        shared: tokens with which every prompt begins alike; at least one more must follow them.

    The residual stream, the adapters, the head and the logits have the type of the model's
    embedding; the device is the model's.
    """

    def __init__(
        self, model: Llama, lora: LoraConfig, forward: ForwardConfig, shared: int = 0
    ) -> None:
        self.config = model.config
        self.shared = shared
        self.lora = Lora(lora, model.config)
        self.dtype = model.embedding.dtype
        self.device = model.embedding.device
        self._products = torch.bfloat16 if forward.products == "bfloat16" else self.dtype
        self._attend = fused if forward.attention == "sdpa" else explicit
        self._model = model._replace(layers=[self._for_products(part) for part in model.layers])

    def start(self) -> Tensor:
        """[1, N]: the adapters from which all runs start; they change nothing yet."""
        return self.lora.initial_weights(self.dtype).to(self.device)

    def reference(self, start: Tensor, runs: int) -> Adapters:
        """The frozen model: no adapters, for any number of runs."""
        return {}

    def unflatten(self, weights: Tensor) -> Adapters:
        """Named views [M, rows, columns] of weights [M, N]."""
        return self.lora.unflatten(weights)

    def prefill(self, adapters: Adapters, prompts: Tensor) -> Prefix:
        """Keys and values of prompts [M, P, L], padded on the left with ``PAD``."""
        shared, real = self.shared, prompts != PAD
        positions = (real.cumsum(dim=-1) - 1).clamp(min=0)
        beginning = self._beginning(adapters, prompts) if shared else None
        # The last columns hold all that follows the beginning, which ends further left in them
        # the shorter the prompt is.
        own = (real & (positions >= shared))[..., shared:]
        positions = positions[..., shared:]
        visible = Visible(causal_behind_padding(own), None if beginning is None else beginning.real)
        tokens = prompts[..., shared:].clamp(min=0).unsqueeze(2)
        reading = _Reading(tokens.shape, self._rotation(positions), visible, 0)
        before = None if beginning is None else beginning.layers
        layers = self._run(adapters, tokens, reading, before, None)[1]
        if beginning is None:
            return Prefix(layers, own)
        joined = [
            KeyValue(*(torch.cat(parts, dim=4) for parts in zip(*pair, strict=True)))
            for pair in zip(beginning.layers, layers, strict=True)
        ]
        return Prefix(joined, torch.cat([beginning.real, own], dim=-1))

    def _beginning(self, adapters: Adapters, prompts: Tensor) -> Prefix:
        """What all prompts of a run begin with: read from its first, seen by each."""
        runs, count, _ = prompts.shape
        here = torch.arange(self.shared, device=prompts.device).expand(runs, 1, -1)
        first = prompts[:, :1]  # (M, 1, L)
        padding = (first == PAD).sum(dim=-1, keepdim=True)
        tokens = first.gather(2, padding + here).unsqueeze(2)
        visible = Visible(causal(self.shared, self.shared, 0, prompts.device), None)
        reading = _Reading(tokens.shape, self._rotation(here), visible, 0)
        _, layers = self._run(adapters, tokens, reading, None, None)
        seen = [
            KeyValue(*(part.expand(-1, count, *part.shape[2:]) for part in kv)) for kv in layers
        ]
        return Prefix(seen, torch.ones_like(here, dtype=torch.bool).expand(-1, count, -1))

    def empty_cache(self, like: Tensor) -> list[KeyValue]:
        """Room for completions of the shape of ``like`` [M, P, G, T]."""
        runs, prompts, groups, steps = like.shape
        shape = (runs, prompts, self.config.num_kv_heads, groups, steps, self.config.head_dim)

        def room() -> Tensor:
            return torch.zeros(shape, dtype=self._products, device=self.device)

        return [KeyValue(room(), room()) for _ in range(self.config.num_layers)]

    def extend(
        self,
        adapters: Adapters,
        prefix: Prefix,
        tokens: Tensor,
        cache: list[KeyValue] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Logits [M, P, G, T, V] of what follows each of ``tokens`` [M, P, G, T].

        They are the completion's tokens from ``start`` on; those before are in ``cache``,
        and these are written into it.
        """
        steps = tokens.shape[-1]
        seen = steps if cache is None else cache[0].keys.shape[4]
        lengths = prefix.real.sum(dim=-1, keepdim=True)  # (M, P, 1)
        positions = lengths + start + torch.arange(steps, device=tokens.device)
        visible = Visible(causal(steps, seen, start, tokens.device), prefix.real)
        reading = _Reading(tokens.shape, self._rotation(positions), visible, start)
        hidden, _ = self._run(adapters, tokens, reading, prefix.layers, cache)
        hidden = self._norm(hidden, self._model.norm)
        return frozen_product(hidden, self._model.head).unflatten(1, tokens.shape[1:])

    def logits(self, adapters: Adapters, prompts: Tensor, inputs: Tensor) -> Tensor:
        """Logits [M, P, G, T, V] for prompts [M, P, L] and completion inputs [M, P, G, T]."""
        return self.extend(adapters, self.prefill(adapters, prompts), inputs)

    def _run(
        self,
        adapters: Adapters,
        tokens: Tensor,
        reading: _Reading,
        prefix: list[KeyValue] | None,
        cache: list[KeyValue] | None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Hidden states [M, R, d] of tokens [M, P, G, T], and their keys and values."""
        x = F.embedding(tokens, self._model.embedding).flatten(1, 3)  # (M, R, d)
        layers = []
        for index, layer in enumerate(self._model.layers):
            name = f"block{index}."
            prompt = None if prefix is None else prefix[index]
            kept = None if cache is None else cache[index]
            normed = self._norm(x, layer.attention_norm)
            mixed, own = self._attention(adapters, name, layer, normed, reading, prompt, kept)
            layers.append(own)
            x = x + mixed
            normed = self._norm(x, layer.mlp_norm)
            gate = self._project(adapters, name, layer, "gate_proj", normed)
            up = self._project(adapters, name, layer, "up_proj", normed)
            x = x + self._project(adapters, name, layer, "down_proj", F.silu(gate) * up)
        return x, layers

    def _attention(
        self,
        adapters: Adapters,
        name: str,
        layer: FrozenLayer,
        x: Tensor,
        reading: _Reading,
        prompt: KeyValue | None,
        cache: KeyValue | None,
    ) -> tuple[Tensor, KeyValue]:
        """What attention adds to the residual stream [M, R, d], and the keys and values it saw."""
        heads, depth = self.config.num_kv_heads, self.config.head_dim

        def by_head(projection: str) -> Tensor:  # (M, P, K, G, R/K, T, D)
            y = self._project(adapters, name, layer, projection, x)
            y = y.view(*reading.shape, heads, -1, depth)
            return y.permute(0, 1, 4, 2, 5, 3, 6)

        queries = rotate(by_head("q_proj"), reading.rotation).to(self._products)
        keys = rotate(by_head("k_proj"), reading.rotation).squeeze(4).to(self._products)
        own = KeyValue(keys, by_head("v_proj").squeeze(4).to(self._products))
        if cache is not None:
            for kept, new in zip(cache, own, strict=True):
                kept[..., reading.start : reading.start + new.shape[4], :] = new
            own = cache
        mixed = self._attend(queries, own, prompt, reading.visible)
        mixed = mixed.permute(0, 1, 3, 5, 2, 4, 6).reshape(*x.shape[:2], -1).to(self.dtype)
        return self._project(adapters, name, layer, "o_proj", mixed), own

    def _project(
        self, adapters: Adapters, name: str, layer: FrozenLayer, projection: str, x: Tensor
    ) -> Tensor:
        """Outputs [M, R, out] of inputs [M, R, in]: one product for all runs, and adapters."""
        frozen = frozen_product(x.to(self._products), layer.projections[projection])
        return self.lora.add(frozen.to(self.dtype), x, adapters, name + projection)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.config.norm_eps)

    def _rotation(self, positions: Tensor) -> Rotation:
        """At positions [M, P, T], to turn [M, P, K, G, R, T, D]."""
        shaped = positions[:, :, None, None, None]
        return rotation(shaped, self.config.head_dim, self.config.rope_theta, self.dtype)

    def _for_products(self, layer: FrozenLayer) -> FrozenLayer:
        projections = {n: w.to(self._products) for n, w in layer.projections.items()}
        return layer._replace(projections=projections)
