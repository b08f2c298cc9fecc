"""``python -m benchmarks.diagnosis.healthy``: how often sound runs are called faulty.

Runs are drawn from chains whose policies are known: the reading rules of ``check_run`` from a KL of
1e-5 to 10 nats a token, the intervals of the diagnosis, and every finding that it raises.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from analysis.freshness import code_sha256, import_closure
from analysis.records.manifests import check_target, write_folder
from analysis.sweeps.provenance import provenance_here
from benchmarks.diagnosis.chains import Population, Sample, sample, truth
from kl_term.diagnosis.causes import find
from kl_term.diagnosis.check_run import check_run
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.schema import Floats, Rollouts, Settings
from kl_term.diagnosis.statistics import token_means
from kl_term.errors import UserError

RECORDED = Path(__file__).parents[2] / "results" / "diagnosis_healthy"
KLS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
#: Completions and how many answer one prompt.
SIZES = ((32, 2), (32, 8), (128, 8), (512, 8))
UPDATES = (1, 2, 4, 8, 16)
#: Completions, completions of a prompt, updates on each, nats a token; and how uneven prompts are.
COVERAGE = (
    *((64, 4, updates, 0.01, 0.25) for updates in UPDATES),
    *((count, 8, 2, 0.01, 0.25) for count in (32, 128, 512, 2048)),
    *((512, group, 2, 0.01, 0.25) for group in (2, 16, 64)),
    *((96, 12, 3, kl, 0.25) for kl in (0.001, 0.3)),
    (48, 16, 4, 0.01, 0.25),
    *((count, 8, 2, 0.01, 0.6) for count in (64, 512)),
)
#: Of the intervals, as a diagnosis has them; and completions that are drawn at a time.
DIAGNOSED, DRAWN = 1000, 8000
#: Of a trainer that logs the mean of its micro-batches' own means.
MICRO_BATCH = 4
RESAMPLES = 200


def record(
    repetitions: int = 200,
    intervals_of: int = 2000,
    directory: Path = RECORDED,
    resamples: int = RESAMPLES,
) -> None:
    """Draw sound runs, read and diagnose them, and record how often that is wrong.

    Args:
        repetitions: of each setting.
        intervals_of: runs of which the intervals are held to the truth, at each size: of 2,000 the
            share that hold it has a standard error of half a point.
        directory: where the record goes.
        resamples: of the bootstrap, where runs are diagnosed.
    """
    check_target(directory)
    began = time.perf_counter()
    tables = {
        "reading.csv": pd.DataFrame(reading_rules(repetitions)),
        "coverage.csv": pd.DataFrame(coverage(intervals_of)),
        "alarms.csv": pd.DataFrame(alarms(repetitions, resamples)),
    }
    made = provenance_here(code_sha256(import_closure(["benchmarks/diagnosis/healthy.py"])))
    fields = made.model_dump() | {
        "preset": "diagnosis_healthy",
        "seeds": list(range(repetitions)),
        "configuration": {
            "resamples": resamples,
            "resamples of intervals": DIAGNOSED,
            "population": Population()._asdict(),
        },
        "seconds": round(time.perf_counter() - began),
    }
    write_folder(directory, tables, fields)
    print(f"written to {directory}")


def reading_rules(repetitions: int) -> list[dict[str, Any]]:
    """A row a KL, size and sampler: the share of fresh, sound runs to which each rule objects.

    ``factor_far`` (k1 more than twice k3) and ``factor_negative`` (k1 below minus k3) are the rules
    by a factor; ``far``, ``negative`` and ``micro_far``, ``micro_negative`` (the factors on the
    mean of micro-batches' own means) likewise; ``k1_wins`` is where k1 was nearer to the truth.
    """
    rows = []
    for kl, (count, group), top_p in itertools.product(KLS, SIZES, (1.0, 0.95)):
        if top_p < 1 and (count, group) != (128, 8):
            continue
        seen: Counter[str] = Counter()
        for seed in range(repetitions):
            drawn = sample(
                Population(kl=kl), seed, prompts=count // group, group=group, top_p=top_p
            )
            seen.update(name for name, objects in _read(drawn).items() if objects)
        shares = {name: seen[name] / repetitions for name in _RULES}
        rows.append({"kl": kl, "completions": count, "group": group, "top_p": top_p, **shares})
        print(rows[-1], flush=True)
    return rows


_RULES = ("factor_far", "factor_negative", "micro_far", "micro_negative", "far", "negative")


def _read(drawn: Sample) -> dict[str, bool]:
    logp, ref_logp = (np.where(drawn.mask, x, 0.0) for x in (drawn.logp[0], drawn.ref_logp))
    found = check_run(logp, logp, ref_logp, drawn.mask)
    l, lengths = logp - ref_logp, drawn.mask.sum(1)
    sums = np.stack([l.sum(1), (np.expm1(-l) + l).sum(1)])
    parts = np.arange(len(lengths)) // MICRO_BATCH
    k1, k3 = (
        (np.bincount(parts, weights=s) / np.bincount(parts, weights=lengths)).mean() for s in sums
    )
    return {
        "factor_far": found["k1"] > 2 * found["k3"],
        "factor_negative": found["k1"] < -found["k3"],
        "micro_far": k1 > 2 * k3,
        "micro_negative": k1 < -k3,
        "far": found["verdict"].startswith("k3 misses"),
        "negative": found["verdict"].startswith("not the policy"),
    }


def coverage(repetitions: int) -> list[dict[str, Any]]:
    """A row a size: how often the 95% intervals of k1 and k3 hold the mean over all prompts.

    ``*_by_row`` are those of a bootstrap over rows of the dump, as if each were drawn anew.
    """
    rows = []
    for place, (count, group, updates, kl, uneven) in enumerate(COVERAGE):
        population = Population(kl=kl, uneven=uneven)
        exact = truth(population, updates)
        held: Counter[str] = Counter()
        prompts = count // group
        for part in _parts(population, repetitions, prompts, group, updates, place):
            for name, (low, high) in intervals(part).items():
                held[name] += bool(low <= exact[name[:2]] <= high)
        shares = {name: held[name] / repetitions for name in ("k1", "k3", "k1_by_row", "k3_by_row")}
        shape = {"completions": count, "group": group, "updates": updates, "kl": kl}
        rows.append(shape | {"uneven": uneven, "repetitions": repetitions} | shares)
        print(rows[-1], flush=True)
    return rows


def _parts(
    population: Population, repetitions: int, prompts: int, group: int, updates: int, place: int
) -> Iterator[Floats]:
    """Runs of so many prompts each, by :func:`row_sums`; drawn many at a time, none twice."""
    most = max(1, DRAWN // (prompts * group))
    for index, done in enumerate(range(0, repetitions, most)):
        runs = min(most, repetitions - done)
        seed = 10**7 + 10**4 * place + index
        drawn = sample(population, seed, prompts=runs * prompts, group=group, updates=updates)
        sums = row_sums(drawn)
        yield from sums.reshape(3, updates, runs, prompts, group).transpose(2, 0, 1, 3, 4)


def row_sums(drawn: Sample) -> Floats:
    """[3, K, C]: sums of k1 and k3 over the tokens of each row of the dump, and its tokens."""
    l = np.where(drawn.mask, drawn.logp - drawn.ref_logp, 0.0)
    tokens = np.broadcast_to(drawn.mask.sum(1), l.shape[:2])
    return np.stack([l.sum(2), (np.expm1(-l) + l).sum(2), tokens])


def intervals(sums: Floats) -> dict[str, tuple[float, float]]:
    """Those of the diagnosis, from sums by row [3, K, prompts, group] in the place of tokens.

    A mean over tokens and its interval are functions of the prompts' sums alone: a prompt stands as
    one value, the mean of its tokens, with their number as its weight.
    """
    *numerators, tokens = sums.sum((1, 3))
    means = {n: s / tokens for n, s in zip(("k1", "k3"), numerators, strict=True)}
    unit = np.arange(len(tokens))
    found = token_means(means, unit, weight=tokens, resamples=DIAGNOSED, seed=0)
    rows = sums.reshape(3, -1)
    return {name: (own.low, own.high) for name, own in found.items()} | {
        f"{name}_by_row": _by_row(rows[[i, 2]]) for i, name in enumerate(("k1", "k3"))
    }


def _by_row(sums: Floats) -> tuple[float, float]:
    """Percentiles of a bootstrap over rows [2, rows]."""
    drawn = _draws(sums.shape[1]) @ sums.T
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=1)
def _draws(count: int) -> Floats:
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return times.astype(np.float64)


def alarms(repetitions: int, resamples: int) -> list[dict[str, Any]]:
    """A row a size, KL and number of updates: the share of sound runs with an error or a warning,
    and which findings these were."""
    rows = []
    sizes = ((32, 4, 1), (64, 8, 8), (128, 8, 1), (128, 2, 2), (256, 64, 4), (512, 16, 1))
    for (count, group, updates), kl in itertools.product(sizes, (1e-4, 1e-2, 0.1)):
        severe: Counter[str] = Counter()
        raised: Counter[str] = Counter()
        for seed in range(repetitions):
            drawn = sample(
                Population(kl=kl), seed, prompts=count // group, group=group, updates=updates
            )
            settings = Settings(resamples=resamples, rollout_steps=updates)
            found = find(measure(as_rollouts(drawn, seed), settings))
            loud = [finding for finding in found if finding.severity != "note"]
            severe.update({finding.severity for finding in loud})
            raised.update({finding.code for finding in loud})
        rows.append(
            {
                "completions": count,
                "group": group,
                "updates": updates,
                "kl": kl,
                "errors": severe["error"] / repetitions,
                "warnings": severe["warning"] / repetitions,
                "codes": " ".join(f"{code}:{times}" for code, times in sorted(raised.items())),
            }
        )
        print(rows[-1], flush=True)
    return rows


def as_rollouts(drawn: Sample, seed: int = 0) -> Rollouts:
    """The dump that a trainer writes of it: each completion at every update that sees it."""
    updates, count, _ = drawn.logp.shape
    mask = np.broadcast_to(drawn.mask, drawn.logp.shape).reshape(updates * count, -1)
    lengths = mask.sum(1)
    reward = np.random.default_rng([seed, 5]).random(count)
    groups = drawn.prompt
    size = np.bincount(groups)
    mean = np.bincount(groups, weights=reward) / size
    centred = reward - mean[groups]
    spread = np.sqrt(np.bincount(groups, weights=centred**2) / np.maximum(1, size - 1))

    def flat(values: np.ndarray) -> np.ndarray:
        """Of [K, C, T], [C, T] or [C]."""
        values = values[:, None] if values.ndim == 1 else values
        whole = np.broadcast_to(values, drawn.logp.shape)
        return whole.reshape(mask.shape)[mask]

    sequence = np.repeat(np.arange(len(lengths)), lengths)
    first = np.cumsum(lengths) - lengths
    return Rollouts(
        logp=flat(drawn.logp),
        old_logp=flat(drawn.logp[0]),
        ref_logp=flat(drawn.ref_logp),
        sequence=sequence,
        position=np.arange(len(sequence)) - first[sequence],
        entropy=flat(drawn.entropy),
        advantage=flat(centred / (spread[groups] + 1e-4)),
        reward=flat(reward),
        step=np.repeat(np.arange(updates), drawn.mask.sum()) + 100,
        group=flat(groups),
        token=flat(drawn.token),
        rows=len(sequence),
        sequence_names=tuple(map(str, range(len(lengths)))),
    )


if __name__ == "__main__":
    try:
        tyro.cli(record)
    except UserError as refusal:
        sys.exit(f"{refusal}")
