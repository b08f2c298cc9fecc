"""Recorded folders are what their manifests say, and appear whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from analysis.records import manifests
from analysis.records.manifests import (
    REQUIRED,
    manifest_of,
    read_manifest,
    verify_results,
    write_folder,
)
from kl_term.errors import UserError
from kl_term.files import sealed, sha256_file

FIELDS = {
    "preset": "quick",
    "seeds": [0, 1],
    "device": "GPU, of a kind",
    "versions": {"torch": "2"},
    "source": "abc",
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder of two tables, one in a folder of its own, in ``results``."""
    folder = tmp_path / "results" / "quick_GPU"
    (folder / "parts").mkdir(parents=True)
    (folder / "table.csv").write_text("a,b\n")
    (folder / "parts" / "0.csv").write_text("1,2\n")
    files = {name: sha256_file(folder / name) for name in ("table.csv", "parts/0.csv")}
    (folder / "manifest.json").write_bytes(sealed(FIELDS | {"files": files}))
    for described in (folder, folder.parent):
        (described / "README.md").write_text("what this is")
    verify_results(folder.parent)
    return folder


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def device_by_hand(folder: Path) -> None:
    """A field that no check of the tables reads."""
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"GPU,', '"TPU,'))


def lack(field: str) -> Callable[[Path], object]:
    return lambda folder: write(
        "manifest.json",
        sealed({name: part for name, part in manifest_of(folder).items() if name != field}),
    )(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (write("parts/0.csv", b"1,3\n"), "results/quick_GPU/parts/0.csv changed"),
        (lambda folder: (folder / "table.csv").unlink(), "quick_GPU/table.csv is in the manifest"),
        (write("new.csv", b""), "results/quick_GPU/new.csv is not in the manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), "quick_GPU/manifest.json is missing"),
        *(
            (write("manifest.json", data), "quick_GPU/manifest.json is no valid JSON")
            for data in (b"", b"{", b"[" * 100_000)
        ),
        *(
            (write("manifest.json", data), "quick_GPU/manifest.json has no 'sha256' that seals it")
            for data in (b"{}", b"[]")
        ),
        (device_by_hand, "quick_GPU/manifest.json changed since it was written"),
        (write("../loose.csv", b""), "results/loose.csv: move it"),
        *((lack(field), f"quick_GPU/manifest.json lacks '{field}'") for field in REQUIRED),
    ],
)
def test_a_changed_recording_is_named_in_one_line(
    recorded: Path, change: Callable[[Path], object], message: str
) -> None:
    change(recorded)
    with pytest.raises(UserError, match=message) as refusal:
        verify_results(recorded.parent)
    assert "\n" not in str(refusal.value)


def test_a_recording_belongs_to_its_folder_preset_and_device(tmp_path: Path) -> None:
    """Two whole folders that change names are whole still, and each tells of the other."""
    tables = {"table.csv": pd.DataFrame({"a": [1]})}
    for name, device in (("quick_cpu", "cpu, AVX2"), ("quick_cuda", "cuda, a GPU")):
        write_folder(tmp_path / name, tables, FIELDS | {"device": device})
        assert read_manifest(tmp_path / name)["folder"] == name
        old = dict(manifest_of(tmp_path / name))
        for field in ("folder", "sha256"):  # as they were written before
            old.pop(field, None)
        write("manifest.json", sealed(old))(tmp_path / name)
        read_manifest(tmp_path / name)
    (tmp_path / "quick_cpu").rename(tmp_path / "aside")
    (tmp_path / "quick_cuda").rename(tmp_path / "quick_cpu")
    (tmp_path / "aside").rename(tmp_path / "quick_cuda")
    with pytest.raises(UserError, match=r"is of quick_cuda, not of quick_cpu"):
        verify_results(tmp_path)
    write_folder(tmp_path / "mine", tables, FIELDS)
    (tmp_path / "mine").rename(tmp_path / "quick")
    with pytest.raises(UserError, match=r"is of mine, not of quick"):
        read_manifest(tmp_path / "quick")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder that was recorded, and is to be replaced."""
    folder = tmp_path / "small"
    write_folder(folder, {"table.csv": pd.DataFrame({"a": [1 / 3]})}, FIELDS)
    assert (folder / "table.csv").read_text() == "a\n0.333333\n"
    return folder


def test_a_folder_is_replaced_and_nothing_else_left(earlier: Path) -> None:
    write_folder(earlier, {"other.csv": pd.DataFrame({"a": [2]})}, FIELDS)
    assert list(read_manifest(earlier)["files"]) == ["other.csv"]
    assert [path.name for path in earlier.parent.iterdir()] == ["small"]


def test_a_replacement_that_was_killed_halfway_leaves_the_earlier_folder(
    earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else may fail on the way is made to fail in ``torture.sweeps``."""
    before = (earlier / "manifest.json").read_bytes()
    monkeypatch.setattr(manifests, "sha256_file", lambda _: 1 / 0)
    earlier.rename(earlier.with_name(".small.old"))  # a kill between the two renamings
    with pytest.raises(ZeroDivisionError):
        write_folder(earlier, {"other.csv": pd.DataFrame()}, FIELDS)
    assert (earlier / "manifest.json").read_bytes() == before
    assert [path.name for path in earlier.parent.iterdir()] == ["small"]
