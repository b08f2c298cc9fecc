"""Our reading of the frameworks' KL terms against their own code, value and gradient."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from analysis.chapters.ch14_frameworks.trainers import (
    SOURCES,
    huggingface,
    openrlhf_family,
    others,
    pytorch,
    verl_family,
)
from kl_term.kl.surrogates import ESTIMATORS
from kl_term.objectives.ordering import kl_then_normalise
from tests.released import checkout, functions_in, functions_of, source_of

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def tokens():
    """Log-probs [3, 40], from close to the reference to beyond every clamp but float32's."""
    generator = torch.Generator().manual_seed(5)
    logp = -3 * torch.rand(3, 40, generator=generator) - 0.1
    ref_logp = logp - torch.linspace(-12, 12, 120).view(3, 40).roll(1, 0)
    old_logp = logp + 0.4 * torch.randn(3, 40, generator=generator)
    return logp, ref_logp, old_logp


def assert_same(ours, theirs, tokens):
    """Value and gradient of two losses agree to 1e-6 relative to the largest."""
    results = []
    for loss in (ours, theirs):
        leaf = tokens[0].clone().requires_grad_()
        value = loss(leaf, *tokens[1:])
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        results.append((value.detach(), gradient))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert results[0][1].abs().max() > 0.1


def near(tokens, bound):
    """The same, with log-ratios to the reference of at most this size."""
    logp, ref_logp, old_logp = tokens
    return logp, logp - (logp - ref_logp).clamp(-bound, bound), old_logp


def doubles(tokens):
    return tuple(x.double() for x in tokens)


def functions_read(framework, *names, file=None, **namespace):
    """Functions of a framework without a release, from a checkout of the commit that was read."""
    source = next(source for source in SOURCES if source.framework == framework)
    path = checkout(framework) / (file or source.file)
    return functions_in(path, *names, **namespace)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_trl(tokens, bias_correction, level):
    pytest.importorskip("trl", reason="trl is not installed: make test-full compares with it")
    from trl.trainer.grpo_trainer import GRPOTrainer

    def theirs(logp, ref_logp, old_logp):
        count = logp.numel()
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None),
            args=SimpleNamespace(use_bias_correction_kl=bias_correction, delta=None),
            model=SimpleNamespace(training=True),
            beta=1.0,
            epsilon_low=0.2,
            epsilon_high=0.2,
            loss_type="dr_grpo",
            max_completion_length=logp.shape[1],
            importance_sampling_level=level,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            accelerator=SimpleNamespace(reduce=lambda x, **k: x, gather=lambda x: x),
            _metrics={"train": defaultdict(list)},
        )
        inputs = {
            "prompt_ids": torch.zeros(len(logp), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(logp), 1, dtype=torch.long),
            "completion_ids": torch.zeros(logp.shape, dtype=torch.long),
            "completion_mask": torch.ones(logp.shape, dtype=torch.long),
            "advantages": torch.zeros(len(logp)),
            "old_per_token_logps": old_logp,
            "ref_per_token_logps": ref_logp,
        }
        return GRPOTrainer._compute_loss(trainer, trainer.model, inputs) * count

    def ours(*tensors):
        return huggingface.trl_grpo(*tensors, bias_correction=bias_correction, level=level).sum()

    assert_same(ours, theirs, doubles(near(tokens, 3)))


def test_liger(tokens):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make test-full")
    from liger_kernel.chunked_loss.grpo_loss import k3_loss_fn

    assert_same(
        partial(huggingface.trl_grpo, bias_correction=False),
        lambda logp, ref_logp, old_logp: k3_loss_fn(ref_logp, logp),
        doubles(tokens),
    )


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "low_var_kl+", "kl+"])
def test_verl(tokens, kind):
    penalty, _ = functions_of(
        "verl", "verl/trainer/ppo/core_algos.py", "kl_penalty", "kl_penalty_forward"
    )
    assert_same(
        partial(verl_family.verl, kind=kind),
        lambda logp, ref, old: penalty(logp, ref, kind),
        doubles(tokens),
    )


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_openrlhf(tokens, estimator, unbiased):
    (approx_kl,) = functions_of(
        "openrlhf", "openrlhf/models/utils.py", "compute_approx_kl", KL_IS_WEIGHT_CLIP=10.0
    )
    options = {"estimator": estimator, "unbiased_gradient": unbiased}

    def theirs(logp, ref_logp, old_logp):
        return approx_kl(
            logp, ref_logp, old_logp, kl_estimator=estimator, unbiased_gradient=unbiased
        )

    assert_same(partial(openrlhf_family.openrlhf, **options), theirs, near(tokens, 9))


def test_verl_takes_the_kl_off_before_it_divides():
    (outcome_advantage,) = functions_of(
        "verl",
        "verl/trainer/ppo/core_algos.py",
        "compute_grpo_outcome_advantage",
        defaultdict=defaultdict,
    )
    rewards, kl = torch.tensor([1.0, 0, 0, 1, 0, 0]).double(), torch.arange(6).double().square()
    token_rewards = torch.stack([-0.1 * kl / 2, rewards - 0.1 * kl / 2], dim=-1)
    theirs, _ = outcome_advantage(token_rewards, torch.ones(6, 2), ["one prompt"] * 6)
    ours = kl_then_normalise(rewards, kl, beta=0.1, eps=1e-6)
    torch.testing.assert_close(theirs[:, 0], ours, rtol=0, atol=1e-6)


def ten_answers():
    """One answer ends at its first token, nine have two, as the policy expects: their mean is its.
    Log-probs of policy and reference and the mask, [10, 2]; the second token is certain."""
    mask = torch.ones(10, 2)
    mask[0, 1] = 0
    logp, ref_logp = torch.zeros(2, 10, 2, dtype=torch.float64)
    for table, stop in ((logp, 0.10), (ref_logp, 0.15)):
        table[0, 0], table[1:, 0] = math.log(stop), math.log1p(-stop)
    return logp, ref_logp, mask


@pytest.mark.parametrize(("name", "kind"), [("kl", "k1"), ("low_var_kl", "k3")])
def test_verl_and_openrlhf_log_a_kl_in_the_reward_by_completion(name, kind):
    """On fresh samples; k1 is negative there, and the sum over tokens by their number is not."""
    logp, ref_logp, mask = ten_answers()
    kl_of_verl, _ = functions_of(
        "verl", "verl/trainer/ppo/core_algos.py", "kl_penalty", "kl_penalty_forward"
    )
    _, masked_mean = functions_of(
        "verl", "verl/utils/torch_functional.py", "masked_sum", "masked_mean"
    )
    updates = []
    (apply_kl_penalty,) = functions_of(
        "verl",
        "verl/trainer/ppo/ray_trainer.py",
        "apply_kl_penalty",
        core_algos=SimpleNamespace(kl_penalty=kl_of_verl),
        masked_mean=masked_mean,
    )
    fields = {"old_log_probs": logp, "ref_log_prob": ref_logp, "response_mask": mask}
    batch = type("Batch", (dict,), {"batch_size": [10]})(fields, token_level_scores=0 * logp)
    controller = SimpleNamespace(value=0.1, update=lambda **seen: updates.append(seen))
    _, metrics = apply_kl_penalty(SimpleNamespace(batch=batch), controller, name)
    approx_kl, mean = functions_of(
        "openrlhf", "openrlhf/models/utils.py", "compute_approx_kl", "masked_mean"
    )
    logged = mean(approx_kl(logp, ref_logp, kl_estimator=kind), mask, dim=-1).mean().item()
    values = ESTIMATORS[kind](logp, ref_logp) * mask
    by_completion = (values.sum(-1) / mask.sum(-1)).mean().item()
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(by_completion)
    assert updates[0]["current_kl"] == metrics["actor/reward_kl_penalty"]
    assert logged == pytest.approx(by_completion, rel=1e-5)  # it computes in float32
    by_token = (values.sum() / mask.sum()).item()
    kl = 0.10 * math.log(0.10 / 0.15) + 0.90 * math.log(0.90 / 0.85)
    assert by_token == pytest.approx(kl / 1.9)
    assert (by_completion < 0) == (kind == "k1") and abs(by_completion - by_token) > 0.004


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_nemo_rl(tokens, kind, on_policy):
    (calculate_kl,) = functions_read("NeMo-RL", "calculate_kl")

    def theirs(logp, ref_logp, old_logp):
        weights = (logp - (old_logp if on_policy else logp.detach())).exp()
        return calculate_kl(logp, ref_logp, kind, 20.0, 10.0, weights)

    assert_same(
        partial(others.nemo_rl, kind=kind, on_policy_approximation=on_policy),
        theirs,
        doubles(tokens),
    )


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_slime(tokens, kind, unbiased):
    (approx_kl,) = functions_read("slime", "compute_approx_kl")

    def theirs(logp, ref_logp, old_logp):
        return approx_kl(logp, ref_logp, kind, (logp - old_logp).exp() if unbiased else None)

    ours = partial(openrlhf_family.slime, kind=kind, unbiased=unbiased)
    assert_same(ours, theirs, near(tokens, 3))  # it widens to float32 only


@pytest.mark.parametrize("estimator", range(4))
def test_open_instruct(tokens, estimator):
    (estimate_kl,) = functions_read("open-instruct", "estimate_kl")
    assert_same(
        partial(others.open_instruct, estimator=estimator),
        lambda logp, ref, old: estimate_kl((logp - ref).clamp(-40, 40), (logp - old).exp())[
            estimator
        ],
        doubles(tokens),
    )


@pytest.mark.parametrize(
    "kind", ["rpg_fkl", "rpg_rkl", "rpg_ufkl", "rpg_urkl", "rpg_js", "rpg_ujs"]
)
def test_rpg(tokens, kind):
    (kl_penalty,) = functions_read("RPG", "kl_penalty")
    assert_same(
        partial(verl_family.rpg, kind=kind),
        lambda logp, ref, old: kl_penalty(logp, ref, kind),
        doubles(tokens),
    )


@pytest.mark.parametrize("kind", ["kl1", "kl2", "kl3"])
def test_rlhf_book(tokens, kind):
    (approx_kl,) = functions_read("rlhf-book", f"approx_{kind}")
    assert_same(
        partial(others.rlhf_book, kind=kind),
        lambda logp, ref, old: approx_kl(logp, ref, None),
        doubles(tokens),
    )


@pytest.mark.parametrize("kind", ["rl", "ref_kl"])
def test_prime_rl(tokens, kind):
    name = {"rl": "default_loss_fn", "ref_kl": "ref_kl_loss_fn"}[kind]
    framework = functions_read(
        "prime-rl",
        name,
        "compute_importance_ratio_and_mismatch_kl",
        "_safe_mean",
        LossOutputs=SimpleNamespace,
    )

    def theirs(logp, ref_logp, old_logp):
        inputs = SimpleNamespace(
            trainer_logprobs=logp,
            inference_logprobs=old_logp,
            ref_logprobs=ref_logp,
            advantages=torch.zeros_like(logp),
            loss_mask=torch.ones_like(logp, dtype=torch.bool),
            loss_weights=None,
        )
        if kind == "rl":
            config = SimpleNamespace(dppo_mask_high=1.0, dppo_mask_low=1.0, adv_tau=1.0, kl_tau=1.0)
            return framework[0](inputs, config).loss
        return framework[0](inputs).loss

    def ours(*three):
        extra = 1e-3 * others.prime_rl(*three, kind="rl") if kind == "ref_kl" else 0.0
        return (others.prime_rl(*three, kind=kind) + extra).sum()

    assert_same(ours, theirs, doubles(tokens))


@pytest.mark.parametrize("kind", ["low_var_kl", "kl", "mse", "abs"])
def test_rlinf(tokens, kind):
    """Its function, called as its FSDP worker and as its Megatron workers call it."""
    (penalty,) = functions_read("RLinf-FSDP", "kl_penalty", file="rlinf/algorithms/utils.py")
    for ours, theirs in (
        (verl_family.rlinf_fsdp, lambda logp, ref, old: penalty(ref, logp, kind)),
        (verl_family.rlinf_megatron, lambda logp, ref, old: penalty(logp, ref, kind)),
    ):
        assert_same(partial(ours, kind=kind), theirs, doubles(tokens))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_skyrl(tokens, kind):
    (approx_kl,) = functions_read("SkyRL", "compute_approx_kl")
    assert_same(
        partial(verl_family.skyrl, kind=kind),
        lambda logp, ref, old: approx_kl(logp, ref, None, kind),
        doubles(tokens),
    )


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_easyr1(tokens, kind):
    (compute_kl,) = functions_read("EasyR1", "compute_kl")
    assert_same(
        partial(verl_family.easyr1, kind=kind),
        lambda logp, ref, old: compute_kl(logp, ref, kind),
        near(tokens, 9),  # it narrows to float32
    )


def test_roll(tokens):
    (approx_kl,) = functions_read("ROLL", "compute_approx_kl")
    assert_same(
        openrlhf_family.roll,
        lambda logp, ref, old: approx_kl(logp, ref, None, "k3"),
        doubles(tokens),
    )


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "low_var_kl"])
def test_miles(tokens, kind, unbiased):
    approx_kl, _ = functions_read(
        "miles", "compute_approx_kl", "_safe_clamp_log_ratio", _LOG_RATIO_EXP_CLAMP=20.0
    )

    def theirs(logp, ref_logp, old_logp):
        return approx_kl(logp, ref_logp, kind, (logp - old_logp).exp() if unbiased else None)

    ours = partial(openrlhf_family.miles, kind=kind, unbiased=unbiased)
    assert_same(ours, theirs, near(tokens, 3))  # it widens to float32 only


def test_torchrl(tokens):
    (estimate,) = functions_read(
        "torchrl", "k3_kl_token_estimate", file="torchrl/objectives/llm/distillation.py"
    )
    for ours in (pytorch.torchrl, pytorch.torchrl_distillation):
        assert_same(ours, lambda logp, ref, old: estimate(ref, logp), doubles(near(tokens, 9)))


def test_rllm():
    (distilled,) = functions_read(
        "rLLM", "compute_distill_reverse_kl", file="rllm/trainer/distill/advantage.py"
    )
    student, teacher = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-0.5, -2.5, -1.0])
    theirs = distilled(teacher.tolist(), student.tolist(), -5.0, 5.0)
    ours = verl_family.rllm_distillation(student, teacher, torch.ones(3, dtype=torch.bool))
    assert (-ours).tolist() == theirs == [0.5, -0.5, 5.0]


def test_verl_refuses_k1_as_a_distillation_loss_by_one_of_its_two_names():
    """The check reads the name, so that the alias passes; both have one value and gradient."""
    source = source_of("verl", "verl/workers/config/distillation.py").read_text()
    assert 'if not self.use_policy_gradient and self.loss_mode == "k1":' in source
    assert source.count("self.loss_mode ==") == 2  # the other one warns of the top-k loss
    (penalty,) = functions_of("verl", "verl/trainer/ppo/core_algos.py", "kl_penalty_forward")
    logp, ref_logp = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -0.5])
    assert torch.equal(penalty(logp, ref_logp, "kl"), penalty(logp, ref_logp, "k1"))
