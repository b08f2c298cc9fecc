"""One packed sequence per prompt: the prompt once, then its completions, step by step.

Row ``L + t G + g`` of a sequence is token ``t`` of completion ``g``: what sampling has written at
any moment is one run of rows, and so is what it writes next. A completion's rows look at the
prompt and at their own completion's past; other completions are masked.

Shapes: M members, P prompts of L tokens, G completions of T tokens, S = L + G T rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Where the rows of a packed sequence stand and what they may look at."""

    prompt_length: int
    group_size: int
    positions: Tensor  #: [S], of each row in its own text
    mask: Tensor  #: [S, S], 0 where the row may look, -inf elsewhere

    @property
    def size(self) -> int:
        """S."""
        return self.positions.shape[0]


@lru_cache(maxsize=32)
def packing(
    prompt_length: int, group_size: int, steps: int, dtype: torch.dtype, device: torch.device
) -> Packing:
    """The packing of ``group_size`` completions of ``steps`` tokens behind one prompt."""
    prompt = torch.arange(prompt_length, device=device)
    step = torch.arange(steps, device=device).repeat_interleave(group_size)
    positions = torch.cat([prompt, prompt_length + step])
    completion = torch.arange(group_size, device=device).repeat(steps)
    owner = torch.cat([torch.full_like(prompt, -1), completion])
    related = (owner == -1) | (owner == owner.unsqueeze(1))
    allowed = related & (positions <= positions.unsqueeze(1))
    mask = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, -torch.inf)
    return Packing(prompt_length, group_size, positions, mask)


def pack_prompts(prompts: Tensor) -> Tensor:
    """[M, L, P] from prompts [M, P, L]."""
    return prompts.transpose(1, 2)


def pack_completions(tokens: Tensor) -> Tensor:
    """[M, T*G, P] from completion tokens [M, P, G, T]."""
    return tokens.permute(0, 3, 2, 1).flatten(1, 2)


def unpack_completions(values: Tensor, group_size: int) -> Tensor:
    """[M, P, G, T, V] from the completion rows [M, T*G, P, V]."""
    return values.unflatten(1, (-1, group_size)).permute(0, 3, 2, 1, 4).contiguous()


def pack_gradients(gradient: Tensor, prompt_length: int) -> Tensor:
    """[M, S, P, V] from the gradients of completion rows [M, P, G, T, V]: zero on the prompt."""
    rows = gradient.permute(0, 3, 2, 1, 4).flatten(1, 2)  # (M, T*G, P, V)
    on_prompt = rows.new_zeros(rows.shape[0], prompt_length, *rows.shape[2:])
    return torch.cat([on_prompt, rows], dim=1)
