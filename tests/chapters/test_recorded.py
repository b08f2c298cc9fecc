"""What pages say of recorded runs: intervals by other code from the files, verdicts, names."""

from __future__ import annotations

import csv
import itertools
import math

import pytest
from scipy import stats

from analysis.chapters import (
    ch04_grpo,
    ch19_equal_kl,
    ch20_language_model,
    comparisons,
)
from analysis.chapters.claims import difference
from analysis.experiments import recording
from analysis.report import tables

FOLDERS = sorted(path.parent for path in recording.RESULTS.glob("*/final.csv"))
PAGES = (ch04_grpo, ch20_language_model)
METRICS = ("accuracy", "reverse_kl", "entropy", "length")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_an_interval_is_scipy_s_of_the_stored_rows(folder):
    """Neighbouring variants of each recording, at the largest coefficient that they share."""
    with (folder / "final.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    loaded = recording.load(folder).finals
    betas = {}
    for row in rows:
        betas.setdefault(row["variant"], set()).add(float(row["beta"]))
    compared = 0
    for one, other in itertools.pairwise(betas):
        shared = betas[one] & betas[other]
        if not shared:
            continue
        beta = max(shared)
        for metric in METRICS:
            left, right = (
                {
                    r["seed"]: float(r[metric])
                    for r in rows
                    if r["variant"] == name and float(r["beta"]) == beta
                }
                for name in (one, other)
            )
            seeds = sorted(left)
            if sorted(right) != seeds or len(seeds) < 4:
                continue
            values = [left[seed] - right[seed] for seed in seeds]
            if max(values) - min(values) < 1e-9 or not all(map(math.isfinite, values)):
                continue
            tested = stats.ttest_1samp(values, 0.0).confidence_interval()
            found = difference(loaded, one, other, metric, beta=beta)
            expected = (sum(values) / len(values), tested.low, tested.high)
            assert tuple(found) == pytest.approx(expected, abs=1e-9), (one, other, metric)
            compared += 1
    if len(betas) > 1 and any(betas[a] & betas[b] for a, b in itertools.pairwise(betas)):
        assert compared > 0 or len({row["seed"] for row in rows}) < 4


@pytest.fixture(scope="module", params=PAGES, ids=lambda page: page.__name__.rpartition(".")[2])
def chapter(request):
    return request.param, comparisons.judged_page(
        request.param.compare(), request.param.COMPARISONS
    )


def test_verdicts_are_those_that_the_prose_states(chapter):
    module, page = chapter
    comparisons.check_verdicts(page, module.SAYS)
    word, (key, *_) = next((word, list(keys)) for word, keys in module.SAYS.items())
    other = "unresolved" if word != "unresolved" else "differs"
    with pytest.raises(ValueError, match=f"{key[0]}, {key[1]}.*the text says {other}"):
        comparisons.check_verdicts(page, {other: [key]})
    with pytest.raises(ValueError, match="is not compared"):
        comparisons.check_verdicts(page, {word: [("no such table", *key[1:])]})


def test_every_variant_of_a_table_has_a_name(chapter):
    module, page = chapter
    names = getattr(module, "NAMES", ch19_equal_kl.NAMES)
    for table in page.tables.values():
        assert {*table["variant"], *table["other"]} <= set(names)
        shown = tables.differences(table, names)
        assert len(shown) == len(table) and not shown.isna().any().any()
        assert shown["95% interval"].str.contains(" to |–").all()
    assert len(tables.differences(page.whole(), names, part="table")) == module.COMPARISONS


def test_a_page_that_compares_another_number_is_refused(chapter):
    module, _ = chapter
    with pytest.raises(ValueError, match="set comparisons="):
        comparisons.judged_page(module.compare(), module.COMPARISONS + 1)
