"""What lengths count: the answer, or the prompt too, of which an audit gives one token."""

from __future__ import annotations

from dataclasses import replace

from kl_term.audit.alignment import is_aligned
from kl_term.audit.batches import Batch
from kl_term.audit.calling import Foreign
from kl_term.audit.layouts import HIGH, probe_of
from kl_term.audit.spellings import OF_PROMPT, words_of

#: Of a name that may count the prompt, though no prompt stands beside it.
_OF_ALL = {"seq", "sequence", "sequences", "seqlens", "input", "total", "full"}


def settle_lengths(foreign: Foreign) -> None:
    """Lengths that were guessed to be those of answers may count the prompt.

    They do where only so the counted tokens, and they alone, have a gradient, or where only so the
    reward is paid at the last token of each answer.
    """
    first = foreign.layout
    if not guessed_lengths(foreign) or first.packed or first.lengths != "counted":
        return
    if _meets(foreign):
        return
    foreign.layout = first._replace(lengths="whole")
    try:
        if _meets(foreign):
            return
    except Exception:
        foreign.notes.discard("modifies its arguments")
    foreign.layout = first


def guessed_lengths(foreign: Foreign) -> list[str]:
    """The arguments whose name alone says that they are lengths of answers."""
    guessed = foreign.plan.guessed.items() | foreign.bag_roles.items()
    return sorted(name for name, role in guessed if role == "lengths")


def counts_the_prompt(foreign: Foreign) -> str | None:
    """The lengths that were read as counting the prompt, though nothing beside them says so."""
    if foreign.layout.lengths != "whole" or foreign.reads & {*OF_PROMPT}:
        return None
    return " and ".join(guessed_lengths(foreign))


def _meets(foreign: Foreign) -> bool:
    probe = probe_of(foreign)
    if foreign.call(probe, HIGH).gradient is not None and not foreign.roles & {"rewards"}:
        beside = foreign.reads & {*OF_PROMPT}
        named = any(words_of(name) & _OF_ALL for name in guessed_lengths(foreign))
        return not (beside or named) or is_aligned(foreign, probe, HIGH)
    return _pays_at_the_end(foreign, probe)


def _pays_at_the_end(foreign: Foreign, probe: Batch) -> bool:
    """Whether more reward is paid at the last counted token of each answer, or everywhere."""
    more = replace(probe, rewards=probe.rewards + 1.0)
    before, after = (foreign.call(batch, HIGH).value for batch in (probe, more))
    if before.shape != probe.mask.shape:
        return True
    paid = (after - before).abs() > 1e-9
    last = probe.mask & (probe.mask.cumsum(-1) == probe.mask.sum(-1, keepdim=True))
    return bool((paid | ~last).all()) or not bool(paid.any()) or not bool((paid.sum(-1) <= 1).all())
