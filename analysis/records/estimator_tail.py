"""Where the mean of each estimator lies on a language model, as recorded.

:mod:`analysis.studies.language.estimator_tail` makes it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.records.manifests import RESULTS, read_manifest

RECORDED = RESULTS / "smollm2_tail_cpu"
#: Estimators that are measured.
NAMES = ("k1", "k2", "k3")
#: Variant -> of how many seeds of its preset. Of k3 as a loss only the dump is read.
VARIANTS = {"none": 5, "k3_loss": 1}


class After(NamedTuple):
    """What the trained runs of a variant sample, measured."""

    #: What tokens of each decade of probability add to the estimators' moments, by ``seed``
    tail: pd.DataFrame
    #: Of the first seed: one row per counted token, columns as ``kl-term diagnose`` reads them
    dump: pd.DataFrame


def recorded() -> dict[str, After]:
    """The recorded tables by variant, after checking them against their manifest.

    Raises:
        ValueError: one is missing or is not the one that was recorded.
    """
    read_manifest(RECORDED)
    parts = {variant: [f"{variant}_{part}.csv" for part in After._fields] for variant in VARIANTS}
    return {a: After(*(pd.read_csv(RECORDED / name) for name in n)) for a, n in parts.items()}


def deviations(tail: pd.DataFrame) -> pd.DataFrame:
    r"""Standard deviation of one sampled token's estimate over the exact KL: a row a seed, a column
    an estimator.

    .. math:: \sqrt{E_\pi[k^2] - E_\pi[k]^2} \,/\, \mathrm{KL}

    States differ in their KL; that spread is part of it, as it is part of a log's.
    """
    sums = tail.groupby("seed").sum(numeric_only=True)
    spread = {
        name: np.sqrt(sums[f"{name}_squared"] - sums[name] ** 2) / sums["k1"] for name in NAMES
    }
    return pd.DataFrame(spread)
