"""k1, k2 and k3 as values: chapter 1.

Everything but the sampled column of ``schulman_table`` is enumerated, in closed form, or by
quadrature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy import optimize
from torch import Tensor

from analysis.evidence.claims import EXACT, Finding, claim, judge, largest, median, share
from analysis.evidence.gaussian_pairs import (
    LIU_APPENDIX_D,
    SCHULMAN_FAR,
    SCHULMAN_NEAR,
    GaussianPair,
    log_probs,
)
from analysis.evidence.naive_k3 import naive_k3
from analysis.evidence.policies import FAR, Policies, by_token, moved_logits, normal_draws
from analysis.records import estimator_tail
from analysis.records.estimator_tail import deviations
from kl_term import style
from kl_term.kl.credit import state_average
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.estimators import k3
from kl_term.kl.gaussians import moments
from kl_term.kl.sequences import (
    Sequences,
    can_draw,
    enumerate_sequences,
    sequence_kl,
    sequence_probability,
    state_visits,
    token_logp,
)
from kl_term.kl.surrogates import ESTIMATORS
from kl_term.kl.variance import estimator_means, estimator_variances, variance_gap

NAMES = ("k1", "k2", "k3")

#: Relative bias and relative standard deviation as printed by Schulman (2020), 10 million samples.
SCHULMAN_PRINTED: dict[GaussianPair, dict[str, tuple[float, float]]] = {
    SCHULMAN_NEAR: {"k1": (0.0, 20.0), "k2": (0.002, 1.42), "k3": (0.0, 1.42)},
    SCHULMAN_FAR: {"k1": (0.0, 2.0), "k2": (0.25, 1.73), "k3": (0.0, 1.7)},
}


def schulman_table(pair: GaussianPair, *, sample_size: int, seed: int) -> pd.DataFrame:
    """Bias and deviation of k1, k2, k3 in units of the KL: printed, exact, and sampled."""
    log_prob, exact = log_probs(pair, normal_draws((sample_size,), seed=seed)), moments(*pair)
    rows = []
    for name, printed in SCHULMAN_PRINTED[pair].items():
        sample = ESTIMATORS[name](*log_prob) / pair.kl
        true = (exact[name].mean / pair.kl - 1, exact[name].var ** 0.5 / pair.kl)
        sampled = (sample.mean().item() - 1, sample.std().item())
        rows += zip(("bias", "std"), (name, name), printed, true, sampled, strict=True)
    columns = ["quantity", "estimator", "printed", "exact", "sampled"]
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values(["quantity", "estimator"], ignore_index=True)


def zipf_logits(vocab_size: int, exponent: float) -> Tensor:
    """Logits [V] of a Zipf law over ranks: a vocabulary with a few likely and many rare tokens."""
    return -exponent * torch.arange(1, vocab_size + 1, dtype=torch.float64).log()


def drifted(ref_logits: Tensor, direction: Tensor, steps: Sequence[float] | Tensor) -> Tensor:
    """Policies [S, V] on a straight line of logits that leaves the reference at step 0."""
    return ref_logits + torch.as_tensor(steps, dtype=ref_logits.dtype)[:, None] * direction


def estimates(logp: Tensor, ref_logp: Tensor) -> dict[str, Tensor]:
    """Values of k1, k2 and k3 at given log-probs, by name."""
    return {name: ESTIMATORS[name](logp, ref_logp) for name in NAMES}


def tail_curves(
    estimates: Mapping[str, Tensor], weights: Tensor, kl: float, thresholds: Tensor
) -> pd.DataFrame:
    """P(estimate > threshold * KL), one column an estimator, indexed by threshold."""
    exceeds = {name: (v[:, None] / kl > thresholds).double() for name, v in estimates.items()}
    columns = {name: (weights @ above).numpy() for name, above in exceeds.items()}
    return pd.DataFrame(columns, index=thresholds.numpy())


def quantile_table(
    estimates: Mapping[str, Tensor], weights: Tensor, kl: float, levels: Sequence[float]
) -> pd.DataFrame:
    """Quantiles in units of the KL and the share of negative values, one row an estimator."""
    rows, options = {}, {"weights": weights.numpy(), "method": "inverted_cdf"}
    for name, values in estimates.items():
        negative = weights[values < 0].sum().item()
        rows[name] = [*np.quantile((values / kl).numpy(), levels, **options), negative]
    columns = [*(f"{level:.1%}" for level in levels), "negative"]
    return pd.DataFrame.from_dict(rows, "index", columns=columns).rename_axis("estimator")


def drift_table(ref_logits: Tensor, direction: Tensor, steps: Tensor) -> pd.DataFrame:
    """Exact ``bias`` and ``std`` in units of the KL of k1, k2 and k3 along a drift: a row an
    ``estimator`` and ``step``, with its ``kl`` (nats)."""
    logits = drifted(ref_logits, direction, steps)
    reference = ref_logits.expand_as(logits)
    kl = reverse_kl(logits, reference)
    means, variances = (of(logits, reference) for of in (estimator_means, estimator_variances))
    frames = []
    for name in NAMES:
        columns = {"step": steps, "kl": kl, "bias": means[name] / kl - 1}
        columns["std"] = variances[name].sqrt() / kl
        frames.append(pd.DataFrame(columns).assign(estimator=name))
    return pd.concat(frames, ignore_index=True)


def crossing_kl(ref_logits: Tensor, direction: Tensor, *, farthest: float) -> float:
    """The reverse KL (nats) at which k3 stops beating k1 along a drift, before ``farthest``."""

    def at(step: float, of: Callable[[Tensor, Tensor], Tensor]) -> float:
        return of(drifted(ref_logits, direction, [step])[0], ref_logits).item()

    step = optimize.brentq(at, farthest * 1e-3, farthest, args=(variance_gap,))
    return at(step, reverse_kl)


def stale_table(
    logits: Tensor, ref_logits: Tensor, direction: Tensor, steps: Tensor
) -> pd.DataFrame:
    """Mean of k3 under an older policy, ``logits - step * direction``, against both KLs (nats).

    A row a step: ``staleness`` is the policy's KL from the sampler; ``weighted`` the mean of ratio
    times k3.
    """
    old_logits = drifted(logits, direction, -steps)
    policy, reference = logits.expand_as(old_logits), ref_logits.expand_as(old_logits)
    logp, old_logp = policy.log_softmax(-1), old_logits.log_softmax(-1)
    of_token = torch.exp(logp - old_logp) * ESTIMATORS["k3"](logp, reference.log_softmax(-1))
    return pd.DataFrame(
        {
            "staleness": reverse_kl(policy, old_logits),
            "k3": estimator_means(policy, reference, old_logits)["k3"],
            "weighted": (old_logp.exp() * of_token).sum(-1),
            "reverse": reverse_kl(policy, reference),
            "forward": forward_kl(policy, reference),
        }
    )


def logged_mean(
    logits: Tensor, ref_logits: Tensor, sequences: Sequences, estimator: str, *, average: str
) -> float:
    r"""What a log of an estimator shows on fresh samples: its mean over endless batches (nats).

    .. math:: \frac{\mathbb{E} \sum_t k(l_t)}{\mathbb{E}\, |o|} \;\text{(tokens)}, \qquad
        \mathbb{E}\Big[\frac{1}{|o|} \sum_t k(l_t)\Big] \;\text{(completions)}

    ``tokens`` divides the sum over a batch's tokens by their number, whose limit is the ratio of
    the means: the KL per token for k1 and k3, if either policy allows what the other one does.
    ``completions`` averages each completion first.

    Args:
        logits, ref_logits: [states, vocab] tables of the policy, which samples, and the reference.
        sequences: all completions.
        estimator: ``k1``, ``k2`` or ``k3``.
        average: ``tokens`` or ``completions``.
    """
    sequences = sequences.only(can_draw(logits, sequences))
    probability = sequence_probability(logits, sequences)
    logp, ref_logp = token_logp(logits, sequences), token_logp(ref_logits, sequences)
    total = torch.where(sequences.mask, ESTIMATORS[estimator](logp, ref_logp), 0.0).sum(-1)
    length = sequences.mask.sum(-1).double()
    if average == "tokens":
        return ((probability @ total) / (probability @ length)).item()
    return (probability @ (total / length)).item()


def logged_gap(logits: Tensor, ref_logits: Tensor, sequences: Sequences) -> float:
    r"""Logged k3 less logged k1 on fresh samples, each averaged per completion (nats).

    .. math:: \mathbb{E}\Big[\frac{1}{|o|} \sum_t (k_3 - k_1)(l_t)\Big]
        = \sum_s d(s) \sum_a \big(\pi_{\mathrm{ref}} - \pi_\theta\big)(a|s)\, w(s, a), \qquad
        w(s, a) = \mathbb{E}\Big[\frac{1}{|o|} \,\Big|\, s, a\Big]

    over the tokens that the policy allows; computed from the right-hand side.

    Equation: ``logged_gap``
    Sampler: :math:`o \sim \pi_\theta`.

    Args:
        logits, ref_logits: [states, vocab] tables of the policy, which samples, and the reference.
        sequences: all completions.
    """
    one_over_length = by_token(1 / sequences.mask.sum(-1).double(), sequences)
    weight = state_average(one_over_length, logits, sequences, by_action=True)
    policy, reference = logits.softmax(-1), ref_logits.softmax(-1)
    visits = state_visits(logits, sequences).unsqueeze(-1)
    terms = visits * (reference - policy) * weight
    return torch.where(visits * policy > 0, terms, 0.0).sum().item()


def end_tokens(end: float, longest: int) -> Tensor:
    """[longest, 2]: logits of a policy that ends its answer with one probability at each token;
    its completions are those of ``enumerate_sequences(2, longest, eos=1)``."""
    return torch.tensor([1 - end, end], dtype=torch.float64).log().expand(longest, 2)


def logged_table(end: float, ref_end: float, longest: int) -> pd.DataFrame:
    """k1 and k3 as two averages log them, and the KL per token (nats), where the policy differs
    from its reference in the probability of ending an answer alone."""
    case = end_tokens(end, longest), end_tokens(ref_end, longest)
    sequences = enumerate_sequences(2, longest, eos=1)
    length = sequence_probability(case[0], sequences) @ sequences.mask.sum(-1).double()
    rows = {
        average: {k: logged_mean(*case, sequences, k, average=average) for k in ("k1", "k3")}
        | {"per_token": (sequence_kl(*case, sequences) / length).item()}
        for average in ("tokens", "completions")
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("average").reset_index()


# --- What it draws


def plot_tails(curves: Mapping[str, pd.DataFrame]) -> Figure:
    """Probability that one sample exceeds a multiple of the KL, one panel a pair of policies."""
    figure, panels = style.subplots(1, len(curves), sharey=True, height=3.9)
    for panel, (title, curve) in zip(panels, curves.items(), strict=True):
        for name in NAMES:
            panel.plot(curve[name][curve[name] > 1e-7], **style.line(name, marker=""))
        panel.set(xscale="log", yscale="log", title=title, ylim=(1e-6, 1.5))
        panel.set_xticks([1, 10, 100], ["1", "10", "100"])
    panels[0].set_ylabel("probability that one sample\nis larger (log scale)")
    figure.supxlabel("value of the estimate / KL (log scale)", fontsize="medium")
    panels[-1].legend(loc="upper right")
    return figure


def plot_drift(table: pd.DataFrame, crossing: float) -> Figure:
    """Bias and standard deviation against the distance, with the KL where k1 and k3 cross."""
    figure, (bias, spread) = style.subplots(2, 1, sharex=True, height=5.6, height_ratios=[1, 1.7])
    for name in NAMES:
        rows = table[table.estimator == name]
        bias.plot(rows.kl, rows.bias, **style.line(name, marker=""))
        spread.plot(rows.kl, rows["std"], **style.line(name, marker=""))
    for panel in (bias, spread):
        style.guide(panel, x=crossing)
    at = {"xycoords": ("data", "axes fraction"), "va": "top"}
    style.note(spread, f"{crossing:.2f} nats", (crossing, 0.96), offset=(-5, 0), **at)
    spread.set(xscale="log", yscale="log", xlabel="reverse KL from the reference (nats, log scale)")
    spread.set_ylabel("standard deviation / KL\n(log scale)")
    bias.set_ylabel("bias / KL")
    zero = {"xycoords": "axes fraction", "fontsize": "small"}
    style.note(bias, "$k_1$ and $k_3$: exactly zero", (0.02, 0.18), **zero)
    last = table[table.estimator == "k2"].iloc[-1]
    style.note(bias, "$k_2$", (last.kl, last.bias), offset=(-8, 0), colour="k2", va="top")
    figure.get_layout_engine().set(rect=(0, 0, 0.93, 1))
    figure.draw_without_rendering()
    style.label_line_ends(spread)
    return figure


# --- What it decides

NEAR = FAR._replace(logits=moved_logits(FAR.ref_logits, 0.1, seed=102))
STALE = moved_logits(FAR.logits, 0.5, seed=103)


def bias_of(estimator: str, pairs: Policies = FAR, *sampler: Tensor) -> Tensor:
    """[200]: mean of an estimator less the reverse KL, nats."""
    return estimator_means(*pairs, *sampler)[estimator] - reverse_kl(*pairs)


def share_noisier(estimator: str, other: str, named: str) -> dict[str, float]:
    """How often an estimator has the larger variance of two: near the reference, and far."""
    variances = {"near": estimator_variances(*NEAR), "far": estimator_variances(*FAR)}
    return {f"{named}_{where}": share(v[estimator] > v[other]) for where, v in variances.items()}


@claim("S0-2")
def k3_is_unbiased_and_positive() -> Finding:
    """Mean of k3 by enumeration on-policy, stale, without support, and as it is logged; its sign in
    floats."""
    on_policy, stale = largest(bias_of("k3")), median(bias_of("k3", FAR, STALE).abs())
    cut = FAR._replace(logits=FAR.logits.index_fill(-1, torch.tensor([0]), -torch.inf))
    uncovered, missing = FAR.ref_logits.softmax(-1)[:, 0], bias_of("k3", cut)
    smallest = k3(FAR.logits.log_softmax(-1), FAR.ref_logits.log_softmax(-1)).min().item()
    near = torch.tensor(0.01).to(torch.bfloat16)
    logged = logged_table(0.01, 0.02, 600).set_index("average").k3
    figures = {
        "bias_on_policy": on_policy,
        "bias_stale": stale,
        "bias_without_support": median(missing),
        "naive_bfloat16": naive_k3(torch.zeros_like(near), near).item(),
        "logged_by_token": logged["tokens"],
        "logged_by_completion": logged["completions"],
    }
    right = on_policy < EXACT and smallest >= 0
    sometimes = right and largest(missing + uncovered) < EXACT
    return Finding(judge(right and max(stale, largest(missing)) < EXACT, sometimes), figures)


@claim("S0-3")
def k3_equals_the_divergence() -> Finding:
    """Deviation of single samples of k3 from the KL, and of their mean."""
    spread = median(estimator_variances(*FAR)["k3"].sqrt() / reverse_kl(*FAR))
    figures = {"relative_std": spread, "mean_error": largest(bias_of("k3"))}
    return Finding(judge(spread < EXACT, False), figures)


@claim("S1-7")
def k1_is_unbiased_with_high_variance() -> Finding:
    """Mean and variance of k1 against k3's, near and far from the reference."""
    bias, noisier = largest(bias_of("k1")), share_noisier("k1", "k3", "noisier")
    least, most = min(noisier.values()), max(noisier.values())
    verdict = judge(bias < EXACT and least == 1, bias < EXACT and most > 0)
    return Finding(verdict, {"bias": bias} | noisier)


@claim("S1-8")
def k2_is_biased_with_low_variance() -> Finding:
    """Bias of k2 in units of the KL, and its variance against k1's, near and far."""
    bias, quieter = (bias_of("k2") / reverse_kl(*FAR)).abs(), share_noisier("k1", "k2", "quieter")
    biased, least, most = bias.min().item() > EXACT, min(quieter.values()), max(quieter.values())
    verdict = judge(biased and least == 1, biased and most > 0)
    return Finding(verdict, {"bias": median(bias)} | quieter)


@claim("S1-9")
def the_printed_chain_of_means() -> Finding:
    """E[r] and E[r - 1] under the policy."""
    policy, reference = FAR.logits.softmax(-1), FAR.ref_logits.softmax(-1)
    less_one = (policy * (reference / policy - 1)).sum(-1)
    figures = {"mean_r": 1 + less_one.mean().item(), "mean_r_less_one": largest(less_one)}
    return Finding(judge(largest(less_one - 1) < EXACT, False), figures)


@claim("S1-10")
def positivity_lowers_the_variance() -> Finding:
    """Whether k3, never negative, has the lower variance; and the identity that decides it."""
    variances, gaussian = estimator_variances(*FAR), moments(*LIU_APPENDIX_D)
    gap = variances["k3"] - variances["k1"]
    noisier = share(gap > 0)
    figures = {"noisier_far": noisier, "identity_error": largest(gap / variance_gap(*FAR) - 1)}
    implied = noisier == 0 and gaussian["k3"].var < gaussian["k1"].var
    return Finding(judge(implied, False), figures)


@claim("S3-9")
def k3_is_unbiased_with_low_variance() -> Finding:
    """The rule chi-square < 2 J against the variances: near, far, and on a language model."""
    unbiased, wins = largest(bias_of("k3")) < EXACT, share_noisier("k1", "k3", "wins")
    variances = estimator_variances(*FAR)
    rule_right = share((variances["k3"] < variances["k1"]) == (variance_gap(*FAR) < 0))
    on_text = deviations(estimator_tail.recorded()["none"].tail)
    always = unbiased and min(wins.values()) == 1 and bool((on_text["k3"] < on_text["k1"]).all())
    figures = wins | {
        "rule_right": rule_right,
        "language_k1_deviation": on_text["k1"].median(),
        "language_k3_deviation": on_text["k3"].median(),
    }
    return Finding(judge(always, unbiased and rule_right == 1 and wins["wins_near"] > 0), figures)


@claim("S3-10")
def the_control_variate() -> Finding:
    """Mean of r - 1, its covariance with log r, and whether adding it lowers the variance."""
    policy, reference = FAR.logits.softmax(-1), FAR.ref_logits.softmax(-1)
    less_one, log_ratio = reference / policy - 1, (reference / policy).log()
    mean = (policy * less_one).sum(-1)
    mean_log = (policy * log_ratio).sum(-1, keepdim=True)
    covariance = (policy * less_one * (log_ratio - mean_log)).sum(-1)
    figures = {
        "smallest_covariance": covariance.min().item(),
        "identity_error": largest(covariance - reverse_kl(*FAR) - forward_kl(*FAR)),
        "reduces_far": share_noisier("k1", "k3", "reduces")["reduces_far"],
    }
    anticorrelated = largest(mean) < EXACT and bool((covariance < 0).all())
    return Finding(judge(anticorrelated and figures["reduces_far"] == 1, anticorrelated), figures)
