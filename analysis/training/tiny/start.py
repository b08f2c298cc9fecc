"""The supervised start: a policy that solves the task now and then, from labelled examples."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from analysis.records.config import TrainConfig
from analysis.training.cpu import keep_freed_memory
from analysis.training.environment import Environment, Teacher
from analysis.training.metrics import run_mean
from analysis.training.optimizer import PopulationAdamW, clip_rows
from analysis.training.population import run_uniforms
from analysis.training.precision import dtype_of
from analysis.training.proxied import Proxied
from analysis.training.rollout import completion_inputs, token_logp
from analysis.training.tiny.policy import make_policy
from analysis.training.tiny.reward_model import Ensembles, fitted, start_spreads
from analysis.training.tiny.tasks import Sorting


def tiny_environment(config: TrainConfig, device: torch.device | str = "cpu") -> Environment:
    """The tiny policy on the task of ``config``, at its supervised start."""
    start, task = supervised_start(config).to(device), Sorting(config.task)
    spreads = None
    if config.reward_model is not None:
        read = _only(config, "reward_model", "temperature")
        task = Proxied(task, Ensembles(task, config, _fitted(read).to(device)))
        spreads = _spreads(read).to(device) if config.members > 1 else None
    return Environment(task, make_policy(config), start, _teacher(config, device), spreads)


def _only(config: TrainConfig, *names: str) -> TrainConfig:
    """The part of a configuration that a start depends on, and these fields."""
    fields = {"task", "policy", "start", "precision", "max_grad_norm", *names}
    return TrainConfig(**{name: getattr(config, name) for name in fields})


@cache
def _fitted(config: TrainConfig) -> Tensor:
    return fitted(config, supervised_start(config))


@cache
def _spreads(config: TrainConfig) -> Tensor:
    return start_spreads(config, supervised_start(config), _fitted(config))


def _teacher(config: TrainConfig, device: torch.device | str) -> Teacher | None:
    """The teacher of ``config``: a policy of its own size, from its own supervised start."""
    if config.teacher is None:
        return None
    trained = config.model_copy(
        update={"policy": config.teacher.policy or config.policy, "start": config.teacher.start}
    )
    return Teacher(make_policy(trained), supervised_start(trained).to(device))


def supervised_start(config: TrainConfig) -> Tensor:
    """Weights [K, N] after ``config.start.updates`` steps of cross-entropy on right completions.

    A start serves its runs as initial policy and as frozen reference. With one of them, the
    seeds of a population vary prompts and sampling, not the reference.
    """
    return _trained(_only(config)).clone()


@cache
def _trained(config: TrainConfig) -> Tensor:
    keep_freed_memory()
    start, task, policy = config.start, Sorting(config.task), make_policy(config)
    seeds = range(start.seed, start.seed + start.count)
    weights = torch.cat([policy.initial_weights(seed, dtype_of(config)) for seed in seeds])
    weights.requires_grad_()
    optimizer = PopulationAdamW(weights, start.learning_rate, weight_decay=0.0)
    shape = (start.batch_size, task.draws_per_prompt)
    for update in range(start.updates):
        prompts = task.prompts(run_uniforms(seeds, "start", update, shape, torch.float64))
        drawn = run_uniforms(seeds, "fillers", update, shape[:1], torch.float64)
        targets = task.examples(prompts, drawn, start.fillers).unsqueeze(2)  # (K, P, 1, T)
        counted = task.completion_mask(targets)
        logits = policy.logits(
            policy.unflatten(weights), prompts, completion_inputs(targets, task.bos_token)
        )
        logp = token_logp(logits, targets, temperature=1.0)
        (gradient,) = torch.autograd.grad(-run_mean(logp, counted).sum(), weights)
        optimizer.step(clip_rows(gradient, config.max_grad_norm).gradient)
    return weights.detach()
