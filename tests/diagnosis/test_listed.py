"""Lists in the cells of a CSV, and a batch on a line of JSON."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from kl_term.diagnosis.readers import read_rollouts
from kl_term.errors import UserError

LOGP = [[-1.0, -2.5], [-0.5, -3.0, -0.25]]


def frame(write) -> pd.DataFrame:
    ref = [[value - 0.5 for value in row] for row in LOGP]
    columns = {"logp": LOGP, "ref_logp": ref}
    written = {name: [write(row) for row in rows] for name, rows in columns.items()}
    return pd.DataFrame({"step": [3, 4], "reward": [0.0, 1.0]} | written)


@pytest.mark.parametrize(
    "write",
    [list, json.dumps, np.array, torch.tensor, lambda row: repr(np.array(row))],
    ids=["lists", "JSON", "numpy", "torch", "repr"],
)
def test_lists_in_cells_are_read_as_lists(write, tmp_path):
    path = tmp_path / "lists.csv"
    frame(write).to_csv(path, index=False)
    found = read_rollouts(path)
    assert found.logp.tolist() == [-1.0, -2.5, -0.5, -3.0, -0.25]
    assert found.sequence.tolist() == [0, 0, 1, 1, 1] and found.step.tolist() == [3, 3, 4, 4, 4]
    assert found.reward.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("[-1.0 ... -2.0]", "shortened"),
        ("[-1.0, low]", "'low' is no number"),
        ("-1.0", "row 2: .* is no list"),
        ("[-0.5]", "line 3, column ref_logp: 3 values, but logp has 1"),
        ("[-0.5, -3.0, 0.5]", "line 3, token 3, column logp"),
    ],
)
def test_a_cell_that_is_no_list_is_named(cell, message, tmp_path):
    path = tmp_path / "lists.csv"
    changed = frame(json.dumps)
    changed.loc[1, "logp"] = cell
    changed.to_csv(path, index=False)
    with pytest.raises(UserError, match=message):
        read_rollouts(path)


def test_a_batch_on_a_line_is_its_sequences(tmp_path):
    path = tmp_path / "batch.jsonl"
    padded = {"logp": [[-1, -2, 0], [-1, -3, -2]], "mask": [[1, 1, 0], [1, 1, 1]]}
    padded |= {"ref_logp": padded["logp"], "reward": [0.0, 1.0]}
    path.write_text("\n".join(json.dumps(padded | {"step": step}) for step in (0, 1)))
    found = read_rollouts(path)
    assert found.sequences == 4 and found.tokens == 10
    assert found.step.tolist() == [0] * 5 + [1] * 5 and found.reward.tolist()[:5] == [0, 0, 1, 1, 1]
    path.write_text(json.dumps(padded | {"reward": [0.0]}))
    with pytest.raises(UserError, match="line 1, column reward: 1 sequences, but"):
        read_rollouts(path)


def test_a_list_for_each_token_of_a_column_that_is_not_read_makes_no_batch(tmp_path):
    """The log-probs of the likeliest tokens, as loops log them, and prompts of other lengths."""
    path = tmp_path / "top.jsonl"
    likeliest = [[[-0.1, -3.0]] * len(row) for row in LOGP]
    rows = [
        {"logp": row, "ref_logp": row, "top_logprobs": top}
        for row, top in zip(LOGP, likeliest, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_rollouts(path)
    assert found.sequences == 2 and "top_logprobs" in found.ignored
    pd.DataFrame(rows).to_csv(path.with_suffix(".csv"), index=False)
    assert read_rollouts(path.with_suffix(".csv")).logp.tolist() == found.logp.tolist()


def test_tensors_of_other_shapes_that_are_not_read_are_named_and_left_out(tmp_path):
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    held = {"logp": logp, "ref_logp": logp, "prompt_ids": torch.ones(2, 9, dtype=torch.int64)}
    torch.save(held | {"top_logprobs": torch.zeros(2, 2, 5)}, tmp_path / "batch.pt")
    found = read_rollouts(tmp_path / "batch.pt")
    assert found.sequences == 2 and {"prompt_ids", "top_logprobs"} <= set(found.ignored)


def test_a_list_in_a_cell_may_hold_true_false_and_none(tmp_path):
    path = tmp_path / "lists.csv"
    changed = frame(list)
    changed["mask"] = [[True, False], [False, True, True]]
    changed["sampler_logp"] = [[-1.0, None], [None, -3.0, None]]
    changed.to_csv(path, index=False)
    found = read_rollouts(path)
    assert found.logp.tolist() == [-1.0, -3.0, -0.25] and found.unscored == 1


def test_tensors_of_a_loop_are_read_with_their_graph_and_as_they_are_broadcast(tmp_path):
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    held = {"logp": logp, "ref_logp": 2 * logp, "advantages": torch.tensor([[0.5], [-0.5]])}
    torch.save(held, tmp_path / "batch.pt")
    assert read_rollouts(tmp_path / "batch.pt").advantage.tolist() == [0.5, 0.5, -0.5, -0.5]
