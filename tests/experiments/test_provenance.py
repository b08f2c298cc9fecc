"""What is written down about where a run was computed."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from analysis.freshness import processor_name
from analysis.records.provenance import merged
from analysis.sweeps.provenance import current_provenance, source_of
from tests.experiments.tiny import PROVENANCE, make_tiny


def test_provenance_names_source_kernels_threads_and_versions() -> None:
    config = make_tiny().config
    provenance = current_provenance(config, "cpu", 3)
    assert provenance.source == source_of(config)
    assert torch.backends.cpu.get_cpu_capability() in provenance.device
    assert provenance.device.endswith("3 thread(s)")
    assert provenance.versions["torch"] == torch.__version__
    assert current_provenance(config).device.endswith(f"{torch.get_num_threads()} thread(s)")


def test_two_makes_of_processor_are_not_one_device(tmp_path: Path) -> None:
    names = []
    for name, model in (("Some Processor  9000", 17), ("Another", 17), ("Another", 18)):
        lines = f"processor\t: 0\nmodel\t\t: {model}\nmodel name\t: {name}\nflags\t: fpu\n"
        cpuinfo = tmp_path / f"{name} {model}"
        cpuinfo.write_text(lines + f"\n{lines}")
        names.append(processor_name(cpuinfo))
    assert names == ["Some Processor 9000 (model 17)", "Another (model 17)", "Another (model 18)"]
    assert processor_name() in current_provenance(make_tiny().config).device


@pytest.mark.parametrize("text", [None, "", "Features: fp asimd", "model name:   "])
def test_a_processor_without_a_name_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    assert processor_name(cpuinfo) == "unnamed processor"


def test_runs_from_several_machines_are_said_to_be() -> None:
    other = PROVENANCE.model_copy(update={"device": "cuda, other", "versions": {"torch": "9.9"}})
    together = merged([PROVENANCE, other, PROVENANCE])
    assert together.device == "cpu, tests; cuda, other"
    assert together.versions == {"torch": f"{torch.__version__}; 9.9"}
    assert merged([PROVENANCE, PROVENANCE]) == PROVENANCE
