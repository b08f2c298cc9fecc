"""What is written down about where a run was computed."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

from analysis.freshness import processor_name
from analysis.records.provenance import UNKNOWN, merged
from analysis.sweeps import provenance as provenances
from analysis.sweeps.provenance import commit_of, current_provenance, source_of
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


def test_the_commit_of_a_checkout_is_named_with_whether_it_was_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", "-C", tmp_path, *who, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert commit_of(tmp_path / "nowhere") == UNKNOWN
    git("init", "--quiet")
    file, inside = tmp_path / "file", tmp_path / "inside"
    file.write_text("one")
    inside.mkdir()
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    commit = git("rev-parse", "HEAD")
    commit_of.cache_clear()
    assert commit_of(tmp_path) == commit and len(commit) == 40
    assert commit_of(inside) == UNKNOWN, "installed below another project's checkout"
    (tmp_path / "untracked").write_text("two")
    commit_of.cache_clear()
    assert commit_of(tmp_path) == commit
    file.write_text("two")
    commit_of.cache_clear()
    assert commit_of(tmp_path) == f"{commit} with changes"
    commit_of.cache_clear()


def test_another_package_is_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    here = current_provenance(make_tiny().config)
    assert here.packages == provenances.packages_sha256() and len(here.packages) == 64

    class Added:
        name, version = "Added", "1.0"

    real = list(metadata.distributions())
    monkeypatch.setattr(metadata, "distributions", lambda: [*reversed(real), Added])
    provenances.packages_sha256.cache_clear()
    other = provenances.packages_sha256()
    monkeypatch.setattr(metadata, "distributions", lambda: [*reversed(real)])
    provenances.packages_sha256.cache_clear()
    assert provenances.packages_sha256() == here.packages != other


def test_what_lies_beside_the_bits_stops_no_run_from_going_on() -> None:
    beside = PROVENANCE.model_copy(update={"commit": "b" * 40, "packages": "c" * 64})
    assert PROVENANCE.gives_bits_of(beside) and beside.gives_bits_of(PROVENANCE)
    for field, value in (("source", "d" * 64), ("device", "cpu, other"), ("versions", {})):
        assert not PROVENANCE.gives_bits_of(beside.model_copy(update={field: value}))
    together = merged([PROVENANCE, beside])
    assert together.commit == f"{UNKNOWN}; {'b' * 40}"
