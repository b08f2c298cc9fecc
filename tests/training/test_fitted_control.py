"""A weight of the control variate that follows the batches of a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.records.metrics import METRICS
from analysis.records.variants import Sampler, Variant
from analysis.studies.presets.parts import CENTRED
from analysis.training.rollout import at_temperature, token_logp
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.control import FIRST, MEMORY
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of

PREFIX = {"estimator": "k3", "weighting": "attached", "ratio": "prefix"}


def variant(control, *, lag: int = 0) -> Variant:
    kl, sampler = KLTerm(**PREFIX, control=control), Sampler(staleness=lag)
    return Variant(label=f"{control} {lag}", kl=kl, beta=0.5, sampler=sampler, advantage=CENTRED)


VARIANTS = [variant("fitted"), variant(0.25), variant("fitted", lag=2), variant(1.0, lag=2)]


@pytest.fixture
def config(small_config):
    changes = {"precision": "float64", "learning_rate": 3e-2, "updates": 5, "log_every": 2}
    return small_config.model_copy(update=changes | {"log_control": True})


def sums_by_hand(logp, ref_logp, old_logp, mask) -> torch.Tensor:
    """[2], over answers [P, G, T]."""
    found = torch.zeros(2, dtype=torch.float64)
    for answer in zip(*(x.flatten(0, 1) for x in (logp, ref_logp, old_logp, mask)), strict=True):
        own, ref, old = (x[answer[-1]] for x in answer[:3])
        weight = (own - old).cumsum(0).exp()
        variate = weight * ((ref - own).exp() - 1)
        owed = (weight * (own - ref)).flip(0).cumsum(0).flip(0)
        score = (1 - own.exp()) ** 2
        past = score.cumsum(0) - score
        found += torch.stack([-(variate * past * owed).sum(), (variate**2 * past).sum()])
    return found


def test_it_is_what_the_batches_before_fit(config):
    trainer = PopulationTrainer(config, runs_of(VARIANTS))
    original, told = trainer.batch, []

    def batch(sampled, update, **measure):
        made = original(sampled, update, **measure)
        rollout = sampled.rollout
        views = trainer.policy.unflatten(trainer.weights.detach())
        logits = at_temperature(
            trainer.policy.logits(views, rollout.prompts, rollout.inputs), config.temperature
        )
        logp = token_logp(logits, rollout.completions, temperature=1.0)
        views = (logp, made.ref_logp, rollout.old_logp, rollout.mask)
        told.append([sums_by_hand(*(x[row] for x in views)) for row in range(4)])
        return made

    trainer.batch = batch
    for done in range(5):
        used = trainer.terms.kl.controls.flatten().tolist()
        assert (used[1], used[3]) == (0.25, 1.0)
        for row in (0, 2):
            faded = torch.full((2,), FIRST * MEMORY**done, dtype=torch.float64)
            for i in range(done):
                faded += MEMORY ** (done - 1 - i) * told[i][row]
            expected = (faded[0] / faded[1]).clamp(0, 1)
            assert used[row] == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
        trainer.advance()
        assert trainer.logged[-1]["control"].tolist() == used
    assert 0 < used[0] < 1 and used[0] != used[2]


def test_the_weight_trains(config):
    """The first update is that of k3; held at a number, a run is the run of that number."""
    runs = runs_of([variant("fitted"), variant(1.0), variant(0.25)])
    trainer = PopulationTrainer(config, runs)
    trainer.advance()
    assert torch.equal(trainer.weights[0], trainer.weights[1])
    for _ in range(3):
        trainer.advance()
    assert not torch.equal(trainer.weights[0], trainer.weights[1])
    held = PopulationTrainer(config, runs)
    held.terms.kl.controls.fill_(0.25)
    held.controls.active = False
    for _ in range(4):
        held.advance()
    torch.testing.assert_close(held.weights[0], held.weights[2], rtol=0, atol=1e-12)


def test_runs_are_solo_runs_to_the_bit(config):
    together = PopulationTrainer(config, runs_of(VARIANTS, (0, 1)))
    record = together.run()
    for row in (0, 2, 4, 6):
        alone = PopulationTrainer(config, [together.runs[row]])
        solo = alone.run()
        assert torch.equal(together.weights[row], alone.weights[0])
        for name in (*METRICS, "control"):
            np.testing.assert_array_equal(record.metrics[name][:, row], solo.metrics[name][:, 0])


@pytest.mark.parametrize("steps", [1, 3], ids=["one step", "minibatches"])
def test_a_run_goes_on_from_any_update_to_the_same_bits(config, steps):
    config = config.model_copy(update={"num_minibatches": steps})
    straight = PopulationTrainer(config, runs_of(VARIANTS))
    expected = straight.run()
    for done in (1, 3):
        first, second = (PopulationTrainer(config, runs_of(VARIANTS)) for _ in range(2))
        for _ in range(done):
            first.advance()
        state = first.state()
        second.restore(state)
        np.testing.assert_equal(second.run().metrics, expected.metrics)
        assert torch.equal(straight.weights, second.weights)
    tensors = {key: part for key, part in state.tensors.items() if key != "control_sums"}
    with pytest.raises(ValueError, match="lacks the tensor 'control_sums'"):
        PopulationTrainer(config, runs_of(VARIANTS)).restore(state._replace(tensors=tensors))


def test_nothing_is_fitted_or_written_where_nobody_asks(config):
    plain = config.model_copy(update={"log_control": False})
    trainer = PopulationTrainer(plain, runs_of(VARIANTS[1::2]))
    trainer.advance()
    assert "control_sums" not in trainer.state().tensors and "control" not in trainer.logged[0]
    assert "log_control" not in plain.model_dump()
    assert plain.model_dump() == config.model_dump(exclude={"log_control"})
