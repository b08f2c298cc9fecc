"""What the recorded run on a language model says: arms beside the toy's, estimators as readings."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from analysis.experiments import statistics
from analysis.experiments.ablations import summaries
from analysis.experiments.language_models.kept import Kept
from analysis.experiments.language_models.tail import ESTIMATORS


def beside(finals: dict[str, pd.DataFrame], metric: str, *, beta: float) -> pd.DataFrame:
    r"""How often the metric of no KL term each arm ends at, in several populations.

    .. math:: r = \exp\Big(\frac1S \sum_s \big(\log m_s^{arm} - \log m_s^{none}\big)\Big)

    Seeds are paired: an arm and no KL term meet the same prompts.

    Args:
        finals: name of a population -> one row per member.
        metric: a positive one.
        beta: of the arms that are compared.

    Returns:
        One row per population and arm: ``population``, ``arm``, ``ratio`` with its interval ``low``
        to ``high``, ``seeds``, and ``p`` and ``equivalent`` as of
        :func:`~analysis.experiments.ablations.summaries.of_differences`, of the logarithm.
    """
    rows, margin = [], np.log(statistics.KL_RATIO_MARGIN)
    for population, table in finals.items():
        logs = table.assign(log=np.log(table[metric]))
        none = summaries.of_seeds(logs, "none", "log", beta)
        for arm in table.loc[table["beta"] == beta, "arm"].unique():
            gaps = summaries.of_seeds(logs, arm, "log", beta) - none
            row = summaries.of_differences(gaps.to_numpy(), margin=margin)
            ratio = {"ratio": row.pop("mean"), "low": row["low"], "high": row["high"]}
            ratio = {name: np.exp(value) for name, value in ratio.items()}
            rows.append({"population": population, "arm": arm} | row | ratio)
    return pd.DataFrame(rows)


def from_no_kl(finals: pd.DataFrame, arms: Iterable[str]) -> pd.DataFrame:
    """Fronts that begin at no KL term: its members stand for every arm at a coefficient of zero.

    Args:
        finals: one row per member; those of the arm ``none`` among them.
        arms: that are kept, beside ``none``.

    Returns:
        The rows of ``none`` and of the arms, and for each arm a copy of those of ``none``.
    """
    none = finals[finals["arm"] == "none"]
    kept = [finals[finals["arm"] == arm] for arm in arms]
    starts = [none.assign(arm=arm) for arm in arms]
    return pd.concat([none, *starts, *kept], ignore_index=True)


def readings(curves: pd.DataFrame) -> pd.DataFrame:
    """What a log shows as the KL, and what it is: one row per member, window and estimator.

    Both are means over the same completions: ``sampled`` of an estimator at the sampled tokens,
    ``exact`` of the KL over the vocabulary at each of their states.

    Returns:
        ``estimator``, ``sampled``, ``exact`` and ``ratio``; windows before the first step, where
        the KL is zero, are left out.
    """
    moved = curves[curves["update"] > 0]
    long = moved.melt("reverse_kl", list(ESTIMATORS), "estimator", "sampled")
    long = long.rename(columns={"reverse_kl": "exact"})
    return long.assign(ratio=long["sampled"] / long["exact"])


def reading_errors(table: pd.DataFrame) -> pd.DataFrame:
    """Of :func:`readings`: how wrong one update's reading is, relative to the exact KL.

    Returns:
        One row per estimator: ``median`` and ``largest`` of the ratio; ``bias``, its mean less one;
        ``rms``, the root of the mean square of that difference.
    """
    rows = []
    for name, part in table.groupby("estimator", sort=False):
        error = part["ratio"] - 1.0
        rows.append(
            {
                "estimator": name,
                "median": part["ratio"].median(),
                "largest": part["ratio"].max(),
                "bias": error.mean(),
                "rms": float(np.sqrt(np.square(error).mean())),
            }
        )
    return pd.DataFrame(rows)


def elsewhere(kept: Kept, finals: pd.DataFrame) -> pd.DataFrame:
    """What trained members still are at states of the reference, beside their KL on the task.

    Args:
        kept: the recorded readings.
        finals: one row per member of the populations that they are of.

    Returns:
        One row per member and skill: ``arm``, ``beta``, ``seed``, ``kl_estimator``, ``skill``;
        ``on_task``, the exact reverse KL of the end of training; ``forward_kl`` of the skill;
        ``right``, and ``gained``, what it is more than the reference's (both NaN where there is no
        right answer).
    """
    keys = ["arm", "beta", "seed"]
    of_task = finals[[*keys, "kl_estimator", "reverse_kl"]]
    of_task = of_task.rename(columns={"reverse_kl": "on_task"})
    members = kept.members.astype({"beta": float}).drop(columns=["reverse_kl", "states"])
    start = members["skill"].map(kept.reference.set_index("skill")["right"])
    table = members.assign(gained=members["right"] - start)
    return table.merge(of_task, on=keys, validate="many_to_one")


def by_skill(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The mean over the seeds of each skill, arm and beta, and the seeds' range.

    Args:
        table: from :func:`elsewhere`.
        metric: one of its columns.

    Returns:
        One row per skill, arm and beta, in their order: ``mean``, ``low``, ``high``, ``seeds``.
    """
    grouped = table.groupby(["skill", "arm", "beta"], sort=False)[metric]
    columns = {"mean": "mean", "low": "min", "high": "max", "seeds": "size"}
    return grouped.agg(**columns).reset_index()


def elsewhere_at_equal(table: pd.DataFrame, arm: str, other: str, level: float) -> pd.DataFrame:
    """How far from the reference two arms are on each skill where they are equally far on the task.

    Along each arm's curve over beta, from no KL term on, seed by seed:
    :func:`~analysis.experiments.ablations.summaries.at_equal`, of the logarithm.

    Args:
        table: from :func:`elsewhere`.
        arm: compared with ``other``.
        other: an arm.
        level: of ``on_task``.

    Returns:
        One row per skill: ``ratio`` of the arm's forward KL to the other's, the geometric mean over
        the seeds, NaN unless the curves of all reach the level; their range ``low`` to ``high``;
        ``seeds``, how many reach it.
    """
    rows = []
    for skill, part in table.groupby("skill", sort=False):
        logs = from_no_kl(part.assign(log=np.log(part["forward_kl"])), [arm, other])
        reached = summaries.at_equal(logs, [arm, other], level=level, of="on_task", metric="log")
        wide = reached.pivot(index="seed", columns="arm", values="log")
        gap = (wide[arm] - wide[other]).to_numpy()
        ends = {"ratio": gap.mean(), "low": gap.min(), "high": gap.max()}
        reached = int(np.isfinite(gap).sum())
        rows.append({"skill": skill, **{n: np.exp(v) for n, v in ends.items()}, "seeds": reached})
    return pd.DataFrame(rows)


def seen(table: pd.DataFrame) -> pd.DataFrame:
    """Share of the exact KL that tokens of at least a given probability hold, by estimator.

    Args:
        table: of one member, as :func:`analysis.experiments.language_models.tail.contributions`.

    Returns:
        One row per decade, from the likeliest down: ``probability``, its lower end, and ``k1`` and
        ``k3``. Both end at one: their means over the whole vocabulary are the exact KL.
    """
    ordered = table.sort_values("decade", ascending=False)
    shares = ordered[["k1", "k3"]].cumsum() / ordered[["k1", "k3"]].sum()
    return shares.assign(probability=10.0 ** ordered["decade"]).reset_index(drop=True)


def deviations(table: pd.DataFrame) -> pd.Series:
    r"""Standard deviation of one sampled token's estimate over the exact KL, by estimator.

    .. math:: \sqrt{E_\pi[k^2] - E_\pi[k]^2} \,/\, \mathrm{KL}

    States differ in their KL; that spread is part of it, as it is part of a log's.
    """
    sums = table.sum(numeric_only=True)
    spread = {
        name: np.sqrt(sums[f"{name}_squared"] - sums[name] ** 2) / sums["k1"] for name in ESTIMATORS
    }
    return pd.Series(spread)
