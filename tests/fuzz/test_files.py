"""Whatever a file holds, it is read or refused in one line: a fuzzer over all that is read.

The files of ``corpus`` are tried as they are, then cut, joined and overwritten. An example that
failed once is kept there, beside those that Hypothesis keeps by itself. Weekly, with
``KL_TERM_FUZZ_EXAMPLES``, for as many as ten minutes allow.
"""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.records.manifests import read_manifest
from analysis.report.ledger import load_ledger
from analysis.report.parameters import declared_parameters, parse_assignments, resolve_parameters
from analysis.report.project import Project
from kl_term.diagnosis.readers import read_rollouts
from kl_term.errors import UserError
from kl_term.files import sealed
from tests.pipeline.conftest import make_notebook

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = int(os.environ.get("KL_TERM_FUZZ_EXAMPLES", "60"))
FUZZED = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[*HealthCheck], print_blob=True
)
SEEDS = {
    kind: {path.name: path.read_bytes() for path in sorted((CORPUS / kind).iterdir())}
    for kind in ("dumps", "manifests", "claims", "parameters")
}
#: What text files turn on, beside any bytes.
TOKENS = [b'"', b"[", b"]", b"{", b"}", b",", b":", b"\n", b"\r", b"-", b"null", b"NaN", b"1e999"]
TOKENS += [
    b"Infinity",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"9" * 400,
    b"&a",
    b"*a",
    b"!!",
    b"logp",
]
PIECES = st.one_of(st.sampled_from(TOKENS), st.binary(max_size=6))
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), PIECES), max_size=6)


def edited(data: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Each edit puts bytes at a share of the length, over so many of those that stood there."""
    for place, over, piece in edits:
        at = int(place * len(data))
        data = data[:at] + piece + data[at + over :]
    return data


def refusal_of(read, *arguments) -> str | None:
    """None where it was read; any other error than a refusal passes through, and fails."""
    try:
        read(*arguments)
    except UserError as refusal:
        return str(refusal)
    return None


def read_or_refused(read, *arguments) -> None:
    said = refusal_of(read, *arguments)
    assert said is None or (0 < len(said) < 2_000 and "Traceback" not in said)
    assert said is None or read is not read_rollouts or "\n" not in said


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SEEDS["dumps"])
def test_dumps(tmp_path_factory, name, packed):
    folder = tmp_path_factory.mktemp("dumps")
    path = folder / (f"{name}.gz" if packed and name.endswith((".csv", ".jsonl")) else name)

    def write(data: bytes) -> None:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)

    @FUZZED
    @given(EDITS)
    def fuzz(edits):
        write(edited(SEEDS["dumps"][name], edits))
        read_or_refused(read_rollouts, path)

    fuzz()


def test_tensors(tmp_path):
    held = io.BytesIO()
    rows = np.full((2, 3), -1.0)
    np.savez(held, logp=rows, old_logp=rows, ref_logp=rows, mask=np.ones((2, 3)))
    path = tmp_path / "dump.npz"

    @FUZZED
    @given(EDITS)
    def fuzz(edits):
        path.write_bytes(edited(held.getvalue(), edits))
        read_or_refused(read_rollouts, path)

    fuzz()


FIELDS = {"preset": "quick", "seeds": [0], "device": "cpu", "versions": {}, "source": "a"}


def test_manifests(tmp_path):
    folder = tmp_path / "quick_cpu"
    folder.mkdir()
    whole = sealed(FIELDS | {"files": {}})
    (folder / "manifest.json").write_bytes(whole)
    read_manifest(folder)

    @FUZZED
    @given(EDITS, st.sampled_from([whole, *SEEDS["manifests"].values()]))
    def fuzz(edits, seed):
        data = edited(seed, edits)
        (folder / "manifest.json").write_bytes(data)
        said = refusal_of(read_manifest, folder)
        assert (said is None) == (data == whole), "an edit was believed"
        assert said is None or "\n" not in said

    fuzz()


def test_claims(tmp_path):
    project = Project(tmp_path)
    project.book.mkdir()

    @FUZZED
    @given(EDITS, st.sampled_from([*SEEDS["claims"].values()]))
    def fuzz(edits, seed):
        project.claims.write_bytes(edited(seed, edits))
        read_or_refused(load_ledger, project)

    fuzz()


DECLARED = declared_parameters(
    make_notebook(
        parameters="beta: float = 0.1\nseed: int = 0\nprofile: str = 'quick'\n"
        "kinds: list[str] = ['k1']"
    ),
    "nb",
)


@FUZZED
@given(EDITS, st.sampled_from([*SEEDS["parameters"].values()]))
def test_parameters(edits, seed):
    lines = edited(seed, edits).decode(errors="surrogateescape").split("\n")

    def read() -> None:
        found = resolve_parameters(DECLARED, {}, parse_assignments(lines), "nb")
        assert isinstance(found["beta"], float) and np.isfinite(found["beta"])
        assert type(found["seed"]) is int and isinstance(found["profile"], str)

    read_or_refused(read)
