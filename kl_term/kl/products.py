r"""How importance ratios spread when they are multiplied along a sequence.

Tokens drawn independently from one pair of distributions give closed forms, policies that see the
last token only a product of matrices, a tree of prefixes a finite sum. Everything is under the
sampler :math:`\pi_{\mathrm{old}}`, which allows every token of the policy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.checks import check_same_shape, checked, pair_of_floats
from kl_term.kl.divergences import chi_square
from kl_term.kl.importance import importance_ratio
from kl_term.kl.sequences import Sequences, can_draw, token_logp
from kl_term.shapes import AnyFloats, Logits, Table


class Spread(NamedTuple):
    """Mean and variance of a random weight under the sampler."""

    mean: Tensor
    var: Tensor


@checked
def product_variance(chi2: AnyFloats, length: Tensor | int) -> Tensor:
    r"""Variance of a product of independent ratios with one chi-square a token.

    .. math:: \mathrm{Var}\Big[\prod_{t \le T} \rho_t\Big]
        = \prod_t \mathbb{E}[\rho_t^2] - 1 = (1 + \chi^2)^T - 1

    Equation: ``product_variance``

    Args:
        chi2: [...], :math:`\chi^2(\pi_\theta \Vert \pi_{\mathrm{old}})` of one token, at least 0.
        length: number of tokens.

    Returns:
        [...], dimensionless; accurate for small chi-square too.
    """
    return torch.expm1(length * torch.log1p(chi2))


@checked
def ratio_power_mean(logits: Logits, old_logits: Logits, power: float | Tensor) -> Tensor:
    r"""Mean of a power of one token's ratio.

    .. math:: M(p) = \mathbb{E}_{a \sim \pi_{\mathrm{old}}}[\rho(a)^p]
        = \sum_a \pi_\theta(a)^p\, \pi_{\mathrm{old}}(a)^{1 - p}

    Equation: ``ratio_power_mean``

    Args:
        logits, old_logits: [..., V], policy and sampler.
        power: a number or a tensor that broadcasts with [...].

    Returns:
        [...]; 1 for powers 0 and 1, :math:`1 + \chi^2` for power 2.
    """
    logits, old_logits = pair_of_floats("logits", logits, "old_logits", old_logits)
    power = torch.as_tensor(power, dtype=logits.dtype).unsqueeze(-1)
    logp, old_logp = logits.log_softmax(-1), old_logits.log_softmax(-1)
    of_policy = torch.where(power == 0, 0.0, power * logp)  # 0^0 = 1
    of_sampler = torch.where(power == 1, 0.0, (1 - power) * old_logp)
    neither = (logp == -torch.inf) & (old_logp == -torch.inf)
    return torch.where(neither, -torch.inf, of_policy + of_sampler).logsumexp(-1).exp()


@checked
def geometric_spread(logits: Logits, old_logits: Logits, length: Tensor | int) -> Spread:
    r"""Mean and variance of GSPO's weight for independent tokens of one distribution.

    .. math:: \mathbb{E}[w] = M(1/T)^T, \qquad \mathbb{E}[w^2] = M(2/T)^T, \qquad
        w = \Big(\prod_{t \le T} \rho_t\Big)^{1/T}

    The weight tends to :math:`e^{-\mathrm{KL}(\pi_{\mathrm{old}} \Vert \pi_\theta)}`, a constant
    below one: its variance falls as :math:`1/T`, and it stops being an importance weight.

    Equation: ``geometric_spread``
    Source: the weight is that of Zheng et al. (2025), GSPO.

    Args:
        logits, old_logits: [..., V], policy and sampler of every token.
        length: number of tokens T, an integer or a tensor that broadcasts with [...].
    """
    length = torch.as_tensor(length, dtype=logits.dtype)
    first, second = (
        length * ratio_power_mean(logits, old_logits, p / length).log() for p in (1, 2)
    )
    excess = torch.expm1(second - 2 * first).clamp(min=0.0)  # Jensen's, but for rounding
    return Spread(first.exp(), first.mul(2).exp() * excess)


@checked
def log_ratio_spread(logits: Logits, old_logits: Logits) -> Spread:
    r"""Mean and variance of one token's log-ratio under the sampler.

    .. math:: \mathbb{E}[\log \rho] = -\mathrm{KL}(\pi_{\mathrm{old}} \Vert \pi_\theta), \qquad
        \mathrm{Var}[\log \rho]

    The sum over T independent tokens has T times both, so the product is log-normal for large T.

    Equation: ``log_ratio_spread``

    Args:
        logits, old_logits: [..., V].

    Returns:
        :class:`Spread`, nats and nats squared; not finite where the policy forbids what the
        sampler draws.
    """
    logits, old_logits = pair_of_floats("logits", logits, "old_logits", old_logits)
    old_logp = old_logits.log_softmax(-1)
    log_ratio = torch.where(old_logp == -torch.inf, 0.0, logits.log_softmax(-1) - old_logp)
    mean = (old_logp.exp() * log_ratio).sum(-1)
    return Spread(mean, (old_logp.exp() * (log_ratio - mean.unsqueeze(-1)).square()).sum(-1))


@checked
def sequence_ratio_spread(
    logits: Table, old_logits: Table, sequences: Sequences, *, level: str = "sequence"
) -> Spread:
    r"""Mean and variance of a sequence's ratio, summed over every sequence.

    .. math:: \mathbb{E}_{y \sim \pi_{\mathrm{old}}}[W(y)], \quad \mathrm{Var}[W(y)], \qquad
        W = \prod_t \rho_t \;\text{(sequence)},\;
        \Big(\prod_t \rho_t\Big)^{1/|y|} \;\text{(geometric)}

    Equation: ``sequence_ratio_spread``

    Args:
        logits, old_logits: [states, vocab], tables of policy and sampler.
        level: ``sequence`` or ``geometric`` of
            :func:`kl_term.kl.importance.importance_ratio`.

    Returns:
        :class:`Spread` of scalars.
    """
    check_same_shape("logits", logits, "old_logits", old_logits)
    sequences = sequences.only(can_draw(old_logits, sequences))
    logp, old_logp = (token_logp(x, sequences) for x in (logits, old_logits))
    weight = importance_ratio(logp, old_logp, sequences.mask, level=level)[:, 0]
    probability = old_logp.sum(-1).exp()
    mean = probability @ weight
    return Spread(mean, probability @ (weight - mean).square())


@checked
def chi_square_bounds(logits: Table, old_logits: Table, length: int) -> tuple[Tensor, Tensor]:
    r"""Between which products the variance of a sequence ratio of fixed length lies.

    The sampler must allow what the policy allows in every state.

    .. math:: (1 + \min_s \chi^2_s)^T - 1 \le \mathrm{Var}\Big[\prod_t \rho_t\Big]
        \le (1 + \max_s \chi^2_s)^T - 1

    Integrating out the last token multiplies the second moment by its :math:`1 + \chi^2_s`, so the
    growth is exponential if the chi-square of *every* state keeps away from zero.
    :func:`markov_product_growth` says what one state can do.

    Equation: ``chi_square_bounds``

    Args:
        logits, old_logits: [states, vocab].
        length: number of tokens.

    Returns:
        The lower and the upper bound, scalars.
    """
    per_state = chi_square(old_logits, logits)  # of the policy from the sampler
    return product_variance(per_state.min(), length), product_variance(per_state.max(), length)


@checked
def markov_product_variance(logits: Table, old_logits: Table, length: int) -> Tensor:
    r"""Variance of a sequence's ratio for policies that see the last token only.

    .. math:: u_{n+1}(b) = \chi^2_b + \sum_a B(b, a)\, u_n(a), \qquad
        B(b, a) = \frac{\pi_\theta(a|b)^2}{\pi_{\mathrm{old}}(a|b)}, \qquad u_0 = 0

    Equation: ``markov_product_variance``

    Args:
        logits, old_logits: [V + 1, V], one row per last token; the last row starts the sequence.
        length: number of tokens, at least 1.

    Returns:
        A scalar, dimensionless; ``inf`` where the sampler forbids what the policy allows.
    """
    chi2 = chi_square(old_logits, logits)  # of the policy from the sampler
    tilted = tilted_transitions(logits, old_logits)
    excess = torch.zeros_like(chi2)  # second moment less one, of the rest of the sequence
    for _ in range(length):
        later = tilted * excess[:-1]
        excess = chi2 + torch.where((tilted == 0) | (excess[:-1] == 0), 0.0, later).sum(-1)
    return excess[-1]


@checked(nan="refused")
def markov_product_growth(logits: Table, old_logits: Table) -> Tensor:
    r"""Factor a token by which the second moment of a sequence's ratio grows in the end.

    .. math:: r(B) = \lim_{T \to \infty}
        \mathbb{E}_{y \sim \pi_{\mathrm{old}}}\Big[\prod_{t \le T} \rho_t^2\Big]^{1/T} \ge 1

    the spectral radius of the matrix of :func:`markov_product_variance` on the rows that the
    policy can reach, where the sampler allows what the policy allows. It exceeds 1 as soon as the
    policies differ in a row that recurs.

    Equation: ``markov_product_growth``

    Args:
        logits, old_logits: as :func:`markov_product_variance`.

    Returns:
        A scalar, dimensionless; ``inf`` where, in a row that the policy can reach, the sampler
        forbids what the policy allows.
    """
    tilted = tilted_transitions(logits, old_logits)
    allowed = logits != -torch.inf
    reached = torch.zeros(len(tilted), dtype=torch.bool)
    reached[-1] = True
    for _ in range(len(tilted)):
        reached[:-1] |= allowed[reached].any(0)
    if tilted[reached].isposinf().any():
        return torch.full_like(tilted[0, 0], torch.inf)
    row = reached[:-1]
    return torch.linalg.eigvals(tilted[:-1][row][:, row]).abs().max()


@checked
def tilted_transitions(logits: Table, old_logits: Table) -> Tensor:
    """[V + 1, V]: the sampler's transitions times the squared ratio; rows sum to one plus chi2."""
    logits, old_logits = pair_of_floats("logits", logits, "old_logits", old_logits)
    logp, old_logp = logits.log_softmax(-1), old_logits.log_softmax(-1)
    return torch.where(logp == -torch.inf, 0.0, (2 * logp - old_logp).exp())
