"""The final policy's reward and KL, by sampling and summing token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from analysis.records.metrics import FINAL_METRICS
from analysis.records.variants import Sampler, Variant
from analysis.studies.presets.language import llama_smoke
from analysis.training.environment_of import environment_of
from analysis.training.population import uniforms
from analysis.training.tiny.tasks import Sorting
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of
from tests.training.naive import END, SEPARATOR, naive_logits

pytestmark = pytest.mark.slow

VARIANTS = (
    Variant(),
    Variant(kl=KLTerm(estimator="k3", placement="reward"), beta=0.7),
    Variant(kl=KLTerm(estimator="exact"), beta=0.7, sampler=Sampler(staleness=2)),
)
#: Two rollouts of three prompts with five answers each.
ANSWERS = 16


@pytest.fixture
def config(small_config):
    changes = {"final_answers": ANSWERS, "precision": "float64", "learning_rate": 2e-2}
    return small_config.model_copy(update=changes | {"temperature": 1.5})


def naive_rollout(config, weights, reference, seed, number):
    """Rewards and (reverse KL, forward KL) of each counted token of one rollout."""
    task = Sorting(config.task)
    shape = (config.num_prompts, task.draws_per_prompt)
    drawn = torch.from_numpy(uniforms(seed, "final prompts", number, shape))
    prompts = task.prompts(drawn.unsqueeze(0))[0].tolist()
    shape = (config.num_prompts, config.group_size, task.completion_length)
    noise = uniforms(seed, "final sampling", number, shape)
    rewards, kls = [], []
    for p, prompt in enumerate(prompts):
        for g in range(config.group_size):
            said = []
            for u in noise[p, g]:
                tokens = [*prompt, SEPARATOR, *said]
                logp, ref = (
                    torch.log_softmax(naive_logits(w, tokens)[-1] / config.temperature, -1)
                    for w in (weights, reference)
                )
                kls.append(((logp.exp() @ (logp - ref)).item(), (ref.exp() @ (ref - logp)).item()))
                cdf = np.cumsum(logp.exp().numpy())
                said.append(int(np.searchsorted(cdf, u * cdf[-1], side="right")))
                if said[-1] == END:
                    break
            right = sorted(prompt)
            whole = [*said, *[END] * (task.completion_length - len(said))]
            scored = task.score(torch.tensor([[prompt]]), torch.tensor([[[whole]]]))
            rewards.append(scored.rewards.item())
            assert (scored.accuracy.item() == 1.0) == (said == [*right, END])
    return np.mean(rewards), np.mean(kls, axis=0)


def test_they_are_those_of_a_policy_that_is_sampled_token_by_token(config):
    trainer = PopulationTrainer(config, runs_of(VARIANTS, (3, 4)))
    final = trainer.run().final
    assert set(final) == set(FINAL_METRICS)
    for row, run in enumerate(trainer.runs):
        weights, reference = (
            {name: part[row].detach() for name, part in views.items()}
            for views in (trainer.policy.unflatten(trainer.weights), trainer.reference)
        )
        found = [naive_rollout(config, weights, reference, run.seed, n) for n in range(2)]
        rewards, kls = (np.array(values) for values in zip(*found, strict=True))
        assert final["final_reward"][row] == pytest.approx(rewards.mean(), abs=1e-7)
        reverse, forward = kls.mean(axis=0)
        assert final["final_reverse_kl"][row] == pytest.approx(reverse, abs=1e-12)
        assert final["final_forward_kl"][row] == pytest.approx(forward, abs=1e-12)
        assert abs(reverse - forward) > 1e-3  # the flipped sign would be seen
        error = kls[:, 0].std(ddof=1) / math.sqrt(2)
        assert final["final_kl_error"][row] == pytest.approx(error, abs=1e-12)


def test_measuring_changes_no_digit_of_training_nor_of_another_run(config):
    runs = runs_of(VARIANTS, (3, 4))
    unmeasured = PopulationTrainer(config.model_copy(update={"final_answers": 0}), runs).run()
    measured = PopulationTrainer(config, runs).run()
    assert unmeasured.final == {}
    for name, values in unmeasured.metrics.items():
        np.testing.assert_array_equal(measured.metrics[name], values)
    alone = PopulationTrainer(config, runs[-1:]).run()
    for name, values in alone.final.items():
        np.testing.assert_array_equal(measured.final[name][-1:], values)


def test_nothing_is_measured_before_the_last_update(config):
    trainer = PopulationTrainer(config, runs_of(VARIANTS[:1]))
    trainer.advance()
    assert trainer.record().final == {}


def test_the_error_is_that_of_one_measurement_among_many(config):
    """Standard errors over rollouts against the spread of 64 measurements with other noise."""
    few, many = (config.model_copy(update={"final_answers": n, "updates": 2}) for n in (150, 9600))
    measured = []
    for one in (few, many):
        trainer = PopulationTrainer(one, runs_of(VARIANTS[:1]))
        measured.append({name: values[0] for name, values in trainer.run().final.items()})
    small, large = measured
    ratio = small["final_kl_error"] / large["final_kl_error"]
    assert 0.6 < ratio / math.sqrt(9600 / 150) < 1.6
    error = math.hypot(small["final_kl_error"], large["final_kl_error"])
    assert abs(small["final_reverse_kl"] - large["final_reverse_kl"]) < 4 * error


def test_a_frozen_run_has_no_final_policy(config):
    trainer = PopulationTrainer(config, runs_of(VARIANTS[:1], (3, 4)))
    trainer.advance()
    trainer._freeze([1])
    final = trainer.run().final
    assert np.isnan(final["final_reward"][1]) and np.isfinite(final["final_reward"][0])


def test_adapters_on_a_language_model_are_measured_too():
    """On a random model; a run alone has the digits that it has among others."""
    preset = llama_smoke()
    changes = {"updates": 2, "precision": "float64", "final_answers": 48}
    config = preset.config.model_copy(update=changes)
    runs = preset.runs[:3]
    final = PopulationTrainer(config, runs, environment_of(config)).run().final
    assert (final["final_reverse_kl"] > 0).all() and (final["final_kl_error"] > 0).all()
    alone = PopulationTrainer(config, runs[1:2], environment_of(config)).run().final
    for name, values in alone.items():
        np.testing.assert_allclose(final[name][1:2], values, rtol=1e-9)
