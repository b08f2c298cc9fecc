r"""A reward model on a frozen language model: a linear head at the end of an answer.

.. math:: R(x, y) = w \cdot h(x, y) + b

with :math:`h` the state of the frozen model, behind its last norm, at the last counted token of
the answer. That is a verifier of Cobbe et al. (2021), fitted by least squares to whether answers
are right, whose language model is not trained with it. Head and answers are made once, before any
run: answers are the start's own, and far from these nothing holds the head to the truth. Runs are
rewarded by it, and never see the task's own reward.

Shapes: M runs, P prompts, G completions of each, T tokens, K heads, n labels of each, d channels.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.records.language import LanguageConfig
from analysis.training.environment import Environment, Task
from analysis.training.population import run_uniforms, uploaded
from analysis.training.precision import dtype_of
from analysis.training.pretrained.llama import LlamaPolicy
from analysis.training.pretrained.lora import Adapters
from analysis.training.proxied import Proxied, Rating
from analysis.training.rollout import sample

#: Answers that are labelled at once; more labels begin with those of fewer.
CHUNK = 100
#: No adapters: the frozen model itself, for any number of runs.
FROZEN: Adapters = {}
#: Beside the variance of a channel, which may be zero.
LEAST_VARIANCE = 1e-12


class Heads(NamedTuple):
    """Linear functions of a state."""

    weights: Tensor  #: [K, d]
    offsets: Tensor  #: [K]

    def of(self, starts: Tensor) -> Heads:
        """Those of the runs whose starts are ``starts`` [M]."""
        return Heads(self.weights[starts], self.offsets[starts])

    def scores(self, states: Tensor) -> Tensor:
        """[M, ...]: of states [M, ..., d], each run's by its own head."""
        of_run = (len(states), *[1] * (states.dim() - 2))
        weights = self.weights.view(*of_run, -1)
        return (states * weights).sum(dim=-1) + self.offsets.view(of_run)


class HeadsOnAnswers:
    """Heads on the frozen model, one for each start: reward models of the answers' last states.

    Args:
        policy: whose frozen model is read.
        task: says which tokens count.
        heads: of K starts.
    """

    def __init__(self, policy: LlamaPolicy, task: Task, heads: Heads) -> None:
        self.policy, self.task, self.heads = policy, task, heads

    def __len__(self) -> int:
        return len(self.heads.weights)

    def rate(self, prompts: Tensor, completions: Tensor, starts: Tensor) -> Rating:
        """See :class:`~analysis.training.proxied.RewardModels`."""
        states = last_states(self.policy, self.task, prompts, completions)
        return Rating(self.heads.of(starts).scores(states))


@torch.no_grad()
def last_states(policy: LlamaPolicy, task: Task, prompts: Tensor, completions: Tensor) -> Tensor:
    """[M, P, G, d]: the frozen model's states at the last counted token of completions
    [M, P, G, T]."""
    opened = torch.full_like(completions[..., :1], task.bos_token)
    inputs = torch.cat([opened, completions], dim=-1)
    states = policy.states(FROZEN, prompts, inputs)
    last = task.completion_mask(completions).sum(dim=-1)  # one token stands before the first
    places = last[..., None, None].expand(*last.shape, 1, states.shape[-1])
    return states.gather(-2, places).squeeze(-2)


def proxied(environment: Environment, config: LanguageConfig) -> Environment:
    """The environment with heads in place of the verifier: as many starts as there are heads.

    The starts are one and the same model; what differs is who rewards the runs that begin there.
    """
    policy, task, model = environment.policy, environment.task, config.reward_model
    seeds = range(model.seed, model.seed + model.count)
    fitted = [ridge(*labelled(policy, task, config, seed), model.ridge) for seed in seeds]
    start = environment.start
    heads = Heads(*(torch.stack(parts).to(start) for parts in zip(*fitted, strict=True)))
    return environment._replace(
        task=Proxied(task, HeadsOnAnswers(policy, task, heads)),
        start=start.expand(model.count, -1).contiguous(),
    )


def labelled(
    policy: LlamaPolicy, task: Task, config: LanguageConfig, seed: int
) -> tuple[Tensor, Tensor]:
    """States [n, d] of answers of the start at the run's temperature, and their rewards [n], in
    double precision on the CPU.

    Args:
        seed: of the answers, and of the questions that are drawn for them.
    """
    parts, device = [], policy.device
    draw = partial(run_uniforms, [seed])
    for chunk in range(math.ceil(config.reward_model.labels / CHUNK)):
        shape = (CHUNK, task.draws_per_prompt)
        drawn = draw("label prompts", chunk, shape, torch.float64)
        prompts = task.prompts(uploaded(drawn, device))
        shape = (CHUNK, 1, task.completion_length)
        noise = uploaded(draw("label sampling", chunk, shape, dtype_of(config)), device)
        rollout = sample(policy, FROZEN, task, prompts, noise, config.temperature)
        states = last_states(policy, task, prompts, rollout.completions)
        rewards = task.score(prompts, rollout.completions).rewards
        parts.append((states.flatten(0, 2), rewards.flatten()))
    states, rewards = (torch.cat(of).cpu().double() for of in zip(*parts, strict=True))
    kept = slice(config.reward_model.labels)
    return states[kept], rewards[kept]


def ridge(states: Tensor, labels: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    r"""The weights [d] and the offset of the least squares of labels [n] on states [n, d]:

    .. math:: \min_{v, b} \frac{1}{n} \sum_i (v \cdot z_i + b - r_i)^2 + \lambda |v|^2

    over standardised states :math:`z`, with :math:`\lambda` the ``penalty``.
    """
    mean = states.mean(dim=0)
    scale = (states.var(dim=0, unbiased=False) + LEAST_VARIANCE).sqrt()
    z = (states - mean) / scale
    gram = z.mT @ z / len(z) + penalty * torch.eye(z.shape[1], dtype=z.dtype)
    middle = labels.mean()
    weights = torch.linalg.solve(gram, z.mT @ (labels - middle) / len(z)) / scale
    return weights, middle - weights @ mean
