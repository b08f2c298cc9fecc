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


def columns(ratio, update=0.0, completions=20):
    """One token a completion: the reference over the policy, and how far the update moved it."""
    logp = np.full((completions, 1), -2.0)
    ratio = np.broadcast_to(np.asarray(ratio), completions)[:, None]
    return logp, logp - update, logp + np.log(ratio), np.ones_like(logp)


#: Of twenty completions, half of which are as far above one as the others are below, the error of
#: the mean ratio is that distance over the root of nineteen; a verdict asks for four of them.
AWAY = np.where(np.arange(20) % 2, 1.0, -1.0) * math.sqrt(19) / 4
AGREE, FEW = "k1 and k3 agree within their errors", "fewer than 20 completions: no verdict"
STALE = "stale: k1 and k3 are of no policy; use an estimator with a ratio"
EXCHANGED = "not the policy's tokens, or columns exchanged"
UNSEEN = "k3 misses what is rarely or never sampled: read k1"


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (columns(1.0), AGREE),
        (columns(3.0, completions=19), FEW),
        (columns(1.0, update=0.138), AGREE),  # exp(u) - 1 - u is 0.01 at 0.1382
        (columns(1.0, update=0.139), STALE),
        (columns(1.0, update=-0.145), STALE),
        (columns(1.0 + 0.5e-6), AGREE),  # rounding
        (columns(1.0 + 1.5e-6), EXCHANGED),
        (columns(1.0 - 0.5e-6), AGREE),
        (columns(1.0 - 1.5e-6), UNSEEN),
        (columns(1.1 + 0.101 * AWAY), AGREE),
        (columns(1.1 + 0.099 * AWAY), EXCHANGED),
        (columns(0.9 + 0.101 * AWAY), AGREE),
        (columns(0.9 + 0.099 * AWAY), UNSEEN),
    ],
)
def test_each_verdict_begins_at_its_bound(given, verdict):
    found = check_run(*given)
    assert found["verdict"].startswith(verdict)
    assert found["average"] == "over all tokens"


def test_the_estimator_with_the_smaller_error_is_read():
    near, far = (check_run(*columns(1.0 + size * AWAY)) for size in (0.01, 0.8))
    assert near["k3 error"] < near["k1 error"] and far["k3 error"] < far["k1 error"]
    assert near["verdict"] == f"{AGREE}: read k3, whose own is smaller"
    rare = np.where(np.arange(60) < 3, 18.05, 0.05)  # the policy is sharper, the tail was seen
    wide = check_run(*columns(rare, completions=60))
    assert wide["k3 error"] > wide["k1 error"]
    assert wide["verdict"] == f"{AGREE}: read k1, whose own is smaller"


def test_completions_may_be_any_codes():
    flat = [x.ravel() for x in columns(1.0 + 0.1 * AWAY)]
    named = check_run(*flat, completion=np.array(list("abcdefghij") * 2))
    rows = [x.reshape(2, 10).T for x in flat]
    for name, value in check_run(*rows).items():
        assert named[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12))
    assert named["verdict"].startswith(FEW)
    one = check_run([[-1.0]], [[-1.0]], [[-1.5]], [[1]])
    assert one["k1 error"] == 0.0 and one["k1"] == 0.5


def test_it_stands_alone():
    tree = ast.parse(Path(module.__file__).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [alias.name for node in imported for alias in node.names] == ["numpy"]
    function = tree.body[-1]
    assert function.end_lineno - function.lineno < 55, "short enough to copy"
