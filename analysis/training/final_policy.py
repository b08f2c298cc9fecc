"""The policy after its last update, measured on answers that it was not trained on.

One update has too few answers for a KL: with 72 of 8 tokens the noise of its logarithm is as large
as all else in which the runs of one variant differ. Here prompts and noise have streams of their
own, so a measurement changes no digit of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from analysis.records.config import RunConfig
from analysis.records.metrics import PROXY_METRICS
from analysis.training.environment import Environment, Scores, Weights
from analysis.training.metrics import elementwise_mean, rollout_metrics, run_mean
from analysis.training.population import run_uniforms, uploaded
from analysis.training.precision import dtype_of
from analysis.training.rollout import at_temperature, sample
from kl_term.kl import divergences


@torch.no_grad()
def final_metrics(
    config: RunConfig,
    seeds: Sequence[int],
    environment: Environment,
    weights: Tensor,
    reference: Weights,
    score: Callable[[Tensor, Tensor], Scores],
) -> dict[str, Tensor]:
    """:data:`~analysis.records.metrics.FINAL_METRICS` [M] of weights [M, N].

    ``config.final_answers`` answers, rounded up to whole rollouts of the size of an update's. Each
    is a mean over rollouts; equal seeds see equal prompts and noise. ``score`` is that of
    :class:`~analysis.training.sampling.Samplers`.
    """
    views = environment.policy.unflatten(weights)
    rollouts = math.ceil(config.final_answers / (config.num_prompts * config.group_size))
    given = (config, seeds, environment, views, reference, score)
    rows = [_of_rollout(*given, number) for number in range(rollouts)]
    means = {name: elementwise_mean([row[name] for row in rows]) for name in rows[0]}
    kl = means["final_reverse_kl"]
    squares = elementwise_mean([(row["final_reverse_kl"] - kl) ** 2 for row in rows])
    return means | {"final_kl_error": (squares / max(rollouts - 1, 1)).sqrt()}


def _of_rollout(
    config: RunConfig,
    seeds: Sequence[int],
    environment: Environment,
    views: Weights,
    reference: Weights,
    score: Callable[[Tensor, Tensor], Scores],
    number: int,
) -> dict[str, Tensor]:
    task, policy, device = environment.task, environment.policy, environment.start.device
    shape = (config.num_prompts, task.draws_per_prompt)
    drawn = run_uniforms(seeds, "final prompts", number, shape, torch.float64)
    prompts = task.final_prompts(uploaded(drawn, device))
    shape = (config.num_prompts, config.group_size, task.completion_length)
    noise = run_uniforms(seeds, "final sampling", number, shape, dtype_of(config))
    rollout = sample(policy, views, task, prompts, uploaded(noise, device), config.temperature)
    logits, ref_logits = (
        at_temperature(policy.logits(of, prompts, rollout.inputs), config.temperature)
        for of in (views, reference)
    )
    scores, mask = score(prompts, rollout.completions), rollout.mask
    whole = rollout_metrics(mask, scores, torch.ones_like(mask[..., 0, 0]))
    proxied = [name for name in PROXY_METRICS if name in whole]
    return {
        "final_reward": whole["reward"],
        "final_accuracy": whole["accuracy"],
        "final_reverse_kl": run_mean(divergences.reverse_kl(logits, ref_logits), mask),
        "final_forward_kl": run_mean(divergences.forward_kl(logits, ref_logits), mask),
        **{f"final_{name}": whole[name] for name in proxied},
    }
