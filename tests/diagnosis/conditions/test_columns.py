"""Where columns are said not to be what they say: each threshold from both sides."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kl_term.diagnosis.conditions import columns
from tests.measured import FEW, interval, measured, rollouts, said

THREE, TWO = 3 / 200, 2 / 200  # of the 200 tokens of a dump


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ({}, False),
        ({"constant_end_share": 0.02}, False),
        ({"constant_end_share": 0.021}, True),
        ({"constant_end_share": 0.05, "constant_inner_share": 0.05}, False),  # so are all runs
        ({"constant_end_share": 0.05, "constant_inner_share": 0.04}, True),
        ({"equal_ends": 1.0}, False),
        ({"impossible_share": TWO, "equal_ends": 1.0}, False),
        ({"impossible_share": THREE, "equal_ends": 1.0}, True),
        ({"impossible_share": THREE}, False),  # no padding, where sequences end apart
    ],
)
def test_padding_is_constant_or_impossible_at_one_end(numbers, found):
    assert (columns.counted_padding(measured(numbers)) is not None) is found


@pytest.mark.parametrize(("ends", "word"), [(0.0, "no"), (1.0, "yes")])
def test_what_counted_padding_says(ends, word):
    numbers = {"constant_end_share": 0.25, "impossible_share": 0.125, "equal_ends": ends}
    assert said(columns.counted_padding, measured(numbers)).evidence == {
        "share in constant runs at sequence ends": 0.25,
        "share of tokens the sampler cannot have drawn": 0.125,
        "all sequences end at one position": word,
    }


@pytest.mark.parametrize(
    ("tokens", "share", "ends", "found"),
    [
        (200, 0.0, 0.0, False),
        (200, TWO, 0.0, False),  # a glitch
        (200, THREE, 0.0, True),
        (200, THREE, 1.0, False),  # padding
        (40_000, 1e-4, 0.0, False),  # four, and within 25 times what chance gives
        (40_000, 1.01e-4, 0.0, True),
    ],
)
def test_three_impossible_tokens_are_a_pattern(tokens, share, ends, found):
    of = rollouts(sequences=25, length=tokens // 25)
    given = measured({"impossible_share": share, "equal_ends": ends}, of=of)
    assert (columns.impossible_tokens(given) is not None) is found


def test_what_impossible_tokens_say():
    """The bound is that of a vocabulary of 2^18: V exp(-25)."""
    found = said(columns.impossible_tokens, measured({"impossible_share": 0.25}))
    assert found.evidence == {
        "share below -25 nats": 0.25,
        "largest possible share": pytest.approx(2**18 / math.e**25, rel=1e-12),
    }


@pytest.mark.parametrize("name", ["ref", "old", "sampler"])
@pytest.mark.parametrize(
    ("aligned", "shifted", "found"),
    [
        (0.25, 0.5, False),
        (0.25, 0.51, True),
        (0.5, 0.7, False),
        (0.5, 0.71, True),
        (None, 0.9, False),
        (0.25, None, False),
    ],
)
def test_another_column_correlates_better_one_token_away(name, aligned, shifted, found):
    numbers = {f"aligned_{name}": aligned, f"shifted_{name}": shifted}
    given = measured({key: value for key, value in numbers.items() if value is not None})
    assert (columns.misaligned(given) is not None) is found
    if found:
        says = said(columns.misaligned, given)
        assert says.title == f"The {name} log-probs are those of a neighbouring token"
        assert says.evidence == {
            "correlation as dumped": aligned,
            "one token later or earlier": shifted,
        }


#: Where the entropy is the next token's: with 64 pairs a correlation is known to 1/8, 4 x that 1/2.
NEIGHBOURS = {
    "aligned_entropy": 0.25,
    "shifted_entropy": 0.875,
    "aligned_pairs": 64.0,
    "expected_entropy": 0.875,
}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"expected_entropy": 0.75}, True),
        ({"expected_entropy": 0.74}, False),  # within four errors of what it should be
        ({"shifted_entropy": 0.76}, True),
        ({"shifted_entropy": 0.75}, False),  # four errors better, and no more
        ({"aligned_pairs": 65.0, "shifted_entropy": 0.75}, True),
        ({"aligned_pairs": 1e6, "shifted_entropy": 0.45}, False),  # a fifth better
        ({"aligned_pairs": 1e6, "shifted_entropy": 0.46}, True),
    ],
)
def test_an_entropy_may_be_that_of_the_next_token(changes, found):
    assert (columns.misaligned(measured(NEIGHBOURS | changes)) is not None) is found
    assert columns.misaligned(measured(NEIGHBOURS | changes, of=FEW)) is None


def test_what_the_entropy_of_a_neighbour_says():
    found = said(columns.misaligned, measured(NEIGHBOURS))
    assert found.title == "The policy's own log-probs are those of a neighbouring token"
    assert found.evidence == {
        "correlation of -log p with the entropy, as dumped": 0.25,
        "one token later or earlier": 0.875,
    }


@pytest.mark.parametrize("name", ["ref", "old", "sampler"])
@pytest.mark.parametrize(
    ("aligned", "ratio", "found"),
    [
        (0.29, 1.51, True),
        (0.3, 1.51, False),
        (0.29, 1.5, False),  # a policy that is far away has a mean of at most one
        (None, 9.0, False),
        (0.1, None, False),
    ],
)
def test_log_probs_of_other_tokens(name, aligned, ratio, found):
    numbers = {f"aligned_{name}": aligned, f"ratio_{name}": ratio}
    numbers = {key: value for key, value in numbers.items() if value is not None}
    assert (columns.other_tokens(measured(numbers)) is not None) is found
    shifted = measured(numbers | {f"shifted_{name}": 0.9})
    assert columns.other_tokens(shifted) is None or aligned is None, "has another finding"
    if found:
        says = said(columns.other_tokens, measured(numbers))
        assert says.title == f"The {name} log-probs are not those of these tokens"
        assert says.evidence == {"correlation with logp": aligned, "mean ratio to logp": ratio}


#: -log p does not follow an entropy whose mean is right.
UNMOVED = {"entropy_slope": interval(0.25, 0.25), "surprise_gap": interval(0.25, 0.125)}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"entropy_slope": interval(0.25, 0.26)}, False),  # it may be above one half
        ({"entropy_slope": interval(0.0, 0.49)}, True),
        ({"entropy_slope": interval(0.0, 0.5)}, False),  # one is within four errors
        ({"surprise_gap": interval(0.26, 0.125)}, False),  # then the sampler is another
        ({"entropy_slope": None}, False),
        ({"surprise_gap": None}, False),
    ],
)
def test_an_entropy_of_other_tokens(changes, found):
    intervals = {name: of for name, of in (UNMOVED | changes).items() if of is not None}
    given = measured(intervals=intervals)
    assert (columns.other_tokens(given) is not None) is found
    assert columns.other_tokens(given._replace(rollouts=FEW)) is None
    shifted = measured(NEIGHBOURS, intervals=intervals)
    assert columns.other_tokens(shifted) is None, "has another finding"


def test_what_an_entropy_of_other_tokens_says():
    found = said(columns.other_tokens, measured(intervals=UNMOVED))
    assert found.title == "The policy's own log-probs are not those of these tokens"
    assert found.evidence == {"slope of -log p on the entropy (one)": 0.25, "upper end": 0.5}


@pytest.mark.parametrize(
    ("share", "tokens", "found"),
    [(1e-3, 3.0, True), (0.99e-3, 3.0, False), (1e-3, 2.0, False), (0.0, 0.0, False)],
)
def test_tokens_that_were_masked_when_they_were_scored(share, tokens, found):
    numbers = {"masked_when_scored_share": share, "masked_when_scored_tokens": tokens}
    assert (columns.masked_when_scored(measured(numbers)) is not None) is found
    if found:
        assert said(columns.masked_when_scored, measured(numbers)).evidence == {
            "share with log-prob 0 in one column and below -1 in another": share
        }


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"end_surprise": 5.0}, False),  # three nats beyond the bound may be a stop string
        ({"early_ends": 20.0}, True),
        ({"early_ends": 19.0}, False),
    ],
)
def test_ends_are_more_surprising_than_an_end_can_be(changes, found):
    numbers = {"end_surprise": 5.1, "end_surprise_bound": 2.0, "early_ends": 100.0} | changes
    assert (columns.unsampled_end(measured(numbers)) is not None) is found
    assert columns.unsampled_end(measured()) is None, "all end together"
    if found:
        assert said(columns.unsampled_end, measured(numbers)).evidence == {
            "mean of -log p at sequence ends": 5.1,
            "bound if these tokens ended the sequences": 2.0,
        }


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"ends_twice_share": 0.5}, False),  # text that was cut off may end in a loop
        ({"ends_alike_share": 0.5}, False),  # no token ends most sequences
        ({"ends_twice_share": None}, False),
        ({"ends_alike_share": None}, False),
        ({"early_ends": 19.0}, False),
    ],
)
def test_an_end_that_stands_before_the_end(changes, found):
    numbers = {"end_surprise": 5.0, "end_surprise_bound": 2.0, "early_ends": 20.0}
    numbers |= {"ends_twice_share": 0.51, "ends_alike_share": 0.625} | changes
    given = measured({name: value for name, value in numbers.items() if value is not None})
    assert (columns.unsampled_end(given) is not None) is found
    if found:
        assert said(columns.unsampled_end, given).evidence == {
            "share of sequences whose last two tokens are the usual end token": 0.51
        }


def same_but(count: int, **columns):
    """A thousand tokens whose reference is the policy, but for so many."""
    ref_logp = np.where(np.arange(1000) < count, -1.0, -1.25)
    return rollouts(sequences=100, length=10, ref_logp=ref_logp, **columns)


def test_a_reference_that_is_the_policy_but_for_rounding():
    one, two = (measured(of=same_but(count)) for count in (1, 2))
    assert columns.identical_reference(two) is None
    found = said(columns.identical_reference, one)
    assert (found.severity, found.title) == ("error", "The reference is the policy itself")
    assert found.evidence == {"share of tokens with ref_logp equal to logp": 0.999}
    assert found.advice.startswith("Expected only before the first update")


def test_an_old_policy_that_is_the_reference():
    found = said(columns.identical_reference, measured(of=same_but(1, logp=-1.125, old_logp=-1.25)))
    assert found.title == "old_logp is ref_logp: one of them was not scored anew"
    assert found.evidence == {"share of tokens with ref_logp equal to old_logp": 0.999}
    both = said(columns.identical_reference, measured(of=same_but(0, old_logp=-1.25)))
    assert both.title == "The reference is the policy itself"
    nearly = said(columns.identical_reference, measured(of=same_but(1, old_logp=-1.0)))
    assert nearly.title == "The reference is the policy itself"


@pytest.mark.parametrize(
    ("step", "rollout_steps", "idle", "severity"),
    [
        (0, 1, 0.0, "note"),
        (1, 1, 0.0, "note"),  # counted from one
        (2, 1, 0.0, "error"),
        (2, 3, 0.0, "note"),  # the first rollout
        (3, 3, 0.0, "error"),
        (9, 1, 0.99, "note"),  # nothing moves the policy
        (9, 1, 0.98, "error"),
        (None, 1, 0.0, "error"),
    ],
)
def test_a_policy_begins_as_its_reference(step, rollout_steps, idle, severity):
    given = {} if step is None else {"step": np.repeat([0, step], 500)}
    shown = measured(
        {"zero_advantage_share": idle}, of=same_but(0, **given), rollout_steps=rollout_steps
    )
    assert said(columns.identical_reference, shown).severity == severity
    if not idle:
        shown.numbers.pop("zero_advantage_share")
        assert said(columns.identical_reference, shown).severity == severity


#: Steps of a hundredth squared over twelve, in nats.
NOISE = 1e-4 / 12


@pytest.mark.parametrize(("times", "severity"), [(9.9, "error"), (10.0, "warning")])
@pytest.mark.parametrize("column", ["logp", "ref_logp", "old_logp", "sampler_logp"])
def test_rounding_is_held_against_the_kl_that_it_gives(column, times, severity):
    of, numbers = rollouts(sampler_logp=-1.25), {f"grid_{column}_2_decimals": 0.9}
    given = measured(numbers, of=of, estimates={"k3": times * NOISE})
    found = said(columns.coarse_logprobs, given)
    assert (found.severity, found.title) == (severity, "The log-probs were rounded (2 decimals)")
    assert found.evidence == {
        f"share of {column} on the grid": 0.9,
        "KL that rounding alone gives": pytest.approx(NOISE, rel=1e-12),
        "KL by k3": times * NOISE,
    }
    few = rollouts(sequences=4, length=50, sampler_logp=-1.25)
    assert columns.coarse_logprobs(given._replace(rollouts=few)) is None
    assert columns.coarse_logprobs(measured({f"grid_{column}_2_decimals": 0.89}, of=of)) is None


@pytest.mark.parametrize(
    ("column", "lowest"), [("logp", 1.0), ("ref_logp", 2.0), ("old_logp", 4.0)]
)
def test_the_rounding_is_that_of_the_column(column, lowest):
    """bfloat16 has eight bits: between 2^e and 2^(e+1) its steps are 2^(e-7)."""
    numbers = {f"grid_{column}_bfloat16": 1.0, "grid_logp_float16": 0.5}
    of = rollouts(logp=-1.5, ref_logp=-3.0, old_logp=-6.0)
    found = said(columns.coarse_logprobs, measured(numbers, of=of))
    noise = (lowest / 2**7) ** 2 / 12
    assert found.evidence["KL that rounding alone gives"] == pytest.approx(noise, rel=1e-12)
    assert found.title == "The log-probs were rounded (bfloat16)"


def test_all_columns_and_grids_are_read():
    assert columns.coarse_logprobs(measured()) is None
    later = {"grid_logp_bfloat16": 0.1, "grid_ref_logp_3_decimals": 0.95}
    found = said(columns.coarse_logprobs, measured(later))
    assert found.evidence["share of ref_logp on the grid"] == 0.95


@pytest.mark.parametrize(("share", "found"), [(0.99e-3, False), (1e-3, True)])
def test_log_ratios_at_a_clamp(share, found):
    given = measured({"clamped_share": share})
    assert (columns.clamped_values(given) is not None) is found
    if found:
        assert said(columns.clamped_values, given).evidence == {"share at 10 or 20 nats": share}


@pytest.mark.parametrize("ratio", ["old/sampler", "reference/sampler"])
@pytest.mark.parametrize(
    ("mean", "reach", "found"),
    [
        (1.125, 0.05, True),
        (0.875, 0.05, True),
        (1.101, 0.01, True),
        (1.099, 0.01, False),
        (0.901, 0.01, False),
        (1.125, 0.0625, False),  # twice the reach of its interval is four standard errors
        (0.875, 0.0625, False),
        (1.125, 0.0624, True),
    ],
)
def test_the_mean_of_a_ratio_is_one(ratio, mean, reach, found):
    given = measured(identities={ratio: interval(mean, reach)})
    assert (columns.ratio_mean(given) is not None) is found
    assert columns.ratio_mean(given._replace(rollouts=FEW)) is None
    if found:
        says = said(columns.ratio_mean, given)
        assert says.title == f"The mean of {ratio} is not one"
        assert says.evidence == {"mean": mean, "low": mean - reach, "high": mean + reach}


@pytest.mark.parametrize(
    ("k", "mean", "found"),
    [
        (None, 0.5, True),
        (0.5, 0.5, True),
        (0.51, 0.5, False),  # the rest may lie in the tail that nobody saw
        (0.51, 1.5, True),
    ],
)
def test_a_mean_below_one_may_be_an_unseen_tail(k, mean, found):
    given = measured(
        identities={"reference/sampler": interval(mean)}, tails={"reference/policy": k}
    )
    assert (columns.ratio_mean(given) is not None) is found


def test_the_second_ratio_is_read_where_the_first_is_one():
    both = {"old/sampler": interval(1.0), "reference/sampler": interval(1.5)}
    assert said(columns.ratio_mean, measured(identities=both)).evidence["mean"] == 1.5
    assert columns.ratio_mean(measured()) is None


@pytest.mark.parametrize(
    ("bases", "sampler", "off"),
    [
        ({"ref": 10}, False, "ref_logp"),
        ({"old": 2, "ref": 2}, False, "old_logp and ref_logp"),
        ({"sampler": 2}, True, "sampler_logp"),
        ({"ref": -10}, False, "logp and old_logp"),
        ({"ref": -10}, True, "logp and old_logp and sampler_logp"),
        ({"old": -2, "ref": -2}, False, "logp"),
    ],
)
def test_which_columns_are_to_another_base(bases, sampler, off):
    numbers = {f"base_{name}": float(base) for name, base in bases.items()}
    numbers |= {f"base_apart_{name}": 0.5 for name in bases}
    numbers |= {f"base_left_{name}": 0.25 for name in bases}
    of = rollouts(**({"sampler_logp": -1.5} if sampler else {}))
    shown = said(columns.other_base, measured(numbers, of=of))
    base = abs(next(iter(bases.values())))
    assert shown.severity == "error"
    assert shown.title == f"{off}: logarithms to base {base}, the others are natural ones"
    assert shown.evidence == {
        "mean squared log-ratio as dumped": 0.5,
        "with all to one base": 0.25,
    }
    assert columns.other_base(measured(numbers, of=FEW)) is None


def test_two_bases_at_once_are_none():
    numbers = {"base_ref": 10.0, "base_old": 2.0}
    assert columns.other_base(measured(numbers)) is None
    assert columns.other_base(measured()) is None
