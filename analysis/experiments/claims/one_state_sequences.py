"""Claims of this theme that need more than one state: ragged sequences, enumerated."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from analysis.experiments.chapters.fixed_points import (
    OPTIMA,
    ascent_ends,
    random_problems,
    random_starts,
    sequence_ascent,
    sequence_optimum,
)
from analysis.experiments.chapters.gradients import random_policies
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.one_state_gradients import EXACT, error_to, stale
from analysis.experiments.claims.recorded import difference, recorded
from analysis.kl.enumeration import relative_error
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from analysis.kl.surrogates import kl_loss
from analysis.kl.term import KLTerm
from analysis.objectives.losses import policy_loss


@cache
def ragged() -> tuple[Sequences, Tensor, Tensor, Tensor]:
    """Sequences of up to three tokens with an end token; policy, reference and older policy."""
    sequences = enumerate_sequences(3, 3, eos=2)
    draws = random_policies(2, sequences.num_states * 3, spread=1.0, seed=6)
    tables = [x.unflatten(-1, (sequences.num_states, 3)) for x in draws]
    return sequences, tables[0][0], tables[1][0], tables[0][0] + 0.5 * tables[0][1]


def equation_3_gradient(old_table: Tensor, advantages: Tensor, *, beta: float) -> Tensor:
    """Ascent direction of DeepSeekMath's eq. 3 by autograd: clipped surrogate minus beta k3, mean
    over tokens, then expectation over the sequences that ``old_table`` samples."""
    sequences, table, ref_table, _ = ragged()
    leaf = table.clone().requires_grad_(True)
    logp = token_logp(leaf, sequences)
    old_logp, ref_logp = (token_logp(x, sequences) for x in (old_table, ref_table))
    surrogate = policy_loss(
        logp, old_logp=old_logp, advantages=advantages, mask=sequences.mask
    ).per_token
    penalty = kl_loss(logp, ref_logp, estimator="k3", mask=sequences.mask)
    lengths = sequences.mask.sum(-1)
    per_sequence = (-surrogate - beta * penalty).sum(-1) / lengths
    objective = (sequence_probability(old_table, sequences) * per_sequence).sum()
    (gradient,) = torch.autograd.grad(objective, leaf)
    return gradient.flatten()


def equation_21_gradient(
    old_table: Tensor, advantages: Tensor, *, beta: float, sign: float = 1.0, mean: bool = True
) -> Tensor:
    """The same direction by hand: each token's score times ``A + beta (pi_ref / pi - 1)``."""
    sequences, table, ref_table, _ = ragged()
    logp, ref_logp = (token_logp(x, sequences) for x in (table, ref_table))
    coefficient = advantages.unsqueeze(-1) + sign * beta * torch.expm1(ref_logp - logp)
    weight = sequence_probability(old_table, sequences).unsqueeze(-1) * sequences.mask
    if mean:
        weight = weight / sequences.mask.sum(-1, keepdim=True)
    score = torch.nn.functional.one_hot(sequences.tokens, table.shape[-1])
    score = score - table.softmax(-1)[sequences.states]
    terms = (weight * coefficient).unsqueeze(-1) * score
    rows = torch.zeros_like(table)
    return rows.index_add(0, sequences.states.flatten(), terms.flatten(0, 1)).flatten()


@decides("S2-6")
def gradient_coefficient_of_grpo() -> Finding:
    """Autograd through eq. 3 against eq. 21 by hand, on ragged sequences, fresh and stale."""
    sequences, table, _, old_table = ragged()
    generator = torch.Generator().manual_seed(7)
    advantages = torch.randn(len(sequences.tokens), generator=generator, dtype=torch.float64)
    fresh = equation_3_gradient(table, advantages, beta=0.5)
    old = equation_3_gradient(old_table, advantages, beta=0.5)

    def error(exact: Tensor, sampler: Tensor, **change: object) -> float:
        by_hand = equation_21_gradient(sampler, advantages, beta=0.5, **change)
        return relative_error(by_hand, exact).item()

    figures = {
        "fresh": error(fresh, table),
        "stale": error(old, old_table),
        "sign_flipped": error(fresh, table, sign=-1.0),
        "without_length": error(fresh, table, mean=False),
    }
    right = figures["fresh"] < EXACT < figures["sign_flipped"]
    return Finding(settle(right and figures["stale"] < EXACT, right), figures)


@decides("S3-15")
def kdrl_prefers_k2() -> Finding:
    """k2 and k3 losses against the exact gradient: one state, stale samples, whole sequences; and
    recorded: accuracy of k3 minus k2 beside GRPO."""
    sequences, table, teacher, _ = ragged()
    exact = sequence_kl_gradient(table, teacher, sequences).flatten()

    def over_sequences(estimator: str, level: str) -> float:
        gradient = expected_sequence_gradient(
            table, teacher, sequences, estimator=estimator, level=level
        )
        return relative_error(gradient.flatten(), exact).item()

    figures = {
        "k2": error_to("reverse", "k2").max().item(),
        "k3": error_to("reverse", "k3").median().item(),
        "k2_stale": error_to("reverse", "k2", stale()).median().item(),
        "k2_tokens": over_sequences("k2", "token"),
        "k2_sequence": over_sequences("k2", "sequence"),
    }
    trained = difference(recorded("kdrl").finals, "kdrl_k3", "kdrl_k2", "own_accuracy")
    figures |= trained.figures("trained_k3_minus_k2")
    always = max(figures["k2_stale"], figures["k2_tokens"]) < EXACT
    return Finding(settle(always, figures["k2"] < EXACT < figures["k3"]), figures)


@decides("S4-20")
def fixed_points_of_the_kl_terms() -> Finding:
    """Exact ascent from three starts against the closed forms; then over two-token sequences,
    where the k2 loss per token meets a reward for the whole."""
    problems = random_problems(12, 6, spread=0.5, reward_spread=0.5, seed=8)
    starts = random_starts(problems, 3, spread=1.0, seed=9)
    figures = {}
    for name, arm in (
        ("k1_reward", KLTerm(estimator="k1", placement="reward")),
        ("k2_loss", KLTerm(estimator="k2")),
        ("k3_loss", KLTerm(estimator="k3")),
    ):
        ends = ascent_ends(problems, starts, arm, beta=1.0, steps=400, step_size=0.6)
        closed = OPTIMA[arm](*problems, beta=1.0).exp()
        figures[name] = (ends - closed).abs().max().item()
    sequences = enumerate_sequences(2, 2)
    ref_table = torch.tensor([[0.5, -0.5], [2.0, -2.0], [0.0, 0.5]], dtype=torch.float64)
    rewards = torch.tensor([0.0, 2.0, 1.0, -1.0], dtype=torch.float64)
    optimum = sequence_optimum(rewards, ref_table, sequences, beta=1.0)
    for name, arm in (
        ("k2_tokens", {"estimator": "k2", "level": "token"}),
        ("k2_sequence", {"estimator": "k2", "level": "sequence"}),
    ):
        end = sequence_ascent(
            rewards, ref_table, sequences, beta=1.0, steps=200, step_size=3.0, **arm
        )
        figures[name] = (end - optimum).abs().max().item()
    one_state = max(figures[k] for k in ("k1_reward", "k2_loss", "k3_loss")) < 1e-9
    return Finding(settle(one_state and figures["k2_tokens"] < 1e-6, one_state), figures)
