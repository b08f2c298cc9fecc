"""Chapter 6: which rows of the prefix ratio are the sequence KL, and which is the quieter."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters import ch06_prefix_ratio
from analysis.chapters.policies import Policies, moved_logits, random_tables
from analysis.kl.sequences import enumerate_sequences

ROWS = {
    ("k1", "prefix, attached"),
    ("k3", "prefix, attached"),
    ("k3", "whole, attached"),
    ("full vocabulary", "tokens before, attached"),
    ("growth of k2", "prefix, detached"),
    ("k1 reward to go", "prefix"),
    ("k1 reward to go", "whole"),
}
ERRORS = ("error_fresh", "error_stale")


@pytest.fixture(scope="module")
def ragged():
    return enumerate_sequences(3, 3, eos=2)


@pytest.fixture(scope="module")
def tables(ragged):
    return random_tables(ragged, 3, 5, spread=1.2, seed=3)


@pytest.fixture(scope="module")
def samplers(tables):
    return moved_logits(tables.logits, 0.5, seed=4)


def test_which_losses_are_the_sequence_kl(tables, samplers, ragged):
    table = ch06_prefix_ratio.prefix_table(tables, samplers, ragged).set_index(["cost", "weight"])
    exact = {c: {key for key, error in table[c].items() if error < 1e-12} for c in ERRORS}
    assert exact["error_stale"] == ROWS
    assert exact["error_fresh"] == ROWS | {("k3", "token, gradient of prefix")}
    assert (table.loc[ch06_prefix_ratio.BASELINE, ["low_stale", "high_stale"]] == 1).all()
    full = table.loc["full vocabulary", "tokens before, attached"]
    assert full.high_fresh < 1 > full.high_stale
    k1 = table.loc["k1", "prefix, attached"]
    assert k1.low_fresh > 1 < k1.low_stale  # its constant is a baseline of the wrong sign


def test_without_a_product_in_the_value_the_error_is_of_first_order(tables, ragged):
    errors = []
    for size in (0.02, 0.01):
        samplers = moved_logits(tables.logits, size, seed=5)
        table = ch06_prefix_ratio.prefix_table(tables, samplers, ragged).set_index(
            ["cost", "weight"]
        )
        errors.append(table.error_stale["k3", "token, gradient of prefix"])
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)


def test_a_cap_trades_bias_for_noise_and_rescaling_keeps_the_gradient(tables, samplers, ragged):
    table = ch06_prefix_ratio.cap_table(tables, samplers, ragged, [1.0, 2.0, torch.inf]).set_index(
        "cap"
    )
    for kind in ("clamp", "rescaled"):
        assert table[f"bias_{kind}"].is_monotonic_decreasing
        assert table[f"noise_{kind}"].is_monotonic_increasing
        assert table[f"bias_{kind}"][torch.inf] < 1e-12
    assert table.bias_rescaled[1.0] < table.bias_clamp[1.0]
    assert table.kept_is_closer[1.0] > 0.5
    assert 0 == table.capped[torch.inf] < table.capped[2.0] < table.capped[1.0]
    fresh = ch06_prefix_ratio.cap_table(tables, tables.logits, ragged, [1.0])
    assert fresh.bias_clamp.item() < 1e-12  # a ratio of one is not over the cap


def test_the_variances_on_trees_are_those_of_the_losses():
    near, far = (
        row
        for _, row in ch06_prefix_ratio.tree_table(
            [(3, 3, 2)], 8, distances=[0.3, 1.2], staleness=0.3, seed=0
        ).iterrows()
    )
    assert near.k3_high < 1 < far.k3_high
    assert near.whole_low < near.whole_noise < near.whole_high
    sequences = enumerate_sequences(3, 3, eos=2)
    step, ref_logits = random_tables(sequences, 3, 8, spread=1.0, seed=0)
    logits = ref_logits + 0.3 * step
    tables = Policies(logits, ref_logits)
    table = ch06_prefix_ratio.prefix_table(tables, moved_logits(logits, 0.3, seed=1), sequences)
    at = table.set_index(["cost", "weight"])
    for name, key in (("k3", ("k3", "prefix, attached")), ("whole", ("k1 reward to go", "whole"))):
        for end in ("low", "high"):
            assert near[f"{name}_{end}"] == pytest.approx(at[f"{end}_stale"][key], rel=1e-9)


def test_noise_against_length():
    curves = ch06_prefix_ratio.noise_curves([1, 8], 4, 5, drift=0.1, staleness=[0.0, 0.2], seed=1)
    at = curves.set_index(["staleness", "way", "length"]).samples
    for staleness in (0.0, 0.2):
        one, more = (at[staleness].xs(n, level="length") for n in (1, 8))
        assert one["k1 reward to go"] == pytest.approx(one["k3 prefix"])  # no future, no difference
        assert more["full vocabulary prefix"] < more["k3 prefix"] < more["k1 reward to go"]
        assert more["k1 reward to go"] < more["k1 prefix"]
    assert at[0.0, ch06_prefix_ratio.PRODUCT, 8] == pytest.approx(at[0.0, "k1 reward to go", 8])
    assert at[0.2, ch06_prefix_ratio.PRODUCT, 8] > 1.01 * at[0.2, "k1 reward to go", 8]


def test_a_baseline_helps_k3_most_near_the_reference():
    table = ch06_prefix_ratio.baseline_table(32, 4, 5, drifts=[0.05, 1.0], seed=1)
    near, far = (table[table.kl == kl].set_index("way") for kl in sorted(table.kl.unique()))
    assert (near.baseline < near.bare).all() and (far.baseline < far.bare).all()
    gain = lambda at: at.baseline["k1 reward to go"] / at.baseline["k3 prefix"]
    assert gain(near) > 5 > gain(far)


@pytest.mark.parametrize("each", [-0.5, 0.5])
def test_a_capped_ratio_is_finite_on_long_answers(each):
    """As prefix * (prefix.clamp(max=c) / prefix).detach() it was 0 / 0 or inf * 0."""
    logp = torch.full((1, 400), -1.0, requires_grad=True)
    old_logp, mask = logp.detach() - each, torch.ones(1, 400, dtype=torch.bool)
    prefix = (each * torch.arange(1, 401)).exp()
    assert (prefix * (prefix.clamp(max=2.0) / prefix)).isnan().any()
    capped = ch06_prefix_ratio._capped(logp, old_logp, mask, 2.0)
    torch.testing.assert_close(capped[0], prefix.clamp(max=2.0))
    # The lines that chapter 6 shows.
    log_ratio = logp - old_logp
    running = log_ratio.cumsum(-1)
    shown = (running - running.detach()).exp() * running.detach().exp().clamp(max=2.0)
    torch.testing.assert_close(shown, capped)
    (gradient,) = torch.autograd.grad(shown.sum(), logp)
    to_go = prefix.clamp(max=2.0).flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(gradient[0], to_go)
