"""The check that is copied from the answer page says what the package says."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest

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
    assert found["missing mass"] == pytest.approx(1 - ratio.mean(), abs=1e-9)


def test_two_tokens_by_hand_in_any_shape_beside_padding():
    logp = [[math.log(0.5), math.log(0.2)], [-math.inf, math.nan]]
    old_logp = [[math.log(0.25), math.log(0.2)], [0.0, -math.inf]]
    ref_logp = [[math.log(0.25), math.log(0.4)], [math.nan, 0.0]]
    found = check_run(logp, old_logp, ref_logp, [[1, 1], [0, 0]])
    log2 = math.log(2)
    assert found["k1"] == pytest.approx(0.0, abs=1e-12)
    assert found["k2"] == pytest.approx(log2**2 / 2)
    assert found["k3"] == pytest.approx((0.5 - 1 + log2 + 2 - 1 - log2) / 2)
    assert found["missing mass"] == pytest.approx(1 - (0.5 + 2) / 2)
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


def test_it_stands_alone_and_is_short():
    tree = ast.parse(Path(module.__file__).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [alias.name for node in imported for alias in node.names] == ["numpy"]
    function = tree.body[-1]
    assert function.end_lineno - function.lineno < 20
