"""Packed rows: several sequences one after another, with and without saying where each ends."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.diagnosis.chains import Population, sample
from benchmarks.diagnosis.healthy import as_rollouts
from kl_term.diagnosis.causes import find
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.readers import read_rollouts
from kl_term.diagnosis.schema import Settings

TOKENS = ("logp", "old_logp", "ref_logp", "token", "entropy")
IN_A_ROW = 4


@pytest.fixture(scope="module")
def dump():
    return as_rollouts(sample(Population(move=0.1), 3, prompts=8, group=8, updates=2))


def lines(dump, *, packed: bool, ids: bool, of_each: bool = True) -> str:
    """As JSON: a line a completion, or a line four of them."""
    rows = []
    for row in range(0, dump.sequences, IN_A_ROW if packed else 1):
        inside = range(row, row + (IN_A_ROW if packed else 1))
        parts = [np.flatnonzero(dump.sequence == one) for one in inside]
        at = np.concatenate(parts)
        line = {name: getattr(dump, name)[at].tolist() for name in TOKENS}
        line["step"] = int(dump.step[at[0]])
        for name in ("advantage", "reward", "group"):
            values = getattr(dump, name)[at]
            line[name] = values.tolist() if packed else values[0].item()
        if ids:
            numbers = range(len(parts)) if of_each else inside
            line["sequence_ids"] = np.repeat(list(numbers), [len(p) for p in parts]).tolist()
        rows.append(json.dumps(line))
    return "\n".join(rows)


def read(tmp_path, text):
    path = tmp_path / "dump.jsonl"
    path.write_text(text)
    return read_rollouts(path)


def codes(rollouts) -> list[str]:
    return [f.code for f in find(measure(rollouts, Settings(resamples=100)))]


@pytest.mark.parametrize("of_each", [True, False], ids=["from zero in each row", "of the dump"])
def test_packed_rows_with_ids_are_read_as_the_padded_dump(dump, tmp_path, of_each):
    plain = read(tmp_path, lines(dump, packed=False, ids=False))
    packed = read(tmp_path, lines(dump, packed=True, ids=True, of_each=of_each))
    for name in (*TOKENS, "sequence", "position", "advantage", "reward", "group", "step"):
        assert np.array_equal(getattr(plain, name), getattr(packed, name)), name
    assert codes(plain) == codes(packed) and "packed-rows" not in codes(packed)
    assert measure(plain).estimates == measure(packed).estimates


def test_packed_rows_without_ids_are_noticed(dump, tmp_path):
    without = read(tmp_path, lines(dump, packed=True, ids=False))
    assert without.sequences * IN_A_ROW == dump.sequences, "each row counts as one completion"
    (finding,) = [f for f in find(measure(without)) if f.code == "packed-rows"]
    assert finding.severity == "note" and "sequence_ids" in finding.advice


def test_advantages_of_tokens_are_no_packing(dump, tmp_path):
    tokens = [json.loads(line) for line in lines(dump, packed=False, ids=False).splitlines()]
    for line in tokens:
        line["advantage"] = np.linspace(-1, 1, len(line["logp"])).tolist()
    assert "packed-rows" not in codes(read(tmp_path, "\n".join(map(json.dumps, tokens))))
