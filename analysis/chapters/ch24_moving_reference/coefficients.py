r"""What an adaptive coefficient does, exactly or over drawn batches: chapter 24, second half.

A policy on the curve of tilts :math:`\pi_s \propto \pi_{\mathrm{ref}}\, e^{s R}` moves towards the
coefficient's optimum :math:`s = 1 / \beta` along the natural flow, and a controller of
:mod:`kl_term.objectives.controllers` reads a KL of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kl_term import style
from kl_term.kl.divergences import reverse_kl
from kl_term.objectives.controllers import doubling_step, proportional_step


def tilted(rewards: Tensor, ref_logp: Tensor, tilt: float) -> Tensor:
    """[V], log-probs."""
    return (ref_logp + tilt * rewards).log_softmax(-1)


def kl_elasticity(rewards: Tensor, ref_logp: Tensor, beta: float) -> float:
    r"""By how many percent the KL at the optimum rises when the coefficient falls by one.

    .. math:: E = - \frac{d \log \mathrm{KL}(\pi_\beta \Vert \pi_{\mathrm{ref}})}{d \log \beta} =
        \frac{\mathrm{Var}_{\pi_\beta}(R)}{\beta^2\, \mathrm{KL}(\pi_\beta \Vert
        \pi_{\mathrm{ref}})}

    Near the reference it is 2, with a normal reward it is 2 everywhere, and where a rare answer
    takes over it has no bound.

    Equation: ``kl_elasticity``
    """
    policy = tilted(rewards, ref_logp, 1 / beta)
    mass = policy.exp()
    variance = mass @ (rewards - mass @ rewards).square()
    return float(variance / (beta**2 * reverse_kl(policy, ref_logp)))


def followed(
    step: Callable[[float, float], float],
    rewards: Tensor,
    ref_logp: Tensor,
    *,
    beta: float,
    step_size: float,
    steps: int,
) -> pd.DataFrame:
    """A controller on a policy that follows by natural steps: ``step``, ``beta``, ``kl``.

    Each update measures the KL, moves the policy under the coefficient as it is, then the
    coefficient by what was measured, as TRL's callbacks and verl do.
    """
    tilt, rows = 0.0, []
    for number in range(steps):
        kl = float(reverse_kl(tilted(rewards, ref_logp, tilt), ref_logp))
        rows.append({"step": number, "beta": beta, "kl": kl})
        tilt += step_size * (1 - beta * tilt)
        beta = step(beta, kl)
    return pd.DataFrame(rows)


def linear_loop(
    *, elasticity: float, follow: float, horizon: float, proportional: float = 0.0
) -> np.ndarray:
    r"""[2, 2]: the loop near its target, on log-distances of the tilt and of the coefficient.

    .. math:: \begin{pmatrix} 1 - a (1 + P) & -a \\ E / h & 1 \end{pmatrix}

    Equation: ``linear_loop``
    """
    return np.array([[1 - follow * (1 + proportional), -follow], [elasticity / horizon, 1.0]])


def doubling_cycles(elasticity: float) -> float:
    r"""The share of starts, evenly in log KL, from which doubling and halving never settle.

    .. math:: \max\Big(0,\; 1 - \frac{2 \log 1.5}{E \log 2}\Big)

    on a policy that is at its optimum each time, whose KL goes as :math:`\beta^{-E}`.

    Equation: ``doubling_cycles``
    """
    return max(0.0, 1 - 2 * np.log(1.5) / (elasticity * np.log(2)))


#: Log-ratios -> what a token of them reads.
READINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda l: l,
    "k3": lambda l: np.expm1(-l) + l,
}


def drift(
    estimator: str,
    rewards: Tensor,
    ref_logp: Tensor,
    *,
    tilt: float,
    target: float,
    tokens: int,
    batches: int,
    seed: int,
    clip: float = 0.2,
) -> float:
    r"""The mean clipped error of a batch's KL, which is h times what the coefficient moves by.

    .. math:: \mathbb{E}\, \psi_c\Big(\frac{\hat K}{\delta} - 1\Big), \qquad
        \psi_c(e) = \mathrm{clip}(e, \pm c)

    Where it is zero, the target is Huber's location of the batch means at width :math:`c\,\delta`:
    their mean as c grows, their median as it shrinks.

    Equation: ``drift``
    """
    policy = tilted(rewards, ref_logp, tilt)
    values = READINGS[estimator]((policy - ref_logp).numpy())
    mass = policy.exp().numpy()
    counts = np.random.default_rng(seed).multinomial(tokens, mass / mass.sum(), size=batches)
    return float(np.clip(counts @ values / tokens / target - 1, -clip, clip).mean())


# --- What the page shows --------------------------------------------------------------------------

#: Answers of equal worth, and a few that the policy is paid to give up.
GIVEN_UP = 0.05
_KEPT = 20


def giving_up() -> tuple[Tensor, Tensor]:
    """Rewards and reference: one token in twenty costs one."""
    rewards = torch.zeros(_KEPT + 1, dtype=torch.float64)
    rewards[-1] = -1.0
    kept = torch.full((_KEPT,), (1 - GIVEN_UP) / _KEPT, dtype=torch.float64)
    return rewards, torch.cat([kept, torch.tensor([GIVEN_UP], dtype=torch.float64)]).log()


def drift_table(*, share: float, sizes: Iterable[int], batches: int = 2000) -> pd.DataFrame:
    """The drift over the true KL in targets, the target a share of the most that can be reached."""
    rewards, reference = giving_up()
    target = -share * float(np.log1p(-GIVEN_UP))
    rows = []
    for tilt in np.geomspace(0.3, 40, 40):
        kl = float(reverse_kl(tilted(rewards, reference, tilt), reference))
        for name in READINGS:
            for tokens in sizes:
                value = drift(
                    name,
                    rewards,
                    reference,
                    tilt=tilt,
                    target=target,
                    tokens=tokens,
                    batches=batches,
                    seed=24,
                )
                rows.append(
                    {
                        "estimator": name,
                        "tokens": tokens,
                        "tilt": tilt,
                        "kl": kl / target,
                        "drift": value,
                    }
                )
    return pd.DataFrame(rows)


def draw_drift(table: pd.DataFrame) -> Figure:
    """What the loop does to the coefficient, over the tilt: k1 left, k3 right."""
    figure, panels = style.subplots(1, 2, sharey=True, height=3.9)
    for axes, name in zip(panels, READINGS, strict=True):
        found = table[table.estimator == name]
        for (tokens, of_size), look in zip(found.groupby("tokens"), style.SERIES, strict=False):
            axes.plot(
                of_size.tilt, of_size.drift, label=f"{tokens} tokens", **look | {"marker": ""}
            )
        style.guide(axes, y=0.0)
        axes.set(title=f"${name[0]}_{name[1]}$ in the loop", xscale="log")
        axes.set_xlabel("tilt of the policy, 1 / beta")
    panels[0].set_ylabel("push on the coefficient")
    panels[0].legend(loc="lower right")
    return figure


def loops(
    rewards: Tensor, ref_logp: Tensor, *, beta: float, target: float, horizons: Iterable[float]
) -> pd.DataFrame:
    """A proportional controller at each horizon, and doubling: a row a step, by ``controller``."""
    settings = {"beta": beta, "step_size": 0.5, "steps": 240}
    tables = []
    for horizon in horizons:

        def step(now: float, kl: float, horizon: float = horizon) -> float:
            return proportional_step(now, kl, target=target, horizon=horizon)

        found = followed(step, rewards, ref_logp, **settings)
        tables.append(found.assign(controller=f"horizon {horizon:g}"))

    def double(now: float, kl: float) -> float:
        return doubling_step(now, kl, target=target)

    tables.append(followed(double, rewards, ref_logp, **settings).assign(controller="doubling"))
    return pd.concat(tables, ignore_index=True)


def draw_loops(table: pd.DataFrame, target: float) -> Figure:
    """The KL over the updates, a line a controller."""
    looks = {
        name: look | {"marker": "", "label": name}
        for name, look in zip(table.controller.unique(), style.SERIES, strict=False)
    }
    figure = style.lines(
        table,
        "step",
        "kl",
        kind="controller",
        looks=looks,
        xlabel="update",
        ylabel="KL to the reference (nats)",
        legend="upper right",
        ylim=(-0.1, 4.8),
    )
    style.guide(figure.axes[0], y=target)
    return figure
