"""Faults planted in the dump of a sound run, a row a token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from benchmarks.diagnosis.tiny_runs import SETTINGS

Change = Callable[[pd.DataFrame, np.random.Generator], pd.DataFrame]
LOG_PROBS = ("logp", "old_logp", "ref_logp")


def _by_sequence(frame: pd.DataFrame) -> pd.core.groupby.DataFrameGroupBy:
    return frame.groupby("sequence", sort=False)


def shifted(*columns: str) -> Change:
    """Log-probs of the next token."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        moved = _by_sequence(frame)[list(columns)].shift(-1)
        return frame.assign(**moved.fillna(frame[list(columns)].mean()))

    return change


def exchanged(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(
        ref_logp=frame["old_logp"], logp=frame["ref_logp"], old_logp=frame["ref_logp"]
    )


def reference_is_old(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(ref_logp=frame["old_logp"])


def rounded(grid: str, *columns: str) -> Change:
    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        values = frame[list(columns)]
        if grid == "float16":
            return frame.assign(**values.astype(np.float16).astype(float))
        if grid == "bfloat16":
            size = 2.0 ** (np.floor(np.log2(values.abs().clip(lower=1e-30))) - 7)
            return frame.assign(**(np.round(values / size) * size))
        return frame.assign(**values.round(int(grid)))

    return change


def clamped(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Log-ratios beyond a bound were cut to it: one token in a hundred is far off."""
    far = generator.random(len(frame)) < 0.01
    return frame.assign(logp=np.where(far, frame["ref_logp"] - 10.0, frame["logp"]))


def policies_exchanged(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(logp=frame["old_logp"], old_logp=frame["logp"])


def one_step(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """The number of the step is never counted up."""
    return frame.assign(step=0)


def rewards_negated(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(reward=-frame["reward"])


def groups_of_every_eighth(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(group=frame["sequence"] % 8)


def two_under_one_name(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    pairs = frame["sequence"] // 2
    return frame.assign(sequence=pairs, position=frame.groupby(pairs).cumcount())


def end_twice(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    lasts = _by_sequence(frame).last().reset_index()
    both = pd.concat([frame, lasts.assign(position=lasts["position"] + 1)], ignore_index=True)
    return both.sort_values(["sequence", "position"], kind="stable", ignore_index=True)


def reversed_in_each(column: str) -> Change:
    """The values of each completion, last first."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        turned = _by_sequence(frame)[column].transform(lambda s: s.to_numpy()[::-1])
        return frame.assign(**{column: turned})

    return change


def permuted(column: str) -> Change:
    """The values of each completion, in another order."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        mixed = _by_sequence(frame)[column].transform(lambda s: generator.permutation(s.to_numpy()))
        return frame.assign(**{column: mixed})

    return change


def _of_others(values: pd.Series) -> np.ndarray:
    """As many values, from a hundred tokens earlier."""
    return np.roll(values.to_numpy(), 100)


def sampler_of_others(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(sampler_logp=_of_others(frame["old_logp"]))


def entropy_of_others(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(entropy=_of_others(frame["entropy"]))


def to_base(base: int, *columns: str) -> Change:
    """Some log-probs by ``log10`` or ``log2``, or all."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        return frame.assign(**{name: frame[name] / np.log(base) for name in columns or LOG_PROBS})

    return change


to_base_ten, in_bits = to_base(10), to_base(2)


def late_half(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """What a dump holds that was begun in the middle of the run."""
    return frame[frame["step"] > (frame["step"].min() + frame["step"].max()) / 2]


def of_sequences(how: str) -> Change:
    """Each token has the sum, or the mean, of its sequence."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        groups = _by_sequence(frame)
        return frame.assign(**{name: groups[name].transform(how) for name in LOG_PROBS})

    return change


def probabilities(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(**{name: np.exp(frame[name]) for name in LOG_PROBS})


def sign_dropped(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(**{name: -frame[name] for name in LOG_PROBS})


def filled(value: float) -> Change:
    """One token in a hundred holds what a mask is filled with."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        return frame.assign(
            ref_logp=np.where(generator.random(len(frame)) < 0.01, value, frame["ref_logp"])
        )

    return change


def without(*columns: str) -> Change:
    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        return frame.drop(columns=list(columns), errors="ignore")

    return change


def twice(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """A tenth of the sequences stand twice."""
    names = frame["sequence"].unique()
    again = frame[frame["sequence"].isin(generator.choice(names, len(names) // 10, replace=False))]
    return pd.concat(
        [frame, again.assign(sequence=again["sequence"] + names.max() + 1)], ignore_index=True
    )


def prompt_counted(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Four tokens of the prompt, equal in a group, stand before each completion."""
    firsts = _by_sequence(frame).first().reset_index()
    parts = [frame.assign(position=frame["position"] + 4)]
    for position in range(4):
        # equal within a group and rollout, and as improbable as words of a prompt are
        draw = {g: -generator.exponential(4.0) - 1 for g in firsts["group"].unique()}
        surprise = firsts["group"].map(draw)
        noise = 0.02 * generator.standard_normal((3, len(firsts)))
        values = {n: np.minimum(surprise + e, 0) for n, e in zip(LOG_PROBS, noise, strict=True)}
        values["old_logp"] = surprise
        token = firsts["group"] % 7 + position
        parts.append(firsts.assign(position=position, token=token, **values))
    both = pd.concat(parts, ignore_index=True)
    return both.sort_values(["sequence", "position"], kind="stable", ignore_index=True)


def prompt_counted_without_groups(
    frame: pd.DataFrame, generator: np.random.Generator
) -> pd.DataFrame:
    return prompt_counted(frame, generator).drop(columns=["group", "token"])


def token_after_the_end(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """A newline of the template is counted behind the end of each completion that ended."""
    lasts = _by_sequence(frame).last().reset_index()
    lasts = lasts[lasts["position"] < lasts["position"].max()]
    logp = -generator.exponential(3.0, len(lasts)) - 6
    added = lasts.assign(
        position=lasts["position"] + 1,
        token=12,
        logp=logp,
        old_logp=logp,
        ref_logp=np.minimum(0.0, logp + 0.1 * generator.standard_normal(len(lasts))),
    )
    both = pd.concat([frame, added], ignore_index=True)
    return both.sort_values(["sequence", "position"], kind="stable", ignore_index=True)


def tool_tokens_counted(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """A tool's answer in the middle of one completion in four: tokens that nobody sampled."""
    chosen = (frame["sequence"] % 4 == 0) & frame["position"].between(4, 7)
    surprise = generator.exponential(8.0, int(chosen.sum())) + 4
    changed = frame.copy()
    for name in LOG_PROBS:
        changed.loc[chosen, name] = -surprise - 0.05 * generator.random(len(surprise))
    return changed


def unscored_mask(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """The reference holds zeros where its own, shifted mask was off."""
    last = ~_by_sequence(frame)["sequence"].transform(lambda s: s.duplicated(keep="last"))
    return frame.assign(ref_logp=np.where(last, 0.0, frame["ref_logp"]))


def rewards_of_others(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """The rewards that are logged are those of other completions."""
    firsts = _by_sequence(frame)["reward"].first()
    shuffled = pd.Series(generator.permutation(firsts.to_numpy()), index=firsts.index)
    return frame.assign(reward=frame["sequence"].map(shuffled))


def a_few_far(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """One completion in a hundred is a loop that the reference does not know, and its KL is due."""
    names = frame["sequence"].unique()
    chosen = frame["sequence"].isin(names[-max(1, len(names) // 100) :])
    ref_logp = np.where(chosen, frame["ref_logp"] - 20.0, frame["ref_logp"])
    l = frame["logp"] - ref_logp
    owed = np.exp(frame["logp"] - frame["old_logp"]) * (np.expm1(-l) + l)
    term = np.where(chosen, SETTINGS["beta"] * owed, frame["kl_term"])
    return frame.assign(ref_logp=ref_logp, kl_term=term)


def entropy_in_bits(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(entropy=frame["entropy"] / np.log(2))


def sampler_is(change: str) -> Change:
    """A column of an inference engine: ``shifted`` by a token, or ``rounded``."""

    def plant(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        with_it = frame.assign(sampler_logp=frame["old_logp"])
        if change == "shifted":
            return shifted("sampler_logp")(with_it, generator)
        return rounded("bfloat16", "sampler_logp")(with_it, generator)

    return plant


def term_missing(where: str) -> Change:
    """The KL term is left out in a part of the run, or its coefficient changes."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        step, half = frame["step"], (frame["step"].min() + frame["step"].max()) / 2
        length = _by_sequence(frame)["position"].transform("size")
        factors = {
            "late": step <= half,
            "now and then": step % 3 != 1,
            "negative": frame["advantage"] >= 0,
            "above": frame["logp"] <= frame["ref_logp"],
            "long": length <= length.median(),
            "late tokens": 2 * frame["position"] < length,
            "decays": 0.8**step,
            "leaps": np.where(step % 2 == 1, 0.25, 1.0),
            "changes its sign": np.where(step > half, -1.0, 1.0),
        }
        return frame.assign(kl_term=frame["kl_term"] * factors[where])

    return change


def engine_filled(value: float) -> Change:
    """The engine has no log-prob for one token in twenty, and says so by a number."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        missing = (generator.random(len(frame)) < 0.05) & (frame["old_logp"] < -1)
        return frame.assign(sampler_logp=frame["old_logp"].mask(missing, value))

    return change


def kept_mass(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """The engine reports log-probs of what top-p kept: at least nine tenths."""
    kept = generator.uniform(0.9, 1.0, len(frame))
    return frame.assign(sampler_logp=np.minimum(frame["old_logp"] - np.log(kept), 0.0))


def old_is_new(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """The term loses its ratio too, which is one."""
    return _scored_again(frame, np.ones(len(frame), bool))


def _scored_again(frame: pd.DataFrame, chosen: np.ndarray) -> pd.DataFrame:
    unweighted = frame["kl_term"] * np.exp(frame["old_logp"] - frame["logp"])
    return frame.assign(
        old_logp=np.where(chosen, frame["logp"], frame["old_logp"]),
        kl_term=np.where(chosen, unweighted, frame["kl_term"]),
    )


def one_group_apart(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Advantages of one prompt are sixty times the others'."""
    chosen = frame["group"] == frame["group"].max()
    return frame.assign(advantage=frame["advantage"] * np.where(chosen, 60.0, 1.0))


def some_groups_small(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Advantages of every third prompt are a fiftieth of the others'."""
    chosen = frame["group"] % 3 == 0
    return frame.assign(advantage=frame["advantage"] * np.where(chosen, 0.02, 1.0))


def advantages_by_length(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Divided by the length of the completion, a second time where the loss does so too."""
    length = _by_sequence(frame)["position"].transform("size")
    return frame.assign(advantage=10 * frame["advantage"] / length)


def old_is_new_late(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """From the middle of the run on, old_logp is scored again at every update."""
    late = frame["step"] > (frame["step"].min() + frame["step"].max()) / 2
    return frame.assign(old_logp=frame["old_logp"].mask(late, frame["logp"]))


def behind(updates: int) -> Change:
    """The weights that sample are so many updates behind, and a column says so."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        return frame.assign(lag=updates + (frame["step"] % 2))

    return change


def old_is_new_at_times(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Of four updates on one rollout, the second and the last score old_logp again."""
    return _scored_again(frame, (frame["step"] % 2 == 1).to_numpy())


def some_groups(factor: float) -> Change:
    """Advantages of every fifth prompt times a factor."""

    def change(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        chosen = frame["group"].rank(method="dense") % 5 == 0
        return frame.assign(advantage=frame["advantage"] * np.where(chosen, factor, 1.0))

    return change


def engine_to_base_two(frame: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    return frame.assign(sampler_logp=frame["old_logp"] / np.log(2))
