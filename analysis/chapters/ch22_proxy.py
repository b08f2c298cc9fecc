r"""What happens to the truth when a proxy is optimised under a KL term, exactly: chapter 22.

Finitely many answers with a reference, a true reward and a proxy that is the truth plus an error.
The optimum of proxy minus beta times a divergence moves probability by a function of the proxy
alone,

.. math:: \frac{\pi^\ast(y)}{\pi_{\mathrm{ref}}(y)} = g\Big(\frac{R(y) - \lambda}{\beta}\Big), \\
    g(x) = e^x \;(\text{reverse}), \quad -1/x \;(\text{forward}), \quad
    \max(0, 1 + x) \;(\text{half chi-square}),

and everything here follows from that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.evidence.recorded import recorded
from analysis.records import nats, summaries
from kl_term import style
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import chi_square_optimum, forward_kl_optimum, reverse_kl_optimum

#: Divergence -> its optimum: log-probs from rewards, logits of the reference and beta.
OPTIMA = {
    "reverse": reverse_kl_optimum,
    "forward": forward_kl_optimum,
    "chi_square": chi_square_optimum,
}


class World(NamedTuple):
    """Every answer that the reference gives, finitely many."""

    reference: Tensor  #: [Y], probabilities above zero
    truth: Tensor  #: [Y]
    error: Tensor  #: [Y], proxy less truth

    @property
    def proxy(self) -> Tensor:
        return self.truth + self.error


def optimum(world: World, divergence: str, beta: float) -> Tensor:
    """[Y]: the policy that maximises the proxy less beta times a divergence of :data:`OPTIMA`."""
    return OPTIMA[divergence](world.proxy, world.reference.log(), beta=beta).exp()


# --- When the truth rises ---------------------------------------------------------------------


def calibration(world: World) -> pd.DataFrame:
    r"""The mean truth of the reference's answers of one proxy.

    .. math:: m(\rho) = \mathbb{E}_{y \sim \pi_{\mathrm{ref}}}[T(y) \mid R(y) = \rho]

    Returns:
        A row per level, ascending: ``proxy``, ``mass`` under the reference, ``truth``.
    """
    levels, of_level = torch.unique(world.proxy, return_inverse=True)
    mass = torch.zeros_like(levels).index_add(0, of_level, world.reference)
    total = torch.zeros_like(levels).index_add(0, of_level, world.reference * world.truth)
    return pd.DataFrame({"proxy": levels, "mass": mass, "truth": total / mass})


def marginal_weights(world: World, divergence: str, beta: float) -> Tensor:
    r"""Where the next bit of probability is moved: :math:`\pi_{\mathrm{ref}}\, g'`, [Y].

    .. math:: \pi^\ast \;(\text{reverse}), \\
        \frac{(\pi^\ast)^2}{\pi_{\mathrm{ref}}} \;(\text{forward}), \\
        \pi_{\mathrm{ref}}\, [\pi^\ast > 0] \;(\text{half chi-square})
    """
    policy = optimum(world, divergence, beta)
    if divergence == "reverse":
        return policy
    if divergence == "forward":
        return policy.square() / world.reference
    return torch.where(policy > 0, world.reference, 0.0)


def truth_slope(world: World, divergence: str, beta: float) -> float:
    r"""How fast the true reward changes as the coefficient is lowered.

    .. math:: \frac{d}{d(1/\beta)} \mathbb{E}_{\pi^\ast}[T] = \sum_y v(y)\,
        \big(R(y) - \bar R_v\big)\, T(y) = |v|\, \mathrm{Cov}_v(T, R), \\
        v = \pi_{\mathrm{ref}}\, g'

    with :math:`|v|` the sum of :func:`marginal_weights`, and mean and covariance under them
    normalised. So the truth rises exactly as long as the regression of truth on proxy has a
    positive slope among the answers that are being moved.

    Equation: ``truth_slope``
    """
    weights = marginal_weights(world, divergence, beta)
    centre = weights @ world.proxy / weights.sum()
    return float((weights * (world.proxy - centre)) @ world.truth)


def late_loss(world: World) -> float:
    r"""What the truth falls by at last, per unit of beta, under the forward KL.

    .. math:: \mathbb{E}_{\pi^\ast}[T] = T(\text{best}) + \beta \sum_{y \ne \text{best}}
        \frac{\pi_{\mathrm{ref}}(y)}{R_{\max} - R(y)} \\
        \cdot \big(T(y) - T(\text{best})\big) + O(\beta^2)

    where T(best) is the mean truth of the answers of the highest proxy. Under the reverse KL all
    but the best and the second best level are exponentially small by then, and these two decide.

    Equation: ``late_loss``
    """
    gap = world.proxy.max() - world.proxy
    top = torch.where(gap == 0, world.reference, 0.0)
    weight = torch.where(gap > 0, world.reference / gap, 0.0)
    return float(weight @ (world.truth - top @ world.truth / top.sum()))


def clip_level(world: World) -> float:
    r"""The lowest score above which the mean truth is highest: where to clip the proxy.

    .. math:: c = \arg\max_c M(c), \qquad M(c) = \mathbb{E}_{\pi_{\mathrm{ref}}}[T \mid R \ge c]

    Equation: ``clip_level``
    """
    curve = calibration(world).iloc[::-1]
    above = (curve.mass * curve.truth).cumsum() / curve.mass.cumsum()
    return float(curve.proxy[above[::-1].idxmax()])


def clipped(world: World, level: float) -> World:
    """The same answers, and a proxy that no longer rises beyond a level."""
    return world._replace(error=world.proxy.clamp(max=level) - world.truth)


def truth_curve(world: World, divergence: str, betas: Iterable[float]) -> pd.DataFrame:
    """Along the coefficient: ``beta``, ``kl`` (reverse, nats), ``truth`` and ``proxy``."""
    rows = []
    for beta in betas:
        policy = optimum(world, divergence, beta)
        kl = float(reverse_kl(policy.log(), world.reference.log()))
        values = {"truth": float(policy @ world.truth), "proxy": float(policy @ world.proxy)}
        rows.append({"divergence": divergence, "beta": beta, "kl": kl, **values})
    return pd.DataFrame(rows)


# --- Worlds -----------------------------------------------------------------------------------


def independent(truths: Tensor, truth_mass: Tensor, errors: Tensor, error_mass: Tensor) -> World:
    """Errors that do not depend on the truth: every pair is an answer."""
    shape = (len(truths), len(errors))
    return World(
        reference=torch.outer(truth_mass, error_mass).flatten(),
        truth=truths.unsqueeze(-1).expand(shape).flatten(),
        error=errors.expand(shape).flatten(),
    )


def of_calibration(levels: Tensor, mass: Tensor, truth: Tensor) -> World:
    """One answer per level of the proxy, with the mean truth there."""
    return World(reference=mass, truth=truth, error=levels - truth)


def normal_mass(levels: Tensor, scale: float = 1.0) -> Tensor:
    """A normal law on a grid."""
    return torch.softmax(-0.5 * (levels / scale).square(), dim=-1)


def student_mass(levels: Tensor, freedom: float) -> Tensor:
    """Student's t on a grid: tails as a power, cut where the grid ends."""
    return torch.softmax(-0.5 * (freedom + 1) * torch.log1p(levels.square() / freedom), dim=-1)


def tail_world(tail: float, harm: float = 0.0) -> World:
    r"""The world of the explorer: an error whose tail one can drag, and what following it costs.

    .. math:: R = T_0 + E, \qquad T = T_0 - h \max(0, E), \qquad
        P(E) \propto \Big(1 + \frac{E^2}{\nu}\Big)^{-(\nu + 1)/2}, \quad \nu = \frac1{\text{tail}}

    Student's t, from the normal law at a tail of zero on. :math:`T_0` is normal and does not depend
    on the error; with a harm :math:`h` above zero answers of large errors are worse than others.
    """
    truths = torch.linspace(-3, 3, 21, dtype=torch.float64)
    errors = torch.linspace(-12, 12, 121, dtype=torch.float64)
    mass = student_mass(errors, 1 / tail) if tail > 0 else normal_mass(errors)
    world = independent(truths, normal_mass(truths), errors, mass)
    lost = harm * world.error.clamp(min=0)
    return World(world.reference, world.truth - lost, world.error + lost)


# --- The price of one answer --------------------------------------------------------------------


def price(share: Tensor, probability: Tensor) -> dict[str, Tensor]:
    r"""What it costs, in each divergence, to give one answer a share.

    .. math:: s \log \frac{s}{p} + (1 - s) \log \frac{1 - s}{1 - p} \;(\text{reverse}), \\
        p \log \frac{p}{s} + (1 - p) \log \frac{1 - p}{1 - s} \;(\text{forward}), \\
        \frac{(s - p)^2}{2 p (1 - p)} \;(\text{half chi-square})

    the least over all policies with :math:`\pi(y) = s`, where :math:`p` is the reference's
    probability. As the answer gets rarer the price of a share rises like
    :math:`s \log(1/p)`, stays at :math:`-\log(1 - s)`, and rises like :math:`s^2 / 2p`.

    Equation: ``price``

    Args:
        share, probability: [...], between 0 and 1.

    Returns:
        Divergence -> [...], nats.
    """
    rest, others = 1 - share, 1 - probability
    return {
        "reverse": share * (share / probability).log() + rest * (rest / others).log(),
        "forward": probability * (probability / share).log() + others * (others / rest).log(),
        "chi_square": (share - probability).square() / (2 * probability * others),
    }


def exploit_share(gain: float, probability: float, beta: float) -> dict[str, float]:
    r"""The share of an answer whose proxy lies a gain above the one of all others, at each optimum.

    .. math:: \frac{p\, e^{g/\beta}}{1 - p + p\, e^{g/\beta}} \;(\text{reverse}), \\
        \max\Big(0,\; 1 - \frac{\beta}{g}\Big) \text{ as } p \to 0 \;(\text{forward}), \\
        \min\Big(1,\; p + p(1 - p)\, \frac{g}{\beta}\Big) \;(\text{half chi-square})

    The forward KL's is above :math:`1 - \beta (1 - p) / g` for every :math:`p`, and so it is where
    the others' proxies differ and lie :math:`g` below or more.

    Equation: ``exploit_share``

    Returns:
        Divergence -> the share, from the optima themselves.
    """
    two = World(
        reference=torch.tensor([1 - probability, probability], dtype=torch.float64),
        truth=torch.zeros(2, dtype=torch.float64),
        error=torch.tensor([0.0, gain], dtype=torch.float64),
    )
    return {name: float(optimum(two, name, beta)[1]) for name in OPTIMA}


def half_share_gain(probability: float, beta: float) -> dict[str, float]:
    r"""The gain at which an exploit has half of all probability.

    .. math:: \beta \log \frac{1 - p}{p} \;(\text{reverse}), \\
        2 \beta\, (1 - 2 p) \;(\text{forward}), \\
        \beta\, \frac{1 - 2 p}{2 p\, (1 - p)} \;(\text{half chi-square}), \qquad p < \tfrac12

    Equation: ``half_share_gain``
    """
    others = 1 - probability
    return {
        "reverse": beta * math.log(others / probability),
        "forward": 2 * beta * (others - probability),
        "chi_square": beta * (others - probability) / (2 * probability * others),
    }


def exploit_table(probabilities: Iterable[float], *, gain: float, beta: float) -> pd.DataFrame:
    """A row per probability and divergence: the ``share`` that an exploit ends with."""
    return pd.DataFrame(
        {"probability": p, "divergence": name, "share": share}
        for p in probabilities
        for name, share in exploit_share(gain, p, beta).items()
    )


# --- Closed forms -----------------------------------------------------------------------------


def square_root_form(kl: Tensor, *, slope: float, bend: float, scale: float) -> Tensor:
    r"""The true reward gained at a KL, of a normal proxy whose calibration bends down.

    .. math:: R \sim \mathcal N(0, \sigma^2), \quad m(\rho) = a \rho - b \rho^2
        \quad\Longrightarrow\quad \mathbb{E}_{\pi^\ast}[T] - \mathbb{E}_{\mathrm{ref}}[T] =
        d\,(\sqrt2\, a \sigma - 2 b \sigma^2\, d), \\
        d = \sqrt{\mathrm{KL}(\pi^\ast \Vert \pi_{\mathrm{ref}})}

    the form that Gao et al. (2210.10760) fitted to best-of-n. A proxy of another mean
    :math:`\mu` has the slope :math:`a - 2 b \mu` in place of :math:`a`.

    Equation: ``square_root_form``

    Args:
        kl: [...], nats.
        slope, bend: :math:`a` and :math:`b`.
        scale: :math:`\sigma`.
    """
    root = kl.sqrt()
    return root * (2**0.5 * slope * scale - 2 * bend * scale**2 * root)


def square_root_peak(*, slope: float, bend: float, scale: float) -> float:
    r"""The KL at which :func:`square_root_form` is highest.

    .. math:: d^2 = \frac{a^2}{8\, b^2 \sigma^2}

    Equation: ``square_root_peak``
    """
    return slope**2 / (8 * bend**2 * scale**2)


def gain_bound(world: World, policy: Tensor) -> float:
    r"""The most that the mean proxy of a policy can exceed the reference's, by its chi-square.

    .. math:: \mathbb{E}_\pi[R] - \mathbb{E}_{\mathrm{ref}}[R] \le
        \sqrt{\chi^2(\pi \Vert \pi_{\mathrm{ref}})\, \mathrm{Var}_{\mathrm{ref}}(R)}

    No such bound holds of a KL: see :func:`lottery`.

    Equation: ``gain_bound``
    """
    ratio = policy / world.reference - 1
    centred = world.proxy - world.reference @ world.proxy
    return float(((world.reference @ ratio.square()) * (world.reference @ centred.square())).sqrt())


def lottery(world: World, share: float) -> Tensor:
    r"""[Y]: the reference, but a share of the time its answers of the highest proxy alone.

    .. math:: \pi = (1 - s)\, \pi_{\mathrm{ref}} + s\, \pi_{\mathrm{ref}}(\cdot \mid R = R_{\max}),
        \qquad \mathrm{KL}(\pi \Vert \pi_{\mathrm{ref}}) \le s \log \frac{1}{p_{\max}}, \\
        \mathbb{E}_\pi[R] - \mathbb{E}_{\mathrm{ref}}[R] = s\, (R_{\max} -
        \mathbb{E}_{\mathrm{ref}}[R])

    Source: the policies of Kwa et al. (2407.14503), theorem 1.
    """
    top = torch.where(world.proxy == world.proxy.max(), world.reference, 0.0)
    return (1 - share) * world.reference + share * top / top.sum()


# --- Recorded runs --------------------------------------------------------------------------------

#: Key -> a recording in which the reward is the truth, and a term against none at one coefficient.
REWARD_IS_THE_TRUTH = {
    "drifting": ("equal_kl", "k2_loss", 0.3),
    "half_step": ("half_step", "k2_loss", 0.3),
    "language": ("smollm2_short", "exact_loss", 0.3),
}


def against_none() -> dict[str, dict[str, float]]:
    """What a KL term changes in accuracy where nothing can be gamed: ``mean``, ``low``, ``high``,
    seed by seed, for each of :data:`REWARD_IS_THE_TRUTH`."""
    return {
        key: summaries.paired(
            recorded(preset).finals, [(variant, "none", "accuracy")], beta=beta
        ).to_dict("records")[0]
        for key, (preset, variant, beta) in REWARD_IS_THE_TRUTH.items()
    }


#: KLs at which answers are shown, in nats a token.
LEVELS = (0.05, 0.3, 1.0)


def shown_readings(path: pd.DataFrame, levels: Iterable[float] = LEVELS) -> list[int]:
    """The updates of the readings that are shown: the reference, on the way up the first that has
    three quarters of each level, and the last."""
    found = [int(path["update"].iloc[0])]
    for level in levels:
        reached = path[path["reverse_kl"] >= 0.75 * level]["update"]
        found += [int(reached.iloc[0])] if len(reached) else []
    return list(dict.fromkeys([*found, int(path["update"].iloc[-1])]))


def beside_the_reference(tables: nats.Nats, questions: Iterable[int]) -> pd.DataFrame:
    """A row per question and reading: ``question``, ``kl``, ``letters`` per word, ``answer``."""
    path = tables.path.set_index("update")
    every = list(dict.fromkeys(tables.answers["question"]))
    answers = tables.answers.set_index(["update", "question"])["answer"]
    return pd.DataFrame(
        {
            "question": every[place],
            "kl": path.loc[update, "reverse_kl"],
            "letters": path.loc[update, "letters"],
            "answer": answers[update, every[place]],
        }
        for place in questions
        for update in shown_readings(tables.path)
    )


def as_lines(table: pd.DataFrame) -> str:
    """A table of :func:`beside_the_reference` in Markdown, each answer whole."""
    rows = ["| question | nats a token | answer |", "|---|---|---|"]
    before = ""
    for row in table.to_dict("records"):
        asked = "" if row["question"] == before else row["question"]
        before = row["question"]
        answer = re.sub(r"([\\|*_$<`\[{])", r"\\\1", row["answer"])
        rows.append(f"| {asked} | {row['kl']:.2f} | {answer} |")
    return "\n".join(rows)


# --- What the page shows ------------------------------------------------------------------------

_GRID = torch.linspace(-4, 4, 81, dtype=torch.float64)
_BETAS = (10 ** torch.linspace(2, -2, 121, dtype=torch.float64)).tolist()
#: The page's bent calibration curve: the truth is the proxy, less three tenths of its square.
BEND = 0.3


def worlds() -> dict[str, World]:
    """The worlds of the figures: how the error of the proxy comes about, in words."""
    mass, heavy = normal_mass(_GRID), 10 * _GRID
    return {
        "bent": of_calibration(
            2 * _GRID, normal_mass(2 * _GRID), 2 * _GRID - BEND * (2 * _GRID) ** 2
        ),
        "light": independent(_GRID, mass, _GRID, mass),
        "heavy": independent(_GRID, mass, heavy, student_mass(heavy, 2.0)),
    }


def curves() -> pd.DataFrame:
    """Truth and proxy over the KL in every world, for every divergence."""
    tables = [
        truth_curve(world, divergence, _BETAS).assign(world=name)
        for name, world in worlds().items()
        for divergence in OPTIMA
    ]
    return pd.concat(tables, ignore_index=True)


def at_kl(table: pd.DataFrame, kl: float) -> dict[str, pd.Series]:
    """World -> the truth of each divergence at the coefficient that comes nearest to a KL."""
    nearest = (table.kl - kl).abs().groupby([table.world, table.divergence]).idxmin()
    found = table.loc[nearest].set_index("divergence")
    return {str(world): rows["truth"] for world, rows in found.groupby("world")}


_LOOKS = {
    "reverse": style.line("k2", marker="", label="reverse KL"),
    "forward": style.line("k3", marker="", label="forward KL"),
    "chi_square": style.line("exact", marker="", label="chi-square"),
}


def draw_exploit(table: pd.DataFrame) -> Figure:
    """The share of an exploit over its probability under the reference, a line a divergence."""
    return style.lines(
        table,
        "probability",
        "share",
        kind="divergence",
        looks=_LOOKS,
        xlabel="probability under the reference, log scale",
        ylabel="share at the optimum",
        legend="center left",
        xscale="log",
        ylim=(-0.03, 1.03),
    )


_TITLES = {"bent": "High scores are errors", "heavy": "Rare, huge errors"}


def draw(table: pd.DataFrame, most: float = 4.0) -> Figure:
    """The truth over the KL, for two kinds of error, and the proxy of the reverse KL in grey."""
    figure, panels = style.subplots(1, 2, height=3.9)
    for axes, (world, title) in zip(panels, _TITLES.items(), strict=True):
        of_world = table[(table.world == world) & (table.kl <= most)]
        for divergence, look in _LOOKS.items():
            found = of_world[of_world.divergence == divergence]
            axes.plot(found.kl, found.truth, **look)
        proxy = of_world[of_world.divergence == "reverse"]
        axes.plot(proxy.kl, proxy.proxy, color=style.QUIET, linestyle=":", label="proxy")
        axes.set(title=title, xlabel="KL to the reference (nats)")
        axes.set_ylim(-1.2, 2.0)
    panels[0].set_ylabel("mean under the policy")
    panels[1].legend(loc="lower right")
    return figure
