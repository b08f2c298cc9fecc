"""How much TRL's loss types weigh a token: what its KL term is aggregated with."""

from __future__ import annotations

from torch import Tensor

from kl_term.objectives.aggregation import token_weights

#: Loss type -> the mode of :mod:`kl_term.objectives.aggregation` that it amounts to.
MODES = {
    "grpo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "luspo": "seq_mean_token_sum",
}
#: Loss types that divide by the longest completion allowed.
BY_LENGTH = ("dr_grpo",)
#: Loss types that divide by the number of counted tokens of all processes.
BY_ITEMS = ("dapo", "cispo", "vespo")
LOSS_TYPES = (*MODES, *BY_LENGTH, *BY_ITEMS)


def loss_weights(
    mask: Tensor, loss_type: str, *, accumulation: float, max_length: int, num_items: Tensor
) -> Tensor:
    """Weights [B, T] under which TRL's loss is a sum over the tokens of a micro-batch.

    Args:
        mask: [B, T], True = counted.
        loss_type: one of :data:`LOSS_TYPES`.
        accumulation: micro-batches of an optimizer step; 1 in evaluation.
        max_length: ``max_completion_length``.
        num_items: counted tokens of an accumulation window, per process.
    """
    if loss_type in MODES:
        return token_weights(mask, MODES[loss_type]) / accumulation
    counted = mask.float()
    if loss_type in BY_LENGTH:
        return counted / (len(mask) * max_length * accumulation)
    return counted / num_items
