"""The control variate between k1 and k3 under the prefix ratio, against every answer listed."""

from __future__ import annotations

import pytest
import torch

from analysis.records.variants import Variant
from analysis.sweeps.store import canonical
from analysis.training.kl_terms import KLTerms, Views
from kl_term.kl.choice import KLChoice
from kl_term.kl.control import control_variance, fitted_control, fitted_control_of_gradients
from kl_term.kl.credit import (
    credit_moments,
    sample_gradients,
    state_average,
    weighted_moments,
)
from kl_term.kl.prefix import k3_noise_gap, prefix_coefficients
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import sequence_probability
from kl_term.kl.surrogates import kl_loss
from kl_term.kl.term import KLTerm
from tests.kl.test_prefix import WORLDS, World
from tests.kl.test_prefix_noise import end_or_go_on
from tests.trees import draw


@pytest.fixture(params=WORLDS.values(), ids=WORLDS.keys())
def shape(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["fresh", "stale"])
def world(request, shape):
    return World(*shape, stale=request.param)


def credit(world, control):
    """c_u by the formula; ``control`` a number, or one a token that its past decides."""
    ratio = world.ratio("prefix").detach()
    log_ratio = world.log_ratio.detach()
    cost = torch.where(world.mask, log_ratio + control * torch.expm1(-log_ratio), 0.0)
    to_go = reward_to_go(ratio * cost)
    return torch.where(world.mask, to_go - ratio * cost + ratio * log_ratio, 0.0)


def variance(world, credits):
    return credit_moments(world.logits, world.sequences, credits, world.old_logits).trace_var


@pytest.mark.parametrize("control", [0.0, 0.3, 1.0])
def test_every_weight_has_the_gradient_of_the_sequence_kl(world, control):
    term = KLTerm(estimator="k3", weighting="attached", ratio="prefix", control=control)
    loss = term.loss(world.logp, world.ref_logp, old_logp=world.old_logp, mask=world.mask)
    assert world.error(world.gradient(loss)) < 1e-12
    (each,) = torch.autograd.grad(loss.sum(), world.logp, retain_graph=True)
    torch.testing.assert_close(each, credit(world, control), rtol=1e-10, atol=1e-10)
    flipped = loss + world.ratio("prefix") * (world.log_ratio.exp() - 1)  # 1/r for r
    assert world.error(world.gradient(flipped)) > 1e-2


def test_its_ends_are_k1_to_go_and_k3(world):
    ratio = world.ratio("prefix").detach()
    to_go = reward_to_go(torch.where(world.mask, ratio * world.log_ratio.detach(), 0.0))
    torch.testing.assert_close(credit(world, 0.0), torch.where(world.mask, to_go, 0.0))
    sampled = (x.detach() for x in (world.logp, world.ref_logp, world.old_logp))
    torch.testing.assert_close(credit(world, 1.0), prefix_coefficients(*sampled, world.mask))


def test_the_variance_is_a_parabola_whatever_the_baseline(world):
    tables = (world.logits, world.ref_logits, world.sequences, world.old_logits)
    found = control_variance(*tables)
    torch.testing.assert_close(k3_noise_gap(*tables), found.curvature + 2 * found.slope)
    levels = draw(world.sequences.num_states, seed=5)[world.sequences.states]
    baseline = world.ratio("prefix").detach() * torch.exp(world.old_logp - world.logp.detach())
    for off in (0.0, levels, baseline * levels):  # known before the token
        bare = variance(world, credit(world, 0.0) - off)
        for control in (-0.4, 0.35, 1.0, found.best):
            beyond = variance(world, credit(world, control) - off) - bare
            formula = found.curvature * control**2 + 2 * found.slope * control
            assert beyond.item() == pytest.approx(formula.item(), rel=1e-9, abs=1e-9)
    assert variance(world, credit(world, found.best)) <= variance(world, credit(world, 1.0)) + 1e-12
    assert variance(world, credit(world, found.best)) <= variance(world, credit(world, 0.0)) + 1e-12
    assert variance(world, credit(world, -found.best)) > variance(world, credit(world, 0.0))


def test_a_weight_of_each_prefix_is_unbiased_and_quieter_still(world):
    logp, old_logp = world.logp.detach(), world.old_logp
    log_ratio = torch.where(world.mask, world.log_ratio.detach(), 0.0)
    owed = state_average(reward_to_go(log_ratio), world.logits, world.sequences, by_action=True)
    owed = owed[world.sequences.states, world.sequences.tokens]
    squared = torch.exp(2 * (logp - old_logp))
    variate = torch.expm1(-log_ratio)
    means = [
        state_average(squared * part, world.old_logits, world.sequences)
        for part in (variate.square(), variate * owed)
    ]
    best = (-means[1] / means[0])[world.sequences.states]
    moments = credit_moments(world.logits, world.sequences, credit(world, best), world.old_logits)
    assert world.error(moments.mean) < 1e-12
    constant = control_variance(
        world.logits, world.ref_logits, world.sequences, world.old_logits
    ).best
    assert moments.trace_var <= variance(world, credit(world, constant)) + 1e-12


def drawn(world, count, seed=0):
    """Answers of the sampler: log-probs under policy, reference and sampler, mask, scores."""
    generator = torch.Generator().manual_seed(seed)
    chance = sequence_probability(world.old_logits, world.sequences)
    rows = torch.multinomial(chance, count, replacement=True, generator=generator)
    policy = world.logits.softmax(-1)
    scores = 1 - 2 * world.logp.detach().exp()
    scores = scores + policy.square().sum(-1)[world.sequences.states]
    parts = (world.logp.detach(), world.ref_logp, world.old_logp, world.mask, scores)
    return [part[rows] for part in parts], rows


def test_a_batch_finds_the_best_weight(world):
    best = (
        control_variance(world.logits, world.ref_logits, world.sequences, world.old_logits)
        .best.clamp(0, 1)
        .item()
    )
    (*sampled, scores), rows = drawn(world, 200_000)
    assert fitted_control(*sampled, squared_scores=scores).item() == pytest.approx(best, abs=0.08)
    plain, quiet = (
        sample_gradients(world.logits, world.sequences, credit(world, x)).flatten(1)[rows[:60_000]]
        for x in (0.0, 1.0)
    )
    assert fitted_control_of_gradients(plain, quiet).item() == pytest.approx(best, abs=0.1)


def test_near_the_reference_it_is_k3_and_after_an_overflow_k1():
    near = World(3, 4, 2, stale=False, drift=0.01)
    assert fitted_control(*drawn(near, 256)[0][:4]).item() == pytest.approx(1.0, abs=0.05)
    logp, ref_logp = torch.tensor([[-0.1, -900.0]]).double(), torch.tensor([[-0.2, -0.1]]).double()
    everything = torch.ones(1, 2, dtype=torch.bool)
    assert fitted_control(logp, ref_logp, logp, everything) == 0
    assert fitted_control(logp, logp, logp, everything) == 1


def test_where_rows_are_shared_the_rule_of_own_rows_fails():
    """The stop probability in one row for all positions: near the reference k3 is the louder."""
    shared = end_or_go_on(4, 1e-3)
    plain, quiet = shared.gradients(shared.reward), shared.gradients(shared.k3)

    def spread(control):
        mixed = weighted_moments(shared.probability, plain + control * (quiet - plain))
        torch.testing.assert_close(mixed.mean, shared.probability @ plain, rtol=0, atol=1e-13)
        return mixed.trace_var.item()

    policy, reference, _ = shared.tables
    own_rows = control_variance(policy, reference, shared.sequences).best.item()
    step = quiet - plain
    best = -(shared.probability @ (plain * step).sum(-1)) / (
        shared.probability @ step.square().sum(-1)
    )
    assert own_rows == pytest.approx(1.0, abs=0.02)
    assert -0.2 < best < 0
    assert spread(own_rows) > 7 * spread(0.0) > 7 * spread(best)
    generator = torch.Generator().manual_seed(0)
    rows = torch.multinomial(shared.probability, 20_000, replacement=True, generator=generator)
    assert fitted_control_of_gradients(plain[rows], quiet[rows]) == 0
    sampled = (x[rows] for x in (shared.logp, shared.ref_logp, shared.old_logp))
    assert fitted_control(*sampled, shared.sequences.mask[rows]) > 0.9


def test_what_does_not_name_it_is_recorded_and_called_as_before():
    before = KLChoice(estimator="k3", weighting="attached", ratio="prefix")
    assert "control" not in before.model_dump()
    assert "control" not in before.model_dump_json()
    assert before.name == "k3_loss_attached_prefix"
    named = KLChoice(**dict(before) | {"control": 0.5})
    assert named.name == "k3_loss_attached_prefix_control_0.5"
    assert named != before
    assert KLChoice.model_validate_json(named.model_dump_json()) == named
    assert KLTerm(**dict(named)) == named


@pytest.mark.parametrize(
    "fields",
    [
        {"estimator": "k3", "weighting": "attached", "control": 0.5},
        {"estimator": "k1", "weighting": "attached", "ratio": "prefix", "control": 0.5},
        {"estimator": "k3", "weighting": "detached", "ratio": "prefix", "control": 0.5},
        {"estimator": "k1", "placement": "reward", "control": 0.5},
        {"estimator": "k3", "weighting": "attached", "ratio": "prefix", "control": 1.5},
        {"estimator": "k3", "weighting": "attached", "ratio": "prefix", "control": float("nan")},
    ],
)
def test_a_weight_that_nothing_reads_is_refused(fields):
    with pytest.raises(ValueError, match="control"):
        KLChoice(**fields)
    logp = draw(2, 3, seed=1)
    with pytest.raises(ValueError, match="control"):
        kl_loss(logp, logp, control=0.5)


def test_a_variant_that_does_not_name_it_is_stored_under_the_key_that_it_had():
    kl = {"estimator": "k3", "weighting": "attached", "ratio": "prefix"}
    before = Variant(kl=KLChoice(**kl), beta=0.1)
    assert b"control" not in canonical(before)
    assert canonical(before) == canonical(Variant(kl=KLTerm(**kl, control=1.0), beta=0.1))
    named = Variant(kl=KLChoice(**kl, control=0.5), beta=0.1)
    assert b'"control":0.5' in canonical(named).replace(b" ", b"")
    assert named.name == "k3_loss_attached_prefix_control_0.5"


def test_the_population_trainer_trains_on_it(world):
    """The same numbers as the term itself, per run, beside a run without a weight."""
    kl = {"estimator": "k3", "weighting": "attached", "ratio": "prefix"}
    choices = [KLChoice(**kl, control=0.3), KLChoice(**kl)]
    terms = KLTerms(choices, ["after"] * 2, [0.1, 0.2], torch.float64, torch.device("cpu"))
    shape = (2, 1, *world.logp.shape)
    sampled = [x.detach().expand(shape) for x in (world.logp, world.old_logp, world.ref_logp)]
    empty = torch.zeros(*shape, 1, dtype=torch.float64)
    views = Views(*sampled, empty, empty, world.mask.expand(shape))
    found = terms.loss(views)
    for run, (choice, beta) in enumerate(zip(choices, (0.1, 0.2), strict=True)):
        expected = KLTerm(**dict(choice)).loss(
            world.logp.detach(), world.ref_logp, old_logp=world.old_logp, mask=world.mask
        )
        torch.testing.assert_close(found[run, 0], beta * expected)
    assert not torch.allclose(found[0] / 0.1, found[1] / 0.2)
