"""A reference that is reset during a run is told from one that was copied by mistake."""

from __future__ import annotations

import numpy as np
import pytest

from kl_term.diagnosis.causes import find
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.generate import Run, simulate
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.schema import Settings

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
