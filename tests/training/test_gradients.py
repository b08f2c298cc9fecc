"""Each variant's gradient against a naive single run that shares no code with the trainer."""

from __future__ import annotations

import pytest
import torch

from analysis.kl.term import KLTerm
from analysis.training.config import Run, Variant
from analysis.training.environment import Scores
from analysis.training.trainer import PopulationTrainer
from analysis.training.variants import Objective
from tests.training.naive import NaiveRun
from tests.training.naive_loss import naive_loss


def naive_run(variant, config, trainer, row, sampled, rewards, sampled_by):
    """One run as a single run, on the completions that the population drew."""
    views = trainer.policy.unflatten(trainer.weights.detach())
    return NaiveRun(
        variant=variant,
        temperature=config.temperature,
        weights={name: part[row].clone().requires_grad_() for name, part in views.items()},
        reference={name: part[row] for name, part in trainer.reference.items()},
        sampled_by={n: w[row] for n, w in trainer.policy.unflatten(sampled_by).items()},
        teacher=None,
        prompts=sampled.prompts[row],
        completions=sampled.completions[row],
        rewards=rewards[row],
        accuracy=rewards[row],
        steps=None,
    )


def loss_and_gradient(run):
    loss = naive_loss(run)
    grads = torch.autograd.grad(loss, list(run.weights.values()))
    return loss, torch.cat([grad.flatten() for grad in grads])


def credited(variants: list[Variant], credit: str) -> list[Variant]:
    """With this credit of a KL in the reward."""
    in_reward = [variant for variant in variants if variant.kl.placement == "reward"]
    changed = [
        variant.model_copy(update={"kl": variant.kl.model_copy(update={"credit": credit})})
        for variant in in_reward
    ]
    return [variant for variant in variants if variant.kl.placement != "reward"] + changed


@pytest.mark.parametrize("kl_credit", ["to_go", "immediate"])
def test_the_gradient_of_every_variant_is_that_of_a_naive_single_run(
    small_config, all_variants, kl_credit
):
    config = small_config.model_copy(
        update={
            "precision": "float64",
            "temperature": 0.8,
            "num_prompts": 2,
            "group_size": 3,
        }
    )
    all_variants = [
        variant.model_copy(update={"objective": Objective(epsilon_high=0.28)})
        for variant in credited(all_variants, kl_credit)
    ]
    trainer = PopulationTrainer(config, [Run(variant=variant, seed=3) for variant in all_variants])
    generator = torch.Generator().manual_seed(0)
    shape = trainer.weights.shape
    with torch.no_grad():  # away from the reference, sample, then away from the sampler
        trainer.weights += 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
        sampled = trainer.rollout(0)
        before = trainer.weights.detach().clone()
        trainer.weights += 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    rewards = torch.rand(
        sampled.rollout.old_logp.shape[:3], generator=generator, dtype=torch.float64
    )
    batch = trainer.batch(sampled._replace(scores=Scores(rewards, rewards)))
    sampled = sampled.rollout
    output = trainer.losses(batch)
    (gradient,) = torch.autograd.grad(output.losses.sum(), trainer.weights)
    assert output.metrics["clip_fraction"].min() > 0.05, "the clip is not exercised"
    assert not sampled.mask.all(), "no completion is short: the mask is not exercised"

    for row, variant in enumerate(all_variants):
        run = naive_run(variant, config, trainer, row, sampled, rewards, before)
        loss, expected = loss_and_gradient(run)
        expected = torch.nn.functional.pad(expected, (0, trainer.policy.padding))
        assert torch.allclose(output.losses[row], loss, rtol=0, atol=1e-10), variant.name
        assert torch.allclose(gradient[row], expected, rtol=0, atol=1e-10), variant.name
        assert expected.norm() > 1e-2


def test_variants_differ_in_gradient(small_config, all_variants):
    """The comparison above would not notice variants that were all the same."""
    config = small_config.model_copy(update={"precision": "float64"})
    trainer = PopulationTrainer(config, [Run(variant=variant, seed=3) for variant in all_variants])
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(2, 1, trainer.weights.shape[1], generator=generator).double()
    with torch.no_grad():
        trainer.weights += noise[0]
        sampled = trainer.rollout(0)
        trainer.weights += noise[1]
    batch = trainer.batch(sampled)
    (gradient,) = torch.autograd.grad(trainer.losses(batch).losses.sum(), trainer.weights)
    distances = torch.cdist(gradient, gradient) + torch.eye(len(all_variants)).double()
    names = [variant.name for variant in all_variants]
    same = {frozenset((names[i], names[j])) for i, j in (distances < 1e-9).nonzero().tolist()}
    # rho k3 attached has the gradient rho k1 of k2 detached: a theorem, not a coincidence
    assert same == {frozenset(("k3_loss_attached", "k2_loss_detached"))}


@pytest.mark.parametrize("kl_credit", ["to_go", "immediate"])
def test_the_kl_cosine_is_that_of_naive_gradients(small_config, all_variants, kl_credit):
    config = small_config.model_copy(
        update={
            "precision": "float64",
            "temperature": 0.8,
            "num_prompts": 2,
            "group_size": 3,
            "cosine_every": 2,
        }
    )
    all_variants = credited(all_variants, kl_credit)
    trainer = PopulationTrainer(config, [Run(variant=variant, seed=3) for variant in all_variants])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        shape = trainer.weights.shape
        trainer.weights += 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    sampled, scores, *_ = trainer.rollout(2)
    rewards = scores.rewards.double()
    none, exact = Variant(), Variant(kl=KLTerm(estimator="exact"), beta=1.0)
    expected = []
    for row, variant in enumerate(all_variants):
        without, of_variant, of_exact = (
            loss_and_gradient(
                naive_run(which, config, trainer, row, sampled, rewards, trainer.weights.detach())
            )[1]
            for which in (none, variant, exact)
        )
        left, right = of_variant - without, of_exact - without
        expected.append(left @ right / (left.norm() * right.norm()))
    expected = torch.stack(expected)
    assert expected[0].isnan() and expected[1] == pytest.approx(1.0)
    assert expected[2:].abs().max() < 0.999 and expected[2:].std() > 0.1
    measured = trainer.update(2)["kl_cosine"]
    assert torch.allclose(measured[1:], expected[1:], rtol=0, atol=1e-10)
    assert measured[0].isnan()
    assert trainer.update(0)["kl_cosine"].isnan().all(), "the policy is the reference"
    assert trainer.update(1)["kl_cosine"].isnan().all(), "not asked for"


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_gradient_from_sampling_is_that_of_a_forward_pass(
    small_config, all_variants, precision
):
    config = small_config.model_copy(update={"precision": precision, "temperature": 0.8})
    trainer = PopulationTrainer(config, [Run(variant=variant, seed=3) for variant in all_variants])
    trainer.update(0)
    sampled = trainer.rollout(1)
    batch = trainer.batch(sampled)
    kept, fresh = (
        torch.autograd.grad(trainer.losses(batch, caches=caches).losses.sum(), trainer.weights)[0]
        for caches in (sampled.caches, None)
    )
    assert kept.abs().max() > 1e-3
    atol = {"float32": 1e-5, "float64": 1e-12}[precision]
    assert torch.allclose(kept, fresh, rtol=0, atol=atol)
