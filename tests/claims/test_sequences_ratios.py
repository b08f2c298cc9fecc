"""Claims on ratios along a sequence: samples, loops and halved steps against the decisions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from analysis.experiments.claims import sequences_ratios, sequences_surrogates

TIGHT = {"rtol": 0, "atol": 1e-12}


def distributions(count, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, vocab, generator=generator, dtype=torch.float64).softmax(-1)


def test_variance_of_products_by_loop():
    policy, old = distributions(2, 3, seed=1)
    ratio = policy / old
    second = sum(
        math.prod(float(old[a] * ratio[a] ** 2) for a in word)
        for word in itertools.product(range(3), repeat=4)
    )
    chi2 = float((old * (ratio - 1) ** 2).sum())
    assert second - 1 == pytest.approx((1 + chi2) ** 4 - 1, rel=1e-12)
    finding = sequences_ratios.product_variance_grows()
    assert finding.verdict == "holds if"
    assert abs(finding.figures["one_state_growth"]) < 1e-12
    step = torch.full((10, 10), 0.1, dtype=torch.float64)
    step[0] = torch.tensor([0.4] + 9 * [0.6 / 9], dtype=torch.float64).square() / 0.1
    recurrent = step.new_full((10,), 0.1) @ torch.linalg.matrix_power(step, 99).sum(-1)
    assert finding.figures["one_of_ten_100"] == pytest.approx(float(recurrent), rel=1e-12)


def test_exponent_of_the_product_needs_log_ratios():
    policy, old = distributions(2, 4, seed=2)
    words = torch.multinomial(old, 50, replacement=True, generator=torch.Generator().manual_seed(0))
    ratio = (policy / old)[words]
    printed, corrected = (ratio - 1).sum().exp(), ratio.log().sum().exp()
    torch.testing.assert_close(corrected, ratio.prod(), rtol=1e-12, atol=0)
    assert printed / ratio.prod() > 2


def test_geometric_weight_by_samples():
    """Quartiles, not moments: at a thousand tokens the product's moments are out of reach."""
    base, direction = torch.randn(
        2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    old, policy = base.softmax(-1), (base + 0.3 * direction).softmax(-1)
    log_ratio = (policy / old).log()
    generator = torch.Generator().manual_seed(4)
    widths = {}
    for length in (10, 1000):
        tokens = torch.multinomial(old, 400 * length, replacement=True, generator=generator)
        sums = log_ratio[tokens].view(400, length).sum(-1)
        for name, weight in (("product", sums), ("geometric", sums / length)):
            low, high = weight.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
            widths[name, length] = float(high - low)
    assert widths["product", 1000] / widths["product", 10] == pytest.approx(10, rel=0.3)
    assert widths["geometric", 10] / widths["geometric", 1000] == pytest.approx(10, rel=0.3)
    finding = sequences_ratios.gspo_weight()
    assert finding.verdict == "holds if"
    assert finding.figures["mean_1000"] < 0.99


def test_gspo_gradient_by_differences():
    logp, old_logp = -torch.rand(2, 4, generator=torch.Generator().manual_seed(5)).double()
    step = 1e-6

    def weight(x):
        return math.exp(float((x - old_logp).mean()))

    for t in range(4):
        bump = torch.zeros(4, dtype=torch.float64)
        bump[t] = step
        slope = (weight(logp + bump) - weight(logp - bump)) / (2 * step)
        assert slope == pytest.approx(weight(logp) / 4, rel=1e-6)


def test_sampling_mask_by_loop():
    policy, old = distributions(2, 6, seed=6)
    kept = sorted(range(6), key=lambda a: -old[a])[:3]
    inside, old_inside = sum(policy[a] for a in kept), sum(old[a] for a in kept)
    values = torch.arange(6, dtype=torch.float64).square()
    unmasked = sum(old[a] / old_inside * policy[a] / (old[a] / old_inside) for a in kept)
    masked = sum(
        old[a] / old_inside * (policy[a] / inside) / (old[a] / old_inside) * values[a] for a in kept
    )
    torch.testing.assert_close(unmasked, inside, **TIGHT)
    assert inside < 0.95
    torch.testing.assert_close(masked, sum(policy[a] * values[a] for a in kept) / inside, **TIGHT)
    assert abs(masked - (policy * values).sum()) > 0.1
    assert sequences_ratios.keep_sampling_mask().verdict == "holds if"


def two_token_objectives(step):
    """Sequence and token objective of two binary tokens, and their gradients, by hand."""
    generator = torch.Generator().manual_seed(7)
    old, direction = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    returns = {(a, b): torch.randn((), generator=generator) for a in (0, 1) for b in (0, 1)}
    logits = (old + step * direction).requires_grad_(True)
    logp, old_logp = logits.log_softmax(-1), old.log_softmax(-1)
    product = total = 0.0
    for (a, b), value in returns.items():
        ratios = [
            (logp[0, a] - old_logp[0, a]).exp(),
            (logp[1 + a, b] - old_logp[1 + a, b]).exp(),
        ]
        weight = (old_logp[0, a] + old_logp[1 + a, b]).exp() * value
        product = product + weight * ratios[0] * ratios[1]
        total = total + weight * (ratios[0] + ratios[1] - 1)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (product, total)]
    return (product - total).item(), gradients[1] - gradients[0]


def test_orders_by_halving_the_step():
    values, gradients = zip(*(two_token_objectives(s) for s in (2e-3, 1e-3)), strict=True)
    assert values[0] / values[1] == pytest.approx(4, rel=0.01)
    assert float(gradients[0].norm() / gradients[1].norm()) == pytest.approx(2, rel=0.01)
    assert two_token_objectives(0.0)[1].abs().max() < 1e-12
    finding = sequences_ratios.token_objective_is_first_order()
    assert finding.verdict == "holds if"
    assert finding.figures["error_8_tokens"] > 1.5 * finding.figures["error_3_tokens"]


def test_dropping_the_first_factor_is_a_bias_at_no_staleness():
    old, values = distributions(1, 5, seed=8)[0], torch.arange(5, dtype=torch.float64)
    sampler = old**1.25 / (old**1.25).sum()  # temperature 0.8
    score = torch.eye(5, dtype=torch.float64) - old
    exact = (old * values) @ score
    kept = (sampler * (old / sampler) * values) @ score
    dropped = (sampler * values) @ score
    torch.testing.assert_close(kept, exact, **TIGHT)
    assert (dropped - exact).norm() / exact.norm() > 0.02
    finding = sequences_ratios.two_factors_of_the_ratio()
    assert finding.verdict == "holds if"
    assert finding.figures["cancelled_error"] < 1e-12 < 1 < finding.figures["dropped_over_kept"]


def test_token_surrogate_is_biased_on_a_chain():
    """Two binary tokens; the second pays only after the first: supports are full."""
    old, new = torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8])
    q_second = torch.tensor([0.0, 1.0])  # return of the second token after first token 1
    value_one = float(old @ q_second)
    gain = float(new[1] * (new @ q_second) - old[1] * (old @ q_second))
    first = torch.tensor([0.0, value_one]) - float(old[1]) * value_one
    second = q_second - value_one
    surrogate = float(new @ first) + float(old[1]) * float(new @ second)
    with_states = float(new @ first) + float(new[1]) * float(new @ second)
    assert with_states == pytest.approx(gain, abs=1e-6)
    assert abs(surrogate - gain) > 0.05
    assert sequences_surrogates.token_ratio_surrogate().verdict == "fails"


def test_state_shift_grows_with_depth():
    """Deviation of a prefix probability after d equal tokens is about d times that of one."""
    old, step = 0.5, 0.001
    shift = [(old + step) ** d / old**d - 1 for d in (1, 6)]
    assert shift[1] / shift[0] == pytest.approx(6, rel=0.02)
    finding = sequences_surrogates.two_approximations()
    assert finding.verdict == "holds if"
    assert finding.figures["depth_growth"] > 1.5


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope"),
    [(1, 1.5, 0.0), (1, 0.5, 1.0), (-1, 0.5, 0.0), (-1, 1.5, -1.0), (-1, 100.0, -1.0)],
)
def test_corners_of_the_clip_by_differences(advantage, ratio, slope):
    def objective(x):
        return min(x * advantage, min(max(x, 0.8), 1.2) * advantage)

    step = 1e-6
    difference = (objective(ratio + step) - objective(ratio - step)) / (2 * step)
    assert difference == pytest.approx(slope, abs=1e-6)
    figures = sequences_surrogates.ppo_clip().figures
    name = ("good" if advantage > 0 else "bad") + ("_below" if ratio < 1 else "_above")
    name = "bad_far_above" if ratio == 100 else name
    assert figures[name] == pytest.approx(slope * ratio)  # slope by the log-prob


def test_the_clip_does_not_hold_the_ratio():
    finding = sequences_surrogates.ppo_clip()
    assert finding.verdict == "holds if"
    assert finding.figures["ratio_after_a_step"] > 1.2
    assert finding.figures["pull_back"] == 0.0


def test_the_ratio_limits_nothing():
    logp = torch.tensor(math.log(0.3), dtype=torch.float64, requires_grad=True)
    (logp - math.log(0.1)).exp().backward()
    assert logp.grad.item() == pytest.approx(3.0)
    assert sequences_surrogates.ratio_alone_limits_nothing().verdict == "fails"


def test_wrong_weights_change_the_verdicts(monkeypatch):
    monkeypatch.setattr(sequences_ratios, "product_variance", lambda chi2, length: chi2 * length)
    assert sequences_ratios.product_variance_grows().verdict == "fails"
    monkeypatch.setattr(sequences_ratios, "masked_logits", lambda logits, keep: -logits)
    assert sequences_ratios.keep_sampling_mask().verdict == "fails"
    monkeypatch.setattr(sequences_surrogates, "performance_difference", lambda *a: torch.zeros(()))
    assert sequences_surrogates.token_ratio_surrogate().verdict == "holds"
