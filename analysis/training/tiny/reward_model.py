r"""A reward model: the task's reward, learned from labelled answers of a start.

.. math:: R(x, y) = \sum_t z_t(x, y_{<t})_{y_t}

over counted tokens, with :math:`z` the logits of a network of the policy's kind. It is fitted once
for each start, before any run, to answers that the start gives; far from these nothing holds it to
the truth. The runs of a start are rewarded by it, and never see the task's own reward. Several
members are fitted to the same labels, from other weights and in another order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from analysis.records.config import VOCAB_SIZE, PolicyConfig, RewardModel, SortTask, TrainConfig
from analysis.training.ensembles import bounds, combined, spread
from analysis.training.optimizer import PopulationAdamW, clip_rows
from analysis.training.population import run_uniforms
from analysis.training.precision import dtype_of
from analysis.training.proxied import Rating
from analysis.training.rollout import completion_inputs, sample
from analysis.training.tiny.policy import Policy, make_policy
from analysis.training.tiny.tasks import Sorting

#: Prompts whose answers are labelled at once; more labels begin with those of fewer.
CHUNK = 500
#: From the seed of a start to those of its models' first weights, which no start has.
FIRST_MEMBER = 10**9


class Ensembles:
    """Networks that score answers, an ensemble of them for each start.

    Args:
        task: says which tokens count.
        config: with a reward model; its ensemble is that of runs whose variant names none.
        weights: [K, k, N], of the k models of each of K starts: see :func:`fitted`.
    """

    def __init__(self, task: Sorting, config: TrainConfig, weights: Tensor) -> None:
        self.task, self.weights = task, weights
        self.ensemble = config.reward_model.ensemble
        self.network = _network(config.reward_model, config.task)

    def __len__(self) -> int:
        return len(self.weights)

    def rate(self, prompts: Tensor, completions: Tensor, starts: Tensor) -> Rating:
        """See :class:`~analysis.training.proxied.RewardModels`."""
        chosen = self.weights[starts]
        each = chosen.shape[1]  # members of all runs at once: one forward pass
        given = (part.repeat_interleave(each, dim=0) for part in (prompts, completions))
        scores = scored(self.network, chosen.flatten(0, 1), self.task, *given)
        members = scores.unflatten(0, (-1, each)).movedim(1, -1)
        return Rating(combined(self.ensemble, members), members if each > 1 else None)


def scored(
    network: Policy, weights: Tensor, task: Sorting, prompts: Tensor, completions: Tensor
) -> Tensor:
    """[M, P, G]: the scores of completions [M, P, G, T] by weights [M, N] of one model a run."""
    inputs = completion_inputs(completions, task.bos_token)
    logits = network.logits(network.unflatten(weights), prompts, inputs)
    of_tokens = logits.gather(-1, completions.unsqueeze(-1)).squeeze(-1)
    return torch.where(task.completion_mask(completions), of_tokens, 0.0).sum(dim=-1)


def fitted(config: TrainConfig, start: Tensor) -> Tensor:
    """Weights [K, k, N] of the k models of each of the starts [K, N']."""
    model, task = config.reward_model, Sorting(config.task)
    network = _network(model, config.task)
    prompts, completions, labels = labelled(config, start)
    seeds = range(config.start.seed, config.start.seed + config.start.count)
    members = []
    for member in range(model.members):
        own = [seed + (1 + member) * FIRST_MEMBER for seed in seeds]
        weights = torch.cat([network.initial_weights(seed, dtype_of(config)) for seed in own])
        weights.requires_grad_()
        optimizer = PopulationAdamW(weights, model.learning_rate, weight_decay=0.0)
        for update in range(model.updates):
            drawn = run_uniforms(own, "label batches", update, (model.batch_size,), torch.float64)
            places = (drawn * model.labels).long().clamp(max=model.labels - 1)
            rows = torch.arange(len(places)).unsqueeze(-1), places
            scores = scored(network, weights, task, prompts[rows], completions[rows])
            losses = loss(model.kind, scores, labels[rows])
            (gradient,) = torch.autograd.grad(losses.sum(), weights)
            optimizer.step(clip_rows(gradient, config.max_grad_norm).gradient)
        members.append(weights.detach())
    return torch.stack(members, dim=1)


def start_spreads(config: TrainConfig, start: Tensor, weights: Tensor) -> Tensor:
    """[K, 2]: :func:`~analysis.training.ensembles.bounds` of the starts [K, N'].

    Of so many fresh answers of each start as are labelled at once, one a prompt, at the run's
    temperature; models have weights [K, k, N].
    """
    task, policy = Sorting(config.task), make_policy(config)
    seeds = range(config.start.seed, config.start.seed + config.start.count)
    drawn = run_uniforms(seeds, "spread prompts", 0, (CHUNK, task.draws_per_prompt), torch.float64)
    shape = (CHUNK, 1, task.completion_length)
    noise = run_uniforms(seeds, "spread sampling", 0, shape, dtype_of(config))
    prompts, views = task.prompts(drawn), policy.unflatten(start)
    answers = sample(policy, views, task, prompts, noise, config.temperature).completions
    rating = Ensembles(task, config, weights).rate(prompts, answers, torch.arange(len(start)))
    return bounds(spread(rating.members).flatten(1))


def loss(kind: str, scores: Tensor, labels: Tensor) -> Tensor:
    r"""[K]: what each model is fitted by.

    .. math:: (R - r)^2 \;(\text{scores}), \qquad
        -\log \sigma\big(R(\text{higher}) - R(\text{lower})\big) \;(\text{pairs})

    with :math:`r` the label; of equal labels the mean over both orders.

    Args:
        scores, labels: [K, B, G], with one answer a prompt, or two.
    """
    if kind == "scores":
        return (scores - labels).square().mean(dim=(1, 2))
    gap = scores[..., 0] - scores[..., 1]
    higher = (torch.sign(labels[..., 0] - labels[..., 1]) + 1) / 2
    return (higher * softplus(-gap) + (1 - higher) * softplus(gap)).mean(dim=1)


def labelled(config: TrainConfig, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Answers of each start at the run's temperature, and their rewards with the labels' error.

    Returns:
        Prompts [K, B, L], completions [K, B, G, T] and labels [K, B, G], of B = ``labels`` prompts
        with G = 1 answer each, or two where pairs are labelled.
    """
    model, task, policy = config.reward_model, Sorting(config.task), make_policy(config)
    seeds = range(config.start.seed, config.start.seed + config.start.count)
    group = 2 if model.kind == "pairs" else 1
    views, parts = policy.unflatten(start), []
    for chunk in range(math.ceil(model.labels / CHUNK)):
        shape = (CHUNK, task.draws_per_prompt)
        prompts = task.prompts(run_uniforms(seeds, "label prompts", chunk, shape, torch.float64))
        shape = (CHUNK, group, task.completion_length)
        noise = run_uniforms(seeds, "label sampling", chunk, shape, dtype_of(config))
        rollout = sample(policy, views, task, prompts, noise, config.temperature)
        rewards = task.score(prompts, rollout.completions).rewards.to(dtype_of(config))
        drawn = run_uniforms(seeds, "label noise", chunk, (2, CHUNK, group), torch.float64)
        error = (-2 * torch.log1p(-drawn[:, 0])).sqrt() * (2 * math.pi * drawn[:, 1]).cos()
        parts.append((prompts, rollout.completions, rewards + model.noise * error.to(rewards)))
    prompts, completions, labels = (torch.cat(of, dim=1) for of in zip(*parts, strict=True))
    kept = slice(model.labels)
    return prompts[:, kept], completions[:, kept], labels[:, kept]


def _network(model: RewardModel, task: SortTask) -> Policy:
    size = PolicyConfig(width=model.width)
    return Policy(size, VOCAB_SIZE, task.prompt_length + task.completion_length)
