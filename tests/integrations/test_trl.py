"""Our KL terms in TRL's trainer: its own loss to the last digits, and each other term's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kl_term.diagnosis.readers import read_rollouts
from kl_term.errors import UserError
from kl_term.integrations.measurements import MEASUREMENTS
from kl_term.kl.term import KLTerm
from tests.integrations import tiny_trl

pytest.importorskip("trl", reason="the extra trl is not installed: make test-full")
pytestmark = pytest.mark.peers

from trl import GRPOTrainer  # noqa: E402

from kl_term.integrations.trl import KLGRPOTrainer  # noqa: E402
from kl_term.integrations.trl.aggregation import LOSS_TYPES  # noqa: E402

BETA = 0.5
#: One of each way through the trainer; over all terms: test_one_term.py.
TERMS = [
    KLTerm(estimator="k3"),
    KLTerm(estimator="k1", weighting="attached"),
    KLTerm(estimator="k2", weighting="detached"),
    KLTerm(estimator="k3_clip"),
    KLTerm(estimator="minimax01", weighting="detached"),
    KLTerm(estimator="k3", weighting="attached", ratio="prefix"),
    KLTerm(estimator="k2", weighting="detached", ratio="geometric"),
    KLTerm(estimator="k3", level="sequence", weighting="attached"),
    KLTerm(estimator="k2", level="sequence"),
    KLTerm(estimator="exact"),
    KLTerm(estimator="exact", top_k=3),
    KLTerm(estimator="forward", top_k=3, support="policy", correction="unnormalised"),
    KLTerm(estimator="k1", placement="reward", credit="immediate"),
    KLTerm(estimator="k3", placement="reward"),
    KLTerm(estimator="k2", placement="reward", credit="whole"),
    KLTerm(estimator="k1", placement="reward", level="sequence"),
]


def label(term: KLTerm) -> str:
    return "-".join(str(value) for value in term.model_dump(exclude_defaults=True).values()) or "k3"


@pytest.fixture
def make(model, tmp_path):
    def maker(kl_term=None, *, dump_rollouts=None, **settings):
        given = tiny_trl.arguments(model, tmp_path, beta=BETA, **settings)
        return KLGRPOTrainer(**given, kl_term=kl_term, dump_rollouts=dump_rollouts)

    return maker


def stale_batch(trainer, *, training: bool = True):
    """A micro-batch whose sampler is not the policy, and the reference neither."""
    trainer.model.train(training)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    torch.manual_seed(0)
    move(trainer.model, 0.05)
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    prompts = [
        row
        for row in list(trainer.train_dataset)[: rows // tiny_trl.GROUP]
        for _ in range(tiny_trl.GROUP)
    ]
    inputs = trainer._prepare_inputs(prompts)
    assert len(set(inputs["completion_mask"].sum(1).tolist())) > 1, "completions of one length"
    move(trainer.model, 0.03)
    return inputs


def move(model, distance: float) -> None:
    """What is trained of it: all, or its adapters."""
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:
                weights.add_(distance * torch.randn_like(weights))


def loss_of(kind, trainer, inputs):
    """Loss and gradient by the code of one class or the other."""
    return with_gradient(trainer, kind._compute_loss(trainer, trainer.model, inputs))


def with_gradient(trainer, value):
    return value.detach(), torch.cat(
        [g.flatten() for g in torch.autograd.grad(value, list(trainer.model.parameters()))]
    )


def assert_equal(ours, theirs, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance)
    scale = theirs[1].abs().max()
    assert scale > 1e-3
    assert (ours[1] - theirs[1]).abs().max() <= 5 * tolerance * scale


CASES = [
    *({"loss_type": name, "num_iterations": 2} for name in LOSS_TYPES),
    {"num_iterations": 1},
    {"num_iterations": 2, "use_bias_correction_kl": False},
    {"num_iterations": 3, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    {"num_iterations": 2, "importance_sampling_level": "sequence", "loss_type": "luspo"},
    {
        "num_iterations": 2,
        "importance_sampling_level": "sequence",
        "use_bias_correction_kl": False,
    },
    {"num_iterations": 2, "gradient_accumulation_steps": 2},
    {"num_iterations": 2, "steps_per_generation": 4},
    {"num_iterations": 2, "gradient_accumulation_steps": 2, "loss_type": "dr_grpo"},
    {"num_iterations": 2, "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    {"num_iterations": 2, "delta": 1.5, "off_policy_mask_threshold": 0.05},
    {"num_iterations": 2, "scale_rewards": "batch", "temperature": 0.7},
    {"num_iterations": 2, "mask_truncated_completions": True},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_without_a_choice_the_loss_is_that_of_trl(make, settings):
    trainer = make(**settings)
    inputs = stale_batch(trainer)
    ours, theirs = (loss_of(kind, trainer, inputs) for kind in (KLGRPOTrainer, GRPOTrainer))
    assert_equal(ours, theirs)
    logged, theirs_logged = trainer._metrics["train"]["kl"]
    assert logged == pytest.approx(theirs_logged, rel=1e-5)
    trainer.beta = -BETA
    flipped = loss_of(GRPOTrainer, trainer, inputs)
    with pytest.raises(AssertionError):
        assert_equal(ours, flipped, 1e-2)


def test_in_evaluation_the_loss_is_that_of_trl(make):
    trainer = make(num_iterations=2, gradient_accumulation_steps=2, steps_per_generation=2)
    inputs = stale_batch(trainer, training=False)
    ours, theirs = (loss_of(kind, trainer, inputs) for kind in (KLGRPOTrainer, GRPOTrainer))
    assert_equal(ours, theirs)


def test_whole_run_is_that_of_trl(make, model, tmp_path):
    settings = {"num_iterations": 2, "max_steps": 4, "learning_rate": 1e-3}
    given = tiny_trl.arguments(model, tmp_path, beta=BETA, **settings)
    theirs = GRPOTrainer(**given)
    theirs.train()
    ours = make(**settings)
    ours.train()
    for one, other in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert one["reward"] == other["reward"] if "reward" in other else True
    assert theirs.state.log_history[-2]["kl"] > 0


def share_of(term: KLTerm, trainer, inputs) -> torch.Tensor:
    """The term's share of a dapo loss, from the model's own logits and nothing of the trainer's."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]

    def table(model):
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
        return (logits / trainer.temperature).log_softmax(-1)

    policy = table(trainer.model)
    with torch.no_grad():
        reference = table(trainer.ref_model)
    tokens = inputs["completion_ids"].unsqueeze(-1)
    loss = term.loss(
        *(x.gather(-1, tokens)[..., 0] for x in (policy, reference)),
        old_logp=inputs["old_per_token_logps"],
        mask=inputs["completion_mask"],
        logits=policy,
        ref_logits=reference,
    )
    return BETA * loss.sum() / inputs["num_items_in_batch"]


@pytest.mark.parametrize("term", [t for t in TERMS if t.placement == "loss"], ids=label)
def test_term_in_the_loss_is_the_term(make, term):
    trainer = make(term, num_iterations=2, temperature=0.8)
    inputs = stale_batch(trainer)
    with_term = loss_of(KLGRPOTrainer, trainer, inputs)
    trainer.beta = 0.0
    without = loss_of(GRPOTrainer, trainer, inputs)
    ours = tuple(one - other for one, other in zip(with_term, without, strict=True))
    theirs = with_gradient(trainer, share_of(term, trainer, inputs))
    assert_equal(ours, theirs, 2e-5)
    with pytest.raises(AssertionError):
        assert_equal(ours, tuple(-x for x in theirs), 1e-1)


@pytest.mark.parametrize("term", [t for t in TERMS if t.placement == "reward"], ids=label)
@pytest.mark.parametrize("iterations", [1, 2])
def test_term_in_the_reward_is_subtracted_from_the_advantages(make, term, iterations):
    trainer, plain = (make(t, num_iterations=iterations) for t in (term, None))
    inputs, without = stale_batch(trainer), stale_batch(plain)
    torch.testing.assert_close(inputs["completion_ids"], without["completion_ids"])
    old, ref = inputs["old_per_token_logps"], inputs["ref_per_token_logps"]
    assert (old - ref).abs().max() > 0.1
    mask = inputs["completion_mask"].bool()
    owed = BETA * term.penalty(old, ref, mask=mask)
    outcome = without["advantages"].unsqueeze(-1)
    torch.testing.assert_close(
        inputs["advantages"][mask], (outcome - owed)[mask], rtol=1e-5, atol=1e-5
    )
    assert not torch.allclose(inputs["advantages"][mask], (outcome + owed)[mask])
    trainer.beta = 0.0
    inputs.pop("kl_penalties")
    ours, theirs = (loss_of(kind, trainer, inputs) for kind in (KLGRPOTrainer, GRPOTrainer))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("term", TERMS, ids=label)
def test_every_term_trains_and_is_measured(make, term, tmp_path):
    trainer = make(term, num_iterations=2, max_steps=3)
    trainer.train()
    first, *_, last = trainer.state.log_history[:-1]
    assert first["kl_term/k1"] == pytest.approx(0.0, abs=1e-6)
    assert last["kl_term/max_abs_log_ratio"] > 0
    logged = {name.removeprefix("kl_term/") for name in last if name.startswith("kl_term/")}
    wanted = {"k1", "k2", "k3", "max_abs_log_ratio", "k3_gradient_gap", "ess", "surprise_gap"}
    wanted |= {"tokens"}
    wanted |= {"penalty"} if term.placement == "reward" else {"term", "loss"}
    wanted |= {"capped"} if term.estimator == "k3_clip" else set()
    assert logged == wanted
    assert logged <= set(MEASUREMENTS)
    assert all(math.isfinite(last[f"kl_term/{name}"]) for name in logged)


def test_none_measures_a_reference_that_the_loss_does_not_see(model, tmp_path):
    given = tiny_trl.arguments(model, tmp_path, beta=0.0, num_iterations=2)
    plain = GRPOTrainer(**given)
    plain.train()
    trainer = KLGRPOTrainer(**given, kl_term=KLTerm(estimator="none"))
    trainer.train()
    for ours, theirs in zip(trainer.state.log_history, plain.state.log_history, strict=True):
        assert ours.get("loss") == theirs.get("loss")
    assert trainer.state.log_history[2]["kl_term/k3"] > 0
    assert "kl" not in trainer.state.log_history[2]


@pytest.mark.parametrize(
    ("kl_term", "settings", "message"),
    [
        (None, {"beta": -0.1}, "rewards divergence"),
        (None, {"loss_type": "ppo"}, "loss_type='ppo' is not supported"),
        (KLTerm(estimator="none"), {"beta": 0.1}, "measures only"),
        (KLTerm(estimator="forward"), {"beta": 0.1}, "'forward' is not supported here"),
        (KLTerm(weighting="attached"), {"use_bias_correction_kl": False}, "contradicts"),
        (KLTerm(estimator="k2"), {"beta": 0.0}, r"no effect at GRPOConfig\.beta=0, TRL's default"),
        ("k2", {"beta": 0.0}, r"kl_term='k2' is no KLTerm"),
        (None, {"beta": 0.0, "dump_rollouts": "dump"}, "dump_rollouts needs a reference"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(model, tmp_path, kl_term, settings, message):
    dump = {name: settings.pop(name) for name in ("dump_rollouts",) if name in settings}
    given = tiny_trl.arguments(model, tmp_path, **settings)
    with pytest.raises(ValueError, match=message) as raised:
        KLGRPOTrainer(**given, kl_term=kl_term, **dump)
    assert "\n" not in str(raised.value)


def test_exact_refuses_heads_that_are_not_linear(make):
    trainer = make(KLTerm(estimator="exact"))
    from kl_term.integrations.trl.hidden_states import refuse_nonlinear_heads

    refuse_nonlinear_heads(trainer.model)
    trainer.model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0"):
        refuse_nonlinear_heads(trainer.model)


def test_dump_is_diagnosed(make, tmp_path, capsys):
    from kl_term.cli.diagnose import diagnose

    trainer = make(
        KLTerm(estimator="k1", placement="reward", credit="to_go"),
        dump_rollouts=tmp_path / "dump",
        num_iterations=2,
        max_steps=4,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "dump" / "rollouts-0.jsonl").open()]
    assert len(lines) == 4 * 2 * tiny_trl.PROMPTS * tiny_trl.GROUP
    diagnose(tmp_path / "dump", json=tmp_path / "report.json", page=tmp_path / "page.html")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 4
    assert report["sequences"] == len(lines)
    counted = sum(sum(line["mask"]) for line in lines)
    assert report["tokens"] == counted
    assert "KL by k1" in capsys.readouterr().out
    logged = [log["kl_term/k1"] for log in trainer.state.log_history if "kl_term/k1" in log]
    # over the tokens of both micro-batches: the mean of their own means is another number
    assert logged == pytest.approx([step["k1"] for step in report["by_step"]], abs=1e-5)


@pytest.fixture(scope="module")
def two_processes(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    script = Path(__file__).with_name("two_processes.py")
    ran = subprocess.run(
        [*launch, "--standalone", str(script), model, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


def test_two_processes_train_as_trl_does(two_processes):
    logs = {
        name: json.loads((two_processes / f"{name}-0.json").read_text())[:-1]
        for name in ("trl", "ours", "exact", "reward")
    }
    for ours, theirs in zip(logs["ours"], logs["trl"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-4, abs=1e-6)
    assert logs["trl"][-1]["kl"] > 0.01
    assert logs["exact"][-1]["kl_term/term"] > 0.01
    assert logs["reward"][-1]["kl_term/penalty"] != 0


def test_two_processes_dump_a_file_each(two_processes):
    dump = two_processes / "dump-ours"
    assert sorted(file.name for file in dump.glob("*.jsonl")) == [
        "rollouts-0.jsonl",
        "rollouts-1.jsonl",
    ]
    logged = json.loads((two_processes / "ours-0.json").read_text())[:-1]
    rollouts = read_rollouts(dump)
    assert rollouts.sequences == 4 * 8
    for log in logged:
        step = rollouts.step == log["step"] - 1
        k1 = (rollouts.logp - rollouts.ref_logp)[step].mean()
        assert log["kl_term/k1"] == pytest.approx(k1, abs=1e-5)


# What practitioners met.


def test_beta_is_read_at_every_step(make):
    """A callback may change it, as it may TRL's own."""
    trainer = make(num_iterations=2)
    inputs = stale_batch(trainer)
    trainer.beta = 3 * BETA
    ours, theirs = (loss_of(kind, trainer, inputs) for kind in (KLGRPOTrainer, GRPOTrainer))
    assert_equal(ours, theirs)
    trainer.beta = -1.0
    with pytest.raises(UserError, match="rewards divergence"):
        loss_of(KLGRPOTrainer, trainer, inputs)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "dapo", "grpo"])
def test_the_loss_that_is_logged_is_the_whole_steps(make, loss_type):
    """Half of the rows at a time, twice: the mean of both is the loss of all rows at once."""
    logged = []
    for accumulation in (1, 2):
        rows = tiny_trl.PROMPTS * tiny_trl.GROUP // accumulation
        trainer = make(
            KLTerm(estimator="k2"),
            loss_type=loss_type,
            num_iterations=2,
            max_steps=2,
            shuffle_dataset=False,
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=rows,
        )
        trainer.train()
        logged.append([log["kl_term/loss"] for log in trainer.state.log_history[:-1]])
    assert logged[0][1] > 1e-4
    # the same completions in the first step; its update, and so the second, differs by rounding
    assert logged[1] == pytest.approx(logged[0], rel=0.05, abs=1e-6)


def test_a_resumed_run_dumps_each_step_once(make, model, tmp_path):
    dump = tmp_path / "dump"
    first = make(dump_rollouts=dump, max_steps=3, save_strategy="steps", save_steps=2)
    first.train()
    steps, file = read_rollouts(dump).step, dump / "rollouts-0.jsonl"
    before = file.read_bytes()
    with pytest.raises(
        UserError, match=r"rollouts-0.jsonl holds the rollouts of another run: name"
    ):
        make(dump_rollouts=dump, max_steps=3).train()
    assert file.read_bytes() == before
    again = make(dump_rollouts=dump, max_steps=4, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = read_rollouts(dump)
    assert set(steps) == {0, 1, 2} and set(found.step) == {0, 1, 2, 3}
    for step in range(4):
        assert len(set(found.sequence[found.step == step])) == 8


def test_exact_reads_the_head_of_a_reference_whose_adapter_is_off(model, tmp_path):
    """An adapter that trains the head: the reference's is the one it started with."""
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-full")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    given = tiny_trl.arguments(model, tmp_path, beta=BETA, num_iterations=2, loss_type="bnpo")
    trainer = KLGRPOTrainer(**given, kl_term=KLTerm(estimator="exact"), peft_config=lora)
    inputs = stale_batch(trainer)
    trainer._compute_loss(trainer.model, inputs)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]

    def table():
        with torch.no_grad():
            logits = trainer.model(input_ids=ids, attention_mask=seen).logits
        return logits[:, -length - 1 : -1].log_softmax(-1)

    policy = table()
    with trainer.model.disable_adapter():
        reference = table()
    kl = (policy.exp() * (policy - reference)).sum(-1)[inputs["completion_mask"].bool()].mean()
    assert kl > 0.01
    assert trainer._metrics["train"]["kl_term/term"] == pytest.approx([kl.item()], rel=1e-4)
