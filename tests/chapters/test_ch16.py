"""Chapter 16: lengths under a token's weight, their tilt and flow; the troubles of GRPO."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from analysis.chapters import ch16_objectives as study
from analysis.evidence.names.objectives import DAPO
from analysis.evidence.reasoning import open_length_chain
from analysis.evidence.recorded import recorded
from analysis.records import recording
from analysis.records.initial_policy import recorded_lengths
from analysis.studies import initial_policy
from analysis.studies.presets import make_preset
from analysis.studies.presets.designed import aggregation_length
from kl_term.kl.credit import state_average
from kl_term.kl.sequences import sequence_probability


@pytest.mark.parametrize("mode", study.MODES)
def test_the_gradient_is_that_of_the_class_weights(mode):
    problem = open_length_chain(5, right=0.4, stop=0.2)
    torch.testing.assert_close(
        study.ascent(problem, mode), study.by_classes(problem, mode), rtol=0, atol=1e-14
    )
    other = next(name for name in study.MODES if name != mode)
    assert (study.ascent(problem, mode) - study.by_classes(problem, other)).abs().max() > 1e-3


def test_the_sum_is_the_gradient_of_the_mean_reward():
    problem = open_length_chain(5, right=0.4, stop=0.2)
    logits = problem.logits.clone().requires_grad_()
    success = sequence_probability(logits, problem.sequences) @ problem.outcome
    (gradient,) = torch.autograd.grad(success, logits)
    torch.testing.assert_close(
        study.ascent(problem, "seq_mean_token_sum"), gradient, rtol=0, atol=1e-14
    )


def test_the_slope_of_a_mean_length_by_finite_differences():
    problem = open_length_chain(4, right=0.5, stop=0.3)
    wrong = 1 - problem.outcome
    direction = study.ascent(problem, "seq_mean_token_mean")
    step, means = 1e-5, []
    for sign in (1, -1):
        moved = problem.logits + sign * step * direction / direction.norm()
        mass = sequence_probability(moved, problem.sequences) * wrong
        means.append((mass @ problem.sequences.mask.sum(-1).double() / mass.sum()).item())
    slope = study.mean_length_slope(problem, wrong, direction)
    assert slope == pytest.approx((means[0] - means[1]) / (2 * step), abs=1e-8)
    assert study.mean_length_slope(problem, wrong, -direction) == pytest.approx(-slope)


def test_one_over_length_lengthens_wrong_answers_and_does_so_most_where_they_are_many():
    table = study.drift_table((0.2, 0.5)).set_index(["weight", "success"])["wrong"].unstack(0)
    hard, even = sorted(table.index)
    gap = table["mean, 1/|o|"] - table["sum"]
    assert (gap > 0).all()
    assert table.loc[hard, "sum"] < 0.1 * table.loc[hard, "mean, 1/|o|"]
    assert table.loc[even, "sum"] > 0.1 * table.loc[even, "mean, 1/|o|"]


@pytest.mark.parametrize("mode", study.MODES)
def test_along_the_natural_gradient_a_class_moves_by_a_covariance(mode):
    """Exactly nothing under the sum; under 1/|o| right answers get shorter, wrong ones longer."""
    problem = open_length_chain(5, right=0.4, stop=0.2)
    weights, lengths = study.row_weights(problem, mode), problem.sequences.mask.sum(-1).double()
    mass = sequence_probability(problem.logits, problem.sequences)
    advantage = problem.outcome - mass @ problem.outcome
    credit = (weights * advantage)[:, None].expand(problem.sequences.mask.shape)
    natural = state_average(credit, problem.logits, problem.sequences, by_action=True)
    for chosen, sign in ((problem.outcome, -1), (1 - problem.outcome, 1)):
        inside = mass * chosen / (mass @ chosen)
        spread = inside @ (lengths * weights) - (inside @ lengths) * (inside @ weights)
        expected = (inside @ advantage) * spread
        slope = study.mean_length_slope(problem, chosen, natural) * natural.norm()
        assert slope.item() == pytest.approx(expected.item(), abs=1e-14)
        assert abs(slope) < 1e-14 if mode == "seq_mean_token_sum" else sign * slope > 1e-3


def test_raising_the_mean_of_one_over_length_need_not_shorten():
    """Old statement: raising E[1/|o|] makes answers shorter. 50 tokens, or a lottery: 2 or 100."""
    logits = torch.tensor([0.1, 0.05], dtype=torch.float64).logit().requires_grad_()
    lottery, short = logits.sigmoid()

    def mean(medium, least, most):
        return (1 - lottery) * medium + lottery * (short * least + (1 - short) * most)

    (inverse,) = torch.autograd.grad(mean(1 / 50, 1 / 2, 1 / 100), logits, retain_graph=True)
    (length,) = torch.autograd.grad(mean(50, 2, 100), logits)
    assert (inverse * length).sum() > 1e-3  # the step that raises E[1/|o|] lengthens
    fisher = torch.stack([lottery * (1 - lottery), lottery * short * (1 - short)]).detach()
    assert (inverse * length / fisher).sum() < -0.1  # the natural one shortens


@pytest.mark.parametrize(
    ("chances", "parts"), [((0.7, 0.7, 0.1), ["second"]), ((0.4, 0.2, 0.99), ["first", "second"])]
)
def test_classes_that_share_logits_can_lengthen_right_answers(chances, parts):
    """Old statement: 1/|o| raises E[1/|o|] among right answers and lowers it among wrong ones.

    Short (two tokens) or long (eight), then right or wrong: three logits.
    """
    logits = torch.tensor(chances, dtype=torch.float64).logit().requires_grad_()
    short, *correct = logits.sigmoid()
    length, correct = torch.stack([short, 1 - short]), torch.stack(correct)
    inverse = torch.tensor([1 / 2, 1 / 8], dtype=torch.float64)
    terms, rates = {"first": 0.0, "second": 0.0}, []
    success = (length @ correct).item()
    for chance, advantage in ((correct, 1 - success), (1 - correct, -success)):
        share = length @ chance
        mean = (length * chance) @ inverse / share
        variance = (length * chance) @ inverse.square() / share - mean.square()
        of_share, of_mean = (
            torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (share, mean)
        )
        terms["first"] = terms["first"] + advantage * (mean * of_share).detach()
        terms["second"] = terms["second"] + advantage * (share * of_mean).detach()
        rates.append((of_mean, advantage * variance.item()))
    raising_right = rates[0][0]
    assert sum(terms[part] for part in parts) @ raising_right < -1e-4  # by plain logits it falls
    visits = torch.cat([torch.ones(1).double(), length.detach()])
    chance = logits.detach().sigmoid()
    natural = (terms["first"] + terms["second"]) / (visits * chance * (1 - chance))
    for of_mean, rate in rates:  # along the natural gradient each class by its own variance
        assert (natural @ of_mean).item() == pytest.approx(rate, abs=1e-14)
    assert rates[0][1] > 1e-3 > -1e-3 > rates[1][1]


def test_troubles_are_judged_by_the_recordings_and_would_be_otherwise(monkeypatch):
    """As recorded they hold on a condition; steady runs say fails, falling ones holds."""
    assert study.instabilities().verdict == "holds if"

    def altered(preset: str, sign: int) -> recording.Recording:
        real = recorded(preset)
        values = 1.0 + sign * real.curves["update"] / 1000 * 5
        curves = real.curves.assign(accuracy=values, entropy=1.0 if sign > 0 else values)
        level = 0.5 + real.finals["seed"] / 1e4
        finals = real.finals if sign < 0 else real.finals.assign(accuracy=level)
        return real._replace(curves=curves, finals=finals)

    for sign, verdict in ((1, "fails"), (-1, "holds")):
        monkeypatch.setattr(study, "recorded", lambda preset, sign=sign: altered(preset, sign))
        assert study.instabilities().verdict == verdict


def test_the_change_over_training_by_hand():
    curves = recorded("near_ties").curves
    one = curves[curves["variant"] == "group_std_noisy"]
    ends = {one["update"].min(): "first", one["update"].max(): "last"}
    wide = one[one["update"].isin(ends)].replace({"update": ends})
    wide = wide.pivot(index="seed", columns="update", values="accuracy")
    band = study.over_training(curves, "group_std_noisy", "accuracy")
    assert band.mean == pytest.approx(np.mean(wide["last"] - wide["first"]))
    assert band.low < band.mean < band.high < 0


def test_every_variant_of_the_rows_of_dapo_has_a_name():
    assert {variant.name for variant in make_preset("dapo", {}).variants} == set(DAPO)


LENGTHS = np.array([2.0, 5.0, 9.0, 10.0, 11.0, 15.0])
MASS = np.array([0.05, 0.05, 0.3, 0.3, 0.25, 0.05])


def test_the_tilt_is_where_the_natural_flow_of_the_loss_leads() -> None:
    """Integrated: probabilities move by minus their own 1/|o| above its mean."""
    tau, kl = study.tilted(LENGTHS, MASS, 11.5)

    def flow(_: float, share: np.ndarray) -> np.ndarray:
        weight = 1 / LENGTHS
        return -share * (weight - share @ weight)

    end = solve_ivp(flow, (0.0, tau), MASS, rtol=1e-10, atol=1e-14).y[:, -1]
    assert end @ LENGTHS == pytest.approx(11.5, abs=1e-6)
    assert end @ np.log(end / MASS) == pytest.approx(kl, abs=1e-7)
    other_way = solve_ivp(lambda t, s: -flow(t, s), (0.0, tau), MASS, rtol=1e-10, atol=1e-14)
    assert other_way.y[:, -1] @ LENGTHS < MASS @ LENGTHS, "the flipped sign shortens"


def test_a_tilt_at_the_start_costs_nothing_and_a_length_out_of_reach_is_refused() -> None:
    assert study.tilted(LENGTHS, MASS, MASS @ LENGTHS) == (0.0, pytest.approx(0.0))
    for mean in (9.0, 15.0):
        with pytest.raises(ValueError, match="mean must be"):
            study.tilted(LENGTHS, MASS, mean)


def test_the_recorded_starts_are_all_there() -> None:
    table = recorded_lengths()
    preset = aggregation_length()
    counted = table.groupby("start")["completions"].sum()
    assert list(counted.index) == list(range(preset.config.start.count))
    assert set(counted) == {initial_policy.NUM_PROMPTS * preset.config.group_size}
    assert table["length"].max() <= preset.config.task.completion_length


def test_sampling_a_start_counts_its_answers() -> None:
    preset = aggregation_length()
    start = preset.config.start.model_copy(update={"updates": 1, "count": 2})
    short = preset.model_copy(update={"config": preset.config.model_copy(update={"start": start})})
    table = initial_policy.lengths(short, num_prompts=3)
    assert set(table.groupby("start")["completions"].sum()) == {3 * preset.config.group_size}


def test_what_was_walked_is_read_from_the_stored_curves() -> None:
    with (recording.RESULTS / "aggregation_length_cpu" / "curves.csv").open(newline="") as lines:
        rows = [r for r in csv.DictReader(lines) if r["variant"] == "only_k1_mean"]

    def mean(metric: str, update: int) -> float:
        return np.mean([float(r[metric]) for r in rows if int(r["update"]) == update])

    along = study.walked()
    (found,) = along[(along["average"] == "mean") & (along["update"] == 20)].to_dict("records")
    assert found["length"] == pytest.approx(mean("length", 20))
    kl = (mean("reverse_kl", 20) + mean("reverse_kl", 30)) / 2 * mean("length", 20)
    assert found["kl"] == pytest.approx(kl)
