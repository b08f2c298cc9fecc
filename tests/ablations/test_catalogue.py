"""Presets by name, and the parameter that all of them share."""

from __future__ import annotations

import pytest

from analysis.experiments.ablations.catalogue import CATALOGUE, FIRST_SEED, make_preset


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_preset_can_be_run_again_on_other_seeds(name):
    usual = make_preset(name, {})
    other = make_preset(name, {FIRST_SEED: 90_000})
    assert other.seeds == tuple(range(90_000, 90_000 + len(usual.seeds)))
    assert other == usual.model_copy(update={"seeds": other.seeds}), "nothing else changes"


def test_a_first_seed_goes_with_other_parameters():
    assert make_preset("quick", {"num_seeds": "2", FIRST_SEED: "7"}).seeds == (7, 8)


@pytest.mark.parametrize("value", [-1, "seven", 1.5, None])
def test_a_first_seed_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="^preset 'quick': first_seed: Input should be"):
        make_preset("quick", {FIRST_SEED: value})


def test_a_misspelt_parameter_is_named():
    with pytest.raises(ValueError, match="did you mean 'first_seed'"):
        make_preset("quick", {"first_sed": 1})
