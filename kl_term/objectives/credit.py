r"""Credit within a completion: which token answers for which reward.

A reward given at one position is owed by every token up to it. Process rewards and the KL in the
reward are both of that form; what differs is whether later terms are passed back to earlier
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kl_term.checks import (
    as_mask,
    at_least_float32,
    check_float,
    check_same_shape,
    checked,
    default_float,
    per_token_advantages,
)
from kl_term.kl.names import TOKEN_CREDITS
from kl_term.kl.packing import Packing
from kl_term.kl.returns import reward_to_go
from kl_term.objectives.groups import standardise
from kl_term.plain_checks import check_choice, check_not_negative
from kl_term.shapes import AnyFloats, Mask, Tokens, Values


@checked
def fold_kl(
    advantages: AnyFloats,
    kl_penalty: Values,
    mask: Mask,
    *,
    beta: float,
    credit: str = "immediate",
    gamma: float = 1.0,
    sequence_ids: Tokens | None = None,
) -> Values:
    r"""Advantages with the KL in the reward, folded in *after* normalisation.

    .. math:: \hat R_t = A_t - \beta \sum_{s \ge t} \gamma^{s-t}\, k_s \quad \text{(to\_go)},
        \qquad \hat R_t = A_t - \beta\, k_t \quad \text{(immediate)}

    ``immediate`` charges a token with its own KL only. With k1 and on-policy, the gradient of the
    reverse KL of whole sequences is that of ``to_go`` with ``gamma=1``: a token answers for the
    divergence of the states it leads to. Behind a division by the standard
    deviation of the rewards, :math:`\beta` in units of the reward is multiplied by it; folded in
    *before* the division it stays what it is.

    Equation: ``fold_kl``
    Source: Liu, Liu and Liu, "Rethinking KL Divergence in RLHF" (March 2025), equation 39;
        Tang and Munos (2025) for ``to_go``.

    Args:
        advantages: [...] (one a row) or [..., T] (one a token); detached.
        kl_penalty: [..., T], nats, from :func:`kl_term.kl.surrogates.kl_penalty`; detached.
        mask: [..., T], True = counted. A masked token adds no KL, but takes its place in the
            discounting.
        beta: the KL coefficient, at least 0.
        credit: ``immediate`` or ``to_go``.
        gamma: the discount of ``to_go``, per position; 1 for ``immediate``, which reads none.
        sequence_ids: [..., T] integers, where a row holds several sequences: see
            :mod:`kl_term.kl.packing`; advantages are then [S] or [..., T].

    Returns:
        [..., T], in the unit of the advantages, without gradient; exactly 0 where masked.
    """
    check_choice("credit", credit, TOKEN_CREDITS)
    if credit == "immediate" and gamma != 1.0:
        raise ValueError(f"gamma={gamma!r} would go unread with credit='immediate': leave it out")
    check_not_negative("beta", beta)
    check_float("kl_penalty", kl_penalty)
    if sequence_ids is not None:
        packing = Packing(sequence_ids)
        of_sequences = packing.pad_advantages(advantages)
        padded, counts = packing.pad(kl_penalty), packing.counted(mask)
        folded = fold_kl(of_sequences, padded, counts, beta=beta, credit=credit, gamma=gamma)
        return packing.pack(folded)
    counted = as_mask("mask", mask, "kl_penalty", kl_penalty)
    token_advantages = per_token_advantages(advantages, "kl_penalty", kl_penalty).detach()
    kl = torch.where(counted, at_least_float32(kl_penalty.detach()), 0.0)
    owed = reward_to_go(kl, gamma=gamma) if credit == "to_go" else kl
    return torch.where(counted, token_advantages - beta * owed, 0.0)


@checked
def process_supervision(
    step_rewards: Tensor | Sequence[Sequence[float] | Tensor],
    step_ends: Tensor | Sequence[Sequence[int] | Tensor],
    lengths: Tensor | Sequence[int],
    *,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    r"""Per-token advantages from rewards of reasoning steps.

    .. math:: A_{i,t} = \sum_{j\,:\,e_{i,j} \ge t}
        \frac{R_{i,j} - \mathrm{mean}(R)}{\mathrm{std}(R) + \epsilon}

    Mean and standard deviation are taken over *all* step rewards of the group, and :math:`e_{i,j}`
    is the position of the last token of step :math:`j` of output :math:`i`, counted from 0. A
    token is credited with every step that ends at or after it, so an output of many steps above
    the mean collects more than one of few.

    Equation: ``process_supervision``
    Source: Shao et al. (2024), DeepSeekMath, process supervision.

    Args:
        step_rewards: one list of rewards per output of a group; or [..., G, K], padded. Lists of
            Python numbers are read in torch's default dtype.
        step_ends: positions in the same layout, strictly increasing along an output. In the padded
            layout a negative position marks padding, which comes last.
        lengths: [..., G], tokens in each output.
        ddof: 1 for the sample standard deviation (torch's default), 0 for the population's.
        eps: added to the standard deviation, at least 0.

    Returns:
        [..., G, T] with T the largest length, dimensionless, without gradient; exactly 0 past the
        last step of an output, and everywhere if all step rewards of the group are equal.

    Raises:
        ValueError: on a group of one, or step ends that are not increasing positions within the
            output.
    """
    step_rewards, step_ends, lengths = _step_tensors(step_rewards, step_ends, lengths)
    _check_steps(step_rewards, step_ends, lengths)
    is_step = step_ends >= 0
    standardised = standardise(
        step_rewards.flatten(-2), is_step.flatten(-2), ddof=ddof, eps=eps
    ).unflatten(-1, step_rewards.shape[-2:])
    width = int(lengths.max()) if lengths.numel() else 0
    position = torch.where(is_step, step_ends, width)  # padding lands in a column that is dropped
    at_step_ends = standardised.new_zeros(*lengths.shape, width + 1)
    at_step_ends = at_step_ends.scatter_add(-1, position, standardised)[..., :width]
    return reward_to_go(at_step_ends).to(at_least_float32(step_rewards).dtype)


def _step_tensors(
    step_rewards: Tensor | Sequence,
    step_ends: Tensor | Sequence,
    lengths: Tensor | Sequence,
) -> tuple[Tensor, Tensor, Tensor]:
    """The padded layout, whichever layout came in."""
    if not isinstance(step_rewards, Tensor):
        if not isinstance(step_rewards, (list, tuple)):
            raise ValueError(f"step_rewards must be a tensor or lists, got {type(step_rewards)}")
        if not isinstance(step_ends, (list, tuple)):
            raise ValueError(f"step_ends must be lists, as step_rewards is: got {type(step_ends)}")
        step_rewards, step_ends = _pad_lists(step_rewards, step_ends)
    check_float("step_rewards", step_rewards)
    device = step_rewards.device
    return (
        step_rewards,
        _tensor("step_ends", step_ends, device),
        _tensor("lengths", lengths, device),
    )


def _tensor(name: str, numbers: object, device: torch.device) -> Tensor:
    try:
        return torch.as_tensor(numbers, device=device)
    except (TypeError, RuntimeError):
        raise ValueError(f"{name} must be a tensor or lists, got {type(numbers)}") from None


def _pad_lists(step_rewards: Sequence, step_ends: Sequence) -> tuple[Tensor, Tensor]:
    """One list of steps per output as [G, K], with the step ends of padding at -1."""
    if not step_rewards or len(step_rewards) != len(step_ends):
        raise ValueError(
            f"step_ends has {len(step_ends)} outputs but step_rewards has {len(step_rewards)}: "
            "give one list per output of the group"
        )
    rewards = [
        row if isinstance(row, Tensor) else torch.tensor(row, dtype=default_float())
        for row in step_rewards
    ]
    ends = [torch.as_tensor(row) for row in step_ends]
    for output, (reward, end) in enumerate(zip(rewards, ends, strict=True)):
        if reward.ndim != 1 or reward.shape != end.shape:
            raise ValueError(
                f"step_ends of output {output} has shape {tuple(end.shape)} but step_rewards has "
                f"{tuple(reward.shape)}: give one flat list per output, of equal length"
            )
        if (end < 0).any():
            raise ValueError(f"step_ends of output {output} holds a negative position")
    ends = [end if end.numel() else end.long() for end in ends]  # an empty list has no int dtype
    return (
        pad_sequence(rewards, batch_first=True),
        pad_sequence(ends, batch_first=True, padding_value=-1),
    )


def _check_steps(step_rewards: Tensor, step_ends: Tensor, lengths: Tensor) -> None:
    check_same_shape("step_rewards", step_rewards, "step_ends", step_ends)
    if step_rewards.ndim < 2 or step_rewards.shape[-2] < 2:
        raise ValueError(
            f"step_rewards has shape {tuple(step_rewards.shape)}: a group needs at least two "
            "outputs, shape [..., G, K], because an advantage compares them"
        )
    if lengths.shape != step_rewards.shape[:-1]:
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)}: give one length an output, "
            f"{tuple(step_rewards.shape[:-1])}"
        )
    for name, tensor in (("step_ends", step_ends), ("lengths", lengths)):
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"{name} must hold integers, got {tensor.dtype}")
    if (lengths < 0).any():
        raise ValueError("lengths must be >= 0")
    is_step = step_ends >= 0
    if (is_step[..., 1:] & ~is_step[..., :-1]).any():
        raise ValueError("step_ends has a step after padding: negative positions must come last")
    if (is_step[..., 1:] & (step_ends[..., 1:] <= step_ends[..., :-1])).any():
        raise ValueError("step_ends must be strictly increasing along each output")
    if (step_ends >= lengths.unsqueeze(-1)).any():
        raise ValueError(
            "step_ends must be below the length of its output: positions are 0-based, so the last "
            "token of an output of length n is at n - 1"
        )
