"""What says which tokens are counted: a mask of either sense, labels, or lists with masks."""

from __future__ import annotations

from dataclasses import replace

import torch

from kl_term.audit.batches import Batch
from kl_term.audit.calling import Foreign
from kl_term.audit.layout import IGNORED, PAD
from kl_term.audit.layouts import HIGH, probe_of
from kl_term.audit.numbers import numbers_beside, numbers_held, with_number
from kl_term.audit.shapes import padded_lists
from kl_term.audit.spellings import role_of, words_of


def set_padding_ids(foreign: Foreign) -> None:
    """The id of the padding that an object or a configuration holds becomes one of no token."""
    held = numbers_held(foreign) | numbers_beside(foreign)
    for path in held:
        if role_of(path.rpartition(".")[2]) == "pad_id":
            other = with_number(foreign, path, PAD)
            foreign.function, foreign.plan = other.function, other.plan
            foreign.bag_roles[path] = "pad_id"


def settle_padding(foreign: Foreign) -> None:
    """Under the name of a padding mask some mark the padding, and some what is counted."""
    marked = [name for name, role in foreign.plan.roles.items() if role == "padding"]
    if not marked:
        return
    probe = probe_of(foreign)
    if not _reads_the_rest(foreign, probe):
        return
    for name in marked:
        foreign.plan.roles[name] = "mask"
    if _reads_the_rest(foreign, probe):  # it reads all: as it says
        for name in marked:
            foreign.plan.roles[name] = "padding"


def _reads_the_rest(foreign: Foreign, probe: Batch) -> bool:
    """Whether masked tokens have a gradient, or, where nothing has, counted ones move nothing."""
    output = foreign.call(probe, HIGH)
    if output.gradient is not None and bool((output.gradient != 0).any()):
        return bool((output.gradient[~probe.mask] != 0).any())
    other = torch.where(probe.mask.unsqueeze(-1), probe.logits.flip(-1) * 0.7, probe.logits)
    moved = foreign.call(replace(probe, logits=other, old_logits=other), HIGH)
    return torch.equal(output.value, moved.value)


def settle_labels(foreign: Foreign) -> None:
    """Labels without a mask beside them may say themselves what is counted: not what is -100."""
    tokens = [name for name, role in foreign.plan.roles.items() if role == "tokens"]
    labels = any(words_of(name) & {"labels", "targets"} for name in tokens)
    first, probe = foreign.layout, probe_of(foreign)
    if not labels or first.packed or foreign.roles & {"mask", "padding"}:
        return
    foreign.layout = first._replace(marked=IGNORED)
    try:
        gradient = foreign.call(probe, HIGH).gradient
    except Exception:
        gradient = None
    if gradient is None or bool((gradient[~probe.mask] != 0).any()):
        foreign.layout = first


def settle_lists(foreign: Foreign) -> None:
    """Lists with masks may be padded, and the masks not be read: then they are given padded."""
    first, probe = foreign.layout, probe_of(foreign)
    masked = foreign.reads & {"mask", "padding"} and not foreign.reads & {"rewards"}
    if not (first.packed and first.listed and masked):
        return  # a price inside an answer is paid, whatever its mask says
    for shape in padded_lists(foreign):
        foreign.layout = first._replace(packed=False, lengths=shape.lengths)
        try:
            gradient = foreign.call(probe, HIGH).gradient
        except Exception:
            continue
        if gradient is not None and bool((gradient[~probe.mask] != 0).any()):
            return
    foreign.layout = first
