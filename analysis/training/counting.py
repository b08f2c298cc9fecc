"""Arithmetic and memory traffic that one update of one run cannot do without."""

from __future__ import annotations

from typing import NamedTuple

from analysis.records.config import TrainConfig
from analysis.training.tiny.policy import make_policy

#: Passes over the sequences: sampling, reference, and a backward pass that costs two.
PASSES = 4
#: AdamW reads weights, gradient and two moments, and writes all but the gradient.
OPTIMIZER_PASSES = 7
FLOAT_BYTES = 4


class Work(NamedTuple):
    """Of one run-update."""

    flops: int
    bytes: int  #: of weights and optimizer state; activations are taken to stay in the cache


def generated_tokens(config: TrainConfig) -> int:
    """Tokens sampled in one run-update."""
    return config.num_prompts * config.group_size * config.task.completion_length


def run_update(config: TrainConfig) -> Work:
    """What a run-update must compute, from the configuration alone.

    Two operations a weight and token in each of ``PASSES`` passes: sampling yields the activations
    for the gradient, so an on-policy update needs no forward pass of its own. The prompt is read
    once for its whole group. Attention counts the pairs that are not masked; norms, softmax and
    everything elementwise count as free.
    """
    weights = make_policy(config).num_parameters
    reads = (
        config.task.completion_length + 1 + 2 + OPTIMIZER_PASSES
    )  # sampling, reference, backward
    return Work(PASSES * forward_flops(config), FLOAT_BYTES * weights * reads)


def forward_flops(config: TrainConfig) -> int:
    """Of one pass over the prompts and completions of a run-update, as in
    :func:`run_update`."""
    policy, task = config.policy, config.task
    width, inner = policy.width, policy.mlp_factor * policy.width
    length, steps, group = task.prompt_length, task.completion_length, config.group_size
    block = 4 * width * width + 2 * width * inner
    rows = length + group * steps
    pairs = length * (length + 1) // 2 + group * sum(length + t + 1 for t in range(steps))
    vocab_size = make_policy(config).shapes["head"][1]
    products = policy.num_layers * (block * rows + 2 * width * pairs)
    return 2 * config.num_prompts * (products + width * vocab_size * group * steps)
