"""The check that is copied from the answer page says what the package says."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.diagnosis.chains import Population, sample
from kl_term.diagnosis import check_run as module
from kl_term.diagnosis.check_run import check_run
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.generate import EXAMPLES, example
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.schema import Settings


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_equals_the_package_on_every_example(name):
    frame = example(name).drop(columns="sampler_logp", errors="ignore")
    measured = measure(assemble(frame, name), Settings(resamples=100))
    found = check_run(*(frame[column] for column in ("logp", "old_logp", "ref_logp", "mask")))
    for estimator in ("k1", "k2", "k3"):
        assert found[estimator] == pytest.approx(measured.estimate(estimator).value, rel=1e-9)
    assert found["staleness"] == pytest.approx(measured.numbers["staleness_kl"], rel=1e-9)
    ratio = np.exp(measured.rollouts.ref_logp - measured.rollouts.logp)
    assert found["k1 - k3"] == pytest.approx(1 - ratio.mean(), abs=1e-9)


def test_two_tokens_by_hand_in_any_shape_beside_padding():
    logp = [[math.log(0.5), math.log(0.2)], [-math.inf, math.nan]]
    old_logp = [[math.log(0.25), math.log(0.2)], [0.0, -math.inf]]
    ref_logp = [[math.log(0.25), math.log(0.4)], [math.nan, 0.0]]
    found = check_run(logp, old_logp, ref_logp, [[1, 1], [0, 0]])
    log2 = math.log(2)
    assert found["k1"] == pytest.approx(0.0, abs=1e-12)
    assert found["k2"] == pytest.approx(log2**2 / 2)
    assert found["k3"] == pytest.approx((0.5 - 1 + log2 + 2 - 1 - log2) / 2)
    assert found["k1 - k3"] == pytest.approx(1 - (0.5 + 2) / 2)
    assert found["staleness"] == pytest.approx((1 - log2) / 2)
    assert found["largest update"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": [[1.0, 0.5]]}, "mask must hold 0 or 1"),
        ({"mask": [[1.0, math.nan]]}, "mask must hold 0 or 1"),
        ({"mask": [[0, 0]]}, "count a token"),
        ({"mask": [1, 1]}, "mask must have one shape"),
        ({"ref_logp": [[-1.0]]}, "ref_logp and mask must have one shape"),
    ],
)
def test_what_would_be_counted_wrongly_is_refused(change, message):
    columns = {name: [[-1.0, -2.0]] for name in ("logp", "old_logp", "ref_logp")}
    with pytest.raises(ValueError, match=message):
        check_run(**columns | {"mask": [[1, 1]]} | change)


def drawn(seed: int, kl: float, **changes):
    """A sound run of 128 completions, on policy: its log-probs and those of the reference."""
    made = sample(Population(kl=kl), seed, prompts=16, group=8, **changes)
    return made, *(np.where(made.mask, x, 0.0) for x in (made.logp[0], made.ref_logp))


def test_errors_are_those_of_completions():
    """Of equally long completions: the spread of their means over the root of their number."""
    generator = np.random.default_rng(0)
    ref_logp = -generator.exponential(size=(40, 6)) - generator.exponential(size=(40, 1))
    logp = -generator.exponential(size=(40, 6))
    ones = np.ones_like(logp)
    found = check_run(logp, logp, ref_logp, ones)
    l = logp - ref_logp
    for name, values in (("k1", l), ("k3", np.exp(-l) - 1 + l), ("k1 - k3", 1 - np.exp(-l))):
        expected = values.mean(1).std(ddof=1) / math.sqrt(40)
        assert found[f"{name} error"] == pytest.approx(expected, rel=1e-12)
    flat = [x.ravel() for x in (logp, logp, ref_logp, ones)]
    assert check_run(*flat, completion=np.repeat(np.arange(40), 6)) == found
    assert check_run(*flat)["k1 error"] < 0.7 * found["k1 error"]


@pytest.mark.parametrize("kl", [1e-5, 1e-2, 10.0])
@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_sound_runs_are_believed_at_every_distance(kl, top_p):
    for seed in range(12):
        made, logp, ref_logp = drawn(seed, kl, top_p=top_p)
        assert "agree" in check_run(logp, logp, ref_logp, made.mask)["verdict"], seed


def test_faults_get_their_verdict():
    made, logp, ref_logp = drawn(0, 0.1)
    exchanged = check_run(ref_logp, ref_logp, logp, made.mask)
    assert "exchanged" in exchanged["verdict"] and exchanged["k1"] < 0
    stale = check_run(logp, logp - 0.3 * (made.token % 2), ref_logp, made.mask)
    assert stale["verdict"].startswith("stale")
    few = check_run(*(x[:19] for x in (logp, logp, ref_logp, made.mask)))
    assert few["verdict"].startswith("fewer than 20")
    rare = np.where(np.arange(logp.shape[1]) % 2 == 0, 0.7, 0.9)  # of what the reference has there
    lost = check_run(logp, logp, np.where(made.mask, logp + np.log(rare), 0.0), made.mask)
    assert lost["verdict"].startswith("k3 misses") and lost["k1"] > 5 * lost["k3"]


def test_it_stands_alone():
    tree = ast.parse(Path(module.__file__).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [alias.name for node in imported for alias in node.names] == ["numpy"]
    function = tree.body[-1]
    assert function.end_lineno - function.lineno < 55, "short enough to copy"
