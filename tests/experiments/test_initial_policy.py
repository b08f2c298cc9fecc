"""What policies do before training, and the table of it that the book quotes."""

from __future__ import annotations

import pytest

from analysis.records import recording
from analysis.records.config import StartConfig
from analysis.records.initial_policy import presets_of_table, recorded
from analysis.studies import initial_policy
from analysis.studies.presets import make_preset
from analysis.studies.presets.kl_terms import quick
from tests.experiments.tiny import two_digits

pytestmark = pytest.mark.slow


def test_a_teacher_is_told_from_its_start():
    preset = two_digits(300)
    table = initial_policy.starts(preset, num_prompts=50).set_index("who")
    assert table.loc["teacher", "accuracy"] > 0.8 > 0.6 > table.loc["start", "accuracy"]
    assert table.loc["teacher", "length"] == pytest.approx(3.0, abs=0.1)  # no fillers
    assert table.loc["start", "length"] > 3.5  # mostly two of them
    assert (table["completions"] == 50 * preset.config.group_size).all()


def test_one_row_for_each_start_that_differs():
    preset = make_preset("half_step", {"num_seeds": 3})
    config = preset.config.model_copy(update={"start": StartConfig(updates=5, count=3)})
    table = initial_policy.starts(preset.model_copy(update={"config": config}), num_prompts=20)
    assert table["seed"].tolist() == list(preset.seeds)
    assert table["who"].unique().tolist() == ["start"]
    shared = initial_policy.starts(quick(), num_prompts=5)
    assert shared["seed"].tolist() == list(quick().seeds[:1])


@pytest.mark.parametrize("name", presets_of_table())
def test_the_recorded_table_holds_what_is_quoted(name):
    table = recorded(name)
    config = recording.load(recording.folder_of(name)).preset.config
    teachers = [] if config.teacher is None else ["teacher"]
    assert table["who"].tolist() == ["start"] * config.start.count + teachers
    assert (table["completions"] == initial_policy.NUM_PROMPTS * config.group_size).all()
    assert table["accuracy"].between(0, 1).all()


def test_the_recorded_table_comes_out_again_within_what_sampling_and_rounding_allow():
    table = recorded("length_growth")
    preset = recording.load(recording.folder_of("length_growth")).preset
    here = initial_policy.starts(preset, num_prompts=300)
    for metric, tolerance in (("accuracy", 0.04), ("wrong_length", 0.3)):
        assert here[metric].mean() == pytest.approx(table[metric].mean(), abs=tolerance)


def test_the_table_names_its_presets():
    with pytest.raises(ValueError, match="preset must be one of"):
        recorded("unknown")
