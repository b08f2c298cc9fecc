r"""The loss of one optimizer step, per run: the policy objective plus beta times the KL.

Where beta goes: from ``Variant.beta`` to :class:`KLTerms`, which multiplies it to the KL. A KL in
the reward is subtracted from the advantages (:func:`make_batch`), a KL in the loss is added to the
policy loss (:func:`compute_step`). The trainer differentiates the sum of the runs' losses.

Runs whose variants agree in a part are computed together, in groups; runs without it get exact
zeros, not ``0 *`` something that may overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.records.config import Run, RunConfig
from analysis.records.variants import (
    Correction,
    Distillation,
    Objective,
    Truncation,
    refuse_verifier,
)
from analysis.training import metrics
from analysis.training.advantages import AdvantageTerms
from analysis.training.ensembles import Ensembles
from analysis.training.environment import PopulationPolicy, Teacher, Weights
from analysis.training.population import Groups, Rows, run_uniforms
from analysis.training.precision import dtype_of
from analysis.training.rollout import Batch, at_temperature, token_logp
from analysis.training.sampling import SampledBatch
from kl_term.kl.choice import KLChoice
from kl_term.kl.control import control_sums
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.importance import effective_sample_size
from kl_term.kl.term import KLTerm
from kl_term.kl.truncated_prefix import truncated_prefix_coefficients
from kl_term.kl.truncation import masked_logits
from kl_term.objectives.aggregation import token_weights
from kl_term.objectives.guidance import annealed, low_reward_mask
from kl_term.objectives.losses import policy_loss
from kl_term.objectives.masking import off_policy_sequence_mask
from kl_term.objectives.merged import merged_loss, merged_reward
from kl_term.objectives.mirror_descent import mirror_descent_loss
from kl_term.objectives.mismatch import mismatch_weight
from kl_term.objectives.preference import dpo_loss

# The KL to the reference, and to the teacher of a distillation.


class Views(NamedTuple):
    """What a KL may read: of the policy, of its sampler, and of its target. M runs.

    The target is the reference, or the teacher.
    """

    logp: Tensor  #: [M, P, G, T], with gradient
    old_logp: Tensor  #: [M, P, G, T]
    target_logp: Tensor  #: [M, P, G, T]
    logits: Tensor  #: [M, P, G, T, V], at the sampling temperature, with gradient
    target_logits: Tensor  #: [M, P, G, T, V], at the sampling temperature
    mask: Tensor  #: [M, P, G, T]
    on: Tensor | None = None  #: [M, P, G, 1] bool, completions on which it acts; None = all

    @classmethod
    def of(cls, logp: Tensor, logits: Tensor, batch: Batch, *, teacher: bool = False) -> Views:
        """The policy's log-probs and logits beside those of a batch."""
        target, on = (batch.ref_logp, batch.ref_logits), batch.kl_on
        if teacher:
            target, on = (batch.teacher_logp, batch.teacher_logits), None
        rollout = batch.rollout
        return cls(logp, rollout.old_logp, target[0], logits, target[1], rollout.mask, on)


class TermKey(NamedTuple):
    """What runs share whose KL term is computed together."""

    term: KLTerm
    order: str
    truncation: Truncation | None


class KLTerms:
    """The KL term of each run.

    Args:
        choices: one a run; None for a run that has none, or has it inside its objective.
        orders: one a run: is a penalty subtracted ``after`` the baseline, or ``before`` it?
        coefficients: one a run.
        truncations: one a run, of the ratio of its loss; by default none has one.
    """

    def __init__(
        self,
        choices: Sequence[KLChoice | None],
        orders: Sequence[str],
        coefficients: Sequence[float],
        dtype: torch.dtype,
        device: torch.device,
        truncations: Sequence[Truncation | None] | None = None,
    ) -> None:
        terms = [choice and KLTerm(**dict(choice)) for choice in choices]
        self.placements = {term.placement for term in terms if term is not None}
        parts = zip(terms, orders, truncations or [None] * len(terms), strict=True)
        keys = [None if part[0] is None else TermKey(*part) for part in parts]
        self.groups: Groups[TermKey | None] = Groups(keys, device)
        #: [M, 1, 1, 1]
        self.coefficients = torch.tensor(coefficients, dtype=dtype, device=device)
        self.coefficients = self.coefficients.view(-1, 1, 1, 1)
        #: [M], is the weight of a run's control variate fitted? And what it is now, [M, 1, 1, 1].
        self.fitted = [term is not None and term.control == "fitted" for term in terms]
        numbers = [1.0 if t is None or t.control == "fitted" else t.control for t in terms]
        self.controls = torch.tensor(numbers, dtype=dtype, device=device).view(-1, 1, 1, 1)

    def loss(self, views: Views) -> Tensor:
        """[M, P, G, T]: coefficient times each run's KL loss per token, with gradient."""

        def of_group(key: TermKey, rows: Rows) -> Tensor:
            logits = {}
            if key.term.reads_logits:
                logits = {"logits": views.logits[rows], "ref_logits": views.target_logits[rows]}
            logp, target_logp = views.logp[rows], views.target_logp[rows]
            old_logp, mask = views.old_logp[rows], views.mask[rows]
            if key.truncation is not None:
                return truncated_loss(key.truncation, logp, target_logp, old_logp, mask)
            return key.term.loss(
                logp,
                target_logp,
                old_logp=old_logp,
                mask=mask,
                control=self.controls[rows],
                **logits,
            )

        if "loss" not in self.placements:
            return torch.zeros_like(views.logp)
        return self.coefficients * acting(self._map("loss", None, of_group, views.logp), views.on)

    def control_sums(self, views: Views) -> Tensor | None:
        """[M, 2]: what a batch says of the weights of later ones; None where none is fitted."""
        if not any(self.fitted):
            return None
        with torch.no_grad():
            sampled = (views.logp, views.target_logp, views.old_logp)
            return control_sums(*sampled, views.mask).flatten(1, 2).sum(1)

    def penalty(
        self, old_logp: Tensor, target_logp: Tensor, mask: Tensor, on: Tensor | None = None
    ) -> Tensor:
        """[M, P, G, T]: coefficient times the KL to go, of penalties after the baseline.

        ``on`` [M, P, G, 1] bool says on which completions they act; None = on all.
        """

        def of_group(key: TermKey, rows: Rows) -> Tensor:
            return key.term.penalty(old_logp[rows], target_logp[rows], mask=mask[rows])

        return self.coefficients * acting(self._map("reward", "after", of_group, old_logp), on)

    def completion_penalty(
        self, old_logp: Tensor, target_logp: Tensor, mask: Tensor, on: Tensor | None = None
    ) -> Tensor:
        """[M, P, G]: coefficient times the KL of completions, of penalties before the baseline;
        ``on`` as in :meth:`penalty`."""

        def of_group(key: TermKey, rows: Rows) -> Tensor:
            return key.term.completion_penalty(old_logp[rows], target_logp[rows], mask=mask[rows])

        coefficients = self.coefficients.squeeze(-1)
        whole = self._map("reward", "before", of_group, old_logp[..., 0])
        return coefficients * acting(whole, None if on is None else on.squeeze(-1))

    def _map(
        self,
        placement: str,
        order: str | None,
        function: Callable[[TermKey, Rows], Tensor],
        like: Tensor,
    ) -> Tensor:
        """A function of the groups of one placement and order; zeros for the others."""
        if placement not in self.placements:
            return torch.zeros_like(like)

        def of_group(key: TermKey | None, rows: Rows) -> Tensor:
            if key is None or key.term.placement != placement or order not in (None, key.order):
                return torch.zeros_like(like[rows])
            return function(key, rows)

        return self.groups.map(of_group)


def truncated_loss(
    truncation: Truncation, logp: Tensor, ref_logp: Tensor, old_logp: Tensor, mask: Tensor
) -> Tensor:
    """[m, P, G, T]: what has, under weights that the tokens of a completion share, the gradient of
    k3 under a truncated prefix ratio; its value is no KL."""
    cap = math.inf if truncation.cap is None else truncation.cap
    coefficients = truncated_prefix_coefficients(
        logp, ref_logp, old_logp, mask, cap=cap, window=truncation.window
    )
    return torch.where(mask, coefficients * logp, 0.0)


def acting(values: Tensor, on: Tensor | None) -> Tensor:
    """KLs where they act, 0 elsewhere; all of them where ``on`` is None."""
    return values if on is None else torch.where(on, values, 0.0)


# The policy objective.


class Key(NamedTuple):
    """What runs of one group share."""

    objective: Objective
    correction: Correction
    #: Coefficient of the KL that the objective itself holds.
    beta: float


class PolicyLoss(NamedTuple):
    """Of one optimizer step. M runs."""

    losses: Tensor  #: [M], with gradient
    log_ratio: Tensor  #: [M, P, G, T], of the policy to its sampler, no gradient; 0 where masked
    clipped: Tensor  #: [M, P, G, T] bool, where the clip changes the gradient
    used: Tensor  #: [M, P, G, T] bool, counted tokens whose policy term is not left out


class PolicyTerms:
    """The objective and correction of each run."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.groups = Groups([_key(run) for run in runs], device)
        self.aggregations = Groups([m.variant.objective.aggregation for m in runs], device)

    def token_weights(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """[M, P, G, T]: weights within each run, of means over the kept groups alone.

        Tokens that are not trained on count in the means and weigh nothing.
        """
        counted = batch.rollout.mask & batch.kept[..., None, None]

        def of_mode(mode: str, rows: Rows) -> Tensor:
            weights = torch.vmap(partial(token_weights, mode=mode, dtype=dtype))(counted[rows])
            if mode == "token_mean":
                return weights
            return weights * shares(batch.kept[rows], dtype)[..., None, None]

        return self.aggregations.map(of_mode) * batch.trained

    def loss(self, logp: Tensor, logits: Tensor, batch: Batch, weights: Tensor) -> PolicyLoss:
        """Losses of all runs.

        Args:
            logp: [M, P, G, T], of the sampled tokens, with gradient.
            logits: [M, P, G, T, V], at the sampling temperature, with gradient.
            weights: [M, P, G, T], of each token in the loss.
        """
        parts = [
            _policy_loss(key, logp[rows], logits, batch.of_runs(rows), weights, rows)
            for key, rows, _ in self.groups
        ]
        return PolicyLoss(*(self.groups.join(tensors) for tensors in zip(*parts, strict=True)))


def shares(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, P]: what turns a mean over all groups into one over the kept ones."""
    weights = kept.to(dtype)
    return weights * (kept.shape[-1] / weights.sum(dim=-1, keepdim=True).clamp(min=1))


def _policy_loss(
    key: Key, logp: Tensor, logits: Tensor, batch: Batch, weights: Tensor, rows: Rows
) -> PolicyLoss:
    """The terms of runs with one key; ``logits`` and ``weights`` are of the whole population."""
    objective, correction, _ = key
    rollout, weights = batch.rollout, weights[rows]
    old_logp, mask = rollout.old_logp, rollout.mask
    if correction.keep_sampling_mask:
        kept = masked_logits(logits[rows], rollout.keep.expand_as(logits[rows]))
        logp, old_logp = token_logp(kept, rollout.completions, 1.0), rollout.sampler_logp
    log_ratio = torch.where(mask, logp.detach() - old_logp, 0.0)
    if objective.kind in ("mirror_descent", "dpo"):
        losses = completion_losses(objective, logp, old_logp, batch)
        return PolicyLoss(losses, log_ratio, torch.zeros_like(mask), mask)
    used = mask & (weights != 0)
    if correction.mask_truncated:
        used = used & batch.finished.unsqueeze(-1)
    if correction.sequence_mask_delta is not None:
        used = used & off_policy_sequence_mask(
            logp, old_logp, batch.outcomes, mask, delta=correction.sequence_mask_delta
        )
    per_token, clipped = _token_terms(key, logp, old_logp, batch)
    if correction.mismatch != "none":
        factors = mismatch_weight(
            old_logp,
            rollout.sampler_logp,
            mask,
            kind=correction.mismatch,
            bound=correction.bound,
            level=correction.mismatch_level,
        )
        per_token, used = per_token * factors, used & (factors > 0)
    losses = (weights * torch.where(used, per_token, 0.0)).flatten(1).sum(dim=1)
    return PolicyLoss(losses, log_ratio, clipped, used)


def completion_losses(objective: Objective, logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
    """[m]: mean over prompts of an objective on whole completions."""
    mask, rewards = batch.rollout.mask, batch.rewards
    whole, old = (torch.where(mask, part, 0.0).sum(dim=-1) for part in (logp, old_logp))
    if objective.kind == "mirror_descent":
        baseline = rewards.mean(dim=-1, keepdim=True).expand_as(rewards)
        losses = mirror_descent_loss(whole, old, rewards, baseline, tau=objective.tau)
        return (shares(batch.kept, losses.dtype).unsqueeze(-1) * losses).flatten(1).mean(dim=1)
    reference = torch.where(mask, batch.ref_logp, 0.0).sum(dim=-1)
    best, worst = rewards.argmax(dim=-1, keepdim=True), rewards.argmin(dim=-1, keepdim=True)
    chosen = (part.gather(-1, place) for place in (best, worst) for part in (whole, reference))
    logp_w, ref_logp_w, logp_l, ref_logp_l = chosen
    losses = dpo_loss(logp_w, logp_l, ref_logp_w, ref_logp_l, beta=objective.tau)
    differs = rewards.gather(-1, best) > rewards.gather(-1, worst)
    losses = torch.where(differs, losses, 0.0).squeeze(-1)
    return (shares(batch.kept, losses.dtype) * losses).mean(dim=1)


def _token_terms(key: Key, logp: Tensor, old_logp: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Per-token loss and where it is clipped."""
    objective, mask = key.objective, batch.rollout.mask
    clip = {"epsilon_low": objective.epsilon_low, "epsilon_high": objective.epsilon_high}
    if objective.kind != "grpo_off_policy" or key.beta == 0.0:
        output = policy_loss(
            logp,
            old_logp=old_logp,
            advantages=batch.advantages,
            mask=mask,
            kind=objective.kind,
            **clip,
        )
        return output.per_token, output.clipped
    kl = {"beta": key.beta, "reading": objective.reading}
    inputs = (logp, batch.ref_logp, old_logp, batch.advantages, mask)
    merged = merged_reward(*inputs, **kl).detach()
    output = policy_loss(
        logp.detach(), old_logp=old_logp, advantages=merged, mask=mask, kind=objective.kind, **clip
    )
    return merged_loss(*inputs, **kl, **clip), output.clipped


def _key(run: Run) -> Key:
    variant = run.variant
    beta = variant.beta if variant.separate_kl is None else 0.0
    return Key(variant.objective, variant.correction, beta)


# All terms of a population.


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
    #: [M, 2], of :meth:`KLTerms.control_sums`.
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
