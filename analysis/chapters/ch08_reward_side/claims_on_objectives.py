"""Claims on the objective of GRPO: its forms, sums over tokens, partial rollouts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.chapters.ch08_reward_side.process import credit_gradient
from analysis.evidence.claims import EXACT, Finding, claim, judge, largest
from analysis.evidence.length_weights import weight_errors
from analysis.evidence.policies import (
    RAGGED,
    SPREAD,
    by_token,
    flat_error,
    measured,
    moved_logits,
    random_returns,
    random_tables,
)
from analysis.evidence.reasoning import (
    fixed_length_chain,
    state_values,
)
from analysis.evidence.recorded import difference, recorded
from kl_term.kl.credit import credit_moments
from kl_term.kl.estimators import k3
from kl_term.kl.ratio_objectives import ratio_objective_gradient
from kl_term.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from kl_term.kl.surrogates import kl_loss
from kl_term.objectives.advantages import (
    group_normalise,
)
from kl_term.objectives.aggregation import aggregate, token_weights
from kl_term.objectives.filtering import repeats
from kl_term.objectives.guidance import current_segment
from kl_term.objectives.lengths import length_penalty, relative_length_reward
from kl_term.objectives.losses import policy_loss

BETA = 0.04


EPSILON = 0.2


def _batch(seed: int) -> tuple[Tensor, ...]:
    """Log-probs of policy, sampler and reference, advantages and a ragged mask: 6 rows of 5."""
    generator = torch.Generator().manual_seed(seed)
    logp, old_logp, ref_logp = -torch.rand(3, 6, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([5, 3, 1, 4, 2, 5])
    return logp, old_logp, ref_logp, advantages, torch.arange(5) < lengths[:, None]


def _token_objective(
    logp: Tensor, old_logp: Tensor, ref_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The token form by the package: loss and k3, aggregated as the printed sums are."""
    loss = policy_loss(logp, old_logp=old_logp, advantages=advantages, mask=mask).loss
    penalty = aggregate(kl_loss(logp, ref_logp, mask=mask), mask, "seq_mean_token_mean")
    return -(loss + BETA * penalty)


@claim("S0-1")
def grpo_objective() -> Finding:
    """The printed double sum, token by token in Python, against the package; garbage as padding."""
    logp, old_logp, ref_logp, advantages, mask = _batch(141)
    rows = []
    for i, advantage in enumerate(advantages.tolist()):
        terms = []
        for t in range(int(mask[i].sum())):
            ratio = math.exp(logp[i, t] - old_logp[i, t])
            log_r = float(ref_logp[i, t] - logp[i, t])
            kl = math.exp(log_r) - log_r - 1
            clipped = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
            terms.append(min(ratio * advantage, clipped * advantage) - BETA * kl)
        rows.append(sum(terms) / len(terms))
    printed = sum(rows) / len(rows)
    ours = _token_objective(logp, old_logp, ref_logp, advantages, mask).item()
    padding = zip((logp, old_logp, ref_logp), (torch.nan, -torch.inf, 1e9), strict=True)
    garbage = [torch.where(mask, x, g) for x, g in padding]
    padded = _token_objective(*garbage, advantages, mask).item()
    flipped = _token_objective(logp, old_logp, 2 * logp - ref_logp, advantages, mask).item()
    figures = {
        "printed_error": abs(ours - printed),
        "padding_change": abs(padded - ours),
        "flipped_kl_error": abs(flipped - printed),
    }
    agrees = max(figures["printed_error"], figures["padding_change"]) < EXACT
    return Finding(judge(agrees, figures["printed_error"] < EXACT), figures)


@claim("S1-1")
def sequence_form() -> Finding:
    """The printed sequence form by hand against the package, and its k3's mean and gradient
    against both KLs of sequences."""
    logp, old_logp, _, advantages, mask = _batch(151)
    ratio = torch.where(mask, logp - old_logp, 0.0).sum(-1).exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    printed = torch.minimum(ratio * advantages, clipped * advantages).mean()
    options = {"advantages": advantages, "mask": mask, "kind": "sequence"}
    ours = -policy_loss(logp, old_logp=old_logp, **options).loss

    def of_k3(logits: Tensor, ref: Tensor) -> dict[str, float | Tensor]:
        """Errors of the mean and of the gradient of k3 on whole sequences."""
        per_sequence = k3(*(token_logp(x, RAGGED).sum(-1) for x in (logits, ref)))
        mean = sequence_probability(logits, RAGGED) @ per_sequence
        gradient = expected_sequence_gradient(logits, ref, RAGGED, estimator="k3", level="sequence")
        return {"value": (mean - sequence_kl(logits, ref, RAGGED)).abs()} | {
            way: flat_error(gradient, sequence_kl_gradient(logits, ref, RAGGED, direction=way))
            for way in ("forward", "reverse")
        }

    found = measured(of_k3, *random_tables(RAGGED, 3, 4, spread=SPREAD, seed=152))
    figures = {
        "printed_error": (ours - printed).abs().item(),
        "value_error": found.value.max(),
        "forward_gradient_error": found.forward.max(),
        "reverse_gradient_error": found.reverse.min(),
    }
    defined = max(figures["printed_error"], figures["value_error"]) < EXACT
    return Finding(judge(defined and figures["forward_gradient_error"] < EXACT, defined), figures)


@claim("S3-1")
def sum_over_tokens() -> Finding:
    """Sum and mean over tokens against the gradient of the mean return, of several lengths and
    of one; what the mean does to a k2 loss; and recorded lengths of wrong answers."""
    errors = {}
    for name, sequences in (("ragged", RAGGED), ("fixed", enumerate_sequences(3, 3))):
        logits = random_tables(sequences, 3, 1, spread=SPREAD, seed=161).logits[0]
        returns = random_returns(sequences, seed=162)
        exact = ratio_objective_gradient(logits, logits, sequences, returns)
        whole = by_token(returns, sequences)
        for mode in ("seq_mean_token_sum", "seq_mean_token_mean"):
            weights = token_weights(sequences.mask, mode, dtype=returns.dtype) * len(returns)
            gradient = credit_moments(logits, sequences, weights * whole).mean
            direction = gradient / gradient.norm() * exact.norm()
            errors[f"{name}_{mode.rsplit('_')[-1]}_error"] = flat_error(direction, exact)
    pairs = random_tables(RAGGED, 3, 40, spread=1.5, seed=163)
    errors["kl_off_under_mean"] = weight_errors(pairs, RAGGED).k2.median()
    finals = recorded("length_growth").finals
    finals = finals.assign(excess=finals["wrong_length"] - finals["right_length"])
    figures = errors | difference(finals, "grpo", "token_sum", "excess").figures("trained_excess")
    sums = max(errors["ragged_sum_error"], errors["fixed_sum_error"], errors["fixed_mean_error"])
    differ = errors["ragged_mean_error"] > EXACT
    return Finding(judge(sums < EXACT and differ, sums < EXACT), figures)


@claim("S3-27")
def partial_rollout() -> Finding:
    """A cut path finished later against one scored by a value: bias of the gradient; and
    recorded runs."""
    problem = fixed_length_chain(6, 4, right=0.55, spread=0.5, seed=0)
    cut = 3
    values = state_values(problem)
    mask, states = problem.sequences.mask, problem.sequences.states
    sampled_at = torch.arange(mask.shape[-1]).expand(mask.shape) // cut
    first, second = (current_segment(mask, sampled_at, n) for n in (0, 1))
    whole = by_token(problem.outcome, problem.sequences)
    exact = credit_gradient(problem, whole)
    early, late = exact.clone(), exact.clone()
    early[2**cut - 1 :] = 0.0
    late[: 2**cut - 1] = 0.0

    def bootstrap_bias(table: Tensor) -> float:
        at_cut = torch.where(first, table[states[:, cut]].unsqueeze(-1), 0.0)
        return flat_error(credit_gradient(problem, at_cut), early)

    continued = credit_gradient(problem, torch.where(second, whole, 0.0))
    figures = {
        "continued_bias": flat_error(continued, late),
        "bootstrap_bias": bootstrap_bias(moved_logits(values, 0.2, seed=1)),
        "bootstrap_bias_exact_value": bootstrap_bias(values),
    }
    finals = recorded("partial_rollouts").finals
    for name, other in (("trained_budget", "whole"), ("trained_all_segments", "budget_8_current")):
        figures |= difference(finals, "budget_8_all", other, "own_accuracy").figures(name)
    continuing_needs_no_value = figures["continued_bias"] < EXACT
    value_is_free = figures["bootstrap_bias"] < EXACT
    return Finding(judge(value_is_free, not continuing_needs_no_value), figures)


@claim("S3-28")
def kimi_length_recipe() -> Finding:
    """The loop detector, and the report's length reward beside a penalty per token."""
    loop = torch.tensor([4, 7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 9])
    stop = repeats(loop, period=4, times=3).nonzero().flatten()
    correct = torch.tensor([True, True, False, False])
    lengths = torch.tensor([400.0, 100.0, 100.0, 400.0], dtype=torch.float64)
    relative = relative_length_reward(correct, lengths)
    task = correct.to(torch.float64)
    dear = length_penalty(task, lengths, weight=0.01)
    scaled = relative_length_reward(correct, 10 * lengths)
    figures = {
        "loop_found_at": float(stop[0]),
        "loops_found": float(len(stop)),
        "short_wrong_bonus": relative[2].item(),
        "short_over_long_right": (relative[1] - relative[0]).item(),
        "scale_error": largest(scaled - relative),
        "wrong_over_right_penalty": (group_normalise(dear)[2] - group_normalise(dear)[0]).item(),
        "wrong_over_right_relative": (task + relative)[2].item() - (task + relative)[0].item(),
    }
    detector = figures["loops_found"] == 1 and figures["loop_found_at"] == 10
    shortens = figures["short_over_long_right"] > 0 and figures["short_wrong_bonus"] <= 0
    same = figures["wrong_over_right_penalty"] <= 0
    return Finding(judge(detector and shortens and same, detector and shortens), figures)
