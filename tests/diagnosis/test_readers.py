"""What a dump may look like, and the one line that refuses what it may not."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pandas as pd
import pytest

from kl_term.diagnosis.readers import read_rollouts
from kl_term.errors import UserError

ROWS = [
    # sequence, position, logp, old_logp, ref_logp, mask
    ("a", 0, -1.0, -1.1, -1.2, 1),
    ("a", 1, -0.5, -0.4, -0.9, 1),
    ("a", 2, float("nan"), float("-inf"), 7.0, 0),
    ("b", 0, -2.0, -2.0, -1.0, 1),
    ("b", 1, -0.1, -0.2, -0.3, 1),
]
NAMES = ("sequence", "position", "logp", "old_logp", "ref_logp", "mask")


def csv_text(rows=ROWS) -> str:
    lines = [",".join(NAMES)]
    lines += [",".join(str(value) for value in row) for row in rows]
    return "\n".join(lines) + "\n"


def changed(row: int, column: str, value) -> list[tuple]:
    rows = [list(r) for r in ROWS]
    rows[row][NAMES.index(column)] = value
    return [tuple(r) for r in rows]


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        read_rollouts(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def write(tmp_path, text: str, name: str = "dump.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_torn_last_line_is_said_to_be_one(tmp_path):
    text = csv_text()
    cut = write(tmp_path, text[: text.rindex(",-0.3")])
    assert "line 6 has 4 of 6 columns; delete it if" in refusal(cut)


def test_a_refusal_names_the_file_once(tmp_path):
    row = {"logp": [-1.0, -2.0], "old_logp": [-1.0], "ref_logp": [-1.0, -2.0]}
    path = write(tmp_path, json.dumps(row) + "\n", "dump.jsonl")
    assert refusal(path).count(str(path)) == 1


def expect_the_rows(rollouts) -> None:
    assert rollouts.logp.tolist() == [-1.0, -0.5, -2.0, -0.1]
    assert rollouts.old_logp.tolist() == [-1.1, -0.4, -2.0, -0.2]
    assert rollouts.ref_logp.tolist() == [-1.2, -0.9, -1.0, -0.3]
    assert rollouts.sequence.tolist() == [0, 0, 1, 1]
    assert rollouts.position.tolist() == [0, 1, 0, 1]
    assert (rollouts.tokens, rollouts.sequences, rollouts.rows) == (4, 2, 5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 4, 0, 1, 2]])
def test_csv_in_any_order(tmp_path, order):
    found = read_rollouts(write(tmp_path, csv_text([ROWS[i] for i in order])))
    if order[0] in (0,):
        expect_the_rows(found)
    by_name = dict(zip(found.sequence_names, range(2), strict=True))
    assert set(by_name) == {"a", "b"}
    assert found.logp[found.sequence == by_name["a"]].tolist() == [-1.0, -0.5]
    assert found.logp[found.sequence == by_name["b"]].tolist() == [-2.0, -0.1]


def test_gzipped_csv(tmp_path):
    path = tmp_path / "dump.csv.gz"
    path.write_bytes(gzip.compress(csv_text().encode()))
    expect_the_rows(read_rollouts(path))


def test_json_lines_one_row_a_token(tmp_path):
    lines = [dict(zip(NAMES, row, strict=True)) for row in ROWS]
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    expect_the_rows(read_rollouts(write(tmp_path, text, "dump.jsonl")))


def test_json_lines_one_row_a_sequence_with_framework_names(tmp_path):
    lines = [
        {
            "per_token_logps": [-1.0, -0.5, None],
            "old_per_token_logps": [-1.1, -0.4, None],
            "ref_per_token_logps": [-1.2, -0.9, 7.0],
            "completion_mask": [1, 1, 0],
            "advantages": 0.5,
        },
        {
            "per_token_logps": [-2.0, -0.1],
            "old_per_token_logps": [-2.0, -0.2],
            "ref_per_token_logps": [-1.0, -0.3],
            "completion_mask": [1, 1],
            "advantages": -0.5,
        },
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    found = read_rollouts(write(tmp_path, text, "dump.jsonl"))
    expect_the_rows(found)
    assert found.advantage.tolist() == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.peers
def test_parquet(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is in the diagnose extra, not in the lock")
    import pyarrow
    import pyarrow.parquet

    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(NAMES)}
    path = tmp_path / "dump.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    expect_the_rows(read_rollouts(path))
    nested = {
        "logp": [[-1.0, -0.5], [-2.0, -0.1]],
        "old_logp": [[-1.1, -0.4], [-2.0, -0.2]],
        "ref_logp": [[-1.2, -0.9], [-1.0, -0.3]],
    }
    pyarrow.parquet.write_table(pyarrow.table(nested), path)
    assert read_rollouts(path).ref_logp.tolist() == [-1.2, -0.9, -1.0, -0.3]
    for header in (columns, nested):
        pyarrow.parquet.write_table(pyarrow.table({name: [] for name in header}), path)
        assert "holds no rows" in refusal(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    assert "kl-term[diagnose]" in refusal(write(tmp_path, "PAR1", "dump.parquet"))


@pytest.mark.peers
def test_torn_parquet(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is in the diagnose extra, not in the lock")
    assert "no readable parquet" in refusal(write(tmp_path, "PAR1 torn", "dump.parquet"))


def test_optional_columns_may_be_missing(tmp_path):
    found = read_rollouts(write(tmp_path, "sequence,logp,ref_logp\na,-1,-2\na,-2,-3\nb,-1,-1\n"))
    assert not found.has_old_logp and found.sampler_logp is None
    assert found.old_logp.tolist() == found.logp.tolist() == [-1, -2, -1]
    assert found.position.tolist() == [0, 1, 0]


def test_old_logp_stands_for_logp_before_an_update(tmp_path):
    found = read_rollouts(write(tmp_path, "sequence,old_log_probs,ref_log_prob\na,-1,-2\n"))
    assert found.logp.tolist() == found.old_logp.tolist() == [-1] and found.has_old_logp


def test_an_empty_optional_column_is_a_missing_one(tmp_path):
    found = read_rollouts(write(tmp_path, "sequence,logp,ref_logp,reward\na,-1,-2,\nb,-1,-1,\n"))
    assert found.reward is None


def test_the_same_id_at_another_step_is_another_sequence(tmp_path):
    text = "step,sequence,position,logp,ref_logp\n1,0,0,-1,-1\n2,0,0,-1,-1\n"
    found = read_rollouts(write(tmp_path, text))
    assert found.sequences == 2 and found.sequence_names == ("0 (step 1)", "0 (step 2)")


def test_unknown_columns_are_listed_with_the_nearest_name(tmp_path):
    text = "sequence,logp,ref_logp,advantag,colour\na,-1,-2,1,red\n"
    assert read_rollouts(write(tmp_path, text)).ignored == {"advantag": "advantage", "colour": ""}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("sequence,logp,ref_logp\n", "no rows"),
        ("position,logp,ref_logp\n0,-1,-1\n", "column sequence is missing"),
        ("sequence;logp;ref_logp\na;-1;-1\n", "separate by commas"),
        ("sequence,logp,ref_lgp\na,-1,-1\n", "column ref_logp is missing"),
        ("sequence,logp,ref_lgp\na,-1,-1\n", "rename 'ref_lgp'?"),
        ("step,loss,kl,reward\n1,0.1,0.02,0.5\n", "log has none: see kl-term diagnose --how-to-"),
        ("sequence,logp,logp,ref_logp\na,-1,-1,-1\n", "'logp' stands twice"),
        ("sequence,logp,log_probs,ref_logp\na,-1,-1,-1\n", "both mean logp"),
        ("sequence,logp,ref_logp\na,-1,-1,-1,-1\nb,-1\n", "no regular CSV"),
        (csv_text(changed(1, "logp", "nan")), "line 3, column logp: nan"),
        (csv_text(changed(3, "ref_logp", "-inf")), "line 5, column ref_logp: -inf"),
        (csv_text(changed(3, "logp", 0.5)), "line 5, column logp: 0.5 is above 0"),
        (csv_text(changed(3, "logp", "abc")), "line 5, column logp: 'abc' is no number"),
        (csv_text(changed(3, "mask", 2)), "line 5, column mask: "),
        (csv_text(changed(3, "mask", "maybe")), "line 5, column mask: 'maybe'"),
        (csv_text(changed(3, "mask", "")), "line 5, column mask: an empty cell is neither 0 nor 1"),
        (csv_text(changed(3, "position", 0.5)), "line 5, column position: 0.5 is no whole"),
        (csv_text(changed(3, "sequence", "")), "line 5, column sequence: empty"),
        (csv_text(changed(1, "position", 0)), "line 2 and line 3: sequence a, position 0 twice"),
        (csv_text([(*row[:-1], 0) for row in ROWS]), "mask counts no token"),
        ("sequence,logp,ref_logp\na,1,2\na,2,3\n", "was the sign dropped?"),
        ("sequence,logp,ref_logp\na,0.5,0.2\na,1,0.3\n", "probabilities? take their logarithm"),
        ("sequence,logp,ref_logp\na,-3.4e38,-1\n", "-3.4e+38 is a mask's fill value"),
    ],
)
def test_bad_csv(tmp_path, text, said):
    assert said in refusal(write(tmp_path, text))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1 is no JSON"),
        (["[1]"], "line 1 is no JSON object"),
        (['{"logp": -1, "ref_logp": -1}, {"logp": -1}'], "line 1 is no JSON"),
        (['{"logp": [1', '2]}, {"logp": [3]}'], "line 1 is no JSON"),
        (['{"logp": [-1], "ref_logp": [-1]}', '{"logp": [-1]}'], "disagree on field 'ref_logp'"),
        (['{"logp": [-1, -2], "ref_logp": [-1]}'], "line 1, column ref_logp: 1 values"),
        (['{"logp": [-1], "ref_logp": [-1]}', '{"logp": -1, "ref_logp": [-1]}'], "line 2, column"),
        (
            ['{"logp": [-1, -2], "ref_logp": [-1, -1]}', '{"logp": [-1, 3], "ref_logp": [-1, -1]}'],
            "line 2, token 2, column logp: 3 is above 0",
        ),
        (['{"logp": [-1, "x"], "ref_logp": [-1, -1]}'], "line 1, token 2, column logp: 'x'"),
        (['{"logp": -1, "ref_logp": -1}'], "column sequence is missing"),
        (["", ""], "holds no rows"),
        (["[" * 100_000], "line 1 is no JSON"),
        (['{"logp": ' + "[" * 100_000 + "]" * 100_000 + "}"], "line 1 is no JSON"),
        ([f'{{"sequence": 0, "ref_logp": -1, "logp": -{10**400}}}'], "logp: -inf is no finite"),
        (['{"sequence": {"a": 1}, "ref_logp": -1, "logp": -1}'], "{'a': 1} is no name"),
        (['{"sequence": 0, "position": 1e30, "ref_logp": -1, "logp": -1}'], "1e+30 is too large"),
        (['{"sequence": 0, "advantage": -1e300, "ref_logp": -1, "logp": -1}'], "too large to be"),
    ],
)
def test_bad_json_lines(tmp_path, lines, said):
    assert said in refusal(write(tmp_path, "\n".join(lines) + "\n", "dump.jsonl"))


def test_no_file_and_no_format(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.csv")
    assert "unknown format" in refusal(write(tmp_path, "x", "dump.txt"))
    path = tmp_path / "dump.csv.gz"
    path.write_bytes(gzip.compress(csv_text().encode())[:-20])
    assert "cannot be read" in refusal(path)


def test_rounding_above_zero_is_forgiven(tmp_path):
    found = read_rollouts(write(tmp_path, "sequence,logp,ref_logp\na,1e-6,-1\na,-1,-1\n"))
    assert found.logp[0] == 1e-6 and math.isfinite(np.exp(found.logp).sum())


def test_openrlhf_calls_the_new_log_probs_action_log_probs_where_it_names_the_old(tmp_path):
    table = pd.DataFrame({"sequence": [0, 0], "base_action_log_probs": [-1.0, -2.0]})
    alone = table.assign(action_log_probs=[-1.5, -2.5])
    both = alone.assign(old_action_log_probs=[-1.4, -2.4])
    for frame, old in ((alone, [-1.5, -2.5]), (both, [-1.4, -2.4])):
        frame.to_csv(tmp_path / "dump.csv", index=False)
        read = read_rollouts(tmp_path / "dump.csv")
        assert read.logp.tolist() == [-1.5, -2.5] and read.old_logp.tolist() == old
        assert not read.ignored


def test_tokens_that_the_engine_could_not_score(tmp_path):
    """TRL writes NaN there: they get the trainer's log-prob, and are counted."""
    text = "sequence,logp,old_logp,ref_logp,sampler_logp\na,-1,-1.5,-1,-1.2\na,-2,-2.5,-2,nan\n"
    found = read_rollouts(write(tmp_path, text))
    assert found.sampler_logp.tolist() == [-1.2, -2.5] and found.unscored == 1
    filled = read_rollouts(write(tmp_path, text.replace("nan", "-inf")))
    assert (filled.unscored, filled.filled, filled.filler) == (1, 1, -np.inf)
    assert "inf is no finite" in refusal(write(tmp_path, text.replace("nan", "inf")))


@pytest.mark.parametrize(
    "names",
    [
        ("curr_logprobs", "prev_logprobs", "reference_policy_logprobs", "generation_logprobs"),
        ("trainer_logprobs", "old_logp", "ref_logp", "inference_logprobs"),
        ("logp", "prox_logp", "ref_logp", "logprobs"),
    ],
)
def test_names_of_nemo_rl_prime_rl_and_areal_are_read(names, tmp_path):
    found = read_rollouts(write(tmp_path, f"seq_id,{','.join(names)}\na,-1,-2,-3,-4\n"))
    columns = (found.logp, found.old_logp, found.ref_logp, found.sampler_logp)
    assert [column.tolist() for column in columns] == [[-1], [-2], [-3], [-4]]
    assert not found.ignored
