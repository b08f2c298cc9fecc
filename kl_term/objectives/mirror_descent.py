r"""Policy mirror descent: one KL-regularised step away from the policy that sampled.

The optimum of the step is known, :math:`\pi \propto \pi_i e^{R/\tau}`, so it can be reached by
regression instead of by a policy gradient.
"""

from __future__ import annotations

from torch import Tensor

from kl_term.checks import check_float, check_same_shape, checked
from kl_term.objectives.preference import implicit_reward
from kl_term.plain_checks import check_positive
from kl_term.shapes import LogProbs, Values


@checked
def mirror_descent_loss(
    logp: LogProbs, old_logp: LogProbs, rewards: Values, baseline: Values, *, tau: float
) -> Values:
    r"""Squared distance of the implicit reward from the reward, per completion.

    .. math:: \mathcal{L} = \Big(R - b - \tau \log \frac{\pi_\theta(y|x)}{\pi_i(y|x)}\Big)^2,
        \qquad b = \tau \log Z,\quad Z = \mathbb{E}_{y \sim \pi_i}\big[e^{R/\tau}\big]

    With this baseline it is zero exactly at :math:`\pi_i e^{R/\tau} / Z`
    (:func:`kl_term.kl.fixed_points.reverse_kl_optimum`), the maximiser of
    :math:`\mathbb{E}_\pi[R] - \tau\, \mathrm{KL}(\pi \Vert \pi_i)`, wherever the samples come from.
    The group mean of the rewards is a stand-in for :math:`b`, right to leading order: it is short
    by about :math:`\mathrm{Var}[R] / (2\tau)`.

    Equation: ``mirror_descent_loss``
    Source: Kimi Team (2025), Kimi k1.5, policy optimisation.
    Sampler: :math:`y \sim \pi_i`, the policy at the start of the step.
    Gradient: :math:`-2 \tau \big(R - b - \tau \log \frac{\pi_\theta}{\pi_i}\big)
        \nabla \log \pi_\theta`; at :math:`\pi_\theta = \pi_i`, in expectation, minus
        :math:`2 \tau` times the policy gradient, whatever :math:`b`.

    Args:
        logp: [...], log-probs of whole completions under the trained policy (nats).
        old_logp: [...], under :math:`\pi_i`; treated as constant.
        rewards: [...].
        baseline: [...], :math:`b`, from :func:`log_partition` or the mean of the group.
        tau: the temperature, in reward per nat.

    Returns:
        [...], in the unit of the reward squared.
    """
    check_positive("tau", tau)
    check_same_shape("logp", logp, "rewards", rewards)
    check_same_shape("logp", logp, "baseline", baseline)
    implied = implicit_reward(logp, old_logp, beta=tau)
    return (rewards.detach() - baseline.detach() - implied).square()


@checked
def log_partition(rewards: Values, log_weights: LogProbs, *, tau: float) -> Tensor:
    r"""The normaliser of the step, in the unit of the reward.

    .. math:: \tau \log Z = \tau \log \sum_y w(y)\, e^{R(y)/\tau}

    Equation: ``log_partition``
    Source: Rafailov et al. (2023), section 4, with :math:`w = \pi_{\mathrm{ref}}`.

    Args:
        rewards: [..., N].
        log_weights: [..., N], log-probs of all completions; or ``-log N`` each, for a sample.
        tau: the temperature; :math:`\beta` in the notation of the KL-regularised reward.

    Returns:
        [...].
    """
    check_positive("tau", tau)
    check_float("rewards", rewards)
    check_same_shape("rewards", rewards, "log_weights", log_weights)
    return tau * (log_weights + rewards / tau).logsumexp(dim=-1)
