"""A reference that is reset during a run is told from one that was copied by mistake."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.records.config import Run as TrainedRun
from analysis.records.config import SortTask, StartConfig
from analysis.records.variants import MovingReference, Variant
from analysis.studies.presets.parts import CENTRED, train_config
from analysis.training.trainer import PopulationTrainer
from kl_term.diagnosis.causes import find
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.generate import Run, simulate
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.schema import Settings
from kl_term.kl.choice import KLChoice

LONG = Run(sequences=120, steps=12, drift=0.5)
SETTINGS = Settings(resamples=200)


@pytest.fixture(scope="module")
def sound():
    return simulate(LONG, 5)


def finding(frame):
    rollouts = assemble(frame, "simulated")
    found = [f for f in find(measure(rollouts, SETTINGS)) if f.code == "reference-reset"]
    assert len(found) <= 1
    return found[0] if found else None


def with_shares(frame, shares):
    """Of the log-ratio to the reference so much is left at each step."""
    steps = np.unique(frame.step)
    share = frame.step.map(dict(zip(steps, shares, strict=True)))
    return frame.assign(ref_logp=frame.logp + share * (frame.ref_logp - frame.logp))


def test_a_sound_run_is_silent(sound):
    assert finding(sound) is None
    assert finding(sound.drop(columns="step")) is None


@pytest.mark.parametrize("left", [0.0, 0.01])
def test_a_reset_is_a_note(sound, left):
    shares = [1, 1, 1, 1, 1, left, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9]
    found = finding(with_shares(sound, shares))
    assert found.severity == "note" and found.title.startswith("The reference was set")
    assert found.evidence["the first"] == np.unique(sound.step)[5]


def test_two_resets_are_counted(sound):
    shares = [1, 1, 1, 0, 0.3, 0.6, 1, 0, 0.3, 0.5, 0.7, 0.9]
    assert finding(with_shares(sound, shares)).evidence["steps at which they fall"] == 2


def test_a_step_whose_reference_is_the_policy_is_a_warning(sound):
    found = finding(with_shares(sound, [1] * 5 + [0] + [1] * 6))
    assert found.severity == "warning" and "policy's own" in found.title


def test_an_average_that_goes_part_of_the_way_is_not_called_a_reset(sound):
    assert finding(with_shares(sound, [1] * 6 + [0.4, 0.5, 0.6, 0.7, 0.8, 0.9])) is None


def test_the_first_step_of_a_run_is_no_reset(sound):
    assert finding(with_shares(sound, [0] + [1] * 11)) is None


def test_a_copy_between_two_resets_is_found_behind_the_first(sound):
    found = finding(with_shares(sound, [1, 1, 0, 0.2, 0.4, 0.6, 0.8, 0, 0.9, 1, 1, 1]))
    assert found.severity == "warning" and np.unique(sound.step)[7] in found.evidence.values()


def test_resets_in_short_turns_are_not_called_copies(sound):
    found = finding(with_shares(sound, [1, 0, 0.9, 0, 1, 0, 0.8, 0, 1, 0, 0.9, 0]))
    assert found.severity == "note" and found.evidence["steps at which they fall"] == 6


@pytest.mark.parametrize(("left", "severity"), [(0.0, "warning"), (1e-6, "note")])
def test_a_reference_that_stays_the_policy_is_no_reset(sound, left, severity):
    found = finding(with_shares(sound, [1] * 8 + [0, left, left, left]))
    assert found.severity == severity
    assert ("policy itself" in found.title) == (left == 0)


#: Name -> how the reference of a trained run moves.
TRAINED = {
    "fixed": None,
    "resets": MovingReference(every=6),
    "short": MovingReference(every=2),
    "averages": MovingReference(every=6, weight=0.5),
}


@pytest.fixture(scope="module")
def trained():
    """What runs of the population trainer dump, 16 updates each."""
    config = train_config(
        start=StartConfig(updates=40, seed=911),
        task=SortTask(num_digits=4, reward="graded"),
        learning_rate=4e-3,
        updates=16,
        log_every=16,
        cosine_every=0,
    )
    term = {"kl": KLChoice(estimator="k3"), "beta": 0.1, "advantage": CENTRED}
    runs = [
        TrainedRun(variant=Variant(label=name, reference=of, **term), seed=3)
        for name, of in TRAINED.items()
    ]
    trainer = PopulationTrainer(config, runs)
    seen, make = [], trainer.batch

    def batch(sampled, update=0, **how):
        seen.append(make(sampled, update, **how))
        return seen[-1]

    trainer.batch = batch
    for update in range(config.updates):
        trainer.update(update)
    return {
        name: pd.concat(_rows(seen, run), ignore_index=True) for run, name in enumerate(TRAINED)
    }


def _rows(seen, run):
    """A run's tokens, update by update."""
    for step, batch in enumerate(seen):
        logp = batch.rollout.old_logp[run].flatten(0, 1)
        answers = torch.arange(len(logp)).unsqueeze(-1).expand_as(logp) + step * len(logp)
        yield pd.DataFrame(
            {
                "logp": logp.flatten(),
                "ref_logp": batch.ref_logp[run].flatten(),
                "sequence_id": answers.flatten(),
                "step": step,
            }
        )


def copied(frame, steps):
    """A fault: at these steps the reference's log-probs are the policy's own."""
    return frame.assign(ref_logp=frame.ref_logp.where(~frame.step.isin(steps), frame.logp))


def test_trained_runs_with_a_reset_are_told_from_faults(trained):
    assert finding(trained["fixed"]) is None and finding(trained["averages"]) is None
    for name, resets in (("resets", 2), ("short", 7)):
        found = finding(trained[name])
        assert found.severity == "note" and found.evidence["steps at which they fall"] == resets
    every_second = trained["resets"][trained["resets"].step % 2 == 0]
    assert finding(every_second).severity == "note"
    for name, steps in (
        ("fixed", [9]),
        ("fixed", [8, 9]),
        ("resets", [10]),
        ("fixed", range(9, 16)),
    ):
        assert finding(copied(trained[name], steps)).severity == "warning", (name, steps)
