r"""The attached prefix ratio: a per-token loss with the gradient of the KL of whole sequences.

Weighed with the ratio of everything up to and including it, gradient and all, a token's estimator
has the mean that it has under the policy itself. So with k1 the sum over tokens is, in expectation
and as a function of the parameters, the sequence KL, and with k3 too where the policy allows what
the reference allows; with k2 and clipped k3 it is no KL. Here is what one sample then contributes,
and how noisy that is.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kl_term.checks import as_mask, check_same_shape, checked
from kl_term.kl.control import control_variance
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import reverse_kl_gradient
from kl_term.kl.estimators import ESTIMATORS
from kl_term.kl.importance import importance_ratio
from kl_term.kl.packing import by_sequence
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import Sequences
from kl_term.kl.surrogates import gradient_coefficient, kl_penalty
from kl_term.plain_checks import check_choice
from kl_term.shapes import AnyFloats, Logits, LogProbs, Mask, Table, Tokens, Values

#: By what a sequence's gradient is weighed: each token's cost by the ratio up to it, or all of it
#: by the ratio of the whole sequence.
MOMENT_WEIGHTS = ("prefix", "sequence")

#: Unbiased estimators of the sequence KL's gradient whose noise is compared, by name.
KL_WAYS = ("k1 reward to go", "k1 prefix", "k3 prefix", "full vocabulary prefix")
#: The first of them with each cost weighed by the ratio of the whole sequence.
PRODUCT = "k1 reward to go, whole product"


@checked
def prefix_coefficients(
    logp: LogProbs,
    ref_logp: LogProbs,
    old_logp: LogProbs,
    mask: Mask,
    *,
    estimator: str = "k3",
    sequence_ids: Tokens | None = None,
) -> Values:
    r"""The number beside each score when an estimator is a loss under the attached prefix ratio.

    .. math:: \nabla \sum_t R_t\, k(l_t) = \sum_t c_t\, \nabla \log \pi_\theta(y_t | y_{<t}),
        \qquad c_t = R_t\, \big(k(l_t) + k'(l_t)\big) + \sum_{u > t} R_u\, k(l_u),
        \qquad R_t = \prod_{u \le t} \rho_u

    For k3 the bracket is :math:`l_t`: a token pays k1 for itself and k3 for every token after it.
    For k1 it is :math:`l_t + 1`, per-decision credit to go and a constant.

    Equation: ``prefix_coefficients``
    Source: Precup, Sutton and Singh (2000) for the per-decision weights.
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logp, ref_logp, old_logp: [..., T], log-probs of the sampled tokens under policy, reference
            and sampler.
        mask: [..., T], True = counted; a masked token has ratio 1 and no cost.
        estimator: a name of :data:`kl_term.kl.estimators.ESTIMATORS`.
        sequence_ids: [..., T] integers, where a row holds several sequences: see
            :mod:`kl_term.kl.packing`. Without them a row is one sequence.

    Returns:
        [..., T], without gradient; exactly 0 where masked.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    if sequence_ids is not None:
        alike = partial(prefix_coefficients, estimator=estimator)
        given = {"logp": logp, "ref_logp": ref_logp, "old_logp": old_logp}
        return by_sequence(alike, sequence_ids, mask, **given)
    counted = as_mask("mask", mask, "logp", logp)
    ratio = importance_ratio(logp, old_logp, mask, level="prefix").detach()
    value = kl_penalty(logp, ref_logp, estimator=estimator, mask=mask)
    if estimator in ("k3", "k4"):  # 1 - r would cancel the r of the value
        bracket = kl_penalty(logp, ref_logp, estimator="k1", mask=mask)
    else:
        bracket = value + gradient_coefficient(logp, ref_logp, estimator=estimator)
    later = functional.pad(reward_to_go(ratio * value)[..., 1:], (0, 1))
    return torch.where(counted, ratio * bracket + later, 0.0)


@checked
def k3_noise_gap(
    logits: Table, ref_logits: Table, sequences: Sequences, old_logits: Table | None = None
) -> Tensor:
    r"""How much noisier k3 under the attached prefix ratio is than k1 in the reward to go.

    .. math:: \Delta = \mathbb{E}_{y \sim \pi_{\mathrm{old}}} \sum_t R_t^2
        \sum_{u < t} \Vert \nabla \log \pi_\theta(y_u | y_{<u}) \Vert^2\,
        \big[ (r_t - 1)^2 + 2\, (r_t - 1)\, Q_t \big], \qquad
        Q_t = \mathbb{E}_{\pi_\theta} \Big[ \sum_{u \ge t} l_u \,\Big|\, y_{\le t} \Big]

    :func:`kl_term.kl.control.control_variance` at a control of 1. The difference of the traces of
    the two covariances, for one sequence; both means are the gradient of the sequence KL, and both
    weigh per decision. Negative where every log-ratio and the KL to come are small: there
    :math:`r_t - 1 \approx -l_t`, and the bracket is :math:`-l_t^2`. A small KL alone does not make
    it so, nor do these where rows are shared.

    Equation: ``k3_noise_gap``
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`; on-policy if ``old_logits`` is left out.

    Args:
        logits, ref_logits, old_logits: [states, vocab], policy, reference, sampler; one row a
            prefix, all positive.

    Returns:
        A scalar, nats squared.
    """
    variance = control_variance(logits, ref_logits, sequences, old_logits)
    return variance.curvature + 2 * variance.slope


@checked
def markov_second_moments(
    logits: Logits,
    old_logits: Logits,
    own: AnyFloats,
    future: Logits,
    length: int,
    *,
    weight: str = "prefix",
    baseline: AnyFloats | None = None,
) -> Tensor:
    r"""Second moment of a sequence's gradient at every length, for policies of the last token.

    .. math:: \mathbb{E}_{y \sim \pi_{\mathrm{old}}} \Vert G_T \Vert^2, \qquad
        G_t = \rho_t^{\,p}\, G_{t-1} + R_t\, (o_t + f_t\, S_{t-1}), \qquad
        S_t = S_{t-1} + \nabla \log \pi_\theta(y_t | y_{t-1})

    with :math:`p = 0` for ``prefix`` and :math:`p = 1` for ``sequence``. The token's own part
    :math:`o_t` and its price to the tokens before it, :math:`f_t`, depend on the last two tokens.
    Six moments given the last token are closed under a step, so that the second moment takes
    :math:`O(T)` and not :math:`V^T` terms.

    Equation: ``markov_second_moments``

    Args:
        logits, old_logits: [..., V + 1, V], policy and sampler, one row per last token; the last
            row starts the sequence. The gradient is by the policy's.
        own: [..., V + 1, V, V], the own part's entries in the row of the last token, for each next
            token.
        future: [..., V + 1, V].
        length: number of tokens T, at least 1.
        weight: ``prefix`` or ``sequence``.
        baseline: [T, ..., V + 1], what is taken off the coefficient of a token's score.

    Returns:
        [T, ...], for sequences of 1 to T tokens.
    """
    check_choice("weight", weight, MOMENT_WEIGHTS)
    check_same_shape("logits", logits, "old_logits", old_logits)
    policy, sampler = logits.softmax(-1), old_logits.softmax(-1)
    rows, vocab = policy.shape[-2:]
    one = torch.eye(rows, dtype=policy.dtype)
    score = torch.eye(vocab, dtype=policy.dtype) - policy.unsqueeze(-2)  # [..., row, token, V]
    ratio = policy / sampler
    power = int(weight == "sequence")
    zeroth, first, second = (sampler * ratio**n for n in (2 * power, 1 + power, 2))

    def moved(by: Tensor, moment: Tensor) -> Tensor:  # [..., row, row, V] to the next last token
        return torch.einsum("...ba,...bxv->...axv", by, moment)

    def placed(by: Tensor, vectors: Tensor) -> Tensor:  # what is written to the row one is in
        return torch.einsum("...ba,bx,...bav->...axv", by, one, vectors)

    def beside(moment: Tensor, vectors: Tensor) -> Tensor:  # [..., row, token], inner products
        return torch.einsum("...bbv,...bav->...ba", moment, vectors)

    weights = one[-1].expand(*policy.shape[:-1])  # E[R^2], given the last token
    scores = torch.zeros(*policy.shape[:-1], rows, vocab, dtype=policy.dtype)  # E[R^2 S]
    gradients = torch.zeros_like(scores)  # E[R G]
    squares, products, moments = (torch.zeros_like(weights) for _ in range(3))  # S.S, S.G, G.G
    found = []
    for step in range(length):
        own_now = own if baseline is None else own - baseline[step][..., None, None] * score
        n, q, c, m = (x.unsqueeze(-1) for x in (weights, squares, products, moments))
        past, past_own = beside(scores, score), beside(scores, own_now)
        stepped = (
            second * n,
            second * (q + 2 * past + n * score.square().sum(-1)),
            first * (c + beside(gradients, score))
            + second * (n * (own_now * score).sum(-1) + past_own + future * (past + q)),
            zeroth * m
            + 2 * first * (beside(gradients, own_now) + future * c)
            + second * (n * own_now.square().sum(-1) + 2 * future * past_own + future**2 * q),
        )
        gradients = (
            moved(first, gradients) + moved(second * future, scores) + placed(second * n, own_now)
        )
        scores = moved(second, scores) + placed(second * n, score)
        # No step leads back to the row that starts a sequence.
        gradients, scores = (functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (gradients, scores))
        weights, squares, products, moments = (functional.pad(x.sum(-2), (0, 1)) for x in stepped)
        found.append(moments.sum(-1))
    return torch.stack(found)


@checked
def markov_kl_moments(
    logits: Logits,
    ref_logits: Logits,
    old_logits: Logits,
    length: int,
    *,
    baseline: bool = False,
    control: float = 1.0,
) -> dict[str, Tensor]:
    r"""Second moments of five unbiased estimators of the sequence KL's gradient, at every length.

    :func:`markov_second_moments` of :data:`KL_WAYS`, with

    .. math:: (o_t, f_t) = (l_t s_t,\, l_t), \quad (l_t s_t + s_t,\, l_t), \quad
        (l_t s_t,\, k_3(l_t)), \quad (\nabla K_t,\, K_t) / \rho_t, \qquad
        s_t = \nabla \log \pi_\theta(y_t | y_{t-1})

    and of :data:`PRODUCT`, the first with the ratio of the whole sequence.

    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logits, ref_logits, old_logits: [..., V + 1, V], policy, reference and sampler, all
            positive, one row per last token; the last row starts the sequence.
        length: number of tokens T, at least 1.
        baseline: take the policy's mean KL to go at a position off each token's coefficient, as
            the other answers of a group estimate it; of the full vocabulary, which knows the
            token's own KL, the mean of the later tokens'.
        control: weight of the control variate of k3, :mod:`kl_term.kl.control`.

    Returns:
        By name [T, ...], for sequences of 1 to T tokens, nats squared; with the baseline, which is
        that of T tokens, the last entry alone means something.
    """
    check_same_shape("logits", logits, "ref_logits", ref_logits)
    check_same_shape("logits", logits, "old_logits", old_logits)
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    score = torch.eye(policy.shape[-1], dtype=policy.dtype) - policy.unsqueeze(-2)
    ratio = policy / old_logits.softmax(-1)
    state_kl = reverse_kl(logits, ref_logits)
    k3_cost = control * torch.expm1(-log_ratio) + log_ratio
    k1_own = log_ratio.unsqueeze(-1) * score
    full_own = reverse_kl_gradient(logits, ref_logits).unsqueeze(-2) / ratio.unsqueeze(-1)
    own = torch.stack([k1_own, k1_own + score, k1_own, full_own])
    future = torch.stack([log_ratio, log_ratio, k3_cost, state_kl.unsqueeze(-1) / ratio])
    off: Tensor | None = None
    product_off: Tensor | None = None
    if baseline:
        own_kl = _mean_kls(policy, state_kl, length)
        to_go = own_kl.flip(0).cumsum(0).flip(0)
        off = torch.stack([to_go, to_go, to_go, to_go - own_kl], dim=1)
        off = off.unsqueeze(-1).expand(*off.shape, policy.shape[-2])
        product_off = off[:, 0]
    wide, old_wide = (x.expand(len(future), *x.shape) for x in (logits, old_logits))
    moments = markov_second_moments(wide, old_wide, own, future, length, baseline=off)
    found = dict(zip(KL_WAYS, moments.unbind(1), strict=True))
    found[PRODUCT] = markov_second_moments(
        logits, old_logits, k1_own, log_ratio, length, weight="sequence", baseline=product_off
    )
    return found


def _mean_kls(policy: Tensor, state_kl: Tensor, length: int) -> Tensor:
    """[length, ...]: the mean KL of the token at each position."""
    visits = torch.zeros_like(state_kl)
    visits[..., -1] = 1.0
    means = []
    for _ in range(length):
        means.append((visits * state_kl).sum(-1))
        visits = functional.pad((visits.unsqueeze(-1) * policy).sum(-2), (0, 1))
    return torch.stack(means)
