"""A reference and a coefficient that move while a run trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.records.metrics import METRICS
from analysis.records.variants import Controller, MovingReference, Variant
from analysis.training.moving import Controllers
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.term import KLTerm
from kl_term.objectives.controllers import doubling_step, multiplier_step, proportional_step
from tests.training.conftest import runs_of

K2, K3 = KLTerm(estimator="k2"), KLTerm(estimator="k3")
CONTROLLERS = {
    "proportional": Controller(target=0.01, horizon=2.0, reads="k3"),
    "doubling": Controller(rule="doubling", target=0.003),
    "multiplier": Controller(rule="multiplier", target=0.01, rate=30.0, reads="k2"),
}


def moving(every: int, weight: float = 1.0, **fields) -> Variant:
    kept = MovingReference(every=every, weight=weight)
    return Variant(label=f"{every} {weight}", kl=K3, beta=0.5, reference=kept, **fields)


def controlled(name: str) -> Variant:
    return Variant(label=name, kl=K2, beta=0.5, controller=CONTROLLERS[name])


VARIANTS = [
    Variant(kl=K2, beta=0.5),
    moving(2),
    moving(1, 0.25),
    *(controlled(name) for name in CONTROLLERS),
]


@pytest.fixture
def config(small_config):
    changes = {"precision": "float64", "learning_rate": 2e-2, "updates": 5, "log_every": 2}
    changes |= {"log_coefficient": True, "final_answers": 8}
    return small_config.model_copy(update=changes)


def test_references_are_the_policies_of_their_updates(config):
    trainer = PopulationTrainer(config, runs_of(VARIANTS[:3]))
    start = trainer.weights.detach().clone()
    ema, last = start[2], start[1]
    for done in range(1, 6):
        trainer.advance()
        now = trainer.weights.detach()
        ema = 0.75 * ema + 0.25 * now[2]
        last = now[1].clone() if done % 2 == 0 else last
        expected = trainer.policy.unflatten(torch.stack([start[0], last, ema]))
        for name, part in trainer.reference.items():
            torch.testing.assert_close(part, expected[name], rtol=0, atol=1e-14)
    assert not torch.equal(last, start[1])


def test_a_kl_is_measured_from_the_first_reference_and_read_from_the_last(config):
    """Not the other way round: after a reset the read one is zero."""
    trainer = PopulationTrainer(config, runs_of(VARIANTS[:2]))
    trainer.advance()
    trainer.advance()
    sampled = trainer.rollout(2)
    batch = trainer.batch(sampled, 2)
    logged = trainer.losses(batch, measure=True).metrics
    first = PopulationTrainer(config, runs_of(VARIANTS[:2])).reference
    of = (sampled.rollout.prompts, sampled.rollout.inputs)
    views = trainer.policy.unflatten(trainer.weights.detach())
    logits, ref = (trainer.policy.logits(w, *of) / config.temperature for w in (views, first))
    mask = sampled.rollout.mask
    for name, kl in (("reverse_kl", reverse_kl), ("forward_kl", forward_kl)):
        for row in range(2):
            expected = kl(logits, ref)[row][mask[row]].mean()
            torch.testing.assert_close(logged[name][row], expected, rtol=1e-10, atol=0)
    assert logged["k3"][1].abs() < 1e-20 < logged["reverse_kl"][1]
    assert logged["k3"][0] > 1e-8


@pytest.mark.parametrize("name", CONTROLLERS)
def test_coefficients_are_those_of_the_published_rules(config, name):
    controller = CONTROLLERS[name]
    trainer = PopulationTrainer(config, runs_of([controlled(name)]))
    beta, moved, original = 0.5, [], trainer.batch
    read: list[float] = []

    def batch(sampled, update, **measure):
        made = original(sampled, update, **measure)
        gap = (made.ref_logp - made.rollout.old_logp)[made.rollout.mask]
        values = {"k1": -gap, "k2": gap**2 / 2, "k3": gap.exp() - 1 - gap}
        read.append(float(values[controller.reads].mean()))
        return made

    trainer.batch = batch
    for _ in range(5):
        trainer.advance()
        assert float(trainer.logged[-1]["coefficient"]) == pytest.approx(beta, rel=1e-12)
        step = {
            "proportional": lambda b, k: proportional_step(b, k, target=0.01, horizon=2.0),
            "doubling": lambda b, k: doubling_step(b, k, target=0.003),
            "multiplier": lambda b, k: multiplier_step(b, k, target=0.01, rate=30.0),
        }[name]
        beta = step(beta, read[-1])
        moved.append(beta)
        assert float(trainer.terms.kl.coefficients) == pytest.approx(beta, rel=1e-12)
    assert len(set(moved)) > 1


def test_a_controlled_coefficient_is_the_one_that_trains(config):
    """The first update is that of a fixed one, the later ones are not."""
    trainer = PopulationTrainer(config, runs_of([VARIANTS[0], controlled("multiplier")]))
    trainer.advance()
    assert torch.equal(trainer.weights[0], trainer.weights[1])
    trainer.advance()
    trainer.advance()
    assert not torch.equal(trainer.weights[0], trainer.weights[1])


def test_runs_that_move_are_solo_runs_to_the_bit_and_so_are_their_neighbours(config):
    together = PopulationTrainer(config, runs_of(VARIANTS, (0, 1)))
    record = together.run()
    for row in (0, 1, 3, 5, 7, 9, 11):
        alone = PopulationTrainer(config, [together.runs[row]])
        solo = alone.run()
        assert torch.equal(together.weights[row], alone.weights[0])
        for name in (*METRICS, "coefficient"):
            np.testing.assert_array_equal(record.metrics[name][:, row], solo.metrics[name][:, 0])
        for name in record.final:
            np.testing.assert_array_equal(record.final[name][row], solo.final[name][0])


def test_a_run_goes_on_from_any_update_to_the_same_bits(config):
    straight = PopulationTrainer(config, runs_of(VARIANTS))
    expected = straight.run()
    for done in (1, 2, 3):
        first, second = (PopulationTrainer(config, runs_of(VARIANTS)) for _ in range(2))
        for _ in range(done):
            first.advance()
        state = first.state()
        first.advance()
        second.restore(state)
        np.testing.assert_equal(second.run().metrics, expected.metrics)
        assert torch.equal(straight.weights, second.weights)
    for name in ("reference", "coefficients"):
        tensors = {key: part for key, part in state.tensors.items() if key != name}
        with pytest.raises(ValueError, match=f"lacks the tensor '{name}'"):
            PopulationTrainer(config, runs_of(VARIANTS)).restore(state._replace(tensors=tensors))


def test_a_reset_at_every_update_is_training_without_a_term(config):
    exact = KLTerm(estimator="exact")
    every = Variant(label="a", kl=exact, beta=5.0, reference=MovingReference(every=1))
    trainer = PopulationTrainer(config, runs_of([Variant(), every, Variant(kl=exact, beta=5.0)]))
    trainer.run()
    torch.testing.assert_close(trainer.weights[0], trainer.weights[1], rtol=0, atol=1e-10)
    assert (trainer.weights[0] - trainer.weights[2]).abs().max() > 1e-3


def test_nobody_is_controlled_without_a_controller(config):
    trainer = PopulationTrainer(config, runs_of(VARIANTS[:1]))
    assert not Controllers(trainer.runs, trainer.terms.kl.coefficients).active
    trainer.advance()
    assert trainer.references.weights is None and trainer.reference is trainer.references.first
    assert not {"reference", "coefficients"} & set(trainer.state().tensors)


def test_what_came_later_leaves_old_names_as_they_were():
    plain = Variant(kl=K2, beta=0.5).model_dump(mode="json")
    assert not {"reference", "controller", "kl_from", "ensemble", "kl_on"} & set(plain)
    assert {"reference"} == set(moving(2).model_dump()) - set(plain)


LATE = [
    Variant(),
    Variant(kl=K2, beta=0.5),
    Variant(label="late", kl=K2, beta=0.5, kl_from=3),
    Variant(label="later", kl=KLTerm(estimator="k1", placement="reward"), beta=0.5, kl_from=4),
]


def test_a_late_term_is_none_until_its_update_and_the_whole_term_from_there(config):
    """The step at which it comes is that of a fixed term from the weights of a run without one."""
    trainer = PopulationTrainer(config, runs_of(LATE))
    for done in range(3):
        assert torch.equal(trainer.weights[0], trainer.weights[2]), done
        assert torch.equal(trainer.weights[0], trainer.weights[3]), done
        trainer.advance()
    assert torch.equal(trainer.weights[0], trainer.weights[2])
    fixed = PopulationTrainer(config, runs_of([LATE[1]]))
    state = trainer.state()
    tensors = {}
    for name, part in state.tensors.items():
        place = (..., [2]) if name.startswith("logged.") else [2]
        tensors[name] = part[place] if part.ndim else part
    fixed.restore(state._replace(tensors=tensors))
    for _ in range(2):
        trainer.advance()
        fixed.advance()
        assert torch.equal(trainer.weights[2], fixed.weights[0])
        assert not torch.equal(trainer.weights[0], trainer.weights[2])
    assert not torch.equal(trainer.weights[0], trainer.weights[3])
    logged = torch.stack([metrics["coefficient"] for metrics in trainer.logged])
    expected = [[0, 0.5, 0, 0]] * 3 + [[0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0.5]]
    assert logged.tolist() == expected


def test_late_terms_leave_controllers_alone_and_go_on_from_any_update(config):
    variants = [*LATE, controlled("multiplier")]
    straight = PopulationTrainer(config, runs_of(variants))
    expected = straight.run()
    alone = PopulationTrainer(config, runs_of(variants[-1:]))
    alone.run()
    assert torch.equal(straight.weights[4], alone.weights[0])
    for done in (2, 3, 4):
        first, second = (PopulationTrainer(config, runs_of(variants)) for _ in range(2))
        for _ in range(done):
            first.advance()
        second.restore(first.state())
        np.testing.assert_equal(second.run().metrics, expected.metrics)
        assert torch.equal(straight.weights, second.weights)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kl_from": 3}, "switches a KL term on, and there is none"),
        (
            {"kl": K2, "beta": 0.5, "controller": CONTROLLERS["doubling"], "kl_from": 3},
            "both set the coefficient",
        ),
        ({"reference": MovingReference(every=2)}, "reference moves and nothing reads it"),
        ({"controller": CONTROLLERS["doubling"]}, "moves the coefficient of a KL term"),
        ({"kl": K2, "controller": CONTROLLERS["doubling"]}, "cannot leave beta=0.0"),
    ],
)
def test_what_nothing_reads_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Variant(**fields)
    Variant(kl=K2, controller=CONTROLLERS["multiplier"])
