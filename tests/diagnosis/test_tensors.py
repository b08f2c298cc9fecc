"""Dumps of one's own loop: tensors by name, padded, and what is no dump."""

from __future__ import annotations

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
