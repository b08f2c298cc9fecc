from __future__ import annotations

import pytest
import torch

from analysis.training.rollout import sample, token_logp
from analysis.training.tiny.policy import PolicyConfig
from analysis.training.tiny.start import make_policy


@pytest.fixture
def population(small_config):
    """A policy, three runs' own weights, prompts and uniforms, in float64."""
    policy = make_policy(small_config)
    flat = torch.cat([policy.initial_weights(seed, torch.float64) for seed in range(3)])
    generator = torch.Generator().manual_seed(0)
    task = small_config.task
    draw = (3, 4, task.prompt_length)
    prompts = task.prompts(torch.rand(draw, generator=generator, dtype=torch.float64))
    shape = (3, 4, 5, task.completion_length)
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)
    return policy, policy.unflatten(flat), prompts, uniforms


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_kept_from_sampling_are_those_of_the_full_forward(
    small_config, population, temperature
):
    policy, weights, prompts, uniforms = population
    sampled = sample(policy, weights, small_config.task, prompts, uniforms, temperature)
    logits = policy.logits(weights, prompts, sampled.inputs)
    full = token_logp(logits, sampled.completions, temperature)
    assert torch.allclose(sampled.old_logp, full, rtol=0, atol=1e-12)
    other_temperature = token_logp(logits, sampled.completions, temperature + 0.1)
    assert (sampled.old_logp - other_temperature).abs().max() > 1e-3


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=3 must divide width=32"):
        PolicyConfig(width=32, num_heads=3)
