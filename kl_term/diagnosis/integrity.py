"""Whether the columns can be what they say: rounding, alignment, padding, impossible tokens."""

from __future__ import annotations

import math

import numpy as np
import torch

from kl_term.diagnosis.schema import Floats, Rollouts
from kl_term.diagnosis.updates import LAST_FIRST_STEP
from kl_term.diagnosis.writable import tensor_of

#: A vocabulary larger than any in use (2^18): bounds the probability of improbable tokens.
LARGEST_VOCABULARY = 262_144
#: A token this improbable (nats) is drawn with probability below V exp(-25) = 4e-6.
IMPOSSIBLE = -25.0
#: Log-probs this near a grid point, relatively, lie on it; files keep five digits or more.
_ON_GRID = 1e-5
#: Log-ratios this near a bound were clamped to it.
_AT_CLAMP = 1e-4
#: A run of equal (logp, ref_logp) at the end of a sequence at least this long is no text.
_SHORTEST_RUN = 4
#: The same of tokens of probability one, where sequences end at different positions.
_SHORTEST_CERTAIN_RUN = 10
#: Of the runs at ends, so many are of the token that pads.
_ONE_TOKEN = 0.8
#: Log-probs nearer to zero than this are of tokens of probability one.
_CERTAIN = 1e-6
#: A token certain under one column (log-prob exactly 0) and this improbable under another (nats).
_UNCERTAIN = -1.0
#: Far from its reference a policy's mean ratio rests on a few tokens, and is anything in a sample.
_LARGEST_RATIO = 10.0
#: So many tokens of the earliest steps show whether columns belong together: three hundred tell a
#: correlation to 0.06. Later, a run that collapses looks like columns that do not.
_EARLY_TOKENS = 300
#: Bases of logarithms that are taken for e; a log-prob to base b is the natural one over ln b.
BASES = (10, 2)
#: To the right base the squared log-ratios are a fraction of what they are to the wrong one.
_LEFT_BY_A_BASE = 0.1
#: Policies that have not parted find the same tokens easy; ratios of one policy to another that
#: drew the tokens have mean one, which a temperature in the place of a base breaks.
_ALIKE, _NEAR_ONE = 0.9, 0.1
#: Values of the log-ratio at which frameworks clamp it.
CLAMPS = (10.0, 20.0)

GRIDS = ("bfloat16", "float16", "2 decimals", "3 decimals")


def grid_shares(logp: Floats) -> dict[str, float]:
    """Share of log-probs that lie on the grid of each coarse type; zeros lie on all, so are out."""
    values = logp[logp < 0]
    if not len(values):
        return {}
    shares = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        rounded = tensor_of(values).to(dtype).double().numpy()
        shares[name] = float((np.abs(values - rounded) <= _ON_GRID * np.abs(values)).mean())
    for decimals in (2, 3):
        rounded = np.round(values, decimals)
        shares[f"{decimals} decimals"] = float((np.abs(values - rounded) < 1e-9).mean())
    return shares


def on_grid(column: str, grid: str) -> str:
    """What the share of a column on a grid is called."""
    return f"grid_{column}_{grid.replace(' ', '_')}"


def rounding_noise(logp: Floats, grid: str) -> float:
    """Mean squared rounding error of a log-prob on a grid, step squared over twelve (nats^2)."""
    if grid.endswith("decimals"):
        return float(10.0 ** (-2 * int(grid[0])) / 12)
    digits = 8 if grid == "bfloat16" else 11
    values = np.abs(logp[logp < 0])
    if not len(values):
        return 0.0
    return float(np.mean(4.0 ** (np.floor(np.log2(values)) + 1 - digits)) / 12)


def alignment(rollouts: Rollouts) -> dict[str, float]:
    """Correlation of logp with another column at the same token, and one token earlier or later.

    At the earliest steps, where policies have not parted yet. Tokens that were masked when they
    were scored in one of the columns say nothing here.

    Returns:
        For ref, old and sampler, and for minus the entropy: ``aligned_*`` and ``shifted_*`` (the
        larger of both shifts), and ``expected_entropy``: what its correlation is if it is aligned,
        :math:`\\mathrm{sd}(H) / \\mathrm{sd}(\\log\\pi)`, for given a state the mean of
        :math:`-\\log \\pi` is H; for the log-probs ``ratio_*``, the mean ratio to logp, of which no
        token counts for more than ten.
    """
    unread = _masked_when_scored(rollouts) | ~_early(rollouts)
    same = (np.diff(rollouts.sequence) == 0) & ~(unread[1:] | unread[:-1])
    found = {}
    others = {
        "ref": rollouts.ref_logp,
        "old": rollouts.old_logp,
        "sampler": rollouts.sampler_logp,
        "entropy": None if rollouts.entropy is None else -rollouts.entropy,
    }
    for name, other in others.items():
        if other is None or same.sum() < 30 or np.array_equal(other, rollouts.logp):
            continue
        later = _correlation(rollouts.logp[:-1][same], other[1:][same])
        earlier = _correlation(rollouts.logp[1:][same], other[:-1][same])
        found[f"aligned_{name}"] = _correlation(rollouts.logp[:-1][same], other[:-1][same])
        found[f"shifted_{name}"] = max(later, earlier)
        if name == "entropy":
            spread = rollouts.logp[:-1][same].std()
            found["aligned_pairs"] = float(same.sum())
            found["expected_entropy"] = float(other[:-1][same].std() / spread) if spread else 0.0
            continue
        ratios = np.exp((other - rollouts.logp)[:-1][same].clip(max=math.log(_LARGEST_RATIO)))
        found[f"ratio_{name}"] = float(ratios.mean())
    return found


def bases(rollouts: Rollouts) -> dict[str, float]:
    r"""Columns whose quotient with logp is that of two bases of logarithms, at the earliest steps.

    .. math:: \log_b p = \log p / \ln b

    Returns:
        For ref, old and sampler where it is so: ``base_*``, which is b if the column is to base b,
        and -b if logp is; ``base_apart_*`` and ``base_left_*``: the mean squared log-ratio as
        dumped, and to one base (nats squared).
    """
    read = _early(rollouts) & ~_masked_when_scored(rollouts)
    logp, found = rollouts.logp[read], {}
    columns = {"ref": rollouts.ref_logp, "sampler": rollouts.sampler_logp}
    columns["old"] = rollouts.old_logp if rollouts.has_old_logp else None
    for name, column in columns.items():
        if column is None:
            continue
        other = column[read]
        apart = float(np.mean((other - logp) ** 2))
        if not apart > 0 or _correlation(other, logp) < _ALIKE:
            continue
        for base in BASES:
            for sign, policy, scaled in (
                (1, logp, other * math.log(base)),
                (-1, logp * math.log(base), other),
            ):
                left = float(np.mean((scaled - policy) ** 2))
                mean = float(np.exp(np.minimum(scaled - policy, math.log(_LARGEST_RATIO))).mean())
                if left < _LEFT_BY_A_BASE * apart and abs(mean - 1) < _NEAR_ONE:
                    found |= {
                        f"base_{name}": float(sign * base),
                        f"base_apart_{name}": apart,
                        f"base_left_{name}": left,
                    }
    return found


def constant_ends(rollouts: Rollouts) -> dict[str, float]:
    """Share of tokens in runs of bitwise equal log-probs at the ends of sequences: padding.

    Tokens of probability one under policy and reference are no evidence unless they make a run.
    Text may end in a few: unless all sequences end at one position the run must be longer.

    Returns:
        ``constant_end_share``; ``constant_inner_share``: tokens in runs elsewhere, which a policy
        that sees one token alone has as often as at the ends, and padding does not make.
    """
    equal = (
        (np.diff(rollouts.sequence) == 0)
        & (np.diff(rollouts.logp) == 0)
        & (np.diff(rollouts.ref_logp) == 0)
    )
    ends = rollouts.last
    breaks = np.flatnonzero(~np.concatenate([[False], equal]))  # first token of each run
    starts = breaks[np.searchsorted(breaks, ends, side="right") - 1]
    runs = ends - starts + 1
    certain = (rollouts.logp[starts] > -_CERTAIN) & (rollouts.ref_logp[starts] > -_CERTAIN)
    may_be_text = certain & (not _equal_ends(rollouts))
    padded = runs >= np.where(may_be_text, _SHORTEST_CERTAIN_RUN, _SHORTEST_RUN)
    if rollouts.token is not None and padded.any():  # one token pads; loops end in many
        values, times = np.unique(rollouts.token[ends[padded]], return_counts=True)
        usual = times.max() >= _ONE_TOKEN * padded.sum()
        padded &= usual & (rollouts.token[ends] == values[times.argmax()])
    every = np.diff(breaks, append=rollouts.tokens)
    inner = every[(every >= _SHORTEST_RUN) & ~np.isin(breaks, starts)]
    return {
        "constant_end_share": float(runs[padded].sum() / rollouts.tokens),
        "constant_inner_share": float(inner.sum() / rollouts.tokens),
    }


def _equal_ends(rollouts: Rollouts) -> bool:
    last = rollouts.position[rollouts.last]
    return len(last) > 1 and bool((last == last[0]).all())


def impossible_tokens(rollouts: Rollouts) -> dict[str, float]:
    r"""Share of counted tokens that the sampler cannot have drawn.

    .. math:: \Pr_{a \sim \mu}\big[\log \mu(a) < -x\big] \le V e^{-x}

    Equation: ``impossible_tokens``
    """
    impossible = rollouts.behaviour_logp < IMPOSSIBLE
    return {
        "impossible_share": float(impossible.mean()),
        "equal_ends": float(_equal_ends(rollouts)),
    }


def sequence_ends(rollouts: Rollouts) -> dict[str, float]:
    r"""How surprising the last tokens are of the sequences that end before the longest does.

    If they were sampled, they ended their sequences, and over all counted tokens

    .. math:: \mathbb{E}\Big[\sum_{\text{ends}} \frac{1}{\mu(a)}\Big] \le N,
        \qquad\text{so}\quad \mathbb{E}_{\text{ends}}[-\log \mu(a)] \le \log \frac{N}{\#\text{ends}}

    since a state ends its sequence with probability :math:`\mu(a)` of its one end token.

    Returns:
        ``end_surprise`` (mean, nats) and ``end_surprise_bound``; nothing if all end together. With
        a column of tokens ``ends_alike_share``: of these ends, the share in the usual end token;
        ``ends_twice_share``: of those, the share before which it stands too.
    """
    early = rollouts.lengths < rollouts.lengths.max()
    if not early.any():
        return {}
    ends = rollouts.last[early]
    found = {
        "end_surprise": float(-rollouts.behaviour_logp[ends].mean()),
        "end_surprise_bound": float(np.log(rollouts.tokens / len(ends))),
        "early_ends": float(len(ends)),
    }
    if rollouts.token is None:
        return found
    values, times = np.unique(rollouts.token[ends], return_counts=True)
    alike = ends[rollouts.token[ends] == values[times.argmax()]]
    before = np.maximum(alike - 1, 0)
    twice = rollouts.token[before] == rollouts.token[alike]
    twice &= rollouts.sequence[before] == rollouts.sequence[alike]
    twice &= before < alike
    return found | {
        "ends_alike_share": len(alike) / len(ends),
        "ends_twice_share": float(twice.mean()),
    }


def masked_when_scored(rollouts: Rollouts) -> dict[str, float]:
    """Tokens of the earliest steps with log-prob zero in one column and far from it in another."""
    masked = _masked_when_scored(rollouts)[_early(rollouts)]
    return {
        "masked_when_scored_share": float(masked.mean()),
        "masked_when_scored_tokens": float(masked.sum()),
    }


def _early(rollouts: Rollouts) -> np.ndarray:
    """Tokens of the earliest steps, where policies have not parted yet; without steps, all."""
    if rollouts.step is None:
        return np.ones(rollouts.tokens, bool)
    steps = np.sort(rollouts.step)
    return rollouts.step <= steps[min(_EARLY_TOKENS, len(steps)) - 1]


def _masked_when_scored(rollouts: Rollouts) -> np.ndarray:
    columns = np.stack([rollouts.logp, rollouts.old_logp, rollouts.ref_logp])
    masked = (columns == 0).any(0) & (columns.min(0) < _UNCERTAIN)
    if rollouts.step is not None and rollouts.step.min() > LAST_FIRST_STEP:
        masked &= (columns[:2] != 0).any(0)  # later on, the policy may have become certain
    return masked


def clamped_log_ratios(rollouts: Rollouts) -> dict[str, float]:
    """Share of tokens whose log-ratio sits exactly at a framework's clamp: dumped after it."""
    size = np.abs(rollouts.logp - rollouts.ref_logp)
    at = sum((np.abs(size - bound) < _AT_CLAMP).mean() for bound in CLAMPS)
    return {"clamped_share": float(at)}


def _correlation(x: Floats, y: Floats) -> float:
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
