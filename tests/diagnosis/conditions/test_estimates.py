"""What an estimate of the KL can be trusted for: each threshold from both sides."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kl_term.diagnosis.conditions import estimates
from kl_term.diagnosis.schema import Interval, SequenceShare
from tests.measured import FEW, interval, measured, rollouts, said

#: The logarithm of the largest float32, (2 - 2^-23) 2^127.
LARGEST = math.log(2 - 2.0**-23) + 127 * math.log(2)


def reaching(*log_ratios: float):
    """The reference over the policy at the first tokens, in nats; -0.25 at all others."""
    logp = np.full(200, -1.25)
    logp[: len(log_ratios)] = -1.5 - np.array(log_ratios)
    return rollouts(logp=logp)


def test_k3_overflows_from_the_largest_float32_on():
    assert estimates.overflow(measured(of=reaching(LARGEST - 0.01))) is None
    found = said(estimates.overflow, measured(of=reaching(90.0, LARGEST + 0.01, 80.0)))
    assert found.evidence == {
        "tokens": 2,
        "largest log r": 90.0,
        "from": pytest.approx(LARGEST, rel=1e-12),
    }
    one = said(estimates.overflow, measured(of=reaching(LARGEST + 0.01)))
    assert one.evidence["tokens"] == 1
    assert estimates.overflow(measured(of=reaching(-90.0))) is None, "k3 of a lost token is small"


HEAVY = {"reference/policy": 0.75}


@pytest.mark.parametrize(
    ("k", "numbers", "found"),
    [
        (0.61, {}, True),
        (0.6, {}, False),
        (None, {}, False),
        (0.75, {"largest_ratio_over_mean": 3.0}, True),
        (0.75, {"largest_ratio_over_mean": 2.9}, False),  # no ratio stands out
        (0.75, {"k3_largest_token_share": 0.01}, True),
        (0.75, {"k3_largest_token_share": 0.0099}, False),  # no token decides the mean
    ],
)
def test_a_tail_is_heavy_where_a_token_may_decide(k, numbers, found):
    given = measured(numbers, tails={"reference/policy": k})
    assert (estimates.heavy_tail(given) is not None) is found
    assert estimates.heavy_tail(measured(numbers)) is None


@pytest.mark.parametrize(
    ("k", "k1", "k3", "severity"),
    [
        (1.1, 0.1, 0.21, "warning"),
        (1.0, 0.1, 0.21, "note"),  # there is a mean
        (1.1, 0.125, 0.25, "note"),  # the two agree within a factor of two
        (1.1, 0.25, 0.125, "note"),
        (1.1, 0.26, 0.125, "warning"),
        (1.1, 0.2, 0.05, "note"),  # a KL too small to be worth it
        (1.1, 0.2, 0.051, "warning"),
        (1.1, -0.1, 0.051, "warning"),  # below zero is as good as none
    ],
)
def test_without_a_mean_estimators_part(k, k1, k3, severity):
    given = measured(tails={"reference/policy": k}, estimates={"k1": k1, "k3": k3})
    found = said(estimates.heavy_tail, given)
    assert found.severity == severity
    assert found.evidence["KL by k1"] == k1 and found.evidence["KL by k3"] == k3


#: Estimators far apart where tokens were logged and as one where they were drawn, and the reverse.
PART_LOGGED = {"k1": 0.01, "k3": 0.75, "sampling k1": 0.25, "sampling k3": 0.25}
PART_DRAWN = {"k1": 0.25, "k3": 0.25, "sampling k1": 0.01, "sampling k3": 0.5}


@pytest.mark.parametrize(
    ("kl", "severity"),
    [
        (None, "warning"),
        ({}, "warning"),
        ({"weighting": "attached"}, "note"),  # the tokens of the sampler count
        ({"estimator": "k1", "placement": "reward"}, "note"),
    ],
)
def test_a_term_that_is_corrected_is_read_where_the_tokens_were_drawn(kl, severity):
    tail = {"reference/policy": 1.5}
    given = measured(tails=tail, estimates=PART_LOGGED, kl=kl)
    assert said(estimates.heavy_tail, given).severity == severity
    other = {"note": "warning", "warning": "note"}[severity]
    turned = measured(tails=tail, estimates=PART_DRAWN, kl=kl)
    assert said(estimates.heavy_tail, turned).severity == other
    logged = measured(tails=tail, estimates={"k1": 0.01, "k3": 0.5}, kl=kl)
    assert said(estimates.heavy_tail, logged).severity == "warning", "it has no other tokens"


def test_what_a_heavy_tail_says():
    """The KL that it shows is that of the logged tokens, as the trainer's log has it."""
    numbers = {"k3_top_percent_share": 0.875}
    estimated = {"k1": 0.25, "k3": 0.5, "sampling k1": 0.125, "sampling k3": 0.125}
    given = measured(numbers, tails=HEAVY, estimates=estimated, kl={"weighting": "attached"})
    evidence = said(estimates.heavy_tail, given).evidence
    assert evidence == {
        "tail index k": 0.75,
        "largest trusted": 0.6,
        "KL by k3": 0.5,
        "KL by k1": 0.25,
        "k3's squared coefficients on 1% of the tokens": 0.875,
    }
    unread = said(estimates.heavy_tail, measured(tails=HEAVY)).evidence
    assert math.isnan(unread["k3's squared coefficients on 1% of the tokens"])


#: A tail whose variance is infinite, and that would be trusted.
INFINITE = {"reference/policy": 0.55}


@pytest.mark.parametrize(
    ("mean", "k", "estimated", "found"),
    [
        (interval(0.5), 0.55, {"k1": 2.0, "k3": 1.0}, True),
        (interval(0.5), 0.5, {"k1": 2.0, "k3": 1.0}, False),  # the variance is finite
        (interval(0.5), None, {"k1": 2.0, "k3": 1.0}, False),
        (interval(0.5, 0.499), 0.55, {"k1": 2.0, "k3": 1.0}, True),
        (interval(0.5, 0.5), 0.55, {"k1": 2.0, "k3": 1.0}, False),  # may be one
        (interval(0.75), 0.55, {"k1": 2.6, "k3": 1.0}, False),  # less than a tenth of the KL
        (interval(0.75), 0.55, {"k1": 2.5, "k3": 1.0}, True),
        (interval(0.5), 0.55, {"k1": 1.0, "k3": 0.9}, True),
        (interval(0.5), 0.55, {"k1": 1.0, "k3": 0.91}, False),  # it has seen that part
    ],
)
def test_mass_that_no_sample_stands_for(mean, k, estimated, found):
    """k1 - k3 = 1 - r, whose mean is zero where everything was seen."""
    given = measured(
        identities={"reference/sampler": mean},
        tails={"reference/policy": k},
        estimates=estimated,
    )
    assert (estimates.unseen_mass(given) is not None) is found
    assert estimates.unseen_mass(given._replace(rollouts=FEW)) is None
    assert estimates.unseen_mass(given._replace(identities=[])) is None
    if found:
        assert said(estimates.unseen_mass, given).evidence == {
            "mass that no sample stands for": 1 - mean.value,
            "KL by k3": estimated["k3"],
            "KL by k1": estimated["k1"],
        }


def test_a_heavy_tail_is_said_instead_of_unseen_mass():
    given = {"identities": {"reference/sampler": interval(0.5)}, "estimates": {"k3": 0.05}}
    assert estimates.unseen_mass(measured(tails=INFINITE, **given)) is not None
    assert estimates.unseen_mass(measured(tails=HEAVY, **given)) is None


#: So much of k3's and of k2's pull lies beyond where some framework clamps the value.
SILENCED = {
    "dead_force_k3": 0.5,
    "dead_share_k3": 3 / 200,
    "dead_force_k2": 0.25,
    "dead_share_k2": 4 / 200,
}
KNOWN, UNKNOWN = "The clamp of {} silences", "If the loss clamps as {} do, it silences"


@pytest.mark.parametrize(
    ("framework", "kl", "severity", "title", "estimator"),
    [
        ("verl", None, "error", KNOWN.format("verl"), "k3"),
        ("verl", {}, "error", KNOWN.format("verl"), "k3"),
        ("verl", {"estimator": "k2"}, None, "", ""),  # mse is not clamped
        ("openrlhf", None, "error", KNOWN.format("openrlhf"), "k3"),
        ("openrlhf", {"estimator": "k2"}, "error", KNOWN.format("openrlhf"), "k2"),
        ("unknown", None, "note", UNKNOWN.format("verl and OpenRLHF"), "k3"),
        ("unknown", {}, "note", UNKNOWN.format("verl and OpenRLHF"), "k3"),
        ("unknown", {"estimator": "k2"}, "note", UNKNOWN.format("OpenRLHF"), "k2"),
        ("unknown", {"estimator": "k1"}, None, "", ""),
        ("trl", None, None, "", ""),
        ("plain", None, None, "", ""),
        ("verl", {"placement": "reward"}, None, "", ""),
        ("verl", {"value": "k1"}, None, "", ""),  # only the value that is shown is clamped
        ("verl", {"weighting": "attached"}, None, "", ""),
        ("openrlhf", {"estimator": "k2", "weighting": "detached"}, None, "", ""),
        ("unknown", {"weighting": "attached"}, "note", UNKNOWN.format("verl and OpenRLHF"), "k3"),
    ],
)
def test_which_trainer_silences_which_estimator(framework, kl, severity, title, estimator):
    given = measured(SILENCED, framework=framework, kl=kl)
    if severity is None:
        assert estimates.dead_zone(given) is None
        return
    found = said(estimates.dead_zone, given)
    assert found.severity == severity and found.title.startswith(title)
    assert found.evidence == {
        "share of tokens": SILENCED[f"dead_share_{estimator}"],
        "share of the pull they would have": SILENCED[f"dead_force_{estimator}"],
        "estimator": estimator,
    }


@pytest.mark.parametrize(
    ("framework", "force", "tokens", "found"),
    [
        ("verl", 0.01, 9, False),
        ("verl", 0.011, 1, True),
        ("unknown", 0.011, 3, True),
        ("unknown", 0.011, 2, False),  # nobody said that it clamps
        ("unknown", 0.01, 9, False),
    ],
)
def test_a_hundredth_of_the_pull_is_silenced(framework, force, tokens, found):
    numbers = {"dead_force_k3": force, "dead_share_k3": tokens / 200}
    given = measured(numbers, framework=framework)
    assert (estimates.dead_zone(given) is not None) is found


@pytest.mark.parametrize(
    ("gap", "kl", "found"),
    [
        (0.5, None, False),
        (0.51, None, True),
        (math.nan, None, False),
        (0.51, {}, True),
        (0.51, {"weighting": "detached"}, True),
        (0.51, {"weighting": "attached"}, False),  # the reverse KL's gradient
        (0.51, {"estimator": "k2"}, False),
        (0.51, {"placement": "reward"}, False),
    ],
)
def test_the_gradient_of_k3_is_that_of_another_kl(gap, kl, found):
    numbers = {"k3_gradient_gap": gap, "k3_gradient_correlation": 0.25}
    given = measured(numbers, kl=kl)
    assert (estimates.k3_gradient(given) is not None) is found
    assert estimates.k3_gradient(measured(kl=kl)) is None
    if found:
        says = said(estimates.k3_gradient, given)
        assert says.severity == "note"
        assert says.evidence == {
            "spread of the coefficients' difference over that of the reverse KL's": 0.51,
            "correlation of the two": 0.25,
        }


TOP = (
    SequenceShare(sequence="a loop", tokens=8, kl_sum=90.0, share=0.4375),
    SequenceShare(sequence="another", tokens=8, kl_sum=9.0, share=0.0625),
)


@pytest.mark.parametrize(
    ("share", "token", "sequences", "found"),
    [
        (0.5, 0.0, 25, False),
        (0.51, 0.0, 25, True),
        (0.625, 0.125, 25, True),  # a fifth of it on one token
        (0.625, 0.126, 25, False),  # the tail of k3, and no sequence
        (0.625, 0.0, 10, True),
        (0.625, 0.0, 9, False),
    ],
)
def test_the_kl_is_that_of_few_sequences(share, token, sequences, found):
    numbers = {"top_percent_sequences_share": share, "k3_largest_token_share": token}
    given = measured(numbers, of=rollouts(sequences=sequences), top=TOP)
    assert (estimates.concentrated(given) is not None) is found
    assert estimates.concentrated(measured(top=TOP)) is None
    if found:
        assert said(estimates.concentrated, given).evidence == {
            "share of the top 1%": share,
            "first": "a loop",
            "its share": 0.4375,
        }


def test_a_policy_is_far_where_all_of_the_interval_is():
    near, far = (Interval(value=0.9, low=low, high=1.0) for low in (0.5, 0.51))
    assert estimates.far_from_reference(measured(estimates={"k1": near})) is None
    found = said(estimates.far_from_reference, measured(estimates={"k1": far}))
    assert found.severity == "note"
    assert found.evidence == {"KL by k1, nats per token": 0.9, "lower end": 0.51}


@pytest.mark.parametrize(("sequences", "found"), [(20, False), (19, True)])
def test_fewer_than_twenty_sequences_are_few(sequences, found):
    given = measured(of=rollouts(sequences=sequences))
    assert (estimates.few_sequences(given) is not None) is found
    if found:
        assert said(estimates.few_sequences, given).evidence == {"sequences": 19}
