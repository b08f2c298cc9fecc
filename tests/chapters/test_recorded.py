"""What pages say of recorded runs: intervals by other code from the files."""

from __future__ import annotations

import csv
import itertools
import math

import pytest
from scipy import stats

from analysis.evidence.recorded import difference
from analysis.records import recording

FOLDERS = sorted(path.parent for path in recording.RESULTS.glob("*/final.csv"))
METRICS = ("accuracy", "reverse_kl", "entropy", "length")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_an_interval_is_scipy_s_of_the_stored_rows(folder):
    """Neighbouring variants of each recording, at the largest coefficient that they share."""
    with (folder / "final.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    loaded = recording.load(folder).finals
    betas, runs = {}, {}
    for row in rows:
        beta = float(row["beta"])
        betas.setdefault(row["variant"], set()).add(beta)
        runs.setdefault((row["variant"], beta), {})[row["seed"]] = row
    compared = 0
    for one, other in itertools.pairwise(betas):
        shared = betas[one] & betas[other]
        if not shared:
            continue
        beta = max(shared)
        left, right = runs[one, beta], runs[other, beta]
        seeds = sorted(left)
        if sorted(right) != seeds or len(seeds) < 4:
            continue
        for metric in METRICS:
            values = [
                float(left[seed][metric] or "nan") - float(right[seed][metric] or "nan")
                for seed in seeds
            ]
            if max(values) - min(values) < 1e-9 or not all(map(math.isfinite, values)):
                continue
            tested = stats.ttest_1samp(values, 0.0).confidence_interval()
            found = difference(loaded, one, other, metric, beta=beta)
            expected = (sum(values) / len(values), tested.low, tested.high)
            assert tuple(found) == pytest.approx(expected, abs=1e-9), (one, other, metric)
            compared += 1
    if len(betas) > 1 and any(betas[a] & betas[b] for a, b in itertools.pairwise(betas)):
        assert compared > 0 or len({row["seed"] for row in rows}) < 4
