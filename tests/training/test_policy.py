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


def test_no_token_sees_what_comes_after_it(small_config, population):
    policy, weights, prompts, uniforms = population
    inputs = (uniforms * 10).long()
    changed = inputs.clone()
    changed[..., 2:] = (changed[..., 2:] + 1) % 10
    before = policy.logits(weights, prompts, inputs)
    after = policy.logits(weights, prompts, changed)
    assert torch.equal(before[..., :2, :], after[..., :2, :])
    assert (before[..., 2:, :] - after[..., 2:, :]).abs().min(dim=-1).values.max() > 1e-3


def test_completions_see_their_prompt_and_not_each_other(small_config, population):
    policy, weights, prompts, uniforms = population
    inputs = (uniforms * 10).long()
    before = policy.logits(weights, prompts, inputs)
    other_sibling = inputs.clone()
    other_sibling[:, :, 0] = 0
    after = policy.logits(weights, prompts, other_sibling)
    assert torch.equal(before[:, :, 1:], after[:, :, 1:])
    other_prompt = (prompts + 1) % 10
    assert (policy.logits(weights, other_prompt, inputs) - before).abs().max() > 1e-3


def test_runs_use_their_own_weights(population):
    policy, weights, prompts, uniforms = population
    inputs = (uniforms * 10).long()
    together = policy.logits(weights, prompts, inputs)
    for run in range(3):
        alone = {name: part[run : run + 1] for name, part in weights.items()}
        solo = policy.logits(alone, prompts[run : run + 1], inputs[run : run + 1])
        assert torch.equal(together[run], solo[0])


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=3 must divide width=32"):
        PolicyConfig(width=32, num_heads=3)
