"""Findings of which term a loss is: faults, sign, scale, ratio and credit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kl_term.audit.candidates import Match
from kl_term.audit.facts import GRADIENTS, Facts
from kl_term.audit.findings import Finding, Severity
from kl_term.audit.targets import NEITHER, NOTHING

#: Share of the reverse KL's gradient below which a divergence is as good as none.
_NEGLIGIBLE = 0.01

_FAULTS: dict[str, tuple[str, str, str | None]] = {
    "exchanged": (
        "policy and reference are in each other's place in {term}",
        "exchange the two arguments",
        "14_frameworks#prop-transposed-k3",
    ),
    "score-term": (
        "{term} is weighed with a live ratio to itself, which adds its value times the score",
        "detach the ratio of k2, or keep the live ratio for k3",
        "14_frameworks#prop-live-ratio",
    ),
    "kl-ratio-to-reference": (
        "the ratio that weighs the KL is to the reference, not to the sampler",
        "divide by the log-probs of the policy that sampled",
        "02_gradients#thm-off-policy-weights",
    ),
    "shifted-reference": (
        "the log-probs of policy and reference are of different tokens, one position apart",
        "shift both by the same number of positions",
        None,
    ),
    "pointwise-kl-div": (
        "the log-ratio of the sampled token is weighed with its probability once more: that is "
        "a summand of the KL over the vocabulary, on one sampled token",
        "use k2, or k3 with a live ratio, on sampled tokens; F.kl_div on whole rows of logits",
        GRADIENTS,
    ),
    "absolute": (
        "the absolute log-ratio descends twice the total variation",
        "use k2: its gradient is that of the reverse KL",
        "14_frameworks#prop-dead-zones",
    ),
    "positive-part": (
        "the log-ratio is cut at zero: tokens that the reference prefers cost nothing",
        "leave the sign: a log-ratio may be negative, its mean is not",
        "01_estimators#thm-unbiased",
    ),
}


def of_term(facts: Facts) -> Iterator[Finding]:
    identity = facts.identity
    if identity.fault in _FAULTS and identity.under_fault is not None:
        says, advice, theorem = _FAULTS[identity.fault]
        theorem = "02_gradients#thm-expected-gradients" if identity.fault == "absolute" else theorem
        severity: Severity = "warning" if identity.fault in ("absolute", "score-term") else "error"
        if identity.fault == "score-term" and facts.at_state.name == "reverse KL":
            severity = "note"  # where the policy itself samples, k1 and its score are right
        name = identity.under_fault.term.estimator
        yield Finding(identity.fault, severity, says.format(term=name), advice, theorem)
    if facts.counted_twice and identity.twice is not None:
        one, other = (m.name for m in identity.twice)
        yield Finding(
            "counted-twice",
            "error",
            f"one coefficient acts twice: as {one} and as {other}",
            "keep the KL in the loss or in the reward, not in both",
            "05_fixed_points#thm-potentials",
        )
    scale = facts.scale
    if scale is not None and scale < 0:
        yield Finding(
            "sign",
            "error",
            "the KL has the wrong sign: it is maximised",
            "add the KL to a loss that is minimised, subtract it from a reward",
            "08_reward_side#thm-penalty-sign",
        )
    silent = identity.only_near or facts.inside_the_spread or facts.asks_for_no_reference
    silent = silent or bool(facts.invariants.left_out)  # maybe the one token of a state
    if facts.identity.has_gradient and facts.at_state.name == NOTHING and not silent:
        yield Finding(
            "minimises-nothing",
            "error",
            "the expected gradient of the KL is zero: it knows no reference",
            "use k2 as a loss, or k1 in the reward",
            GRADIENTS,
        )
    yield from _of_ratio(facts)
    if identity.match is not None and identity.match.term.placement == "reward":
        yield from _of_price(facts, identity.match)
    elif _other_credit(facts):
        yield Finding(
            "credit",
            "warning",
            "of one token it is the reverse KL, of whole answers no KL: a token pays for something "
            "else than its own KL and that of all tokens that follow",
            "sum the KL of each token and of all that follow, without discount or divisor",
            "02_gradients#thm-sequence-kl-gradient",
        )
    yield from _of_size(facts)
    differs = scale is not None and abs(abs(scale) - 1) > 10 * facts.reading.tolerance + 1e-6
    summed = identity.twice is not None or (identity.match is None and "+" in facts.at_state.name)
    if scale is not None and not differs:
        yield from _beside_policy(facts, scale)
    sized = identity.match is not None or identity.weights_known  # else no one coefficient acts
    sized = sized or facts.invariants.depends_on_order
    if scale is not None and differs and sized and identity.fault != "absolute" and not summed:
        of_whole = abs(scale - facts.policy_scale) < 1e-4 * abs(scale)
        by_caller = _by_caller(facts, scale)
        yield Finding(
            "scale",
            "note" if of_whole or facts.has_own_coefficient or by_caller else "warning",
            f"the coefficient that acts is {abs(scale):.4g} times the one asked for"
            + "".join(f": {name} divides the loss" for name in by_caller),
            f"multiply the KL by {1 / abs(scale):.4g}, or say so beside the coefficient",
            None,
        )


def _by_caller(facts: Facts, scale: float) -> list[str]:
    """The numbers of the caller that divide the loss by just this much."""
    divisors = facts.reading.foreign.divisors.items()
    return [name for name, by in divisors if abs(abs(scale) * by - 1) < 1e-4]


def _of_size(facts: Facts) -> Iterator[Finding]:
    """Of sums: over the vocabulary, and of two KLs, which share the coefficient or each have it."""
    if facts.expected.over_vocabulary:
        yield Finding(
            "scale",
            "warning",
            "the KL is divided by the size of the vocabulary: it is a mean over its tokens",
            "sum over the vocabulary, then average over the counted positions",
            None,
        )
    if facts.unnamed_divergence and facts.unnamed_size < _NEGLIGIBLE:
        yield Finding(
            "scale",
            "warning",
            f"the divergence pushes {facts.unnamed_size:.2g} times as hard as the reverse KL: the "
            "coefficient is as good as zero",
            "take the limit itself, a KL, where the mixture is one of the two policies",
            None,
        )
    found = re.fullmatch(
        r"reverse(?: KL)? \+ (?:([\d.e+-]+) )?forward(?: KL)?", facts.at_state.name
    )
    if facts.identity.match is not None or found is None or facts.scale is None:
        return
    total = facts.scale * (1 + float(found[1] or 1))
    apart = min(abs(total - right) for right in (1, 2, facts.policy_scale))
    by_caller = any(_by_caller(facts, total / whole) for whole in (1, 2))
    if total > 0 and apart > 1e-3 and not by_caller:
        yield Finding(
            "scale",
            "warning",
            f"it descends {facts.at_state.said}: both KLs together have {total:.4g} times the "
            "coefficient asked for",
            "let their weights add up to one",
            None,
        )


def _beside_policy(facts: Facts, scale: float) -> Iterator[Finding]:
    """A divisor of the policy loss that the KL beside it does not have."""
    policy = facts.policy
    if policy is None or policy.kind not in ("grpo", "reinforce") or policy.scale <= 0:
        return
    alike = policy.aggregation == facts.identity.aggregation
    if alike and scale > 0 and abs(scale / policy.scale - 1) > 1e-3:
        yield Finding(
            "scale",
            "warning",
            f"the policy loss beside the KL is {policy.scale:.4g} times its aggregation: the KL "
            f"weighs {scale / policy.scale:.4g} times what the coefficient says",
            "divide the sum of both, once",
            "08_reward_side#prop-token-mean",
        )


def _other_credit(facts: Facts) -> bool:
    """Whether a reward's KL is right token by token and fits nothing over answers."""
    found, expected = facts.invariants, facts.expected
    explained = facts.identity.fault or found.reads_padding or found.depends_on_order
    fits = facts.identity.match is not None or not found.linear_in_beta or explained
    over_answers = expected["fresh"]["sequence"].name
    right = facts.reading.kind == "reward" and facts.at_state.name == "reverse KL"
    return right and not fits and over_answers == NEITHER


def _of_ratio(facts: Facts) -> Iterator[Finding]:
    match = facts.identity.match
    if match is None or match.term.level == "sequence" or match.term.placement != "loss":
        return
    if match.term.ratio == "geometric":
        yield Finding(
            "ratio-of-another-level",
            "error",
            "the mean ratio of the whole answer weighs the KL of each token: neither the KL of "
            "tokens nor that of answers",
            "weigh the KL with the ratio of its own token",
            "06_sequences#thm-geometric-weight",
        )
    elif match.term.ratio == "sequence" and match.term.weighting == "detached":
        yield Finding(
            "ratio-of-another-level",
            "warning",
            "the ratio of the whole answer, detached, weighs the KL of each token",
            "weigh the KL with the ratio of its own token, or attach the ratio of the prefix",
            "06_sequences#thm-prefix-ratio",
        )


def _of_price(facts: Facts, match: Match) -> Iterator[Finding]:
    if match.term.estimator != "k1":
        yield Finding(
            "estimator-in-reward",
            "warning",
            f"{match.term.estimator} in the reward has the gradient of no KL: only k1 has that of "
            "the reverse KL there",
            "subtract the log-ratio itself (k1)",
            "05_fixed_points#thm-k3-plain-flow",
        )
    elif match.term.credit == "immediate" and facts.reading.kind == "reward":
        made = not facts.reading.foreign.reads & {"rewards", "token_rewards"}
        yield Finding(
            "credit",
            "note" if made else "warning",  # of advantages nothing is summed any more, as of a loss
            "a token pays for its own KL and not for the KL of the tokens that it leads to",
            "sum the KL of each token and of all that follow",
            "02_gradients#thm-sequence-kl-gradient",
        )
