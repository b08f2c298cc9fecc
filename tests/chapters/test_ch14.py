"""What the frameworks' KL terms optimise, by the terms of the package, autograd and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.chapters import ch14_frameworks as chapter
from analysis.chapters.ch14_frameworks.trainers import OPTIONS
from kl_term.audit.states import mean_gradient
from kl_term.kl.enumeration import relative_error
from kl_term.objectives.ordering import normalise_then_kl

ROOT_OF_TEN = math.sqrt(20.0)


@pytest.fixture(scope="module")
def at():
    return chapter.states(40, 12, drift=0.4, staleness=0.4, seed=3)


@pytest.fixture(scope="module")
def table(at):
    return chapter.audit(at).set_index(["framework", "setting"])


@pytest.mark.parametrize(
    ("framework", "setting", "case", "name"),
    [
        ("verl", "abs", "fresh", "2 total variation"),
        ("NeMo-RL", "k2", "fresh", "E[k2]"),
        ("slime", "k2, use-unbiased-kl", "fresh", "E[k2]"),
        ("rlhf-book", "kl1", "fresh", "nothing"),
        ("rlhf-book", "kl3", "fresh", "half chi-square"),
        ("prime-rl", "ref_kl", "fresh", "reverse KL"),
        ("prime-rl", "ref_kl", "stale", "neither"),  # some token fell by more than 0.2
        ("RPG", "rpg_fkl", "stale", "forward KL"),  # samples of the reference
        ("RPG", "rpg_ufkl", "stale", "forward KL"),
        ("RPG", "rpg_rkl", "stale", "reverse KL"),
        ("RPG", "rpg_urkl", "stale", "reverse KL"),
        ("RPG", "rpg_js", "stale", "half (reverse - forward)"),
        ("RPG", "rpg_ujs", "stale", "half (reverse + forward)"),
    ],
)
def test_what_a_setting_without_a_term_of_ours_descends(table, framework, setting, case, name):
    """Autograd through the loss as read, against closed forms of the gradients."""
    assert table.loc[framework, setting][f"{case}_descends"] == name


@pytest.mark.parametrize("setting", ["rpg_js", "rpg_ujs"])
def test_the_js_of_rpg_is_not_the_jensen_shannon_divergence(at, setting):
    """Jensen-Shannon by autograd through its definition, another gradient altogether."""
    (option,) = (o for o in OPTIONS if o.setting == setting)
    at = at._replace(old_logits=at.ref_logits)
    leaf = at.logits.clone().requires_grad_()
    policy, reference = leaf.softmax(-1), at.ref_logits.softmax(-1)
    middle = (policy + reference) / 2
    divergence = sum((p * (p / middle).log()).sum() / 2 for p in (policy, reference))
    (exact,) = torch.autograd.grad(divergence, leaf)
    gradient = mean_gradient(option.loss, at)
    assert relative_error(gradient, exact).min() > 0.5
    scale = (gradient * exact).sum(-1, keepdim=True) / gradient.square().sum(-1, keepdim=True)
    assert relative_error(scale * gradient, exact).min() > 1e-3  # nor a multiple of it


def test_dead_zones():
    zones = chapter.dead_zones().set_index(["framework", "setting"])
    edge = zones.below["verl", "low_var_kl"]
    assert math.exp(-edge) - 1 + edge == pytest.approx(10, abs=0.02)
    for row in (("OpenRLHF", "k2"), ("NeMo-RL", "k2")):
        assert zones.above[row] == pytest.approx(ROOT_OF_TEN, abs=2e-3)
        assert zones.below[row] == pytest.approx(-ROOT_OF_TEN, abs=2e-3)
    free = zones.loc[[("TRL", "without"), ("slime", "k2"), ("OpenRLHF", "k3, unbiased_gradient")]]
    assert free[["below", "above"]].isna().all(axis=None)
    w = math.exp(zones.above["RPG", "rpg_rkl"])
    assert w * math.log(w) == pytest.approx(10, abs=0.02)


def test_exchange_rates():
    table = chapter.exchange_table(0.04, group_size=8, kl_spread=2.0, seed=0)
    at_half = table.set_index("placement").rate_half
    std = math.sqrt(8 * 0.25 / 7)
    assert at_half["after the group's std"] == pytest.approx(std, rel=1e-6)
    assert at_half["before the group's std"] == pytest.approx(1)
    assert at_half["before leave-one-out"] == pytest.approx(1)
    assert at_half["after leave-one-out"] == pytest.approx(7 / 8)
    assert at_half["ignored"] == 0


def test_placement_refuses_what_it_cannot_measure():
    kl = torch.linspace(0, 1, 4).double()
    with pytest.raises(ValueError, match="proportional"):
        chapter.slopes(normalise_then_kl, 2 * kl, kl, 0.1)
    with pytest.raises(ValueError, match="not linear"):
        chapter.slopes(lambda r, k, *, beta: k**3, kl.flip(0) ** 2, kl, 0.1)


def test_with_gspo_neither_value_of_the_flag_has_the_reverse_kl(table):
    """Off, the term is the forward KL; on, a sequence's ratio is on the KL of a token."""
    off = table.loc[("TRL", "without")]
    assert off["fresh_descends"] == "forward KL"
    on = chapter.level_errors(staleness=0.3, seed=0).set_index("level").loc["sequence", "error"]
    assert (on > 0.1).all()
