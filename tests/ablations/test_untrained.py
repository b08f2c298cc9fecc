"""What policies do before training, and the table of it that the book quotes."""

from __future__ import annotations

import pytest

from analysis.experiments.ablations import recording, untrained
from analysis.experiments.ablations.catalogue import make_preset
from analysis.experiments.ablations.presets import FULL
from analysis.experiments.ablations.source import source_of
from analysis.training.config import StartConfig


def test_a_teacher_is_told_from_its_start(two_digits):
    table = untrained.starts(two_digits, num_prompts=50).set_index("who")
    assert table.loc["teacher", "accuracy"] > 0.8 > 0.6 > table.loc["start", "accuracy"]
    assert table.loc["teacher", "length"] == pytest.approx(3.0, abs=0.1)  # no fillers
    assert table.loc["start", "length"] > 3.5  # mostly two of them
    assert (table["completions"] == 50 * two_digits.config.group_size).all()


def test_one_row_for_each_start_that_differs():
    preset = make_preset("starts", {"num_seeds": 3})
    config = preset.config.model_copy(update={"start": StartConfig(updates=5, count=3)})
    table = untrained.starts(preset.model_copy(update={"config": config}), num_prompts=20)
    assert table["seed"].tolist() == list(preset.seeds)
    assert table["who"].unique().tolist() == ["start"]
    shared = untrained.starts(FULL, num_prompts=5)
    assert shared["seed"].tolist() == list(FULL.seeds[:1])


@pytest.mark.parametrize("name", untrained.QUOTED)
def test_the_recorded_table_holds_what_is_quoted(name):
    table = untrained.recorded(name)
    config = recording.load(recording.folder_of(name)).preset.config
    teachers = [] if config.teacher is None else ["teacher"]
    assert table["who"].tolist() == ["start"] * config.start.count + teachers
    assert (table["completions"] == untrained.NUM_PROMPTS * config.group_size).all()
    assert table["accuracy"].between(0, 1).all()


def test_the_recorded_table_comes_out_again_within_what_sampling_and_rounding_allow():
    table = untrained.recorded("length_growth")
    preset = recording.load(recording.folder_of("length_growth")).preset
    here = untrained.starts(preset, num_prompts=300)
    for metric, tolerance in (("accuracy", 0.04), ("wrong_length", 0.3)):
        assert here[metric].item() == pytest.approx(table[metric].item(), abs=tolerance)


def test_the_table_is_of_this_source_and_names_its_presets():
    manifest = untrained.read_manifest(untrained.RECORDED)
    assert manifest["source"] == source_of(FULL.config)
    with pytest.raises(ValueError, match="preset must be one of"):
        untrained.recorded("fronts")
