"""What pages once said of recorded runs, and what the recordings say."""

from __future__ import annotations

from functools import cache

import pandas as pd
from scipy import stats

from analysis.chapters.ch04_grpo import at_equal_kl
from analysis.evidence import predictions
from analysis.evidence.recorded import difference
from analysis.records import designs, initial_policy, recording, summaries


@cache
def finals(name: str) -> pd.DataFrame:
    return recording.load(recording.folder_of(name)).finals


def test_at_equal_kl_two_sampled_terms_lie_below_the_exact_one():
    """They were equivalent on one start; on ten neither is."""
    table = predictions.judged("equal_kl")
    asked = table[(table["at"] == "equal KL") & (table["other"] == "exact_loss")]
    asked = asked.set_index("variant")
    for variant in ("k3_loss", "k1_reward"):
        assert asked.loc[variant, "high"] < 0 and asked.loc[variant, "outcome"] == "open"
    ended = predictions.judged("equal_kl_ended").set_index(["variant", "metric"])
    assert {ended.loc[(v, "reward"), "outcome"] for v in ("k3_loss", "k1_reward")} == {"holds"}


def test_at_equal_kl_k3_as_a_loss_lies_below_k2():
    found = at_equal_kl.against("k3_loss", "k2_loss", preset="equal_kl_large")
    assert found["high"] < 0
    table = predictions.judged("equal_kl_large")
    kept = table[(table["other"] == "exact_loss") & (table["expected"] == "equivalent")]
    assert {"k2_loss", "k1_reward"} <= set(kept.loc[kept["outcome"] == "holds", "variant"])


def test_on_ten_starts_one_sample_of_a_teacher_does_not_beat_the_reward():
    weak = predictions.judged("weak_teacher").set_index(["variant", "other"])
    easy = predictions.judged("distillation").set_index(["variant", "other"])
    assert weak.loc[("opd_and_grpo", "grpo"), "high"] < 0
    assert easy.loc[("opd_immediate", "grpo"), "high"].item() < 0


def test_that_k1_as_a_loss_leaves_the_kl_as_it_is_is_open_on_ten_starts():
    asked = predictions.judged("equal_kl").set_index(["variant", "other", "metric"])
    assert asked.loc[("k1_loss", "none", "reverse_kl"), "outcome"] == "open"


def test_at_a_small_beta_k3_in_the_reward_costs_accuracy_and_loses_no_run():
    runs = finals("equal_kl")
    assert runs.query("variant == 'k3_reward' and beta == 0.03")["accuracy"].min() > 0.1
    found = difference(runs, "k3_reward", "none", "accuracy", beta=0.03)
    assert found.high < 0 and abs(found.mean + 0.04) < 0.01


def test_no_kl_to_a_teacher_that_writes_longer_is_more_accurate_than_the_reward_alone():
    accuracy = finals("kdrl").groupby("variant")["own_accuracy"].mean()
    assert accuracy.idxmax() == "grpo"


def test_samples_of_a_teacher_end_below_its_vocabulary_on_own_samples():
    pair = [("supervised", "reverse_exact", "own_accuracy")]
    found = pd.concat(
        summaries.paired(finals(name), pair) for name in ("distillation", "distillation_sparse")
    )
    assert (found["high"] < 0).all()


def test_at_a_large_beta_k1_in_the_reward_ends_farther_than_the_exact_kl():
    for beta in (1.0, 3.0):
        found = predictions.unpredicted(
            "equal_kl_large", "k1_reward", "exact_loss", "reverse_kl", beta
        )
        assert found["low"] > 0


def test_in_one_design_the_weight_helps_k2_on_stale_samples():
    """Beside one in which it costs accuracy at one beta, and one where at equal KL neither."""
    for folder in ("stale_starts_cpu", "stale_starts_cuda"):
        table = designs.judged_predictions(recording.load(recording.RESULTS / folder))
        table = table.set_index(["variant", "other", "metric"])
        assert table.loc[("k2", "k2_detached", "reward"), "high"] < 0
    table = predictions.judged("staleness").set_index(["variant", "other", "metric"])
    assert table.loc[("k2_detached_lag_16", "k2_lag_16", "own_accuracy"), "high"] < 0
    summed = predictions.unpredicted("stale_starts", "exact", "k2", "reward", 0.3)
    assert summed["low"] > 0


def test_a_tight_range_of_gspo_loses_on_neither_fresh_nor_old_samples():
    fresh = predictions.judged("objectives").set_index("variant")
    old = predictions.judged("stale_masking").set_index("variant")
    assert fresh.loc["gspo_narrow", "outcome"] == "holds"  # equivalent
    assert old.loc["gspo_tight", "low"] > 0


def test_from_easy_starts_the_whole_vocabulary_need_not_beat_the_reward():
    for variant, above in (("reverse_exact", True), ("forward_exact", False)):
        found = predictions.unpredicted("distillation", variant, "grpo", "own_accuracy", 0.0)
        assert found["low"] > 0 if above else found["high"] < 0


def test_the_hundredths_at_equal_kl_are_those_of_a_step_that_does_harm():
    """From the tables: without a KL term the reward falls there, and rises where answers end."""
    start = initial_policy.recorded("equal_kl")["accuracy"]
    harmed = finals("equal_kl").query("variant == 'none'")["reward"]
    assert stats.ttest_1samp(harmed, start.mean()).pvalue < 1e-3
    assert harmed.mean() < start.min() - 0.02
    ended = recording.load(recording.folder_of("equal_kl_ended")).curves.query("variant == 'none'")
    reward = ended.pivot(index="seed", columns="update", values="reward")
    gained = reward[reward.columns[-1]] - reward[reward.columns[0]]
    assert stats.ttest_1samp(gained, 0.0).pvalue < 1e-3 and gained.mean() > 0.05
    costs = {
        name: predictions.at_equal_kl(name, "k3_loss", "exact_loss").mean
        for name in ("equal_kl_large", "equal_kl_ended")
    }
    assert costs["equal_kl_large"] < 4 * costs["equal_kl_ended"] < 0


def test_at_half_the_step_k3_costs_too_and_half_as_much():
    """From the tables: reward rises there, and the terms lie half as far from the exact KL."""
    table = recording.load(recording.folder_of("equal_kl_half_step"))
    reward = table.curves.query("variant == 'none'").pivot_table("reward", "seed", "update")
    gained = reward[reward.columns[-1]] - reward[reward.columns[0]]
    assert stats.ttest_1samp(gained, 0.0).pvalue < 1e-3 and gained.mean() > 0.05
    names = ("k2_loss", "k1_reward", "k3_loss_attached_prefix", "k3_loss")
    there, here = (
        [predictions.at_equal_kl(preset, name, "exact_loss") for name in names]
        for preset in ("equal_kl_half_step", "equal_kl_large")
    )
    for costs in (there, here):
        means = [cost.mean for cost in costs]
        assert (max(means), min(means)) == (means[0], means[3])
        assert all(-0.035 < mean < 0 for mean in means)
    assert all(0.35 < a.mean / b.mean < 0.65 for a, b in zip(there, here, strict=True))
    assert [cost.high < 0 for cost in there] == [False, False, True, True]
    assert all(cost.high < 0 for cost in here)
    assert predictions.judged("equal_kl_half_step").query("variant == 'k3_loss'")["high"].max() < 0
