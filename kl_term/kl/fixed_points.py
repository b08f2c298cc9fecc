r"""Where training with a KL term stops, at one state: optima in closed form.

A reward per token :math:`R(a)` is traded against a KL term. Which policy that ends in depends on
what the term's expected gradient descends, its *potential* :math:`D`
(:mod:`kl_term.kl.potentials`):

.. math:: \pi^\ast = \arg\max_\pi \; \mathbb{E}_{a \sim \pi}[R(a)] - \beta D(\pi,
    \pi_{\mathrm{ref}}).

All policies are returned as log-probs, which are logits too. Tokens that the reference forbids
(logit ``-inf``) stay forbidden. Nothing here is trained: :mod:`kl_term.kl.ascent` is the referee.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, check_same_shape, checked, pair_of_floats
from kl_term.kl.divergences import MAX_RATIO
from kl_term.plain_checks import check_choice, check_positive
from kl_term.shapes import Kept, Logits, Values

#: Enough halvings for float64, and more Newton steps than doubling from the left end can take.
_BISECTIONS, _NEWTON_STEPS = 100, 1100


@checked
def reverse_kl_optimum(rewards: Logits, ref_logits: Logits, *, beta: float) -> Logits:
    r"""The optimum under the reverse KL: the reference, tilted exponentially by the reward.

    .. math:: \pi^\ast(a) = \frac{1}{Z}\, \pi_{\mathrm{ref}}(a)\, e^{R(a)/\beta}, \qquad
        Z = \sum_a \pi_{\mathrm{ref}}(a)\, e^{R(a)/\beta}

    Equation: ``reverse_kl_optimum``
    Source: Rafailov et al. (2023), DPO, equation 4.
    Reached by: k1 in the reward, k2 as a loss, k1 and k3 as a loss with the ratio attached.

    Args:
        rewards: [..., V], the reward of each token.
        ref_logits: [..., V], of the reference.
        beta: weight of the KL term, in units of the reward per nat.

    Returns:
        [..., V], log-probs.
    """
    rewards, ref_logp = _inputs(rewards, ref_logits, beta)
    return torch.log_softmax(ref_logp + rewards / beta, dim=-1)


@checked
def forward_kl_optimum(rewards: Logits, ref_logits: Logits, *, beta: float) -> Logits:
    r"""The optimum under the forward KL: the reference, tilted hyperbolically by the reward.

    .. math:: \pi^\ast(a) = \frac{\beta\, \pi_{\mathrm{ref}}(a)}{\lambda - R(a)}, \qquad
        \frac{\pi^\ast(a)}{\pi_{\mathrm{ref}}(a)} \ge \frac{\beta}{\beta + \max R - R(a)}

    Equation: ``forward_kl_optimum``
    Reached by: k3 (k4) as a loss, unweighted or with the ratio detached.

    Args, Returns: as :func:`reverse_kl_optimum`.
    """
    rewards, ref_logp = _inputs(rewards, ref_logits, beta)
    _, gap = _gap_to_best(rewards, ref_logp)
    excess = _multiplier_excess(gap, ref_logp, beta).unsqueeze(-1)
    distance = torch.log(excess + gap)  # log of lambda - R
    distance = torch.where(gap == 0, _log_excess(excess, gap, ref_logp, beta), distance)
    return torch.log_softmax(ref_logp - distance, dim=-1)


@checked
def forward_kl_multiplier(rewards: Logits, ref_logits: Logits, *, beta: float) -> Values:
    r"""The multiplier that makes the forward-KL optimum sum to one.

    .. math:: \sum_a \frac{\beta\, \pi_{\mathrm{ref}}(a)}{\lambda - R(a)} = 1, \qquad
        \max_a R(a) < \lambda \le \max_a R(a) + \beta, \qquad
        \lambda \ge \mathbb{E}_{\pi_{\mathrm{ref}}}[R] + \beta

    The sum is convex and falls from infinity to zero on :math:`\lambda > \max R`, so the root
    exists and is unique, and Newton's method started below it climbs to it without overshooting.

    Equation: ``forward_kl_multiplier``

    Args: as :func:`reverse_kl_optimum`.

    Returns:
        [...], in units of the reward.
    """
    rewards, ref_logp = _inputs(rewards, ref_logits, beta)
    best, gap = _gap_to_best(rewards, ref_logp)
    return best + _multiplier_excess(gap, ref_logp, beta)


@checked(nan="refused")
def euclidean_optimum(rewards: Logits, ref_logits: Logits, *, beta: float) -> Logits:
    r"""The optimum under half the squared Euclidean distance: a projection onto the simplex.

    .. math:: \pi^\ast(a) = \max\Big(0,\; \pi_{\mathrm{ref}}(a) + \frac{R(a) - \lambda}{\beta}
        \Big), \qquad \sum_a \pi^\ast(a) = 1

    Tokens whose reward falls far enough behind get probability exactly zero.

    Equation: ``euclidean_optimum``
    Reached by: the surrogate of MiniMax-01 as a loss, sampled on-policy.

    Args: as :func:`reverse_kl_optimum`.

    Returns:
        [..., V], log-probs, ``-inf`` for tokens that are given up.
    """
    rewards, ref_logp = _inputs(rewards, ref_logits, beta)
    _, gap = _gap_to_best(rewards, ref_logp)
    target = torch.where(ref_logp > -torch.inf, ref_logp.exp() - gap / beta, -torch.inf)
    descending = target.sort(dim=-1, descending=True).values
    finite = torch.where(descending > -torch.inf, descending, 0.0)
    rank = torch.arange(1, target.shape[-1] + 1, dtype=target.dtype, device=target.device)
    threshold = (finite.cumsum(-1) - 1) / rank
    kept = (descending > threshold).sum(-1, keepdim=True)
    return _log_or_given_up(target - threshold.gather(-1, kept - 1))


@checked(nan="refused")
def chi_square_optimum(rewards: Logits, ref_logits: Logits, *, beta: float) -> Logits:
    r"""The optimum under half the chi-square of the policy from the reference: a linear tilt, cut.

    .. math:: \pi^\ast(a) = \pi_{\mathrm{ref}}(a)\, \max\Big(0,\; 1 + \frac{R(a) - \lambda}{\beta}
        \Big), \qquad \sum_a \pi^\ast(a) = 1, \qquad
        D = \tfrac12 \sum_a \frac{(\pi - \pi_{\mathrm{ref}})^2}{\pi_{\mathrm{ref}}}

    Tokens whose reward falls far enough behind get probability exactly zero. While none does,
    :math:`\lambda` is the reference's mean reward.

    Equation: ``chi_square_optimum``
    Reached by: k3 as a loss with policy and reference exchanged.

    Args: as :func:`reverse_kl_optimum`.

    Returns:
        [..., V], log-probs, ``-inf`` for tokens that are given up.
    """
    rewards, ref_logp = _inputs(rewards, ref_logits, beta)
    _, gap = _gap_to_best(rewards, ref_logp)
    order = torch.where(ref_logp > -torch.inf, gap, torch.inf).sort(dim=-1)
    mass = ref_logp.exp().gather(-1, order.indices)
    behind = torch.where(mass > 0, order.values, 0.0)
    # With the best m tokens kept, 1 + (R - lambda) / beta is `level` - gap / beta.
    level = (1 + (mass * behind).cumsum(-1) / beta) / mass.cumsum(-1)
    kept = (level > behind / beta) & (mass > 0)  # no mass: probabilities that underflow
    rank = torch.arange(mass.shape[-1], device=mass.device)
    last = torch.where(kept, rank, 0).amax(-1, keepdim=True)
    return ref_logp + _log_or_given_up(level.gather(-1, last) - gap / beta)


def _log_or_given_up(kept: Tensor) -> Tensor:
    """The log, ``-inf`` from zero on, with a derivative of exactly zero there in either mode."""
    positive = ~(kept <= 0)  # NaN stays visible
    return torch.where(positive, torch.where(positive, kept, 1.0).log(), -torch.inf)


@checked(nan="refused")
@torch.no_grad()
def penalty_equilibrium(
    rewards: Logits, ref_logits: Logits, support: Kept, *, beta: float, estimator: str
) -> Logits:
    r"""A fixed point of a penalty in the reward: at most one for each set of survivors.

    .. math:: R(a) - \beta\, k\big(l(a)\big) = \lambda \;\text{ and }\; l(a) \ge 0
        \quad \text{for } a \in S, \qquad \pi(a) = 0 \;\text{ for } a \notin S

    Stable if every :math:`l > 0` on :math:`S`. With equal rewards that is the reference cut down to
    :math:`S` and renormalised, and the whole reference is no stable one. Clipped k3
    falls again below :math:`\pi_{\mathrm{ref}} / r_{\max}` and loses no token: there the tokens
    outside :math:`S` solve the same equation with :math:`k = r_{\max} - 1 + l`.

    Equation: ``penalty_equilibrium``
    Reached by: k2 in the reward; k3 too, but by the natural flow only; clipped k3. From starts that
        depend on :math:`S`.

    Args:
        rewards, ref_logits: [..., V].
        support: [..., V] bool, the set :math:`S`; at least one token of each row.
        beta: weight of the penalty.
        estimator: ``k2``, ``k3`` or ``k3_clip`` (cap 10).

    Returns:
        [..., V], log-probs without gradient; NaN in rows where no policy has every
        :math:`l \ge 0` on :math:`S` and, for ``k3_clip``, :math:`r \ge r_{\max}` outside.

    Raises:
        ValueError: on an empty support.
    """
    check_choice("estimator", estimator, _INVERSE_ESTIMATORS)
    dtype = torch.promote_types(at_least_float32(rewards).dtype, ref_logits.dtype)
    rewards, ref_logp = _inputs(rewards.double(), ref_logits.double(), beta)
    check_same_shape("rewards", rewards, "support", support)
    support = (support != 0) & (ref_logp > -torch.inf)
    if not support.any(-1).all():
        raise ValueError("support is empty: keep at least one token that the reference allows")
    inverse = _INVERSE_ESTIMATORS[estimator]
    floor = torch.where(support, rewards, torch.inf).amin(-1, keepdim=True)
    above = (torch.where(ref_logp > -torch.inf, rewards, floor) - floor) / beta
    parked = 1.0 - MAX_RATIO if estimator == "k3_clip" else -torch.inf

    def log_ratio(level: Tensor) -> Tensor:  # level: (floor - lambda) / beta
        inside = inverse(torch.where(support, above, 0.0) + level)
        return torch.where(support, inside, above + level + parked)

    def mass(level: Tensor) -> Tensor:
        return torch.exp(ref_logp + log_ratio(level)).sum(-1, keepdim=True)

    # The reference renormalised on S has one log-ratio everywhere: enough mass for the left end.
    shared = -torch.where(support, ref_logp, -torch.inf).logsumexp(-1, keepdim=True)
    low = torch.zeros_like(shared)
    high = 0.5 * shared.square() if estimator == "k2" else shared + torch.expm1(-shared)
    exists = mass(low) <= 1 + 1e-12
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        heavy = mass(middle) > 1
        low, high = torch.where(heavy, low, middle), torch.where(heavy, middle, high)
    found = log_ratio(0.5 * (low + high))
    capped = support | (ref_logp == -torch.inf) | (found <= -math.log(MAX_RATIO))
    exists &= capped.all(-1, keepdim=True)
    logp = torch.log_softmax(ref_logp + found, dim=-1)
    return torch.where(exists, logp, torch.nan).to(dtype)


def _inverse_k2(value: Tensor) -> Tensor:
    return torch.sqrt(2 * value)


def _inverse_k3(value: Tensor) -> Tensor:
    """The root above zero, by Newton from the right, where k3 is convex and too large."""
    root = value + torch.sqrt(2 * value)
    for _ in range(60):
        slope = -torch.expm1(-root)
        surplus = torch.expm1(-root) + root - value
        root = torch.where(slope > 0, root - surplus / slope.clamp(min=1e-300), root).clamp(min=0)
    return root


_INVERSE_ESTIMATORS = {"k2": _inverse_k2, "k3": _inverse_k3, "k3_clip": _inverse_k3}


def _multiplier_excess(gap: Tensor, ref_logp: Tensor, beta: float) -> Tensor:
    """[...]: how far the multiplier exceeds the best reward; kept apart so that nothing cancels."""
    ref = ref_logp.exp()
    alone = (beta * ref - gap).amax(-1, keepdim=True)  # one token's term already reaches one
    jensen = beta - (ref * gap).sum(-1, keepdim=True)
    excess = torch.maximum(alone, jensen).clamp(min=torch.finfo(ref.dtype).tiny)
    for _ in range(_NEWTON_STEPS):
        terms = beta * ref / (excess + gap)
        step = (terms.sum(-1, keepdim=True) - 1) / (terms / (excess + gap)).sum(-1, keepdim=True)
        moved = excess + step.clamp(min=0.0)
        if torch.equal(moved, excess):
            break
        excess = moved
    return excess.squeeze(-1)


def _log_excess(excess: Tensor, gap: Tensor, ref_logp: Tensor, beta: float) -> Tensor:
    """[..., 1]: the logarithm of :func:`_multiplier_excess`, also of one too small for a number.

    So small it is where the probability of the best tokens underflows and the others cannot hold
    all of it: those then keep what they have at an excess of zero, and the best get the rest.
    """
    best = torch.where(gap == 0, ref_logp, -torch.inf).logsumexp(-1, keepdim=True)
    behind = torch.where(gap > 0, gap, torch.inf)
    held = (beta * ref_logp.exp() / behind).sum(-1, keepdim=True)
    limits = torch.finfo(gap.dtype)
    small = (best + math.log(beta) < math.log(limits.tiny / limits.eps)) & (held < 1)
    rest = torch.log1p(-torch.where(small, held, 0.0))
    return torch.where(small, math.log(beta) + best - rest, excess.log())


def _gap_to_best(rewards: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor]:
    """The best reward among the allowed tokens [...], and how far each falls short of it."""
    allowed = ref_logp > -torch.inf
    best = torch.where(allowed, rewards, -torch.inf).amax(-1, keepdim=True)
    return best.squeeze(-1), torch.where(allowed, best - rewards, 0.0)


def _inputs(rewards: Tensor, ref_logits: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    check_positive("beta", beta)
    rewards, ref_logits = pair_of_floats("rewards", rewards, "ref_logits", ref_logits)
    return at_least_float32(rewards), torch.log_softmax(ref_logits, dim=-1)
