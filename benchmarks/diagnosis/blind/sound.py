"""Twenty sound runs that look odd; what is odd about each is in ``words.toml``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.diagnosis.blind.dumps import Dump
from benchmarks.diagnosis.blind.faults import PLAIN, RESUMED, TRL, VERL
from benchmarks.diagnosis.blind.loop import K3, Array, Columns, Term, Update, kl_term

FOUR = replace(RESUMED, updates=4, batches=4)
NO_TERM = kl_term("k1", 0.0)


def weighted(term: Term, prefix: bool, log_ratio: Array, at: Update) -> tuple[Array, Array]:
    """``term`` with the ratio of its token, or of the answer up to it, attached."""
    ratio = np.cumprod(at.ratio, axis=1) if prefix else at.ratio
    value, slope = term(log_ratio, at)
    return ratio * value, ratio * (value + slope)


def synchronised(history: list[Array], reference: Array) -> Array:
    """Every six updates a copy of the policy."""
    return history[(len(history) - 1) // 6 * 6]


def junk_where_masked(columns: Columns, rng: np.random.Generator) -> None:
    """Masked positions hold what no log-prob can be."""
    for name in ("logp", "old_logp", "ref_logp", "kl_term"):
        junk = rng.choice([np.nan, -1e4, 7.0], columns[name].shape)
        columns[name] = np.where(columns["mask"] == 1, columns[name], junk)


SOUND: dict[str, Dump] = {
    "heavy-tails": Dump(replace(RESUMED, sharpness=3.0, distance=1.2)),
    "uneven-prompts": Dump(replace(VERL, unevenness=2.5, binary_reward=True)),
    "many-clipped-ratios": Dump(
        replace(PLAIN, updates=8, batches=3, learning_rate=0.06, epsilon_low=0.1, epsilon_high=0.1),
        options="--estimator k3 --placement loss --epsilon-low 0.1 --epsilon-high 0.1",
    ),
    "lag-declared": Dump(
        replace(PLAIN, lag=4, batches=8, sampler_column=True, lag_column=True, old_from_engine=True)
    ),
    "kl-in-reward": Dump(
        replace(VERL, reward_beta=0.01, term=NO_TERM),
        options="--estimator k1 --placement reward",
    ),
    "beta-zero": Dump(replace(TRL, term=NO_TERM), options="--estimator none"),
    "tiny-kl": Dump(replace(TRL, learning_rate=0.001)),
    "huge-kl": Dump(replace(RESUMED, first_step=5000, distance=1.8, term=kl_term("k3", 0.001))),
    "entropy-bonus": Dump(replace(PLAIN, entropy_bonus=0.02, batches=10)),
    "groups-of-many-sizes": Dump(replace(PLAIN, groups=(4, 7, 16, 5)), form="npz"),
    "thirty-two-completions": Dump(
        replace(TRL, prompts_per_batch=4, groups=(8,), batches=1, updates=2)
    ),
    "engine-noise": Dump(replace(VERL, engine_noise=0.02, sampler_column=True)),
    "dapo": Dump(
        replace(VERL, term=NO_TERM, epsilon_high=0.28, binary_reward=True, max_length=14),
        options="--estimator none --epsilon-high 0.28",
    ),
    "dr-grpo": Dump(replace(TRL, scaled=False, divisor="constant", groups=(12,))),
    "prefix-ratio": Dump(
        replace(FOUR, term=lambda l, at: weighted(kl_term("k2", 0.05), True, l, at)), options=""
    ),
    "attached-ratio": Dump(
        replace(FOUR, term=lambda l, at: weighted(K3, False, l, at)),
        options="--estimator k3 --placement loss --weighting attached",
    ),
    "reference-synchronised": Dump(replace(TRL, batches=8, reference=synchronised)),
    "junk-where-masked": Dump(
        replace(RESUMED, tool_tokens=6, temperature=0.7), junk_where_masked, form="npz"
    ),
    "packed-with-ids": Dump(replace(PLAIN, divisor="completions"), packed="ids"),
    "eight-updates-a-batch": Dump(
        replace(PLAIN, groups=(16,), updates=8, batches=2, learning_rate=0.015)
    ),
}
