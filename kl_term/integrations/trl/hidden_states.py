"""Hidden states of a causal language model, caught while TRL scores tokens with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kl_term.kl.chunked import Head

#: What makes logits more than a linear function of the hidden states, by configuration.
NONLINEAR = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)


def causal_model(model: nn.Module) -> nn.Module:
    """The causal language model itself, under an adapter or not."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refuse_nonlinear_heads(model: nn.Module) -> None:
    """Refuse a model whose logits are not those of its head at its last hidden state.

    Raises:
        ValueError: one line naming the setting.
    """
    config = causal_model(model).config.get_text_config()
    for name in NONLINEAR:
        if getattr(config, name, None) not in (None, 1.0):
            raise ValueError(
                f"estimator='exact' reads logits as a linear head of the hidden states, but "
                f"{config.model_type} has {name}={getattr(config, name)}: use k2 in the loss"
            )


def head_of(model: nn.Module, temperature: float) -> Head:
    """The unembedding of a model at the sampling temperature.

    Of an adapted model it is the one that is in use now: with its adapter off, the reference's.
    """
    head = causal_model(model).get_output_embeddings()
    return Head(head.weight, getattr(head, "bias", None), temperature)


@contextmanager
def last_hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """The last hidden states [B, P + T, d] of each forward pass made in the block, in order."""
    seen: list[Tensor] = []
    hook = causal_model(model).base_model.register_forward_hook(
        lambda module, args, output: seen.append(output.last_hidden_state)
    )
    try:
        yield seen
    finally:
        hook.remove()


def before_completion(hidden: list[Tensor], length: int) -> Tensor:
    """[B, T, d]: the states that the last ``length`` tokens were drawn from."""
    return torch.cat([states[:, :-1][:, -length:] for states in hidden])
