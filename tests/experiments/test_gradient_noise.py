"""The noise of a term's gradient: enumeration, the trainer's batches, and the recorded table."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.chapters.ch04_grpo.noise import draw_noise
from analysis.records.gradient_noise import recorded
from analysis.studies import gradient_noise as noise

RECORDED = recorded()
#: Standard errors; the points share their random numbers, so they are not as many checks.
FARTHEST = 4.0


def test_the_trainer_is_as_noisy_as_the_theory_says():
    errors = (RECORDED["sampled"] - RECORDED["theory"]) / RECORDED["standard_error"]
    assert errors.abs().max() < FARTHEST
    assert RECORDED.groupby("term").size().eq(len(noise.CHECKPOINTS)).all()


def test_expected_gradients_of_k2_and_of_the_exact_kl_are_one_by_the_weights_too():
    """Theirs alone: of the others the credit of later tokens, or another divergence, is a part."""
    bias = RECORDED.set_index("term")["bias"]
    assert bias["k2_loss"].max() < 1e-14
    assert bias[["k3_loss", "k1_reward"]].min() > 0.01


def test_the_exact_kl_is_the_quietest():
    table = RECORDED.pivot(index="update", columns="term", values="theory")
    assert (table.idxmin(axis=1) == "exact_loss").all()


@pytest.mark.slow
def test_a_checkpoint_is_computed_again(one_thread):
    """The theory to the recorded digits, and few batches around it."""
    found = noise.along_run(checkpoints=noise.CHECKPOINTS[:1], batches=200)
    rows = RECORDED[RECORDED["update"] == noise.CHECKPOINTS[0]]
    columns = ["update", "term", "theory"]
    pd.testing.assert_frame_equal(found[columns], rows[columns], rtol=1e-4)
    errors = (found["sampled"] - found["theory"]) / found["standard_error"]
    assert errors.abs().max() < FARTHEST


def test_the_figure_has_a_line_and_points_for_each_term():
    (axes,) = draw_noise(RECORDED).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "exact KL",
        "k₂ as a loss",
        "k₃ as a loss",
        "k₁ in the reward",
    ]
    assert len(axes.containers) == len(noise.TERMS)
