r"""A KL over the top k tokens, exactly: where each form of it ends, and what it leaves out.

One state with :math:`V` tokens, a teacher :math:`\pi_{\mathrm{ref}}`, a set :math:`S` of tokens
with teacher's mass :math:`P` and student's mass :math:`m`. All of it is enumerated but for the
memory of the sums, which ``python -m benchmarks.top_k`` records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.records.manifests import RESULTS, recorded_table
from kl_term import style
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.top_k import top_k_divergence, top_k_tokens

#: Form -> how the package computes it. The clamped one is verl's ``forward_kl_topk``.
FORMS: dict[str, dict[str, str]] = {
    "plain reverse": {"direction": "reverse", "correction": "none"},
    "plain forward": {"direction": "forward", "correction": "none"},
    "clamped forward": {"direction": "forward", "correction": "none"},
    "renormalised": {"direction": "reverse", "correction": "renormalised"},
    "unnormalised": {"direction": "reverse", "correction": "unnormalised"},
    "tail": {"direction": "reverse", "correction": "tail"},
}
FULL = {"reverse": reverse_kl, "forward": forward_kl}
RECORDED = RESULTS / "top_k_memory_cpu"
TABLE = "benchmark.csv"


def memory() -> pd.DataFrame:
    """Peak bytes by method, with the sizes that they were measured at."""
    return recorded_table(RECORDED, TABLE).set_index("method")


def form(name: str, logits: Tensor, ref_logits: Tensor, top_k: int) -> Tensor:
    """[...], nats: a form of :data:`FORMS` on the teacher's top k."""
    value = top_k_divergence(logits, ref_logits, top_k=top_k, **FORMS[name])
    return value.clamp_min(0.0) if name == "clamped forward" else value


def slope(name: str, logits: Tensor, ref_logits: Tensor, top_k: int) -> Tensor:
    """[V]: the gradient of a form by the logits."""
    leaf = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(form(name, leaf, ref_logits, top_k).sum(), leaf)[0]


def teacher_and_student(vocab: int, *, sharpness: float, seed: int) -> tuple[Tensor, Tensor]:
    """Logits [V] of a teacher and of a student that starts elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    teacher, student = torch.randn(2, vocab, generator=generator, dtype=torch.float64)
    return sharpness * teacher, 0.5 * sharpness * teacher + student


def mass(logits: Tensor, tokens: Tensor) -> Tensor:
    """[...]: the probability of some tokens."""
    return logits.softmax(-1).gather(-1, tokens).sum(-1)


# --- Where training ends ------------------------------------------------------------------------


def plain_end(teacher_mass: float) -> dict[str, float]:
    r"""The student's mass on :math:`S` where a plain sum is least, by direction.

    .. math:: m^\ast = \frac{P}{e} \;(\text{reverse}), \qquad m^\ast \to 1 \;(\text{forward})

    Equation: ``plain_end``
    """
    return {"reverse": teacher_mass / math.e, "forward": 1.0}


def mass_parts(logits: Tensor, ref_logits: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    r"""A plain sum as a KL inside :math:`S` and a term of the masses.

    .. math:: \sum_{a \in S} \pi_\theta \log \frac{\pi_\theta}{\pi_{\mathrm{ref}}}
        = m\, \mathrm{KL}(\pi_S \Vert \rho_S) + m \log \frac{m}{P}, \\
        \sum_{a \in S} \pi_{\mathrm{ref}} \log \frac{\pi_{\mathrm{ref}}}{\pi_\theta}
        = P\, \mathrm{KL}(\rho_S \Vert \pi_S) - P \log \frac{m}{P}

    with :math:`\pi_S, \rho_S` the two policies renormalised over :math:`S`.

    Equation: ``mass_parts``

    Args:
        logits, ref_logits: [V].
        tokens: [k].

    Returns:
        Direction -> [2], nats: the KL inside and the term of the masses.
    """
    own, reference = mass(logits, tokens), mass(ref_logits, tokens)
    gap = (own / reference).log()
    inside = {name: kl(logits[tokens], ref_logits[tokens]) for name, kl in FULL.items()}
    return {
        "reverse": torch.stack([own * inside["reverse"], own * gap]),
        "forward": torch.stack([reference * inside["forward"], -reference * gap]),
    }


def mass_slope(logits: Tensor, tokens: Tensor) -> Tensor:
    r"""[V]: what a plain sum adds to the corrected gradient; minus it in the forward direction.

    .. math:: \frac{\partial m}{\partial z_a} = \pi_\theta(a) \big([a \in S] - m\big), \qquad
        \sum_a \Big|\frac{\partial m}{\partial z_a}\Big| = 2 m (1 - m)

    Equation: ``mass_slope``
    """
    inside = torch.zeros_like(logits).index_fill(0, tokens, 1.0)
    return logits.softmax(-1) * (inside - mass(logits, tokens))


def mass_held(own: Tensor, teacher: Tensor, correction: str) -> Tensor:
    r"""What a corrected reverse sum charges for a student's mass m where the teacher has P.

    .. math:: \text{unnormalised:} \quad m \log \frac mP - m + P \\
        \text{tail:} \quad m \log \frac mP + (1 - m) \log \frac{1 - m}{1 - P}

    beside :math:`m\, \mathrm{KL}(\pi_S \Vert \rho_S)`.

    Equation: ``mass_held``

    Args:
        own, teacher: masses of the tokens in the sum, between zero and one.
        correction: ``unnormalised`` or ``tail``.
    """
    gap = own * (own / teacher).log()
    if correction == "unnormalised":
        return gap - own + teacher
    return gap + (1 - own) * ((1 - own) / (1 - teacher)).log()


def descend(
    teacher: Tensor, student: Tensor, top_k: int, *, steps: int, rate: float
) -> pd.DataFrame:
    """Gradient descent on the logits under every form: the student's mass and its KL, by step.

    Returns:
        A row per form and power of two: ``form``, ``step``, ``mass`` and ``kl`` (reverse, nats).
    """
    tokens, rows = top_k_tokens(teacher, top_k), []
    shown = {0, *(2**x for x in range(steps.bit_length())), steps}
    for name in FORMS:
        logits = student.clone()
        for step in range(steps + 1):
            if step in shown:
                kl, own = reverse_kl(logits, teacher).item(), mass(logits, tokens).item()
                rows.append({"form": name, "step": step, "mass": own, "kl": kl})
            logits = logits - rate * slope(name, logits, teacher, top_k)
    return pd.DataFrame(rows)


# --- What is left out ---------------------------------------------------------------------------


def lost(logits: Tensor, ref_logits: Tensor, top_k: int, direction: str, correction: str) -> float:
    """Sum over the logits of the absolute difference between the full gradient and the form's."""
    leaf = logits.detach().clone().requires_grad_()
    how: dict[str, Any] = {"top_k": top_k, "direction": direction, "correction": correction}
    gap = FULL[direction](leaf, ref_logits) - top_k_divergence(leaf, ref_logits, **how)
    return float(torch.autograd.grad(gap, leaf)[0].abs().sum())


def lost_tail(logits: Tensor, ref_logits: Tensor, top_k: int) -> dict[str, float]:
    r"""What the sum with a tail leaves out of the gradient, by direction: all of it in the tail.

    .. math:: \text{forward:} \quad (1 - P)\, \lVert \rho_R - \pi_R \rVert_1 \le 2\, (1 - P) \\
        \text{reverse:} \quad (1 - m) \Big(m D + \sum_a \pi_R(a)\,
        \Big|\log \frac{\pi_R(a)}{\rho_R(a)} - (1 - m) D\Big|\Big), \\
        D = \mathrm{KL}(\pi_R \Vert \rho_R)

    with :math:`\pi_R, \rho_R` the policies renormalised over the tokens that are left out.

    Equation: ``lost_tail``
    """
    rest = torch.ones_like(logits, dtype=torch.bool)
    rest[top_k_tokens(ref_logits, top_k)] = False
    own, reference = logits.softmax(-1), ref_logits.softmax(-1)
    m, p = 1 - own[rest].sum(), 1 - reference[rest].sum()
    log_ratio = logits[rest].log_softmax(-1) - ref_logits[rest].log_softmax(-1)
    of_rest = logits[rest].softmax(-1)
    inside = of_rest @ log_ratio
    apart = (of_rest - ref_logits[rest].softmax(-1)).abs().sum()
    reverse = (1 - m) * (m * inside + of_rest @ (log_ratio - (1 - m) * inside).abs())
    return {"forward": float((1 - p) * apart), "reverse": float(reverse)}


def lost_table(teacher: Tensor, student: Tensor, counts: Iterable[int]) -> pd.DataFrame:
    """Over k: the teacher's mass left out, and the share of the gradient lost, by form."""
    rows = []
    for top_k in counts:
        left = 1 - mass(teacher, top_k_tokens(teacher, top_k)).item()
        for direction in FULL:
            leaf = student.clone().requires_grad_()
            whole = torch.autograd.grad(FULL[direction](leaf, teacher), leaf)[0].abs().sum()
            for correction in ("none", "unnormalised", "tail"):
                share = lost(student, teacher, top_k, direction, correction) / float(whole)
                row = {"top_k": top_k, "left_out": left, "direction": direction}
                rows.append(row | {"correction": correction, "lost": share})
    return pd.DataFrame(rows)


# --- The policy's own top k, and a sampled token --------------------------------------------------


def false_zero(ref_logits: Tensor, tokens: Tensor) -> Tensor | None:
    r"""[V]: a policy whose own top k are these tokens, at the teacher's probabilities.

    .. math:: \pi(a) = \pi_{\mathrm{ref}}(a) \;(a \in S), \qquad
        \pi(a) = \frac{1 - P}{V - k} \;(a \notin S)

    On its own top k the corrected sums are zero there. It exists if and only if
    :math:`(V - k) \min_{a \in S} \pi_{\mathrm{ref}}(a) \ge 1 - P`; None where it does not.

    Equation: ``false_zero``
    """
    reference = ref_logits.softmax(-1)
    kept = reference[tokens]
    even = (1 - kept.sum()) / (len(reference) - len(tokens))
    if kept.min() < even:
        return None
    return even.expand(len(reference)).index_put((tokens,), kept)


def one_token_divergence(logits: Tensor, ref_logits: Tensor, sampler: Tensor) -> Tensor:
    r"""The mean over a sampled token of the KL of two coins: this token, or any other.

    .. math:: \sum_y \mu(y) \Big(\pi_\theta(y) \log \frac{\pi_\theta(y)}{\pi_{\mathrm{ref}}(y)}
        + \big(1 - \pi_\theta(y)\big) \log \frac{1 - \pi_\theta(y)}{1 - \pi_{\mathrm{ref}}(y)}\Big)

    Equation: ``one_token_divergence``

    Args:
        logits, ref_logits: [V].
        sampler: [V], probabilities, constant.
    """
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    own, other = logp.exp(), ref_logp.exp()
    rest = torch.log1p(-own) - torch.log1p(-other)
    return sampler @ (own * (logp - ref_logp) + (1 - own) * rest)


# --- What it draws ------------------------------------------------------------------------------

_COLOURS = dict(zip(FORMS, ("k2", "k3", "k3_clip", "k4", "minimax01", "exact"), strict=True))


def draw(table: pd.DataFrame, teacher_mass: float) -> Figure:
    """The student's mass on the teacher's top k over training, a line a form."""
    figure, axes = style.subplots(height=4.4)
    for name, colour in _COLOURS.items():
        found = table[table.form == name]
        axes.plot(found.step.clip(lower=0.5), found.mass, **style.line(colour, label=name))
    style.guide(axes, y=teacher_mass)
    axes.set_xscale("log")
    axes.set(xlabel="step, log scale", ylabel="student's mass on the teacher's top k")
    axes.set_ylim(0, 1.05)
    axes.legend(loc="lower left", ncols=2, fontsize=10)
    return figure


_LOST: Mapping[str, str] = {"none": "k2", "unnormalised": "k3", "tail": "exact"}


def draw_lost(table: pd.DataFrame) -> Figure:
    """The share of the full gradient that a form loses over k, by direction."""
    figure, panels = style.subplots(1, 2, height=3.9, sharey=True)
    for axes, direction in zip(panels, FULL, strict=True):
        for correction, colour in _LOST.items():
            found = table[(table.direction == direction) & (table.correction == correction)]
            label = "plain" if correction == "none" else correction
            axes.plot(found.top_k, found.lost, **style.line(colour, label=label))
        axes.set(title=f"{direction} KL", xlabel="k")
    panels[0].set_ylabel("gradient lost, share of the full one")
    panels[1].legend(loc="upper right", fontsize=10)
    return figure
