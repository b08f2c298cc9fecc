"""Which policies drew, scored and train the tokens: each threshold from both sides."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kl_term.diagnosis.conditions import policies
from kl_term.diagnosis.schema import Interval
from tests.measured import FEW, interval, measured, rollouts, said

EVEN = np.arange(200) % 2 == 0


def ending(high: float) -> Interval:
    return Interval(value=high - 0.5, low=high - 1.0, high=high)


def old_over_reference(mean: float):
    """Tokens whose old policy over reference has this mean: half of it and one and a half."""
    return rollouts(old_logp=-3.0, ref_logp=-3.0 - np.log(np.where(EVEN, 1.5, 0.5) * mean))


#: An engine that is too far from the trainer, and nobody can say why.
APART = {
    "mismatch_kl": 0.006,
    "mismatch_above": 0.3,
    "mismatch_below": 0.3,
    "mismatch_ess": 0.75,
    "mismatch_largest": 2.5,
    "total_kl": 0.0625,
    "sampler_to_reference": 0.5,
    "old_to_reference": 0.5,
    "sampler_over_old_mean": 1.25,
}
#: Without an update between them, two scores of one policy differ.
NOISY = {"start_move": 0.5}


@pytest.mark.parametrize(
    ("k2", "bound"),
    [
        (0.005, 1e-3),  # what rounding does
        (0.05, 0.005),  # a tenth of k2, where the sampler is close to the policy
        (9.0, 0.0125),  # but no more than of the mean size of a log-ratio, here 1/8
    ],
)
@pytest.mark.parametrize(("times", "found"), [(1.0, False), (1.01, True)])
def test_a_kl_below_zero(k2, bound, times, found):
    given = measured(estimates={"k1": ending(-times * bound), "k2": k2})
    assert (policies.negative_kl(given) is not None) is found
    assert policies.negative_kl(given._replace(rollouts=FEW)) is None
    assert policies.negative_kl(measured(NOISY, estimates={"k1": ending(-1.0)})) is None


def test_the_size_of_a_log_ratio_has_no_sign():
    up_and_down = rollouts(old_logp=-1.5, ref_logp=np.where(EVEN, -1.0, -2.0))
    given = {"estimates": {"k1": ending(-0.04), "k2": 9.0}}
    assert policies.negative_kl(measured(of=up_and_down, **given)) is None  # bound 0.05


def test_a_negative_kl_is_read_from_what_sampled():
    """Tokens that were drawn from the policy of the last update are logged beside those."""
    logged, own = {"k1": ending(-1.0)}, {"k1": ending(-1.0), "sampling k1": 0.1, "sampling k2": 0.1}
    assert policies.negative_kl(measured(estimates=logged)) is not None
    assert policies.negative_kl(measured(estimates=own)) is None
    turned = {"k1": 0.1, "k2": 99.0, "sampling k1": ending(-0.006), "sampling k2": 0.05}
    assert policies.negative_kl(measured(estimates=turned)) is not None


@pytest.mark.parametrize(
    ("mean", "title"),
    [
        (1.0, "The KL is negative: the tokens are not the policy's, but the reference's"),
        (1.09, "The KL is negative: the tokens are not the policy's, but the reference's"),
        (0.91, "The KL is negative: the tokens are not the policy's, but the reference's"),
        (1.11, "The KL is negative: the tokens are not the policy's"),
        (0.89, "The KL is negative: the tokens are not the policy's"),
    ],
)
def test_tokens_of_the_reference_have_a_mean_ratio_of_one(mean, title):
    """Drawn from the reference, pi / pi_ref has mean one."""
    given = measured(of=old_over_reference(mean), estimates={"k1": ending(-1.0)})
    found = said(policies.negative_kl, given)
    assert found.title == title
    assert found.evidence == {
        "mean of k1": -1.5,
        "upper end": -1.0,
        "mean of pi/pi_ref": pytest.approx(mean, rel=1e-12),
    }


@pytest.mark.parametrize(
    ("mean", "to_reference", "found"),
    [
        (2.0, 0.5, False),  # the engine is off, and that is said
        (1.0, 0.5, True),  # but here it does not explain whose the tokens are
        (1.0, 0.001, False),  # here it does: the engine is the reference
    ],
)
def test_a_negative_kl_of_an_engine_that_is_off(mean, to_reference, found):
    given = measured(
        APART | {"sampler_to_reference": to_reference},
        of=old_over_reference(mean),
        estimates={"k1": ending(-1.0)},
    )
    assert (policies.negative_kl(given) is not None) is found


def test_a_huge_ratio_is_finite_evidence():
    given = measured(of=rollouts(old_logp=-1.0, ref_logp=-900.0), estimates={"k1": ending(-200.0)})
    evidence = said(policies.negative_kl, given).evidence
    assert evidence["mean of pi/pi_ref"] == pytest.approx(math.exp(50), rel=1e-12)


@pytest.mark.parametrize(
    ("value", "low", "backwards", "found"),
    [
        (1.5, 1.25, 1.125, True),
        (1.5, 1.049, 1.125, False),  # its interval reaches what training on the tokens does
        (1.5, 1.05, 1.125, True),
        (1.49, 1.25, 1.125, False),  # not four times as far from one as the other way round
        (1.5, 1.25, 0.875, True),
        (1.49, 1.25, 0.875, False),
    ],
)
def test_tokens_that_the_old_policy_did_not_draw(value, low, backwards, found):
    mean = Interval(value=value, low=low, high=2.0)
    given = measured({"old_over_policy_mean": backwards}, identities={"policy/old": mean})
    assert (policies.old_not_sampler(given) is not None) is found
    assert policies.old_not_sampler(given._replace(rollouts=FEW)) is None
    beside = given._replace(rollouts=rollouts(sampler_logp=-1.25))
    assert policies.old_not_sampler(beside) is None, "another column says what drew them"
    if found:
        assert said(policies.old_not_sampler, given).evidence == {
            "mean of policy/old (one if they were)": value,
            "lower end": low,
            "mean of old/policy (one if the policy drew them)": backwards,
        }


def test_nothing_is_said_of_an_old_policy_that_is_not_dumped():
    assert policies.old_not_sampler(measured()) is None


def surprise(gap: float, reach: float = 0.01, numbers=None, **given):
    """Minus log p is so much above the entropy, which is one nat."""
    return measured(
        {"entropy": 1.0} | (numbers or {}),
        intervals={"surprise_gap": interval(gap, reach)} | given.pop("intervals", {}),
        **given,
    )


@pytest.mark.parametrize(
    ("gap", "title"),
    [
        (0.06, "The sampler is hotter than the policy that is trained"),
        (0.5, "The sampler is hotter than the policy that is trained"),
        (0.51, "The tokens were not drawn from this policy"),
        (-0.06, "The sampler is colder, or truncated further, than the policy that is trained"),
        (-0.9, "The sampler is colder, or truncated further, than the policy that is trained"),
    ],
)
def test_surprise_says_which_way_a_sampler_is_off(gap, title):
    found = said(policies.other_sampler, surprise(gap))
    assert found.title == title
    assert found.evidence == {
        "mean of -log p minus the entropy": gap,
        "lower end": gap - 0.01,
        "upper end": gap + 0.01,
        "mean entropy": 1.0,
    }


@pytest.mark.parametrize(("gap", "unsampled"), [(1.0, False), (1.1, True)])
def test_no_temperature_adds_half_of_the_entropy(gap, unsampled):
    title = said(policies.other_sampler, surprise(gap, numbers={"entropy": 2.0})).title
    assert (title == "The tokens were not drawn from this policy") is unsampled


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (surprise(0.05), True),
        (surprise(0.049), False),  # less than a twentieth of the entropy
        (surprise(-0.049), False),
        (surprise(1.0, 0.5), False),  # four standard errors are asked for
        (surprise(1.0, 0.49), True),
        (surprise(0.06, numbers={"entropy": 2.0}), False),
        (surprise(0.99, numbers={"entropy": 2.0}), True),
        (surprise(0.06, of=FEW), False),
        (surprise(0.06, numbers={"left_out_share": 0.02}), True),
        (surprise(0.06, numbers={"left_out_share": 0.03}), False),  # chosen by their tokens
        (measured({"entropy": 1.0}), False),  # no column of entropies
    ],
)
def test_a_gap_is_a_twentieth_of_the_entropy_and_clear_of_zero(given, found):
    assert (policies.other_sampler(given) is not None) is found


STALE = {"staleness_kl": 0.05, "staleness_ess": 0.5}
FAR_STALE = {"staleness_kl": 0.09, "staleness_ess": 0.5}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (surprise(0.06, intervals={"unpadded_gap": interval(0.0), "padded_gap": interval(1.0)}), 0),
        (surprise(0.06, numbers={"shared_start": 9.0}), 0),  # the prompt is counted
        (surprise(0.06, numbers={"copied_share": 0.9, "copied_sequences": 90.0}), 0),
        (surprise(0.06, numbers=APART), 0),
        (surprise(0.06, numbers=FAR_STALE), 0),
        (surprise(0.06, numbers=STALE), 1),  # a note on staleness does not explain a gap
    ],
)
def test_a_gap_is_said_once_by_what_explains_it(other, found):
    assert (policies.other_sampler(other) is not None) == found


@pytest.mark.parametrize(
    ("distance", "severity", "title"),
    [
        (4.9e-6, None, None),
        (5e-6, None, None),
        (
            5.1e-6,
            "note",
            "Policy and reference are not scored alike: the KL cannot be read below that",
        ),
        (
            0.005,
            "note",
            "Policy and reference are not scored alike: the KL cannot be read below that",
        ),
        (0.0051, "warning", "The policy differs from its reference before the first update"),
    ],
)
def test_a_run_starts_at_its_reference(distance, severity, title):
    given = measured({"kl_at_start": distance})
    assert policies.starts_away(measured()) is None
    if severity is None:
        assert policies.starts_away(given) is None
        return
    found = said(policies.starts_away, given)
    assert (found.severity, found.title) == (severity, title)
    assert found.evidence == {"half the mean squared log-ratio at the first step": distance}
    assert policies.starts_away(measured({"kl_at_start": distance} | NOISY)) is None


OTHER = "The inference engine samples from another policy than the trainer believes"
REFERENCE = "The inference engine still has the weights of the reference"
OLDER = "The inference engine has older weights, or only part of the new ones"
RAW = "The inference engine reports log-probs of another policy than it samples from"
TRUNCATED = "The sampler truncates, and its log-probs are those of what it kept"


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, OTHER),
        ({"mismatch_kl": 0.005}, None),
        ({"mismatch_kl": 0.0051}, OTHER),
        ({"sampler_to_reference": 0.01}, OTHER),
        ({"sampler_to_reference": 0.0099}, REFERENCE),  # a fiftieth of the trainer's way
        ({"mismatch_kl_early": 4.9e-6, "mismatch_kl_late": 0.0051}, OLDER),
        ({"mismatch_kl_early": 5e-6, "mismatch_kl_late": 0.0051}, OTHER),  # never agreed
        ({"mismatch_kl_early": 4.9e-6, "mismatch_kl_late": 0.005}, OTHER),  # has not parted
        ({"mismatch_kl_late": 0.9}, OTHER),
        ({"mismatch_kl_early": 0.0}, OTHER),
        ({"mismatch_below": 0.11, "mismatch_above": 0.0049}, TRUNCATED),
        ({"mismatch_below": 0.1, "mismatch_above": 0.0049}, OTHER),
        ({"mismatch_below": 0.11, "mismatch_above": 0.005}, OTHER),
    ],
)
def test_why_an_engine_disagrees_with_the_trainer(changes, title):
    given = measured(APART | changes)
    assert (policies.train_inference_mismatch(given) is not None) is (title is not None)
    if title is not None:
        found = said(policies.train_inference_mismatch, given)
        assert (found.severity, found.title) == ("error", title)


def test_what_an_engine_that_disagrees_shows():
    found = said(policies.train_inference_mismatch, measured(APART))
    expected = {
        "KL of sampler to old policy": 0.006,
        "effective share of tokens": 0.75,
        "largest log-ratio": 2.5,
        "of the total KL of sampler to policy": 0.0625,
        "share of tokens with old clearly below sampler": 0.3,
        "clearly above": 0.3,
    }
    assert found.evidence == expected
    parted = {"mismatch_kl_early": 1e-6, "mismatch_kl_late": 0.03125}
    found = said(policies.train_inference_mismatch, measured(APART | parted))
    assert found.evidence == expected | {
        "KL in the first step": 1e-6,
        "in the last third of the steps": 0.03125,
    }


@pytest.mark.parametrize(
    ("drawn", "mean", "reach", "title"),
    [
        (1.049, 1.125, 0.01, RAW),
        (0.951, 0.875, 0.01, RAW),
        (1.0625, 1.125, 0.01, OTHER),  # then the old policy did not draw the tokens either
        (0.9375, 1.125, 0.01, OTHER),
        (1.04, 1.09, 0.01, OTHER),  # within the margin of a ratio
        (1.04, 0.91, 0.01, OTHER),
        (1.04, 1.125, 0.0625, OTHER),  # four standard errors
    ],
)
def test_tokens_of_the_old_policy_under_another_report(drawn, mean, reach, title):
    numbers = APART | {"sampler_over_old_mean": drawn}
    given = measured(numbers, identities={"old/sampler": interval(mean, reach)})
    found = said(policies.train_inference_mismatch, given)
    assert found.title == title
    if title == RAW:
        assert found.evidence["mean of sampler/old (one if old drew the tokens)"] == drawn
    unread = said(policies.train_inference_mismatch, measured(numbers))
    assert unread.title == OTHER and "mean of sampler/old" not in " ".join(unread.evidence)


def test_a_truncation_shows_at_any_size_and_is_then_a_warning():
    small = APART | {"mismatch_kl": 1e-4, "mismatch_below": 0.5, "mismatch_above": 0.0}
    found = said(policies.train_inference_mismatch, measured(small))
    assert (found.severity, found.title) == ("warning", TRUNCATED)
    assert policies.train_inference_mismatch(measured(small, of=FEW)) is None
    edge = measured(small | {"mismatch_kl": 0.005})
    assert said(policies.train_inference_mismatch, edge).severity == "warning"
    large = small | {"mismatch_kl": 0.0051}
    assert said(policies.train_inference_mismatch, measured(large, of=FEW)).severity == "error"


@pytest.mark.parametrize("missing", ["mismatch_kl", "mismatch_below"])
def test_no_engine_without_its_log_probs(missing):
    numbers = APART | {"mismatch_kl": 1e-4, "mismatch_below": 0.5, "mismatch_above": 0.0}
    assert policies.train_inference_mismatch(measured()) is None
    if missing == "mismatch_below":
        del numbers[missing]
        assert policies.train_inference_mismatch(measured(numbers)) is None


@pytest.mark.parametrize(("filled", "found"), [(0, False), (2, False), (3, True)])
def test_what_stands_where_an_engine_said_nothing(filled, found):
    given = measured(of=rollouts(filled=filled, filler=-9999.0))
    assert (policies.sampler_filled(given) is not None) is found
    if found:
        says = said(policies.sampler_filled, given)
        assert says.title == (
            "The engine's log-probs are missing at some tokens, and filled with -9999"
        )
        assert says.evidence == {"share of tokens": 3 / 200, "value": "-9999"}


def rescored(unequal: int, **columns):
    """A thousand tokens; the old policy is the policy, but for so many."""
    old_logp = np.where(np.arange(1000) < unequal, -1.0, -1.25 - 9e-7)
    return rollouts(sequences=100, length=10, old_logp=old_logp, **columns)


@pytest.mark.parametrize(
    ("repeated", "behind", "severity", "advice"),
    [
        (0.2, 0.0, "warning", "old_logp is scored again at these steps"),
        (0.2, 0.9, "warning", "old_logp is scored again at these steps"),
        (0.19, 0.2, "note", "By design where a proximal policy is scored again"),
        (0.19, 0.19, None, ""),
    ],
)
def test_a_policy_that_is_its_own_old_policy_cannot_be_clipped(repeated, behind, severity, advice):
    numbers = {"repeated_share": repeated, "behind_share": behind}
    given = measured(numbers, of=rescored(1))
    assert policies.ratio_is_one(measured(numbers, of=rescored(2))) is None
    if severity is None:
        assert policies.ratio_is_one(given) is None
        return
    found = said(policies.ratio_is_one, given)
    assert found.severity == severity and found.advice.startswith(advice)
    rows, tokens = (
        ("share of rows whose completion stood there at an earlier step", repeated),
        ("share of tokens from earlier weights", behind),
    )
    assert found.evidence == {
        "share of tokens with logp equal to old_logp": 0.999,
        **dict([rows if severity == "warning" else tokens]),
    }


def test_where_a_ratio_of_one_says_nothing():
    again = {"repeated_share": 0.5}
    assert policies.ratio_is_one(measured(again, of=rescored(0))) is not None
    assert policies.ratio_is_one(measured({"behind_share": 0.5}, of=rescored(0))) is not None
    assert policies.ratio_is_one(measured(of=rescored(0))) is None, "nothing says it is another"
    assert policies.ratio_is_one(measured(again, of=rescored(0, has_old_logp=False))) is None
    assert policies.ratio_is_one(measured(again, of=rescored(0, ref_logp=-1.25))) is None
    apart = rollouts(logp=0.0, old_logp=-1e-6)
    assert policies.ratio_is_one(measured(again, of=apart)) is None


def clip(epsilon: float) -> float:
    """The KL at which the usual log-ratio is at the clip."""
    return math.log1p(epsilon) ** 2 / 2


@pytest.mark.parametrize(
    ("numbers", "settings", "severity"),
    [
        ({}, {}, None),
        ({"staleness_kl": clip(0.2)}, {}, None),
        ({"staleness_kl": 1.001 * clip(0.2)}, {}, "note"),
        ({"staleness_kl": 5 * clip(0.2), "clip_fraction": 0.3}, {}, "note"),
        ({"staleness_kl": 5.01 * clip(0.2)}, {}, "error"),
        ({"staleness_kl": 0.999 * clip(0.5)}, {"epsilon_high": 0.5, "epsilon_low": 0.1}, None),
        ({"staleness_kl": 1.001 * clip(0.5)}, {"epsilon_high": 0.5, "epsilon_low": 0.1}, "note"),
        ({"clip_fraction": 0.3}, {}, None),
        ({"clip_fraction": 0.31}, {}, "error"),
        # A clip of the sequence's ratio is narrow by design, and says nothing of a token's.
        ({"clip_fraction": 0.9}, {"ratio_level": "sequence", "epsilon_high": 3e-4}, None),
        ({"staleness_kl": clip(0.2)}, {"ratio_level": "sequence", "epsilon_high": 3e-4}, None),
        ({"staleness_kl": 1.001 * clip(0.2)}, {"ratio_level": "sequence"}, "note"),
    ],
)
def test_samples_are_stale_by_the_clip(numbers, settings, severity):
    given = measured({"staleness_ess": 0.5} | numbers, **settings)
    if severity is None:
        assert policies.stale_samples(given) is None
    else:
        assert said(policies.stale_samples, given).severity == severity


@pytest.mark.parametrize(
    ("kl", "advice"),
    [
        (None, "Weigh the KL term by policy/old"),
        ({}, "Weigh the KL term by policy/old"),
        ({"weighting": "attached"}, "The weight corrects the token, not the states before it."),
    ],
)
def test_what_stale_samples_say(kl, advice):
    numbers = {"staleness_kl": 0.5, "staleness_ess": 0.25, "clip_fraction": 0.125}
    found = said(policies.stale_samples, measured(numbers, kl=kl))
    assert advice in found.advice
    assert found.evidence == {
        "KL of old policy to policy": 0.5,
        "at which the usual log-ratio is at the clip": pytest.approx(clip(0.2), rel=1e-12),
        "effective share of tokens": 0.25,
        "clip fraction": 0.125,
    }


def weighted(largest: float):
    """One token has this policy/sampler ratio."""
    logp = np.where(np.arange(200) == 0, -3.0 + math.log(largest), -3.0)
    return rollouts(logp=logp, old_logp=-9.0, sampler_logp=-3.0)


@pytest.mark.parametrize(
    ("k", "largest", "found"),
    [
        (0.61, 3.1, True),
        (0.61, 2.9, False),  # beside a mean of one, no tail worth the name
        (0.6, 3.1, False),
        (None, 3.1, False),
    ],
)
def test_weights_with_a_tail(k, largest, found):
    given = measured(of=weighted(largest), tails={"policy/sampler": k})
    assert (policies.heavy_weights(given) is not None) is found
    assert policies.heavy_weights(measured(of=weighted(largest))) is None


@pytest.mark.parametrize(
    ("numbers", "effective", "severity"),
    [
        ({}, 1.0, "note"),
        ({"staleness_ess": 0.5}, 0.5, "note"),
        ({"staleness_ess": 0.49}, 0.49, "warning"),
        ({"staleness_ess": 0.49, "total_ess": 0.9}, 0.9, "note"),  # that of all the way
    ],
)
def test_weights_that_are_worth_half_of_the_tokens(numbers, effective, severity):
    found = said(
        policies.heavy_weights, measured(numbers, of=weighted(9.0), tails={"policy/sampler": 0.75})
    )
    assert found.severity == severity
    assert found.evidence == {
        "tail index k": 0.75,
        "largest trusted": 0.6,
        "effective share of tokens": effective,
    }


AGREES = {"mismatch_kl_early": 0.0, "mismatch_kl_late": 0.03125}


@pytest.mark.parametrize(
    ("old", "reference", "found"),
    [
        (1.0, 1.0, False),  # drawn as reported: the engine is another policy, and that is said
        (1.09, 0.91, False),
        (1.11, 1.0, True),  # the report is of no policy that drew these tokens
        (1.0, 0.89, True),
    ],
)
def test_tokens_that_the_engine_drew_as_it_reports_are_not_the_reference_s(old, reference, found):
    means = {"old/sampler": interval(old), "reference/sampler": interval(reference)}
    given = {"of": old_over_reference(1.0), "estimates": {"k1": ending(-1.0)}}
    assert (policies.negative_kl(measured(APART, identities=means, **given)) is not None) is found
    near = APART | {"mismatch_kl": 0.005}
    assert policies.negative_kl(measured(near, identities=means, **given)) is not None
    one = {"old/sampler": interval(1.0)}
    assert policies.negative_kl(measured(APART, identities=one, **given)) is not None


@pytest.mark.parametrize(
    ("changes", "logp", "found"),
    [
        ({"mismatch_kl_fresh": 0.005}, -1.375, False),  # said of old_logp, which is scored again
        ({"mismatch_kl_fresh": 0.0051}, -1.375, True),  # fresh tokens differ, too
        ({}, -1.375, True),
        ({"mismatch_kl_fresh": 0.005}, -1.25, True),  # old_logp is not the policy's own
        ({"mismatch_kl_fresh": 0.0, "mismatch_below": 0.5, "mismatch_above": 0.0}, -1.375, True),
    ],
)
def test_an_engine_that_agrees_on_fresh_tokens_is_none_that_is_off(changes, logp, found):
    given = measured(APART | {"repeated_share": 0.5} | changes, of=rollouts(logp=logp))
    assert (policies.train_inference_mismatch(given) is not None) is found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"mismatch_kl_ahead": 0.005}, False),  # the others are said to be of older weights
        ({"mismatch_kl_ahead": 0.0051}, True),
        ({"mismatch_kl_ahead": 0.005, "behind_share": 0.19}, True),
        (AGREES, False),  # all are behind, and at the first step they agreed
        ({"mismatch_kl_early": 1e-3, "mismatch_kl_late": 0.03125}, True),
        ({}, True),
    ],
)
def test_weights_that_a_column_says_are_behind_are_no_fault_of_the_engine(changes, found):
    given = measured(APART | {"behind_share": 0.2} | changes)
    assert (policies.train_inference_mismatch(given) is not None) is found


@pytest.mark.parametrize(
    ("returning", "rescored", "found"),
    [(10, 2, True), (10, 1, False), (11, 2, False), (2, 2, True), (1, 1, False)],
)
def test_old_log_probs_that_are_new_at_some_steps(returning, rescored, found):
    numbers = {"returning_steps": returning, "rescored_steps": rescored, "rescored_share": 0.25}
    given = measured(numbers, of=rescored_at_none())
    assert (policies.ratio_is_one(given) is not None) is found
    if found:
        shown = said(policies.ratio_is_one, given)
        assert shown.severity == "warning" and "scored again at these steps" in shown.advice
        assert shown.evidence == {
            "steps that train on an earlier batch again": returning,
            "of them with a ratio of one": rescored,
            "share of the completions that this is true of": 0.25,
        }


def rescored_at_none():
    """A thousand tokens whose ratio is not one."""
    return rescored(500)


def test_a_ratio_of_one_at_all_of_several_steps_on_a_rollout():
    steps = {"step": np.arange(1000) // 250}
    for own, silent, found in ((4, 0.98, True), (4, 0.99, False), (5, 0.0, False), (1, 0.0, False)):
        numbers = {"zero_advantage_share": silent}
        given = measured(numbers, of=rescored(0, **steps), rollout_steps=own)
        assert (policies.ratio_is_one(given) is not None) is found
    given = measured(of=rescored(1, **steps), rollout_steps=4)
    assert said(policies.ratio_is_one, given).evidence == {
        "share of tokens with logp equal to old_logp": 0.999,
        "steps on one rollout, by the settings": 4,
    }
    assert policies.ratio_is_one(measured(of=rescored(0), rollout_steps=4)) is None, "no steps"


#: Half of the interval is 1.96 standard errors.
BEHIND = {"engine_response": Interval(value=0.5, low=0.26, high=0.74)}


@pytest.mark.parametrize(
    ("gap", "low", "severity"),
    [
        (0.005, 0.26, "note"),
        (6e-6, 0.26, "note"),
        (5e-6, 0.26, None),
        (0.005, 0.254, None),  # under four standard errors
        (0.006, 0.26, "error"),
    ],
)
def test_an_engine_that_training_has_left_behind(gap, low, severity):
    intervals = {"engine_response": Interval(value=0.5, low=low, high=1 - low)}
    given = measured(APART | {"mismatch_kl": gap}, intervals=intervals)
    if severity is None:
        assert policies.train_inference_mismatch(given) is None
        return
    shown = said(policies.train_inference_mismatch, given)
    assert shown.severity == severity and "older weights" in shown.title
    assert shown.evidence["rise of log(old/sampler) with the advantage"] == 0.5
    assert "KL in the first step" not in shown.evidence


def test_a_small_gap_that_training_made_is_of_older_weights_wherever_the_engine_is():
    near = APART | {"sampler_to_reference": 1e-4}
    assert "older weights" not in said(policies.train_inference_mismatch, measured(near)).title
    given = measured(near | {"mismatch_kl": 0.005}, intervals=BEHIND)
    assert "older weights" in said(policies.train_inference_mismatch, given).title


def test_a_response_that_says_nothing_of_the_engine():
    assert (
        "older weights"
        in said(policies.train_inference_mismatch, measured(APART, intervals=BEHIND)).title
    )
    falls = {"engine_response": Interval(value=-0.5, low=-0.74, high=-0.26)}
    for intervals, of in ((falls, None), ({}, None), (BEHIND, FEW)):
        given = measured(APART, intervals=intervals, of=of)
        assert "another policy" in said(policies.train_inference_mismatch, given).title
        small = measured(APART | {"mismatch_kl": 0.005}, intervals=intervals, of=of)
        assert policies.train_inference_mismatch(small) is None
    times = {"mismatch_kl_early": 1e-6, "mismatch_kl_late": 0.01}
    evidence = said(policies.train_inference_mismatch, measured(APART | times)).evidence
    assert "rise of log(old/sampler) with the advantage" not in evidence
    truncated = measured(APART | {"mismatch_above": 0.0, "mismatch_kl": 0.001}, intervals=BEHIND)
    assert said(policies.train_inference_mismatch, truncated).severity == "warning"


@pytest.mark.parametrize(
    ("value", "low", "found"),
    [
        (0.2, 0.11, True),
        (0.2, 0.1, False),  # four standard errors
        (0.199, 0.19, False),  # a tenth of the entropy
        (-0.5, -0.51, False),
    ],
)
def test_first_tokens_alone_that_are_too_surprising(value, low, found):
    first = Interval(value=value, low=low, high=2 * value - low)
    given = measured(
        {"entropy": 2.0}, intervals={"surprise_gap": interval(0.0), "first_surprise_gap": first}
    )
    assert (policies.other_sampler(given) is not None) is found
    if found:
        shown = said(policies.other_sampler, given)
        assert shown.severity == "error" and shown.title.startswith("The first tokens")
        assert shown.evidence == {
            "mean of -log p minus the entropy, first tokens": value,
            "lower end": low,
            "mean entropy": 2.0,
        }


def test_where_first_tokens_say_nothing():
    gaps = {"surprise_gap": interval(0.0), "first_surprise_gap": interval(1.0)}
    assert policies.other_sampler(measured({"entropy": 2.0}, intervals=gaps)) is not None
    assert policies.other_sampler(measured({"entropy": 2.0}, intervals=gaps, of=FEW)) is None
    begins = {"entropy": 2.0, "shared_start": 3.0}
    assert policies.other_sampler(measured(begins, intervals=gaps)) is None, "the prompt is counted"
    copied = {"entropy": 2.0, "copied_share": 0.5, "copied_sequences": 10.0}
    assert policies.other_sampler(measured(copied, intervals=gaps)) is None
    assert (
        policies.other_sampler(
            measured({"entropy": 2.0}, intervals={"surprise_gap": interval(0.0)})
        )
        is None
    )
