r"""A reference that moves, exactly: chapter 24, first half.

Finitely many answers with a reference and a reward. Each inner run maximises the reward minus beta
times a divergence from the *current* reference, and the reference is then reset to the policy, or
averaged with it. The second half, on coefficients, is
:mod:`analysis.chapters.ch24_moving_reference.coefficients`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kl_term import style
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import chi_square_optimum, forward_kl_optimum, reverse_kl_optimum
from kl_term.kl.mirror_steps import mirror_step

#: Divergence -> its optimum: log-probs from rewards, logits of the reference and beta.
OPTIMA = {
    "reverse": reverse_kl_optimum,
    "forward": forward_kl_optimum,
    "chi_square": chi_square_optimum,
}


# --- Resets ---------------------------------------------------------------------------------------


def reset_chain(
    rewards: Tensor, ref_logp: Tensor, betas: Iterable[float], *, divergence: str = "reverse"
) -> list[Tensor]:
    """The reference, and the policy after each run; each run's reference is the one before."""
    policies = [ref_logp]
    for beta in betas:
        policies.append(OPTIMA[divergence](rewards, policies[-1], beta=beta))
    return policies


def late_factor(gap: Tensor, beta: float) -> dict[str, Tensor]:
    r"""What one more reset leaves of an answer's odds against the best, once the best has all.

    .. math:: e^{-g/\beta} \;(\text{reverse}), \qquad \frac{\beta}{\beta + g} \;(\text{forward}),
        \qquad \max\Big(0,\; 1 - \frac g\beta\Big) \;(\text{half chi-square})

    Equation: ``late_factor``

    Args:
        gap: [...], g: how far the answer's reward lies below the best.
    """
    x = gap / beta
    return {"reverse": (-x).exp(), "forward": 1 / (1 + x), "chi_square": (1 - x).clamp(min=0.0)}


def nearest_single_run(
    policy: Tensor, rewards: Tensor, ref_logp: Tensor, *, divergence: str
) -> tuple[float, float]:
    """The least L1 distance of a policy from a single run's end, and the coefficient there."""
    low, high = 1e-3, 1e3
    for _ in range(4):
        betas = np.geomspace(low, high, 601)
        ends = OPTIMA[divergence](
            rewards.expand(len(betas), -1) / torch.from_numpy(betas).unsqueeze(-1),
            ref_logp.expand(len(betas), -1),
            beta=1.0,
        )
        apart = (ends.exp() - policy.exp()).abs().sum(-1)
        best = int(apart.argmin())
        low, high = betas[max(best - 1, 0)], betas[min(best + 1, len(betas) - 1)]
    return float(apart[best]), float(betas[best])


def unread_kl(policies: list[Tensor], rewards: Tensor, betas: Iterable[float]) -> float:
    r"""What a log that measures from the current reference leaves out, after K exact runs.

    .. math:: \mathrm{KL}(\pi_K \Vert \pi_0) = \sum_{k=1}^{K} \mathrm{KL}(\pi_k \Vert \pi_{k-1}) +
        \sum_{k=1}^{K-1} s_k\, \big(\mathbb{E}_{\pi_{k+1}}[R] - \mathbb{E}_{\pi_k}[R]\big), \\
        s_k = \sum_{j \le k} \frac{1}{\beta_j}

    The second sum, returned here, is not negative: the reward rises from run to run.

    Equation: ``unread_kl``
    """
    means = [float(policy.exp() @ rewards) for policy in policies]
    tilts = np.cumsum([1 / beta for beta in betas])
    return sum(
        tilt * (after - now)
        for tilt, now, after in zip(tilts[:-1], means[1:-1], means[2:], strict=True)
    )


# --- Averages -------------------------------------------------------------------------------------


def averaged_run(
    rewards: Tensor, ref_logp: Tensor, beta: float, *, rate: float, updates: int, mean: str
) -> Tensor:
    """The end of a run whose reference was averaged with the policy at each of so many optima.

    Args:
        mean: ``geometric``, of logits; or ``arithmetic``, of probabilities.
    """
    anchor = ref_logp
    for _ in range(updates):
        policy = reverse_kl_optimum(rewards, anchor, beta=beta)
        if mean == "geometric":
            anchor = torch.lerp(anchor, policy, rate).log_softmax(-1)
        else:
            anchor = torch.lerp(anchor.exp(), policy.exp(), rate).log()
    return reverse_kl_optimum(rewards, anchor, beta=beta)


class Anchored(NamedTuple):
    """What the log-ratios of a flow are, per unit of reward."""

    lead: float  #: of the policy over its moving anchor
    anchor: float  #: of the anchor over the first reference


def anchored_flow(beta: float, *, rate: float, speed: float, time: float) -> Anchored:
    r"""The natural flow with an anchor that follows the policy geometrically.

    .. math:: \dot z = \eta\, \big(R - \beta (z - a)\big), \quad \dot a = \alpha (z - a)
        \quad\Longrightarrow\quad z - a = \frac{1 - e^{-(\eta\beta + \alpha) t}}{\beta +
        \alpha / \eta}\, R, \\ a - a_0 = \int_0^t \alpha\, (z - a)
        \;\to\; \frac{t}{\beta / \alpha + 1 / \eta}\, R

    up to constants, from a policy that is its reference.

    Equation: ``anchored_flow``

    Args:
        rate: :math:`\alpha`, per unit of time.
        speed: :math:`\eta`.
    """
    total = speed * beta + rate
    lead = -np.expm1(-total * time) / (beta + rate / speed)
    gone = rate * (time + np.expm1(-total * time) / total) / (beta + rate / speed)
    return Anchored(float(lead), float(gone))


# --- What the page shows --------------------------------------------------------------------------

REWARDS = torch.linspace(0, 1, 9, dtype=torch.float64)
#: The best answers are rare: about one in two hundred.
REFERENCE = (-4.0 * REWARDS).log_softmax(-1)


def sawtooth(*, beta: float, step_size: float, period: int, resets: int) -> pd.DataFrame:
    """Natural steps with a reset after each period but the last: ``step``, ``read``, ``true``."""
    policy = anchor = REFERENCE
    rows = []
    for step in range(period * (resets + 1) + 1):
        if step and step % period == 0 and step < period * (resets + 1):
            anchor = policy
        read, true = (float(reverse_kl(policy, of)) for of in (anchor, REFERENCE))
        rows.append({"step": step, "read": read, "true": true})
        policy = mirror_step(policy, anchor, REWARDS, beta=beta, step_size=step_size)
    return pd.DataFrame(rows)


def shapes(*, beta: float, runs: int) -> pd.DataFrame:
    """Log-odds against the best answer over its lead, beyond the reference's, of chains of runs."""
    rows = []
    for name in OPTIMA:
        end = reset_chain(REWARDS, REFERENCE, [beta] * runs, divergence=name)[-1]
        kept = end - REFERENCE
        for gap, value in zip(1 - REWARDS, kept - kept[-1], strict=True):
            rows.append({"divergence": name, "gap": float(gap), "odds": float(value)})
    return pd.DataFrame(rows)


_LOOKS = {
    "reverse": style.line("k2", marker="o", label="reverse KL"),
    "forward": style.line("k3", marker="s", label="forward KL"),
    "chi_square": style.line("exact", marker="^", label="chi-square"),
}


def draw_resets(path: pd.DataFrame, table: pd.DataFrame) -> Figure:
    """What a log reads beside the true KL, and what chains of resets make of three divergences."""
    figure, (left, right) = style.subplots(1, 2, height=3.9)
    look = style.SERIES[0] | {"marker": ""}
    left.plot(path.step, path.true, label="from the first", **look)
    left.plot(path.step, path.read, label="as logged", **style.SERIES[1] | {"marker": ""})
    left.set(title="KL to the reference", xlabel="update", ylabel="nats")
    left.legend(loc="center right")
    for name, options in _LOOKS.items():
        found = table[(table.divergence == name) & (table.odds > -60)]
        right.plot(found.gap, found.odds, **options)
    right.set(title="Eight runs, seven resets", xlabel="reward below the best")
    right.set_ylabel("log-odds moved")
    right.legend(loc="lower left")
    return figure


def speed_table(
    *, beta: float, speed: float, rates: Iterable[float], times: Tensor
) -> pd.DataFrame:
    """The reverse KL of policy from anchor (``read``) and from the first reference (``true``)."""
    rows = []
    for rate in rates:
        for time in times.tolist():
            at = anchored_flow(beta, rate=rate, speed=speed, time=time)
            anchor = (REFERENCE + at.anchor * REWARDS).log_softmax(-1)
            policy = (REFERENCE + (at.anchor + at.lead) * REWARDS).log_softmax(-1)
            rows.append(
                {
                    "rate": rate,
                    "time": time,
                    "read": float(reverse_kl(policy, anchor)),
                    "true": float(reverse_kl(policy, REFERENCE)),
                    "tilt": at.anchor + at.lead,
                }
            )
    return pd.DataFrame(rows)


def draw_speed(table: pd.DataFrame) -> Figure:
    """The policy's tilt and the KL that is logged, over time, a line a rate of the average."""
    figure, (left, right) = style.subplots(1, 2, height=3.9)
    for (rate, of_rate), look in zip(table.groupby("rate"), style.SERIES, strict=False):
        label = "fixed" if rate == 0 else f"rate {rate:g}"
        left.plot(of_rate.time, of_rate.tilt, label=label, **look | {"marker": ""})
        right.plot(of_rate.time, of_rate.read, label=label, **look | {"marker": ""})
    left.set(title="Tilt of the policy", xlabel="time", ylabel="per unit of reward")
    right.set(title="KL as logged", xlabel="time", ylabel="nats")
    left.legend(loc="upper left")
    return figure
