r"""The loss of one optimizer step, per run: the policy objective plus beta times the KL.

Where beta goes: from ``Variant.beta`` to ``KLTerms``, which multiplies it to the KL. A KL in
the reward is subtracted from the advantages (:func:`make_batch`), a KL in the loss is added to the
policy loss (:func:`compute_step`). The trainer differentiates the sum of the runs' losses.

Runs whose variants agree in a part are computed together, in groups; runs without it get exact
zeros, not ``0 *`` something that may overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.records.config import Run, RunConfig
from analysis.records.variants import (
    Distillation,
    refuse_verifier,
)
from analysis.training import metrics
from analysis.training.advantages import AdvantageTerms
from analysis.training.ensembles import Ensembles
from analysis.training.environment import PopulationPolicy, Teacher, Weights
from analysis.training.kl_terms import KLTerms, Views
from analysis.training.policy_terms import PolicyTerms
from analysis.training.population import run_uniforms
from analysis.training.precision import dtype_of
from analysis.training.rollout import Batch, at_temperature, token_logp
from analysis.training.sampling import SampledBatch
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.importance import effective_sample_size
from kl_term.objectives.guidance import annealed, low_reward_mask


class UpdateContext(NamedTuple):
    """What depends on the update's number, beside its samples. M runs."""

    noise: Tensor | None  #: [M, P, G] in [0, 1), of noisy rewards; None if no variant has them
    #: [M], weight of each run's distillation at this update; None without a teacher.
    distillation_weights: Tensor | None


def distillation_weight(distillation: Distillation | None, update: int) -> float:
    """The weight of a distillation at an update; 0 without one."""
    if distillation is None:
        return 0.0
    start, end = distillation.weight, distillation.weight_end
    if end is None:
        return start
    return annealed(update, distillation.anneal_updates, start=start, end=end)


class Terms:
    """What the runs of a population optimise: one object for each part of their variants.

    Raises:
        ValueError: a variant needs a teacher and there is none, or reads the verifier where there
            is a reward model.
    """

    def __init__(
        self,
        config: RunConfig,
        runs: Sequence[Run],
        device: torch.device,
        *,
        has_teacher: bool,
    ) -> None:
        variants = [run.variant for run in runs]
        for variant in variants:
            if not has_teacher and (variant.distillation or variant.sampler.by == "teacher"):
                raise ValueError(
                    f"variant {variant.name!r} needs a teacher: set teacher in the config"
                )
            if config.proxied:
                refuse_verifier(variant)
        self.has_teacher = has_teacher
        self.seeds = [run.seed for run in runs]
        self.variants = variants
        self.kl = KLTerms(
            [variant.separate_kl for variant in variants],
            [variant.advantage.kl_order for variant in variants],
            [variant.beta for variant in variants],
            dtype_of(config),
            device,
            [variant.truncation for variant in variants],
        )
        distillations = [variant.distillation for variant in variants]
        self.distillation = KLTerms(
            [None if distillation is None else distillation.kl for distillation in distillations],
            ["after"] * len(runs),
            [1.0] * len(runs),
            dtype_of(config),
            device,
        )
        self.advantages = AdvantageTerms(runs, device)
        self.policy = PolicyTerms(runs, device)

    def context(self, update: int, rewards: Tensor) -> UpdateContext:
        """What depends on the update's number, for rewards [M, P, G]."""
        noise = weights = None
        if self.advantages.noisy:
            noise = run_uniforms(self.seeds, "noise", update, rewards.shape[1:], rewards.dtype)
            noise = noise.to(rewards.device)
        if self.has_teacher:
            of_runs = [distillation_weight(v.distillation, update) for v in self.variants]
            weights = torch.tensor(of_runs, dtype=rewards.dtype).to(rewards.device)
        return UpdateContext(noise, weights)

    def completion_weights(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """[M, P, G, 1]: the weight of the distillation on each completion, from those of runs."""
        rows = []
        for row, variant in enumerate(self.variants):
            weight = weights[row].expand_as(rewards[row])
            if variant.distillation is not None and variant.distillation.only_below is not None:
                weight = weight * low_reward_mask(rewards[row], variant.distillation.only_below)
            rows.append(weight)
        return torch.stack(rows).unsqueeze(-1)


@torch.no_grad()
def make_batch(
    policy: PopulationPolicy,
    reference: Weights,
    config: RunConfig,
    terms: Terms,
    sampled: SampledBatch,
    context: UpdateContext,
    teacher: Teacher | None = None,
    first: Weights | None = None,
    ensembles: Ensembles | None = None,
) -> Batch:
    r"""Log-probs of reference and teacher, and advantages, of a rollout.

    By default the rewards are normalised within their group first; the KL in the reward is
    subtracted after, so that beta is not divided by the standard deviation of the rewards:

    .. math:: \hat R_t = A - \beta \sum_{s \ge t} k_s \ \text{(to\_go)}, \qquad
        \hat R_t = A - \beta\, k_t \ \text{(immediate)}

    The reward-side distillation is subtracted in the same way. With ``first``, a reference from
    which KLs are measured in place of ``reference``, its logits are in the batch too. With
    ``ensembles`` some KLs may act on some completions only.
    """
    rollout, scores = sampled.rollout, sampled.scores
    ref_logits = policy.logits(reference, rollout.prompts, rollout.inputs)
    ref_logits = at_temperature(ref_logits, config.temperature)
    ref_logp = token_logp(ref_logits, rollout.completions, temperature=1.0)
    mask, old_logp = rollout.mask, rollout.old_logp
    on = None if ensembles is None else ensembles.acting(scores, sampled.done)
    before = terms.kl.completion_penalty(old_logp, ref_logp, mask, on)
    outcome = terms.advantages.of_scores(scores, mask, before, context.noise)
    batch = Batch(
        rollout=rollout,
        ref_logits=ref_logits,
        ref_logp=ref_logp,
        rewards=outcome.rewards,
        outcomes=outcome.tokens[..., 0],
        advantages=outcome.tokens - terms.kl.penalty(old_logp, ref_logp, mask, on),
        kept=outcome.kept & sampled.done,
        trained=sampled.trained,
        finished=mask.any(dim=-1) if scores.finished is None else scores.finished,
        kl_on=on,
    )
    if first is not None:
        logits = policy.logits(first, rollout.prompts, rollout.inputs)
        batch = batch._replace(first_logits=at_temperature(logits, config.temperature))
    if teacher is None:
        return batch
    weights = teacher.of_runs(len(scores.rewards))
    logits = teacher.policy.logits(weights, rollout.prompts, rollout.inputs)
    logits = at_temperature(logits, config.temperature)
    logp = token_logp(logits, rollout.completions, temperature=1.0)
    weight = terms.completion_weights(scores.rewards, context.distillation_weights)
    return batch._replace(
        advantages=batch.advantages - weight * terms.distillation.penalty(old_logp, logp, mask),
        teacher_logits=logits,
        teacher_logp=logp,
        distillation_weight=weight,
    )


class StepOutput(NamedTuple):
    """Of one optimizer step."""

    losses: Tensor  #: [M], with gradient; runs are independent, so their sum serves all
    tensors: dict[str, Tensor]  #: [M, ...], in order of computation, for the finiteness check
    metrics: dict[str, Tensor]  #: [M] each
    #: [M, 2], of ``KLTerms.control_sums``.
    control_sums: Tensor | None = None


def compute_step(logits: Tensor, terms: Terms, batch: Batch, *, measure: bool) -> StepOutput:
    """Losses, tensors to check and metrics of the runs.

    Args:
        logits: [M, P, G, T, V], at the sampling temperature, with gradient.
        measure: add the metrics of the policy, which read the whole vocabulary.
    """
    old_logp, mask = batch.rollout.old_logp, batch.rollout.mask
    logp = token_logp(logits, batch.rollout.completions, temperature=1.0)
    weights = terms.policy.token_weights(batch, logp.dtype)
    policy = terms.policy.loss(logp, logits, batch, weights)
    views = Views.of(logp, logits, batch)
    kl, sums = terms.kl.loss(views), terms.kl.control_sums(views)
    if batch.distillation_weight is not None:
        views = Views.of(logp, logits, batch, teacher=True)
        kl = kl + batch.distillation_weight * terms.distillation.loss(views)
    losses = policy.losses + (weights * kl).flatten(1).sum(dim=1)
    measured = {
        "clip_fraction": metrics.run_mean(policy.clipped.to(logp.dtype), mask),
        "ratio_ess": effective_sample_size(
            policy.log_ratio.flatten(1), torch.zeros_like(logp).flatten(1), mask.flatten(1)
        ),
        "used_fraction": metrics.run_mean(policy.used.to(logp.dtype), mask),
    }
    if measure:
        first = batch.ref_logits if batch.first_logits is None else batch.first_logits
        targets = (batch.ref_logp, first, batch.teacher_logits)
        measured |= metrics.policy_metrics(logp, logits, mask, *targets)
    tensors = {
        "old_logp": old_logp,
        "ref_logp": batch.ref_logp,
        "advantages": batch.advantages,
        "logp": logp,
        "KL loss": kl,
        "loss": losses,
    }
    return StepOutput(losses, {k: v.detach() for k, v in tensors.items()}, measured, sums)


# The direction of a run's KL gradient.


class KLObjectives(NamedTuple):
    """Two losses [M], with gradient; the values mean nothing, the gradients do."""

    variant: Tensor
    exact: Tensor


def kl_objectives(terms: Terms, batch: Batch, logits: Tensor) -> KLObjectives:
    r"""What a variant's KL term adds to the loss, and the exact reverse KL with the same weights.

    .. math:: \sum_t w_t\, \beta \big(\ell_t + \rho_t \hat k_t\big) \quad \text{and} \quad
        \sum_t w_t\, \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})(s_t)

    with :math:`\ell` the KL loss, :math:`\hat k` the KL to go of a KL in the reward, and
    :math:`\rho` the ratio to the sampler, unclipped. States count as given: what a token does to
    later states is in neither, unless ``to_go`` credit puts it in the variant's.

    Args:
        logits: [M, P, G, T, V], at the sampling temperature, with gradient.
    """
    rollout = batch.rollout
    old_logp, mask = rollout.old_logp, rollout.mask
    logp = token_logp(logits, rollout.completions, temperature=1.0)
    kl = terms.kl.loss(Views.of(logp, logits, batch))
    ratio = torch.exp(torch.where(mask, logp - old_logp, 0.0))
    exact = torch.where(mask, reverse_kl(logits, batch.ref_logits), 0.0)
    weights = terms.policy.token_weights(batch, logp.dtype)
    to_go = terms.kl.penalty(old_logp, batch.ref_logp, mask, batch.kl_on)
    parts = (kl + ratio * to_go, exact)
    return KLObjectives(*((weights * part).flatten(1).sum(dim=1) for part in parts))


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """[M]: cosine of the rows of [M, N] and [M, N]; NaN where a row is zero."""
    norms = torch.linalg.vector_norm(left, dim=1) * torch.linalg.vector_norm(right, dim=1)
    return torch.linalg.vecdot(left, right, dim=1) / norms


def kl_cosine(objectives: KLObjectives, weights: Tensor) -> Tensor:
    """[M]: :func:`cosine` of the gradients of both objectives in the weights [M, N].

    NaN without a KL term and where the policy is the reference.
    """
    (variant,) = torch.autograd.grad(objectives.variant.sum(), weights, retain_graph=True)
    (exact,) = torch.autograd.grad(objectives.exact.sum(), weights)
    return cosine(variant, exact)
