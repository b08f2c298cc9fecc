r"""A supervised start of a language model: right answers are learned before any run.

Adapters are trained on examples by cross-entropy and then added to the frozen weights,

.. math:: W' = W + \frac{\alpha}{r}\, (A B)^\top

so what comes out is a model as any other: runs begin as it, with adapters of their own that change
nothing yet, and it is their reference. The KL between the two is exactly 0 before the first update.
Each process trains the start itself; a GPU, whose attention sums in no fixed order, to rounding.

Shapes: N examples, B of a batch, L prompt tokens, T tokens of a completion, D weights of a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from analysis.records.language import LanguageConfig, SupervisedStart
from analysis.training.cpu import keep_freed_memory
from analysis.training.environment import Environment, Task
from analysis.training.metrics import run_mean
from analysis.training.optimizer import PopulationAdamW, clip_rows
from analysis.training.population import run_uniforms, uniforms
from analysis.training.pretrained.llama import LlamaPolicy
from analysis.training.pretrained.tasks import Examples, TextTask, pretrained_environment
from analysis.training.pretrained.weights import Llama
from analysis.training.rollout import completion_inputs, token_logp
from analysis.training.tiny.tasks import Sorting


def started(environment: Environment, model: Llama, config: LanguageConfig) -> Environment:
    """The environment whose frozen model has learned the examples of ``config.start``."""
    policy, task = environment.policy, environment.task
    weights = deque(trajectory(policy, task, config), maxlen=1).pop()
    return pretrained_environment(config, merged(model, policy, weights), task)


def trajectory(policy: LlamaPolicy, task: Task, config: LanguageConfig) -> Iterator[Tensor]:
    """Adapters [1, D] after each update of the start; one tensor, which the next update changes."""
    keep_freed_memory()
    start, examples = config.start, examples_of(task, config.start)
    weights = policy.start().clone().requires_grad_()
    optimizer = PopulationAdamW(weights, start.learning_rate, weight_decay=0.0)
    for update in range(start.updates):
        rows = batch_rows(start, update, len(examples.prompts))
        prompts = examples.prompts[rows].to(policy.device).unsqueeze(0)  # (1, B, L)
        targets = examples.completions[rows].to(policy.device).view(1, len(rows), 1, -1)
        inputs = completion_inputs(targets, task.bos_token)
        logits = policy.logits(policy.unflatten(weights), prompts, inputs)
        logp = token_logp(logits, targets, temperature=1.0)
        loss = -run_mean(logp, task.completion_mask(targets)).sum()
        (gradient,) = torch.autograd.grad(loss, weights)
        optimizer.step(clip_rows(gradient, config.max_grad_norm).gradient)
        yield weights.detach()


def examples_of(task: Task, start: SupervisedStart) -> Examples:
    """Those that a task of texts holds; of sorting as many as asked, drawn for the purpose."""
    if isinstance(task, TextTask):
        return task.examples()
    assert isinstance(task, Sorting)
    shape = (start.examples, task.draws_per_prompt)
    prompts = task.prompts(run_uniforms([start.seed], "start prompts", 0, shape, torch.float64)[0])
    drawn = run_uniforms([start.seed], "fillers", 0, shape[:1], torch.float64)[0]
    return Examples(prompts, task.examples(prompts, drawn))


def batch_rows(start: SupervisedStart, update: int, count: int) -> Tensor:
    """[B]: the examples of an update. Each epoch has an order of its own, and drops what is left
    of it behind its last whole batch."""
    batches = max(count // start.batch_size, 1)
    epoch, batch = divmod(update, batches)
    order = torch.from_numpy(uniforms(start.seed, "start", epoch, (count,))).argsort()
    return order[batch * start.batch_size : (batch + 1) * start.batch_size]


def merged(model: Llama, policy: LlamaPolicy, weights: Tensor) -> Llama:
    """The model with adapters [1, D] of ``policy`` added to its weights."""
    by_layer = policy.lora.by_layer(policy.unflatten(weights))
    layers = []
    for layer, adapters in zip(model.layers, by_layer, strict=True):
        added = {name: (a[0] @ b[0]).mT for name, (a, b) in adapters.items()}
        changed = {name: layer.groups[name] + more for name, more in added.items()}
        layers.append(layer._replace(groups=layer.groups | changed))
    return model._replace(layers=layers)
