"""Policy losses: values and gradients by hand, clip edges, equivalences, padding garbage."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.objectives.advantages import fold_kl, group_centre
from analysis.objectives.aggregation import MODES, token_weights
from analysis.objectives.losses import KINDS, LossOutput, policy_loss

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
    given_advantages = advantages if per_token else ADVANTAGES
    output = policy_loss(
        logp, old_logp=old_logp, advantages=given_advantages, mask=MASK, kind=kind, **CLIP
    )
    output.loss.backward()
    assert torch.allclose(output.per_token, terms, rtol=0, atol=1e-12)
    assert torch.allclose(output.weight, weights, rtol=0, atol=1e-12)
    assert torch.equal(output.clipped, clipped)
    assert output.clip_fraction.item() == pytest.approx(clipped.sum().item() / 9, abs=1e-12)
    row_means = [terms[row, MASK[row]].mean().item() for row in range(3)]
    assert output.loss.item() == pytest.approx(sum(row_means) / 3, abs=1e-12)
    assert torch.allclose(logp.grad, gradient, rtol=0, atol=1e-12)
    assert gradient.abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_signs_and_swapped_arguments_differ(kind):
    logp, old_logp = log_probs()
    loss = policy_loss(
        logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, kind=kind, **CLIP
    ).loss
    flipped = policy_loss(
        logp, old_logp=old_logp, advantages=-ADVANTAGES, mask=MASK, kind=kind, **CLIP
    ).loss
    swapped = policy_loss(
        old_logp, old_logp=logp, advantages=ADVANTAGES, mask=MASK, kind=kind, **CLIP
    ).loss
    assert (loss - flipped).abs() > 1e-2
    assert (loss - swapped).abs() > 1e-2
    (gradient,) = torch.autograd.grad(loss, logp)
    (wrong,) = torch.autograd.grad(flipped, logp)
    assert (gradient - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reinforce"])
def test_bounds_are_not_interchangeable(kind):
    logp, old_logp = log_probs()
    per_token = [
        policy_loss(
            logp,
            old_logp=old_logp,
            advantages=ADVANTAGES,
            mask=MASK,
            kind=kind,
            epsilon_low=low,
            epsilon_high=high,
        ).per_token
        for low, high in ((LOW, HIGH), (HIGH, LOW))
    ]
    assert (per_token[0] - per_token[1]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_against_the_gradient_raises_what_has_a_positive_advantage(kind):
    old_logp = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]], dtype=torch.float64)
    logp = old_logp.clone().requires_grad_()
    policy_loss(
        logp,
        old_logp=old_logp,
        advantages=torch.tensor([1.0, -2.0]),
        mask=torch.ones(2, 2),
        kind=kind,
    ).loss.backward()
    assert (logp.grad[0] < 0).all()  # descent adds log-prob
    assert (logp.grad[1] > 0).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sequence"])
def test_on_policy_every_token_kind_has_the_gradient_of_reinforce(kind):
    _, old_logp = log_probs()
    logp = old_logp.clone().requires_grad_()
    output = policy_loss(
        logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, kind=kind, **CLIP
    )
    (gradient,) = torch.autograd.grad(output.loss, logp)
    plain = policy_loss(
        logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, kind="reinforce"
    ).loss
    (expected,) = torch.autograd.grad(plain, logp)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    assert torch.equal(output.weight, MASK.double())
    assert output.clip_fraction == 0


@pytest.mark.parametrize("kind", MIN_TYPE)
@pytest.mark.parametrize(
    ("advantage", "ratio", "is_clipped"),
    [
        (2.0, 1.5, True),
        (2.0, 1.25, False),
        (2.0, 0.5, False),  # below the range, but the advantage asks to come back
        (-2.0, 0.5, True),
        (-2.0, 0.95, False),
        (-2.0, 1.5, False),  # above the range, but the advantage asks to come back
        (2.0, 1.0, False),
        (0.0, 9.0, False),
    ],
)
def test_clip_edges(kind, advantage, ratio, is_clipped):
    old_logp = torch.tensor([[-2.0]], dtype=torch.float64)
    logp = (old_logp + math.log(ratio)).requires_grad_()
    output = policy_loss(
        logp,
        old_logp=old_logp,
        advantages=torch.tensor([advantage]),
        mask=torch.ones(1, 1),
        kind=kind,
        **CLIP,
    )
    output.loss.backward()
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH) if is_clipped else ratio
    assert output.loss.item() == pytest.approx(-bounded * advantage, abs=1e-12)
    assert output.clipped.item() == is_clipped
    assert logp.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage, abs=1e-12)


def test_a_weight_exactly_on_its_bound_keeps_its_gradient():
    logp = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    for kind in MIN_TYPE:
        output = policy_loss(
            logp,
            old_logp=torch.zeros(1, 2, dtype=torch.float64),
            advantages=torch.tensor([[3.0, -3.0]]),
            mask=torch.ones(1, 2),
            kind=kind,
            epsilon_low=0.0,
            epsilon_high=0.0,
            aggregation="seq_mean_token_sum",
        )
        (gradient,) = torch.autograd.grad(output.loss, logp)
        assert not output.clipped.any()
        expected = [[0.0, 0.0]] if kind == "sequence" else [[-3.0, 3.0]]
        assert gradient.tolist() == expected


@settings(max_examples=80, deadline=None)
@given(
    st.floats(-4, 4), st.floats(-3, 3), st.floats(0, 1), st.floats(0, 3), st.sampled_from(MIN_TYPE)
)
def test_the_clipped_form_is_the_minimum(log_ratio, advantage, low, high, kind):
    old_logp = torch.tensor([[-5.0]], dtype=torch.float64)
    logp = old_logp + log_ratio
    ratio = torch.exp(logp - old_logp)
    expected = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    output = policy_loss(
        logp,
        old_logp=old_logp,
        advantages=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.ones(1, 1),
        kind=kind,
        epsilon_low=low,
        epsilon_high=high,
    )
    assert torch.allclose(output.per_token, expected, rtol=1e-12, atol=1e-12)


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token():
    old_logp = torch.full((1, 3), -2.0, dtype=torch.float64)
    ratio = torch.tensor([[0.5, 1.1, 4.0]], dtype=torch.float64)
    logp = (old_logp + ratio.log()).requires_grad_()
    advantages = torch.tensor([[-2.0, 5.0, 2.0]], dtype=torch.float64)
    output = policy_loss(
        logp,
        old_logp=old_logp,
        advantages=advantages,
        mask=torch.ones(1, 3),
        kind="cispo",
        aggregation="seq_mean_token_sum",
        **CLIP,
    )
    output.loss.backward()
    expected = [[2.0 * (1 - LOW), -5.0 * 1.1, -2.0 * (1 + HIGH)]]
    assert logp.grad.tolist()[0] == pytest.approx(expected[0], abs=1e-12)
    assert output.clipped.tolist() == [[True, False, True]]
    clipped_surrogate = policy_loss(
        logp, old_logp=old_logp, advantages=advantages, mask=torch.ones(1, 3), **CLIP
    )
    (gradient,) = torch.autograd.grad(clipped_surrogate.loss, logp)
    assert gradient[0, 0] == 0 and gradient[0, 2] == 0  # grpo loses exactly those two


@pytest.mark.parametrize("seed", range(5))
def test_gspo_token_form_equals_its_sequence_form(seed):
    logp, old_logp = log_probs(seed)
    output = policy_loss(
        logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, kind="gspo", **CLIP
    )
    (gradient,) = torch.autograd.grad(output.loss, logp)
    terms = []
    for row in range(3):
        log_ratio = (logp - old_logp)[row, MASK[row]]
        ratio = torch.exp(log_ratio.mean())  # with gradient: one ratio a sequence
        bounded = ratio.clamp(1 - LOW, 1 + HIGH)
        terms.append(-torch.minimum(ratio * ADVANTAGES[row], bounded * ADVANTAGES[row]))
    loss = torch.stack(terms).mean()
    (expected,) = torch.autograd.grad(loss, logp)
    assert torch.allclose(output.loss, loss, rtol=0, atol=1e-12)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    grpo = policy_loss(
        logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, kind="grpo", **CLIP
    )
    assert (grpo.loss - output.loss).abs() > 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_sequence_kind_is_the_objective_over_whole_sequences(seed):
    logp, old_logp = log_probs(seed)
    output = policy_loss(
        logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, kind="sequence", **CLIP
    )
    (gradient,) = torch.autograd.grad(output.loss, logp)
    log_ratio = torch.where(MASK, logp - old_logp, 0.0).sum(-1)
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * ADVANTAGES, ratio.clamp(1 - LOW, 1 + HIGH) * ADVANTAGES).mean()
    (expected,) = torch.autograd.grad(loss, logp)
    assert torch.allclose(output.loss, loss, rtol=0, atol=1e-12)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)


def test_grpo_off_policy_is_grpo_on_folded_advantages():
    logp, old_logp = log_probs()
    kl = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    folded = fold_kl(ADVANTAGES, kl, MASK, beta=0.5)
    output = policy_loss(
        logp, old_logp=old_logp, advantages=folded, mask=MASK, kind="grpo_off_policy", **CLIP
    )
    expected = policy_loss(
        logp, old_logp=old_logp, advantages=folded, mask=MASK, kind="grpo", **CLIP
    )
    assert all(torch.equal(*pair) for pair in zip(output, expected, strict=True))
    without = policy_loss(
        logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, kind="grpo_off_policy", **CLIP
    )
    assert (without.loss - output.loss).abs() > 1e-2


@pytest.mark.parametrize("aggregation", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_weighted_sum_of_its_terms(kind, aggregation):
    logp, old_logp = log_probs()
    output = policy_loss(
        logp,
        old_logp=old_logp,
        advantages=ADVANTAGES,
        mask=MASK,
        kind=kind,
        aggregation=aggregation,
    )
    weights = token_weights(MASK, aggregation, dtype=torch.float64)
    assert torch.allclose(output.loss, (output.per_token * weights).sum(), rtol=0, atol=1e-12)


def test_dr_grpo_weighs_a_token_alike_in_every_row():
    rewards = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    logp = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    output = policy_loss(
        logp,
        old_logp=logp.detach(),
        advantages=group_centre(rewards),
        mask=MASK,
        aggregation="seq_mean_token_sum_norm",
    )
    output.loss.backward()
    expected = -torch.where(MASK, group_centre(rewards)[:, None], 0.0) / (3 * 4)
    assert torch.allclose(logp.grad, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_garbage_changes_neither_value_nor_gradient(kind, garbage):
    logp, old_logp = log_probs()
    advantages = ADVANTAGES[:, None].expand(3, 4)
    clean = policy_loss(
        logp, old_logp=old_logp, advantages=advantages, mask=MASK, kind=kind, **CLIP
    )
    (expected,) = torch.autograd.grad(clean.loss, logp)
    dirty_logp = torch.where(MASK, logp.detach(), garbage).requires_grad_()
    dirty = policy_loss(
        dirty_logp,
        old_logp=torch.where(MASK, old_logp, garbage),
        advantages=torch.where(MASK, advantages, garbage),
        mask=MASK,
        kind=kind,
        **CLIP,
    )
    dirty.loss.backward()
    assert torch.equal(dirty_logp.grad, expected)
    assert all(torch.equal(*pair) for pair in zip(dirty, clean, strict=True))
    assert torch.count_nonzero(dirty.weight[~MASK]) == 0
    assert torch.count_nonzero(dirty_logp.grad[~MASK]) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", MODES)
def test_empty_rows_add_zero_and_an_empty_batch_is_zero(kind, aggregation):
    logp, old_logp = log_probs()
    nothing = torch.zeros_like(MASK)
    output = policy_loss(
        logp * math.nan, old_logp=old_logp, advantages=ADVANTAGES, mask=nothing, kind=kind
    )
    assert output.loss.item() == 0.0 and output.clip_fraction.item() == 0.0
    mask = MASK.clone()
    mask[1] = False
    advantages = torch.tensor([1.5, math.nan, 0.4], dtype=torch.float64)
    output = policy_loss(
        logp,
        old_logp=old_logp,
        advantages=advantages,
        mask=mask,
        kind=kind,
        aggregation=aggregation,
        **CLIP,
    )
    output.loss.backward()
    assert output.loss.isfinite() and output.loss != 0
    assert torch.count_nonzero(logp.grad[1]) == 0
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("kind", MIN_TYPE)
def test_an_overflowing_ratio_that_is_clipped_has_zero_gradient_not_nan(kind):
    logp = torch.tensor([[0.0]], requires_grad=True)
    output = policy_loss(
        logp,
        old_logp=torch.tensor([[-200.0]]),
        advantages=torch.tensor([1.0]),
        mask=torch.ones(1, 1),
        kind=kind,
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.2)
    assert output.weight.item() == math.inf
    assert logp.grad.item() == 0.0


@pytest.mark.parametrize("kind", MIN_TYPE)
def test_an_overflowing_row_with_a_masked_tail_or_zero_advantage_stays_finite(kind):
    logp = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    old_logp = torch.full((2, 3), -200.0)
    output = policy_loss(
        logp, old_logp=old_logp, advantages=torch.tensor([1.0, 0.0]), mask=mask, kind=kind
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.2 / 2)
    assert torch.equal(logp.grad, torch.zeros(2, 3))
    assert output.clipped.tolist() == [[True, True, False], [False, False, False]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_log_prob_that_counts_stays_visible(kind):
    logp, old_logp = log_probs()
    bad = logp.detach().clone()
    bad[0, 1] = math.nan
    for advantages in (ADVANTAGES, torch.zeros(3)):
        assert policy_loss(
            bad, old_logp=old_logp, advantages=advantages, mask=MASK, kind=kind
        ).loss.isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_policy_gets_a_gradient(kind):
    logp, old_logp = log_probs()
    old_logp, advantages = old_logp.requires_grad_(), ADVANTAGES.clone().requires_grad_()
    output = policy_loss(logp, old_logp=old_logp, advantages=advantages, mask=MASK, kind=kind)
    output.loss.backward()
    assert old_logp.grad is None and advantages.grad is None and logp.grad is not None
    assert [name for name in LossOutput._fields if getattr(output, name).requires_grad] == [
        "loss",
        "per_token",
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_inputs_are_computed_in_float32(kind, dtype):
    logp, old_logp = (tensor.detach().to(dtype) for tensor in log_probs())
    advantages = ADVANTAGES.to(dtype)
    output = policy_loss(
        logp, old_logp=old_logp, advantages=advantages, mask=MASK, kind=kind, **CLIP
    )
    exact = policy_loss(
        logp.double(),
        old_logp=old_logp.double(),
        advantages=advantages.double(),
        mask=MASK,
        kind=kind,
        **CLIP,
    )
    assert output.loss.dtype == torch.float32
    assert exact.loss.dtype == torch.float64
    assert output.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_token", [False, True])
def test_leading_axes_are_rows(kind, per_token):
    logp, old_logp = log_probs()
    advantages = ADVANTAGES[:, None].expand(3, 4) if per_token else ADVANTAGES
    flat = policy_loss(logp, old_logp=old_logp, advantages=advantages, mask=MASK, kind=kind, **CLIP)
    deep = policy_loss(
        logp.reshape(3, 1, 4),
        old_logp=old_logp.reshape(3, 1, 4),
        advantages=advantages.reshape(3, 1, *advantages.shape[1:]),
        mask=MASK.reshape(3, 1, 4),
        kind=kind,
        **CLIP,
    )
    assert torch.equal(deep.loss, flat.loss)
    assert torch.equal(deep.per_token, flat.per_token.reshape(3, 1, 4))


def test_zero_one_masks_of_other_dtypes():
    logp, old_logp = log_probs()
    expected = policy_loss(logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK).loss
    for dtype in (torch.int64, torch.float32):
        assert torch.equal(
            policy_loss(logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK.to(dtype)).loss,
            expected,
        )


def test_refusals_name_the_argument():
    logp, old_logp = log_probs()
    with pytest.raises(ValueError, match=r"kind.*did you mean 'gspo'"):
        policy_loss(logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, kind="gsp")
    with pytest.raises(ValueError, match=r"aggregation.*did you mean 'token_mean'"):
        policy_loss(
            logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, aggregation="tokenmean"
        )
    with pytest.raises(ValueError, match="old_logp has shape"):
        policy_loss(logp, old_logp=old_logp[:2], advantages=ADVANTAGES, mask=MASK)
    with pytest.raises(ValueError, match="mask has shape"):
        policy_loss(logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK[:, :2])
    for wrong in (ADVANTAGES[:2], ADVANTAGES[:, None], torch.ones(4)):
        with pytest.raises(ValueError, match="advantages has shape"):
            policy_loss(logp, old_logp=old_logp, advantages=wrong, mask=MASK)
    for epsilon in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="epsilon_low"):
            policy_loss(
                logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, epsilon_low=epsilon
            )
    for epsilon in (-0.1, math.nan):
        with pytest.raises(ValueError, match="epsilon_high"):
            policy_loss(
                logp, old_logp=old_logp, advantages=ADVANTAGES, mask=MASK, epsilon_high=epsilon
            )
