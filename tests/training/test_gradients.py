"""Each arm's gradient against a naive single run that shares no code with the trainer."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.training.arms import Objective
from analysis.training.config import Arm, Member
from analysis.training.setting import Scores
from analysis.training.tasks import END, SEPARATOR
from analysis.training.trainer import PopulationTrainer

HEADS = 3


def naive_logits(weights, tokens):
    """A causal transformer over one sequence of token ids, position by position."""
    x = weights["token_embedding"][tokens] + weights["position_embedding"][: len(tokens)]
    layers = sum(name.endswith("mlp_in") for name in weights)
    for layer in range(layers):
        part = {n.split(".")[1]: w for n, w in weights.items() if n.startswith(f"block{layer}.")}
        q, k, v = (naive_norm(x) @ part["attention_in"]).chunk(3, dim=-1)
        size = q.shape[-1] // HEADS
        rows = []
        for t in range(len(tokens)):
            heads = []
            for head in range(HEADS):
                channels = slice(head * size, (head + 1) * size)
                scores = k[: t + 1, channels] @ q[t, channels] / math.sqrt(size)
                heads.append(torch.softmax(scores, dim=0) @ v[: t + 1, channels])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ part["attention_out"]
        x = x + torch.relu(naive_norm(x) @ part["mlp_in"]) @ part["mlp_out"]
    return naive_norm(x) @ weights["head"]


def naive_norm(x):
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(dim=-1, keepdim=True) + 1e-5)


def naive_kl(arm, logp, ref_logp, old_logp, logits, ref_logits):
    """KL loss of one token, written from the definitions."""
    l = logp - ref_logp
    if arm.kl_estimator == "exact":
        p = torch.softmax(logits, dim=-1)
        return (p * (torch.log_softmax(logits, -1) - torch.log_softmax(ref_logits, -1))).sum()
    value = {"k1": l, "k2": l**2 / 2, "k3": torch.exp(-l) - 1 + l}[arm.kl_estimator]
    ratio = torch.exp(logp - old_logp)
    weight = {"none": 1.0, "attached": ratio, "detached": ratio.detach()}[arm.kl_weighting]
    return weight * value


def naive_loss(arm, config, weights, ref_weights, prompts, completions, old_logp, rewards):
    """GRPO loss of one run, token by token."""
    losses = []
    for p, prompt in enumerate(prompts):
        mean, std = rewards[p].mean(), rewards[p].std(correction=1)
        for g, completion in enumerate(completions[p].tolist()):
            length = completion.index(END) + 1 if END in completion else len(completion)
            tokens = [*prompt.tolist(), SEPARATOR, *completion[:-1]]
            logits = naive_logits(weights, tokens)[len(prompt) :] / config.temperature
            ref_logits = naive_logits(ref_weights, tokens)[len(prompt) :] / config.temperature
            logp = [torch.log_softmax(logits[t], -1)[completion[t]] for t in range(length)]
            ref_logp = [torch.log_softmax(ref_logits[t], -1)[completion[t]] for t in range(length)]
            penalties = [0.0] * length
            if arm.kl_placement == "reward":
                for t in range(length):
                    l = old_logp[p, g, t] - ref_logp[t]
                    penalties[t] = {
                        "k1": l,
                        "k2": l**2 / 2,
                        "k3": torch.exp(-l) - 1 + l,
                    }[arm.kl_estimator]
            total = 0.0
            for t in range(length):
                owed = sum(penalties[t:]) if arm.kl_credit == "to_go" else penalties[t]
                advantage = (rewards[p, g] - mean) / (std + 1e-4) - arm.beta * owed
                ratio = torch.exp(logp[t] - old_logp[p, g, t])
                clipped = ratio.clamp(1 - arm.objective.epsilon_low, 1 + arm.objective.epsilon_high)
                total = total - torch.minimum(ratio * advantage, clipped * advantage)
                if arm.kl_placement == "loss" and arm.kl_estimator != "none":
                    total = total + arm.beta * naive_kl(
                        arm, logp[t], ref_logp[t], old_logp[p, g, t], logits[t], ref_logits[t]
                    )
            losses.append(total / length)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kl_credit", ["to_go", "immediate"])
def test_the_gradient_of_every_arm_is_that_of_a_naive_single_run(small_config, all_arms, kl_credit):
    config = small_config.model_copy(
        update={
            "precision": "float64",
            "temperature": 0.8,
            "num_prompts": 2,
            "group_size": 3,
        }
    )
    changed = {"kl_credit": kl_credit, "objective": Objective(epsilon_high=0.28)}
    all_arms = [arm.model_copy(update=changed) for arm in all_arms]
    trainer = PopulationTrainer(config, [Member(arm=arm, seed=3) for arm in all_arms])
    generator = torch.Generator().manual_seed(0)
    shape = trainer.weights.shape
    with torch.no_grad():  # away from the reference, sample, then away from the sampler
        trainer.weights += 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn = trainer.rollout(0)
        trainer.weights += 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    rewards = torch.rand(drawn.rollout.old_logp.shape[:3], generator=generator, dtype=torch.float64)
    batch = trainer.batch(drawn._replace(scores=Scores(rewards, rewards)))
    drawn = drawn.rollout
    output = trainer.losses(batch)
    (gradient,) = torch.autograd.grad(output.losses.sum(), trainer.weights)
    assert output.metrics["clip_fraction"].min() > 0.05, "the clip is not exercised"
    assert not drawn.mask.all(), "no completion is short: the mask is not exercised"

    views = trainer.policy.unflatten(trainer.weights.detach())
    for row, arm in enumerate(all_arms):
        weights = {name: part[row].clone().requires_grad_() for name, part in views.items()}
        reference = {name: part[row] for name, part in trainer.reference.items()}
        loss = naive_loss(
            arm,
            config,
            weights,
            reference,
            drawn.prompts[row],
            drawn.completions[row],
            drawn.old_logp[row],
            rewards[row],
        )
        expected = torch.autograd.grad(loss, list(weights.values()))
        expected = torch.cat([part.flatten() for part in expected])
        expected = torch.nn.functional.pad(expected, (0, trainer.policy.padding))
        assert torch.allclose(output.losses[row], loss, rtol=0, atol=1e-10), arm.name
        assert torch.allclose(gradient[row], expected, rtol=0, atol=1e-10), arm.name
        assert expected.norm() > 1e-2


def test_arms_differ_in_gradient(small_config, all_arms):
    """The comparison above would not notice arms that were all the same."""
    config = small_config.model_copy(update={"precision": "float64"})
    trainer = PopulationTrainer(config, [Member(arm=arm, seed=3) for arm in all_arms])
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(2, 1, trainer.weights.shape[1], generator=generator).double()
    with torch.no_grad():
        trainer.weights += noise[0]
        drawn = trainer.rollout(0)
        trainer.weights += noise[1]
    batch = trainer.batch(drawn)
    (gradient,) = torch.autograd.grad(trainer.losses(batch).losses.sum(), trainer.weights)
    distances = torch.cdist(gradient, gradient) + torch.eye(len(all_arms)).double()
    names = [arm.name for arm in all_arms]
    same = {frozenset((names[i], names[j])) for i, j in (distances < 1e-9).nonzero().tolist()}
    # rho k3 attached has the gradient rho k1 of k2 detached: a theorem, not a coincidence
    assert same == {frozenset(("k3_loss_attached", "k2_loss_detached"))}


def naive_gradient(arm, config, trainer, row, drawn, rewards):
    """The gradient of one member's naive loss, as a vector."""
    views = trainer.policy.unflatten(trainer.weights.detach())
    weights = {name: part[row].clone().requires_grad_() for name, part in views.items()}
    reference = {name: part[row] for name, part in trainer.reference.items()}
    parts = (drawn.prompts, drawn.completions, drawn.old_logp, rewards)
    loss = naive_loss(arm, config, weights, reference, *(part[row] for part in parts))
    grads = torch.autograd.grad(loss, list(weights.values()))
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("kl_credit", ["to_go", "immediate"])
def test_the_kl_cosine_is_that_of_naive_gradients(small_config, all_arms, kl_credit):
    config = small_config.model_copy(
        update={
            "precision": "float64",
            "temperature": 0.8,
            "num_prompts": 2,
            "group_size": 3,
            "cosine_every": 2,
        }
    )
    all_arms = [arm.model_copy(update={"kl_credit": kl_credit}) for arm in all_arms]
    trainer = PopulationTrainer(config, [Member(arm=arm, seed=3) for arm in all_arms])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        shape = trainer.weights.shape
        trainer.weights += 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    drawn, scores, *_ = trainer.rollout(2)
    rewards = scores.rewards.double()
    none, exact = Arm(kl_estimator="none"), Arm(kl_estimator="exact", beta=1.0)
    expected = []
    for row, arm in enumerate(all_arms):
        without, of_arm, of_exact = (
            naive_gradient(which, config, trainer, row, drawn, rewards)
            for which in (none, arm, exact)
        )
        left, right = of_arm - without, of_exact - without
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
def test_the_gradient_from_sampling_is_that_of_a_forward_pass(small_config, all_arms, precision):
    config = small_config.model_copy(update={"precision": precision, "temperature": 0.8})
    trainer = PopulationTrainer(config, [Member(arm=arm, seed=3) for arm in all_arms])
    trainer.update(0)
    drawn = trainer.rollout(1)
    batch = trainer.batch(drawn)
    kept, fresh = (
        torch.autograd.grad(trainer.losses(batch, pasts=pasts).losses.sum(), trainer.weights)[0]
        for pasts in (drawn.pasts, None)
    )
    assert kept.abs().max() > 1e-3
    atol = {"float32": 1e-5, "float64": 1e-12}[precision]
    assert torch.allclose(kept, fresh, rtol=0, atol=atol)
