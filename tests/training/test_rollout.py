from __future__ import annotations

import torch

from analysis.training.population import run_uniforms, uniforms
from analysis.training.rollout import completion_inputs, inverse_cdf


def test_inverse_cdf_gives_each_token_its_share_of_the_unit_interval():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens = inverse_cdf(probs.expand(1000, 4), grid)
    assert tokens.bincount(minlength=4).tolist() == [100, 0, 600, 300]


def test_inverse_cdf_never_draws_a_token_of_probability_zero_at_the_ends():
    probs = torch.tensor([0.0, 0.5, 0.5, 0.0])
    ends = torch.tensor([0.0, 1.0 - 2.0**-24])
    assert inverse_cdf(probs.expand(2, 4), ends).tolist() == [1, 2]


def test_completion_inputs_are_shifted_behind_the_opening_token():
    assert completion_inputs(torch.tensor([4, 5, 6]), bos_token=9).tolist() == [9, 4, 5]


def test_draws_depend_on_seed_stream_and_update_and_on_nothing_else():
    shape = (4, 3)
    together = run_uniforms([5, 7, 5], "sampling", 2, shape, torch.float64)
    alone = run_uniforms([7], "sampling", 2, shape, torch.float64)
    assert torch.equal(together[1], alone[0])
    assert torch.equal(together[0], together[2])
    keys = [(5, "sampling", 2), (7, "sampling", 2), (5, "prompts", 2), (5, "sampling", 3)]
    draws = {uniforms(*key, shape).tobytes() for key in keys}
    assert len(draws) == len(keys)
