"""Dumps of one's own loop: tensors by name, padded, and what is no dump."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kl_term.diagnosis.readers import read_rollouts
from kl_term.errors import UserError

MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def batch(**changes):
    logp = -torch.arange(1.0, 7.0).view(2, 3)
    columns = {"logp": logp, "ref_logp": logp - 1, "mask": MASK, "reward": torch.tensor([0.0, 1.0])}
    return columns | {"step": torch.tensor(4)} | changes


def write(folder, name, columns):
    path = folder / name
    if name.endswith(".pt"):
        torch.save(columns, path)
    else:
        np.savez(path, **{key: value.numpy() for key, value in columns.items()})
    return path


@pytest.mark.parametrize("name", ["batch.pt", "batch.npz"])
def test_padded_tensors_are_read_a_row_a_completion(name, tmp_path):
    padded = batch()
    padded["ref_logp"][0, 2] = float("-inf")
    found = read_rollouts(str(write(tmp_path, name, padded)))
    assert found.logp.tolist() == [-1, -2, -4, -5, -6]
    assert found.sequence.tolist() == [0, 0, 1, 1, 1]
    assert found.reward.tolist() == [0, 0, 1, 1, 1] and set(found.step) == {4}


def test_names_of_frameworks_and_flat_tensors_are_read(tmp_path):
    columns = batch()
    columns["per_token_logps"] = columns.pop("logp")
    assert read_rollouts(write(tmp_path, "trl.pt", columns)).tokens == 5
    flat = {"logp": torch.tensor([-1.0, -2.0]), "ref_logp": torch.tensor([-1.0, -2.0])}
    flat |= {"sequence": torch.tensor([3, 3])}
    assert read_rollouts(write(tmp_path, "flat.npz", flat)).sequences == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": torch.zeros(3)}, "reward has shape"),
        ({"logp": torch.zeros(2, 3, 1)}, r"\[batch, tokens\] was expected"),
        ({"mask": None}, "more than tensors"),
        ({"ref_logp": torch.full((2, 3), 0.5)}, "row 1, token 1, column ref_logp"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_rollouts(write(tmp_path, "batch.pt", batch(**change)))


def test_nothing_is_unpickled(tmp_path):
    class Payload:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"logp": Payload()}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="cannot be read"):
        read_rollouts(tmp_path / "bad.pt")


@pytest.mark.parametrize("name", ["trainer_state.json", "log_history.json", "run-1.wandb"])
def test_a_log_is_no_dump(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"a log holds means of steps.*--how-to-dump plain"):
        read_rollouts(tmp_path / name)


PACKED = {
    "logp": np.log([0.5, 0.4, 0.3, 0.2, 0.6]),
    "ref_logp": np.log([0.4, 0.4, 0.2, 0.3, 0.5]),
}


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
@pytest.mark.parametrize("ends", ["cu_seqlens", "cu_seq_lens_q"])
def test_packed_tensors_are_cut_where_their_sequences_end(tmp_path, shape, ends):
    flat = {name: values.reshape(shape) for name, values in PACKED.items()}
    np.savez(tmp_path / "packed.npz", **flat, **{ends: np.array([0, 2, 2, 5], np.int32)})
    found = read_rollouts(tmp_path / "packed.npz")
    assert found.lengths.tolist() == [2, 3]
    assert found.position.tolist() == [0, 1, 0, 1, 2]
    np.testing.assert_array_equal(found.logp, PACKED["logp"])


def test_packed_tensors_are_read_by_the_sequence_of_each_token(tmp_path):
    flat = {name: values.reshape(1, 5) for name, values in PACKED.items()}
    ids = np.array([[0, 0, 1, 1, 1]])
    np.savez(tmp_path / "packed.npz", **flat, sequence_ids=ids)
    assert read_rollouts(tmp_path / "packed.npz").lengths.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"cu_seqlens": np.array([0, 2, 4])}, "must rise from 0 to the number of tokens"),
        ({"cu_seqlens": np.array([1, 5])}, "must rise from 0 to the number of tokens"),
        ({"position_ids": np.array([[0, 1, 0, 1, 2]])}, "give each sequence its own id"),
    ],
)
def test_packed_tensors_that_nothing_cuts_are_refused(tmp_path, arrays, message):
    flat = {name: values.reshape(1, 5) for name, values in PACKED.items()}
    np.savez(tmp_path / "packed.npz", **flat, **arrays)
    with pytest.raises(UserError, match=message):
        read_rollouts(tmp_path / "packed.npz")


def test_packed_lists_with_ends_are_refused_and_with_ids_are_read(tmp_path):
    row = {name: values.tolist() for name, values in PACKED.items()}
    path = tmp_path / "packed.jsonl"
    path.write_text(json.dumps(row | {"cu_seqlens": [0, 2, 5]}) + "\n")
    with pytest.raises(UserError, match="dump the sequence of each token"):
        read_rollouts(path)
    path.write_text(json.dumps(row | {"sequence_ids": [0, 0, 1, 1, 1]}) + "\n")
    assert read_rollouts(path).lengths.tolist() == [2, 3]
