"""The bandit behind a mixture of experts: exact reward by loops, ratios with and without replay."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters import ch17_routing as study
from analysis.objectives.routing import ExpertHead, choose_experts, routed_logp

SEEDS = (0, 1, 2)


def probability_by_loop(head: ExpertHead, seed: int, state: torch.Tensor) -> torch.Tensor:
    """The policy at one state, written out."""
    scores = [float(row @ state) for row in head.router[seed]]
    expert = scores.index(max(scores))
    gate = torch.tensor(scores, dtype=torch.float64).softmax(0)[expert]
    logits = torch.stack([gate * (row @ state) for row in head.experts[seed][expert]])
    return logits.softmax(0)


def test_expected_reward_is_the_chance_of_the_right_token():
    bandits, head = study.random_bandits(SEEDS, 5)
    by_loop = [
        sum(
            probability_by_loop(head, place, state)[right].item()
            for state, right in zip(bandits.hidden[place], bandits.right[place], strict=True)
        )
        / 5
        for place in range(len(SEEDS))
    ]
    assert study.expected_reward(head, bandits).tolist() == pytest.approx(by_loop, abs=1e-12)


def test_all_seeds_at_once_are_the_package_s_own_one_by_one():
    bandits, heads = study.random_bandits(SEEDS, 5)
    experts = study.own_experts(heads, bandits.hidden)
    logp = study.state_logp(heads, bandits.hidden, experts)
    for place, hidden in enumerate(bandits.hidden):
        head = ExpertHead(*(part[place] for part in heads))
        assert torch.equal(experts[place], choose_experts(head, hidden))
        one = routed_logp(head, hidden, experts[place])
        torch.testing.assert_close(logp[place], one, rtol=0, atol=1e-14)


def test_samples_come_from_the_experts_of_the_moved_router():
    bandits, head = study.random_bandits(SEEDS, 64)
    drawn = study.sample(head, bandits, 400, 0.5, torch.Generator().manual_seed(0))
    own = study.own_experts(head, bandits.hidden)
    assert 0 < (drawn.experts != own).double().mean() < 1
    logp = study.state_logp(head, bandits.hidden, drawn.experts)
    torch.testing.assert_close(drawn.old_logp, logp.gather(-1, drawn.tokens))
    frequency = torch.nn.functional.one_hot(drawn.tokens, study.VOCAB).double().mean(dim=2)
    other = study.state_logp(head, bandits.hidden, own).exp()
    moved = drawn.experts != own
    error = (frequency - logp.exp())[moved].abs().mean()
    assert error < 0.02 < (frequency - other)[moved].abs().mean()


def test_replaying_keeps_the_first_ratios_at_one_and_routing_again_does_not():
    options = {"noise": 0.3, "seeds": SEEDS, "updates": 3, "states": 16}
    replayed, again = (study.train(routing, **options) for routing in study.ROUTINGS)
    assert replayed["ess"].tolist() == pytest.approx([1.0] * len(replayed), abs=1e-12)
    assert (replayed["clip_fraction"] == 0).all()
    assert again["ess"].mean() < 0.9
    assert again["flipped"].mean() > 0.1


def test_without_noise_one_step_a_rollout_is_the_same_run_either_way():
    options = {"noise": 0.0, "seeds": SEEDS, "updates": 4, "steps": 1, "states": 16}
    replayed, again = (study.train(routing, **options) for routing in study.ROUTINGS)
    assert replayed["reward"].tolist() == pytest.approx(again["reward"].tolist(), abs=1e-12)
    assert replayed["reward"].iloc[-1] > replayed["reward"].iloc[0]
