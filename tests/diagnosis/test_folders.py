"""A folder of dumps: as one file of all its rows, with what the trainer said about itself."""

from __future__ import annotations

import numpy as np
import pytest

from kl_term.cli.diagnose import diagnose
from kl_term.diagnosis.generate import as_csv, example
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.readers import read_rollouts, record_settings, recorded_settings
from kl_term.diagnosis.reports import report
from kl_term.diagnosis.schema import Report, Settings
from kl_term.errors import UserError
from kl_term.kl.term import KLTerm


@pytest.fixture
def folder(tmp_path):
    frame = example("heavy_tail")
    late = frame.sequence >= 20
    for rank, part in enumerate((frame[~late], frame[late])):
        (tmp_path / f"rollouts-{rank}.csv").write_text(as_csv(part))
    (tmp_path / "README.md").write_text("no dump")
    return tmp_path


def test_files_are_read_as_one(folder, tmp_path_factory):
    whole = tmp_path_factory.mktemp("whole") / "all.csv"
    whole.write_text(as_csv(example("heavy_tail")))
    parts, one = read_rollouts(folder), read_rollouts(whole)
    assert parts.sequences == one.sequences == 36 and parts.rows == one.rows
    for name in ("logp", "old_logp", "ref_logp", "sequence", "position", "advantage", "step"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(one, name))
    assert parts.sequence_names[20] == "20 (step 103) of rollouts-1.csv"
    first, second = (report(measure(rollouts), source="x") for rollouts in (parts, one))
    assert first.findings == second.findings and first.estimates == second.estimates


def test_a_column_that_one_file_lacks_is_refused(folder):
    frame = example("heavy_tail").drop(columns="reward")
    (folder / "rollouts-2.csv").write_text(as_csv(frame))
    with pytest.raises(
        UserError, match=r"rollouts-2\.csv: column reward is missing, but rollouts-0"
    ):
        read_rollouts(folder)


def test_a_folder_without_dumps_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no dump"):
        read_rollouts(tmp_path)


def test_what_the_trainer_said_holds_unless_the_command_says_otherwise(folder, tmp_path):
    out = tmp_path / "report.json"
    term = KLTerm(estimator="k1", placement="reward", credit="immediate")
    given = Settings(framework="trl", kl=term, epsilon_high=0.28)
    record_settings(folder, given)
    assert recorded_settings(folder) == given
    diagnose(folder, json=out)
    found = Report.model_validate_json(out.read_text())
    assert found.settings == given and "dead-zone" not in found.codes()
    diagnose(folder, json=out, framework="verl", estimator="k3", placement="loss")
    found = Report.model_validate_json(out.read_text())
    assert (found.settings.framework, found.settings.epsilon_high) == ("verl", 0.28)
    assert "dead-zone" in found.codes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kl": {"estimator": "k9"}}', r"settings\.json: kl\.estimator: Input should be .*'k3'"),
        ('{"epsilon_low": -1}', r"settings\.json: epsilon_low: Input should be greater than"),
        ('{"estimater": "k3"}', r"settings\.json: estimater: Extra inputs are not permitted"),
        ('{"estimator": ', r"settings\.json: Expecting value: line 1"),
    ],
)
def test_settings_that_are_none_are_refused(folder, text, message):
    (folder / "settings.json").write_text(text)
    with pytest.raises(UserError, match=message):
        recorded_settings(folder)
    assert recorded_settings(folder / "rollouts-0.csv") == Settings()
