"""Policy losses: values and gradients by hand, clip edges, equivalences, padding garbage."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.objectives.aggregation import MODES, token_weights
from kl_term.objectives.losses import KINDS, LossOutput, policy_loss

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
ADVANTAGES = torch.tensor([1.5, -0.75, 0.4], dtype=torch.float64)
LOW, HIGH = 0.1, 0.3  # asymmetric: swapping them must show
CLIP = {"epsilon_low": LOW, "epsilon_high": HIGH}
MIN_TYPE = [kind for kind in KINDS if kind not in ("cispo", "reinforce")]


def log_probs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ratios from far below to far above the clip range, in every row."""
    generator = torch.Generator().manual_seed(seed)
    old_logp = -3 * torch.rand(3, 4, generator=generator, dtype=torch.float64) - 0.1
    step = 0.5 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return (old_logp + step).requires_grad_(), old_logp


def loss_of(logp, old_logp, *, advantages=ADVANTAGES, mask=MASK, **how) -> LossOutput:
    """With the asymmetric bounds, unless a test says otherwise."""
    return policy_loss(logp, old_logp=old_logp, advantages=advantages, mask=mask, **CLIP | how)


def gradient_of(output: LossOutput, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(output.loss, leaf, retain_graph=True)[0]


def importance_weight(kind: str, log_ratio: torch.Tensor, row: int, t: int) -> float:
    """The weight of one token as the papers write it, in plain Python."""
    counted = [log_ratio[row, s].item() for s in range(4) if MASK[row, s]]
    if kind == "gspo":
        return math.exp(sum(counted) / len(counted))
    if kind == "sequence":
        return math.exp(sum(counted))
    if kind == "reinforce":
        return 1.0
    return math.exp(log_ratio[row, t].item())


def by_hand(kind: str, logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor):
    """Per-token terms, weights, clips, and the gradient of seq_mean_token_mean, token by token."""
    logp = logp.detach()
    terms, weights, gradient = (torch.zeros_like(logp) for _ in range(3))
    clipped = torch.zeros_like(MASK)
    for row in range(3):
        length = int(MASK[row].sum())
        for t in range(length):  # the mask of each row is a prefix
            advantage = advantages[row, t].item()
            weight = importance_weight(kind, logp - old_logp, row, t)
            bounded = min(max(weight, 1 - LOW), 1 + HIGH)
            weights[row, t] = weight
            if kind in ("cispo", "reinforce"):
                terms[row, t] = -bounded * advantage * logp[row, t]
                slope = -bounded * advantage
                clipped[row, t] = bounded != weight
            else:
                terms[row, t] = -min(weight * advantage, bounded * advantage)
                clipped[row, t] = bounded * advantage < weight * advantage
                slope = 0.0 if clipped[row, t] else -weight * advantage
            token_weight = 1 / (3 * length)
            if kind == "sequence":  # every token moves the ratio of the whole row
                gradient[row, :length] += slope * token_weight
            else:
                gradient[row, t] = slope * token_weight
    return terms, weights, clipped, gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_value_and_gradient_by_hand(kind, per_token, seed):
    logp, old_logp = log_probs(seed)
    advantages = ADVANTAGES[:, None].expand(3, 4)
    if per_token:
        generator = torch.Generator().manual_seed(seed + 10)
        advantages = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    terms, weights, clipped, gradient = by_hand(kind, logp, old_logp, advantages)
    given = advantages if per_token else ADVANTAGES
    output = loss_of(logp, old_logp, advantages=given, kind=kind)
    assert torch.allclose(output.per_token, terms, rtol=0, atol=1e-12)
    assert torch.allclose(output.weight, weights, rtol=0, atol=1e-12)
    assert torch.equal(output.clipped, clipped)
    assert output.clip_fraction.item() == pytest.approx(clipped.sum().item() / 9, abs=1e-12)
    row_means = [terms[row, MASK[row]].mean().item() for row in range(3)]
    assert output.loss.item() == pytest.approx(sum(row_means) / 3, abs=1e-12)
    assert torch.allclose(gradient_of(output, logp), gradient, rtol=0, atol=1e-12)
    assert gradient.abs().max() > 1e-2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sequence"])
def test_on_policy_every_token_kind_has_the_gradient_of_reinforce(kind):
    _, old_logp = log_probs()
    logp = old_logp.clone().requires_grad_()
    output = loss_of(logp, old_logp, kind=kind)
    expected = gradient_of(loss_of(logp, old_logp, kind="reinforce"), logp)
    assert torch.allclose(gradient_of(output, logp), expected, rtol=0, atol=1e-12)
    assert (expected[0] < 0).all() and (expected[1, :2] > 0).all()  # descent adds log-prob
    assert torch.equal(output.weight, MASK.double())
    assert output.clip_fraction == 0


@pytest.mark.parametrize("kind", MIN_TYPE)
def test_a_weight_exactly_on_its_bound_keeps_its_gradient(kind):
    logp = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    output = loss_of(
        logp,
        torch.zeros(1, 2, dtype=torch.float64),
        advantages=torch.tensor([[3.0, -3.0]]),
        mask=torch.ones(1, 2),
        kind=kind,
        epsilon_low=0.0,
        epsilon_high=0.0,
        aggregation="seq_mean_token_sum",
    )
    assert not output.clipped.any()
    expected = [[0.0, 0.0]] if kind == "sequence" else [[-3.0, 3.0]]
    assert gradient_of(output, logp).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["gspo", "sequence"])
def test_token_forms_are_the_objective_over_whole_sequences(kind, seed):
    logp, old_logp = log_probs(seed)
    output = loss_of(logp, old_logp, kind=kind)
    log_ratio = torch.where(MASK, logp - old_logp, 0.0).sum(-1)  # with gradient: one a sequence
    ratio = (log_ratio / MASK.sum(-1) if kind == "gspo" else log_ratio).exp()
    loss = -torch.minimum(ratio * ADVANTAGES, ratio.clamp(1 - LOW, 1 + HIGH) * ADVANTAGES).mean()
    (expected,) = torch.autograd.grad(loss, logp)
    assert torch.allclose(output.loss, loss, rtol=0, atol=1e-12)
    assert torch.allclose(gradient_of(output, logp), expected, rtol=0, atol=1e-12)
    assert (loss_of(logp, old_logp, kind="grpo").loss - output.loss).abs() > 1e-4


@pytest.mark.parametrize("aggregation", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_weighted_sum_of_its_terms(kind, aggregation):
    output = loss_of(*log_probs(), kind=kind, aggregation=aggregation)
    weights = token_weights(MASK, aggregation, dtype=torch.float64)
    assert torch.allclose(output.loss, (output.per_token * weights).sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", MODES)
def test_empty_rows_add_zero_and_an_empty_batch_is_zero(kind, aggregation):
    logp, old_logp = log_probs()
    output = loss_of(logp * math.nan, old_logp, mask=torch.zeros_like(MASK), kind=kind)
    assert output.loss.item() == 0.0 and output.clip_fraction.item() == 0.0
    mask = MASK.clone()
    mask[1] = False
    advantages = torch.tensor([1.5, math.nan, 0.4], dtype=torch.float64)
    how = {"kind": kind, "aggregation": aggregation}
    output = loss_of(logp, old_logp, advantages=advantages, mask=mask, **how)
    gradient = gradient_of(output, logp)
    assert output.loss.isfinite() and output.loss != 0
    assert torch.count_nonzero(gradient[1]) == 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", MIN_TYPE)
def test_an_overflowing_ratio_that_is_clipped_or_masked_has_zero_gradient_not_nan(kind):
    logp = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    old_logp = torch.full((2, 3), -200.0)
    advantages = torch.tensor([1.0, 0.0])
    output = loss_of(logp, old_logp, advantages=advantages, mask=mask, kind=kind)
    assert output.loss.item() == pytest.approx(-(1 + HIGH) / 2)
    assert output.weight[0, 0].item() == math.inf
    assert torch.equal(gradient_of(output, logp), torch.zeros(2, 3))
    assert output.clipped.tolist() == [[True, True, False], [False, False, False]]


@pytest.mark.parametrize("kind", MIN_TYPE)
def test_a_counted_token_of_probability_zero_has_ratio_zero(kind):
    logp = torch.tensor([[-1.0, -torch.inf, -2.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    old_logp = torch.full((2, 3), -1.01)
    for advantage in (1.0, -1.0):
        advantages, mask = torch.full((2,), advantage), torch.ones(2, 3)
        output = loss_of(logp, old_logp, advantages=advantages, mask=mask, kind=kind)
        gradient = gradient_of(output, logp)
        assert output.loss.isfinite() and output.weight[0, 1] == 0
        assert gradient.isfinite().all() and gradient[0, 1] == 0 and gradient[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_log_prob_that_counts_stays_visible(kind):
    logp, old_logp = log_probs()
    bad = logp.detach().clone()
    bad[0, 1] = math.nan
    for advantages in (ADVANTAGES, torch.zeros(3)):
        assert loss_of(bad, old_logp, advantages=advantages, kind=kind).loss.isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_policy_gets_a_gradient(kind):
    logp, old_logp = log_probs()
    old_logp, advantages = old_logp.requires_grad_(), ADVANTAGES.clone().requires_grad_()
    output = loss_of(logp, old_logp, advantages=advantages, kind=kind)
    output.loss.backward()
    assert old_logp.grad is None and advantages.grad is None and logp.grad is not None
    assert [name for name in LossOutput._fields if getattr(output, name).requires_grad] == [
        "loss",
        "per_token",
    ]
