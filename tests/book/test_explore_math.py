"""The explorers' mathematics, run by node, against the Python functions it mirrors."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from analysis.chapters.ch03_counterexample.ratio_tail import (
    ratio_tail_index,
    tail_mass,
    unseen_mass,
)
from analysis.chapters.ch10_dpo import projections
from analysis.chapters.ch22_proxy import worlds
from analysis.evidence.gaussian_pairs import GaussianPair
from analysis.records import statistics
from analysis.report.run_data import FIRST, index, run_data
from kl_term.kl import enumeration, sequences
from kl_term.kl.ascent import expected_ascent
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.gaussians import gaussian_chi_square, gaussian_kl, moments

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "book/_static/explore"
TOLERANCE = 1e-9
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="no node on this machine")

#: What the scripts ask of the page that loads them.
NO_PAGE = """
globalThis.document = {
  currentScript: {src: "file:///runs.js"}, documentElement: {lang: "en"},
  querySelectorAll: () => [], addEventListener: () => {},
};
"""
#: Reads one line a call, ``[function, argument]`` as JavaScript; answers with one, as JSON in which
#: a number that JSON does not know is ``{"number": its name}``.
SERVER = """
require("readline").createInterface({input: process.stdin}).on("line", (line) => {
  const [code, argument] = (0, eval)(line);
  const found = (0, eval)("(" + code + ")")(argument);
  console.log(JSON.stringify(found === undefined ? null : found, (_, v) =>
    typeof v === "number" && !Number.isFinite(v) ? {number: String(v)} : v));
});
"""


class Page:
    """The scripts of the explorers in a process of node, as in a page that shows nothing."""

    def __init__(self, scripts: list[str]) -> None:
        program = "\n".join([*scripts, SERVER])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([str(NODE), "-e", program], **pipes)

    def evaluate(self, function: str, argument: Any = None) -> Any:
        """The result of a JavaScript function of one argument."""
        self.process.stdin.write(json.dumps([function, argument]) + "\n")
        self.process.stdin.flush()
        return json.loads(
            self.process.stdout.readline(),
            object_hook=lambda found: float(found["number"]) if "number" in found else found,
        )

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    scripts = [(FOLDER / f"{name}.js").read_text() for name in ("math", "draw", "runs")]
    page = Page([NO_PAGE, *scripts])
    yield page
    page.close()


def compute(page: Page, calls: list[list[Any]]) -> list[Any]:
    """The results of calls ``[function, argument, ...]`` of klMath."""
    return page.evaluate("calls => calls.map(([name, ...of]) => klMath[name](...of))", calls)


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


def test_values_are_the_closed_forms_of_python(page: Page) -> None:
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


def test_the_tail_of_the_ratio_is_that_of_chapter_3(page: Page) -> None:
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
def test_gradients_at_one_state_are_those_of_the_enumeration(page: Page, vocab: int) -> None:
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
def test_a_run_ends_where_the_ascent_of_python_ends(page: Page, geometry: str) -> None:
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
    page: Page, vocab: int, length: int
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


@pytest.mark.parametrize("divergence", worlds.OPTIMA)
def test_optima_of_a_proxy_are_those_of_python(page: Page, divergence: str) -> None:
    name = {"reverse": "reverseKl", "forward": "forwardKl", "chi_square": "chiSquare"}[divergence]
    generator = torch.Generator().manual_seed(22)
    for beta in (0.01, 0.1, 0.5, 2.0, 30.0):
        rewards, logits = 2 * torch.randn(2, 9, generator=generator, dtype=torch.float64)
        logits[0] -= 40.0  # a rare answer, far from the others
        reference = logits.softmax(-1)
        expected = worlds.OPTIMA[divergence](rewards, logits, beta=beta).exp()
        call = [f"{name}Optimum", rewards.tolist(), reference.tolist(), beta]
        assert_equal(compute(page, [call])[0], expected, (divergence, beta))


@pytest.mark.parametrize("tail", [0.0, 0.05, 0.2, 0.5])
def test_the_curves_of_a_proxy_are_those_of_chapter_22(page: Page, tail: float) -> None:
    for harm in (0.0, 0.4):
        world = worlds.tail_world(tail, harm)
        found = page.evaluate("([tail, harm]) => klMath.tailWorld(tail, harm)", [tail, harm])
        for part in ("reference", "truth", "proxy"):
            assert_equal(found[part], getattr(world, part), (tail, harm, part))
        betas = [0.05, 0.3, 1.0, 3.0, 20.0]
        for divergence in worlds.OPTIMA:
            rows = page.evaluate(
                "([tail, harm, name, betas]) => { const w = klMath.tailWorld(tail, harm);"
                " return betas.map(b => { const p = klMath.proxyPoint(w, name, b);"
                " return [p.kl, p.truth, p.proxy]; }); }",
                [tail, harm, divergence, betas],
            )
            table = worlds.truth_curve(world, divergence, betas)
            assert_equal(rows, table[["kl", "truth", "proxy"]].to_numpy(), (tail, harm, divergence))


def peaks(weight: float, distance: float) -> tuple[dict[str, float], MixtureSameFamily]:
    """A mixture as the explorer and as chapter 10 has it."""
    of = {"weight": weight, "left": -distance / 2, "right": distance / 2, "std": 0.5}
    weights, means, stds = torch.tensor(
        [[weight, 1 - weight], [of["left"], of["right"]], [0.5, 0.5]], dtype=torch.float64
    )
    return of, MixtureSameFamily(Categorical(weights), Normal(means, stds))


@pytest.mark.parametrize("weight", [0.07, 0.42, 0.7])
@pytest.mark.parametrize("distance", [0.0, 0.6, 1.7, 2.6, 5.5])
def test_the_nearest_gaussians_are_those_of_chapter_10(
    page: Page, weight: float, distance: float
) -> None:
    """The same KL as the best of its starts, and there no slope: a flipped KL has one."""
    of, target = peaks(weight, distance)
    found = compute(page, [["gaussianFits", of]])[0]
    tried = projections.fits(target, (of["left"], of["right"]))
    on_grid = tried[tried["std"] > 0.1]  # where a start ends between two points of its grid
    best = on_grid.groupby("direction").kl.min()
    for direction, fit in found.items():
        at = torch.tensor([fit["mean"], math.log(fit["std"])], dtype=torch.float64)
        at.requires_grad_(True)
        kl = projections.gaussian_kl(target, at[0], at[1].exp(), direction)
        assert_equal(kl.detach(), best[direction], (weight, distance, direction))
        assert_equal(torch.autograd.grad(kl, at)[0], [0.0, 0.0], (weight, distance, direction))
        if direction == "reverse":
            assert_equal(fit["kl"], kl.detach(), (weight, distance))
        (share,) = compute(page, [["above", 0.3, fit]])
        above = 0.5 * math.erfc((0.3 - fit["mean"]) / fit["std"] / math.sqrt(2))
        assert_equal(share, above, (weight, distance))
    xs = torch.linspace(-6, 6, 25, dtype=torch.float64)
    densities = compute(page, [["mixtureLogDensity", of, x] for x in xs.tolist()])
    assert_equal([at["value"] for at in densities], target.log_prob(xs), (weight, distance))


def test_bands_of_runs_are_the_intervals_of_python(page: Page) -> None:
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


def test_too_few_runs_have_no_interval(page: Page) -> None:
    found = page.evaluate(
        "() => { const b = klRuns.summary([[1, 2], [3, 5]], new Set([0, 1]), 'interval', {});"
        " return [b[1].mean, Number.isNaN(b[1].low)]; }"
    )
    assert found == [3.5, True]
