"""The diagnosis in a run of TRL's own trainer, dump controls, and a coefficient that follows."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

from benchmarks.diagnosis import tiny_runs
from kl_term.diagnosis.causes import find
from kl_term.diagnosis.dumping import Dump
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.readers import read_rollouts, recorded_settings
from kl_term.errors import UserError
from kl_term.kl.term import KLTerm
from tests.integrations import tiny_trl

pytest.importorskip("trl", reason="the extra trl is not installed: make test-full")
pytestmark = pytest.mark.peers

import transformers.trainer  # noqa: E402
import trl  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from kl_term.integrations.trl import DiagnosisCallback, KLGRPOTrainer, TargetKL  # noqa: E402
from kl_term.integrations.trl.aggregation import LOSS_TYPES  # noqa: E402

LARGER = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "num_iterations": 2,
    "max_steps": 8,
    "beta": 0.05,
}


@pytest.fixture
def plain(model, tmp_path):
    """TRL's own trainer, or ours with these options."""

    def make(ours=None, **settings):
        given = tiny_trl.arguments(model, tmp_path / "out", **LARGER | settings)
        return GRPOTrainer(**given) if ours is None else KLGRPOTrainer(**given, **ours)

    return make


def flip_advantages(trainer) -> None:
    scored = trainer._generate_and_score_completions

    def flipped(*given):
        output = scored(*given)
        output["advantages"] = -output["advantages"]
        return output

    trainer._generate_and_score_completions = flipped


def test_a_run_with_liger_kernels_is_checked_too(plain, monkeypatch):
    """TRL keeps Liger's fused loss off, and scores every token itself."""
    applied = []
    monkeypatch.setattr(
        transformers.trainer, "apply_liger_kernel", lambda *given: applied.append(given[1])
    )
    trainer = plain(use_liger_kernel=True, max_steps=4)
    trainer.add_callback(DiagnosisCallback(trainer, every=2))
    trainer.train()
    assert [config["fused_linear_cross_entropy"] for config in applied] == [False]
    assert any("diagnosis/k1" in log for log in trainer.state.log_history)
    page = (Path(__file__).parents[2] / "book/trl.md").read_text(encoding="utf-8")
    assert "nothing is checked" not in page


def test_a_sound_run_is_checked_without_a_word(plain, caplog):
    trainer = plain()
    callback = DiagnosisCallback(trainer, every=4)
    trainer.add_callback(callback)
    with caplog.at_level(logging.WARNING, logger="kl_term"):
        trainer.train()
    assert trainer.state.global_step == 8 and caplog.messages == []
    logged = [log for log in trainer.state.log_history if "diagnosis/errors" in log]
    assert [log["step"] for log in logged] == [4, 8]
    assert [log["diagnosis/errors"] for log in logged] == [0.0, 0.0]
    assert logged[1]["diagnosis/k1"] != 0


@pytest.mark.parametrize(
    ("every", "tokens", "settings", "checks"),
    [
        (3, 50_000, {}, [4, 8]),
        (4, 1, {}, [4, 8]),
        (2, 50_000, {"per_device_train_batch_size": 16, "steps_per_generation": 2}, [4, 8]),
        (1, 50_000, {"per_device_train_batch_size": 16, "steps_per_generation": 4}, [8]),
    ],
)
def test_rollouts_are_checked_whole(plain, caplog, every, tokens, settings, checks):
    """A part of one has groups that lack completions, and first steps that are none."""
    trainer = plain(**settings)
    trainer.add_callback(DiagnosisCallback(trainer, every=every, tokens=tokens))
    with caplog.at_level(logging.WARNING, logger="kl_term"):
        trainer.train()
    assert caplog.messages == []
    logged = [log["step"] for log in trainer.state.log_history if "diagnosis/errors" in log]
    assert logged == checks


def test_the_run_is_that_of_trl(plain):
    watched, alone = plain(), plain()
    watched.add_callback(DiagnosisCallback(watched, every=2))
    for trainer in (watched, alone):
        torch.manual_seed(0)
        trainer.train()
    for one, other in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_fault_is_said_once_in_one_line_and_may_stop_the_run(plain, caplog):
    for stop_on, steps in (((), 8), (("advantage-sign",), 4), (("error",), 4)):
        caplog.clear()
        trainer = plain()
        flip_advantages(trainer)
        callback = DiagnosisCallback(trainer, every=4, stop_on=stop_on)
        trainer.add_callback(callback)
        with caplog.at_level(logging.WARNING, logger="kl_term"):
            trainer.train()
        assert trainer.state.global_step == steps
        said = [line for line in caplog.messages if "advantage-sign" in line]
        assert len(said) == 1 and "\n" not in said[0] and said[0].startswith("step 4, error")
        assert callback.findings["advantage-sign"].severity == "error"


REFUSED = [
    ("needs a reference: GRPOConfig.beta is 0", lambda at: DiagnosisCallback(at(beta=0.0))),
    ("stop_on wrong: no such code", lambda at: DiagnosisCallback(at(), stop_on=("wrong",))),
    ("stop_on='error': give a tuple", lambda at: DiagnosisCallback(at(), stop_on="error")),
    ("must be at least 1", lambda at: DiagnosisCallback(at(), every=0)),
    ("must be positive", lambda at: Dump(Path("dump"), every=0)),
    ("must be positive", lambda at: Dump(Path("dump"), tokens=0)),
    ("give jsonl or parquet", lambda at: Dump(Path("dump"), format="csv")),
    ("must be positive", lambda at: TargetKL(0.0)),
    ("horizon", lambda at: TargetKL(0.1, horizon=0.1, clip=0.2)),
    ("no coefficient to move", lambda at: at(ours={"target_kl": TargetKL(0.1)}, beta=0.0)),
    ("kl_loss_type='mean': use one of", lambda at: at(ours={"kl_loss_type": "mean"})),
    (
        "aggregates a term in the loss",
        lambda at: at(
            ours={
                "kl_term": KLTerm(estimator="k1", placement="reward"),
                "kl_loss_type": "bnpo",
            }
        ),
    ),
]


@pytest.mark.parametrize(("named", "call"), REFUSED)
def test_what_has_no_meaning_is_refused(plain, named, call):
    with pytest.raises(UserError, match=named):
        call(plain)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_plain_trainer_dumps_what_ours_does(plain, tmp_path, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    trainer = plain()
    trainer.add_callback(DiagnosisCallback(trainer, dump=Dump(tmp_path / "plain", format=form)))
    ours = plain({"dump_rollouts": Dump(tmp_path / "ours", format=form)})
    for each in (trainer, ours):
        torch.manual_seed(0)
        each.train()
    one, other = (read_rollouts(tmp_path / name) for name in ("plain", "ours"))
    for name in ("logp", "old_logp", "ref_logp", "entropy", "reward", "advantage"):
        assert abs(getattr(one, name) - getattr(other, name)).max() < 1e-5, name
    for name in ("group", "token", "padding", "step", "sequence"):
        assert (getattr(one, name) == getattr(other, name)).all(), name
    assert one.kl_term is None and other.kl_term is not None
    settings = recorded_settings(tmp_path / "plain")
    assert settings == recorded_settings(tmp_path / "ours")
    assert settings.group_size == 8 and settings.framework == "trl"
    assert [f for f in find(measure(one, settings)) if f.severity != "note"] == []


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_dump_controls(plain, tmp_path, form):
    """Every second generation batch; or until a budget of tokens is used up: each batch whole."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    for name, limits in (("second", {"every": 2}), ("budget", {"tokens": 500})):
        dump = Dump(tmp_path / name, format=form, **limits)
        torch.manual_seed(0)
        plain({"dump_rollouts": dump}).train()
    second, budget = (read_rollouts(tmp_path / name) for name in ("second", "budget"))
    assert sorted(set(second.step)) == [0, 1, 4, 5]
    assert second.rows == second.tokens, "no padding"
    first = int((second.step <= 1).sum())
    assert budget.tokens >= 500 and len(set(budget.step)) == 2 * (1 if first >= 500 else 2)


# The coefficient, and how the term is aggregated.


def test_target_by_hand():
    target = TargetKL(0.1, horizon=10.0, clip=0.2)
    assert target.updated(1.0, 0.1) == 1.0
    assert target.updated(1.0, 0.11) == pytest.approx(1.01)
    assert target.updated(1.0, 5.0) == pytest.approx(1.02)
    assert target.updated(1.0, -5.0) == pytest.approx(0.98)


@pytest.mark.parametrize(("target", "rises"), [(1e-6, True), (10.0, False)])
def test_beta_follows_the_kl_and_is_kept_beside_checkpoints(plain, tmp_path, target, rises):
    """The KL is above the first target at every step but the first, and below the second."""
    settings = {"save_strategy": "steps", "save_steps": 4, "num_iterations": 1}
    ours = {"kl_term": KLTerm(estimator="k2"), "target_kl": TargetKL(target)}
    trainer, again = (plain(ours, **settings) for _ in range(2))
    trainer.train()
    betas = [log["kl_term/beta"] for log in trainer.state.log_history if "kl_term/beta" in log]
    kls = [log["kl_term/k1"] for log in trainer.state.log_history if "kl_term/k1" in log]
    expected = [0.05]
    for kl in kls:
        expected.append(TargetKL(target).updated(expected[-1], kl))
    assert betas == pytest.approx(expected[:-1], rel=1e-5)
    assert (betas[-1] > betas[1]) == rises
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    resumed = [log["kl_term/beta"] for log in again.state.log_history if "kl_term/beta" in log]
    assert resumed[-4:] == pytest.approx(betas[-4:], rel=0.02)
    assert resumed[4] == pytest.approx(betas[4], rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_kl_is_aggregated_apart_from_the_policy_loss(plain, loss_type):
    """What a loss type adds under its own name, it adds to another's policy loss."""
    added, policy = {}, {}
    for kind, own in ((loss_type, None), ("bnpo", loss_type), ("bnpo", None)):
        settings = {"loss_type": kind, "max_steps": 1, "shuffle_dataset": False}
        trainer = plain({"kl_term": KLTerm(estimator="k2"), "kl_loss_type": own}, **settings)
        torch.manual_seed(0)
        with torch.no_grad():
            for weights in trainer.model.parameters():
                weights.add_(0.03 * torch.randn_like(weights))
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        torch.manual_seed(1)
        rows = [row for row in list(trainer.train_dataset)[:4] for _ in range(8)]
        inputs = trainer._prepare_inputs(rows)
        loss = trainer._compute_loss(trainer.model, inputs).item()
        added[kind, own] = trainer._metrics["train"]["kl_term/loss"][-1]
        policy[kind, own] = loss - added[kind, own]
    assert added["bnpo", loss_type] == pytest.approx(added[loss_type, None], rel=1e-5)
    assert policy["bnpo", loss_type] == pytest.approx(policy["bnpo", None], abs=1e-6)
    assert added[loss_type, None] > 0


def test_the_samples_of_the_page_run(model, tmp_path, monkeypatch):
    """Every sample in Python, in order, on a tiny model and for two steps."""
    page = (Path(__file__).parents[2] / "book" / "trl.md").read_text()
    samples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(samples) >= 4
    tiny = {"max_steps": 2, "num_iterations": 2}
    real = trl.GRPOConfig

    def configured(output_dir, **settings):
        with monkeypatch.context() as inner:
            inner.setattr(trl, "GRPOConfig", real)
            return tiny_trl.config(tmp_path / output_dir, **tiny | settings)

    monkeypatch.setattr(trl, "GRPOConfig", configured)
    monkeypatch.chdir(tmp_path)
    names = {"reward": tiny_runs.even, "dataset": tiny_trl.digits()}
    for sample in samples:
        exec(sample.replace("Qwen/Qwen3-0.6B", model), names)
    assert read_rollouts(tmp_path / "dump").sequences == 16
    assert read_rollouts(tmp_path / "dump-parquet").kl_term is not None
    assert read_rollouts(tmp_path / "dump-plain").sequences == 16
