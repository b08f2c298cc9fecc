"""The one KL term: each axis against a loop over tokens, the scale of a completion, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.kl.choice import KLChoice
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import MODES, token_weights
from tests.trees import draw

K = {
    "k1": lambda l: l,
    "k2": lambda l: l * l / 2,
    "k3": lambda l: math.exp(-l) - 1 + l,
    "k3_clip": lambda l: min(math.exp(-l), 10.0) - 1 + l,
}
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)


@pytest.fixture
def sampled():
    generator = torch.Generator().manual_seed(3)
    logp, ref_logp, old_logp = -3 * torch.rand(3, *MASK.shape, generator=generator).double()
    return logp.requires_grad_(), ref_logp, old_logp


@pytest.mark.parametrize("estimator", K)
@pytest.mark.parametrize("ratio", ["token", "prefix", "sequence", "geometric"])
def test_losses_of_tokens_by_hand(sampled, estimator, ratio):
    logp, ref_logp, old_logp = sampled
    loss = KLTerm(estimator=estimator, weighting="detached", ratio=ratio).loss(
        logp, ref_logp, old_logp=old_logp, mask=MASK
    )
    for i, row in enumerate(MASK.tolist()):
        steps = [(logp[i, t] - old_logp[i, t]).item() for t in range(4) if row[t]]
        for t in range(4):
            before = sum(row[: t + 1])
            log_ratio = {
                "token": steps[before - 1],
                "prefix": sum(steps[:before]),
                "sequence": sum(steps),
                "geometric": sum(steps) / len(steps),
            }[ratio]
            expected = 0.0
            if row[t]:
                expected = math.exp(log_ratio) * K[estimator]((logp - ref_logp)[i, t].item())
            assert loss[i, t].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", K)
@pytest.mark.parametrize("weighting", ["none", "attached", "detached"])
def test_a_completion_has_one_term_which_its_tokens_sum_to(sampled, estimator, weighting):
    logp, ref_logp, old_logp = sampled
    term = KLTerm(estimator=estimator, level="sequence", weighting=weighting)
    loss = term.loss(logp, ref_logp, old_logp=old_logp, mask=MASK)
    assert (loss[~MASK] == 0).all()
    for i in range(len(MASK)):
        whole = (logp - ref_logp)[i][MASK[i]].sum().item()
        weight = (logp - old_logp)[i][MASK[i]].sum().exp().item() if weighting != "none" else 1.0
        assert loss[i].sum().item() == pytest.approx(weight * K[estimator](whole), abs=1e-12)
        assert loss[i][MASK[i]].std() < 1e-12


@pytest.mark.parametrize("aggregation", MODES)
def test_k1_has_one_value_at_both_levels_whatever_the_aggregation(sampled, aggregation):
    logp, ref_logp, _ = sampled
    weights = token_weights(MASK, aggregation, dtype=logp.dtype)
    token, sequence = (
        (weights * KLTerm(estimator="k1", level=level).loss(logp, ref_logp, mask=MASK)).sum()
        for level in ("token", "sequence")
    )
    assert token.item() == pytest.approx(sequence.item(), abs=1e-14)


@pytest.mark.parametrize("aggregation", MODES)
def test_k2_of_a_completion_as_a_loss_is_its_k1_in_the_reward_sample_by_sample(
    sampled, aggregation
):
    logp, ref_logp, _ = sampled
    weights = token_weights(MASK, aggregation, dtype=logp.dtype)
    loss = KLTerm(estimator="k2", level="sequence").loss(logp, ref_logp, mask=MASK)
    (as_loss,) = torch.autograd.grad((weights * loss).sum(), logp)
    owed = KLTerm(estimator="k1", placement="reward", level="sequence").penalty(
        logp, ref_logp, mask=MASK
    )
    torch.testing.assert_close(as_loss, weights * owed, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(as_loss, -weights * owed)


def test_penalties_by_hand(sampled):
    logp, ref_logp, _ = sampled
    own = torch.where(MASK, logp - ref_logp, 0.0).detach()
    owed = lambda **fields: KLTerm(estimator="k1", placement="reward", **fields).penalty(
        logp, ref_logp, mask=MASK
    )
    later = torch.stack([own[:, t:].sum(1) for t in range(4)], 1)
    assert torch.equal(owed(credit="immediate"), own)
    torch.testing.assert_close(owed(), torch.where(MASK, later, 0.0))
    every = torch.where(MASK, own.sum(1, keepdim=True), 0.0)
    torch.testing.assert_close(owed(credit="whole"), every)
    torch.testing.assert_close(owed(level="sequence"), every)
    squared = KLTerm(estimator="k2", placement="reward", level="sequence")
    torch.testing.assert_close(
        squared.completion_penalty(logp, ref_logp, mask=MASK), own.sum(1).square() / 2
    )
    assert not owed().requires_grad


def test_the_full_vocabulary_and_cross_entropy(sampled):
    logp, ref_logp, _ = sampled
    logits, ref_logits = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for name, exact in (("exact", reverse_kl), ("forward", forward_kl)):
        found = KLTerm(estimator=name).loss(
            logp, ref_logp, mask=MASK, logits=logits, ref_logits=ref_logits
        )
        assert torch.equal(found, torch.where(MASK, exact(logits, ref_logits), 0.0))
        with pytest.raises(ValueError, match="needs logits and ref_logits"):
            KLTerm(estimator=name).loss(logp, ref_logp, mask=MASK)
    found = KLTerm(estimator="cross_entropy").loss(logp, ref_logp, mask=MASK)
    assert torch.equal(found, torch.where(MASK, -logp, 0.0))


def test_the_value_that_is_shown_is_not_the_one_that_is_descended(sampled):
    logp, ref_logp, _ = sampled
    shown = KLTerm(estimator="k2", value="k3").loss(logp, ref_logp, mask=MASK)
    torch.testing.assert_close(shown, KLTerm().loss(logp, ref_logp, mask=MASK))
    (slope,) = torch.autograd.grad(shown.sum(), logp)
    torch.testing.assert_close(slope, torch.where(MASK, logp - ref_logp, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_half_precision_is_summed_in_float32(dtype, level):
    generator = torch.Generator().manual_seed(1)
    logp, ref_logp = (-9 * torch.rand(2, 2, 4000, generator=generator)).to(dtype)
    mask = torch.ones(2, 4000, dtype=torch.bool)
    fields = {"estimator": "k1", "level": level}
    loss = KLTerm(**fields).loss(logp, ref_logp, mask=mask)
    exact = (logp.double() - ref_logp.double()).sum(-1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double().sum(-1), exact, rtol=1e-3, atol=1e-2)
    owed = KLTerm(placement="reward", **fields).penalty(logp, ref_logp, mask=mask)
    torch.testing.assert_close(owed[:, 0].double(), exact, rtol=1e-3, atol=1e-2)
    mixed = KLTerm(**fields).loss(logp.float(), ref_logp, mask=mask)
    torch.testing.assert_close(mixed.double().sum(-1), exact, rtol=1e-3, atol=1e-2)


def test_an_overflowing_ratio_leaves_masked_positions_at_zero():
    logp = torch.tensor([[-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, False]])
    for ratio in ("prefix", "sequence"):
        term = KLTerm(weighting="attached", ratio=ratio)
        loss = term.loss(logp, logp - 0.5, old_logp=torch.full((1, 3), -95.0), mask=mask)
        assert loss[0, 2] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"estimator": "minimax01", "placement": "reward"}, "works in the loss only"),
        ({"estimator": "minimax01", "weighting": "attached"}, "a gradient only"),
        ({"estimator": "exact", "weighting": "attached"}, "weighting='attached' has no meaning"),
        ({"estimator": "forward", "level": "sequence"}, "level='sequence' has no meaning"),
        ({"estimator": "none", "level": "sequence"}, "level='sequence' has no meaning"),
        ({"placement": "reward", "weighting": "detached"}, "has the ratio already"),
        ({"placement": "reward", "value": "k1"}, "value='k1' has no meaning in the reward"),
        ({"estimator": "exact", "value": "k1"}, "value='k1' has no meaning for exact"),
        ({"credit": "immediate"}, "credit='immediate' has no meaning in the loss"),
        ({"ratio": "prefix"}, "ratio='prefix' has no meaning without a weighting"),
        (
            {"level": "sequence", "weighting": "attached", "ratio": "prefix"},
            "ratio='prefix' has no meaning at level sequence",
        ),
        ({"estimator": "no_such"}, "Input should be"),
    ],
)
def test_what_would_go_unread_is_refused(fields, message):
    with pytest.raises(ValueError, match=message) as refused:
        KLTerm(**fields)
    assert str(refused.value).startswith("KLTerm: ") and "\n" not in str(refused.value)


def test_a_misspelt_field_is_named_in_one_line():
    with pytest.raises(ValueError, match=r"^KLTerm: estimater: Extra inputs are not permitted$"):
        KLTerm(estimater="k2")


def test_names():
    assert KLTerm().name == "k3_loss"
    assert KLTerm(estimator="none").name == "none"
    assert KLTerm(weighting="attached", ratio="prefix").name == "k3_loss_attached_prefix"
    assert KLTerm(estimator="k2", level="sequence").name == "k2_loss_sequence"
    assert KLTerm(estimator="k2", value="k3").name == "k2_loss_shows_k3"
    reward = {"estimator": "k1", "placement": "reward"}
    assert KLTerm(**reward).name == "k1_reward"
    assert KLTerm(**reward, credit="immediate").name == "k1_reward_immediate"


def test_the_axes_that_mean_something_at_one_state():
    term = KLTerm(estimator="k2", weighting="detached", ratio="prefix")
    assert term.at_one_state == {"estimator": "k2", "placement": "loss", "weighting": "detached"}


@pytest.mark.parametrize("estimator", ["exact", "forward"])
def test_the_reference_of_the_vocabulary_is_constant(estimator):
    logits, ref_logits = draw(2, 4, 5, seed=9).requires_grad_(True)
    logp = torch.zeros(4, dtype=torch.float64)
    loss = KLTerm(estimator=estimator).loss(logp, logp, logits=logits, ref_logits=ref_logits)
    of_policy, of_reference = torch.autograd.grad(
        loss.sum(), (logits, ref_logits), allow_unused=True
    )
    assert of_policy.abs().max() > 0.01
    assert of_reference is None


def test_a_choice_and_its_term_are_one() -> None:
    given = {"estimator": "k1", "placement": "reward", "credit": "immediate"}
    choice, term = KLChoice(**given), KLTerm(**given)
    assert choice == term and term == choice and len({choice, term}) == 1
    assert choice != KLTerm(estimator="k1", placement="reward") and choice != "k1_reward_immediate"
