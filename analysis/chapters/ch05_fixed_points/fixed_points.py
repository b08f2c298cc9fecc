"""Where exact ascent ends under each KL term, against the closed forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import Finding, claim, judge, largest, share
from analysis.evidence.policies import normal_draws
from kl_term.kl.ascent import expected_ascent
from kl_term.kl.fixed_points import (
    euclidean_optimum,
    forward_kl_optimum,
    penalty_equilibrium,
    reverse_kl_optimum,
)
from kl_term.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_probability,
    token_logp,
)
from kl_term.kl.term import KLTerm

#: Below this probability a token counts as given up at the end of an ascent.
GIVEN_UP = 1e-12

#: Two ends closer than this in every probability are the same end.
SAME_POLICY = 5e-3

#: What each variant is claimed to converge to; the penalties' ends depend on who survives.
OPTIMA: dict[KLTerm, Callable[..., Tensor]] = {
    KLTerm(estimator="k2"): reverse_kl_optimum,
    KLTerm(estimator="k1", placement="reward"): reverse_kl_optimum,
    KLTerm(estimator="k3", weighting="attached"): reverse_kl_optimum,
    KLTerm(estimator="k3"): forward_kl_optimum,
    KLTerm(estimator="k4"): forward_kl_optimum,
    KLTerm(estimator="minimax01"): euclidean_optimum,
}
CLIPPED = KLTerm(estimator="k3_clip")
#: The variants whose ends have a closed form.
SOLVED = (*OPTIMA, CLIPPED, *(KLTerm(estimator=k, placement="reward") for k in ("k2", "k3")))


class Problems(NamedTuple):
    """Independent one-state problems, one a row."""

    rewards: Tensor  #: [N, V], one a token
    ref_logits: Tensor  #: [N, V]


def random_problems(
    count: int, vocab_size: int, *, spread: float, reward_spread: float, seed: int
) -> Problems:
    """Gaussian reference logits of standard deviation ``spread``, rewards of ``reward_spread``."""
    draws = normal_draws((2, count, vocab_size), seed=seed)
    return Problems(reward_spread * draws[0], spread * draws[1])


def random_starts(problems: Problems, count: int, *, spread: float, seed: int) -> Tensor:
    """[count, N, V] logits: the reference itself, then policies drawn away from it."""
    noise = normal_draws((count, *problems.ref_logits.shape), seed=seed)
    noise[0] = 0.0
    return problems.ref_logits + spread * noise


def ascent_ends(problems: Problems, starts: Tensor, variant: KLTerm, **options: object) -> Tensor:
    """[S, N, V] probabilities where exact ascent ends, from each start; ``options`` of
    :func:`kl_term.kl.ascent.expected_ascent`."""
    rewards, ref_logits = (x.expand_as(starts) for x in problems)
    return expected_ascent(starts, rewards, ref_logits, **variant.at_one_state, **options).exp()


def predicted_ends(problems: Problems, ends: Tensor, variant: KLTerm, *, beta: float) -> Tensor:
    """[S, N, V] probabilities that the closed form gives for one of ``SOLVED``.

    Of penalties and clipped k3 the surviving set is read from ``ends``, not the probabilities on
    it.
    """
    if variant in OPTIMA:
        return OPTIMA[variant](*problems, beta=beta).exp().expand_as(ends)
    rewards, ref_logits = (x.expand_as(ends) for x in problems)
    alive = ends > GIVEN_UP
    if variant == CLIPPED:  # beta ref / (lambda - R) on the survivors: their share scales beta
        cut = torch.where(alive, ref_logits.log_softmax(-1), -torch.inf)
        return forward_kl_optimum(rewards / cut.exp().sum(-1, keepdim=True), cut, beta=beta).exp()
    return penalty_equilibrium(
        rewards, ref_logits, alive, beta=beta, estimator=variant.estimator
    ).exp()


def ends_table(
    problems: Problems, starts: Tensor, variants: Iterable[KLTerm], **options: float
) -> pd.DataFrame:
    """Where exact ascent ends, variant by variant, against the closed forms.

    ``share_unique``: the problems whose starts all end at one policy; ``error``: the largest
    disagreement in probability with the closed form; ``given_up``: the tokens that do not survive;
    ``share_below``: the ends with a survivor less likely than under the reference.
    """
    rows, beta = [], options["beta"]
    for variant in variants:
        ends = ascent_ends(problems, starts, variant, **options)
        predicted = predicted_ends(problems, ends, variant, beta=beta)
        survives = ends > GIVEN_UP
        below = survives & (ends < problems.ref_logits.softmax(-1) * (1 - 1e-9))
        rows.append(
            {
                **variant.at_one_state,
                "share_unique": share((ends - ends[:1]).abs().amax((0, -1)) < SAME_POLICY),
                "error": np.nanmax((ends - predicted).abs().numpy()),
                "given_up": share(~survives),
                "share_below": share(below.any(-1)),
                "reward": (ends * problems.rewards).sum(-1).mean().item(),
            }
        )
    return pd.DataFrame(rows)


@claim("S4-20")
def fixed_points_of_the_kl_terms() -> Finding:
    """Exact ascent from three starts against the closed forms; then over two-token sequences,
    where the k2 loss per token meets a reward for the whole."""
    problems = random_problems(12, 6, spread=0.5, reward_spread=0.5, seed=8)
    starts = random_starts(problems, 3, spread=1.0, seed=9)
    k1_reward = KLTerm(estimator="k1", placement="reward")
    terms = (k1_reward, KLTerm(estimator="k2"), KLTerm(estimator="k3"))
    table = ends_table(problems, starts, terms, beta=1.0, steps=400, step_size=0.6)
    figures = dict(zip(("k1_reward", "k2_loss", "k3_loss"), table.error, strict=True))
    sequences = enumerate_sequences(2, 2)
    ref_table = torch.tensor([[0.5, -0.5], [2.0, -2.0], [0.0, 0.5]], dtype=torch.float64)
    rewards = torch.tensor([0.0, 2.0, 1.0, -1.0], dtype=torch.float64)
    ref_logp = token_logp(ref_table, sequences).sum(-1)
    optimum = reverse_kl_optimum(rewards, ref_logp, beta=1.0).exp()
    ascend = grad(lambda at: sequence_probability(at, sequences) @ rewards)
    for name, level in (("k2_tokens", "token"), ("k2_sequence", "sequence")):
        end, choice = ref_table, {"estimator": "k2", "level": level}
        for _ in range(200):
            descend = expected_sequence_gradient(end, ref_table, sequences, **choice)
            end = end + 3.0 * (ascend(end) - descend)
        figures[name] = largest(sequence_probability(end, sequences) - optimum)
    one_state = table.error.max() < 1e-9
    return Finding(judge(one_state and figures["k2_tokens"] < 1e-6, one_state), figures)
