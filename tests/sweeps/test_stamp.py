"""What is written down about where a run was computed."""

from __future__ import annotations

import torch

from analysis.experiments.ablations.source import source_of
from analysis.experiments.ablations.stamp import current_stamp, merged
from tests.sweeps.tiny import STAMP, make_tiny


def test_a_stamp_names_source_kernels_threads_and_versions() -> None:
    config = make_tiny().config
    stamp = current_stamp(config, "cpu", 3)
    assert stamp.source == source_of(config)
    assert torch.backends.cpu.get_cpu_capability() in stamp.device
    assert stamp.device.endswith("3 thread(s)")
    assert stamp.versions["torch"] == torch.__version__
    assert current_stamp(config).device.endswith(f"{torch.get_num_threads()} thread(s)")


def test_members_from_several_machines_are_said_to_be() -> None:
    other = STAMP.model_copy(update={"device": "cuda, other", "versions": {"torch": "9.9"}})
    together = merged([STAMP, other, STAMP])
    assert together.device == "cpu, tests; cuda, other"
    assert together.versions == {"torch": f"{torch.__version__}; 9.9"}
    assert merged([STAMP, STAMP]) == STAMP
