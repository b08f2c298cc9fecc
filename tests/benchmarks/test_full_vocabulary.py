"""What is timed over the full vocabulary agrees, and the recording has all of it."""

from __future__ import annotations

import sys

import pytest
import torch

from analysis.chapters.ch15_full_vocabulary import recorded
from analysis.chapters.ch23_top_k.sums import memory
from benchmarks import top_k
from benchmarks.full_vocabulary import VOCABULARIES, measure, measure_on


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_methods_agree_on_what_they_measure():
    rows = {m: measure(m, 3000, 64, 16) for m in ("naive", "chunked")}
    assert rows["chunked"]["value"] == pytest.approx(rows["naive"]["value"], rel=1e-5)
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows.values())


@pytest.mark.parametrize("form", ["", "top_k_"])
def test_methods_agree_where_a_device_counts_its_memory(monkeypatch, form):
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: 7 if "max" in name else 3)
    sizes = (300, 64, 16)
    on = torch.device("cpu")
    rows = [measure_on(on, form + name, *sizes, calls=1) for name in ("naive", "chunked")]
    assert rows[1]["value"] == pytest.approx(rows[0]["value"], rel=1e-5)
    assert all(row["seconds"] > 0 and row["peak_bytes"] == 4 for row in rows)


@pytest.mark.slow
def test_a_failed_child_is_named():
    with pytest.raises(RuntimeError, match="unheard_of at a vocabulary of 10 failed"):
        measure("unheard_of", 10, 4, 4)


def test_the_record_is_whole():
    by = recorded().set_index(["method", "vocab"])
    for vocab in VOCABULARIES:
        assert by.value["chunked", vocab] == pytest.approx(by.value["naive", vocab], rel=1e-4)
        assert by.value["liger", vocab] == pytest.approx(by.value["naive", vocab], rel=1e-4)
        assert by.peak_bytes["chunked", vocab] < by.peak_bytes["naive", vocab]


def test_the_record_of_the_top_k_is_whole():
    by = memory()
    assert set(by.index) == set(top_k.METHODS) and set(by.vocab) == {VOCABULARIES[-1]}
    for form in ("", "top_k_"):
        stored, blocks = by.loc[f"{form}naive"], by.loc[f"{form}chunked"]
        assert blocks.value == pytest.approx(stored.value, rel=1e-4)
        assert 20 * blocks.peak_bytes < stored.peak_bytes
    assert by.value["top_k_naive"] < by.value["naive"]
