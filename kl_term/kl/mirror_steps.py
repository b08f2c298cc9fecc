r"""One exact step on the surrogate of a KL-regularised objective, at one state.

With the KL of the *sampling* policy folded into the reward the objective is linear in the policy.
It has the right gradient where the samples were drawn, and its literal maximiser is one token (any
policy, if the sampler is the optimum already): only a proximal step makes a method of it.
"""

from __future__ import annotations

import torch

from kl_term.checks import check_same_shape, checked, pair_of_floats
from kl_term.plain_checks import check_positive
from kl_term.shapes import Logits, Values


@checked
def folded_reward(
    old_logits: Logits, ref_logits: Logits, rewards: Logits, *, beta: float
) -> Values:
    r"""Reward minus the KL of the policy that sampled.

    .. math:: \tilde R(a) = R(a) - \beta \log \frac{\pi_{\mathrm{old}}(a)}{\pi_{\mathrm{ref}}(a)}

    Equation: ``folded_reward``
    Source: Ouyang et al. (2022), InstructGPT; equation 20 of Liu, Liu and Liu, "Rethinking KL
        Divergence in RLHF" (March 2025).

    Args:
        old_logits, ref_logits: [..., V], of sampler and reference, finite.
        rewards: [..., V], one a token.
        beta: the KL coefficient, positive.

    Returns:
        [..., V], in the unit of the reward.
    """
    check_positive("beta", beta)
    old_logits, ref_logits = pair_of_floats("old_logits", old_logits, "ref_logits", ref_logits)
    check_same_shape("old_logits", old_logits, "rewards", rewards)
    return rewards - beta * (old_logits.log_softmax(-1) - ref_logits.log_softmax(-1))


@checked
def mirror_step(
    old_logits: Logits, ref_logits: Logits, rewards: Logits, *, beta: float, step_size: float
) -> Logits:
    r"""Maximiser of the folded reward minus a KL to the policy that sampled.

    .. math:: \pi_{\mathrm{new}} = \arg\max_\pi\ \mathbb{E}_\pi[\tilde R] - \tfrac{1}{\eta}
        \mathrm{KL}(\pi \Vert \pi_{\mathrm{old}}) \ \propto\ \pi_{\mathrm{old}}\, e^{\eta \tilde R}
        \ \propto\ \pi_{\mathrm{old}}^{\,1 - \eta\beta}\, (\pi^\ast)^{\eta\beta}

    With :math:`\pi^\ast \propto \pi_{\mathrm{ref}}\, e^{R/\beta}`, the log-ratios to the optimum
    shrink by :math:`1 - \eta\beta` a step. They vanish at :math:`\eta = 1/\beta` and grow beyond
    :math:`\eta = 2/\beta`; :math:`\eta \to \infty` is the literal maximiser of the folded reward.

    Equation: ``mirror_step``

    Args:
        old_logits, ref_logits, rewards, beta: as :func:`folded_reward`.
        step_size: :math:`\eta`, positive.

    Returns:
        [..., V], log-probs.
    """
    check_positive("step_size", step_size)
    folded = folded_reward(old_logits, ref_logits, rewards, beta=beta)
    return torch.log_softmax(old_logits.log_softmax(-1) + step_size * folded, dim=-1)
