"""Chapter 9: what a weight on each completion, such as ``1/|o|``, makes of a KL loss, exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis import style
from analysis.chapters.ch06_credit import RAGGED, SPREAD
from analysis.chapters.ch06_ratios import random_returns
from analysis.chapters.claims import EXACT, Finding, band, claim, difference, judge, recorded
from analysis.chapters.policies import flat_error, measured, random_tables
from analysis.experiments.language import estimator_tail
from analysis.experiments.presets.language import smollm2_short
from analysis.kl.credit import credit_moments
from analysis.kl.estimators import k3
from analysis.kl.ratio_objectives import ratio_objective_gradient
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
    visited_kl_gradient,
)
from analysis.kl.surrogates import kl_loss
from analysis.objectives.aggregation import aggregate, token_mean_weight, token_weights
from analysis.objectives.losses import policy_loss

# --- What the chapter computes -----------------------------------------------------------------

#: The KL whose per-state gradient each loss has when tokens are summed.
DIRECTIONS = {"k2": "reverse", "k3": "forward"}


def completion_weights(logits: Tensor, sequences: Sequences, completions: float) -> Tensor:
    """[N]: the weight on each completion's sum of tokens in a mean over a batch's tokens; of one
    completion it is GRPO's, of ``inf`` a constant."""
    lengths = sequences.mask.sum(dim=-1)
    mass = sequence_probability(logits, sequences)
    if math.isinf(completions):
        return (1 / (mass @ lengths.to(mass.dtype))).expand(len(lengths))
    probability = torch.bincount(lengths, weights=mass)
    return token_mean_weight(probability, int(completions))[lengths]


def unexplained(gradient: Tensor, exact: Tensor) -> float:
    """Share of a gradient [..., V] that no multiple of the exact one explains, each row its own."""
    scale = (gradient * exact).sum(dim=-1, keepdim=True) / exact.square().sum(dim=-1, keepdim=True)
    return ((gradient - scale * exact).norm() / gradient.norm()).item()


def batch_curves(
    tree: tuple[int, int], count: int, sizes: Iterable[int], *, spread: float, seed: int
) -> pd.DataFrame:
    """:func:`weight_errors` by the number of completions that are averaged together: quantiles."""
    rows = []
    for size in sizes:
        found = weight_errors(tree, count, completions=size, spread=spread, seed=seed)
        for estimator in DIRECTIONS:
            quantiles = band(torch.tensor(found[estimator]))
            rows.append({"completions": size, "estimator": estimator, **quantiles})
    return pd.DataFrame(rows)


def weight_errors(
    tree: tuple[int, int], count: int, *, completions: int = 1, spread: float, seed: int
) -> pd.DataFrame:
    """By how much a mean over tokens turns the gradient of each KL loss away, on one ragged tree.

    The tree is its vocabulary, with the end token, and longest completion. A row a random pair: the
    share of the gradient of ``k2`` and ``k3`` that the KL with token sums does not explain.
    """
    vocab_size, longest = tree
    sequences = enumerate_sequences(vocab_size, longest, eos=vocab_size - 1)
    tables = random_tables(sequences, vocab_size, count, spread=spread, seed=seed)

    def shares(*pair: Tensor) -> dict[str, float]:
        weights = completion_weights(pair[0], sequences, completions)
        found = {}
        for name, direction in DIRECTIONS.items():
            gradient = expected_sequence_gradient(
                *pair,
                sequences,
                estimator=name,
                token_weights=weights.unsqueeze(-1).expand(sequences.mask.shape),
            )
            exact = visited_kl_gradient(*pair, sequences, direction=direction)
            found[name] = unexplained(gradient.flatten(), exact.flatten())
        return found

    return measured(shares, *tables)


def recorded_spread() -> pd.DataFrame:
    """How much :math:`1/|o|` varies within a prompt on the recorded language model.

    ``variation`` is its deviation within prompts over its mean; ``equal_kl`` the KL of a completion
    (nats) at which the push of k1 is as large as the pull of k2; ``kl`` the recorded one.
    """
    group_size, rows = smollm2_short().config.group_size, []
    for variant, after in estimator_tail.recorded().items():
        log_ratio = after.dump["logp"] - after.dump["ref_logp"]
        by_row = log_ratio.groupby(after.dump["sequence"])
        weight = 1 / by_row.size()
        within = weight.groupby(weight.index // group_size).var().mean()
        variation = math.sqrt(within) / weight.mean()
        rows.append((variant, variation, variation**2 / 2, by_row.sum().mean()))
    return pd.DataFrame(rows, columns=["variant", "variation", "equal_kl", "kl"])


# --- What it draws -----------------------------------------------------------------------------


def draw_aggregation(curves: pd.DataFrame) -> Figure:
    """Share of a KL loss's gradient that is no KL's, by the completions averaged together."""
    figure, axes = style.subplots(height=3.9)
    for estimator, curve in curves.groupby("estimator"):
        label = f"{style.LABELS[estimator]} against the {DIRECTIONS[estimator]} KL"
        style.band(axes, curve, "completions", **style.line(estimator, label=label))
    style.note(
        axes,
        "GRPO: each completion\nby itself, $1/|o|$",
        (1, curves["median"][curves.completions == curves.completions.min()].max()),
        offset=(30, 26),
        va="center",
        arrowprops={"arrowstyle": "-", "color": style.QUIET},
    )
    axes.set(xscale="log", yscale="log", ylim=(2e-4, 2))
    sizes = sorted(curves.completions.unique())[::2]
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("completions in the token mean (log scale)")
    axes.set_ylabel("share of the gradient\nthat is not the KL's (log scale)")
    axes.legend(loc="lower left")
    return figure


# --- The claims it decides ---------------------------------------------------------------------

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
        whole = returns[:, None].expand(sequences.mask.shape)
        for mode in ("seq_mean_token_sum", "seq_mean_token_mean"):
            weights = token_weights(sequences.mask, mode, dtype=returns.dtype) * len(returns)
            gradient = credit_moments(logits, sequences, weights * whole).mean
            direction = gradient / gradient.norm() * exact.norm()
            errors[f"{name}_{mode.rsplit('_')[-1]}_error"] = flat_error(direction, exact)
    errors["kl_off_under_mean"] = weight_errors((3, 4), 40, spread=1.5, seed=163).k2.median()
    finals = recorded("length_growth").finals
    finals = finals.assign(excess=finals["wrong_length"] - finals["right_length"])
    figures = errors | difference(finals, "grpo", "token_sum", "excess").figures("trained_excess")
    sums = max(errors["ragged_sum_error"], errors["fixed_sum_error"], errors["fixed_mean_error"])
    differ = errors["ragged_mean_error"] > EXACT
    return Finding(judge(sums < EXACT and differ, sums < EXACT), figures)
