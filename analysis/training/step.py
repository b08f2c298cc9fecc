"""The loss of one optimizer step, per member: clipped policy loss plus KL term."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.kl.importance import effective_sample_size
from analysis.objectives.advantages import fold_kl, group_normalise
from analysis.objectives.aggregation import token_weights
from analysis.objectives.losses import policy_loss
from analysis.training import metrics
from analysis.training.config import RunConfig
from analysis.training.kl_term import KLTerm
from analysis.training.rollout import Rollout, token_logp
from analysis.training.setting import PopulationPolicy, ReplayingPolicy, Weights

#: A completion weighs the same however long it is; so does each of its tokens.
AGGREGATION = "seq_mean_token_mean"


class Batch(NamedTuple):
    """A rollout with everything that stays fixed while it is trained on; axes [M, P, ...]."""

    rollout: Rollout
    ref_logits: Tensor  #: [M, P, G, T, V], of the reference, at the sampling temperature
    ref_logp: Tensor  #: [M, P, G, T]
    advantages: Tensor  #: [M, P, G, T], with the KL in the reward folded in

    def of_prompts(self, prompts: slice) -> Batch:
        """The same for some of the prompts."""
        rollout = Rollout(*(part[:, prompts].contiguous() for part in self.rollout))
        return Batch(rollout, *(part[:, prompts].contiguous() for part in self[1:]))


class StepOutput(NamedTuple):
    """Of one optimizer step."""

    losses: Tensor  #: [M], with gradient; members are independent, so their sum serves all
    tensors: dict[str, Tensor]  #: [M, ...], in order of computation, for the finiteness check
    metrics: dict[str, Tensor]  #: [M] each


@torch.no_grad()
def make_batch(
    policy: PopulationPolicy,
    reference: Weights,
    config: RunConfig,
    kl_term: KLTerm,
    rollout: Rollout,
    rewards: Tensor,
) -> Batch:
    r"""Reference log-probs and advantages of a rollout.

    The rewards are normalised within their group first; the KL in the reward is subtracted after,
    so that beta is not divided by the standard deviation of the rewards:

    .. math:: \hat R_t = A - \beta \sum_{s \ge t} k_s \ \text{(to\_go)}, \qquad
        \hat R_t = A - \beta\, k_t \ \text{(immediate)}
    """
    ref_logits = policy.logits(reference, rollout.prompts, rollout.inputs) / config.temperature
    ref_logp = token_logp(ref_logits, rollout.completions, temperature=1.0)
    penalty = kl_term.penalty(rollout.old_logp, ref_logp, rollout.mask)
    advantages = fold_kl(
        group_normalise(rewards), penalty, rollout.mask, beta=1.0, credit=config.kl_credit
    )
    return Batch(rollout, ref_logits, ref_logp, advantages)


def member_token_weights(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, P, G, T]: weights within each member; none counts the others' tokens."""
    return torch.vmap(partial(token_weights, mode=AGGREGATION, dtype=dtype))(mask)


def batch_logits(
    policy: PopulationPolicy | ReplayingPolicy,
    weights: Weights,
    config: RunConfig,
    batch: Batch,
    past: Any = None,
) -> Tensor:
    """[M, P, G, T, V], at the sampling temperature, as a function of ``weights``.

    ``past`` holds the activations of a :class:`ReplayingPolicy` that sampled this very batch with
    these weights.
    """
    if past is not None:
        return policy.replay(weights, past) / config.temperature
    return policy.logits(weights, *batch.rollout[:2]) / config.temperature


def compute_step(
    policy: PopulationPolicy | ReplayingPolicy,
    weights: Weights,
    config: RunConfig,
    kl_term: KLTerm,
    batch: Batch,
    *,
    measure: bool,
    past: Any = None,
) -> StepOutput:
    """Losses, tensors to check and metrics of the members at ``weights``.

    ``measure`` adds the metrics of the policy, which read the whole vocabulary. ``past`` is as in
    :func:`batch_logits`.
    """
    _, _, completions, old_logp, mask = batch.rollout
    logits = batch_logits(policy, weights, config, batch, past)
    logp = token_logp(logits, completions, temperature=1.0)
    policy_terms = policy_loss(
        logp,
        old_logp,
        batch.advantages,
        mask,
        kind="grpo",
        epsilon_low=config.epsilon_low,
        epsilon_high=config.epsilon_high,
        aggregation=AGGREGATION,
    )
    kl = kl_term.loss(logp, batch.ref_logp, old_logp, logits, batch.ref_logits, mask)
    per_token = member_token_weights(mask, logp.dtype) * (policy_terms.per_token + kl)
    losses = per_token.flatten(1).sum(dim=1)
    measured = {
        "clip_fraction": metrics.member_mean(policy_terms.clipped.to(logp.dtype), mask),
        "ratio_ess": effective_sample_size(
            logp.detach().flatten(1), old_logp.flatten(1), mask.flatten(1)
        ),
    }
    if measure:
        measured |= metrics.policy_metrics(logp, batch.ref_logp, logits, batch.ref_logits, mask)
    tensors = {
        "old_logp": old_logp,
        "ref_logp": batch.ref_logp,
        "advantages": batch.advantages,
        "logp": logp,
        "KL loss": kl,
        "loss": losses,
    }
    return StepOutput(losses, {k: v.detach() for k, v in tensors.items()}, measured)
