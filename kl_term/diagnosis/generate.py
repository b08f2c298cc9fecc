"""Dumps with a known fault, from softmax policies that really sample: what findings are held to.

Each token has a state of its own with logits of the reference, the old policy and the trained one,
so that every identity that holds for a real run holds here, and no more.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

FOLDER = Path(__file__).parent / "examples"
#: Digits of a log-prob in the files: rounding far below any effect shown here.
DIGITS = 5
#: These runs have left their reference: they are seen in the middle.
FIRST_STEP = 100
_DRAW_BLOCK = 20_000


class Run(NamedTuple):
    """How a simulated run behaves. Log-ratios and standard deviations in nats."""

    sequences: int = 36
    steps: int = 6
    shortest: int = 24
    longest: int = 48
    vocabulary: int = 48
    sharpness: float = 2.0  #: standard deviation of the reference's logits
    drift: float = 0.25  #: of the old policy's logits from the reference's, at the last step
    growth: float = 1.5  #: drift at the last step over that at the first
    update: float = 0.03  #: random part of one update's move of the logits
    learning: float = 0.05  #: advantage-weighted part
    pull: float = 0.05  #: towards the reference; negative maximises the KL
    push: float = 0.0  #: of every sampled token, whatever its advantage: k1 as a loss
    mismatch: float = 0.01  #: of the inference engine's logits from the trainer's
    gain: float = 0.0  #: of the success rate over the steps, from three tenths
    lost: float = 0.0  #: share of states whose likeliest tokens the policy has given up
    loss_depth: float = 3.3  #: by how many nats
    loss_spread: float = 0.0  #: mean of a further, exponential depth: r gets a power-law tail


def simulate(run: Run, seed: int) -> pd.DataFrame:
    """Rollouts of a run, one row a token, unrounded."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(run.shortest, run.longest + 1, size=run.sequences)
    sequence = np.repeat(np.arange(run.sequences), lengths)
    update = sequence * run.steps // run.sequences
    reward = generator.integers(0, 2, size=run.sequences).astype(float)
    if run.gain:
        when = np.arange(run.sequences) / max(1, run.sequences - 1)
        reward = (generator.random(run.sequences) < 0.3 + run.gain * when).astype(float)
    group = np.arange(run.sequences) // 6
    mean = (np.bincount(group, reward) / np.bincount(group))[group]
    spread = np.sqrt(np.bincount(group, (reward - mean) ** 2) / (np.bincount(group) - 1))[group]
    advantage = (reward - mean) / (spread + 1e-4)
    scale = run.drift * run.growth ** (update / max(1, run.steps - 1) - 1)
    blocks = [
        _tokens(
            run, generator, advantage[sequence[i : i + _DRAW_BLOCK]], scale[i : i + _DRAW_BLOCK]
        )
        for i in range(0, len(sequence), _DRAW_BLOCK)
    ]
    logp, old_logp, ref_logp, sampler_logp = np.concatenate(blocks, axis=1)
    return pd.DataFrame(
        {
            "step": FIRST_STEP + update,
            "sequence": sequence,
            "position": np.concatenate([np.arange(length) for length in lengths]),
            "logp": logp,
            "old_logp": old_logp,
            "ref_logp": ref_logp,
            "sampler_logp": sampler_logp,
            "mask": 1,
            "advantage": advantage[sequence],
            "reward": reward[sequence],
        }
    )


def _tokens(
    run: Run, generator: np.random.Generator, advantage: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """[4, N]: logp, old, ref and sampler log-probs of tokens drawn from the sampler."""
    shape = (len(advantage), run.vocabulary)
    ref_logits = run.sharpness * generator.standard_normal(shape)
    old_logits = ref_logits + scale[:, None] * generator.standard_normal(shape)
    if run.lost:
        given_up = generator.random(shape[0]) < run.lost
        likeliest = ref_logits == ref_logits.max(axis=1, keepdims=True)
        depth = run.loss_depth + run.loss_spread * generator.standard_exponential(shape[0])
        old_logits -= (given_up * depth)[:, None] * likeliest
    sampler = _log_softmax(old_logits + run.mismatch * generator.standard_normal(shape))
    token = (np.cumsum(np.exp(sampler), axis=1) < generator.random(shape[0])[:, None]).sum(1)
    token = np.minimum(token, run.vocabulary - 1)
    rows = np.arange(shape[0])
    ref, old = _log_softmax(ref_logits), _log_softmax(old_logits)
    logits = old_logits + run.update * generator.standard_normal(shape)
    logits -= run.pull * (old - ref)
    taken = (np.arange(run.vocabulary) == token[:, None]) - np.exp(old)
    logits += (run.learning * advantage - run.push)[:, None] * taken
    new = _log_softmax(logits)
    return np.stack([table[rows, token] for table in (new, old, ref, sampler)])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _counted_padding(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return _padded(frame, generator).assign(mask=1)


def _padded(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Padding to equal lengths with garbage in the log-probs, and a mask that says so."""
    longest = frame["position"].max() + 1
    lengths = frame.groupby("sequence")["position"].max() + 1
    firsts = frame.groupby("sequence").first()
    pads = []
    for name, length in lengths.items():
        count = int(longest - length)
        garbage = -np.abs(generator.normal(0, 12, size=count))
        pads.append(
            pd.DataFrame(
                {
                    **{column: firsts.loc[name, column] for column in frame if column in firsts},
                    "sequence": name,
                    "position": np.arange(length, longest),
                    "logp": garbage,
                    "old_logp": garbage,
                    "ref_logp": garbage + generator.normal(0, 4, size=count).clip(None, -garbage),
                    "sampler_logp": -np.abs(generator.normal(0, 30, size=count)),
                    "mask": 0,
                }
            )
        )
    both = pd.concat([frame, *pads])[list(frame)]
    return both.sort_values(["sequence", "position"], ignore_index=True)


def _half_precision(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Log-probs that went through bfloat16: eight significant bits."""
    columns = ["logp", "old_logp", "ref_logp"]
    size = 2.0 ** (np.floor(np.log2(frame[columns].abs().clip(lower=1e-30))) - 7)
    return frame.assign(**(np.round(frame[columns] / size) * size))


def _swapped(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """The columns of policy and reference, exchanged; no inference engine to give it away."""
    old = frame["old_logp"]
    return frame.assign(ref_logp=old, logp=frame["ref_logp"], old_logp=frame["ref_logp"]).drop(
        columns="sampler_logp"
    )


def _shifted(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Reference log-probs of the next token: an off-by-one in the gather."""
    return frame.assign(ref_logp=frame.groupby("sequence")["ref_logp"].shift(-1).fillna(-2.0))


class Example(NamedTuple):
    """A dump, and the finding that must head its diagnosis."""

    expected: str | None
    run: Run
    break_it: Callable[[pd.DataFrame, np.random.Generator], pd.DataFrame] = lambda frame, _: frame


EXAMPLES: dict[str, Example] = {
    "healthy": Example(None, Run(), _padded),
    "stale_samples": Example("stale-samples", Run(update=0.7)),
    "heavy_tail": Example("heavy-tail", Run(lost=1.0, loss_depth=1.0, loss_spread=8.0)),
    "dead_zone": Example("dead-zone", Run(lost=1.0, loss_depth=3.6, sharpness=4.0)),
    "train_inference_mismatch": Example("train-inference-mismatch", Run(mismatch=0.35)),
    "kl_maximised": Example("kl-maximised", Run(pull=-0.25, growth=12.0, drift=0.6)),
    "k1_as_loss": Example("uniform-push", Run(pull=0.0, push=0.08, growth=6.0)),
    "counted_padding": Example("counted-padding", Run(), _counted_padding),
    "half_precision": Example("coarse-logprobs", Run(drift=0.02, mismatch=0.002), _half_precision),
    "swapped_columns": Example("negative-kl", Run(drift=0.8), _swapped),
    "shifted_reference": Example("misaligned", Run(), _shifted),
}
SEED = 20261120


def example(name: str, seed: int = SEED) -> pd.DataFrame:
    """The rows of one example."""
    chosen = EXAMPLES[name]
    frame = chosen.break_it(simulate(chosen.run, seed), np.random.default_rng([seed, 1]))
    return frame.assign(advantage=frame["advantage"].round(3))


def dump_path(name_or_path: str) -> Path:
    """The file of an example by its name, else the path itself."""
    if name_or_path in EXAMPLES:
        return FOLDER / f"{name_or_path}.csv.gz"
    return Path(name_or_path).expanduser()


def as_csv(frame: pd.DataFrame) -> str:
    return frame.to_csv(index=False, float_format=f"%.{DIGITS}f", lineterminator="\n")


def write_examples(folder: Path = FOLDER) -> None:
    """Write every example as gzipped CSV; equal text gives equal bytes."""
    for name in EXAMPLES:
        data = gzip.compress(as_csv(example(name)).encode(), mtime=0)
        (folder / f"{name}.csv.gz").write_bytes(data)
