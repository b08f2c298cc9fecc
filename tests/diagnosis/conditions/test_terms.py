"""What a column of the KL term shows of it: each threshold from both sides."""

from __future__ import annotations

import pytest

from kl_term.diagnosis import terms
from tests.measured import measured, rollouts, said


def explained(kl=None, beta: float = 0.05, numbers=None, **shares):
    """So much of the column's squares is beta times each candidate."""
    read = {f"term_is_{name}": share for name, share in shares.items()}
    read |= {f"term_beta_{name}": beta for name in shares}
    return measured({"term_size": 0.5} | read | (numbers or {}), kl=kl)


@pytest.mark.parametrize(
    ("size", "apart", "kl", "found"),
    [
        (0.0, 0.25, None, True),
        (0.0, 0.25, {}, True),
        (0.0, 0.25, {"estimator": "none"}, False),  # as it should be
        (1e-9, 0.25, None, False),
        (None, 0.25, None, False),
        (0.0, 1.1e-3, None, True),
        (0.0, -1.1e-3, None, True),
        (0.0, 0.9e-3, None, False),  # at the reference the term is zero
    ],
)
def test_a_term_that_is_zero_everywhere(size, apart, kl, found):
    of = rollouts(logp=-1.0, ref_logp=-1.0 - apart)
    given = measured({} if size is None else {"term_size": size}, of=of, kl=kl)
    assert (terms.kl_left_out(given) is not None) is found
    if found:
        assert said(terms.kl_left_out, given).evidence == {
            "largest |kl_term|": 0.0,
            "largest log-ratio": pytest.approx(abs(apart), rel=1e-9),
        }


@pytest.mark.parametrize(
    ("beta", "share", "kl", "where"),
    [
        (-0.05, 0.9, None, "added to the loss"),
        (-0.05, 0.9, {"estimator": "k1", "placement": "reward"}, "taken from the reward"),
        (-0.05, 0.89, None, None),
        (0.0, 0.9, None, None),
        (0.05, 0.9, None, None),
    ],
)
def test_a_term_with_the_wrong_sign(beta, share, kl, where):
    given = explained(kl, beta, k1=share, k2=share - 0.5)
    assert terms.kl_negative(measured()) is None
    if where is None:
        assert terms.kl_negative(given) is None
    else:
        found = said(terms.kl_negative, given)
        assert found.title == f"The KL term has the wrong sign: {where} it pushes the policy away"
        assert found.evidence == {"estimator": "k1", "share explained": share, "coefficient": beta}
        assert terms.other_term(given) is None


@pytest.mark.parametrize(
    ("kl", "shares", "title"),
    [
        ({"estimator": "k3"}, {"k3": 1.0, "k2": 0.9}, None),
        ({"estimator": "k3"}, {"k3": 0.996, "k2": 1.0}, None),  # equal to rounding
        ({"estimator": "k3"}, {"k3": 0.995, "k2": 1.0}, "The KL term is k2, not k3"),
        ({"estimator": "k3"}, {"k3": 0.5, "k2": 0.999}, "The KL term is k2, not k3"),
        ({"estimator": "k3"}, {"k3": 0.5, "k2": 0.99}, "The KL term is something else, not k3"),
        (None, {"k3": 1.0}, None),
        (None, {"k3": 0.5}, None),  # an unknown term may be anything
        (
            None,
            {terms.INVERTED: 1.0},
            "The KL term is k3 of the inverted ratio, not a KL estimator",
        ),
        (None, {terms.INVERTED: 0.99}, None),
        (None, {terms.ABSOLUTE: 1.0}, "The KL term is the absolute log-ratio, not a KL estimator"),
    ],
)
def test_a_term_that_is_another(kl, shares, title):
    given = explained(kl, **shares)
    assert (terms.other_term(given) is not None) is (title is not None)
    assert terms.other_term(measured(kl=kl)) is None
    if title is not None:
        found = said(terms.other_term, given)
        assert found.title == title
        named = {} if kl is None else {"share that the named term explains": shares["k3"]}
        assert found.evidence == {
            "share that it explains": max(shares.values()),
            "coefficient": 0.05,
            **named,
        }


def test_a_weighted_term_is_named_with_its_weight():
    kl = {"estimator": "k3", "weighting": "attached"}
    given = explained(kl, **{"k3": 1.0, "k3 times policy/old": 0.5})
    assert said(terms.other_term, given).title == "The KL term is k3, not k3 times policy/old"
    shown = explained({"estimator": "k2", "value": "k3"}, k3=1.0, k2=0.5)
    assert terms.other_term(shown) is None, "what is shown is what it reports"


SOME = "The KL term is missing at some of the tokens"
STEPS = "The KL term is missing at some of the steps"


@pytest.mark.parametrize(
    ("share", "tokens", "off", "silent", "best", "title"),
    [
        (0.02, 20, 0.0, 0.0, 0.5, SOME),
        (0.019, 20, 0.0, 0.0, 0.5, None),
        (0.02, 19, 0.0, 0.0, 0.5, None),
        (0.02, 20, 0.019, 0.0, 0.5, SOME),
        (0.02, 20, 0.02, 0.0, 0.5, None),  # another term altogether
        (0.0, 0, 0.02, 0.0, 0.996, SOME),  # a few tokens hold all squares
        (0.0, 0, 0.02, 0.0, 0.995, None),
        (0.0, 0, 0.019, 0.0, 1.0, None),
        (0.5, 99, 0.0, 0.1, 0.5, STEPS),
    ],
)
def test_a_term_that_some_tokens_or_steps_lack(share, tokens, off, silent, best, title):
    numbers = {
        "term_absent_share": share,
        "term_absent_tokens": float(tokens),
        "term_off_share": off,
        "term_silent_steps": silent,
        "term_absent_positive_advantages": 0.75,
    }
    given = explained(None, numbers=numbers, k3=best)
    assert (terms.other_term(given) is not None) is (title is not None)
    if title is not None:
        found = said(terms.other_term, given)
        assert found.title == title
        assert found.evidence == {
            "share of the tokens with a log-ratio that have no term": share,
            "share with another than their step's coefficient gives": off,
            "tokens without": tokens,
            "share of steps without any": silent,
            "share without, positive advantages": 0.75,
        }


@pytest.mark.parametrize(
    ("moved", "growth", "best", "found"),
    [
        (0.5, 1.5, 1.0, True),  # half the coefficient at a KL that grew
        (0.51, 1.5, 1.0, False),
        (0.5, 1.49, 1.0, False),
        (2.0, 0.6, 1.0, True),  # twice at a KL that fell
        (2.0, 0.7, 1.0, False),
        (1.9, 0.6, 1.0, False),
        (2.0, 1.5, 1.0, False),  # as a controller should
        (0.5, 0.5, 1.0, False),
        (0.5, 1.5, 0.996, True),
        (0.5, 1.5, 0.995, False),
        (2.0, 0.0, 1.0, True),
    ],
)
def test_a_coefficient_that_runs_against_the_kl(moved, growth, best, found):
    numbers = {"term_late_over_early": moved, "kl_growth": growth}
    given = explained(None, numbers=numbers, k3=best)
    assert (terms.other_term(given) is not None) is found
    if found:
        says = said(terms.other_term, given)
        assert says.title == "The coefficient of the KL term runs against the KL"
        assert says.severity == "warning"
        assert says.evidence == {
            "coefficient, last third of the steps over the first": moved,
            "KL, last third of the steps over the first": growth,
        }
        meant = given._replace(settings=given.settings.model_copy(update={"adaptive": True}))
        assert said(terms.other_term, meant).severity == "note"
    for name in numbers:
        alone = explained(None, numbers={name: numbers[name]}, k3=best)
        assert terms.other_term(alone) is None
