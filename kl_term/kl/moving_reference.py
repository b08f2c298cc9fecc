r"""A reference that moves while training: which single run it amounts to, under the reverse KL.

The optimum under the reverse KL is the reference tilted by :math:`e^{R/\beta}`, and tilts add up:
whatever a schedule of resets and averages does, it stays on the curve of
:func:`kl_term.kl.fixed_points.reverse_kl_optimum`, and one coefficient says where. Under other
divergences there is no such number.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kl_term.checks import checked, pair_of_floats
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.plain_checks import check_fraction, check_not_negative, check_positive
from kl_term.shapes import Logits, Values

_BISECTIONS = 200


@checked
def merged_coefficient(betas: Iterable[float]) -> float:
    r"""The one run that equals a chain of runs, the reference reset to the policy between them.

    .. math:: \frac{1}{\beta_{\mathrm{one}}} = \sum_k \frac{1}{\beta_k}

    Each run goes to its optimum, under the reverse KL. K runs at :math:`\beta` are one at
    :math:`\beta / K`.

    Equation: ``merged_coefficient``

    Args:
        betas: of the runs in turn, at least one.

    Raises:
        ValueError: no run.
    """
    betas = _of_runs("betas", betas)
    return 1 / sum(1 / beta for beta in betas)


@checked
def averaged_coefficient(beta: float, *, rate: float, updates: int) -> float:
    r"""The one run that equals a run against a reference averaged geometrically so many times.

    .. math:: \pi_{\mathrm{ref}} \leftarrow
        \pi_{\mathrm{ref}}^{1 - \alpha}\, \pi^{\alpha} \quad (K \text{ times}), \qquad
        \beta_{\mathrm{one}} = \frac{\beta}{1 + \alpha K}

    Each time at the optimum, under the reverse KL. At :math:`\alpha = 1` these are resets. A mean
    of logits is such an average; a mean of probabilities is not, and equals no single run.

    Equation: ``averaged_coefficient``

    Args:
        beta: of every run.
        rate: :math:`\alpha`, the weight of the policy, in [0, 1].
        updates: :math:`K`, of the reference before the last run.
    """
    check_positive("beta", beta)
    check_fraction("rate", rate)
    check_not_negative("updates", updates)
    return beta / (1 + rate * updates)


@checked
def partial_coefficient(beta: float, *, step_size: float, steps: Iterable[int]) -> float:
    r"""The one run that equals runs of so many natural steps each, stopped before their optimum.

    .. math:: \frac{1}{\beta_{\mathrm{one}}} = \sum_k \frac{1 - (1 - \eta\beta)^{n_k}}{\beta}

    Each run starts at its reference, which is the policy that the run before left, and takes
    :math:`n_k` steps of :func:`kl_term.kl.mirror_steps.mirror_step`. One step each is no KL term at
    all: :math:`\beta` drops out.

    Equation: ``partial_coefficient``

    Args:
        beta: of every run.
        step_size: :math:`\eta`, below :math:`1 / \beta`.
        steps: :math:`n_k`, each at least one.

    Raises:
        ValueError: no run, one without a step, or a step that reaches beyond the optimum.
    """
    check_positive("beta", beta)
    check_positive("step_size", step_size)
    counts = _of_runs("steps", steps)
    if min(counts) < 1:
        raise ValueError(f"steps must be one or more a run; got {counts}")
    if step_size * beta > 1:
        raise ValueError(f"step_size={step_size} reaches beyond the optimum: at most 1 / beta")
    return beta / sum(1 - (1 - step_size * beta) ** count for count in counts)


def _of_runs(name: str, values: Iterable[float]) -> list[float]:
    """One positive number a run, of at least one run."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must list one number a run, got {values!r}")
    listed = list(values)
    if not listed:
        raise ValueError(f"{name} is empty: give one number a run, of at least one run")
    for value in listed:
        check_positive(name, value)
    return listed


@checked(nan="refused")
@torch.no_grad()
def coefficient_of_kl(rewards: Logits, ref_logits: Logits, *, kl: float) -> Values:
    r"""The coefficient whose optimum has a given reverse KL from its reference: a trust region.

    .. math:: \mathrm{KL}(\pi_\beta \Vert \pi_{\mathrm{ref}}) = \delta, \qquad
        \pi_\beta \propto \pi_{\mathrm{ref}}\, e^{R / \beta}, \qquad
        \beta = \sqrt{\mathrm{Var}_{\mathrm{ref}}(R) / (2 \delta)} + O(1)

    The KL rises strictly as :math:`\beta` falls, to minus the log of the reference's probability of
    the best reward, which no :math:`\beta` reaches.

    Equation: ``coefficient_of_kl``

    Args:
        rewards, ref_logits: [..., V].
        kl: :math:`\delta`, nats.

    Returns:
        [...], positive; NaN where no coefficient has that KL.
    """
    check_positive("kl", kl)
    rewards, ref_logits = pair_of_floats("rewards", rewards, "ref_logits", ref_logits)
    rewards, ref_logp = rewards.double(), ref_logits.double().log_softmax(-1)
    allowed = ref_logp > -torch.inf
    best = torch.where(allowed, rewards, -torch.inf).amax(-1, keepdim=True)
    gap = torch.where(allowed, best - rewards, 0.0)
    most = -torch.where(gap == 0, ref_logp, -torch.inf).logsumexp(-1)
    low, high = torch.full_like(most, -100.0), torch.full_like(most, 100.0)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        policy = reverse_kl_optimum(-gap / middle.exp().unsqueeze(-1), ref_logp, beta=1.0)
        far = reverse_kl(policy, ref_logp) > kl
        low, high = torch.where(far, middle, low), torch.where(far, high, middle)
    return torch.where(most > kl, (0.5 * (low + high)).exp(), torch.nan)
