"""Findings of the policy part of a loss."""

from __future__ import annotations

from collections.abc import Iterator

from kl_term.audit.facts import Facts
from kl_term.audit.findings import Finding
from kl_term.audit.policy_part import PolicyPart


def of_policy(facts: Facts) -> Iterator[Finding]:
    policy = facts.policy
    if policy is None:
        return
    if not policy.has_gradient:
        yield Finding(
            "policy-no-gradient",
            "error",
            "the advantages have no gradient: only the KL moves the weights",
            "let the gradient through the ratio: exp(logp - old_logp), with logp not detached",
            None,
        )
        return
    if policy.reads_other_advantages:
        yield Finding(
            "policy-axis",
            "error",
            "an answer reads the advantages of other answers",
            "give one advantage an answer its own axis: advantages.unsqueeze(-1)",
            None,
        )
    if facts.invariants.sampler_shifted:
        yield Finding(
            "policy-ratio",
            "error",
            "the sampler's log-prob of a token is in the ratio of another token and not in its own",
            "shift policy and sampler by the same number of positions",
            "02_gradients#thm-off-policy-weights",
        )
    if policy.kind == "ratio to the reference":
        yield Finding(
            "policy-ratio",
            "error",
            "the policy's ratio is to the reference, not to the sampler",
            "divide by the log-probs of the policy that sampled",
            "02_gradients#thm-off-policy-weights",
        )
    wrong = policy.scale < 0 if policy.kind else policy.right_signs < 0.05
    if wrong:
        yield Finding(
            "policy-sign",
            "error",
            "the policy's gradient has the sign of minus the advantage: the reward is minimised",
            "minimise minus the objective",
            None,
        )
    yield from _of_clip(policy)
    kl = facts.identity.aggregation
    if policy.kind and kl and policy.aggregation and kl != policy.aggregation:
        yield Finding(
            "aggregations-differ",
            "warning",
            f"the KL is aggregated by {kl} and the policy loss by {policy.aggregation}: the "
            "coefficient depends on the lengths",
            "aggregate both alike",
            "09_advantages#prop-token-mean",
        )


def _of_clip(policy: PolicyPart) -> Iterator[Finding]:
    if policy.clips is None:
        return
    wrong = []
    if policy.clips["positive"][0] > 0:
        wrong.append("a positive advantage is clipped below")
    if policy.clips["negative"][1] < 1.9:
        wrong.append("a negative advantage is clipped above")
    if wrong:
        yield Finding(
            "policy-clip",
            "error",
            f"{' and '.join(wrong)}: a token that moved the wrong way is not brought back",
            "take the minimum of the free and the clipped product, both times the advantage",
            "06_sequences#thm-ppo-clip",
        )
