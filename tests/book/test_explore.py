"""The explorers on their page, in a browser: what they show and how they are used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.report.run_data import FIRST, run_data
from kl_term.kl import enumeration
from kl_term.kl.gaussians import moments
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
