"""Findings of where a loss loses its gradient or its numbers, and what is only noted."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kl_term.audit.facts import Facts
from kl_term.audit.findings import Finding
from kl_term.audit.targets import NEITHER, NOTHING

#: Inside this log-ratio (nats) a clamp takes gradients that training meets.
_MET = 9.5


def of_numerics(facts: Facts) -> Iterator[Finding]:
    n = facts.numerics
    edges = [abs(edge) for edge in (n.dead_below, n.dead_above) if not math.isnan(edge)]
    alive = facts.identity.has_gradient and facts.invariants.reads_reference
    alive = alive and not facts.invariants.left_out  # what one token alone does says nothing
    if edges and alive and not facts.invariants.moves_with_advantage:
        sides = []
        if not math.isnan(n.dead_below):
            sides.append(f"below {n.dead_below:.3g}")
        if not math.isnan(n.dead_above):
            sides.append(f"above {n.dead_above:.3g}")
        yield Finding(
            "dead-zone",
            "warning" if min(edges) < _MET else "note",
            f"no gradient at log-ratios to the reference {' and '.join(sides)} nats",
            "clamp the log-ratio beyond what training meets, not the value; or clamp nothing",
            "14_frameworks#prop-dead-zones",
        )
    if not math.isnan(n.pushes_away) and _restores(facts):
        yield Finding(
            "pushes-away",
            "error",
            f"at a log-ratio to the reference of {n.pushes_away:.3g} nats it pushes the policy "
            "away from the reference",
            "cap the log-ratio and not its exponential alone; or cap nothing",
            "14_frameworks#prop-dead-zones",
        )
    if facts.supports.free and alive:
        yield Finding(
            "unequal-supports",
            "warning",
            "a token that the reference never gives costs less than one that it seldom gives",
            "let the log-ratio be infinite there, or bound it: replaced by zero it is free",
            "07_off_policy#thm-supports",
        )
    if n.filter_fails:
        yield Finding(
            "filter",
            "error",
            "a token that a filter on its ratio removes becomes NaN where the ratio overflows: "
            "zero times infinity",
            "select with torch.where before the exponential, or bound the log-ratio",
            None,
        )
    elif n.stale_overflow == "NaN":
        yield Finding(
            "overflow",
            "note",
            "a ratio to the sampler that overflows makes the loss or its gradient NaN",
            "bound the log-ratio before the exponential, and select with torch.where before it",
            None,
        )


def _restores(facts: Facts) -> bool:
    """Whether every sample of the term pulls its token towards the reference."""
    match = facts.identity.match
    if match is None or match.term.placement != "loss":
        return False
    if facts.reading.narrow and match.term.weighting == "attached":
        return False  # the value and its slope cancel, and leave no digits in float32
    plain = match.term.estimator == "k2" and match.term.weighting != "attached"
    return plain or match.term.estimator in ("k3", "k3_clip")


def notes(facts: Facts) -> Iterator[Finding]:
    found = facts.invariants
    foreign = facts.reading.foreign
    if "advantages" in foreign.roles and foreign.layout.advantages == "token":
        yield Finding(
            "advantages-by-token",
            "note",
            "it takes advantages [B, T]: one an answer, [B], is refused, or broadcast along the "
            "tokens where there are as many tokens as answers",
            "expand one advantage an answer to its tokens before, or unsqueeze it inside",
        )
    if foreign.is_given_kl:
        yield Finding(
            "kl-given",
            "note",
            "it is handed the KL of the tokens: it was read with k2 in its place",
            "audit what computes that KL too",
        )
    for name, value in facts.tempered.values.items():
        yield Finding(
            "tempered",
            "note",
            f"at its default, {name} {value:g}, it compares other distributions than those that "
            "are sampled: it was read at one",
            "say of which distributions the KL is meant",
            "08_reward_side#thm-other-reference",
        )
    if math.isnan(facts.at_state.from_reverse):
        yield Finding(
            "one-token-fails",
            "note",
            "a batch of one answer of one token makes it NaN",
            "divide by a spread only where there is one",
        )
    if found.fails_on_empty:
        yield Finding(
            "empty-answers",
            "note",
            "an answer without a counted token makes it NaN",
            "clamp the number of counted tokens at 1 before dividing",
        )
    if found.poisoned_by:
        yield Finding(
            "poisoned-padding",
            "note",
            f"{found.poisoned_by} at a masked position reaches the loss",
            "select with torch.where before any arithmetic: zero times NaN is NaN",
        )
    if facts.supports.not_a_number:
        yield Finding(
            "zero-probability",
            "note",
            f"a token to which {' or '.join(facts.supports.not_a_number)} no probability makes "
            "it NaN",
            "zero times infinity is NaN: use torch.xlogy, F.kl_div, or torch.where before the log",
            None,
        )
    if found.needs_mask:
        yield Finding(
            "no-mask",
            "note",
            "it returns one number and takes no mask: padding cannot be left out",
            "take a mask, or give it counted tokens only",
        )
    stale = facts.expected["stale"]["state"]
    named = facts.reading.kind == "loss" and facts.at_state.name not in (NOTHING, NEITHER)
    if named and stale.name != facts.at_state.name:
        yield Finding(
            "stale",
            "note",
            f"on stale samples it descends {stale.said}",
            "weigh k2 with a detached ratio, or k1 and k3 with a live one",
            "02_gradients#thm-off-policy-weights",
        )
    if found.depends_on_cut:
        yield Finding(
            "micro-batches",
            "note",
            "the mean over micro-batches is not that of the batch",
            "divide by the tokens of the whole batch",
            "08_reward_side#prop-token-mean",
        )
    if found.leaks:
        yield Finding(
            "gradient-into-constants",
            "note",
            f"a gradient reaches {', '.join(sorted(found.leaks))} where these have a graph",
            "detach what is constant",
        )
    if facts.numerics.overflow:
        yield Finding(
            "overflow-far",
            "note",
            f"a log-ratio of 100 nats is {facts.numerics.overflow} in float32",
            "bound the log-ratio before the exponential",
            None,
        )
    yield from _of_digits(facts)


def _of_digits(facts: Facts) -> Iterator[Finding]:
    off = [
        f"by {min(error, 9.99):.2g} in {name} at a KL of {kl:g}"
        for (name, kl), error in facts.numerics.digits.items()
        if error > 0.01
    ]
    if facts.reading.coarse:
        yield Finding(
            "digits",
            "warning",
            "it rounds to fewer digits than it is given, so that its terms are only known to "
            f"{facts.reading.tolerance:.0%}; its value is off {', '.join(off) or 'by that'}",
            "take log-probs, and their difference, in float32",
            "14_frameworks#fig-cancellation",
        )
    elif off:
        yield Finding(
            "digits",
            "note",
            f"near the reference its value is off, relatively, {', '.join(off)}",
            "write k3 with expm1, in float32",
            "14_frameworks#fig-cancellation",
        )
