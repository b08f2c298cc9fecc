"""What completions of one prompt say beside each other: each threshold from both sides."""

from __future__ import annotations

import pytest

from kl_term.diagnosis import groups
from tests.measured import FEW, interval, measured, said


@pytest.mark.parametrize(("share", "found"), [(None, False), (0.5, False), (0.51, True)])
def test_one_log_prob_throughout_a_sequence(share, found):
    given = measured({} if share is None else {"one_value_share": share})
    assert (groups.sequence_sums(given) is not None) is found
    assert groups.sequence_sums(given._replace(rollouts=FEW)) is None
    if found:
        assert said(groups.sequence_sums, given).evidence == {"share of sequences": share}


@pytest.mark.parametrize(
    ("share", "count", "shared", "copies", "prompt"),
    [
        (0.0, 0, 2.9, False, False),
        (0.0, 0, 3.0, False, True),
        (0.01, 3, 0.0, True, False),
        (0.009, 3, 0.0, False, False),
        (0.01, 2, 0.0, False, False),  # a logger's retry
        (0.01, 3, 3.0, False, True),  # the prompt's tokens make short answers improbable
        (0.01, 3, 2.9, True, False),
        (0.5, 9, 9.0, True, False),  # whole copies, which begin alike, too
        (0.49, 9, 9.0, False, True),
    ],
)
def test_copies_are_told_from_a_counted_prompt(share, count, shared, copies, prompt):
    numbers = {"copied_share": share, "copied_sequences": float(count), "shared_start": shared}
    given = measured(numbers)
    assert (groups.duplicates(given) is not None) is copies
    assert (groups.counted_prompt(given) is not None) is prompt
    if copies:
        assert said(groups.duplicates, given).evidence == {
            "share of completions with a copy, beyond chance": share,
            "sequences": count,
        }
    if prompt:
        assert said(groups.counted_prompt, given).evidence == {
            "nats a group by which its completions begin alike": shared
        }


def test_without_groups_copies_are_found_and_no_prompt():
    copied = {"copied_share": 0.01, "copied_sequences": 3.0}
    assert groups.duplicates(measured(copied)) is not None
    assert groups.duplicates(measured()) is None and groups.counted_prompt(measured()) is None


@pytest.mark.parametrize(
    ("share", "count", "found"), [(0.5, 20, True), (0.49, 20, False), (0.5, 19, False)]
)
def test_an_end_is_one_token_or_two_or_three(share, count, found):
    numbers = {"ends_otherwise": share, "different_ends": 17.0, "early_ends_with_token": count}
    given = measured(numbers)
    assert (groups.missing_end(given) is not None) is found
    assert groups.missing_end(measured()) is None
    if found:
        says = said(groups.missing_end, given)
        assert says.severity == "warning"
        assert says.evidence == {
            "sequences that end before the longest": 20,
            "in so many tokens": 17,
            "share outside the three usual ones": 0.5,
        }


ROLLOUT, RUN = "a rollout's first step", "the run's first step"


@pytest.mark.parametrize(
    ("framework", "first", "start", "seen", "size"),
    [
        ("trl", 0.02, 0.0, ROLLOUT, 0.02),
        ("trl", 0.019, 0.0, None, 0.0),
        ("verl", 0.9, 0.0, None, 0.0),  # only TRL's dumps say where a rollout begins
        ("verl", 0.9, 0.02, RUN, 0.02),
        ("verl", 0.9, 0.019, None, 0.0),
        ("trl", 0.5, 0.25, ROLLOUT, 0.5),
        ("trl", 0.25, 0.5, RUN, 0.5),
        ("trl", 0.5, 0.5, ROLLOUT, 0.5),
    ],
)
def test_two_scores_of_one_policy_agree(framework, first, start, seen, size):
    given = measured({"first_move": first, "start_move": start}, framework=framework)
    assert (groups.scored_twice(given) is not None) is (seen is not None)
    assert groups.scored_twice(measured(framework=framework)) is None
    if seen is not None:
        assert said(groups.scored_twice, given).evidence == {
            "usual |logp - old_logp| where no update lies between": size,
            "seen at": seen,
        }


@pytest.mark.parametrize(
    ("least", "most", "reach", "found"),
    [
        (0.0, 0.1, 0.01, True),
        (0.0, -0.1, 0.01, True),
        (0.0, 1.0, 0.01, True),
        (0.0, 0.099, 0.01, False),  # a twentieth of the entropy, which is two nats
        (0.0, 0.5, 0.25, False),  # four standard errors are asked for
        (0.25, 0.75, 0.01, True),
        (-0.25, -0.75, 0.01, True),
        (0.26, 0.75, 0.01, False),  # rows without padding are off as well
        (-0.26, 0.75, 0.01, False),
    ],
)
def test_rows_with_padding_are_off_and_others_are_not(least, most, reach, found):
    gaps = {"unpadded_gap": interval(least), "padded_gap": interval(most, reach)}
    given = measured({"entropy": 2.0}, intervals=gaps)
    assert (groups.padded_positions(given) is not None) is found
    for name in gaps:
        one = measured({"entropy": 2.0}, intervals={name: gaps[name]})
        assert groups.padded_positions(one) is None
    if found:
        assert said(groups.padded_positions, given).evidence == {
            "mean of -log p minus the entropy, padded most": most,
            "padded least": least,
        }


@pytest.mark.parametrize(
    ("correlation", "sequences", "unrelated", "turned"),
    [
        (0.49, 36, True, False),
        (0.5, 36, False, False),
        (0.39, 25, True, False),
        (0.41, 25, False, False),  # within three errors of one
        (-0.49, 36, True, False),
        (-0.5, 36, False, True),  # that is a sign, and no shuffle
        (0.9, 10_000, False, False),
    ],
)
def test_advantages_follow_the_rewards_of_their_group(correlation, sequences, unrelated, turned):
    numbers = {"group_correlation": correlation, "group_correlation_sequences": float(sequences)}
    given = measured(numbers)
    assert (groups.advantage_unrelated(given) is not None) is unrelated
    assert groups.advantage_reversed(given) is turned
    off = measured(numbers | {"group_offset": 0.5, "mean_advantage": 0.0})
    assert (groups.advantage_off_centre(off) is None) is (unrelated or turned)
    if unrelated:
        assert said(groups.advantage_unrelated, given).evidence == {
            "correlation with the reward within groups (one)": correlation
        }


def test_without_groups_nothing_is_said_of_their_advantages():
    for condition in (groups.advantage_unrelated, groups.advantage_off_centre, groups.groups_apart):
        assert condition(measured()) is None
    assert not groups.advantage_reversed(measured())


def test_groups_on_another_scale_are_counted():
    assert groups.groups_apart(measured({"groups_apart": 0.0, "groups_apart_share": 0.0})) is None
    found = said(groups.groups_apart, measured({"groups_apart": 1.0, "groups_apart_share": 0.125}))
    assert found.severity == "warning"
    assert found.evidence == {"groups on another scale": 1, "their share": 0.125}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "A constant is left"),
        ({"group_offset": 0.1}, "A constant is left"),
        ({"group_offset": 0.099}, None),
        ({"advantage_is_reward": 1.0}, "They are the rewards themselves"),
        ({"advantage_is_reward": 0.0}, "A constant is left"),
        ({"group_offset_by_length": 0.019}, "They are divided by the length"),
        ({"group_offset_by_length": 0.02}, "A constant is left"),
        ({"group_offset_over_length": 0.019}, "They are multiplied by the length"),
        ({"group_offset_over_length": 0.02}, "A constant is left"),
        ({"group_offset": 0.01, "group_offset_over_length": 9e-5}, "They are multiplied by the"),
        ({"group_offset": 0.01, "group_offset_by_length": 9e-5}, "They are divided by the length"),
        ({"group_offset": 0.01, "group_offset_by_length": 1e-4}, None),
        ({"group_offset": 0.009, "group_offset_by_length": 0.0}, None),
        ({"mean_advantage": 0.099}, "They are centred over the batch"),
        ({"mean_advantage": -0.099}, "They are centred over the batch"),
        ({"mean_advantage": -0.1}, "A constant is left"),
    ],
)
def test_why_advantages_do_not_sum_to_zero(changes, advice):
    numbers = {"group_offset": 0.5, "mean_advantage": 0.25} | changes
    given = measured(numbers)
    if advice is None:
        assert groups.advantage_off_centre(given) is None
        return
    found = said(groups.advantage_off_centre, given)
    assert found.advice.startswith(advice)
    assert found.evidence == {
        "spread of the groups' means over that of the advantages (zero)": numbers["group_offset"],
        "mean of all": numbers["mean_advantage"],
    }


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ({"group_correlation_lowest_bound": 0.49}, True),
        ({"group_correlation_lowest_bound": 0.5}, False),
        ({"group_correlation_lowest_bound": 0.1, "group_correlation": -0.5}, False),  # all reversed
        ({}, False),
    ],
)
def test_advantages_of_one_step_may_be_unrelated(numbers, found):
    lowest = {"group_correlation_lowest": -0.25, "group_correlation_lowest_step": 7.0}
    given = measured({"group_correlation": 0.75, "group_correlation_sequences": 400.0} | lowest)
    given = given._replace(numbers=given.numbers | numbers)
    assert (groups.advantage_unrelated(given) is not None) is found
    if found:
        assert said(groups.advantage_unrelated, given).evidence == {
            "correlation with the reward within groups (one)": 0.75,
            "at the step where it is lowest": -0.25,
            "which is step": 7,
        }
