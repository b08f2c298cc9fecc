r"""A population of adapters on one frozen Llama, behind the interface of the tiny policy.

Architecture: token embedding; blocks of causal attention with rotary positions and grouped queries,
and of a gated MLP :math:`W_{down}(\mathrm{silu}(W_{gate} x) \odot W_{up} x)`, each behind
an RMSNorm and with a residual connection; a last RMSNorm; an output layer, tied or not.

Runs share the frozen weights, so all their rows go through one large product; their adapters
are batched products (:mod:`analysis.training.pretrained.lora`). Without adapters the same forward
pass is the reference policy.

One pass reads all tokens that are new: what all prompts begin with, such as solved examples, once
for a run; the rest of each prompt; and its completions, packed behind it step by step, so that keys
and values of the next step follow those of the last in memory.

Prompts of different lengths are padded on the left with ``PAD``. A padded position is seen by no
other, and a token's rotary position counts from the first real one, so padding changes nothing.

Shapes: M runs, P prompts, G completions of each, T tokens, L prompt tokens, of which C are
shared by all; N rows that are read behind these for each prompt, R = C + P N of a run; S positions
that are seen; H heads of queries, K of keys and values, D channels a head; d channels; V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.records.language import ForwardConfig, LoraConfig
from analysis.training.pretrained.attention import (
    Rotation,
    bias_of,
    explicit,
    fused,
    rotate,
    rotation,
)
from analysis.training.pretrained.lora import Adapters, LayerAdapters, Lora, product
from analysis.training.pretrained.weights import FrozenLayer, Llama

#: Stands before the first token of a prompt that is shorter than the longest.
PAD = -1


class Prefix(NamedTuple):
    """Prompts, and where their tokens stand; they are read with the first step."""

    prompts: Tensor  #: [M, P, L]
    positions: Tensor  #: [M, P, L], of the rotation
    lengths: Tensor  #: [M, P, 1], without padding
    visible: Tensor  #: [M, P, L] bool, of the C shared tokens and of what follows them


class KeyValue(NamedTuple):
    """Keys and values of one layer, [M, P, K, S, D]."""

    keys: Tensor
    values: Tensor


class Cache:
    """Keys and values of prompts and completions; empty until the first step is read."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.adapters: Sequence[LayerAdapters] = ()
        self.layers: list[KeyValue] = []


class _Reading(NamedTuple):
    """What all layers need to know of the tokens they read."""

    tokens: Tensor  #: [M, R]
    prompts: int
    shared: int  #: of the tokens, these are the first
    first: int  #: where the others stand among the positions
    rotation: Rotation
    bias: Tensor  #: [M*P, 1, H/K*N, S], of the others
    shared_bias: Tensor  #: [1, 1, H/K*C, C]


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
        """Where the tokens of prompts [M, P, L] stand, padded on the left with ``PAD``."""
        real = prompts != PAD
        positions = (real.cumsum(dim=-1) - 1).clamp(min=0)
        # Columns behind the first C hold all that follows the beginning, which itself ends further
        # left in them the shorter the prompt is.
        shared = torch.arange(prompts.shape[2], device=prompts.device) < self.shared
        visible = shared | (real & (positions >= self.shared))
        return Prefix(prompts, positions, real.sum(dim=-1, keepdim=True), visible)

    def empty_cache(self, like: Tensor) -> Cache:
        """Room for completions of the shape of ``like`` [M, P, G, T]."""
        return Cache(like.shape[3])

    def extend(
        self,
        adapters: Adapters,
        prefix: Prefix,
        tokens: Tensor,
        cache: Cache | None = None,
        start: int = 0,
    ) -> Tensor:
        """Logits [M, P, G, T, V] of what follows each of ``tokens`` [M, P, G, T].

        They are the completion's tokens from ``start`` on; those before are in ``cache``,
        and these are written into it.
        """
        x = self._read(adapters, prefix, tokens, cache, start).flatten(1, 3)
        return product(x, self._model.head).unflatten(1, tokens.shape[1:])

    def logits(self, adapters: Adapters, prompts: Tensor, inputs: Tensor) -> Tensor:
        """Logits [M, P, G, T, V] for prompts [M, P, L] and completion inputs [M, P, G, T]."""
        return self.extend(adapters, self.prefill(adapters, prompts), inputs)

    def states(self, adapters: Adapters, prompts: Tensor, inputs: Tensor) -> Tensor:
        """[M, P, G, T, d]: of each of the completion inputs [M, P, G, T] what the output layer
        reads, behind prompts [M, P, L]."""
        return self._read(adapters, self.prefill(adapters, prompts), inputs)

    def _read(
        self,
        adapters: Adapters,
        prefix: Prefix,
        tokens: Tensor,
        cache: Cache | None = None,
        start: int = 0,
    ) -> Tensor:
        """[M, P, G, T, d]: the states of :meth:`states`, of tokens as in :meth:`extend`."""
        _, prompts, groups, steps = tokens.shape
        reading = self._reading(prefix, tokens, start)
        cache = Cache(0) if cache is None else cache
        if start == 0:
            cache.adapters = self.lora.by_layer(adapters)
            cache.layers = self._room(prefix, groups * cache.steps)
        x = F.embedding(reading.tokens, self._model.embedding)  # (M, R, d)
        for index, layer in enumerate(self._model.layers):
            kept = cache.layers[index] if cache.steps else None
            x = self._block(layer, cache.adapters[index], x, reading, kept)
        x = x[:, reading.shared :].unflatten(1, (prompts, -1))[:, :, -steps * groups :]
        x = x.unflatten(2, (steps, groups)).transpose(2, 3)  # (M, P, G, T, d)
        return self._norm(x, self._model.norm)

    def _reading(self, prefix: Prefix, tokens: Tensor, start: int) -> _Reading:
        """The tokens to be read: with the first step those of the prompts."""
        runs, prompts, groups, steps = tokens.shape
        length, device = prefix.prompts.shape[2], tokens.device
        shared = self.shared if start == 0 else 0
        first = length + start * groups if start else shared
        step = torch.arange(start, start + steps, device=device)
        position = (prefix.lengths + step).repeat_interleave(groups, dim=2)
        token = tokens.transpose(2, 3).flatten(2)
        if start == 0:
            position = torch.cat([prefix.positions[..., shared:], position], dim=2)
            token = torch.cat([prefix.prompts[..., shared:].clamp(min=0), token], dim=2)
        position, token = position.flatten(1), token.flatten(1)
        if shared:
            here = torch.arange(shared, device=device).expand(runs, -1)
            one = prefix.prompts[:, 0]  # (M, L)
            padding = one.shape[1] - prefix.lengths[:, 0]
            position = torch.cat([here, position], dim=1)
            token = torch.cat([one.gather(1, padding + here), token], dim=1)
        config = self.config
        repeats = config.num_heads // config.num_kv_heads
        causal = torch.ones(1, shared, shared, dtype=torch.bool, device=device).tril()
        return _Reading(
            token,
            prompts,
            shared,
            first,
            rotation(position.unsqueeze(-1), config.head_dim, config.rope_theta, self.dtype),
            bias_of(_visible(prefix, groups, start + steps, first), repeats, self._products),
            bias_of(causal, repeats, self._products),
        )

    def _room(self, prefix: Prefix, positions: int) -> list[KeyValue]:
        """For each layer, memory for prompts and so many positions of completions."""
        runs, prompts, length = prefix.prompts.shape
        shape = (runs, prompts, self.config.num_kv_heads, length + positions, self.config.head_dim)

        def room() -> Tensor:
            return torch.empty(shape, dtype=self._products, device=self.device)

        return [KeyValue(room(), room()) for _ in range(self.config.num_layers)]

    def _block(
        self,
        layer: FrozenLayer,
        adapters: LayerAdapters,
        x: Tensor,
        reading: _Reading,
        kept: KeyValue | None,
    ) -> Tensor:
        """The residual stream [M, R, d] behind one more block."""

        def projected(group: str, x: Tensor) -> Tensor:
            return product(x, layer.groups[group], adapters.get(group))

        qkv = projected("qkv", self._norm(x, layer.attention_norm))
        mixed = self._attention(qkv.unflatten(2, (-1, self.config.head_dim)), reading, kept)
        x = x + projected("o", mixed)
        gate, up = projected("gate_up", self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return x + projected("down", F.silu(gate) * up)

    def _attention(self, qkv: Tensor, reading: _Reading, kept: KeyValue | None) -> Tensor:
        """What the heads in [M, R, H + 2 K, D] read of each other: [M, R, H D]."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        turned, values = qkv.split([heads + kv_heads, kv_heads], dim=2)
        turned = rotate(turned, reading.rotation)
        sizes = [reading.shared, qkv.shape[1] - reading.shared]
        parts = [t.to(self._products).split(sizes, dim=1) for t in (turned, values)]

        def by_prompt(part: Tensor, prompts: int) -> Tensor:  # (M, P, heads, N, D)
            return part.unflatten(1, (prompts, -1)).transpose(2, 3)

        turned, values = (by_prompt(part[1], reading.prompts) for part in parts)
        queries, keys = turned.split([heads, kv_heads], dim=2)
        if not reading.shared:
            seen = _joined(KeyValue(keys, values), None, kept, reading.first)
            return self._attended(queries, seen, reading.bias)
        turned, shared_values = (by_prompt(part[0], 1) for part in parts)
        shared_queries, shared_keys = turned.split([heads, kv_heads], dim=2)
        shared = KeyValue(shared_keys, shared_values)
        seen = _joined(KeyValue(keys, values), shared, kept, reading.first)
        mixed = [
            self._attended(shared_queries, shared, reading.shared_bias),
            self._attended(queries, seen, reading.bias),
        ]
        return torch.cat(mixed, dim=1)

    def _attended(self, queries: Tensor, seen: KeyValue, bias: Tensor) -> Tensor:
        """What queries [M, P, H, N, D] read: [M, P N, H D]."""
        runs, prompts, heads, rows, depth = queries.shape
        kv_heads = seen.keys.shape[2]
        packed = queries.reshape(runs * prompts, kv_heads, -1, depth)
        mixed = self._attend(packed, seen.keys.flatten(0, 1), seen.values.flatten(0, 1), bias)
        mixed = mixed.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4)  # (M P, N, K, H/K, D)
        return mixed.reshape(runs, prompts * rows, heads * depth).to(self.dtype)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.config.norm_eps)

    def _for_products(self, layer: FrozenLayer) -> FrozenLayer:
        return layer._replace(groups={n: w.to(self._products) for n, w in layer.groups.items()})


def _visible(prefix: Prefix, groups: int, steps: int, first: int) -> Tensor:
    """[M*P, N, S] bool: what the rows from position ``first`` on see of prompts and completions.

    A padded position sees itself too, so that its softmax is defined; nothing reads it.
    """
    length = prefix.prompts.shape[2]
    place = torch.arange(length + groups * steps, device=prefix.prompts.device)
    of_prompt = place < length
    time = torch.where(of_prompt, place, length + (place - length) // groups)
    whose = torch.where(of_prompt, -1, (place - length) % groups)
    before = time <= time[first:, None]
    same = of_prompt | (whose == whose[first:, None])
    seen = F.pad(prefix.visible, (0, groups * steps), value=True).unsqueeze(2)
    itself = place == place[first:, None]
    return ((before & same & seen) | itself).flatten(0, 1)


def _joined(new: KeyValue, shared: KeyValue | None, kept: KeyValue | None, first: int) -> KeyValue:
    """All that can be seen: what was ``kept``, where the new is written from ``first`` on."""
    if kept is None:
        if shared is None:
            return new
        pairs = zip(shared, new, strict=True)
        return KeyValue(
            *(torch.cat([c.expand(-1, n.shape[1], -1, -1, -1), n], dim=3) for c, n in pairs)
        )
    end = first + new.keys.shape[3]
    if shared is not None:
        for memory, part in zip(kept, shared, strict=True):
            memory[..., :first, :] = part
    for memory, part in zip(kept, new, strict=True):
        memory[..., first:end, :] = part
    return KeyValue(*(memory[..., :end, :] for memory in kept))
