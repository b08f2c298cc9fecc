"""One KL term, three trainers: verl's and OpenRLHF's released losses differentiate it as ours."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from analysis.chapters.ch14_frameworks import states
from analysis.chapters.ch14_frameworks.one_state import term_of
from analysis.chapters.ch14_frameworks.trainers import OPTIONS
from analysis.training.kl_terms import KLTerms, Views
from kl_term.errors import UserError
from kl_term.integrations.verl import register_kl_term
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import aggregate
from tests.released import functions_in, functions_of, source_of

PAGE = (Path(__file__).parents[2] / "book" / "verl.md").read_text()
BETA = 0.7
ATTACHED = KLTerm(estimator="k3", weighting="attached")
#: verl's mode -> ours.
VERL = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


def registrable() -> list[KLTerm]:
    """Every term in the loss that reads log-probs of the sampled tokens only."""
    found = []
    names = ("estimator", "level", "weighting", "ratio")
    for values in product(*(KLTerm.model_fields[name].annotation.__args__ for name in names)):
        try:
            term = KLTerm(**dict(zip(names, values, strict=True)))
        except ValueError:
            continue
        if term.estimator != "none" and not term.reads_logits:
            found.append(term)
    return found


@pytest.fixture(scope="module")
def sampled() -> SimpleNamespace:
    """Ragged completions [6, 9] of a policy, its sampler and its reference, far from each other."""
    generator = torch.Generator().manual_seed(3)
    logp, old_logp, ref_logp = -2 * torch.rand(3, 6, 9, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([9, 1, 5, 9, 3, 7])
    return SimpleNamespace(
        logp=logp,
        old_logp=old_logp,
        ref_logp=ref_logp,
        mask=torch.arange(9) < lengths.unsqueeze(-1),
    )


def gradient(loss, data: SimpleNamespace) -> torch.Tensor:
    leaf = data.logp.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def ours(term: KLTerm, mode: str, data: SimpleNamespace) -> torch.Tensor:
    """By the loss of the population trainer, with a population of one."""
    made = KLTerms([term], ["after"], [BETA], torch.float64, torch.device("cpu"))

    def loss(logp):
        views = Views(
            *(x.view(1, 1, 6, 9) for x in (logp, data.old_logp, data.ref_logp)),
            logits=torch.zeros(1, 1, 6, 9, 2),
            target_logits=torch.zeros(1, 1, 6, 9, 2),
            mask=data.mask.view(1, 1, 6, 9),
        )
        return aggregate(made.loss(views).view(6, 9), data.mask, mode)

    return gradient(loss, data)


class Batch(dict):
    """As much of a TensorDict as verl's loss reads."""

    def select(self, *names):
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self):
        return self


@pytest.fixture
def verl(monkeypatch) -> SimpleNamespace:
    """verl's modules of losses, with the functions of its release and a policy loss of zero."""
    core = "verl/trainer/ppo/core_algos.py"
    masked_sum, masked_mean = functions_of(
        "verl", "verl/utils/torch_functional.py", "masked_sum", "masked_mean"
    )
    functional = SimpleNamespace(masked_sum=masked_sum, masked_mean=masked_mean)
    names = ("agg_loss", "kl_penalty", "kl_penalty_forward")
    agg_loss, kl_penalty, _ = functions_of("verl", core, *names, verl_F=functional)
    metric = {
        "__new__": lambda cls, value, aggregation: value,
        "from_dict": lambda values, aggregation: values,
    }
    losses = SimpleNamespace(kl_penalty=kl_penalty)
    (released,) = functions_of(
        "verl",
        "verl/workers/utils/losses.py",
        "ppo_loss",
        agg_loss=agg_loss,
        kl_penalty=lambda **given: losses.kl_penalty(**given),  # a global of its module
        no_padding_2_padding=lambda tensor, data: tensor,
        get_policy_loss_fn=lambda name: lambda log_prob, **_: (0 * log_prob.sum(), {}),
        AggregationType=SimpleNamespace(SUM="sum", MEAN="mean"),
        Metric=type("Metric", (), metric),
    )
    losses.ppo_loss = released
    modules = {
        "verl.workers.utils": SimpleNamespace(losses=losses),
        "verl.workers": SimpleNamespace(engine_workers=SimpleNamespace(ppo_loss=released)),
        "verl.trainer.distillation": SimpleNamespace(losses=SimpleNamespace(ppo_loss=released)),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(
        losses=losses,
        workers=modules["verl.workers"].engine_workers,
        distillation=modules["verl.trainer.distillation"].losses,
    )


def verls(verl: SimpleNamespace, kl_loss_type: str, mode: str, data: SimpleNamespace):
    """Gradient by verl's loss, as its worker calls it."""
    config = SimpleNamespace(
        global_batch_info={},
        loss_scale_factor=None,
        loss_agg_mode=mode,
        policy_loss={},
        use_kl_loss=True,
        kl_loss_type=kl_loss_type,
        kl_loss_coef=BETA,
    )
    batch = Batch(
        dp_size=1,
        batch_num_tokens=None,
        global_batch_size=None,
        response_mask=data.mask.long(),
        old_log_probs=data.old_logp,
        ref_log_prob=data.ref_logp,
        advantages=torch.zeros_like(data.logp),
    )
    return gradient(
        lambda logp: verl.workers.ppo_loss(
            config=config, model_output={"log_probs": logp}, data=batch, dp_group=None
        )[0],
        data,
    )


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    scale = expected.abs().max()
    assert scale > 1e-3
    assert (found - expected).abs().max() <= tolerance * scale
    assert (found + expected).abs().max() > 0.1 * scale


@pytest.mark.peers
@pytest.mark.parametrize("mode", VERL)
def test_a_registered_term_is_that_of_our_trainer(verl, sampled, mode):
    terms = registrable()
    assert len(terms) > 40
    for term in terms:
        register_kl_term(f"our_{term.name}", term)
    for term in terms:
        found = verls(verl, f"our_{term.name}", mode, sampled)
        assert_same(found, ours(term, VERL[mode], sampled))
        assert (found[~sampled.mask] == 0).all()


@pytest.mark.peers
def test_verls_own_names_stay_its_own(verl, sampled):
    """Each is the term that chapter 14 says, and none is the attached k3."""
    at = states(20, 8, drift=0.4, staleness=0.4, seed=3)
    before = {
        option.setting: verls(verl, option.setting, "token-mean", sampled)
        for option in OPTIONS
        if option.framework == "verl"
    }
    register_kl_term("attached", ATTACHED)
    attached = verls(verl, "attached", "token-mean", sampled)
    for option in OPTIONS:
        if option.framework == "verl":
            found = verls(verl, option.setting, "token-mean", sampled)
            assert torch.equal(found, before[option.setting])
            assert (found - attached).abs().max() > 0.1 * attached.abs().max(), option.setting
            if term := term_of(option, at):
                assert_same(found, ours(term, "token_mean", sampled))


@pytest.mark.peers
def test_every_module_of_verl_has_the_extended_loss(verl):
    register_kl_term("one", ATTACHED)
    extended = verl.losses.ppo_loss
    register_kl_term("two", KLTerm(estimator="k2"))
    assert extended is verl.losses.ppo_loss is verl.workers.ppo_loss is verl.distillation.ppo_loss
    assert list(extended.kl_terms) == ["one", "two"]


@pytest.mark.peers
def test_a_name_is_refused_where_nobody_registered_it(verl, sampled):
    with pytest.raises(NotImplementedError):
        verls(verl, "k3_attached", "token-mean", sampled)
    for name in ("k3", "low_var_kl+", "mse"):
        with pytest.raises(UserError, match="an estimator of verl's own"):
            register_kl_term(name, ATTACHED)


@pytest.mark.parametrize(
    ("term", "why"),
    [
        (KLTerm(estimator="k1", placement="reward"), "is no term of the loss"),
        (KLTerm(estimator="none"), "is no term of the loss"),
        (KLTerm(estimator="exact"), "reads logits"),
        (
            KLTerm(estimator="k3", weighting="attached", ratio="prefix", control="fitted"),
            "from batch to batch",
        ),
    ],
)
def test_other_terms_are_refused(term, why):
    with pytest.raises(UserError, match=why):
        register_kl_term("mine", term)


@pytest.mark.peers
def test_the_sample_of_the_page_registers_what_its_options_name(verl, sampled):
    (sample,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(sample, {})
    (name,) = re.findall(r"kl_loss_type=(\w+)", PAGE)
    found = verls(verl, name, "token-mean", sampled)
    assert_same(found, ours(ATTACHED, "token_mean", sampled))
    model = source_of("verl", "verl/workers/config/model.py").read_text()
    assert "import_external_libs(self.external_lib)" in model
    actor = source_of("verl", "verl/workers/config/actor.py").read_text()
    for option in re.findall(r"actor_rollout_ref\.actor\.(\w+)=", PAGE):
        assert f"    {option}: " in actor


def patched(source: str) -> str:
    """OpenRLHF's file with the page's patch, each hunk of which stands at one place of it."""
    (patch,) = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL)
    for hunk in re.split(r"^@@.*\n", patch, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] == " ")
        assert source.count(before) == 1
        source = source.replace(before, "".join(line[1:] for line in lines))
    return source


@pytest.mark.peers
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean"])
def test_the_patch_of_openrlhf_has_the_gradient_of_our_term(sampled, mode):
    released = source_of("openrlhf", "openrlhf/trainer/ray/ppo_actor.py").read_text()
    by_token = mode == "token_mean"
    without = openrlhfs(released, sampled, by_token)
    assert_same(openrlhfs(patched(released), sampled, by_token), ours(ATTACHED, mode, sampled))
    assert_same(without, ours(KLTerm(estimator="k3"), mode, sampled))
    corrected = openrlhfs(released, sampled, by_token, unbiased_gradient=True)
    detached = KLTerm(estimator="k2", weighting="detached")
    assert_same(corrected, ours(detached, mode, sampled))


def openrlhfs(source: str, data: SimpleNamespace, by_token: bool, **flags: bool) -> torch.Tensor:
    """Gradient by the lines of the actor's step that make its KL loss, in float32."""
    (line,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self.args.algo.kl.use_loss"
    ]
    added = [
        text
        for node in ast.parse(source).body
        if (text := ast.unparse(node)).startswith("from kl_term.")
    ]
    (approx_kl, masked_mean) = functions_of(
        "openrlhf",
        "openrlhf/models/utils.py",
        "compute_approx_kl",
        "masked_mean",
        KL_IS_WEIGHT_CLIP=10.0,
    )
    loss_file = source_of("openrlhf", "openrlhf/models/loss.py")
    (aggregate_loss,) = functions_in(loss_file, "aggregate_loss", masked_mean=masked_mean)
    kl = SimpleNamespace(use_loss=True, init_coef=BETA, estimator="k3", unbiased_gradient=False)
    vars(kl).update(flags)

    def loss(logp):
        names = {
            "self": SimpleNamespace(args=SimpleNamespace(algo=SimpleNamespace(kl=kl))),
            "compute_approx_kl": approx_kl,
            "aggregate_loss": aggregate_loss,
            "masked_mean": masked_mean,
            "torch": torch,
            "action_log_probs": logp,
            "base_action_log_probs": data.ref_logp,
            "old_action_log_probs": data.old_logp,
            "experience": SimpleNamespace(action_mask=data.mask.long(), info={}),
            "loss_batch_info": {"token_level_loss": by_token},
        }
        exec("\n".join(added), names)
        exec(textwrap.dedent(ast.unparse(line)), names)
        return BETA * names["kl_loss"]

    return gradient(loss, data)


@pytest.mark.peers
def test_openrlhf_clamps_k1_and_verl_does_not(verl):
    (approx_kl,) = functions_of("openrlhf", "openrlhf/models/utils.py", "compute_approx_kl")
    logp, ref_logp = torch.zeros(3), torch.tensor([12.0, 1.0, -12.0])
    assert approx_kl(logp, ref_logp, kl_estimator="k1").tolist() == [-10, -1, 10]
    assert verl.losses.kl_penalty(logp, ref_logp, "k1").tolist() == [-12, -1, 12]
