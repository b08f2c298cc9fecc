"""Decisions on stale samples: weights, readings, clip and masks on the KL term (chapter 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.experiments.chapters import off_policy as study
from analysis.experiments.chapters import stale_sequences
from analysis.experiments.chapters.gradients import Policies, random_tables
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.gradient_errors import error_of
from analysis.experiments.claims.recorded import difference, recorded
from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import (
    exact_kl_gradient,
    expected_gradient,
    reverse_kl_gradient,
)
from analysis.kl.estimators import k3
from analysis.kl.sequences import (
    enumerate_sequences,
    sequence_kl,
    sequence_probability,
    token_logp,
)
from analysis.kl.surrogates import kl_loss
from analysis.objectives.masking import off_policy_sequence_mask

#: Below this an enumerated identity holds.
EXACT = 1e-10
BETA, EPSILON = 0.04, 0.2
#: Ragged sequences over three tokens, one of which ends them.
TREE = enumerate_sequences(3, 4, eos=2)


def stale(distance: float = 0.5, **options) -> study.StaleStates:
    """The stale states of this theme; ``options`` as in :func:`off_policy.stale_states`."""
    return study.stale_states(100, 16, distance, seed=70, **options)


def fresh() -> study.StaleStates:
    """The same states, sampled by the policy itself."""
    return stale(0.0)


def stale_trees() -> tuple[Policies, Tensor]:
    """Twenty pairs of tabular policies over ragged sequences, and their stale samplers."""
    tables = random_tables(TREE, 3, 20, spread=1.0, seed=71)
    return tables, stale_sequences.moved_tables(tables.logits, 0.5, seed=72)


@decides("S3-29")
def weighted_k3() -> Finding:
    """V3.2's term, attached and detached: autograd through the loss against closed-form gradients,
    its value against the KL, at one state and over sequences; and recorded runs on samples 16
    updates old, with and without the weight."""
    states = stale()
    logits, ref_logits, old_logits, _ = states
    exact = {d: exact_kl_gradient(logits, ref_logits, direction=d) for d in ("reverse", "forward")}
    gradient = {
        w: expected_gradient(logits, ref_logits, old_logits, estimator="k3", weighting=w)
        for w in ("none", "attached", "detached")
    }
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in (logits, ref_logits, old_logits))
    weighted = kl_loss(logp, ref_logp, old_logp=old_logp, estimator="k3", weighting="attached")
    value = (old_logp.exp() * weighted).sum(-1) - reverse_kl(logits, ref_logits)
    unweighted = (old_logp.exp() * k3(logp, ref_logp)).sum(-1) / reverse_kl(logits, ref_logits) - 1
    tables, samplers = stale_trees()
    figures = {
        "value_error": value.abs().max().item(),
        "value_error_unweighted": unweighted.abs().median().item(),
        "attached_to_reverse": error_of(gradient["attached"], exact["reverse"], worst=True),
        "detached_to_forward": error_of(gradient["detached"], exact["forward"], worst=True),
        "detached_to_reverse": error_of(gradient["detached"], exact["reverse"]),
        "unweighted_to_reverse": error_of(gradient["none"], exact["reverse"]),
        "sequence_value_error": _sequence_value_error(tables, samplers),
    }
    finals = recorded("staleness").finals
    for metric in ("own_accuracy", "reverse_kl"):
        pair = ("k3_attached_lag_16", "k3_lag_16", metric)
        figures |= difference(finals, *pair).figures(f"trained_{metric}")
    one_state = figures["value_error"] < EXACT and figures["attached_to_reverse"] < EXACT
    everywhere = figures["detached_to_reverse"] < EXACT and figures["sequence_value_error"] < EXACT
    return Finding(settle(one_state and everywhere, one_state), figures)


def _sequence_value_error(tables: Policies, samplers: Tensor) -> float:
    """Median relative error of the token-weighted k3 as an estimate of the sequence KL."""
    errors = []
    for logits, ref_logits, old_logits in zip(*tables, samplers, strict=True):
        logp, ref_logp, old_logp = (token_logp(x, TREE) for x in (logits, ref_logits, old_logits))
        terms = kl_loss(
            logp, ref_logp, old_logp=old_logp, estimator="k3", weighting="attached", mask=TREE.mask
        )
        estimate = sequence_probability(old_logits, TREE) @ (terms * TREE.mask).sum(-1)
        errors.append((estimate / sequence_kl(logits, ref_logits, TREE) - 1).abs())
    return torch.stack(errors).median().item()


@decides("S3-31")
def masked_sequences() -> Finding:
    """The masking rule against its words token by token; what it does to bias and variance of the
    token-ratio gradient, over every sequence of a tree; and to recorded runs on stale samples."""
    cases = stale_sequences.mask_cases(TREE, 3, 40, 0.5, seed=73)
    rule_broken, gains = 0, []
    for case in cases:
        logp, old_logp = token_logp(case.logits, TREE), token_logp(case.old_logits, TREE)
        kept = off_policy_sequence_mask(logp, old_logp, case.advantages, TREE.mask, delta=0.2)
        for row, advantage in enumerate(case.advantages.tolist()):
            gaps = (old_logp - logp)[row][TREE.mask[row]]
            masked = advantage < 0 and gaps.mean().item() > 0.2
            rule_broken += bool(kept[row].any()) == masked
        rows = [stale_sequences.mask_row(case, TREE, delta) for delta in (math.inf, 0.2)]
        gains.append(
            [row[key] for row in rows for key in ("bias", "variance")] + [rows[1]["masked"]]
        )
    bias, variance, masked_bias, masked_variance, masked = torch.tensor(gains).unbind(-1)
    used = masked > 0
    figures = {
        "rule_broken": float(rule_broken),
        "share_variance_lower": (masked_variance < variance)[used].double().mean().item(),
        "share_bias_higher": (masked_bias > bias)[used].double().mean().item(),
        "variance_ratio": (masked_variance / variance)[used].median().item(),
        "bias_ratio": (masked_bias / bias)[used].median().item(),
        "bias_limit": masked_bias[used].median().item(),
    }
    finals = recorded("stale_masking").finals
    saved = difference(finals, "reinforce_mask_0.1", "reinforce", "own_accuracy")
    beside_clip = difference(finals, "token_mask_0.1", "token", "own_accuracy")
    figures |= saved.figures("trained_unclipped") | beside_clip.figures("trained_clipped")
    always = figures["share_bias_higher"] == 0.0 and saved.above and beside_clip.above
    sometimes = rule_broken == 0 and figures["share_variance_lower"] > 0.5
    return Finding(settle(sometimes and always, sometimes), figures)


@decides("S4-25")
def unweighted_loss() -> Finding:
    """The printed loss and its siblings on fresh and stale samples: autograd over the vocabulary
    against the closed-form gradient; and the sum over the vocabulary with either weight."""
    figures = {}
    for age, states in (("fresh", fresh()), ("stale", stale())):
        exact = reverse_kl_gradient(states.logits, states.ref_logits)
        for name in ("k1", "k2", "k3"):
            gradient = expected_gradient(*states[:3], estimator=name)
            figures[f"{name}_{age}"] = error_of(gradient, exact)
    states = stale()
    exact = reverse_kl_gradient(states.logits, states.ref_logits)
    figures["full_vocabulary"] = error_of(full_vocabulary(states, "policy"), exact, worst=True)
    figures["full_vocabulary_old_weights"] = error_of(full_vocabulary(states, "sampler"), exact)
    valid = {name: figures[f"{name}_fresh"] < EXACT for name in ("k1", "k2", "k3")}
    stale_wrong = all(figures[f"{name}_stale"] > 0.05 for name in valid)
    as_printed = valid["k1"] and figures["full_vocabulary_old_weights"] < EXACT
    partly = valid["k2"] and figures["full_vocabulary"] < EXACT
    return Finding(settle(as_printed and stale_wrong, partly and stale_wrong), figures)


def full_vocabulary(states: study.StaleStates, weights: str) -> Tensor:
    """Gradient of the log-ratio summed over the vocabulary under the policy or the sampler."""
    leaf = states.logits.clone().requires_grad_(True)
    logp = leaf.log_softmax(-1)
    probability = logp.exp() if weights == "policy" else states.old_logits.softmax(-1)
    total = (probability * (logp - states.ref_logits.log_softmax(-1))).sum()
    return torch.autograd.grad(total, leaf)[0]


@decides("S4-26")
def readings_of_the_merged_kl() -> Finding:
    """Each reading's expected gradient by autograd, without clip, against closed forms: the reverse
    KL, and for the sampler's log-ratio the difference of two reverse KLs; and recorded runs of
    several steps a rollout, clipped, against the detached reading."""
    states = stale()
    exact = reverse_kl_gradient(states.logits, states.ref_logits)
    drift = reverse_kl_gradient(states.logits, states.old_logits)
    old = study.merged_kl_gradient(states, reading="old")
    unmoved = fresh()
    figures = {
        reading: error_of(study.merged_kl_gradient(states, reading=reading), exact, worst=True)
        for reading in ("detached", "attached")
    }
    figures["old"] = error_of(old, exact)
    figures["old_identity"] = error_of(old, exact - drift, worst=True)
    figures["old_fresh"] = error_of(
        study.merged_kl_gradient(unmoved, reading="old"),
        reverse_kl_gradient(unmoved.logits, unmoved.ref_logits),
        worst=True,
    )
    finals = recorded("three_ways").finals
    for reading in ("old", "attached"):
        pair = (f"merged_{reading}", "merged_detached", "accuracy")
        figures |= difference(finals, *pair, beta=0.3).figures(f"trained_{reading}")
    under_policy = max(figures["detached"], figures["attached"]) < EXACT
    under_sampler = figures["old"] < EXACT
    return Finding(settle(under_policy and under_sampler, under_policy), figures)
