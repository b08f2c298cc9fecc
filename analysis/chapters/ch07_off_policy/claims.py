"""The claims that chapter 7 decides."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import grad

from analysis.chapters.ch07_off_policy.readings import clipped_kl_gradient, silenced_mass
from analysis.chapters.ch07_off_policy.sequences import mask_cases, mask_rows, weight_errors
from analysis.evidence.claims import EXACT, Finding, claim, error_of, judge, largest, median, share
from analysis.evidence.clip_slopes import score_coefficients
from analysis.evidence.kl_estimates import kl_estimates
from analysis.evidence.policies import RAGGED, Policies, moved_logits, random_tables
from analysis.evidence.predictions import at_equal_kl
from analysis.evidence.recorded import difference, recorded
from analysis.evidence.stale_states import (
    NO_CLIP,
    StaleStates,
    merged_gradient,
    merged_kl_gradient,
    stale_states,
)
from analysis.evidence.stale_training import less_large_batches, weighted_at_equal_kl
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import exact_kl_gradient, expected_gradient, reverse_kl_gradient
from kl_term.kl.estimators import k3
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import sequence_kl, sequence_probability, token_logp
from kl_term.kl.surrogates import kl_loss
from kl_term.objectives.masking import off_policy_sequence_mask

BETA, EPSILON = 0.04, 0.2
TRAINED_BETA = 0.3  #: of the recorded runs that are compared


def stale(distance: float = 0.5, **options) -> StaleStates:
    """The states of the claims; ``options`` as in :func:`stale_states`."""
    return stale_states(100, 16, distance, seed=70, **options)


def stale_trees() -> tuple[Policies, Tensor]:
    """Twenty pairs of tabular policies over ragged sequences, and their stale samplers."""
    tables = random_tables(RAGGED, 3, 20, spread=1.0, seed=71)
    return tables, moved_logits(tables.logits, 0.5, seed=72)


@claim("S3-29")
def weighted_k3() -> Finding:
    """V3.2's term, attached and detached: its gradients and its value against the KLs, at one
    state and over sequences; and recorded runs."""
    pair, old_logits = Policies(*stale()[:2]), stale().old_logits
    gradient = {
        w: expected_gradient(*pair, old_logits, estimator="k3", weighting=w)
        for w in ("none", "attached", "detached")
    }
    reverse, forward = (exact_kl_gradient(*pair, direction=d) for d in ("reverse", "forward"))
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in (*pair, old_logits))
    weighted = kl_loss(logp, ref_logp, old_logp=old_logp, estimator="k3", weighting="attached")
    value, plain = ((old_logp.exp() * x).sum(-1) for x in (weighted, k3(logp, ref_logp)))
    tables, samplers = stale_trees()
    value_errors = []
    for *at, of_sampler in zip(*tables, samplers, strict=True):
        logps = [token_logp(x, RAGGED) for x in (*at, of_sampler)]
        options = {"estimator": "k3", "weighting": "attached", "mask": RAGGED.mask}
        terms = kl_loss(*logps[:2], old_logp=logps[2], **options) * RAGGED.mask
        estimate = sequence_probability(of_sampler, RAGGED) @ terms.sum(-1)
        value_errors.append((estimate / sequence_kl(*at, RAGGED) - 1).abs())
    figures = {
        "value_error": largest(value - reverse_kl(*pair)),
        "value_error_unweighted": median((plain / reverse_kl(*pair) - 1).abs()),
        "attached_to_reverse": error_of(gradient["attached"], reverse, worst=True),
        "detached_to_forward": error_of(gradient["detached"], forward, worst=True),
        "detached_to_reverse": error_of(gradient["detached"], reverse),
        "unweighted_to_reverse": error_of(gradient["none"], reverse),
        "sequence_value_error": median(torch.stack(value_errors)),
    }
    finals = recorded("staleness").finals
    for metric in ("own_accuracy", "reverse_kl"):
        gain = difference(finals, "k3_attached_lag_16", "k3_lag_16", metric)
        figures |= gain.figures(f"trained_{metric}")
    ends = weighted_at_equal_kl()
    names = {"": "mean", "_low": "low", "_high": "high"}
    figures |= {f"trained_equal_kl{end}": ends[name] for end, name in names.items()}
    one_state = figures["value_error"] < EXACT and figures["attached_to_reverse"] < EXACT
    everywhere = figures["detached_to_reverse"] < EXACT and figures["sequence_value_error"] < EXACT
    return Finding(judge(one_state and everywhere, one_state), figures)


@claim("S3-31")
def masked_sequences() -> Finding:
    """The masking rule against its words token by token; bias and variance of the gradient, over
    every sequence of a tree; and recorded runs."""
    cases = mask_cases(RAGGED, 3, 40, 0.5, seed=73)
    rule_broken = 0
    for *tables, advantages in cases:
        logp, old_logp = (token_logp(x, RAGGED) for x in tables)
        kept = off_policy_sequence_mask(logp, old_logp, advantages, RAGGED.mask, delta=0.2)
        for row, advantage in enumerate(advantages.tolist()):
            gaps = (old_logp - logp)[row][RAGGED.mask[row]]
            masked = advantage < 0 and gaps.mean().item() > 0.2
            rule_broken += bool(kept[row].any()) == masked
    free, strict = (mask_rows(cases, RAGGED, delta) for delta in (math.inf, 0.2))
    used = strict.masked > 0
    ratio = (strict / free)[used].quantile(interpolation="lower")
    figures = {
        "rule_broken": float(rule_broken),
        "share_variance_lower": (strict.variance < free.variance)[used].mean(),
        "share_bias_higher": (strict.bias > free.bias)[used].mean(),
        "variance_ratio": ratio.variance,
        "bias_ratio": ratio.bias,
        "bias_limit": strict.bias[used].quantile(interpolation="lower"),
    }
    finals = recorded("stale_masking").finals
    saved = difference(finals, "reinforce_mask_0.1", "reinforce", "own_accuracy")
    beside_clip = difference(finals, "token_mask_0.1", "token", "own_accuracy")
    figures |= saved.figures("trained_unclipped") | beside_clip.figures("trained_clipped")
    always = figures["share_bias_higher"] == 0.0 and saved.above and beside_clip.above
    sometimes = rule_broken == 0 and figures["share_variance_lower"] > 0.5
    return Finding(judge(sometimes and always, sometimes), figures)


@claim("S4-25")
def unweighted_loss() -> Finding:
    """The printed loss and its siblings, fresh and stale, against the KL's gradient; and the sum
    over the vocabulary with either weight."""
    figures = {}
    for age, states in (("fresh", stale(0.0)), ("stale", stale())):
        exact = reverse_kl_gradient(states.logits, states.ref_logits)
        for name in ("k1", "k2", "k3"):
            gradient = expected_gradient(*states[:3], estimator=name)
            figures[f"{name}_{age}"] = error_of(gradient, exact)
    figures["full_vocabulary"] = error_of(full_vocabulary(states, "policy"), exact, worst=True)
    figures["full_vocabulary_old_weights"] = error_of(full_vocabulary(states, "sampler"), exact)
    valid = {name: figures[f"{name}_fresh"] < EXACT for name in ("k1", "k2", "k3")}
    stale_wrong = all(figures[f"{name}_stale"] > 0.05 for name in valid)
    as_printed = valid["k1"] and figures["full_vocabulary_old_weights"] < EXACT
    partly = valid["k2"] and figures["full_vocabulary"] < EXACT
    return Finding(judge(as_printed and stale_wrong, partly and stale_wrong), figures)


def full_vocabulary(states: StaleStates, weights: str) -> Tensor:
    """Gradient of the log-ratio summed over the vocabulary under the policy or the sampler."""

    def total(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        probability = logp.exp() if weights == "policy" else states.old_logits.softmax(-1)
        return (probability * (logp - states.ref_logits.log_softmax(-1))).sum()

    return grad(total)(states.logits)


@claim("S4-26")
def readings_of_the_merged_kl() -> Finding:
    """Each reading's gradient without clip against the reverse KL's, or the difference of two;
    and recorded runs."""
    states, unmoved = stale(), stale(0.0)
    exact, of_unmoved = (reverse_kl_gradient(x.logits, x.ref_logits) for x in (states, unmoved))
    drift = reverse_kl_gradient(states.logits, states.old_logits)
    detached, attached, old = (
        merged_kl_gradient(states, reading=r) for r in ("detached", "attached", "old")
    )
    old_fresh = merged_kl_gradient(unmoved, reading="old")
    figures = {
        "detached": error_of(detached, exact, worst=True),
        "attached": error_of(attached, exact, worst=True),
        "old": error_of(old, exact),
        "old_identity": error_of(old, exact - drift, worst=True),
        "old_fresh": error_of(old_fresh, of_unmoved, worst=True),
    }
    finals = recorded("three_ways").finals
    for reading in ("old", "attached"):
        pair = (f"merged_{reading}", "merged_detached", "accuracy")
        figures |= difference(finals, *pair, beta=TRAINED_BETA).figures(f"trained_{reading}")
    under_policy = max(figures["detached"], figures["attached"]) < EXACT
    under_sampler = figures["old"] < EXACT
    return Finding(judge(under_policy and under_sampler, under_policy), figures)


@claim("S4-27")
def clipped_merged_kl() -> Finding:
    """The merged objective with and without clip against reward minus KL, the share of the KL's
    force that is lost, and recorded runs."""
    states = stale(along_advantage=True)
    reward = expected_score(states.logits, states.logits.softmax(-1) * states.advantages)
    exact = reward - BETA * reverse_kl_gradient(states.logits, states.ref_logits)
    clip = {"epsilon_low": EPSILON, "epsilon_high": EPSILON}
    options = {"beta": BETA, "reading": "detached"}
    lost = silenced_mass(states, beta=BETA, epsilon=EPSILON).median()
    over_sequences = weight_errors(*stale_trees(), RAGGED, level="token", credit="immediate")
    figures = {
        "unclipped": error_of(merged_gradient(states, **options, **NO_CLIP), exact, worst=True),
        "clipped": error_of(merged_gradient(states, **options, **clip), exact),
        "clipped_kl_part": _way_errors()["off_policy_clipped"],
        "silenced": lost.silenced,
        "opposing": lost.opposing,
        "sequences_unclipped": median(over_sequences),
    }
    finals = recorded("three_ways").finals
    pair = ("merged_detached", "merged_detached_wide", "accuracy")
    figures |= difference(finals, *pair, beta=TRAINED_BETA).figures("trained_clip")
    unclipped = figures["unclipped"] < EXACT
    correct = figures["clipped"] < EXACT and figures["sequences_unclipped"] < EXACT
    return Finding(judge(unclipped and correct, unclipped), figures)


@claim("S4-xp")
def merging_like_terms() -> Finding:
    """The clipped surrogates of reward and KL, added, against that of their sum: token by token,
    split by whether the two pull the same way."""
    states = stale(along_advantage=True)
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in states[:3])
    pull = -(logp - ref_logp)  # beta = 1: the KL's advantage

    def clipped(advantages: Tensor) -> Tensor:
        """What multiplies the score under PPO's minimum."""
        options = {"old_logp": old_logp, "mask": torch.ones_like(logp, dtype=torch.bool)}
        clip = {"epsilon_low": EPSILON, "epsilon_high": EPSILON}
        return score_coefficients(logp, advantages=advantages, **options, **clip)

    added = clipped(states.advantages) + clipped(pull)
    gap = (added - clipped(states.advantages + pull)).abs() > EXACT
    together = states.advantages * pull > 0
    inside = ((logp - old_logp).exp() - 1).abs() <= EPSILON
    figures = {
        "differs_same_sign": share(gap[together]),
        "differs_inside_clip": share(gap[inside]),
        "differs_opposite_sign": share(gap[~together & ~inside]),
    }
    sometimes = figures["differs_same_sign"] == 0 and figures["differs_inside_clip"] == 0
    return Finding(judge(not bool(gap.any()), sometimes), figures)


@claim("S4-40")
def three_implementations() -> Finding:
    """The three ways to have a KL, and credit to go, against the exact gradients: one token,
    then ragged sequences."""
    estimates = kl_estimates(stale_trees()[0], RAGGED).groupby(["vocabulary", "credit"])
    errors = estimates.error.quantile(interpolation="lower")
    figures = _way_errors() | {
        "sequence_own_credit": errors["sampled", "immediate"],
        "sequence_to_go": errors["sampled", "to_go"],
        "sequence_full_vocabulary": errors["full", "immediate"],
    }
    one_token = ("full_vocabulary", "on_policy_k2", "off_policy_unclipped")
    sometimes = max(figures[name] for name in one_token) < EXACT
    others = ("off_policy_clipped", "sequence_own_credit", "sequence_full_vocabulary")
    always = max(figures[name] for name in others) < EXACT
    return Finding(judge(sometimes and always, sometimes), figures)


def _way_errors() -> dict[str, float]:
    """Error of each way's KL gradient for one token a response: the largest, clipped the median."""
    states, on_policy = stale(along_advantage=True), stale(0.0)
    exact = reverse_kl_gradient(states.logits, states.ref_logits)
    of_on_policy = reverse_kl_gradient(on_policy.logits, on_policy.ref_logits)
    k2 = expected_gradient(*on_policy[:2], estimator="k2")
    unclipped = merged_kl_gradient(states, reading="detached")
    clipped = clipped_kl_gradient(states, beta=BETA, epsilon=EPSILON)
    return {
        "full_vocabulary": error_of(full_vocabulary(states, "policy"), exact, worst=True),
        "on_policy_k2": error_of(k2, of_on_policy, worst=True),
        "off_policy_unclipped": error_of(unclipped, exact, worst=True),
        "off_policy_clipped": error_of(clipped, exact),
    }


@claim("S4-xo")
def best_way_overall() -> Finding:
    """The error of each way's KL gradient; and recorded accuracy of the merged KL less that of
    the full vocabulary at equal KLs, and less that of k2 on large fresh batches at equal
    cost."""
    figures = _way_errors()
    del figures["off_policy_unclipped"]
    bands = {}
    for reading in ("old", "detached"):
        bands[f"{reading}_to_full"] = at_equal_kl("three_ways", f"merged_{reading}", "exact_loss")
        for cost in ("completions", "passes"):
            less = less_large_batches(f"merged_{reading}", cost)
            bands[f"{reading}_to_large_at_{cost}"] = less
    for name, interval in bands.items():
        figures |= interval.figures(name)
    ahead = [interval.above for interval in bands.values()]
    return Finding(judge(all(ahead), any(ahead)), figures)
