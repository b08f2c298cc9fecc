"""Decisions on the clip around a merged KL, and on the ways to have a KL at all (chapter 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.experiments.chapters import off_policy as study
from analysis.experiments.chapters import stale_sequences
from analysis.experiments.chapters import stale_training as trained
from analysis.experiments.chapters.gradients import Policies
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.gradient_errors import error_of
from analysis.experiments.claims.off_policy import (
    BETA,
    EPSILON,
    EXACT,
    TREE,
    fresh,
    full_vocabulary,
    stale,
    stale_trees,
)
from analysis.experiments.claims.recorded import difference, difference_along, recorded
from analysis.kl.enumeration import expected_gradient, relative_error, reverse_kl_gradient
from analysis.kl.sequences import sequence_kl_gradient, token_logp, visited_kl_gradient
from analysis.objectives.credit import reward_to_go

#: Of the recorded ways: the KL coefficient, and the exact reverse KL at which fronts are compared.
TRAINED_BETA = 0.3


@decides("S4-27")
def clipped_merged_kl() -> Finding:
    """The merged objective against the exact gradient of reward minus KL, with and without the
    clip, the policy having moved along its advantages; how much of the KL's force is lost; and
    recorded runs with and without the clip."""
    states = stale(along_advantage=True)
    exact = study.regularised_gradient(states, beta=BETA)
    clip = {"epsilon_low": EPSILON, "epsilon_high": EPSILON}
    options = {"beta": BETA, "reading": "detached"}
    share = study.silenced_mass(states, beta=BETA, epsilon=EPSILON)
    kl_left = study.clipped_kl_gradient(states, beta=BETA, epsilon=EPSILON)
    kl_exact = reverse_kl_gradient(states.logits, states.ref_logits)
    tables, samplers = stale_trees()
    figures = {
        "unclipped": error_of(
            study.merged_gradient(states, **options, **study.NO_CLIP), exact, worst=True
        ),
        "clipped": error_of(study.merged_gradient(states, **options, **clip), exact),
        "clipped_kl_part": error_of(kl_left, kl_exact),
        "silenced": share.silenced.median(),
        "opposing": share.opposing.median(),
        "sequences_unclipped": _token_weight_error(tables, samplers),
    }
    finals = recorded("three_ways").finals
    pair = ("merged_detached", "merged_detached_wide", "accuracy")
    figures |= difference(finals, *pair, beta=TRAINED_BETA).figures("trained_clip")
    unclipped = figures["unclipped"] < EXACT
    correct = figures["clipped"] < EXACT and figures["sequences_unclipped"] < EXACT
    return Finding(settle(unclipped and correct, unclipped), figures)


def _token_weight_error(tables: Policies, samplers: Tensor) -> float:
    """Median error of token ratio and own-token credit against the sequence KL's gradient."""
    errors = [
        relative_error(
            stale_sequences.weighted_kl_gradient(
                Policies(logits, ref), old, TREE, level="token", credit="immediate"
            ),
            sequence_kl_gradient(logits, ref, TREE).flatten(),
        )
        for logits, ref, old in zip(*tables, samplers, strict=True)
    ]
    return torch.stack(errors).median().item()


@decides("S4-xp")
def merging_like_terms() -> Finding:
    """The clipped surrogates of reward and KL, added, against that of their sum: gradients by
    autograd, token by token, split by whether the two terms pull the same way."""
    states = stale(along_advantage=True)
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in states[:3])
    pull = -(logp - ref_logp)  # beta = 1: the KL's advantage
    coefficient = {
        name: _clipped_coefficient(logp, old_logp, advantage)
        for name, advantage in (
            ("reward", states.advantages),
            ("kl", pull),
            ("merged", states.advantages + pull),
        )
    }
    gap = (coefficient["reward"] + coefficient["kl"] - coefficient["merged"]).abs() > EXACT
    together = states.advantages * pull > 0
    inside = ((logp - old_logp).exp() - 1).abs() <= EPSILON
    figures = {
        "differs_same_sign": gap[together].double().mean().item(),
        "differs_inside_clip": gap[inside].double().mean().item(),
        "differs_opposite_sign": gap[~together & ~inside].double().mean().item(),
    }
    sometimes = figures["differs_same_sign"] == 0 and figures["differs_inside_clip"] == 0
    return Finding(settle(not bool(gap.any()), sometimes), figures)


def _clipped_coefficient(logp: Tensor, old_logp: Tensor, advantages: Tensor) -> Tensor:
    """What multiplies the score under PPO's minimum, by autograd through ``min`` and ``clamp``."""
    leaf = logp.clone().requires_grad_(True)
    ratio = torch.exp(leaf - old_logp)
    bounded = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    value = torch.minimum(ratio * advantages, bounded * advantages)
    return torch.autograd.grad(value.sum(), leaf)[0]


@decides("S4-40")
def three_implementations() -> Finding:
    """The three ways to have a KL, and PPO's credit beside GRPO's, against the exact gradients of
    the KL: one token a response, then ragged sequences."""
    states, on_policy = stale(along_advantage=True), fresh()
    exact = reverse_kl_gradient(states.logits, states.ref_logits)
    clipped = study.clipped_kl_gradient(states, beta=BETA, epsilon=EPSILON)
    own, to_go, visited = _sequence_credits()
    figures = {
        "full_vocabulary": error_of(full_vocabulary(states, "policy"), exact, worst=True),
        "on_policy_k2": error_of(
            expected_gradient(*on_policy[:2], estimator="k2"),
            reverse_kl_gradient(on_policy.logits, on_policy.ref_logits),
            worst=True,
        ),
        "off_policy_unclipped": error_of(
            study.merged_kl_gradient(states, reading="detached"), exact, worst=True
        ),
        "off_policy_clipped": error_of(clipped, exact),
        "sequence_own_credit": own,
        "sequence_to_go": to_go,
        "sequence_full_vocabulary": visited,
    }
    one_token = ("full_vocabulary", "on_policy_k2", "off_policy_unclipped")
    sometimes = max(figures[name] for name in one_token) < EXACT
    always = figures["off_policy_clipped"] < EXACT and own < EXACT and visited < EXACT
    return Finding(settle(sometimes and always, sometimes), figures)


def _sequence_credits() -> tuple[float, float, float]:
    """Median errors to the sequence KL: GRPO's own-token credit, PPO's to-go, full vocabulary."""
    tables, _ = stale_trees()
    rows = []
    for logits, ref_logits in zip(*tables, strict=True):
        exact = sequence_kl_gradient(logits, ref_logits, TREE)
        penalty = token_logp(logits, TREE) - token_logp(ref_logits, TREE)
        credits = (penalty, reward_to_go(penalty))
        gradients = [_score_gradient(logits, credit) for credit in credits]
        gradients.append(visited_kl_gradient(logits, ref_logits, TREE))
        rows.append(torch.stack([relative_error(g.flatten(), exact.flatten()) for g in gradients]))
    own, to_go, visited = torch.stack(rows).median(0).values.tolist()
    return own, to_go, visited


def _score_gradient(logits: Tensor, credit: Tensor) -> Tensor:
    """Autograd through credit times log-likelihood, averaged over all sequences."""
    leaf = logits.clone().requires_grad_(True)
    logp = token_logp(leaf, TREE)
    probability = logp.detach().sum(-1).exp()
    total = (probability.unsqueeze(-1) * credit * logp).sum()
    return torch.autograd.grad(total, leaf)[0]


@decides("S4-xo")
def best_way_overall() -> Finding:
    """The error of each way's KL gradient on samples of one age; and the recorded ways: accuracy of
    the merged KL, clipped, less that of the full vocabulary at equal exact KLs (a mean over all
    that they share), and less that of k2 on large fresh batches at equal completions and at equal
    passes through the model, each side at the better of its step sizes."""
    states, on_policy = stale(along_advantage=True), fresh()
    exact = reverse_kl_gradient(states.logits, states.ref_logits)
    figures = {
        "full_vocabulary": error_of(full_vocabulary(states, "policy"), exact),
        "on_policy_k2": error_of(
            expected_gradient(*on_policy[:2], estimator="k2"),
            reverse_kl_gradient(on_policy.logits, on_policy.ref_logits),
        ),
        "off_policy_clipped": error_of(
            study.clipped_kl_gradient(states, beta=BETA, epsilon=EPSILON), exact
        ),
    }
    several = recorded("three_ways").finals
    ways = trained.costed_ways(recorded("three_ways_half_step"), recorded("three_ways_on_policy"))
    bands = {}
    for reading in ("old", "detached"):
        pair = (f"merged_{reading}", "exact_loss", "accuracy")
        bands[f"{reading}_to_full"] = difference_along(several, *pair, of="reverse_kl")
        for cost in ("completions", "passes"):
            ended = trained.at_equal_cost(ways, cost, TRAINED_BETA)
            pair = (f"merged_{reading}", trained.LARGE_BATCH, "accuracy")
            bands[f"{reading}_to_large_at_{cost}"] = difference(ended, *pair)
    for name, band in bands.items():
        figures |= band.figures(name)
    ahead = [band.above for band in bands.values()]
    return Finding(settle(all(ahead), any(ahead)), figures)
