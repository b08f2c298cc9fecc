"""Completions of one prompt, beside each other: copies, prompts, ends and advantages.

What is measured from the columns ``group``, ``token`` and ``padding``, and when it is a fault; what
:mod:`kl_term.diagnosis.advantages` measures, too. Every threshold has its reason beside it.
"""

from __future__ import annotations

import numpy as np

from kl_term.diagnosis.schema import Evidence, Interval, Measured, Rollouts, Settings, Shown
from kl_term.diagnosis.statistics import medians, token_means
from kl_term.diagnosis.units import codes, of_first, where_least

#: Advantages of a group are an increasing affine function of its rewards: their correlation is one,
#: and with several rewards that are normalised one by one still far above this.
FOLLOWS_REWARDS = 0.5
#: Standard errors below :data:`FOLLOWS_REWARDS` and 1 that the correlation must lie.
CLEAR = 3.0
#: Group-centred advantages have mean zero but for rounding; a tenth of their spread is an offset.
LARGEST_OFFSET = 0.1
#: A hundredth is no rounding, and a ten-thousandth is nothing else: where the advantages have the
#: first and their products or quotients with the lengths have the second, these were centred.
SMALLEST_OFFSET, NO_OFFSET = 0.01, 1e-4
#: Groups with advantages zero and rewards that differ: a filter of groups leaves none of them.
MOST_SILENCED = 0.05
#: Fewer sequences and groups say little.
FEWEST_SEQUENCES, FEWEST_GROUPS = 20, 3
#: Log-probs of one token in two rows of a batch differ by padding and kernels, by less than this.
SAME_LOGP = 5e-3
#: Nats: copies that chance makes with probability below e^-10.
SURPRISING = 10.0
#: Share of the completions that are such copies; one pair may be a logger's retry.
MOST_COPIES, FEWEST_COPIES = 0.01, 3
#: Nats a group: members that begin with the same token by chance have (n - 1) times its surprise
#: below 1/e on average.
SHARED_START = 3.0
#: Nats: log-probs of one policy at one token, written with six digits.
UNMOVED = 1e-5
#: An update sees all completions: so most have copies, and most copies have moved.
MOST_MOVED = 0.5
#: Where all begin alike, and fewer than half are whole copies, the beginning is the prompt.
MOST_WITH_A_PROMPT = 0.5
#: A vocabulary has one end token, or two or three; ends in many tokens are no ends.
MOST_ENDS_OTHERWISE, FEWEST_ENDS = 0.5, 20
#: Size of logp - old_logp at the usual token where no update lies between them. Two passes in low
#: precision give a tenth of it, dropout several times it.
LARGEST_REPEAT = 0.02
#: All but completions that hardly could be others.
RESCORED = 0.95
#: Nats over the mean entropy, as for the whole dump.
LARGEST_SURPRISE = 0.05
#: More rows than this left out of their groups were left out by choice: their tokens are selected.
MOST_LEFT_OUT = 0.02


def measure_groups(rollouts: Rollouts, settings: Settings) -> dict[str, float]:
    """What completions say beside each other: of one prompt, where groups are dumped."""
    found = _copies(rollouts) | _constant(rollouts) | _ends(rollouts)
    if rollouts.group is not None:
        found |= _starts(rollouts) | _repeats(rollouts)
    return found


def _copies(rollouts: Rollouts) -> dict[str, float]:
    """Completions that stand more often in their step than chance allows.

    Of n completions, k are one by chance with probability below n^k e^-(k-1)S if its surprise is S.

    ``copies_moved``: share of the pairs that were scored once, before an update, and now differ.
    """
    first, length = rollouts.first, rollouts.lengths
    sums, step = rollouts.sums(rollouts.old_logp), codes(of_first(rollouts.step, rollouts))
    order = np.lexsort((sums, length, step))
    one, other = order[:-1], order[1:]
    near = (length[one] == length[other]) & (step[one] == step[other])
    near &= np.abs(sums[one] - sums[other]) < SAME_LOGP * np.sqrt(length[one])
    moved = np.zeros(len(near), bool)
    for at in np.flatnonzero(near):
        a, b = (slice(first[k], first[k] + length[k]) for k in order[at : at + 2])
        apart = np.abs(rollouts.old_logp[a] - rollouts.old_logp[b]).max()
        near[at] = apart < SAME_LOGP
        moved[at] = apart < UNMOVED < np.abs(rollouts.logp[a] - rollouts.logp[b]).max()
    run = np.concatenate([[0], np.cumsum(~near)])
    times = np.bincount(run)[run]
    beside = np.bincount(step)[step[order]]
    chance = times * np.log(beside) + (times - 1) * sums[order]
    copied = (times > 1) & (chance < -SURPRISING)
    found = {"copied_share": float(copied.mean()), "copied_sequences": float(copied.sum())}
    if near.any():
        found["copies_moved"] = float(moved[near].mean())
    return found


def _constant(rollouts: Rollouts) -> dict[str, float]:
    """Share of sequences, of four tokens or more, that have one log-prob throughout."""
    long, first = rollouts.lengths >= 4, rollouts.first
    if not long.any():
        return {}
    largest, least = (f.reduceat(rollouts.logp, first) for f in (np.maximum, np.minimum))
    same = (largest - least < 1e-6) & (rollouts.logp[first] < -0.01)
    return {"one_value_share": float(same[long].mean())}


def _starts(rollouts: Rollouts) -> dict[str, float]:
    """Nats a group by which its members begin alike: (n - 1) times the surprise of that token."""
    batch = codes(*(of_first(column, rollouts) for column in (rollouts.group, rollouts.step)))
    start, count = rollouts.old_logp[rollouts.first], np.bincount(batch)
    low, high = (start[where_least(batch, sign * start)] for sign in (1, -1))
    chosen = count >= 3
    if chosen.sum() < FEWEST_GROUPS:
        return {}
    alike = (high - low < SAME_LOGP) & chosen
    return {"shared_start": float(np.where(alike, -(count - 1) * high, 0.0)[chosen].mean())}


def _repeats(rollouts: Rollouts) -> dict[str, float]:
    """Median size of logp - old_logp at the first step of a group; the median over groups."""
    if not rollouts.has_old_logp or rollouts.step is None:
        return {}
    group, step = (of_first(column, rollouts) for column in (rollouts.group, rollouts.step))
    group = codes(group)
    begins = where_least(group, step)
    at_first = (step == step[begins][group])[rollouts.sequence]
    move = np.abs(rollouts.logp - rollouts.old_logp)[at_first]
    of_token = group[rollouts.sequence][at_first]
    return {"first_move": float(np.median(medians(move, of_token, len(begins))))}


def _ends(rollouts: Rollouts) -> dict[str, float]:
    """How many sequences that end early end in a token that is not among the three usual ones."""
    early = rollouts.lengths < rollouts.lengths.max()
    if rollouts.token is None or not early.any():
        return {}
    last = rollouts.token[rollouts.last[early]]
    usual = np.sort(np.unique(last, return_counts=True)[1])[::-1][:3]
    return {
        "ends_otherwise": float(1 - usual.sum() / len(last)),
        "different_ends": float(len(np.unique(last))),
        "early_ends_with_token": float(len(last)),
    }


def padding_gap(rollouts: Rollouts, settings: Settings) -> dict[str, Interval]:
    """Surprise less entropy, of the rows with the least padding and of those with the most."""
    if rollouts.padding is None or rollouts.entropy is None:
        return {}
    low, high = np.quantile(rollouts.padding, [0.25, 0.75])
    sides = [rollouts.padding <= low, rollouts.padding >= high]
    if low == high or min(len(np.unique(rollouts.sequence[s])) for s in sides) < FEWEST_SEQUENCES:
        return {}
    surprise = -rollouts.logp - rollouts.entropy
    weight = np.exp(np.minimum(rollouts.logp - rollouts.behaviour_logp, 50.0))
    least, most = (
        token_means(
            {"gap": surprise[side]},
            codes(rollouts.by_completion[side]),
            weight=weight[side],
            **settings.bootstrap,
        )["gap"]
        for side in sides
    )
    return {"unpadded_gap": least, "padded_gap": most}


# When they are faults.


def sequence_sums(m: Measured) -> Shown | None:
    share = m.numbers.get("one_value_share", 0.0)
    return Shown({"share of sequences": share}) if share > 0.5 and m.enough else None


def duplicates(m: Measured) -> Shown | None:
    share, count = (m.numbers.get(f"copied_{name}", 0.0) for name in ("share", "sequences"))
    if share < MOST_COPIES or count < FEWEST_COPIES:
        return None
    if share < MOST_WITH_A_PROMPT and m.numbers.get("shared_start", 0.0) >= SHARED_START:
        return None  # short answers of one prompt are alike, and its tokens make them improbable
    updates = share >= MOST_MOVED < m.numbers.get("copies_moved", 0.0)
    return Shown(
        {"share of completions with a copy, beyond chance": share, "sequences": int(count)},
        "warning" if updates else None,
        case="updates" if updates else "copies",
    )


def counted_prompt(m: Measured) -> Shown | None:
    shared = m.numbers.get("shared_start", 0.0)
    if shared < SHARED_START or duplicates(m) is not None:
        return None
    return Shown({"nats a group by which its completions begin alike": shared})


def missing_end(m: Measured) -> Shown | None:
    otherwise = m.numbers.get("ends_otherwise", 0.0)
    count = m.numbers.get("early_ends_with_token", 0.0)
    if otherwise < MOST_ENDS_OTHERWISE or count < FEWEST_ENDS:
        return None
    return Shown(
        {
            "sequences that end before the longest": int(count),
            "in so many tokens": int(m.numbers["different_ends"]),
            "share outside the three usual ones": otherwise,
        }
    )


def scored_twice(m: Measured) -> Shown | None:
    """TRL's dumps say that no update lies between: they begin with a rollout's first step. So does
    any dump in whose first step the policy still is the reference, and old_logp is not. Not where
    old_logp is that of a later update to every digit.
    """
    if rescored_throughout(m):
        return None
    rollout, start = (m.numbers.get(name, 0.0) for name in ("first_move", "start_move"))
    rollout = rollout if m.settings.framework == "trl" else 0.0
    if max(rollout, start) < LARGEST_REPEAT:
        return None
    return Shown(
        {
            "usual |logp - old_logp| where no update lies between": max(rollout, start),
            "seen at": "a rollout's first step" if rollout >= start else "the run's first step",
        }
    )


def rescored_throughout(m: Measured) -> bool:
    """Is old_logp the policy's own at every step that returns to a batch?"""
    return m.numbers.get("rescored_share", 0.0) >= RESCORED


def padded_positions(m: Measured) -> Shown | None:
    least, most = (m.intervals.get(name) for name in ("unpadded_gap", "padded_gap"))
    if least is None or most is None:
        return None
    bound = LARGEST_SURPRISE * m.numbers["entropy"]
    if not most.clear_of(0.0) or abs(most.value) < bound or abs(least.value) > abs(most.value) / 3:
        return None
    return Shown(
        {"mean of -log p minus the entropy, padded most": most.value, "padded least": least.value}
    )


def advantage_unrelated(m: Measured) -> Shown | None:
    """At all steps, or clearly at one of them: a shuffle may be of some batches only."""
    found = m.numbers.get("group_correlation", 1.0)
    error = CLEAR / np.sqrt(m.numbers.get("group_correlation_sequences", 1.0))
    evidence: Evidence = {"correlation with the reward within groups (one)": found}
    if -FOLLOWS_REWARDS < found < min(FOLLOWS_REWARDS, 1.0 - error):
        return Shown(evidence)
    if m.numbers.get("group_correlation_lowest_bound", 1.0) >= FOLLOWS_REWARDS:
        return None
    if advantage_reversed(m):
        return None
    evidence["at the step where it is lowest"] = m.numbers["group_correlation_lowest"]
    evidence["which is step"] = int(m.numbers["group_correlation_lowest_step"])
    return Shown(evidence)


def groups_apart(m: Measured) -> Shown | None:
    apart, silenced = (int(m.numbers.get(f"groups_{name}", 0.0)) for name in ("apart", "silenced"))
    if apart:
        share = m.numbers["groups_apart_share"]
        return Shown({"groups on another scale": apart, "their share": share}, case="apart")
    share = m.numbers.get("groups_silenced_share", 0.0)
    if silenced < FEWEST_GROUPS or share < MOST_SILENCED:
        return None
    return Shown({"groups without advantages": silenced, "their share": share}, case="silenced")


def some_reversed(m: Measured) -> bool:
    """Do advantages fall with the rewards in some groups, and rise in most?"""
    turned, following = (m.numbers.get(f"groups_{name}", 0.0) for name in ("reversed", "following"))
    return FEWEST_GROUPS <= turned < following


def advantage_reversed(m: Measured) -> bool:
    """Do advantages fall where the rewards of their group rise?"""
    return m.numbers.get("group_correlation", 1.0) <= -FOLLOWS_REWARDS


def advantage_off_centre(m: Measured) -> Shown | None:
    offset = m.numbers.get("group_offset", 0.0)
    by, over = (m.numbers.get(f"group_offset_{how}_length", offset) for how in ("by", "over"))
    centred_once = offset >= SMALLEST_OFFSET and min(by, over) < NO_OFFSET
    if not (offset >= LARGEST_OFFSET or centred_once):
        return None
    if advantage_unrelated(m) or advantage_reversed(m):
        return None
    mean = m.numbers["mean_advantage"]
    if m.numbers.get("advantage_is_reward") == 1.0:
        case = "rewards"
    elif min(by, over) < LARGEST_OFFSET / 5:
        case = "length" if by <= over else "longer"
    else:
        case = "batch" if abs(mean) < LARGEST_OFFSET else "constant"
    return Shown(
        {
            "spread of the groups' means over that of the advantages (zero)": offset,
            "mean of all": mean,
        },
        case=case,
    )
