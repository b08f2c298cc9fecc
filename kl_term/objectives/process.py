r"""What a process reward model is used for: dense rewards, choosing a path, giving one up.

A process reward model (PRM) scores every prefix of a reasoning path. Scores are [..., K]: one a
step, the score of the empty prefix not among them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kl_term.checks import as_mask, at_least_float32, check_comes_first, check_float, checked
from kl_term.plain_checks import check_choice
from kl_term.shapes import Mask, Values


@checked
def marginal_rewards(scores: Values, initial: Tensor | float = 0.0) -> Values:
    r"""What each step adds to the score of the path.

    .. math:: R_t = \mathrm{PRM}(x, y_{\le t}) - \mathrm{PRM}(x, y_{\le t - 1}), \qquad
        \sum_{s \ge t} R_s = \mathrm{PRM}(x, y) - \mathrm{PRM}(x, y_{\le t - 1})

    The sum telescopes: return and policy gradient are those of the *last* score alone, and every
    earlier score is only a baseline. The total is the final score less the one of the prompt.

    Equation: ``marginal_rewards``

    Args:
        scores: [..., K], score of the prefix that ends with each step.
        initial: score of the empty prefix, a number or [...].

    Returns:
        [..., K], in the unit of the scores.
    """
    check_float("scores", scores)
    scores = at_least_float32(scores)
    if isinstance(initial, Tensor):
        start = initial.to(scores).expand(scores.shape[:-1]).unsqueeze(-1)
    else:  # filled there: a copy from the CPU cannot be part of a CUDA graph
        start = torch.full_like(scores[..., :1], initial)
    before = torch.cat([start, scores[..., :-1]], dim=-1)
    return scores - before


@checked(nan="refused")
def path_score(scores: Values, mask: Mask, how: str) -> Values:
    r"""One score a path from the scores of its steps.

    .. math:: \text{last: } s_K, \quad \text{sum: } \sum_t s_t, \quad \text{mean: }
        \tfrac1K \sum_t s_t, \quad \text{min: } \min_t s_t, \quad \text{product: } \prod_t s_t

    The cumulative sum of *marginal* rewards is ``last`` less a constant. Of scores between 0 and 1
    the raw sum grows with every step, so it prefers long paths; product and minimum prefer short
    ones.

    Equation: ``path_score``

    Args:
        scores: [..., K].
        mask: [..., K], True = a step of the path; at least one a path, and steps come first.
        how: a name in :data:`PATH_SCORES`.

    Returns:
        [...].

    Raises:
        ValueError: on a path without steps, or with a step after a masked one.
    """
    check_choice("how", how, PATH_SCORES)
    check_float("scores", scores)
    counted = as_mask("mask", mask, "scores", scores)
    if not bool(counted.any(dim=-1).all()):
        raise ValueError("mask leaves a path without steps: every path needs at least one")
    check_comes_first("mask", counted)
    return PATH_SCORES[how](at_least_float32(scores), counted)


@checked(nan="refused")
def best_of_n(scores: Values, mask: Mask, *, how: str = "last") -> Tensor:
    r"""Index of the path with the highest score, the first of them if tied.

    .. math:: i^\star = \arg\max_{i \le N}\ \mathrm{path\_score}(s_i)

    Equation: ``best_of_n``

    Args:
        scores: [..., N, K], of the N paths of a prompt.
        mask: [..., N, K].
        how: as :func:`path_score`.

    Returns:
        [...], integers in [0, N).
    """
    return path_score(scores, mask, how).argmax(dim=-1)


@checked(nan="refused")
def early_stop(scores: Values, *, patience: int, initial: Tensor | float = 0.0) -> Tensor:
    r"""How many steps a path is given before its score has fallen ``patience`` times in a row.

    .. math:: \tau = \min\{\, t : R_t, R_{t-1}, \dots, R_{t - k + 1} < 0 \,\} \wedge K

    Equation: ``early_stop``

    Args:
        scores: [..., K].
        patience: falls in a row that end the path, at least 1.
        initial: as :func:`marginal_rewards`.

    Returns:
        [...], steps taken, from 1 to K; K for a path that is never stopped. A path stopped at its
        last step is told from one that ends there by :func:`falls_in_a_row`.
    """
    stopped = falls_in_a_row(scores, patience=patience, initial=initial)
    first = stopped.to(torch.uint8).argmax(dim=-1) + 1
    return torch.where(stopped.any(dim=-1), first, scores.shape[-1])


@checked(nan="refused")
def falls_in_a_row(scores: Values, *, patience: int, initial: Tensor | float = 0.0) -> Tensor:
    """[..., K] bool: whether the last ``patience`` steps up to each one all lowered the score."""
    if patience < 1:
        raise ValueError(f"patience must be at least 1, got {patience!r}")
    fell = marginal_rewards(scores, initial) < 0
    padded = functional.pad(fell, (patience - 1, 0))
    return padded.unfold(-1, patience, 1).all(dim=-1)


def _last(scores: Tensor, counted: Tensor) -> Tensor:
    return scores.gather(-1, counted.sum(dim=-1, keepdim=True) - 1).squeeze(-1)


def _sum(scores: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, scores, 0.0).sum(dim=-1)


def _mean(scores: Tensor, counted: Tensor) -> Tensor:
    return _sum(scores, counted) / counted.sum(dim=-1)


def _min(scores: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, scores, torch.inf).amin(dim=-1)


def _product(scores: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, scores, 1.0).prod(dim=-1)


#: Ways to score a path, by name.
PATH_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": _last,
    "sum": _sum,
    "mean": _mean,
    "min": _min,
    "product": _product,
}
