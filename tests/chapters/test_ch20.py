"""What is read off the recorded run on a language model, and whether that is its preset's."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.chapters.ch20_language_model import comparisons, kept, longer_runs, readings
from analysis.evidence import predictions
from analysis.evidence.names.kl_terms import NAMES
from analysis.records import estimator_tail, recording, summaries, tidy
from analysis.records.metrics import PARTIAL_METRICS
from analysis.records.retention import Retention
from analysis.report import tables
from analysis.studies.presets.language import smollm2_short
from tests.experiments.tiny import trained_alone
from tests.packaged import needs_packaged_weights


def finals(**kl: list[float]) -> pd.DataFrame:
    """One row per variant and seed with these reverse KLs."""
    rows = [
        {
            "variant": variant,
            "beta": 0.0 if variant == "none" else 0.3,
            "seed": seed,
            "reverse_kl": value,
        }
        for variant, values in kl.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_curves_begin_at_no_kl_term_seed_by_seed():
    runs = finals(none=[0.4, 0.5], k2_loss=[0.2, 0.3], k3_loss=[0.1, 0.1], k1_loss=[0.4, 0.4])
    curves = kept.from_no_kl(runs, ["k2_loss", "k3_loss"])
    assert set(curves["variant"]) == {"none", "k2_loss", "k3_loss"}
    for variant, ends in (("k2_loss", [0.2, 0.3]), ("k3_loss", [0.1, 0.1])):
        wide = curves[curves["variant"] == variant].pivot(
            index="seed", columns="beta", values="reverse_kl"
        )
        assert wide[0.0].to_list() == [0.4, 0.5] and wide[0.3].to_list() == ends
    assert curves[curves["variant"] == "none"]["reverse_kl"].to_list() == [0.4, 0.5]


def readings_elsewhere(finals: pd.DataFrame, powers: dict[str, float]) -> Retention:
    """Runs whose forward KL on each skill is a multiple of their KL on the task, by variant."""
    scales = {"near": 2.0, "far": 0.01}
    rows = [
        {
            **{name: run[name] for name in ("variant", "beta", "seed")},
            "skill": skill,
            "states": 10,
            "forward_kl": scale * powers[run["variant"]] * run["reverse_kl"],
            "reverse_kl": -1.0,
            "right": 0.5 + 0.1 * run["seed"] if skill == "near" else np.nan,
        }
        for run in finals.to_dict("records")
        for skill, scale in scales.items()
    ]
    reference = pd.DataFrame({"skill": [*scales], "right": [0.4, np.nan]})
    return Retention(pd.DataFrame(rows), reference)


@pytest.fixture
def scattered() -> pd.DataFrame:
    """Four seeds, two variants at two lengths each, and no KL term."""
    none, near, far = ([base * (1 + 0.1 * seed) for seed in range(4)] for base in (0.5, 0.3, 0.1))
    first = finals(none=none, k3_loss=near, exact_loss=near)
    second = finals(k3_loss=far, exact_loss=far).assign(beta=1.0)
    return pd.concat([first, second], ignore_index=True)


def test_what_is_kept_elsewhere_stands_beside_the_kl_on_the_task(scattered):
    retained = readings_elsewhere(scattered, {"none": 1.0, "k3_loss": 0.5, "exact_loss": 1.0})
    table = kept.elsewhere(retained, scattered)
    assert len(table) == 2 * len(scattered)
    on_task = table.set_index(["variant", "beta", "seed", "skill"])["on_task"]
    assert on_task["k3_loss", 1.0, 2, "far"] == pytest.approx(0.1 * 1.2)
    near = table[table["skill"] == "near"]
    assert near["gained"].to_numpy() == pytest.approx(0.1 + 0.1 * near["seed"].to_numpy())
    assert table[table["skill"] == "far"]["gained"].isna().all()
    means = kept.by_skill(table, "forward_kl").set_index(["skill", "variant", "beta"])
    one = means.loc[("near", "exact_loss", 1.0)]
    expected = [2.0 * 0.1 * factor for factor in (1.15, 1.0, 1.3)]
    assert one[["mean", "low", "high"]].to_list() == pytest.approx(expected)
    assert means.loc[("far", "k3_loss", 1.0), "mean"] == pytest.approx(0.01 * 0.5 * 0.1 * 1.15)


def test_a_run_that_was_not_trained_is_not_read(scattered):
    retained = readings_elsewhere(scattered, {"none": 1.0, "k3_loss": 0.5, "exact_loss": 1.0})
    with pytest.raises(pd.errors.MergeError, match="not unique"):
        kept.elsewhere(retained, pd.concat([scattered, scattered]))


def test_at_equal_kl_on_the_task_variants_are_compared_elsewhere(scattered):
    retained = readings_elsewhere(scattered, {"none": 1.0, "k3_loss": 0.5, "exact_loss": 1.0})
    table = kept.elsewhere(retained, scattered)
    found = kept.elsewhere_at_equal(table, "k3_loss", "exact_loss", 0.2)
    assert found["skill"].to_list() == ["near", "far"]
    # Between its two lengths, below no KL term, k3 is at half of the exact KL's everywhere.
    for column in ("ratio", "low", "high"):
        assert found[column].to_numpy() == pytest.approx([0.5, 0.5])


def test_a_reading_is_over_the_exact_kl_of_its_update():
    curves = pd.DataFrame(
        {
            "update": [0, 4, 8],
            "reverse_kl": [0.0, 0.2, 0.5],
            "k1": [0.0, -0.1, 0.75],
            "k2": [0.0, 0.2, 0.5],
            "k3": [0.0, 0.3, 0.5],
        }
    )
    table = readings.over_exact(curves)
    assert len(table) == 6, "the start, where every KL is zero, is left out"
    ratios = table.groupby("estimator", sort=False)["ratio"].agg(list)
    for name, expected in {"k1": [-0.5, 1.5], "k2": [1.0, 1.0], "k3": [1.5, 1.0]}.items():
        assert ratios[name] == pytest.approx(expected)


def test_the_deviation_of_a_reading_is_over_tokens_of_every_probability():
    table = pd.DataFrame(
        {
            "seed": 0,
            "decade": [-np.inf, -3.0, -1.0],
            "k1": [-0.01, 0.01, 0.2],
            "k3": [0.1, 0.06, 0.04],
            "k1_squared": [0.0, 0.01, 0.28],
            "k2": [0.0, 0.0, 0.5],
            "k2_squared": [0.0, 0.0, 0.25],
            "k3_squared": [4.0, 0.03, 0.01],
        }
    )
    doubled = table.assign(seed=1, k3_squared=4 * table["k3_squared"])
    spread, other = estimator_tail.deviations(pd.concat([table, doubled])).to_dict("records")
    assert other["k3"] == pytest.approx(np.sqrt(16.16 - 0.04) / 0.2) and other["k1"] == spread["k1"]
    assert spread["k1"] == pytest.approx(np.sqrt(0.29 - 0.04) / 0.2)
    assert spread["k2"] == pytest.approx(0.0)
    assert spread["k3"] == pytest.approx(np.sqrt(4.04 - 0.04) / 0.2)


@pytest.fixture(scope="module")
def compared() -> pd.DataFrame:
    return comparisons.compared()


def test_verdicts_are_those_that_the_prose_states(compared, monkeypatch):
    comparisons.check_verdicts(compared)
    for part, key, message in (
        ("one", "k3_loss_none_accuracy", "the runs differs"),
        ("one", "no such comparison", "the runs nothing"),
    ):
        monkeypatch.setattr(comparisons, "SAYS", {"unresolved": {part: [key]}})
        with pytest.raises(ValueError, match=f"{part}: {key}: the text says unresolved, {message}"):
            comparisons.check_verdicts(compared)


def test_every_comparison_is_shown_with_names_and_numbers(compared):
    assert not compared.duplicated(["part", "key"]).any()
    shown = tables.differences(compared, NAMES, part="comparison")
    assert {*compared["variant"], *compared["other"]} <= set(NAMES)
    assert len(shown) == len(compared) and not compared["mean"].isna().any()
    assert shown["95% interval"].str.contains(" to ").all()


def test_the_recording_is_the_preset_and_complete():
    recorded = recording.load(recording.folder_of(smollm2_short().name))
    assert recorded.preset == smollm2_short()
    assert not recorded.manifest["failures"]
    assert len(recorded.finals) == len(smollm2_short().runs)
    windows = smollm2_short().config.updates // smollm2_short().config.log_every
    assert len(recorded.curves) == windows * len(smollm2_short().runs)
    measured = recorded.curves.drop(columns=list(PARTIAL_METRICS)).select_dtypes("number")
    assert np.isfinite(measured.to_numpy()).all()
    start = recorded.curves.query("update == 0")
    assert start["reverse_kl"].abs().max() < 1e-6, "all runs start as the model itself"
    assert start.groupby("seed")["entropy"].std().max() < 1e-4, "variants of a seed begin alike"


@needs_packaged_weights
def test_a_recorded_run_is_trained_again_from_the_packaged_weights():
    recorded = recording.load(recording.folder_of(smollm2_short().name))
    again = trained_alone(recorded, "k3_loss", 0.3, smollm2_short().seeds[0], windows=1)
    again = again.set_index("metric")
    for name, within in (("accuracy", 0.01), ("entropy", 1e-3), ("gradient_norm", 0.02)):
        assert again.loc[name, "difference"] <= within, name
    assert again.loc["accuracy", "again"] > 0.1 and again.loc["gradient_norm", "again"] > 0.05


@pytest.fixture(scope="module")
def ended() -> dict[str, pd.DataFrame]:
    """Recording -> its last quarter, one row a run."""
    names = ("smollm2_short", "smollm2_coefficients")
    runs = {name: recording.load(recording.folder_of(name)) for name in names}
    return {name: tidy.final(run.curves, share=0.25) for name, run in runs.items()}


def test_which_terms_cost_accuracy_on_a_language_model(ended):
    """By scipy: "every term that stays near costs accuracy" stands for one of four."""
    wide = ended["smollm2_short"].pivot(index="seed", columns="variant", values="accuracy")
    tested = {
        variant: stats.ttest_rel(wide[variant], wide["none"])
        for variant in ("k3_loss", "k2_loss", "exact_loss", "k1_reward")
    }
    assert tested["k3_loss"].pvalue < 0.05 / 26, "all comparisons of its page"
    assert 0.05 / 26 < tested["k2_loss"].pvalue < 0.05
    assert min(tested[variant].pvalue for variant in ("exact_loss", "k1_reward")) > 0.05
    assert max(test.confidence_interval().high for test in tested.values()) < 0.01, "none gains"


def test_k3_in_the_reward_ends_below_six_other_variants_after_200_updates():
    """From the table alone, its last tenth of windows averaged by hand."""
    curves = pd.read_csv(recording.RESULTS / "smollm2_cuda" / "curves.csv", keep_default_na=False)
    last = curves[curves["update"] >= 180].astype({"accuracy": float})
    ends = last.groupby(["variant", "seed"])["accuracy"].mean().unstack()
    low, others = ends.loc["k3_reward"], ends.drop(["k3_reward", "k2_reward"])
    assert others.size == 18 and low.max() < others.min().min()
    assert ends.loc["k2_reward"].min() < others.min().min(), "so k2 in the reward is left out"
    found = longer_runs.cost_on_gpu()
    assert found["mean"] == pytest.approx((low - ends.loc["none"]).mean(), abs=1e-6)
    assert found["most"] == pytest.approx((low - ends.loc["none"]).min(), abs=1e-6)
    assert found["rank_p"] == pytest.approx(
        stats.mannwhitneyu(
            low, others.to_numpy().ravel(), alternative="less", method="exact"
        ).pvalue
    )
    kl = last.astype({"reverse_kl": float}).groupby("variant")["reverse_kl"].mean()
    assert 1 / 1.25 < kl["k3_reward"] / kl["none"] < 1.25, "the policy is not driven away"


def test_new_seeds_leave_open_whether_k3_in_the_reward_costs_accuracy():
    """From the table alone, by scipy; the margin is the design's."""
    path = recording.RESULTS / "smollm2_reward_long_cpu" / "final.csv"
    finals = pd.read_csv(path, keep_default_na=False).astype({"final_accuracy": float})
    wide = finals.pivot(index="seed", columns="variant", values="final_accuracy")
    assert sorted(wide.index) == list(range(9300, 9306)) and not wide.isna().to_numpy().any()
    tested = stats.ttest_rel(wide["k3_reward"], wide["none"])
    low, high = tested.confidence_interval()
    assert low < -0.05 and high > 0.05, "neither a cost nor an equivalence"
    ordered = wide["k3_reward"].sort_values()
    assert ordered.iloc[0] < 0.8 < 0.85 < ordered.iloc[1], "one run ends far below"
    assert (ordered.iloc[2:] > wide["none"].min()).all(), "the others as runs without a term do"
    (row,) = (
        predictions.judged("smollm2_reward_long")
        .query("metric == 'final_accuracy'")
        .to_dict("records")
    )
    assert row["mean"] == pytest.approx((wide["k3_reward"] - wide["none"]).mean())
    assert (row["low"], row["high"]) == pytest.approx((low, high))
    found = longer_runs.ends_again()
    assert found["k3_reward_second"] == ordered.iloc[1] and found["none_low"] == wide["none"].min()
    assert found["k3_reward"] == pytest.approx(ordered.mean())


def test_by_the_last_tenth_nine_seeds_lean_towards_a_cost_and_six_leave_it_open():
    """From both tables alone, by scipy; no run falls back to where it began."""
    gaps, curves = {}, []
    for folder in ("smollm2_reward_long_cpu", "smollm2_cuda"):
        tables = [
            pd.read_csv(recording.RESULTS / folder / name, keep_default_na=False)
            for name in ("final.csv", "curves.csv")
        ]
        wide = (
            tables[0]
            .astype({"accuracy": float})
            .pivot(index="seed", columns="variant", values="accuracy")
        )
        gaps[folder] = (wide["k3_reward"] - wide["none"]).to_numpy()
        curves.append(tables[1].query("variant == 'k3_reward'").astype({"accuracy": float}))
    new = gaps["smollm2_reward_long_cpu"]
    both = np.concatenate(list(gaps.values()))
    found = longer_runs.by_last_tenth()
    for name, gap in (("new", new), ("all", both)):
        low, high = stats.ttest_1samp(gap, 0.0).confidence_interval()
        row = found[name]
        assert (row["mean"], row["low"], row["high"]) == pytest.approx((gap.mean(), low, high))
    assert found["new"]["low"] < -0.05 < 0.0 < found["new"]["high"]
    assert len(both) == 9 and -0.01 < found["all"]["high"] < 0.0, "only just"
    wide = pd.concat(curves).pivot(index="update", columns="seed", values="accuracy")
    assert wide.loc[50:].min().min() > wide.loc[0].max() + 0.1, "no run collapses"
    new_low = wide[9302].loc[50:]
    assert 0.63 < new_low.min() < 0.65 and 0.87 < new_low.max() < 0.89, "as the alt text says"


def test_the_difference_that_three_seeds_detect_is_that_of_simulated_experiments():
    """The power of a t test by drawing a hundred thousand experiments."""
    finals = recording.load(recording.RESULTS / "smollm2_cuda").finals
    wide = finals.pivot(index="seed", columns="variant", values="accuracy")
    spread = (wide["k3_reward"] - wide["none"]).std()
    drawn = np.random.default_rng(5).normal(0.0, spread, (100_000, 3))
    for size, power in ((longer_runs.cost_on_gpu()["detected"], 0.8), (0.1, 0.2)):
        p = stats.ttest_1samp(drawn + size, 0.0, axis=1).pvalue
        assert (p < 0.05).mean() == pytest.approx(power, abs=0.01)


def test_the_predictions_of_the_longest_runs_stand_beside_what_was_found():
    table = longer_runs.predicted_on_gpu()
    assert list(table["outcome"]) == ["open", "open", "open", "refuted"]
    recorded = recording.load(recording.RESULTS / "smollm2_cuda")
    assert list(table["prediction"]) == list(recorded.preset.predictions)
    start = recorded.curves.query("update == 0").set_index(["variant", "seed"])["accuracy"]
    gained = recorded.finals.set_index(["variant", "seed"])["accuracy"] - start
    assert gained.loc["k3_reward"].min() > 0.0, "it was predicted not to rise"


def test_k3_in_the_reward_is_lower_on_the_average_of_training(ended):
    """By scipy; at the end, at one coefficient and after 48 updates, that is unresolved."""
    wide = ended["smollm2_short"].pivot(index="seed", columns="variant", values="accuracy")
    assert stats.ttest_rel(wide["k3_reward"], wide["none"]).pvalue > 0.05
    curves = recording.load(recording.folder_of("smollm2_short")).curves
    average = curves.groupby(["variant", "seed"])["accuracy"].mean().unstack(0)
    test = stats.ttest_rel(average["k3_reward"], average["none"]).confidence_interval()
    found = comparisons.averaged_over_training()
    assert test.high < 0.0 and found["high"] == pytest.approx(test.high)


@pytest.mark.parametrize("preset", ["smollm2_equal_kl", "smollm2_coefficient_one"])
def test_at_equal_kl_ten_seeds_see_no_cost(ended, preset):
    """Of two terms that at one coefficient are not alike."""
    asked = predictions.judged(preset).query("metric == 'reward'").set_index("variant")
    margin = recording.load(recording.folder_of(preset)).preset.design.margin
    assert asked.loc["k1_reward", "outcome"] == "holds"
    for term in ("k1_reward", "k3_loss"):
        assert -margin < asked.loc[term, "low"] < 0 < asked.loc[term, "high"] < margin
    apart = summaries.paired(ended["smollm2_short"], [("k3_loss", "exact_loss", "accuracy")])
    assert apart["equivalent"][0] > 0.9 and apart["p"][0] < 0.05, "at one beta they are not"


def test_the_deviation_of_k3_hangs_on_the_rarest_tokens():
    """From run to run by more than ten times; without them, and of k1, hardly."""
    runs = estimator_tail.recorded()["none"].tail
    whole, cut = (estimator_tail.deviations(t) for t in (runs, runs.query("decade >= -6")))
    assert len(whole) == 5 and whole["k3"].max() > 10 * whole["k3"].min() > 5000
    assert cut["k3"].between(90, 140).all()
    assert whole["k1"].to_numpy() == pytest.approx(cut["k1"].to_numpy(), rel=0.1)
    assert whole["k1"].between(1.5, 2.5).all()
