"""Findings of how a loss is built: gradient, padding, order, axis and divisor."""

from __future__ import annotations

from collections.abc import Iterator

from kl_term.audit.facts import GRADIENTS, Facts
from kl_term.audit.findings import Finding
from kl_term.audit.lengths import counts_the_prompt


def of_call(facts: Facts) -> Iterator[Finding]:
    if not facts.invariants.acts:
        yield Finding(
            "beta-does-nothing",
            "error",
            "the KL coefficient changes neither the value nor the gradient",
            "add the KL, times the coefficient, to what is returned",
            GRADIENTS,
        )
    elif facts.has_no_kl:
        yield Finding(
            "no-kl",
            "note",
            "it takes neither a reference nor a coefficient: a policy loss without a KL",
            "add a KL where the policy has to stay near a reference",
            "05_fixed_points#thm-regularised-optimum",
        )
    elif not facts.identity.has_gradient and not facts.invariants.linear_in_beta:
        pass  # it acts elsewhere
    elif not facts.identity.has_gradient and facts.reading.kind == "loss":
        into = ", ".join(sorted(facts.invariants.leaks))
        went = f" (it goes into {into})" if into else ""
        value = facts.identity.value_of
        shows = f", though its value is that of {value.name}" if value else ""
        yield Finding(
            "no-gradient",
            "error",
            f"the KL has no gradient by the policy{went}{shows}: it moves no weight",
            "compute the KL outside no_grad, from the policy's log-probs before any detach",
            GRADIENTS,
        )
    elif not facts.identity.has_gradient:
        yield Finding(
            "kl-not-paid",
            "error",
            "the KL changes no reward of a counted token",
            "subtract the coefficient times the log-ratio from the rewards",
            "08_reward_side#prop-control-reward",
        )
    if unpaid := facts.reading.payment.unpaid:
        of = "all answers" if len(unpaid) == 3 else "some answers"
        yield Finding(
            "reward-not-paid",
            "error",
            f"the reward of {of} reaches no counted token",
            "pay it at the last counted token of each answer",
            "08_reward_side#prop-control-reward",
        )
    elif facts.reading.payment.early:
        yield Finding(
            "reward-not-paid",
            "error",
            "the reward is paid at a token before the last: those after it earn nothing of it",
            "pay it at the last counted token of each answer",
            "08_reward_side#prop-control-reward",
        )
    elif facts.reading.kind == "reward" and (lengths := counts_the_prompt(facts.reading.foreign)):
        yield Finding(
            "reward-not-paid",
            "note",
            f"{lengths} was read as counting the prompt, of rows with one position less: where it "
            "counts the answer alone, the reward is paid one token before the last",
            "say which by names=: 'lengths' of the answer, or 'total_lengths'",
        )
    for note in sorted(facts.reading.foreign.notes):
        yield Finding(
            "modifies-arguments",
            "warning",
            f"it {note}: the caller's tensors are other ones afterwards",
            "work on a copy (torch.where or masked_fill instead of assignment)",
        )


def _of_coefficient(facts: Facts) -> Iterator[Finding]:
    """First of all: of a KL that is not linear in its coefficient nothing else has a size."""
    if facts.inside_the_spread:
        yield Finding(
            "inside-the-std",
            "error",
            "the spread of the group divides the KL: where all answers are equally good, only "
            "the KL is left, at a strength that no coefficient sets",
            "subtract the KL after the rewards were divided by their spread, or do not divide",
            "08_reward_side#thm-orders",
        )
    elif not facts.invariants.linear_in_beta:
        yield Finding(
            "beta-not-linear",
            "warning",
            "twice the coefficient is not twice the KL",
            "multiply the KL by the coefficient outside of clips and divisions",
            "08_reward_side#thm-conversion",
        )


def of_structure(facts: Facts) -> Iterator[Finding]:
    found = facts.invariants
    yield from _of_coefficient(facts)
    if found.reads_constant_logit:
        yield Finding(
            "wrong-axis",
            "error",
            "a constant added to all logits of a position changes the KL: its numbers are no "
            "distribution over tokens",
            "take log_softmax over the last axis, the vocabulary",
        )
    if found.reads_padding:
        yield Finding(
            "reads-padding",
            "error",
            f"masked positions change the {found.reads_padding}",
            "mask every per-token term before it is summed, and divide by the mask's sum",
        )
    if found.depends_on_order:
        yield Finding(
            "row-order",
            "error",
            "the order of the answers, or where they are cut, changes the loss",
            "sum over all answers before dividing; pass the total number of tokens of the batch",
        )
    explained = facts.identity.has_baseline or facts.counted_twice or facts.inside_the_spread
    mixed = found.reads_others and not explained
    if mixed and not found.depends_on_order and not found.reads_padding:
        yield Finding(
            "reads-other-answers",
            "error",
            "the KL's gradient of an answer depends on what other answers say",
            "multiply weight and log-ratio token by token before anything is summed",
            "02_gradients#thm-off-policy-weights",
        )
    if found.moves_with_advantage and found.linear_in_beta:
        turns = found.moves_with_advantage == "sign"
        yield Finding(
            "kl-times-advantage",
            "error",
            "the KL moves with the advantage"
            + (": it is multiplied by it, and maximised where that is negative" if turns else ""),
            "add the KL beside what the advantage multiplies or selects",
            "05_fixed_points#thm-regularised-optimum",
        )
    if found.shifted:
        yield Finding(
            "shifted-reference",
            "error",
            "the reference's log-prob of a token moves the gradient of another and not its own",
            "shift policy and reference by the same number of positions",
        )
    elif found.left_out and not found.reads_padding:
        where = ", ".join(map(str, found.left_out))
        yield Finding(
            "tokens-left-out",
            "warning",
            f"tokens have no gradient of the KL, whatever they are: of four, number {where}",
            "sum the KL over all counted tokens of an answer",
            "02_gradients#thm-sequence-kl-gradient",
        )
    if facts.reading.kind == "loss" and (lengths := counts_the_prompt(facts.reading.foreign)):
        yield Finding(
            "tokens-left-out",
            "note",
            f"{lengths} was read as counting the prompt, of rows with one position less: where it "
            "counts the answer alone, the last token is left out",
            "say which by names=: 'lengths' of the answer, or 'total_lengths'",
        )
    if facts.asks_for_no_reference:
        yield Finding(
            "to-the-sampler",
            "note",
            "it takes no reference: the KL is to the policy that sampled, zero on fresh samples",
            "for a KL to a reference, take that one's log-probs too",
            "05_fixed_points#thm-regularised-optimum",
        )
    elif facts.identity.has_gradient and not found.reads_reference:
        yield Finding(
            "reference-not-read",
            "error",
            "the reference does not change the KL" + _in_its_place(facts),
            "give the reference's log-probs to the KL",
            "05_fixed_points#thm-regularised-optimum",
        )


def _in_its_place(facts: Facts) -> str:
    name = facts.at_state.name
    if name == "negative entropy":
        return ": it is an entropy bonus"
    return ": it is a KL to the sampler" if facts.identity.fault == "to-the-sampler" else ""


def of_divisor(facts: Facts) -> Iterator[Finding]:
    found, identity = facts.invariants, facts.identity
    if not identity.has_gradient or found.reads_padding or found.depends_on_order:
        return
    if facts.inside_the_spread:
        return
    if found.depends_on_width:
        yield Finding(
            "padding-width",
            "warning",
            f"more padding changes the {found.depends_on_width}: it is divided by the width of "
            "the tensor",
            "divide by the number of counted tokens, or by the longest completion allowed",
            "08_reward_side#prop-token-mean",
        )
    if abs(found.doubled - 2) < 1e-3 and facts.reading.shape == "number":
        of_caller = ", ".join(facts.reading.foreign.divisors)
        yield Finding(
            "sum-over-batch",
            "note" if of_caller else "warning",
            "the KL is a sum over the batch: with twice the answers it is twice as strong"
            + (f", unless {of_caller} grows with them" if of_caller else ""),
            "divide by the number of answers, or of counted tokens",
            "08_reward_side#prop-token-mean",
        )
    elif (
        abs(found.doubled - 1) > 1e-3 and facts.reading.kind == "loss" and not identity.has_baseline
    ):
        yield Finding(
            "divisor",
            "error",
            f"the divisor is none of the aggregations: of a batch twice as large the KL is "
            f"{found.doubled:.3g} times as strong",
            "divide once, by the number of counted tokens",
            "08_reward_side#prop-token-mean",
        )
    elif identity.divided and not found.depends_on_width:
        yield Finding(
            "divisor",
            "warning",
            "the KL of an answer is divided by its length before it is taken off the reward: "
            "a nat costs less in a longer answer",
            "subtract the sum of the log-ratios of an answer",
            "08_reward_side#thm-completion-weight",
        )
    elif not identity.weights_known:
        yield Finding(
            "divisor",
            "warning",
            "the weights of the tokens are those of no aggregation",
            "divide by the number of counted tokens of the batch, or of each answer",
            "08_reward_side#thm-completion-weight",
        )
