"""Whether what belongs to a token stands at one position, or some of it one before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kl_term.audit.batches import Batch
from kl_term.audit.calling import Foreign
from kl_term.audit.layout import Alignment
from kl_term.audit.spellings import OF_POLICY, OF_PROMPT

_LOGITS = ("logits", "ref_logits", "old_logits")
_LABELS = ("tokens", "mask", "padding")
_OF_TOKENS = (*_LABELS, "advantages", "token_rewards", "values")
_RECORDED = ("ref_logp", "old_logp")
#: Of logits that predict the next token: what has the prompt's last token beside them.
BY_LOGITS = (
    Alignment(_LABELS, _LOGITS),
    Alignment(("tokens",), _LOGITS),
    Alignment((), _LOGITS),
    Alignment((*_OF_TOKENS, *_RECORDED), _LOGITS),
    Alignment(_OF_TOKENS, (*_LOGITS, *_RECORDED)),
    Alignment(_OF_TOKENS, _LOGITS),
)
#: Of log-probs that have one position less than what is said of the tokens.
SHORTER = (Alignment(_OF_TOKENS), Alignment(_LABELS), Alignment((*_OF_TOKENS, "old_logp")))
#: Of log-probs of the next token, as wide as what is said of the tokens.
NEXT = (
    Alignment((*_OF_TOKENS, "old_logp"), ("logp", "ref_logp")),
    Alignment(_OF_TOKENS, ("logp", *_RECORDED)),
)
#: Of rows that hold the prompt, whatever stands there.
FULL = Alignment((*_OF_TOKENS, *_RECORDED, *OF_POLICY))


def other_logits(logits: Tensor) -> Tensor:
    """Another policy, whatever this one is."""
    return logits.flip(-1) * 0.7 + 0.1


def moves_elsewhere(gradient: Callable[[Batch], Tensor], batch: Batch, name: str) -> bool:
    """Change one token of the longest answer: does its own gradient stay, and another's move?"""
    row = int(batch.mask.sum(-1).argmax())
    before = gradient(batch)
    size = before.abs().max() * 2e-5
    elsewhere = False
    for column in range(int(batch.mask[row].sum())):
        logits = getattr(batch, name).clone()
        logits[row, column] = other_logits(logits[row, column])
        moved = _by_token((gradient(_with(batch, name, logits)) - before).abs() > size)
        if bool(moved[row, column]):
            return False
        elsewhere |= bool(moved.any())
    return elsewhere


def settle_alignment(foreign: Foreign, probe: Batch, beta: float) -> None:
    """Where under the first alignment that can be called a token's numbers do not meet, look for
    one under which all of them do."""
    if foreign.layout.packed or any(foreign.layout.prompted):
        return
    if foreign.by_logits:
        if not foreign.reads & {"tokens", "old_logp", "ref_logp"} or reads_last(
            foreign, probe, beta
        ):
            return
        _first_of(foreign, probe, beta, BY_LOGITS, or_last=True)
    elif foreign.reads & {*OF_PROMPT, "total_lengths"}:
        if not is_aligned(foreign, probe, beta):
            _first_of(foreign, probe, beta, (FULL, *SHORTER, *NEXT), or_last=False)
    elif _is_told_of_tokens(foreign) and not is_aligned(foreign, probe, beta):
        _first_of(foreign, probe, beta, NEXT, or_last=False)


def is_aligned(foreign: Foreign, probe: Batch, beta: float) -> bool:
    """Whether the counted tokens, and they alone, have a gradient, and each reads its own."""
    found = foreign.call(probe, beta).gradient
    if found is None:
        return True  # nothing is told apart
    if not torch.equal(_by_token(found != 0), probe.mask):
        return False

    def gradient(batch: Batch) -> Tensor:
        moved = foreign.call(batch, beta).gradient
        return torch.zeros_like(found) if moved is None else moved

    names = ("ref_logits", "old_logits")
    return not any(moves_elsewhere(gradient, probe, name) for name in names)


def reads_last(foreign: Foreign, probe: Batch, beta: float) -> bool:
    """Whether the last token of the longest answer has a gradient."""
    gradient = foreign.call(probe, beta).gradient
    return gradient is None or bool(_by_token(gradient != 0)[probe.mask.all(-1), -1].all())


def _first_of(
    foreign: Foreign,
    probe: Batch,
    beta: float,
    alignments: tuple[Alignment, ...],
    *,
    or_last: bool,
) -> None:
    first = foreign.layout
    for holds in (is_aligned, reads_last) if or_last else (is_aligned,):
        for alignment in alignments:
            foreign.layout = first._replace(prompted=alignment)
            try:
                if holds(foreign, probe, beta):
                    return
            except Exception:
                continue
    foreign.layout = first


def _is_told_of_tokens(foreign: Foreign) -> bool:
    """Whether a shift of all that is said of tokens can be told from a fault in one of them."""
    told = foreign.reads & {"mask", "padding"}
    others = foreign.reads & {"old_logp", "tokens", "token_rewards", "values"}
    by_token = "advantages" in foreign.reads and foreign.layout.advantages == "token"
    return "logp" in foreign.reads and bool(told) and (bool(others) or by_token)


def _by_token(moved: Tensor) -> Tensor:
    return moved.any(-1) if moved.ndim == 3 else moved


def _with(batch: Batch, name: str, logits: Tensor) -> Batch:
    fields = {field: getattr(batch, field) for field in batch.__dataclass_fields__}
    return Batch(**fields | {name: logits})
