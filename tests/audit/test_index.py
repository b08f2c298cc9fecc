"""The index of the corpus against what its losses compute: names, verdicts, terms, sources."""

from __future__ import annotations

import itertools
import re
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from analysis.report.audit_sets import HELD_OUT as SETS_HELD_OUT
from kl_term.kl.estimators import ESTIMATORS
from kl_term.kl.names import CREDITS, LEVELS, RATIO_LEVELS, WEIGHTINGS
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import aggregate
from tests.audit.corpus import parameters, read
from tests.audit.enumerated import (
    Case,
    defined,
    descends,
    expected_gradient,
    kl_loss,
    states,
    tensors,
    trees,
    verdict,
)

CORPUS = read()
RELEASED = read("released")
HELD_OUT = read(*(section for held_out in SETS_HELD_OUT for section in held_out.sections))
#: Broken losses whose public report could not be found again.
UNFOUND = {"kl_penalized_reward", "packed_gspo"}
#: Broken losses after no report: faults that their author thought of.
OF_THEIR_AUTHOR = {
    *("minimax_step", "actor_kl_loss", "async_actor", "dapo_trainer", "engine_correction"),
    *("flat_grpo", "causal_pg", "nano_loop", "qwen_gspo", "reward_shaping", "reinforce_returns"),
}
NAMED = {entry.name: entry for entry in CORPUS}


#: Those of released packages only where these are installed.
ENTRIES = [
    pytest.param(entry, id=entry.name, marks=pytest.mark.peers if entry.package else ())
    for entry in (*CORPUS, *HELD_OUT, *RELEASED)
]


def such(wanted) -> list:
    return [each for each in ENTRIES if wanted(each.values[0])]


def terms() -> dict[str, KLTerm]:
    """Every term that ``KLTerm`` accepts, by name."""
    space = itertools.product(
        ("k1", "k2", "k3", "exact", "forward"),
        ("loss", "reward"),
        LEVELS,
        WEIGHTINGS,
        RATIO_LEVELS,
        CREDITS,
        (None, *ESTIMATORS),
    )
    fields = ("estimator", "placement", "level", "weighting", "ratio", "credit", "value")
    found = {}
    for choice in space:
        try:
            term = KLTerm(**dict(zip(fields, choice, strict=True)))
        except ValueError:
            continue
        found[term.name] = term
    return found


TERMS = terms()


def test_the_corpus_is_large_enough_and_says_where_its_faults_come_from():
    broken = [entry for entry in (*CORPUS, *HELD_OUT) if entry.broken]
    assert len(broken) >= 40
    assert len(CORPUS) + len(HELD_OUT) - len(broken) >= 30
    assert len(NAMED) == len(CORPUS)
    assert not set(NAMED) & {entry.name for entry in HELD_OUT}
    assert {entry.name for entry in broken if entry.source is None} == UNFOUND | OF_THEIR_AUTHOR
    for entry in broken:
        assert set(entry.want) == {"kind", "says"}
        assert entry.wrong
        if entry.source is None:
            continue
        assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,40})", entry.source), entry.name
        quoted = "".join((entry.function.__doc__ or "").split())
        repository, _, number = entry.source.partition("#")
        assert repository.partition("@")[0] in quoted, entry.name
        assert f"#{number}" in quoted or not number, entry.name


@pytest.mark.parametrize("entry", ENTRIES)
def test_arguments_are_those_of_the_loss(entry):
    passed = (*entry.arguments.values(), *entry.again, *entry.given, *entry.holds)
    assert {name.partition(".")[0] for name in passed} <= parameters(entry)
    assert set(entry.said) <= {*entry.arguments, *(("inputs",) if entry.holds else ())}
    assert set(entry.names) <= parameters(entry)
    assert set(entry.per_answer) <= set(entry.arguments)
    assert {entry.term, *entry.same_as} - {None} <= set(TERMS)


@pytest.mark.parametrize("entry", such(defined))
def test_what_it_minimises_is_what_the_sums_say(entry):
    for samples, levels in verdict(entry).items():
        for level, (name, scale) in levels.items():
            stated = entry.minimises[samples][level]
            assert stated in (name, None), (samples, level)
            if level == "state" and entry.scale and name not in ("nothing", "neither"):
                assert scale == pytest.approx(abs(entry.scale), rel=1e-4)


def of_term(term: KLTerm, aggregation: str | None, given: dict[str, Tensor]) -> Tensor:
    """The scalar that the index says a loss is, by the package's own terms."""
    mask = given["mask"]
    if term.placement == "reward":
        owed = term.penalty(given["logp"].detach(), given["ref_logp"], mask=mask)
        return torch.where(mask, owed * given["logp"], 0.0).sum() / len(mask)
    logits = {name: given[name] for name in ("logits", "ref_logits")}
    values = term.loss(
        given["logp"], given["ref_logp"], old_logp=given["old_logp"], mask=mask, **logits
    )
    return aggregate(values, mask, aggregation or "seq_mean_token_sum")


#: Every loss of a term on both kinds of samples; a reward is that of the policy that sampled.
OF_TERMS = [
    pytest.param(*each.values, samples, marks=each.marks, id=f"{each.id}-{samples}")
    for each in such(lambda e: e.term and e.name not in ("rloo", "rloo_with_k3"))
    for samples in ("fresh", "stale")
    if samples == "fresh" or TERMS[each.values[0].term].placement == "loss"
]


TWENTY = range(0, 40, 2)


@pytest.mark.parametrize(("entry", "samples"), OF_TERMS)
def test_term_and_scale_hold_batch_by_batch(entry, samples):
    """The gradient of twenty batches of two answers, of unequal lengths; a sign is not lost."""
    tolerance = 1e-4 if entry.dtype == "float32" else 1e-10
    case, batches = batches_of(samples)
    stated_of = gradients_of_term(entry.term, entry.aggregation, samples)
    for batch, unscaled in zip(batches, stated_of, strict=True):
        found = gradient_of(case, batch, lambda given: kl_loss(entry, given))
        stated = entry.scale * unscaled
        assert (found - stated).norm() < tolerance * stated.norm()
        assert (found + stated).norm() > 1.9 * stated.norm()


@cache
def batches_of(samples: str) -> tuple[Case, list[tuple]]:
    case = next(iter(trees()))
    answers = case.tree.answers
    pairs = [(answers[i % len(answers)], answers[(7 * i + 3) % len(answers)]) for i in TWENTY]
    return case.fresh if samples == "fresh" else case, pairs


@cache
def gradients_of_term(name: str, aggregation: str | None, samples: str) -> list[Tensor]:
    """Of each batch; many losses are of one term."""
    case, batches = batches_of(samples)
    loss = partial(of_term, TERMS[name], aggregation)
    return [gradient_of(case, batch, loss) for batch in batches]


def gradient_of(case: Case, batch, loss) -> Tensor:
    leaf = case.policy.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(tensors(case, batch, leaf)), leaf)
    return gradient


def test_leave_one_out_keeps_the_gradient_over_batches_of_two():
    """All 225 batches of two answers: the baseline costs nothing in expectation."""
    cases = [case.fresh for case in trees()]
    name, scale = descends(NAMED["rloo"], cases[:1], batch_size=2)
    assert (name, scale) == ("reverse KL", pytest.approx(1.0))


def test_a_clamped_mixture_leaves_a_millionth_of_the_reverse_kl():
    """To six digits: the rest of a Jensen-Shannon divergence is smaller by as much again."""
    entry = next(entry for entry in HELD_OUT if entry.name == "megatron_jsd")
    for case in (case.fresh for case in states(entry)):
        left = expected_gradient(entry, case) * 1e6
        assert (left - case.exact["reverse KL"]).norm() < 1e-5 * left.norm()


def test_a_flipped_sign_is_found():
    """The enumeration itself: the same loss, with minus beta."""
    case = next(iter(states(NAMED["closure"]))).fresh
    right = expected_gradient(NAMED["closure"], case)
    flipped = expected_gradient(NAMED["kl_loss_subtracted"], case)
    torch.testing.assert_close(right, -flipped, rtol=0, atol=1e-12)
