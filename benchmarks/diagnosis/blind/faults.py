"""Forty faults of a run with a KL term, each a change of the loop or of what it dumps.

What is wrong with each, where it comes from and what a user should be told is in ``words.toml``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.diagnosis.blind.dumps import Dump, drop, fill, put
from benchmarks.diagnosis.blind.loop import (
    K3,
    Array,
    Columns,
    Rollout,
    Settings,
    Update,
    group_advantages,
    kl_term,
    log_softmax,
    times,
)

PLAIN = Settings()
TRL = Settings(source="trl", updates=3, groups=(6,), vocabulary=20)
VERL = Settings(source="verl", batches=14, prompts_per_batch=10, vocabulary=32)
RESUMED = replace(PLAIN, first_step=300, distance=0.5, batches=8)  # a KL to look at
RESUMED_TRL = replace(TRL, first_step=120, distance=0.5)


def switched(log_ratio: Array, at: Update) -> tuple[Array, Array]:
    """k3, and k2 from the ninth step on."""
    return kl_term("k3" if at.step < 8 else "k2", 0.05)(log_ratio, at)


def clamped(log_ratio: Array, at: Update) -> tuple[Array, Array]:
    """The term is cut at 0.01."""
    value, slope = K3(log_ratio, at)
    return np.minimum(value, 0.01), np.where(value < 0.01, slope, 0)


def transposed(log_ratio: Array, at: Update) -> tuple[Array, Array]:
    """k3 of reference and policy exchanged."""
    value, slope = K3(-log_ratio, at)
    return value, -slope


def other_term(columns: Columns) -> Array:
    """k3 in the loss, beside a KL in the reward."""
    log_ratio = columns["logp"] - columns["ref_logp"]
    return 0.04 * (np.exp(-log_ratio) - 1 + log_ratio)


def some_times_60(reward: Array, rollout: Rollout) -> Array:
    """Advantages of one prompt in eight are sixty times as large."""
    return group_advantages(reward, rollout, True) * np.where(rollout.prompt % 8 == 3, 60, 1)


def interleaved(reward: Array, rollout: Rollout) -> Array:
    """Rewards are grouped as if prompts had been tiled, not repeated."""
    tiled = replace(rollout, prompt=np.arange(len(reward)) % 8)
    return group_advantages(reward, tiled, True)


def without_prompt_rows(history: list[Array], lag: int) -> Array:
    """Only the transition rows reach the engine."""
    rows = TRL.vocabulary + 1
    return np.concatenate([history[-1][:rows], history[0][rows:]])


def sees_padding(logits: Array, rollout: Rollout) -> Array:
    """Logits are off by what padding left of the prompt adds to the attention."""
    disturbance = np.cos(np.arange(logits.shape[-1]) * 2.4)
    return log_softmax(logits + 0.15 * rollout.padding[:, None, None] * disturbance)


def bfloat16(logits: Array, rollout: Rollout) -> Array:
    """Logits with eight bits of mantissa."""
    bits = logits.astype(np.float32).view(np.uint32)
    return log_softmax((bits + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32))


def in_shards(logits: Array) -> Array:
    """Each half of the vocabulary is normalised by itself."""
    return np.concatenate([log_softmax(half) for half in np.split(logits, 2, axis=-1)], axis=-1)


def raw(logits: Array, rollout: Rollout) -> Array:
    """Without the temperature."""
    return log_softmax(logits)


FAULTS: dict[str, Dump] = {
    # Fillers
    "engine-zero-fill": Dump(
        replace(VERL, sampler_column=True), fill("sampler_logp", 0.0, rows=0.25, after=8)
    ),
    "engine-clamped-at-9999": Dump(
        replace(PLAIN, sampler_column=True), fill("sampler_logp", -9999.0, tokens=0.03)
    ),
    "reference-null": Dump(PLAIN, fill("ref_logp", np.nan, rows=0.1)),
    # Truncation
    "top-p-ratio": Dump(replace(TRL, top_p=0.9, sampler_column=True)),
    "top-k-unseen": Dump(replace(PLAIN, top_k=5)),
    # A term that is not what, where or when it should be
    "beta-decays": Dump(
        replace(RESUMED, term=times(K3, lambda _, at: max(1 - at.step / 16, 0))), options=""
    ),
    "term-lost-on-resume": Dump(
        replace(RESUMED_TRL, term=times(K3, lambda _, at: float(at.step < 10)))
    ),
    "estimator-switches": Dump(replace(RESUMED, distance=0.8, term=switched)),
    "term-on-first-tokens": Dump(
        replace(RESUMED, term=times(K3, lambda l, _: np.arange(l.shape[1]) < 10)), options=""
    ),
    "term-dropped-where-clipped": Dump(
        replace(
            RESUMED,
            updates=6,
            batches=4,
            learning_rate=0.05,
            term=times(K3, lambda _, at: ~at.clipped),
        )
    ),
    "beta-by-rank": Dump(
        replace(RESUMED_TRL, term=times(K3, lambda l, _: 1 + 3 * (np.indices(l.shape)[0] % 2)))
    ),
    "beta-logged-not-used": Dump(
        replace(RESUMED, term=kl_term("k3", 0.004)), put("kl_term", lambda c: 10 * c["kl_term"])
    ),
    "term-negative": Dump(replace(RESUMED, term=kl_term("k3", -0.04))),
    "k2-said-k3": Dump(replace(RESUMED, term=kl_term("k2", 0.04))),
    "k3-transposed": Dump(replace(RESUMED, term=transposed), form="npz"),
    "term-clamped": Dump(replace(RESUMED, distance=0.8, term=clamped)),
    "kl-counted-twice": Dump(replace(RESUMED, reward_beta=0.05), put("kl_term", other_term)),
    # Groups
    "groups-times-60": Dump(replace(VERL, advantages=some_times_60)),
    "groups-interleaved": Dump(replace(PLAIN, advantages=interleaved)),
    # Engines behind
    "stale-without-columns": Dump(
        replace(VERL, lag=6, learning_rate=0.05, sampler_column=True), options="--estimator k3"
    ),
    "old-recomputed": Dump(
        replace(PLAIN, lag=8, updates=1, batches=14, learning_rate=0.06), options=""
    ),
    "version-stuck": Dump(
        replace(PLAIN, engine=lambda history, _: history[0], sampler_column=True),
        put("version", lambda c: np.zeros_like(c["step"])),
    ),
    "lag-said-zero": Dump(
        replace(PLAIN, lag=6, batches=8, learning_rate=0.05, sampler_column=True),
        put("lag", lambda c: np.zeros_like(c["step"])),
        form="csv",
    ),
    "part-of-weights": Dump(replace(TRL, engine=without_prompt_rows, sampler_column=True)),
    "lora-merged-twice": Dump(
        replace(VERL, engine=lambda history, _: 2 * history[-1] - history[0], sampler_column=True)
    ),
    # Temperatures
    "raw-engine-logprobs": Dump(
        replace(VERL, temperature=0.6, raw_logprobs=True, sampler_column=True)
    ),
    "temperature-not-in-trainer": Dump(replace(TRL, temperature=1.4, normalise=log_softmax)),
    "reference-without-temperature": Dump(replace(PLAIN, temperature=0.7, normalise_reference=raw)),
    # Updates and rows
    "ratio-always-one": Dump(replace(PLAIN, updates=4, old_again=True)),
    "updates-without-step": Dump(replace(PLAIN, updates=4), drop("step")),
    "packed-without-ids": Dump(PLAIN, packed="bare"),
    # References
    "base-as-reference": Dump(replace(TRL, distance=0.8)),
    "reference-reset": Dump(
        replace(RESUMED, reference=lambda h, first: h[8] if len(h) > 8 else first)
    ),
    "reference-shifted": Dump(TRL, put("ref_logp", lambda c: np.roll(c["ref_logp"], -1, axis=1))),
    "reference-sees-padding": Dump(replace(TRL, normalise_reference=sees_padding)),
    "reference-bfloat16": Dump(replace(PLAIN, normalise_reference=bfloat16), form="npz"),
    "softmax-in-shards": Dump(replace(PLAIN, normalise=in_shards, normalise_reference=raw)),
    # Masks
    "prompt-counted": Dump(replace(PLAIN, prompt_tokens=4, counted="forced"), form="csv"),
    "padding-counted": Dump(replace(VERL, counted="all")),
    "tool-tokens-counted": Dump(
        replace(VERL, tool_tokens=6, counted="forced", sampler_column=True)
    ),
}
