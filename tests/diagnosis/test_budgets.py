"""What is too much ends in one line, before memory is taken for it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from kl_term.diagnosis import budgets
from kl_term.diagnosis.readers import read_rollouts, recorded_settings
from kl_term.errors import UserError

ROW = {"logp": [-1.0, -2.0], "old_logp": [-1.0, -2.0], "ref_logp": [-1.5, -1.0], "sequence": "a"}


CSV = "logp,old_logp,ref_logp,sequence,position\n" + "-1,-1,-1,a,0\n" * 2**20


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        read_rollouts(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines(tmp_path, *rows: str):
    path = tmp_path / "dump.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize(
    "name", ["logp", "sequence", "of my own"], ids=["read", "named", "ignored"]
)
def test_a_key_that_is_said_twice_is_refused(tmp_path, name):
    text = json.dumps(ROW)[:-1] + f', "{name}": 0, "{name}": 1}}'
    assert f"line 1 says '{name}' twice" in refusal(lines(tmp_path, text))
    (tmp_path / "settings.json").write_text('{"beta": 0.1, "beta": 0.2}')
    with pytest.raises(UserError, match="'beta' twice"):
        recorded_settings(tmp_path)


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "jsonl", "npz"])
def test_a_hundred_thousand_columns_are_refused_at_once(tmp_path, ending):
    path = tmp_path / f"dump.{ending}"
    names = [f"logp{number}" for number in range(100_000 if ending != "npz" else 1_001)]
    if ending == "npz":
        np.savez(path, **dict.fromkeys(names, np.zeros(1)))
    elif ending == "jsonl":
        path.write_text(json.dumps(dict.fromkeys(names, 0.0)) + "\n")
    else:
        text = ",".join(names) + "\n"
        (path.write_bytes if ending == "csv.gz" else path.write_text)(
            gzip.compress(text.encode()) if ending == "csv.gz" else text
        )
    assert "columns, and at most 1,000 are read" in refusal(path)


def test_what_unpacks_to_more_than_the_budget_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "GIGABYTES", 0.01)
    head = json.dumps(ROW) + "\n"
    for name, text in (("a.jsonl.gz", head + " " * 2**25), ("a.csv.gz", CSV)):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        assert (tmp_path / name).stat().st_size < 100_000
        assert "more than 0.01 GB, unpacked" in refusal(tmp_path / name)
    for name in ("a.npz", "a.pt"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("logp.npy", b"\0" * 2**25)
        assert "more than 0.01 GB, unpacked" in refusal(tmp_path / name)


def test_depth_length_rows_and_time_have_ends(tmp_path, monkeypatch):
    nested = json.dumps(ROW)[:-1] + ', "x": ' + "[" * 60 + "]" * 60 + "}"
    assert "nested deeper than 50" in refusal(lines(tmp_path, nested))
    deeper = json.dumps(ROW)[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert "line 1 is no JSON" in refusal(lines(tmp_path, deeper))
    plain = lines(tmp_path, json.dumps(ROW))
    assert read_rollouts(plain).tokens == 2
    for limit, value, said in (
        ("LINE", 20, "more than 20 characters"),
        ("ROWS", 1, "holds 2 tokens, and at most 1 are read"),
        ("SECONDS", -1.0, "is not read after"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(budgets, limit, value)
            assert said in refusal(plain)


def test_an_array_that_claims_to_be_huge_is_one_line(tmp_path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }"
    header += b" " * (117 - len(header)) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("logp.npy", b"\x93NUMPY\x01\x00" + bytes([len(header), 0]) + header)
    assert "cannot be read" in refusal(tmp_path / "a.npz")


def test_a_refusal_quotes_a_damaged_archive_by_its_beginning_only(tmp_path):
    """Found by the fuzzer: zipfile tells the whole directory in which a name differs."""
    path = tmp_path / "a.npz"
    np.savez(path, **{name: np.ones((2, 3)) for name in ("logp", "old_logp", "ref_logp", "mask")})
    data = path.read_bytes()
    for place, over, piece in ((0.5, 0, b"null"), (0.5, 12, bytes(6)), (1 / 64, 4, bytes(6))):
        at = int(place * len(data))
        data = data[:at] + piece + data[at + over :]
    path.write_bytes(data)
    with pytest.raises(Exception, match="differ") as whole:
        np.load(path)["logp"]
    assert len(str(whole.value)) > 500
    assert len(refusal(path)) < 500


READ = """
import resource, sys
from kl_term.diagnosis.readers import read_rollouts
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_rollouts(sys.argv[1])
except ValueError as refusal:
    print(refusal)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is in kilobytes there")
@pytest.mark.parametrize(
    ("line", "said"),
    [(b" " * (2**20 - 1) + b"\n", "more than 2 GB"), (b"\n", "more than 50,000,000 lines")],
    ids=["long lines", "blank lines"],
)
def test_a_bomb_of_three_gigabytes_takes_no_memory(tmp_path, line, said):
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(json.dumps(ROW).encode() + b"\n")
        for _ in range(3 * 2**10):
            file.write(line * (2**20 // len(line)))
    command = [sys.executable, "-c", READ, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(found) == 2 and said in found[0]
    assert int(found[1]) < 100_000  # kilobytes
