"""Where each KL term lets training stop: closed forms against exact ascent, chapter 5."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.ascent import Geometry, expected_ascent, token_advantage
from analysis.kl.fixed_points import (
    euclidean_optimum,
    forward_kl_optimum,
    penalty_equilibrium,
    reverse_kl_optimum,
)
from analysis.kl.sequences import (
    Sequences,
    expected_sequence_gradient,
    sequence_probability,
    token_logp,
)
from analysis.kl.term import KLTerm

#: Below this probability a token counts as given up at the end of an ascent.
GIVEN_UP = 1e-12

#: Two ends closer than this in every probability are the same end.
SAME_POLICY = 5e-3

Optimum = Callable[..., Tensor]

#: What each arm is claimed to converge to; the penalties' ends depend on who survives.
OPTIMA: dict[KLTerm, Optimum] = {
    KLTerm(estimator="k2"): reverse_kl_optimum,
    KLTerm(estimator="k1", placement="reward"): reverse_kl_optimum,
    KLTerm(estimator="k3", weighting="attached"): reverse_kl_optimum,
    KLTerm(estimator="k3"): forward_kl_optimum,
    KLTerm(estimator="k4"): forward_kl_optimum,
    KLTerm(estimator="minimax01"): euclidean_optimum,
}
PENALTIES = (KLTerm(estimator="k2", placement="reward"), KLTerm(estimator="k3", placement="reward"))
CLIPPED = KLTerm(estimator="k3_clip")
ENDS = (*OPTIMA, CLIPPED, *PENALTIES)


class Problems(NamedTuple):
    """Independent one-state problems, one a row."""

    rewards: Tensor  #: [N, V], one a token
    ref_logits: Tensor  #: [N, V]


def random_problems(
    count: int, vocab_size: int, *, spread: float, reward_spread: float, seed: int
) -> Problems:
    """Gaussian reference logits of standard deviation ``spread``, rewards of ``reward_spread``."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(2, count, vocab_size, generator=generator, dtype=torch.float64)
    return Problems(reward_spread * draws[0], spread * draws[1])


def random_starts(problems: Problems, count: int, *, spread: float, seed: int) -> Tensor:
    """[count, N, V] logits: the reference itself, then policies drawn away from it."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, *problems.ref_logits.shape, generator=generator, dtype=torch.float64)
    noise[0] = 0.0
    return problems.ref_logits + spread * noise


def ascent_ends(
    problems: Problems,
    starts: Tensor,
    arm: KLTerm,
    *,
    beta: float,
    steps: int,
    step_size: float,
    geometry: Geometry = "natural",
) -> Tensor:
    """[S, N, V] probabilities where exact ascent on an arm ends, from each start."""
    rewards, ref_logits = (x.expand_as(starts) for x in problems)
    return expected_ascent(
        starts,
        rewards,
        ref_logits,
        beta=beta,
        steps=steps,
        step_size=step_size,
        geometry=geometry,
        **arm.at_one_state,
    ).exp()


def predicted_ends(problems: Problems, ends: Tensor, arm: KLTerm, *, beta: float) -> Tensor:
    """[S, N, V] probabilities that the closed form gives; NaN where the arm has none.

    Penalties and clipped k3 have one equilibrium for each surviving set: the set is read from
    ``ends``, the probabilities on it are not.
    """
    if arm in OPTIMA:
        return OPTIMA[arm](*problems, beta=beta).exp().expand_as(ends)
    if arm == CLIPPED:
        return _cut_forward_optimum(problems, ends > GIVEN_UP, beta=beta)
    if arm in PENALTIES:
        rewards, ref_logits = (x.expand_as(ends) for x in problems)
        return penalty_equilibrium(
            rewards, ref_logits, ends > GIVEN_UP, beta=beta, estimator=arm.estimator
        ).exp()
    return torch.full_like(ends, torch.nan)


def _cut_forward_optimum(problems: Problems, support: Tensor, *, beta: float) -> Tensor:
    """``beta ref / (lambda - R)`` on the survivors alone; their share of ref scales beta."""
    rewards, ref_logits = (x.expand_as(support) for x in problems)
    cut = torch.where(support, ref_logits.log_softmax(-1), -torch.inf)
    share = cut.exp().sum(-1, keepdim=True)
    return forward_kl_optimum(rewards / share, cut, beta=beta).exp()


def ends_table(
    problems: Problems,
    starts: Tensor,
    arms: Iterable[KLTerm] = ENDS,
    *,
    beta: float,
    steps: int,
    step_size: float,
) -> pd.DataFrame:
    """Where exact ascent ends, arm by arm, against the closed forms.

    Columns: ``share_unique``, the share of problems whose starts all end at the same policy;
    ``error``, the largest disagreement in probability with the closed form where there is one;
    ``residual``, the largest force left on a token that survives; ``given_up``, the share of
    tokens that do not survive; ``share_below``, the share of ends with a survivor less likely than
    under the reference; ``reward``, the mean reward.
    """
    rows = []
    for arm in arms:
        ends = ascent_ends(problems, starts, arm, beta=beta, steps=steps, step_size=step_size)
        error = (ends - predicted_ends(problems, ends, arm, beta=beta)).abs()
        apart = (ends - ends[:1]).abs().amax((0, -1))
        survives = ends > GIVEN_UP
        below = survives & (ends < problems.ref_logits.softmax(-1) * (1 - 1e-9))
        rows.append(
            {
                **arm.at_one_state,
                "share_unique": (apart < SAME_POLICY).double().mean().item(),
                "error": error.nan_to_num(-1.0).max().item() if error.isfinite().any() else None,
                "residual": residual(ends, problems, arm, beta=beta).max().item(),
                "given_up": (~survives).double().mean().item(),
                "share_below": below.any(-1).double().mean().item(),
                "reward": (ends * problems.rewards).sum(-1).mean().item(),
            }
        )
    return pd.DataFrame(rows)


def residual(policies: Tensor, problems: Problems, arm: KLTerm, *, beta: float) -> Tensor:
    """[S, N]: the largest ``pi(a) |A(a) - A(b)|`` among surviving tokens; zero at a fixed point."""
    rewards, ref_logits = (x.expand_as(policies) for x in problems)
    advantage = token_advantage(policies.log(), rewards, ref_logits, beta=beta, **arm.at_one_state)
    policy = torch.where(policies > GIVEN_UP, policies, 0.0)
    alive = torch.where(policy > 0, advantage, 0.0)
    centre = (policy * alive).sum(-1, keepdim=True) / policy.sum(-1, keepdim=True)
    return (policy * (alive - centre)).abs().amax(-1)


def greedy_share(problems: Problems, arm: KLTerm, *, beta: float, steps: int) -> float:
    """Smallest probability of the best token after exact ascent from the reference."""
    ends = ascent_ends(
        problems, problems.ref_logits[None], arm, beta=beta, steps=steps, step_size=1.0
    )
    best = problems.rewards.argmax(-1, keepdim=True)
    return ends[0].gather(-1, best).min().item()


#: The laws of the tilt figure, with the arm that is ascended to check each.
LAWS: dict[str, tuple[KLTerm, Optimum]] = {
    "k2": (KLTerm(estimator="k2"), reverse_kl_optimum),
    "k3": (KLTerm(estimator="k3"), forward_kl_optimum),
    "minimax01": (KLTerm(estimator="minimax01"), euclidean_optimum),
}


def tilt_curves(gaps: Tensor, *, beta: float, best_share: float, steps: int) -> pd.DataFrame:
    """How much of its reference probability a token keeps, against how far its reward is behind.

    For each gap a two-token state: the best token has reference probability ``best_share``.
    Columns ``closed`` and ``ascent`` hold ``pi / ref`` of the other token by the two routes.
    """
    rewards = torch.stack([torch.zeros_like(gaps), -gaps], dim=-1)
    share = torch.tensor([best_share, 1 - best_share], dtype=gaps.dtype)
    ref_logits = share.log().expand_as(rewards)
    frames = []
    for law, (arm, optimum) in LAWS.items():
        ends = ascent_ends(
            Problems(rewards, ref_logits),
            ref_logits[None],
            arm,
            beta=beta,
            steps=steps,
            step_size=0.5 * min(1.0, 1.0 / (beta + gaps.max().item())),
        )[0]
        closed = optimum(rewards, ref_logits, beta=beta).exp()
        frames.append(
            pd.DataFrame(
                {
                    "law": law,
                    "gap": gaps,
                    "closed": closed[:, 1] / share[1],
                    "ascent": ends[:, 1] / share[1],
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def sequence_ascent(
    rewards: Tensor,
    ref_table: Tensor,
    sequences: Sequences,
    *,
    beta: float,
    steps: int,
    step_size: float,
    **choice: str,
) -> Tensor:
    """[N] probabilities of all sequences after plain ascent on ``E[R] - beta KL term``.

    The reward belongs to the whole sequence; ``choice`` says how the KL term is built, as in
    :func:`analysis.kl.sequences.expected_sequence_gradient`. Starts at the reference.
    """
    table = ref_table.clone()
    for _ in range(steps):
        leaf = table.detach().requires_grad_(True)
        mean_reward = (sequence_probability(leaf, sequences) * rewards).sum()
        (ascend,) = torch.autograd.grad(mean_reward, leaf)
        descend = expected_sequence_gradient(table, ref_table, sequences, **choice)
        table = table + step_size * (ascend - beta * descend)
    return sequence_probability(table, sequences)


def sequence_optimum(
    rewards: Tensor, ref_table: Tensor, sequences: Sequences, *, beta: float
) -> Tensor:
    """[N] probabilities of all sequences under :func:`reverse_kl_optimum`, one token a sequence."""
    ref_logp = token_logp(ref_table, sequences).sum(-1)
    return reverse_kl_optimum(rewards, ref_logp, beta=beta).exp()
