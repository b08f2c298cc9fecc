"""Findings of the policy part of a loss."""

from __future__ import annotations

from collections.abc import Iterator

from kl_term.audit.facts import Facts
from kl_term.audit.findings import Finding
from kl_term.audit.policy_part import NOWHERE, PolicyPart
from kl_term.audit.policy_weights import PolicyWeights

#: Kinds with one ratio an answer: how its tokens are summed is not the KL's.
_OF_ANSWERS = ("gspo", "sequence")


def of_policy(facts: Facts) -> Iterator[Finding]:
    policy = facts.policy
    if policy is None:
        return
    if facts.reading.switches:
        yield Finding(
            "policy-switched",
            "error",
            "with a KL the policy loss is another one than without",
            "give what the KL computes a name of its own: it overwrites what the policy loss reads",
            "02_gradients#thm-off-policy-weights",
        )
    if policy.across_groups:
        yield Finding(
            "policy-axis",
            "error",
            "the rewards of one group alone have no gradient: an answer is compared with those of "
            "other groups, and not with its own",
            "average over the answers of a group, not over the groups",
            "08_reward_side#thm-baseline",
        )
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
    if policy.reads_other_advantages and not policy.reads_other_answers:
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
    if policy.reads_other_answers:
        yield Finding(
            "policy-ratio",
            "error",
            "the log-probs of one answer move the policy's gradient of another: its ratio is not "
            "its own",
            "sum and average log-ratios inside each answer, never over a pack or a batch",
            "02_gradients#thm-off-policy-weights",
        )
    if facts.tempered.ratio_off:
        at = ", ".join(f"{name} {value:g}" for name, value in facts.tempered.values.items())
        yield Finding(
            "policy-ratio",
            "error",
            f"at its default, {at}, no ratio is one where policy and sampler agree: whether the "
            "sampler's log-probs are those at this temperature or at one",
            "divide logits by the temperature, before the softmax, and log-probs by nothing",
            "08_reward_side#thm-other-reference",
        )
    if policy.kind == "ratio to the reference":
        yield Finding(
            "policy-ratio",
            "error",
            "the policy's ratio is to the reference, not to the sampler",
            "divide by the log-probs of the policy that sampled",
            "02_gradients#thm-off-policy-weights",
        )
    takes_sampler = bool(facts.reading.foreign.reads & {"old_logp", "old_logits"})
    if takes_sampler and not policy.live_ratio and not facts.invariants.reads_sampler:
        yield Finding(
            "policy-ratio",
            "warning" if policy.constant else "note",  # else a plain policy gradient
            "it takes the sampler's log-probs and weighs nothing by them: stale samples count as "
            "fresh ones, and no clip acts",
            "divide by the log-probs of the policy that sampled, not by the policy's own",
            "02_gradients#thm-off-policy-weights",
        )
    elif policy.idle_clips:
        names = " and ".join(policy.idle_clips)
        yield Finding(
            "policy-clip",
            "warning",
            f"{names} changes neither value nor gradient, however stale the samples are",
            "use the clipped ratio in what is returned",
            "06_sequences#thm-ppo-clip",
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
    if policy.has_gradient and not wrong and policy.kind is None:
        yield from _of_weights(policy.weights)
    kl = facts.identity.aggregation
    if (
        policy.kind not in (None, *_OF_ANSWERS)
        and kl
        and policy.aggregation
        and kl != policy.aggregation
    ):
        yield Finding(
            "aggregations-differ",
            "warning",
            f"the KL is aggregated by {kl} and the policy loss by {policy.aggregation}: the "
            "coefficient depends on the lengths",
            "aggregate both alike",
            "08_reward_side#prop-token-mean",
        )


def _of_clip(policy: PolicyPart) -> Iterator[Finding]:
    if policy.clips is None:
        return
    if policy.sized_clip:
        yield Finding(
            "policy-clip",
            "error",
            "a larger advantage is clipped at other ratios: the product is clipped, not its ratio",
            "clamp the ratio alone, then multiply it by the advantage",
            "06_sequences#thm-ppo-clip",
        )
    if policy.clips["positive"] == NOWHERE:
        yield Finding(
            "policy-clip",
            "error",
            "a positive advantage has no gradient at any ratio, and a negative one has",
            "clip a positive advantage above and a negative one below; a dual clip is for negative "
            "ones alone",
            "06_sequences#thm-ppo-clip",
        )
        return
    if policy.clips["negative"] == NOWHERE:
        return  # only what is better than the baseline is learnt
    wrong = []
    if policy.clips["positive"][0] > 0:
        wrong.append("a positive advantage is clipped below")
    if policy.clips["negative"][1] < 1.9:
        wrong.append("a negative advantage is clipped above")
    if policy.clips["positive"][1] < 0.99:
        wrong.append("a positive advantage is clipped at the ratio of one")
    if policy.clips["negative"][0] > 1.01:
        wrong.append("a negative advantage is clipped at the ratio of one")
    below, above = policy.clips["negative"][0], policy.clips["positive"][1]
    if not wrong and 0 < below < 1 and 1 - below > 0.5 and 1 - below > 2 * (above - 1):
        yield Finding(
            "policy-clip",
            "error",
            f"a negative advantage is clipped below a ratio of {below:.3g} only, a positive one "
            f"above {above:.3g} already",
            "clamp the ratio to [1 - eps, 1 + eps]",
            "06_sequences#thm-ppo-clip",
        )
    if wrong:
        yield Finding(
            "policy-clip",
            "error",
            f"{' and '.join(wrong)}: a token that moved the wrong way is not brought back",
            "take the minimum of the free and the clipped product, both times the advantage",
            "06_sequences#thm-ppo-clip",
        )


def _of_weights(weights: PolicyWeights) -> Iterator[Finding]:
    """Of a policy loss that is none of ours: what the advantage of a token is multiplied by."""
    if weights.negative_rises:
        yield Finding(
            "policy-sign",
            "error",
            "a negative advantage makes its token more likely, as a positive one does",
            "multiply by the advantage, with its sign",
            None,
        )
        return
    power = weights.power
    if power is not None and min(abs(power), abs(power - 1)) > 0.15:
        yield Finding(
            "policy-ratio",
            "warning",
            f"the policy's gradient goes with the ratio to the power {power:.2g}",
            "let the ratio enter once; detach a second one that only weighs",
            "02_gradients#thm-off-policy-weights",
        )
    elif weights.by_probability is not None and weights.by_probability > 1.01:
        yield Finding(
            "policy-weight",
            "warning",
            "of two tokens with one advantage, which the policy itself drew, the gradients are "
            f"{weights.by_probability:.3g} to one: they read the token's own probability",
            "multiply the advantage by the ratio, or by the log-prob, and by nothing else live",
            "05_fixed_points#thm-regularised-optimum",
        )
    if weights.by_size is not None and abs(weights.by_size - 2) > 0.02:
        yield Finding(
            "policy-weight",
            "warning",
            f"twice the advantage has {weights.by_size:.3g} times the gradient",
            "multiply by the advantage once",
            "05_fixed_points#thm-regularised-optimum",
        )
