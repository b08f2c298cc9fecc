"""What the frameworks' KL terms optimise; and our reading of them against their own code."""

from __future__ import annotations

import ast
import math
import os
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from analysis.experiments.frameworks import audit, losses, placement
from analysis.experiments.frameworks.options import OPTIONS, SOURCES
from analysis.experiments.frameworks.sequence_level import level_errors
from analysis.kl.enumeration import expected_gradient, relative_error
from analysis.kl.term import KLTerm

ROOT_OF_TEN = math.sqrt(20.0)


@pytest.fixture(scope="module")
def at():
    return audit.states(40, 12, drift=0.4, staleness=0.4, seed=3)


@pytest.fixture(scope="module")
def table(at):
    return audit.audit(at).set_index(["framework", "setting"])


def test_every_option_was_read_somewhere():
    assert {option.framework for option in OPTIONS} == {source.framework for source in SOURCES}
    names = [(option.framework, option.setting) for option in OPTIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "option", [o for o in OPTIONS if o.term], ids=lambda o: f"{o.framework} {o.setting}"
)
def test_an_option_has_the_mean_gradient_of_its_term(at, option):
    expected = expected_gradient(*at, **option.term.at_one_state)
    gradient = audit.mean_gradient(option.loss, at)
    assert relative_error(gradient, expected).max() < 1e-12
    assert relative_error(-gradient, expected).min() > 1.9


def test_an_option_without_a_term_has_the_mean_gradient_of_none(at):
    terms = [
        KLTerm(estimator=estimator, weighting=weighting)
        for estimator in ("k1", "k2", "k3")
        for weighting in ("none", "attached", "detached")
    ]
    for option in (o for o in OPTIONS if o.term is None):
        gradient = audit.mean_gradient(option.loss, at)
        for term in terms:
            error = relative_error(gradient, expected_gradient(*at, **term.at_one_state))
            assert error.max() > 1e-6, (option.framework, option.setting, term.name)


@pytest.mark.parametrize(
    ("framework", "setting", "fresh", "stale"),
    [
        ("TRL", "use_bias_correction_kl", "reverse KL", "reverse KL"),
        ("TRL", "without", "forward KL", "neither"),
        ("verl", "low_var_kl", "forward KL", "neither"),
        ("verl", "low_var_kl+", "reverse KL", "neither"),
        ("verl", "abs", "2 total variation", "neither"),
        ("OpenRLHF", "k1", "nothing", "neither"),
        ("OpenRLHF", "k3, unbiased_gradient", "reverse KL", "reverse KL"),
        ("NeMo-RL", "k3", "reverse KL", "neither"),
        ("NeMo-RL", "k2", "neither", "neither"),
        ("slime", "k1", "nothing", "neither"),
        ("slime", "k1, use-unbiased-kl", "reverse KL", "reverse KL"),
        ("slime", "k2, use-unbiased-kl", "neither", "neither"),
        ("open-instruct", "2", "forward KL", "neither"),
        ("open-instruct", "3", "reverse KL", "reverse KL"),
        ("rlhf-book", "kl1", "nothing", "neither"),
        ("rlhf-book", "kl3", "half χ²(π‖ref)", "neither"),
        ("prime-rl", "ref_kl", "reverse KL", "neither"),  # some token fell by more than 0.2
    ],
)
def test_what_each_setting_descends(table, framework, setting, fresh, stale):
    row = table.loc[framework, setting]
    assert (row.fresh_descends, row.stale_descends) == (fresh, stale)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("rpg_fkl", "forward KL"),
        ("rpg_ufkl", "forward KL"),
        ("rpg_rkl", "reverse KL"),
        ("rpg_urkl", "reverse KL"),
        ("rpg_js", "half (reverse − forward)"),
        ("rpg_ujs", "half (reverse + forward)"),
    ],
)
def test_rpg_under_its_own_sampler(table, setting, name):
    assert table.loc["RPG", setting].stale_descends == name


@pytest.mark.parametrize("setting", ["rpg_js", "rpg_ujs"])
def test_the_js_of_rpg_is_not_the_jensen_shannon_divergence(at, setting):
    """Jensen-Shannon by autograd through its definition, another gradient altogether."""
    (option,) = (o for o in OPTIONS if o.setting == setting)
    at = at._replace(old_logits=at.ref_logits)
    leaf = at.logits.clone().requires_grad_()
    policy, reference = leaf.softmax(-1), at.ref_logits.softmax(-1)
    middle = (policy + reference) / 2
    divergence = sum((p * (p / middle).log()).sum() / 2 for p in (policy, reference))
    (exact,) = torch.autograd.grad(divergence, leaf)
    gradient = audit.mean_gradient(option.loss, at)
    assert relative_error(gradient, exact).min() > 0.5
    scale = (gradient * exact).sum(-1, keepdim=True) / gradient.square().sum(-1, keepdim=True)
    assert relative_error(scale * gradient, exact).min() > 1e-3  # nor a multiple of it


def test_the_transposed_kl1_rewards_divergence():
    logp, ref_logp = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0])
    swapped = losses.rlhf_book(logp, ref_logp, logp, kind="kl1")
    assert torch.equal(swapped, -(logp - ref_logp))
    kl3 = losses.rlhf_book(torch.zeros(1), -torch.ones(1), None, kind="kl3")
    assert kl3.item() == pytest.approx(math.e - 2, rel=1e-6)


def test_dead_zones():
    zones = audit.dead_zones().set_index(["framework", "setting"])
    edge = zones.below["verl", "low_var_kl"]
    assert math.exp(-edge) - 1 + edge == pytest.approx(10, abs=0.02)
    for row in (("OpenRLHF", "k2"), ("NeMo-RL", "k2")):
        assert zones.above[row] == pytest.approx(ROOT_OF_TEN, abs=2e-3)
        assert zones.below[row] == pytest.approx(-ROOT_OF_TEN, abs=2e-3)
    free = zones.loc[[("TRL", "without"), ("slime", "k2"), ("OpenRLHF", "k3, unbiased_gradient")]]
    assert free[["below", "above"]].isna().all(axis=None)
    w = math.exp(zones.above["RPG", "rpg_rkl"])
    assert w * math.log(w) == pytest.approx(10, abs=0.02)


def test_a_sequence_level_ratio_is_no_correction():
    errors = level_errors(vocab_size=3, length=3, trees=6, spread=1.0, staleness=0.3, seed=0)
    by = errors.set_index(["samples", "level"]).error
    assert by["fresh", "token"] < 1e-12 and by["stale", "token"] < 1e-12
    assert by["fresh", "sequence"] > 0.1 and by["stale", "sequence"] > 0.1


def test_exchange_rates():
    table = placement.exchange_table(0.04, group_size=8, kl_spread=2.0, seed=0)
    at_half = table[table.right == 4].set_index("placement").exchange
    std = math.sqrt(8 * 0.25 / 7)
    assert at_half["after the group's std"] == pytest.approx(std, rel=1e-6)
    assert at_half["before the group's std"] == pytest.approx(1)
    assert at_half["before leave-one-out"] == pytest.approx(1)
    assert at_half["ignored"] == 0


def test_in_a_group_of_equal_rewards_beta_drops_out():
    """With the KL inside what is standardised, any beta gives the same force."""
    forces = []
    for beta in (0.001, 0.1):
        rewards, kl = torch.ones(8).double(), torch.linspace(0, 3, 8).double().square()
        forces.append(placement.slopes(placement.kl_before_group_std, rewards, kl, beta)[1])
    assert forces[0] == pytest.approx(forces[1], rel=1e-3)
    assert forces[0] > 0.1


def test_placement_refuses_what_it_cannot_measure():
    kl = torch.linspace(0, 1, 4).double()
    with pytest.raises(ValueError, match="proportional"):
        placement.slopes(placement.kl_after_centring, 2 * kl, kl, 0.1)
    with pytest.raises(ValueError, match="not linear"):
        placement.slopes(lambda r, k, b: k**3, kl.flip(0) ** 2, kl, 0.1)


# The frameworks' own code. They are not in this project's lock: `make test-full` installs them.


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


def functions_of(package, path, *names, **namespace):
    """Functions of an installed package, from its own file, without its other dependencies."""
    try:
        file = Path(metadata.distribution(package).locate_file(path))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: make test-full compares with its own code")
    return functions_in(file, *names, **namespace)


def functions_read(framework, *names, **namespace):
    """Functions of a framework without a release, from a checkout of the commit that was read."""
    (source,) = (source for source in SOURCES if source.framework == framework)
    folder = source.repository.partition("/")[2]
    if "FRAMEWORK_SOURCES" not in os.environ:
        pytest.skip(
            f"set FRAMEWORK_SOURCES to a folder that holds {folder} at {source.version} "
            "to compare with its own code"
        )
    return functions_in(
        Path(os.environ["FRAMEWORK_SOURCES"], folder, source.file), *names, **namespace
    )


def functions_in(file, *names, **namespace):
    wanted = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            wanted.append(node)
    assert {node.name for node in wanted} == set(names), f"{file} has changed"
    module = {"torch": torch, **namespace}
    code = ast.Module([ast.parse("from __future__ import annotations").body[0], *wanted], [])
    exec(compile(code, str(file), "exec"), module)
    return [module[name] for name in names]


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

    logp, ref_logp, old_logp = tokens
    near = (logp, logp - (logp - ref_logp).clamp(-3, 3), old_logp)

    def ours(*tensors):
        return losses.trl_grpo(*tensors, bias_correction=bias_correction, level=level).sum()

    results = []
    for loss in (ours, theirs):
        leaf = near[0].double().requires_grad_()
        value = loss(leaf, near[1].double(), near[2].double())
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert results[0][1].abs().max() > 0.1


def test_liger(tokens):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make test-full")
    from liger_kernel.chunked_loss.grpo_loss import k3_loss_fn

    logp, ref_logp, old_logp = (x.double() for x in tokens)
    assert_same(
        lambda *t: losses.trl_grpo(*t, bias_correction=False),
        lambda logp, ref_logp, old_logp: k3_loss_fn(ref_logp, logp),
        (logp, ref_logp, old_logp),
    )


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "low_var_kl+", "kl+"])
def test_verl(tokens, kind):
    penalty, _ = functions_of(
        "verl", "verl/trainer/ppo/core_algos.py", "kl_penalty", "kl_penalty_forward"
    )
    double = tuple(x.double() for x in tokens)
    assert_same(
        lambda *t: losses.verl(*t, kind=kind),
        lambda logp, ref, old: penalty(logp, ref, kind),
        double,
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

    logp, ref_logp, old_logp = tokens
    near = (logp, logp - (logp - ref_logp).clamp(-9, 9), old_logp)
    assert_same(lambda *t: losses.openrlhf(*t, **options), theirs, near)


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
    ours = placement.kl_before_group_std(rewards, kl, 0.1)
    torch.testing.assert_close(theirs[:, 0], ours, rtol=0, atol=1e-6)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_nemo_rl(tokens, kind, on_policy):
    (calculate_kl,) = functions_read("NeMo-RL", "calculate_kl")

    def theirs(logp, ref_logp, old_logp):
        weights = (logp - (old_logp if on_policy else logp.detach())).exp()
        return calculate_kl(logp, ref_logp, kind, 20.0, 10.0, weights)

    assert_same(
        lambda *t: losses.nemo_rl(*t, kind=kind, on_policy_approximation=on_policy),
        theirs,
        tuple(x.double() for x in tokens),
    )


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_slime(tokens, kind, unbiased):
    (approx_kl,) = functions_read("slime", "compute_approx_kl")
    logp, ref_logp, old_logp = tokens

    def theirs(logp, ref_logp, old_logp):
        return approx_kl(logp, ref_logp, kind, (logp - old_logp).exp() if unbiased else None)

    near = (logp, logp - (logp - ref_logp).clamp(-3, 3), old_logp)  # it widens to float32 only
    assert_same(lambda *t: losses.slime(*t, kind=kind, unbiased=unbiased), theirs, near)


@pytest.mark.parametrize("estimator", range(4))
def test_open_instruct(tokens, estimator):
    (estimate_kl,) = functions_read("open-instruct", "estimate_kl")
    assert_same(
        lambda *t: losses.open_instruct(*t, estimator=estimator),
        lambda logp, ref, old: estimate_kl((logp - ref).clamp(-40, 40), (logp - old).exp())[
            estimator
        ],
        tuple(x.double() for x in tokens),
    )


@pytest.mark.parametrize(
    "kind", ["rpg_fkl", "rpg_rkl", "rpg_ufkl", "rpg_urkl", "rpg_js", "rpg_ujs"]
)
def test_rpg(tokens, kind):
    (kl_penalty,) = functions_read("RPG", "kl_penalty")
    assert_same(
        lambda *t: losses.rpg(*t, kind=kind),
        lambda logp, ref, old: kl_penalty(logp, ref, kind),
        tuple(x.double() for x in tokens),
    )


@pytest.mark.parametrize("kind", ["kl1", "kl2", "kl3"])
def test_rlhf_book(tokens, kind):
    (approx_kl,) = functions_read("rlhf-book", f"approx_{kind}")
    assert_same(
        lambda *t: losses.rlhf_book(*t, kind=kind),
        lambda logp, ref, old: approx_kl(logp, ref, None),
        tuple(x.double() for x in tokens),
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
    logp, ref_logp, old_logp = (x.double() for x in tokens)

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
        extra = 1e-3 * losses.prime_rl(*three, kind="rl") if kind == "ref_kl" else 0.0
        return (losses.prime_rl(*three, kind=kind) + extra).sum()

    assert_same(ours, theirs, (logp, ref_logp, old_logp))
