"""Penalties in the reward: the flow that each drives, and returns with the KL folded in."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis.evidence.policies import flat_error, log_ratios, measured
from kl_term.kl.credit import credit_moments
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import Sequences, sequence_kl_gradient, sequence_probability
from kl_term.kl.surrogates import ESTIMATORS


def penalty_force(log_odds: Tensor, ref_probability: float) -> pd.DataFrame:
    """Push of each penalty on the log-odds of the first of two tokens: ``k(second) - k(first)``,
    natural gradient."""
    logits = torch.stack([log_odds, torch.zeros_like(log_odds)], -1)
    ref = torch.tensor([ref_probability, 1 - ref_probability], dtype=log_odds.dtype)
    logp = logits.log_softmax(-1)
    frames = []
    for name in ("k1", "k2", "k3"):
        penalty = ESTIMATORS[name](logp, ref.log().expand_as(logp))
        force = penalty[:, 1] - penalty[:, 0]
        frames.append(pd.DataFrame({"estimator": name, "log_odds": log_odds, "force": force}))
    return pd.concat(frames, ignore_index=True)


#: How the printed per-token reward can be credited, and PPO's own way.
CREDITS = ("own token only", "every token, to go", "last token, to go")


def folded_return_gradient(
    logits: Tensor,
    ref_logits: Tensor,
    rewards: Tensor,
    sequences: Sequences,
    *,
    beta: float,
    credit: str,
) -> Tensor:
    """[states, vocab]: exact ascent direction of a task reward [N] with the KL folded in.

    ``own token only`` weighs a token with ``R - beta l_t``, ``every token, to go`` passes that
    through the return, ``last token, to go`` gives the reward once.
    """
    mask = sequences.mask
    penalty = beta * log_ratios(logits, ref_logits, sequences)
    everywhere = torch.where(mask, rewards.unsqueeze(-1), 0.0)
    follows = functional.pad(mask[:, 1:], (0, 1))
    once = torch.where(mask & ~follows, rewards.unsqueeze(-1), 0.0)
    returns = {
        CREDITS[0]: everywhere - penalty,
        CREDITS[1]: reward_to_go(everywhere - penalty),
        CREDITS[2]: reward_to_go(once - penalty),
    }[credit]
    return credit_moments(logits, sequences, returns).mean


def folded_return_errors(
    logits: Tensor, ref_logits: Tensor, rewards: Tensor, sequences: Sequences, *, beta: float
) -> pd.Series:
    """Each credit's median relative error against the gradient of ``E[R] - beta KL``, over
    tables."""

    def errors(*case: Tensor) -> dict[str, float]:
        exact = regularised_sequence_gradient(*case, sequences, beta=beta)
        options = {"sequences": sequences, "beta": beta}
        found = {name: folded_return_gradient(*case, **options, credit=name) for name in CREDITS}
        return {name: flat_error(gradient, exact) for name, gradient in found.items()}

    return measured(errors, logits, ref_logits, rewards).quantile(interpolation="lower")


def regularised_sequence_gradient(
    logits: Tensor, ref_logits: Tensor, rewards: Tensor, sequences: Sequences, *, beta: float
) -> Tensor:
    """[states, vocab]: gradient of mean reward minus beta times the sequence KL, by autograd."""
    ascent = grad(lambda at: sequence_probability(at, sequences) @ rewards)(logits)
    return ascent - beta * sequence_kl_gradient(logits, ref_logits, sequences)
