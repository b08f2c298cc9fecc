"""k3 under a prefix ratio that is bounded, as a population trains on it."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from analysis.records.variants import Objective, Sampler, Truncation, Variant
from analysis.sweeps.store import run_key
from analysis.training.kl_terms import truncated_loss
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.importance import importance_ratio
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import token_weights
from tests.training.conftest import runs_of

STALE = Sampler(staleness=3)
PREFIX = KLTerm(estimator="k3", weighting="attached", ratio="prefix")


def of(label: str, kl: KLTerm = PREFIX, **truncation) -> Variant:
    bounds = Truncation(**truncation) if truncation else None
    return Variant(label=label, kl=kl, beta=0.7, sampler=STALE, truncation=bounds)


def test_bounds_that_bind_nothing_change_no_gradient_and_a_window_of_one_is_the_token_ratio(
    small_config,
):
    config = small_config.model_copy(update={"precision": "float64", "learning_rate": 1e-2})
    variants = [
        of("whole"),
        of("wide", window=64, cap=1e6),
        of("token", KLTerm(estimator="k3", weighting="attached")),
        of("one", window=1),
        of("two", window=2),
    ]
    trainer = PopulationTrainer(config, runs_of(variants, [3]))
    for update in range(3):
        trainer.update(update)
    batch = trainer.batch(trainer.rollout(3))
    same = batch.of_runs(torch.zeros(len(variants), dtype=torch.long))
    with torch.no_grad():  # all runs at one policy, on one batch
        trainer.weights.copy_(trainer.weights[:1].clone().expand_as(trainer.weights))
    _, gradients = trainer.gradient(same)
    whole, wide, token, one, two = gradients
    assert torch.allclose(wide, whole, rtol=0, atol=1e-12)
    assert torch.allclose(one, token, rtol=0, atol=1e-12)
    for other in (token, two):
        assert (other - whole).norm() > 1e-3 * whole.norm()
    assert (two - token).norm() > 1e-3 * token.norm()


def test_a_cap_keeps_the_gradient_of_the_ratios_logarithm(small_config):
    config = small_config.model_copy(update={"precision": "float64", "learning_rate": 1e-2})
    trainer = PopulationTrainer(config, runs_of([of("capped", cap=0.9, window=2)], [3]))
    for update in range(4):
        trainer.update(update)
    batch = trainer.batch(trainer.rollout(4))
    rollout, mask = batch.rollout, batch.rollout.mask
    logp = (
        rollout.old_logp
        + 0.3 * torch.sin(torch.arange(rollout.old_logp.numel())).view_as(rollout.old_logp).double()
    ).requires_grad_()
    views = torch.where(mask, logp - rollout.old_logp, 0.0)
    log_ratio = views + torch.nn.functional.pad(views, (1, 0))[..., :-1]
    r = torch.exp(batch.ref_logp - logp)
    k3 = r - 1 - r.log()
    bounded = log_ratio.detach().exp().clamp(max=0.9)
    assert 0.2 < (bounded[mask] == 0.9).double().mean() < 0.8
    by_hand = torch.where(mask, bounded * (log_ratio - log_ratio.detach()).exp() * k3, 0.0)
    wanted = torch.autograd.grad(by_hand.sum(), logp, retain_graph=True)[0]
    loss = truncated_loss(
        Truncation(cap=0.9, window=2), logp, batch.ref_logp, rollout.old_logp, mask
    )
    found = torch.autograd.grad(loss.sum(), logp)[0]
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    free = torch.where(mask, importance_ratio(logp, rollout.old_logp, mask, level="prefix") * k3, 0)
    assert (torch.autograd.grad(free.sum(), logp)[0] - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("mode", get_args(Objective.model_fields["aggregation"].annotation))
@pytest.mark.parametrize("bounds", [{"cap": 0.5}, {"cap": 4.0, "window": 3}, {"window": 50}])
def test_every_aggregation_weighs_the_tokens_of_a_completion_alike(mode, bounds):
    """Token by token from the definition, on ragged answers with holes and far samples."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(3, 1, 2, 3, 6, generator=generator, dtype=torch.float64)
    logp = draws[0].clone().requires_grad_()
    old_logp, ref_logp = draws[0] + 2 * draws[1], draws[0] + draws[2]
    mask = torch.rand(1, 2, 3, 6, generator=generator) < 0.7
    mask &= torch.arange(6) < torch.tensor([[6, 1, 3], [4, 6, 2]]).unsqueeze(-1)
    weights = token_weights(mask[0], mode=mode, dtype=torch.float64).unsqueeze(0)
    window, cap = bounds.get("window", 6), bounds.get("cap", math.inf)
    log_ratio = torch.where(mask, logp - old_logp, 0.0)
    parts = []
    for t in range(6):
        last = log_ratio[..., max(0, t - window + 1) : t + 1].sum(-1)
        r = (ref_logp - logp)[..., t].exp()
        bounded = last.detach().exp().clamp(max=cap) * (last - last.detach()).exp()
        parts.append(torch.where(mask[..., t], bounded * (r - 1 - r.log()), 0.0))
    by_hand = (weights * torch.stack(parts, dim=-1)).sum()
    loss = truncated_loss(Truncation(**bounds), logp, ref_logp, old_logp, mask)
    wanted, found = (
        torch.autograd.grad(value, logp)[0] for value in (by_hand, (weights * loss).sum())
    )
    assert wanted.abs().max() > 1e-2
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"truncation": {}}, "bounds nothing"),
        ({"truncation": {"cap": 4.0}}, "set kl=KLChoice"),
        ({"truncation": {"window": 4}, "kl": KLTerm(estimator="k3"), "beta": 0.1}, "set kl=KLCh"),
        ({"truncation": {"cap": 0.0}, "kl": PREFIX, "beta": 0.1}, "truncation.cap"),
    ],
)
def test_a_truncation_that_bounds_nothing_is_refused(given, said):
    with pytest.raises(ValidationError, match=said):
        Variant(**given)


def test_variants_without_one_keep_their_names(small_config):
    plain, bounded = (runs_of([variant])[0] for variant in (of("a"), of("a", cap=4.0)))
    assert "truncation" not in plain.variant.model_dump()
    assert run_key(small_config, plain) != run_key(small_config, bounded)
