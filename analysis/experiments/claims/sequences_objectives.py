"""Claims on the printed objectives: token and sequence form, sums over tokens, clipped weights."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.experiments.chapters.completion_weights import weight_table
from analysis.experiments.chapters.gradients import random_tables
from analysis.experiments.chapters.sequence_ratios import gradient_weights, random_returns
from analysis.experiments.chapters.sequences import EXACT, SPREAD, flat_error
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import difference, recorded
from analysis.kl.credit import credit_moments
from analysis.kl.estimators import k3
from analysis.kl.ratio_objectives import ratio_objective_gradient
from analysis.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from analysis.kl.surrogates import kl_loss
from analysis.objectives.aggregation import aggregate, token_weights
from analysis.objectives.losses import policy_loss

BETA = 0.04
EPSILON = 0.2


def _batch(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Log-probs of policy, sampler and reference, advantages and a ragged mask: 6 rows of 5."""
    generator = torch.Generator().manual_seed(seed)
    logp, old_logp, ref_logp = -torch.rand(3, 6, 5, generator=generator, dtype=dtype)
    advantages = torch.randn(6, generator=generator, dtype=dtype)
    lengths = torch.tensor([5, 3, 1, 4, 2, 5])
    return logp, old_logp, ref_logp, advantages, torch.arange(5) < lengths[:, None]


def _token_objective(
    logp: Tensor, old_logp: Tensor, ref_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The token form by the package: loss and k3, aggregated as the printed sums are."""
    loss = policy_loss(
        logp,
        old_logp=old_logp,
        advantages=advantages,
        mask=mask,
        epsilon_low=EPSILON,
        epsilon_high=EPSILON,
    )
    penalty = aggregate(kl_loss(logp, ref_logp, mask=mask), mask, "seq_mean_token_mean")
    return -(loss.loss + BETA * penalty)


@decides("S0-1")
def grpo_objective() -> Finding:
    """The printed double sum, token by token in Python, against the package; garbage as padding."""
    logp, old_logp, ref_logp, advantages, mask = _batch(141)
    rows = []
    for i, advantage in enumerate(advantages.tolist()):
        terms = []
        for t in range(int(mask[i].sum())):
            ratio = (logp[i, t] - old_logp[i, t]).exp().item()
            r = (ref_logp[i, t] - logp[i, t]).exp().item()
            clipped = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
            divergence = r - float(ref_logp[i, t] - logp[i, t]) - 1
            terms.append(min(ratio * advantage, clipped * advantage) - BETA * divergence)
        rows.append(sum(terms) / len(terms))
    printed = sum(rows) / len(rows)
    ours = _token_objective(logp, old_logp, ref_logp, advantages, mask).item()
    garbage = [
        torch.where(mask, x, g)
        for x, g in ((logp, float("nan")), (old_logp, -torch.inf), (ref_logp, 1e9))
    ]
    padded = _token_objective(*garbage, advantages, mask).item()
    mirrored = 2 * logp - ref_logp
    flipped = _token_objective(logp, old_logp, mirrored, advantages, mask).item()
    figures = {
        "printed_error": abs(ours - printed),
        "padding_change": abs(padded - ours),
        "flipped_kl_error": abs(flipped - printed),
    }
    agrees = max(figures["printed_error"], figures["padding_change"]) < EXACT
    return Finding(settle(agrees, figures["printed_error"] < EXACT), figures)


@decides("S1-1")
def sequence_form() -> Finding:
    """The printed sequence form by hand against the package, and its k3's mean and gradient.

    The referees are the enumerated reverse KL (value) and forward KL (gradient) of sequences.
    """
    logp, old_logp, _, advantages, mask = _batch(151)
    ratio = torch.where(mask, logp - old_logp, 0.0).sum(-1).exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    printed = torch.minimum(ratio * advantages, clipped * advantages).mean()
    ours = -policy_loss(
        logp, old_logp=old_logp, advantages=advantages, mask=mask, kind="sequence"
    ).loss
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 4, spread=SPREAD, seed=152)
    value, forward, reverse = [], [], []
    for logits, ref in zip(*tables, strict=True):
        per_sequence = k3(token_logp(logits, sequences).sum(-1), token_logp(ref, sequences).sum(-1))
        mean = sequence_probability(logits, sequences) @ per_sequence
        value.append((mean - sequence_kl(logits, ref, sequences)).abs().item())
        gradient = expected_sequence_gradient(
            logits, ref, sequences, estimator="k3", level="sequence"
        )
        for direction, errors in (("forward", forward), ("reverse", reverse)):
            exact = sequence_kl_gradient(logits, ref, sequences, direction=direction)
            errors.append(flat_error(gradient, exact))
    figures = {
        "printed_error": (ours - printed).abs().item(),
        "value_error": max(value),
        "forward_gradient_error": max(forward),
        "reverse_gradient_error": min(reverse),
    }
    defined = max(figures["printed_error"], figures["value_error"]) < EXACT
    return Finding(settle(defined and figures["forward_gradient_error"] < EXACT, defined), figures)


@decides("S3-1")
def sum_over_tokens() -> Finding:
    """The sum over tokens and the mean over tokens, against the gradient of the mean return.

    The two are enumerated on sequences with an end token and on sequences of one length, and so is
    what the mean does to a k2 loss; recorded runs say what each did to the lengths of wrong
    answers, less those of right ones.
    """
    errors = {}
    for name, sequences in (
        ("ragged", enumerate_sequences(3, 4, eos=2)),
        ("fixed", enumerate_sequences(3, 3)),
    ):
        logits = random_tables(sequences, 3, 1, spread=SPREAD, seed=161).logits[0]
        returns = random_returns(sequences, seed=162)
        exact = ratio_objective_gradient(logits, logits, sequences, returns)
        whole = returns[:, None].expand(sequences.mask.shape)
        for mode in ("seq_mean_token_sum", "seq_mean_token_mean"):
            weights = token_weights(sequences.mask, mode, dtype=returns.dtype) * len(returns)
            gradient = credit_moments(logits, sequences, weights * whole).mean
            direction = gradient / gradient.norm() * exact.norm()
            errors[f"{name}_{mode.rsplit('_')[-1]}_error"] = flat_error(direction, exact)
    errors["kl_off_under_mean"] = weight_table([(3, 4)], 40, spread=1.5, seed=163)["k2"].item()
    finals = recorded("length_growth").finals
    finals = finals.assign(excess=finals["wrong_length"] - finals["right_length"])
    figures = errors | difference(finals, "grpo", "token_sum", "excess").figures("trained_excess")
    sums = max(errors["ragged_sum_error"], errors["fixed_sum_error"], errors["fixed_mean_error"])
    differ = errors["ragged_mean_error"] > EXACT
    return Finding(settle(sums < EXACT and differ, sums < EXACT), figures)


@decides("S3-25")
def cispo_weight() -> Finding:
    """CISPO's gradient by autograd through the loss against the printed weight, ragged sequences.

    Beside it, the share of tokens whose gradient PPO's clip removes, the bias of the mean, and what
    recorded runs ended at with four steps on a rollout.
    """
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 1, spread=SPREAD, seed=171)
    old = tables.logits[0]
    logits = old + 0.5 * tables.ref_logits[0]
    returns = random_returns(sequences, seed=172)
    by_autograd = gradient_weights(logits, old, sequences, returns, weight="cispo")
    ratio = (token_logp(logits, sequences) - token_logp(old, sequences)).exp()
    printed = ratio.clamp(1 - EPSILON, 1 + EPSILON) * returns[:, None]
    counted = sequences.mask
    ppo = gradient_weights(logits, old, sequences, returns, weight="grpo")
    exact = ratio_objective_gradient(logits, old, sequences, returns)
    expected = credit_moments(logits, sequences, by_autograd, old).mean
    visits = sequence_probability(old, sequences)[:, None] * counted
    figures = {
        "printed_error": (by_autograd - printed)[counted].abs().max().item(),
        "silenced_share": (visits * (by_autograd == 0)).sum().item() / visits.sum().item(),
        "silenced_share_ppo": (visits * (ppo == 0)).sum().item() / visits.sum().item(),
        "off_policy_bias": flat_error(expected, exact),
    }
    finals = recorded("objectives").finals
    for other in ("grpo", "reinforce"):
        gain = difference(finals, "cispo", other, "accuracy")
        figures |= gain.figures(f"trained_against_{other}")
    as_printed = figures["printed_error"] < EXACT
    return Finding(settle(as_printed and figures["silenced_share"] == 0.0, as_printed), figures)
