"""The explorers' mathematics, run in a browser, against the Python functions it mirrors."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis.chapters.ch03_counterexample import ratio_tail_index, tail_mass, unseen_mass
from analysis.evidence.gaussian_pairs import GaussianPair
from analysis.records import statistics
from analysis.report.run_data import FIRST, index, run_data
from kl_term.kl import enumeration, sequences
from kl_term.kl.ascent import expected_ascent
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.gaussians import gaussian_chi_square, gaussian_kl, moments
from tests.book.test_browser import (
    CHROMIUM,
    browser,  # noqa: F401, a fixture
    playwright,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "book/_static/explore"
TOLERANCE = 1e-9

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]


@pytest.fixture(scope="module")
def page(browser: playwright.Browser) -> Iterator[playwright.Page]:  # noqa: F811
    page = browser.new_page()
    page.set_content("<!doctype html><title>mathematics</title>")
    for name in ("math", "draw", "runs"):
        page.evaluate(_of_a_page((FOLDER / f"{name}.js").read_text()))
    yield page
    page.close()


def _of_a_page(script: str) -> str:
    """The script as an expression: outside a page nothing names its address."""
    script = script.replace("document.currentScript.src", '"runs.js"')
    return f"() => {{ {script} }}"


def compute(page: playwright.Page, calls: list[list[Any]]) -> list[Any]:
    """The results of calls ``[function, argument, ...]`` of klMath, infinities and NaN kept."""
    found = page.evaluate(
        """text => JSON.stringify(
          JSON.parse(text).map(([name, ...of]) => klMath[name](...of)),
          (_, v) => typeof v === "number" && !Number.isFinite(v) ? String(v) : v)""",
        json.dumps(calls),
    )
    return json.loads(found)


def assert_equal(found: Any, expected: Any, label: object) -> None:
    def numbers(value: Any) -> np.ndarray:
        if isinstance(value, torch.Tensor):
            return value.numpy()
        return np.array(value, dtype=float)

    left, right = numbers(found), numbers(expected)
    assert left.shape == right.shape, label
    scale = np.maximum(1.0, np.abs(np.where(np.isfinite(right), right, 1.0)))
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        assert (same | (np.abs(left - right) <= TOLERANCE * scale)).all(), (label, left, right)


def gaussians(count: int, seed: int) -> list[tuple[float, float, float, float]]:
    draw = random.Random(seed)
    return [
        (draw.uniform(-2, 2), draw.uniform(0.4, 2), draw.uniform(-2, 2), draw.uniform(0.4, 2))
        for _ in range(count)
    ]


def test_values_are_the_closed_forms_of_python(page: playwright.Page) -> None:
    pairs = [*gaussians(60, 1), (0.0, 1.0, 0.0, 1.0), (0.1, 0.2, 0.0, 1.0), (0.0, 0.7, 1.0, 1.0)]
    for name, function in (("gaussianKl", gaussian_kl), ("gaussianChiSquare", gaussian_chi_square)):
        found = compute(page, [[name, *pair] for pair in pairs])
        expected = [function(*(torch.tensor(x, dtype=torch.float64) for x in p)) for p in pairs]
        for pair, one, other in zip(pairs, found, expected, strict=True):
            assert_equal(one, other, (name, pair))
    infinite = 0
    for pair, found in zip(pairs, compute(page, [["moments", *p] for p in pairs]), strict=True):
        expected = moments(*pair)
        assert set(found) == {"k1", "k2", "k3"}
        for name, values in found.items():
            assert_equal([values["mean"], values["var"]], list(expected[name]), (name, pair))
        infinite += math.isinf(expected["k3"].var)
        error = compute(page, [["meanError", found["k2"], expected["k1"].mean, 100]])[0]
        bias = expected["k2"].mean - expected["k1"].mean
        assert_equal(error, math.sqrt(bias**2 + expected["k2"].var / 100), pair)
    assert 5 < infinite < len(pairs) - 5


def test_the_tail_of_the_ratio_is_that_of_chapter_3(page: playwright.Page) -> None:
    narrow = [p for p in gaussians(80, 2) if p[1] < 0.95 * p[3]]
    assert len(narrow) > 20
    for of in narrow:
        pair, log_t = GaussianPair(*of), random.Random(str(of)).uniform(-1, 8)
        index_found, mass, unseen = compute(
            page,
            [
                ["ratioTailIndex", of[1], of[3]],
                ["tailMass", *of, log_t],
                ["unseenMass", *of, 1000],
            ],
        )
        assert_equal(index_found, ratio_tail_index(pair), of)
        assert_equal([mass["underQ"], mass["underP"]], list(tail_mass(pair, log_t)), of)
        assert_equal(unseen, unseen_mass(pair, 1000), of)
    erfc = [x / 7 for x in range(-30, 40)]
    assert_equal(compute(page, [["erfc", x] for x in erfc]), [math.erfc(x) for x in erfc], "erfc")


TERMS = [
    {"estimator": estimator, "placement": placement, "weighting": weighting}
    for estimator in ("k1", "k2", "k3", "k3_clip", "k4", "minimax01")
    for placement in ("loss", "reward")
    for weighting in ("none", "attached", "detached")
    if estimator != "minimax01" or (placement == "loss" and weighting != "attached")
]


@pytest.mark.parametrize("vocab", [3, 4, 5])
def test_gradients_at_one_state_are_those_of_the_enumeration(
    page: playwright.Page, vocab: int
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for term in TERMS:
        tables = 1.8 * torch.randn(6, 3, vocab, generator=generator, dtype=torch.float64)
        for logits, ref, old in tables:
            of = [x.tolist() for x in (logits, ref, old)]
            expected = enumeration.gradient_moments(logits, ref, old, **term)
            found = compute(page, [["gradientMoments", *of, term]])[0]
            assert_equal(found["mean"], expected.mean, term)
            assert_equal(found["traceVar"], expected.trace_var, term)
            exact = enumeration.reverse_kl_gradient(logits, ref)
            checks = {
                "reverseKlGradient": exact,
                "forwardKlGradient": enumeration.forward_kl_gradient(logits, ref),
                "reverseKl": reverse_kl(logits, ref),
                "forwardKl": forward_kl(logits, ref),
            }
            for name, other in checks.items():
                assert_equal(compute(page, [[name, *of[:2]]])[0], other, name)
            pair = [expected.mean.tolist(), exact.tolist()]
            angle, error = compute(page, [["cosine", *pair], ["relativeError", *pair]])
            assert_equal(angle, enumeration.cosine(expected.mean, exact), term)
            assert_equal(error, enumeration.relative_error(expected.mean, exact), term)


@pytest.mark.parametrize("geometry", ["natural", "plain"])
def test_a_run_ends_where_the_ascent_of_python_ends(page: playwright.Page, geometry: str) -> None:
    generator = torch.Generator().manual_seed(11)
    for term in TERMS:
        start, rewards, ref = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        rewards = 0.3 * rewards
        how = {"beta": 1.0, "geometry": geometry, **term}
        expected = expected_ascent(start, rewards, ref, steps=60, step_size=0.1, **how)
        of = [x.tolist() for x in (start, rewards, ref)]
        found = compute(page, [["expectedAscent", *of, {"steps": 60, "stepSize": 0.1, **how}]])[0]
        assert_equal(np.exp(found), expected.exp(), term)


@pytest.mark.parametrize(("vocab", "length"), [(2, 2), (2, 3), (3, 2)])
def test_gradients_over_sequences_are_those_of_the_enumeration(
    page: playwright.Page, vocab: int, length: int
) -> None:
    rows = sequences.enumerate_sequences(vocab, length)
    page.evaluate(f"() => {{ globalThis.rows = klMath.enumerateSequences({vocab}, {length}) }}")
    found = page.evaluate("() => rows.rows.map(row => [row.tokens, row.states])")
    assert found == [
        list(pair) for pair in zip(rows.tokens.tolist(), rows.states.tolist(), strict=True)
    ]
    generator = torch.Generator().manual_seed(10 * vocab + length)
    tables = torch.randn(3, rows.num_states, vocab, generator=generator, dtype=torch.float64)
    policy, ref, old = tables
    of = dict(zip(("policy", "ref", "old"), (x.tolist() for x in tables), strict=True))
    call = lambda expression, term=None: page.evaluate(
        f"([policy, ref, old, term]) => klMath.{expression}", [*of.values(), term]
    )
    assert_equal(call("stateVisits(old, rows)"), sequences.state_visits(old, rows), "visits")
    assert_equal(call("sequenceKl(policy, ref, rows)"), sequences.sequence_kl(policy, ref, rows), 0)
    whole = sequences.sequence_kl_gradient(policy, ref, rows)
    assert_equal(call("sequenceKlGradient(policy, ref, rows)"), whole, "whole")
    visited = sequences.visited_kl_gradient(policy, ref, rows, old)
    assert_equal(call("visitedKlGradient(policy, ref, rows, old)"), visited, "visited")
    for estimator in ("k1", "k2", "k3", "k3_clip", "k4"):
        terms = [{"weighting": "none"}]
        terms += [
            {"weighting": w, "ratio": r}
            for w in ("attached", "detached")
            for r in ("token", "prefix")
        ]
        terms += [
            {"placement": "reward", "credit": credit, "weighting": w, "ratio": r}
            for credit in ("to_go", "immediate")
            for w, r in (("none", "token"), ("attached", "token"), ("attached", "prefix"))
        ]
        for term in terms:
            chosen = {"estimator": estimator, **term}
            expected = sequences.expected_sequence_gradient(policy, ref, rows, old, **chosen)
            found = call("expectedSequenceGradient(policy, ref, rows, old, term)", chosen)
            assert_equal(found, expected, chosen)
    attached = {"estimator": "k3", "weighting": "attached", "ratio": "prefix"}
    assert_equal(call("expectedSequenceGradient(policy, ref, rows, old, term)", attached), whole, 0)


def test_bands_of_runs_are_the_intervals_of_python(page: playwright.Page) -> None:
    about = index(ROOT / "results", {})
    assert about["recordings"][0]["name"] == FIRST
    data = run_data(ROOT / "results" / FIRST)
    chosen = [0, 2, 3, 6, 9]
    for metric in ("reverse_kl", "accuracy"):
        for rows in data["values"][metric][:4]:
            values = np.array(rows, float)[chosen].T
            for band in ("interval", "range"):
                found = page.evaluate(
                    """([rows, chosen, band, quantiles]) =>
                      klRuns.summary(rows, new Set(chosen), band, quantiles)
                        .map(({mean, low, high}) => [mean, low, high])""",
                    [rows, chosen, band, about["quantiles"]],
                )
                mean, low, high = statistics.interval(values)
                if band == "range":
                    low, high = values.min(-1), values.max(-1)
                assert_equal(found, np.stack([mean, low, high], -1), (metric, band))


def test_too_few_runs_have_no_interval(page: playwright.Page) -> None:
    found = page.evaluate(
        "() => { const b = klRuns.summary([[1, 2], [3, 5]], new Set([0, 1]), 'interval', {});"
        " return [b[1].mean, Number.isNaN(b[1].low)]; }"
    )
    assert found == [3.5, True]


@pytest.fixture
def explorers(html: Path, browser: playwright.Browser) -> Iterator[playwright.Page]:  # noqa: F811
    """The page as it opens from a disk, on a phone."""
    page = browser.new_page(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    page.goto(f"{html.as_uri()}/book/explore.html")
    page.wait_for_selector("[data-explore=runs] table")
    yield page
    page.close()


def numbers_of(page: playwright.Page, explorer: str) -> list[list[str]]:
    return page.locator(f"[data-explore={explorer}] table").evaluate(
        "t => [...t.tBodies[0].rows].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )


def test_the_keyboard_moves_the_distributions(explorers: playwright.Page) -> None:
    before = numbers_of(explorers, "values")
    slider = explorers.get_by_role("group", name="Reference").first.get_by_label("width")
    for _ in range(12):
        slider.press("ArrowRight")  # a wider reference: sigma_p = 1.6
    after = numbers_of(explorers, "values")
    expected = moments(0.0, 1.0, 1.0, 1.6)
    assert after != before
    assert math.isinf(expected["k3"].var) and after[2][3] == "infinite"
    assert float(after[0][1]) == float(f"{expected['k1'].mean:.3g}")
    assert float(after[1][3]) == float(f"{expected['k2'].var:.3g}")


def test_runs_lead_where_the_theory_says(explorers: playwright.Page) -> None:
    place = explorers.locator("[data-explore=gradients]")
    run = place.get_by_role("button", name="Run to where it ends")
    shown = lambda: [
        float(place.get_by_role("group", name="Policy").get_by_label(t).input_value())
        for t in "abc"
    ]
    run.click()
    assert shown() == pytest.approx([0.2, 0.3, 0.5], abs=0.02)  # k3 as a loss: the reference
    place.get_by_role("button", name="Back to the start").click()
    place.get_by_label("Placement").select_option("reward")
    run.click()
    assert min(shown()) <= 0.01  # k3 in the reward: a token is lost
    place.get_by_role("button", name="Back to the start").click()
    place.get_by_label("Placement").select_option("loss")
    place.get_by_label("Estimator").select_option("k1")
    run.click()
    assert shown() == pytest.approx([0.6, 0.3, 0.1], abs=0.006)  # k1 as a loss: nowhere


def test_the_shown_gradient_is_that_of_the_shown_probabilities(explorers: playwright.Page) -> None:
    place = explorers.locator("[data-explore=gradients]")
    place.get_by_label("Tokens").select_option("5")
    place.get_by_label("fresh samples").press("Space")
    for name, token in (("Policy", "b"), ("Sampler", "c")):
        slider = place.get_by_role("group", name=name).get_by_label(token, exact=True)
        for _ in range(7):
            slider.press("ArrowRight")
    policy, ref, old = (
        torch.tensor([float(x) for x in group.locator("output").all_inner_texts()]).log().double()
        for group in (
            place.get_by_role("group", name=n) for n in ("Policy", "Reference", "Sampler")
        )
    )
    expected = enumeration.gradient_moments(policy, ref, old, estimator="k3").mean.tolist()
    found = [float(x.replace("−", "-")) for x in numbers_of(explorers, "gradients")[0][1:]]
    assert found == pytest.approx(expected, rel=0.01, abs=0.003)


def test_the_prefix_ratio_misses_nothing(explorers: playwright.Page) -> None:
    whole, token, prefix = numbers_of(explorers, "sequences")
    assert prefix[1:-1] == whole[1:-1] and prefix[-1] == "0"
    assert token[1:-1] != whole[1:-1]


def test_shown_runs_are_the_recorded_ones(explorers: playwright.Page) -> None:
    rows = numbers_of(explorers, "runs")
    data = run_data(ROOT / "results" / FIRST)
    assert len(rows) == 6
    for row, table in zip(rows, data["values"]["reverse_kl"], strict=False):
        mean = np.mean([run[-1] for run in table])
        assert float(row[1]) == float(f"{mean:.3g}")
    others = explorers.locator("[data-explore=runs] select").first
    others.select_option("kl_axes_cpu")
    named = explorers.locator("[data-explore=runs] fieldset").first
    playwright.expect(named.locator("label")).not_to_have_count(len(data["variants"]))
    assert numbers_of(explorers, "runs") != rows


def test_editions_share_the_recorded_runs(html: Path, explorers: playwright.Page) -> None:
    rows = numbers_of(explorers, "runs")
    explorers.goto(f"{html.as_uri()}/zh/book/explore.html")
    explorers.wait_for_selector("[data-explore=runs] table")
    assert numbers_of(explorers, "runs") == rows
    assert not (html / "zh/_static/explore/runs").exists()


def test_no_explorer_is_wider_than_a_phone(explorers: playwright.Page) -> None:
    root = "document.documentElement"
    assert explorers.evaluate(f"{root}.scrollWidth - {root}.clientWidth") == 0
    for handle in explorers.locator(".kl-explore svg[role=img]").all():
        assert len(handle.get_attribute("aria-label")) > 20
