"""What several trainers compute alike: estimators within their clamps, credit, group baselines."""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.kl.estimators import ESTIMATORS


def value(estimator: str, ref_log_ratio: Tensor) -> Tensor:
    """An estimator of the log-ratio to the reference."""
    return ESTIMATORS[estimator](ref_log_ratio, torch.zeros_like(ref_log_ratio))


def clamped_k3(ref_log_ratio: Tensor, *, input_bound: float = 20, bound: float = 10) -> Tensor:
    """k3 of the bounded log-ratio, its value bounded too."""
    return value("k3", ref_log_ratio.clamp(-input_bound, input_bound)).clamp(-bound, bound)


def verl_kinds(ref_log_ratio: Tensor, kind: str) -> Tensor:
    """The names that verl gave, and its k3 with both clamps."""
    if kind in ("low_var_kl", "k3"):
        return clamped_k3(ref_log_ratio)
    if kind == "abs":
        return ref_log_ratio.abs()
    return value({"kl": "k1", "mse": "k2"}.get(kind, kind), ref_log_ratio)


def to_go(tokens: Tensor, mask: Tensor, *, discount: float = 1.0) -> Tensor:
    """A token pays for itself and, discounted, for all that follow in its answer."""
    counted = torch.where(mask, tokens, 0.0)
    owed = torch.zeros_like(counted[..., 0])
    sums = []
    for column in reversed(counted.unbind(-1)):
        owed = column + discount * owed
        sums.append(owed)
    return torch.stack(sums[::-1], dim=-1)


def whole_answer(tokens: Tensor, mask: Tensor) -> Tensor:
    """Every token pays for its whole answer."""
    return torch.where(mask, tokens, 0.0).sum(-1, keepdim=True).expand_as(tokens)


def own_token(tokens: Tensor, mask: Tensor) -> Tensor:
    """A token pays for itself alone."""
    return torch.where(mask, tokens, 0.0)


def centred(answers: Tensor) -> Tensor:
    """Less the mean of the group [..., G, T]."""
    return answers - answers.mean(-2, keepdim=True)


def left_out(answers: Tensor) -> Tensor:
    """Less the mean of the others of the group [..., G, T]."""
    size = answers.shape[-2]
    return centred(answers) * (size / (size - 1))


def charged(
    tokens: Tensor, mask: Tensor, *, pays_for: str = "answer", baseline: str = "all"
) -> Tensor:
    """What an advantage estimator makes of a penalty of each token.

    Args:
        pays_for: whom a token pays for: its whole ``answer``, what is ``to go``, or its ``own``.
        baseline: whose mean is taken off: of ``all`` answers of the group, of the ``others``, or of
            ``nobody``.
    """
    credit = {"answer": whole_answer, "to go": to_go, "own": own_token}[pays_for]
    taken = {"all": centred, "others": left_out, "nobody": lambda answers: answers}[baseline]
    return taken(credit(tokens, mask))


#: Advantage estimators of verl, which others have taken over; the first before its division by the
#: group's spread, the last before its whitening.
ESTIMATORS_OF_VERL = {
    "GRPO before its spread": {},
    "rloo": {"baseline": "others"},
    "reinforce_plus_plus": {"pays_for": "to go", "baseline": "nobody"},
}
