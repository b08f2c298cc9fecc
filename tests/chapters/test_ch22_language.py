"""What is said of a language model on a learned reward, on made runs of known truth."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from analysis.chapters.ch22_proxy import language, runs
from analysis.records.proxy_answers import REFERENCE

TERMS = ("exact_loss", "k2_loss", "k3_loss", "k1_reward")
QUESTIONS = ("1 + 1 =", "2 + 2 =", "3 + 3 =")


def made() -> SimpleNamespace:
    """Two seeds: without a term the truth ends at 0.1, with one at 0.5 and its coefficient."""
    own = [("none", 0.0), *((name, beta) for name in TERMS for beta in (0.1, 0.4))]
    rows = [
        {
            "variant": name,
            "beta": beta,
            "seed": seed,
            "final_gold": (0.5 + beta if beta else 0.1) + 0.02 * seed,
            "final_proxy": 0.8,
            "final_reverse_kl": 0.1 / (beta or 0.02),
        }
        for name, beta in own
        for seed in (0, 1)
    ]
    finals = pd.DataFrame(rows)
    curves = pd.concat(
        finals.assign(update=update, gold=finals["final_gold"] + 0.04 * (4 - update), proxy=0.5)
        for update in (0, 4)
    )
    variants = [SimpleNamespace(name=name, beta=beta) for name, beta in own]
    return SimpleNamespace(finals=finals, curves=curves, preset=SimpleNamespace(variants=variants))


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    for module in (language, runs):
        monkeypatch.setattr(module, "recorded", lambda preset: made())


def test_numbers_are_means_over_seeds_at_the_larger_coefficient():
    found = language.numbers()
    assert found["none_gold"] == pytest.approx(0.11) and found["none_kl"] == pytest.approx(5)
    assert found["first_gold"] == pytest.approx(0.27)
    assert found["weak_low"] == found["weak_high"] == pytest.approx(0.61)
    assert found["strong_high"] == pytest.approx(0.91) and found["weak_kl"] == pytest.approx(1.0)
    for name in TERMS:
        assert found[f"{name}_gold"] == pytest.approx(0.91)
        assert found[f"{name}_kl"] == pytest.approx(0.25)


def test_each_run_is_a_point_and_each_term_at_the_larger_coefficient_a_line():
    left, right = language.draw().axes
    *lines, start = left.lines
    assert len(lines) == 1 + len(TERMS) and start.get_ydata()[0] == pytest.approx(0.27)
    assert [len(line.get_xdata()) for line in right.lines[:-1]] == [2, *[4] * len(TERMS)]
    last = {line.get_label(): line.get_ydata()[-1] for line in lines}
    assert last["no KL term"] == pytest.approx(0.11) and last["exact KL"] == pytest.approx(0.91)


def answers() -> pd.DataFrame:
    """The start is right of the second and third, the run without a term of the third."""
    right = {
        (REFERENCE, 0.0): (0, 1, 1),
        ("none", 0.0): (0, 0, 1),
        ("exact_loss", 0.1): (0, 0, 0),
        ("exact_loss", 0.4): (0, 1, 1),
        ("k3_loss", 0.4): (1, 0, 0),
    }
    return pd.DataFrame(
        {
            "variant": name,
            "beta": beta,
            "seed": 1,
            "question": question,
            "answer": f" {name}\n",
            "gold": float(gold),
            "proxy": 0.25,
        }
        for (name, beta), golds in right.items()
        for question, gold in zip(QUESTIONS, golds, strict=True)
    )


def test_answers_are_shown_where_the_start_was_right_and_no_term_lost_it():
    table = language.said(answers(), questions=2)
    assert set(table["question"]) == {"2 + 2 ="}
    assert list(table["gold"]) == [1, 1, 0, 0, 0]
    of_terms = ["exact KL, β = 0.4", "k₃ as a loss, β = 0.4", "exact KL, β = 0.1"]
    assert list(table["called"]) == ["the start", *of_terms, "no KL term"]
    lines = language.as_lines(table).split("\n")
    assert lines[0] == "| policy | nats | 2 + 2 = |"
    assert lines[2] == "| the start | 0.0 | ␣reference⏎ ✓ 0.25 |"
    assert lines[6] == "| no KL term | 5.0 | ␣none⏎ ✗ 0.25 |"
