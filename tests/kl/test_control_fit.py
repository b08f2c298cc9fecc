"""The weight of the control variate that earlier batches fit, and what its own batch would do."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from analysis.evidence.prefix_controls import same_batch_bias
from analysis.records.variants import Distillation
from kl_term.kl.choice import KLChoice
from kl_term.kl.control import (
    FIRST,
    MEMORY,
    ControlFit,
    control_sums,
    control_variance,
    fitted_control,
    weight_of,
)
from kl_term.kl.credit import sample_gradients
from kl_term.kl.packing import sequence_ids
from kl_term.kl.sequences import sequence_probability
from kl_term.kl.term import KLTerm
from tests.kl.test_control import credit
from tests.kl.test_prefix import World

PREFIX = {"estimator": "k3", "weighting": "attached", "ratio": "prefix"}
FITTED = KLTerm(**PREFIX, control="fitted")
SMALL = {"ragged": (3, 3, 2), "ended": (2, 4, 0), "fixed": (3, 2, None)}


@pytest.fixture(params=[False, True], ids=["fresh", "stale"])
def stale(request):
    return request.param


@pytest.fixture(params=SMALL.values(), ids=SMALL.keys())
def world(request, stale):
    return World(*request.param, stale=stale)


def loss(world, term, **how):
    given = (world.logp, world.ref_logp)
    return term.loss(*given, old_logp=world.old_logp, mask=world.mask, **how)


def by_hand(world, answer):
    """The two sums of one answer, token by token."""
    kept = world.mask[answer]
    own, ref, old = (x.detach()[answer][kept] for x in (world.logp, world.ref_logp, world.old_logp))
    product = square = past = 0.0
    for t in range(len(own)):
        ratio = [math.exp((own - old)[: u + 1].sum()) for u in range(len(own))]
        variate = ratio[t] * (math.exp(ref[t] - own[t]) - 1)
        owed = sum(ratio[u] * float(own[u] - ref[u]) for u in range(t, len(own)))
        product -= float(variate * past * owed)
        square += float(variate**2 * past)
        past += (1 - math.exp(own[t])) ** 2
    return product, square


def test_the_sums_are_those_of_the_formula(world):
    sums = control_sums(world.logp, world.ref_logp, world.old_logp, world.mask)
    each = [by_hand(world, row) for row in range(len(world.mask))]
    expected = torch.tensor(each, dtype=torch.float64)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)
    assert (sums - expected * torch.tensor([-1.0, 1.0])).abs().max() > 1e-2  # the flipped sign
    whole = fitted_control(world.logp, world.ref_logp, world.old_logp, world.mask)
    product, square = expected.sum(0).tolist()
    assert whole.item() == pytest.approx(min(1.0, max(0.0, product / square)), rel=1e-12)
    shaped = [x.detach().unsqueeze(0) for x in (world.logp, world.ref_logp, world.old_logp)]
    assert fitted_control(*shaped, world.mask.unsqueeze(0)) == pytest.approx(whole.item())


def test_a_fitted_weight_is_the_number_that_is_given(world):
    for number in (0.0, 0.3, 1.0):
        same = loss(world, KLTerm(**PREFIX, control=number))
        scalar = torch.tensor(number, dtype=torch.float64)
        for given in (number, scalar, scalar.expand(1, 1)):
            torch.testing.assert_close(loss(world, FITTED, control=given), same, rtol=0, atol=1e-14)
    assert (loss(world, FITTED, control=0.7) - same).abs().max() > 1e-2
    fixed = KLTerm(**PREFIX, control=0.3)
    assert torch.equal(loss(world, fixed, control=0.9), loss(world, fixed))  # it has its own
    rows = torch.linspace(0, 1, len(world.mask)).double().unsqueeze(-1)
    each = loss(world, FITTED, control=rows)
    for row in (0, len(world.mask) // 2):
        of_row = loss(world, KLTerm(**PREFIX, control=rows[row].item()))[row]
        torch.testing.assert_close(each[row], of_row)


def test_packed_rows_have_it_too():
    world = World(3, 4, 2, stale=True)
    kept = world.mask.flatten()
    packed = [x.flatten()[kept] for x in (world.logp, world.ref_logp, world.old_logp)]
    ends = torch.nn.functional.pad(world.mask.sum(-1).cumsum(0), (1, 0))
    found = FITTED.loss(
        *packed[:2], old_logp=packed[2], sequence_ids=sequence_ids(cu_seqlens=ends), control=0.4
    )
    torch.testing.assert_close(found, loss(world, FITTED, control=0.4).flatten()[kept])


def test_without_a_weight_it_is_refused(world):
    with pytest.raises(ValueError, match="control is needed"):
        loss(world, FITTED)


def test_it_is_named_and_written_as_what_it_is():
    assert FITTED.name == "k3_loss_attached_prefix_control_fitted"
    assert KLTerm.model_validate_json(FITTED.model_dump_json()) == FITTED
    assert KLChoice(**dict(FITTED)) == FITTED != KLTerm(**PREFIX)
    for wrong in ("best", 1.5, -0.1, float("nan"), True, None):
        with pytest.raises(ValueError, match="control"):
            KLTerm(**PREFIX, control=wrong)
    with pytest.raises(ValueError, match="control='fitted' has no meaning"):
        KLTerm(estimator="k3", control="fitted")
    with pytest.raises(ValueError, match="is for the KL to the reference"):
        Distillation(kl=KLChoice(**PREFIX, control="fitted"))


# From batch to batch.


def test_sums_of_earlier_batches_fade():
    fit, seen = ControlFit(2), []
    generator = torch.Generator().manual_seed(0)
    assert fit.weight.tolist() == [1.0, 1.0]
    for number in range(6):
        parts = torch.rand(3, 2, 2, generator=generator, dtype=torch.float64)
        parts[..., 0] -= 0.5 * parts[..., 0].mean() + 0.02 * number
        before = fit.weight
        for part in parts:
            fit.add(part)
        assert torch.equal(fit.weight, before), "not of the batch that it is used on"
        fit.advance()
        seen.append(parts.sum(0))
        faded = FIRST * MEMORY ** (number + 1)
        faded = faded + sum(MEMORY ** (number - i) * each for i, each in enumerate(seen))
        expected = (faded[:, 0] / faded[:, 1]).clamp(0, 1)
        torch.testing.assert_close(fit.weight, expected, rtol=1e-12, atol=0)
    assert 0 < fit.weight.min() < fit.weight.max() < 1


def test_an_overflow_is_k1_for_a_batch_and_then_forgotten():
    fit = ControlFit()
    for sums, weight in (((1.0, 2.0), 0.5), ((1.0, math.inf), 0.0), ((3.0, 4.0), 0.75)):
        fit.add(torch.tensor(sums))
        fit.advance()
        assert fit.weight == pytest.approx(weight, abs=1e-5)
    fit.add(torch.tensor([math.nan, 1.0]))
    fit.advance()
    assert fit.weight == 0


def test_rounding_at_the_reference_says_nothing():
    fit = ControlFit()
    fit.add(torch.tensor([-1e-12, 1e-11]))
    fit.advance()
    assert fit.weight == pytest.approx(1.0, abs=1e-4)
    fit.add(torch.tensor([1e-3, 4e-3]))
    fit.advance()
    assert fit.weight == pytest.approx(0.25, abs=1e-3)


# Bias.


def gradient(world, weight):
    """[N, D]: of each answer, at the weight of each."""
    return sample_gradients(world.logits, world.sequences, credit(world, weight)).flatten(1)


def test_a_weight_of_another_batch_leaves_the_mean_and_one_of_its_own_does_not(world):
    """Every pair of batches of one answer; then every batch of two, with its own weight."""
    chance = sequence_probability(world.old_logits, world.sequences)
    sums = control_sums(world.logp, world.ref_logp, world.old_logp, world.mask)
    plain, quiet = gradient(world, 0.0), gradient(world, 1.0)
    step, exact = quiet - plain, world.exact.flatten()
    weights = weight_of(sums)
    assert weights.min() < 0.9 < weights.max()
    apart = sum(
        chance[i] * chance[j] * (plain[j] + weights[i] * step[j])
        for i, j in itertools.product(range(len(chance)), repeat=2)
    )
    torch.testing.assert_close(apart, exact, rtol=0, atol=1e-12)
    own = torch.zeros_like(exact)
    for i, j in itertools.product(range(len(chance)), repeat=2):
        weight = weight_of(sums[i] + sums[j])
        own += chance[i] * chance[j] * (plain[i] + plain[j] + weight * (step[i] + step[j])) / 2
    found = same_batch_bias(
        world.logits, world.ref_logits, world.sequences, world.old_logits, answers=2
    )
    bias = ((own - exact).norm() / exact.norm()).item()
    assert found.bias.item() == pytest.approx(bias, rel=1e-9)
    assert bias > 1e-3


def test_the_bias_of_a_weight_of_its_own_batch_is_bounded(world):
    tables = (world.logits, world.ref_logits, world.sequences, world.old_logits)
    size = world.exact.norm()
    for answers in (1, 2, 3):
        found = same_batch_bias(*tables, answers=answers)
        bound = 0.5 * (control_variance(*tables).curvature / answers).sqrt() / size
        assert found.bound.item() == pytest.approx(bound.item(), rel=1e-9)
        assert 0 < found.bias < found.bound
