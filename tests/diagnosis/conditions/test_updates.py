"""What updates do to rewards, advantages and the KL: each threshold from both sides."""

from __future__ import annotations

import numpy as np
import pytest

from kl_term.diagnosis.conditions import updates
from kl_term.diagnosis.schema import Interval
from tests.measured import FEW, interval, measured, rollouts, said

NINETEEN = rollouts(sequences=19)


def reaching(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high)


@pytest.mark.parametrize(
    ("numbers", "evidence"),
    [
        ({}, None),
        ({"advantage_reward_correlation": -0.19}, None),
        ({"advantage_reward_correlation": -0.2}, {"correlation over sequences": -0.2}),
        ({"advantage_reward_correlation": 0.9}, None),
        ({"group_correlation": -0.5}, {"correlation within groups (one)": -0.5}),
        ({"group_correlation": 0.5}, None),
        # Groups decide where there are any.
        ({"group_correlation": 0.5, "advantage_reward_correlation": -0.9}, None),
    ],
)
def test_advantages_that_fall_where_rewards_rise(numbers, evidence):
    given = measured(numbers)
    assert (updates.advantage_sign(given) is not None) is (evidence is not None)
    if evidence is not None:
        assert said(updates.advantage_sign, given).evidence == evidence


@pytest.mark.parametrize(("sequences", "found"), [(20, True), (19, False)])
def test_correlations_need_twenty_sequences(sequences, found):
    of = rollouts(sequences=sequences)
    correlated = measured({"advantage_reward_correlation": -0.9}, of=of)
    assert (updates.advantage_sign(correlated) is not None) is found
    explained = measured({"kl_in_advantage": 0.9}, of=of)
    assert (updates.kl_rewarded(explained) is not None) is found


@pytest.mark.parametrize(
    ("response", "reach", "found"),
    [
        (-0.1, 0.01, True),
        (-0.099, 0.01, False),  # under a hundredth of the update
        (0.5, 0.01, False),  # the right sign
        (-0.5, 0.25, False),  # four standard errors are asked for
        (-0.5, 0.2, True),
    ],
)
def test_updates_that_move_tokens_against_their_advantages(response, reach, found):
    given = measured(intervals={"advantage_strength": interval(response, reach)})
    assert (updates.advantage_opposed(given) is not None) is found
    assert updates.advantage_opposed(given._replace(rollouts=FEW)) is None
    assert updates.advantage_opposed(measured()) is None
    if found:
        assert said(updates.advantage_opposed, given).evidence == {
            "response to the advantage, in standard deviations": response,
            "upper end": response + reach,
        }


@pytest.mark.parametrize(
    ("numbers", "share"),
    [
        ({}, None),
        ({"kl_in_advantage": 0.49}, None),
        ({"kl_in_advantage": 0.5}, 0.5),
        ({"kl_in_token_advantage": 0.5}, 0.5),
        ({"kl_in_advantage": -0.9, "kl_in_token_advantage": 0.75}, 0.75),
        ({"kl_in_advantage": -0.9}, None),  # a penalty, as it should be
    ],
)
def test_advantages_that_rise_with_the_kl(numbers, share):
    given = measured(numbers)
    assert (updates.kl_rewarded(given) is not None) is (share is not None)
    if share is not None:
        assert said(updates.kl_rewarded, given).evidence == {
            "share of the advantage beyond the reward that the KL explains": share
        }


def pushed(
    strength: float = 0.2,
    low: float = 0.0625,
    *,
    growth: float | None = None,
    reward: Interval | None = None,
    last: float = 0.05,
    numbers=None,
    **given,
):
    """Updates go away from the reference by so many standard deviations."""
    intervals = {"pull_strength": reaching(strength, low, 9.0), "pull": interval(0.375)}
    if reward is not None:
        intervals["reward_growth"] = reward
    return measured(
        (numbers or {}) | ({} if growth is None else {"kl_growth": growth}),
        intervals=intervals,
        by_step=(0.0, 0.0, last),
        **given,
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (measured(), False),
        (pushed(0.1), True),
        (pushed(0.099), False),
        (pushed(-0.5, -0.9), False),
        (pushed(low=0.0), False),
        (pushed(low=0.001), True),
        (pushed(of=FEW), False),
        (pushed(growth=1.0), False),  # and does not get away
        (pushed(growth=1.1), True),
        (pushed(numbers={"term_size": 0.5}), False),  # the column of the term says its sign
        (pushed(kl={"estimator": "none"}), False),
        (pushed(kl={"estimator": "k2"}), True),
    ],
)
def test_updates_that_push_away(given, found):
    assert (updates.kl_maximised(given) is not None) is found


RISES, MAY_RISE = reaching(0.25, 0.125, 0.375), reaching(0.25, 0.0, 0.5)
MAY_FALL, FALLS = reaching(-0.5, -0.75, 0.0), reaching(-0.5, -0.6, -0.375)


@pytest.mark.parametrize(
    ("given", "severity"),
    [
        (pushed(0.9), "note"),  # without rewards nobody can tell
        (pushed(0.9, reward=RISES, growth=9.0), "note"),  # for which the policy drifts
        (pushed(0.3, reward=MAY_RISE, growth=3.0), "error"),
        (pushed(0.29, reward=MAY_RISE, growth=3.0), "note"),  # faint
        (pushed(0.3, reward=MAY_RISE, growth=2.9), "warning"),  # the KL does not multiply
        (pushed(0.3, reward=MAY_RISE, growth=3.0, last=0.049), "warning"),  # and stays small
        (pushed(0.3, reward=MAY_RISE), "warning"),
        (pushed(0.2, reward=FALLS), "error"),
        (pushed(0.2, reward=reaching(-0.5, -0.75, -0.25)), "note"),  # four errors are asked for
        (pushed(0.2, reward=reaching(0.5, 0.45, 0.55)), "note"),  # it clearly rises
        (pushed(0.2, reward=MAY_FALL), "note"),
    ],
)
def test_a_push_is_an_error_where_no_reward_drives_it(given, severity):
    assert said(updates.kl_maximised, given).severity == severity


def test_what_a_push_says():
    shown = {
        "pull per nat (negative: towards the reference)": 0.375,
        "in standard deviations": 0.2,
        "lower end": 0.0625,
    }
    grown = {"KL, last third of the steps over the first": 2.0}
    rewards = {"reward, last third minus first": 0.25, "lower end of that": 0.125}
    assert said(updates.kl_maximised, pushed()).evidence == shown
    assert said(updates.kl_maximised, pushed(growth=2.0)).evidence == shown | grown
    assert said(updates.kl_maximised, pushed(reward=RISES)).evidence == shown | rewards


@pytest.mark.parametrize(
    ("kl", "weighting"),
    [
        (None, None),
        ({"estimator": "k1"}, "none"),
        ({"estimator": "k1", "weighting": "detached"}, "detached"),
        ({"estimator": "k1", "weighting": "attached"}, None),
        ({"estimator": "k1", "placement": "reward"}, None),
        ({"estimator": "k2"}, None),
    ],
)
def test_k1_in_the_loss(kl, weighting):
    given = measured(kl=kl)
    if weighting is None:
        assert updates.k1_in_loss(given) is None
    else:
        assert said(updates.k1_in_loss, given).evidence == {"weighting": weighting}


@pytest.mark.parametrize(
    ("kl", "estimator"),
    [
        (None, None),
        ({"estimator": "k2", "placement": "reward"}, "k2"),
        ({"estimator": "k3", "placement": "reward"}, "k3"),
        ({"estimator": "k1", "placement": "reward"}, None),
        ({"estimator": "k3"}, None),
    ],
)
def test_k2_and_k3_in_the_reward(kl, estimator):
    given = measured(kl=kl)
    if estimator is None:
        assert updates.penalty_in_reward(given) is None
    else:
        found = said(updates.penalty_in_reward, given)
        assert found.title == f"{estimator} in the reward is the gradient of no KL"
        assert found.evidence == {"estimator": estimator}


TOWARDS, IDLE = reaching(-0.5, -0.6, -0.1), reaching(-0.5, -0.6, -0.09)


@pytest.mark.parametrize(
    ("push", "high", "pull", "severity"),
    [
        (-0.2, -0.001, TOWARDS, "warning"),
        (-0.2, -0.001, IDLE, "error"),  # no pull is seen
        (-0.19, -0.001, IDLE, None),
        (-0.2, 0.0, IDLE, None),
        (0.5, 0.9, IDLE, None),
    ],
)
def test_every_sampled_token_is_pushed_down(push, high, pull, severity):
    intervals = {"push": reaching(push, -9.0, high), "pull_strength": pull}
    given = measured(intervals=intervals)
    assert updates.uniform_push(given._replace(rollouts=FEW)) is None
    for name, one in intervals.items():
        assert updates.uniform_push(measured(intervals={name: one})) is None
    if severity is None:
        assert updates.uniform_push(given) is None
        return
    found = said(updates.uniform_push, given)
    assert found.severity == severity
    begins = "That is what k1 as a loss does" if severity == "error" else "Advantages may be off"
    assert found.advice.startswith(begins)
    assert found.evidence == {
        "push in standard deviations": push,
        "upper end": high,
        "pull in standard deviations": -0.5,
    }


#: Rewards of the tokens, of standard deviation 1/2: a gain below 1/20 is none.
REWARDED = rollouts(reward=(np.arange(200) % 2).astype(float))


def grown(growth: float = 3.0, reward: Interval | None = None, *, kl=(0.0, 0.0, 0.05), **given):
    return measured(
        {"kl_growth": growth},
        by_step=kl,
        intervals={} if reward is None else {"reward_growth": reward},
        of=REWARDED,
        **given,
    )


@pytest.mark.parametrize(
    ("given", "severity"),
    [
        (measured(by_step=(0.0, 0.0, 9.0)), None),
        (grown(), "note"),
        (grown(2.9), None),
        (grown(kl=(9.0, 9.0, 0.049)), None),
        (grown(kl=(9.0, 9.0, 9.0, 9.0, 0.05, 0.05)), "note"),
        (grown(kl=(9.0, 9.0, 9.0, 9.0, 0.05, 0.04)), None),  # the mean of two steps of six
        (grown(kl=(9.0, 9.0)), None),  # no third of the steps
        (grown(reward=reaching(0.01, -0.5, 0.5)), None),  # the reward grows
        (grown(reward=reaching(0.0, -0.5, 0.049)), "warning"),
        (grown(reward=reaching(-0.1, -0.5, 0.05)), "note"),  # it may
    ],
)
def test_a_kl_that_grows_for_no_reward(given, severity):
    assert (updates.kl_without_reward(given) is not None) is (severity is not None)
    if severity is not None:
        assert said(updates.kl_without_reward, given).severity == severity


def test_what_a_kl_without_reward_says():
    shown = {"KL, last third of the steps over the first": 4.0, "KL in the last third": 0.25}
    kl = (9.0, 9.0, 9.0, 9.0, 0.125, 0.375)
    unknown = said(updates.kl_without_reward, grown(4.0, kl=kl))
    assert unknown.evidence == shown
    assert unknown.title == "The KL grows (too few rewards are dumped to say for what)"
    flat = said(updates.kl_without_reward, grown(4.0, reaching(-0.5, -0.75, -0.25), kl=kl))
    assert flat.title == "The KL grows, the reward does not"
    assert flat.evidence == shown | {
        "reward, last third minus first": -0.5,
        "upper end of that": -0.25,
    }


@pytest.mark.parametrize(
    ("share", "severity", "title"),
    [
        (None, None, ""),
        (0.5, None, ""),
        (0.51, "note", "Most sequences have advantage zero"),
        (0.98, "note", "Most sequences have advantage zero"),
        (0.99, "error", "All sequences have advantage zero"),
    ],
)
def test_sequences_without_an_advantage(share, severity, title):
    given = measured({} if share is None else {"zero_advantage_share": share})
    if severity is None:
        assert updates.no_signal(given) is None
        return
    found = said(updates.no_signal, given)
    assert (found.severity, found.title) == (severity, title)
    assert found.evidence == {"share of sequences": share}


@pytest.mark.parametrize(
    ("turned", "following", "found"), [(3, 4, True), (2, 9, False), (4, 4, False)]
)
def test_advantages_that_fall_with_the_rewards_of_some_groups(turned, following, found):
    numbers = {"groups_reversed": turned, "groups_following": following, "group_correlation": 0.25}
    given = measured(numbers)
    assert (updates.advantage_sign(given) is not None) is found
    if found:
        shown = said(updates.advantage_sign, given)
        assert shown.title.endswith("in some of the groups") and shown.severity == "error"
        assert shown.evidence == {
            "correlation within groups (one)": 0.25,
            "groups in which it is minus one": turned,
            "in which it is one": following,
        }


@pytest.mark.parametrize(("share", "found"), [(0.94, True), (0.95, False)])
def test_an_update_that_is_taken_back_is_not_against_the_advantage(share, found):
    response = {"advantage_strength": interval(-0.5)}
    given = measured({"rescored_share": share}, intervals=response)
    assert (updates.advantage_opposed(given) is not None) is found
