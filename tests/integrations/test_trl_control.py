"""A weight of the control variate that follows the answers of a run of TRL's."""

from __future__ import annotations

import json

import pytest
import torch

from kl_term.kl.control import FIRST, MEMORY
from kl_term.kl.term import KLTerm
from tests.integrations import tiny_trl
from tests.training.test_fitted_control import sums_by_hand

pytest.importorskip("trl", reason="the extra trl is not installed: make test-full")
pytestmark = pytest.mark.peers

from kl_term.integrations.trl import KLGRPOTrainer  # noqa: E402
from tests.integrations.test_trl_callback import LARGER  # noqa: E402

PREFIX = {"estimator": "k3", "weighting": "attached", "ratio": "prefix"}
FITTED = KLTerm(**PREFIX, control="fitted")


@pytest.fixture
def trainer_of(model, tmp_path):
    def make(term=FITTED, **settings):
        settings = LARGER | {"learning_rate": 1e-2} | settings
        given = tiny_trl.arguments(model, tmp_path / "out", **settings)
        return KLGRPOTrainer(**given, kl_term=term)

    return make


def spied(trainer):
    """Of each micro-batch: the generation it is of, and its sums by another route."""
    seen, generation, follow = [], [0], trainer._control
    add, advance = follow.add, follow.advance

    def adding(sampled):
        tensors = (sampled.logp, sampled.ref_logp, sampled.old_logp)
        wide = (x.detach().double().unsqueeze(0) for x in tensors)
        seen.append((generation[0], sums_by_hand(*wide, sampled.mask.bool().unsqueeze(0))))
        add(sampled)

    def advancing():
        generation[0] += 1
        advance()

    follow.add, follow.advance = adding, advancing
    return seen


def logged(trainer):
    return [log["kl_term/control"] for log in trainer.state.log_history if "kl_term/control" in log]


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_iterations": 1, "gradient_accumulation_steps": 2, "max_steps": 4}],
    ids=["two iterations", "accumulated"],
)
def test_the_weight_is_what_earlier_generations_fit(trainer_of, settings):
    """And of no micro-batch of the generation that is trained on."""
    trainer = trainer_of(**settings)
    seen = spied(trainer)
    trainer.train()
    steps = trainer.args.max_steps
    each = len(seen) // steps
    for step, weight in enumerate(logged(trainer)):
        now = seen[step * each][0]
        faded = torch.full((2,), FIRST * MEMORY ** (now - 1), dtype=torch.float64)
        for generation, sums in seen:
            if generation < now:
                faded += MEMORY ** (now - 1 - generation) * sums
        assert weight == pytest.approx((faded[0] / faded[1]).clamp(0, 1).item(), rel=1e-4)
    assert logged(trainer)[0] == 1.0 > min(logged(trainer))
    assert len({generation for generation, _ in seen}) > 2


def test_a_generation_is_trained_on_with_one_weight_and_an_evaluation_feeds_none(trainer_of):
    trainer = trainer_of()
    follow = trainer._control
    follow._fit.sums.copy_(torch.tensor([1.0, 4.0]))
    trainer.model.eval()
    trainer.current_gradient_accumulation_steps = 1
    rows = [row for row in list(trainer.train_dataset)[:4] for _ in range(8)]
    inputs = trainer._prepare_inputs(rows)
    with torch.no_grad():
        for weights in trainer.model.parameters():
            weights.add_(0.03 * torch.randn_like(weights))
    found = trainer._compute_loss(trainer.model, inputs)
    assert follow.weight == 0.25 and follow._fit.pending.tolist() == [0.0, 0.0]
    trainer.kl_term, trainer._control = KLTerm(**PREFIX, control=0.25), None
    same = trainer._compute_loss(trainer.model, inputs)
    torch.testing.assert_close(found, same, rtol=1e-6, atol=1e-7)
    trainer.kl_term = KLTerm(**PREFIX)
    assert (trainer._compute_loss(trainer.model, inputs) - found).abs() > 1e-4
    assert found.dtype == torch.float32


def test_the_sums_are_kept_beside_a_checkpoint(trainer_of, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4, "num_iterations": 1}
    first, again = (trainer_of(**settings) for _ in range(2))
    first.train()
    kept = json.loads((tmp_path / "out" / "checkpoint-4" / "kl_control.json").read_text())
    assert kept["sums"][1] > FIRST and kept["now"][1] > 0
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert logged(again)[4] == pytest.approx(logged(first)[4], rel=1e-6)


def test_a_number_follows_nothing(trainer_of):
    trainer = trainer_of(KLTerm(**PREFIX, control=0.5), max_steps=2)
    trainer.train()
    assert trainer._control is None and logged(trainer) == []
