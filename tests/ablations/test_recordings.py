"""Every recorded population is its preset as it stands, and whole."""

from __future__ import annotations

import pytest

from analysis.experiments.ablations import recording
from analysis.experiments.ablations.catalogue import CATALOGUE, make_preset

#: Trained live, for a GPU, or to try out a machine.
UNRECORDED = {"quick", "smollm2", "llama_smoke"}


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in UNRECORDED])
def test_a_recording_is_of_its_preset_with_every_member_healthy(name):
    recorded = recording.load(recording.folder_of(name))
    assert recorded.preset == make_preset(name, {})
    assert recorded.manifest["failures"] == []
    assert len(recorded.finals) == len(recorded.preset.members)
