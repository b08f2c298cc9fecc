"""The page on KL curves: its numbers by an independent sum, its facts in installed trainers."""

from __future__ import annotations

import math

import pytest

from analysis.chapters.ch14_frameworks.logs import AVERAGES, LOGS
from analysis.report.kl_curve import halving, kl_curve_page, readings
from tests.released import source_of

#: What stands in the file near the line that takes the average.
TAKEN = {
    "TRL, GRPO": ("trl/trainer/grpo_trainer.py", "append(global_masked_mean(per_token_kl))"),
    "TRL, RLOO": ("trl/trainer/rloo_trainer.py", "(kl_stats[0] / kl_stats[1].clamp(min=1.0))"),
    "verl, KL in the reward": (
        "verl/trainer/ppo/ray_trainer.py",
        "current_kl = masked_mean(kld, mask=response_mask, axis=-1)",
    ),
    "OpenRLHF, KL in the reward": (
        "openrlhf/trainer/ppo_utils/experience_maker.py",
        "kl_mean = masked_mean(kl, samples.action_mask, dim=-1)",
    ),
}


def by_hand(end, ref_end, longest, k, *, by_completion):
    """A loop over lengths: no tensor, no tree."""
    go, stop = ((1 - end) / (1 - ref_end), end / ref_end)
    total = tokens = mean = 0.0
    for length in range(1, longest + 1):
        ended = length < longest
        chance = (1 - end) ** (length - 1) * (end if ended else 1.0)
        steps = [math.log(go)] * (length - 1)
        last = math.log(stop)
        costs = [k(x) for x in steps]
        both = (
            [(chance, k(last))]
            if ended
            else [(chance * end, k(last)), (chance * (1 - end), k(math.log(go)))]
        )
        for share, cost in both:
            paid = sum(costs) + cost
            total += share * paid
            tokens += share * length
            mean += share * paid / length
    return mean if by_completion else total / tokens


K = {"k1": lambda l: l, "k3": lambda l: math.exp(-l) - 1 + l}


def test_readings_are_those_of_a_loop():
    for reading in readings():
        case = (1 / reading.length, 1 / reading.ref_length, 600)
        for name, k in K.items():
            for shown, by_completion in ((reading.tokens, False), (reading.completions, True)):
                expected = by_hand(*case, k, by_completion=by_completion)
                assert shown[name] == pytest.approx(expected, abs=1e-12)
            assert reading.tokens[name] == pytest.approx(reading.per_token, abs=1e-12)
    longer, shorter = readings()[:2]
    assert longer.completions["k1"] < 0 < longer.per_token
    assert shorter.completions["k1"] > 10 * shorter.per_token


def test_a_controller_halves_beta_by_a_loop():
    beta, updates = 1.0, 0
    while beta > 0.5:
        error = max(-0.2, min(0.2, -0.02 / 0.004 - 1))
        beta *= 1 + error * 1024 / 10_000
        updates += 1
    assert halving(1024, 10_000) == updates


def test_every_curve_is_on_the_page():
    page = kl_curve_page()
    for log in LOGS:
        assert log.average in AVERAGES
        assert f"| {log.framework} | {log.metric} |" in page
    assert {log.average for log in LOGS if log.drives} == {"completions"}


@pytest.mark.peers
@pytest.mark.parametrize("framework", TAKEN)
def test_the_average_is_what_the_installed_trainer_takes(framework):
    path, line = TAKEN[framework]
    assert line in source_of(path.split("/")[0], path).read_text(encoding="utf-8")
    assert framework in {log.framework for log in LOGS}
