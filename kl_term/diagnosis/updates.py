"""What the updates did: where the KL goes over steps, and whether its term pulls or pushes."""

from __future__ import annotations

import math

import numpy as np

from kl_term.diagnosis.schema import Floats, Interval, Rollouts, Settings, StepKL
from kl_term.diagnosis.statistics import token_means
from kl_term.diagnosis.writable import tensor_of
from kl_term.kl.estimators import k3

#: A plot and a table of more steps than this are unreadable: they are pooled into runs of steps.
MOST_STEPS = 40
#: Fewer prompts make a bootstrap interval an anecdote.
FEWEST_PROMPTS = 5
#: Trainers number their steps from 0 or from 1.
LAST_FIRST_STEP = 1
#: Size of a log-ratio of equal weights in float32, with room.
AT_REFERENCE = 1e-4


def kl_by_step(rollouts: Rollouts) -> list[StepKL]:
    """Means of k1 and k3 over the tokens of each step (pooled above 40 steps)."""
    if rollouts.step is None:
        return []
    steps, index = np.unique(rollouts.step, return_inverse=True)
    if len(steps) > MOST_STEPS:
        pool = np.arange(len(steps)) * MOST_STEPS // len(steps)
        steps, index = steps[np.diff(pool, prepend=-1) > 0], pool[index]
    count = np.bincount(index)
    log_ratio = rollouts.logp - rollouts.ref_logp
    value = k3(tensor_of(rollouts.logp), tensor_of(rollouts.ref_logp)).numpy()
    k1_mean = np.bincount(index, weights=log_ratio) / count
    k3_mean = np.bincount(index, weights=value) / count
    return [
        StepKL(step=int(s), tokens=int(n), k1=float(a), k3=float(b))
        for s, n, a, b in zip(steps, count, k1_mean, k3_mean, strict=True)
    ]


def start(rollouts: Rollouts) -> dict[str, float]:
    """Half the mean squared log-ratio to the reference before the first update, if dumped.

    And ``start_move``, the median size of logp - old_logp there, where the policy still is the
    reference to rounding: then no update lies between the two.
    """
    if rollouts.step is None or rollouts.step.min() > LAST_FIRST_STEP:
        return {}
    first = rollouts.step == rollouts.step.min()
    log_ratio = (rollouts.old_logp - rollouts.ref_logp)[first]
    found = {"kl_at_start": float(np.mean(log_ratio**2) / 2)}
    away = np.abs(rollouts.logp - rollouts.ref_logp)
    moves = not first.all() and np.median(away[~first]) > AT_REFERENCE  # is no copy of the policy
    if moves and np.median(away[first]) < AT_REFERENCE:
        found["start_move"] = float(np.median(np.abs(rollouts.logp - rollouts.old_logp)[first]))
    return found


def growth(by_step: list[StepKL]) -> dict[str, float]:
    """KL by k3 in the last third of the steps over that in the first third."""
    if len(by_step) < 3:
        return {}
    third = len(by_step) // 3
    first = np.mean([step.k3 for step in by_step[:third]])
    last = np.mean([step.k3 for step in by_step[-third:]])
    return {"kl_growth": float(last / first)} if first > 0 else {}


def reward_growth(rollouts: Rollouts, settings: Settings) -> dict[str, Interval]:
    """Mean reward of the sequences in the last third of the steps minus that in the first third.

    Completions of one prompt are alike, so prompts are resampled where groups are dumped; nothing
    with fewer than five on either side.
    """
    if rollouts.step is None or rollouts.reward is None:
        return {}
    steps = np.unique(rollouts.step)
    if len(steps) < 3:
        return {}
    third = len(steps) // 3
    early = _mean_reward(rollouts, rollouts.step <= steps[third - 1], settings)
    late = _mean_reward(rollouts, rollouts.step >= steps[-third], settings)
    if early is None or late is None:
        return {}
    growth = late.value - early.value
    return {
        "reward_growth": Interval(
            value=growth,
            low=growth - math.hypot(late.value - late.low, early.high - early.value),
            high=growth + math.hypot(late.high - late.value, early.value - early.low),
        )
    }


def _mean_reward(rollouts: Rollouts, chosen: np.ndarray, settings: Settings) -> Interval | None:
    sequence, unit = rollouts.sequence[chosen], rollouts.by_prompt[chosen]
    prompts, unit = np.unique(unit, return_inverse=True)
    if len(prompts) < FEWEST_PROMPTS:
        return None
    weight = 1.0 / np.bincount(sequence)[sequence]
    reward = {"reward": rollouts.reward[chosen]}
    return token_means(reward, unit.ravel(), weight=weight, **settings.bootstrap)["reward"]


def update_response(rollouts: Rollouts, settings: Settings) -> dict[str, Interval]:
    r"""How the update moved the sampled tokens, given their advantage.

    .. math:: \rho_i - 1 \approx a + b A_i + s\, l_i^{\mathrm{old}}, \qquad
        \rho = \pi_\theta / \pi_{\mathrm{old}}, \quad
        l^{\mathrm{old}} = \log \pi_{\mathrm{old}} - \log \pi_{\mathrm{ref}}

    A term that pulls towards the reference gives :math:`s < 0`, one with the wrong sign
    :math:`s > 0`. k1 as a loss pushes every sampled token down, rare ones most: :math:`a < 0`, and
    :math:`s` is negative where the policy is flatter than its reference, positive where sharper.

    Equation: ``update_response``

    Returns:
        ``pull`` (s, per nat) and ``advantage_response`` (b), both also in standard deviations as
        ``pull_strength`` and ``advantage_strength``; ``push`` (a, in standard deviations of
        :math:`\rho - 1`); nothing if no update lies between the two policies.
    """
    log_ratio = rollouts.old_logp - rollouts.ref_logp
    log_ratio -= log_ratio.mean()
    move = rollouts.logp - rollouts.old_logp
    move = np.expm1(np.minimum(move, 50.0, out=move), out=move)
    spread = move.std()
    if not (rollouts.has_old_logp and log_ratio.std() > 0 and spread > 0):
        return {}
    columns = {"pull": log_ratio}
    if rollouts.advantage is not None and rollouts.advantage.std() > 0:
        columns["advantage_response"] = rollouts.advantage
    found = {}
    for name, column in columns.items():
        others = [other for key, other in columns.items() if key != name]
        own, rest = _residual(column, others), _residual(move, others)
        found[name] = _slope(own, rest, rollouts, settings)
        del own, rest
    for name, column in columns.items():
        scale = float(column.std() / spread)
        ends = {end: value * scale for end, value in found[name]}
        found[f"{name.removesuffix('_response')}_strength"] = Interval(**ends)
    push = _residual(move, list(columns.values()), keep_mean=True)
    push /= spread
    return found | token_means({"push": push}, rollouts.by_prompt, **settings.bootstrap)


def advantage_signs(rollouts: Rollouts) -> dict[str, float]:
    r"""Per sequence: how advantage follows reward, and what the KL adds to it.

    Returns:
        ``advantage_reward_correlation``; ``kl_in_advantage`` (share of the advantage's variance
        not explained by the reward that the sequence's KL explains, with the sign of its effect);
        ``kl_in_token_advantage`` (the same within sequences, where advantages differ by token, with
        whichever credit explains more); ``zero_advantage_share``.
    """
    if rollouts.advantage is None:
        return {}
    advantage = rollouts.means(rollouts.advantage)
    zero = rollouts.sums(rollouts.advantage != 0) == 0
    found = {"zero_advantage_share": float(zero.mean())} | _within_sequences(rollouts)
    if rollouts.reward is None or rollouts.sequences < 10:
        return found
    reward = rollouts.means(rollouts.reward)
    kl = rollouts.sums(rollouts.old_logp - rollouts.ref_logp)
    if advantage.std() == 0 or reward.std() == 0:
        return found
    found["advantage_reward_correlation"] = float(np.corrcoef(advantage, reward)[0, 1])
    left, own = _residual(advantage, [reward]), _residual(kl, [reward])
    if left.std() > 1e-9 * advantage.std() and own.std() > 0:
        correlation = float(np.corrcoef(left, own)[0, 1])
        found["kl_in_advantage"] = correlation * abs(correlation)
    return found


def _within_sequences(rollouts: Rollouts) -> dict[str, float]:
    """How the log-ratio, a token's own or that to go, enters advantages that differ by token."""

    def centred(values: Floats) -> Floats:
        return values - rollouts.means(values)[rollouts.sequence]

    advantage = centred(rollouts.advantage)
    own = rollouts.old_logp - rollouts.ref_logp
    running = np.cumsum(own)
    to_go = running[rollouts.last][rollouts.sequence] - running + own
    if advantage.std() <= 1e-6 * max(1.0, rollouts.advantage.std()) or own.std() == 0:
        return {}
    correlations = [np.corrcoef(advantage, centred(credit))[0, 1] for credit in (own, to_go)]
    strongest = float(max(correlations, key=abs))
    return {"kl_in_token_advantage": strongest * abs(strongest)}


def _residual(values: Floats, others: list[Floats], *, keep_mean: bool = False) -> Floats:
    """What a least-squares fit on ``others`` and a constant leaves; with the constant, if kept."""
    mean = values.mean()
    rest = values - mean
    centred = [other - other.mean() for other in others]
    gram = np.array([[one @ other for other in centred] for one in centred])
    shared = np.array([one @ rest for one in centred])
    weights = np.linalg.lstsq(gram, shared, rcond=None)[0] if others else []
    for other, around, weight in zip(others, centred, weights, strict=True):
        rest -= weight * around
        mean -= weight * other.mean()
    return rest + mean if keep_mean else rest


def _slope(own: Floats, rest: Floats, rollouts: Rollouts, settings: Settings) -> Interval:
    """Of ``rest`` on ``own``; both are overwritten."""
    slope = np.divide(rest, own, out=rest, where=own != 0)
    weight = np.square(own, out=own)
    return token_means({"slope": slope}, rollouts.by_prompt, weight=weight, **settings.bootstrap)[
        "slope"
    ]
