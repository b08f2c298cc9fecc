"""Chapter 6: the attached prefix ratio, its gradient and its noise, on trees and along chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis import style
from analysis.chapters.ch06_credit import binary_scale
from analysis.chapters.policies import (
    Policies,
    flat_error,
    measured,
    moved_logits,
    normal_draws,
    random_tables,
)
from analysis.kl.credit import sample_gradients, tie_states, weighted_moments
from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import GradientMoments, reverse_kl_gradient
from analysis.kl.estimators import k1, k2, k3
from analysis.kl.full_vocabulary import markov_kl, visited_kl
from analysis.kl.importance import importance_ratio
from analysis.kl.prefix import markov_second_moments, prefix_coefficients
from analysis.kl.returns import reward_to_go
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from analysis.kl.term import KLTerm

# --- What the chapter computes on trees --------------------------------------------------------

#: A per-token loss [N, T] of log-probs under policy, reference and sampler, the mask, and the KL
#: of each token's state.
TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _prefix(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    return importance_ratio(logp, old_logp, mask, level="prefix")


def _term(**fields: str) -> TokenLoss:
    term = KLTerm(**fields)
    return lambda p, r, o, m, _: term.loss(p, r, old_logp=o, mask=m)


#: What is compared, by cost and ratio. The first three and the fifth have the gradient of the
#: sequence KL, as have the two ways to put k1 in the reward.
LOSSES: dict[tuple[str, str], TokenLoss] = {
    ("k3", "prefix, attached"): _term(estimator="k3", weighting="attached", ratio="prefix"),
    ("k1", "prefix, attached"): _term(estimator="k1", weighting="attached", ratio="prefix"),
    ("full vocabulary", "tokens before, attached"): lambda p, _, o, m, state_kl: (
        _prefix(p, o, m) / importance_ratio(p, o, m) * state_kl
    ),
    ("k2", "prefix, attached"): _term(estimator="k2", weighting="attached", ratio="prefix"),
    ("growth of k2", "prefix, detached"): lambda p, r, o, m, _: (
        _prefix(p, o, m).detach() * _growth(k2(p.cumsum(-1), r.cumsum(-1)))
    ),
    ("k2", "prefix, detached"): _term(estimator="k2", weighting="detached", ratio="prefix"),
    ("k3", "token, attached"): _term(estimator="k3", weighting="attached"),
    ("k3", "whole, attached"): _term(estimator="k3", weighting="attached", ratio="sequence"),
    ("k3", "token, gradient of prefix"): lambda p, r, o, m, _: (
        importance_ratio(p, o, m).detach() * _prefix(p, p.detach(), m) * k3(p, r)
    ),
    ("k1 reward to go", "prefix"): lambda p, r, o, m, _: (
        reward_to_go(_prefix(p, o, m) * k1(p, r)).detach() * p
    ),
    ("k1 reward to go", "whole"): lambda p, r, o, m, _: (
        (importance_ratio(p, o, m, level="sequence") * reward_to_go(k1(p, r))).detach() * p
    ),
}

#: The way to the same gradient that the noise of the others is compared with.
BASELINE = ("k1 reward to go", "prefix")


def _growth(running: Tensor) -> Tensor:
    return running.diff(prepend=torch.zeros_like(running[:, :1]))


def loss_moments(
    pair: Policies, old_logits: Tensor, sequences: Sequences, loss: TokenLoss
) -> GradientMoments:
    """Mean and variance of one sequence's gradient of a loss summed over tokens, by autograd."""
    with torch.enable_grad():
        leaf = pair.logits.detach().requires_grad_(True)
        logp, ref_logp, old_logp = (
            token_logp(x, sequences) for x in (leaf, pair.ref_logits, old_logits)
        )
        state_kl = visited_kl(leaf, pair.ref_logits, sequences)
        per_token = loss(logp, ref_logp, old_logp, sequences.mask, state_kl)
        per_sequence = torch.where(sequences.mask, per_token, 0.0).sum(-1)
        each = torch.eye(len(per_sequence), dtype=per_sequence.dtype)
        (gradients,) = torch.autograd.grad(per_sequence, leaf, each, is_grads_batched=True)
    return weighted_moments(sequence_probability(old_logits, sequences), gradients)


def prefix_table(tables: Policies, samplers: Tensor, sequences: Sequences) -> pd.DataFrame:
    """What the mean of each loss misses of the sequence KL's gradient, and its noise.

    On-policy (``fresh``) and under the given samplers (``stale``). ``error`` is a median over the
    pairs; ``noise``, ``low`` and ``high`` are the median, the smallest and the largest variance
    of one sequence's gradient, in units of that of k1 in the reward to go with prefix weights.
    """
    rows = []
    for age, olds in (("fresh", tables.logits), ("stale", samplers)):
        for logits, ref_logits, old in zip(*tables, olds, strict=True):
            pair = Policies(logits, ref_logits)
            exact = sequence_kl_gradient(*pair, sequences)
            moments = {key: loss_moments(pair, old, sequences, x) for key, x in LOSSES.items()}
            for (cost, weight), (mean, spread) in moments.items():
                noise = (spread / moments[BASELINE].trace_var).item()
                rows.append((age, cost, weight, flat_error(mean, exact), noise))
    found = pd.DataFrame(rows, columns=["age", "cost", "weight", "error", "noise"])
    summary = found.groupby(["cost", "weight", "age"], sort=False).agg(
        error=("error", "median"),
        noise=("noise", "median"),
        low=("noise", "min"),
        high=("noise", "max"),
    )
    summary = summary.unstack("age", sort=False)
    summary.columns = ["_".join(names) for names in summary.columns]
    return summary.reset_index()


def tree_table(
    trees: Iterable[tuple[int, int, int | None]],
    count: int,
    *,
    distances: Sequence[float],
    staleness: float,
    seed: int,
) -> pd.DataFrame:
    """Variance of k3 under the prefix ratio (``k3``) and of the full product (``whole``).

    In units of per-decision k1 in the reward to go, on stale samples: median, smallest and largest
    over ``count`` random pairs on each tree, which is given by its vocabulary, longest sequence and
    end token. Distances of policy and reference and the staleness are in nats per logit.
    """
    rows = []
    for vocab_size, longest, eos in trees:
        sequences = enumerate_sequences(vocab_size, longest, eos=eos)
        step, ref_logits = random_tables(sequences, vocab_size, count, spread=1.0, seed=seed)
        for distance in distances:
            logits = ref_logits + distance * step
            samplers = moved_logits(logits, staleness, seed=seed + 1)
            cases = zip(logits, ref_logits, samplers, strict=True)
            found = torch.stack([relative_noise(*case, sequences) for case in cases])
            row = {"vocabulary": vocab_size, "sequences": len(sequences.mask), "distance": distance}
            of = {"noise": found.median(0).values, "low": found.amin(0), "high": found.amax(0)}
            for name, values in of.items():
                row[f"k3_{name}"], row[f"whole_{name}"] = values.tolist()
            rows.append(row)
    return pd.DataFrame(rows)


def relative_noise(
    logits: Tensor,
    ref_logits: Tensor,
    old_logits: Tensor,
    sequences: Sequences,
    shared: Tensor | None = None,
) -> Tensor:
    """[2]: variances of the k3 prefix loss and of the full product over per-decision weights'.

    ``shared`` [states] is the row of logits that each state uses; by default each has its own.
    """
    rows = torch.arange(len(logits)) if shared is None else shared
    probability = sequence_probability(old_logits, sequences)
    logp, ref_logp, old_logp = (token_logp(x, sequences) for x in (logits, ref_logits, old_logits))
    mask, log_ratio = sequences.mask, logp - ref_logp
    baseline, k3_loss, whole = (
        weighted_moments(
            probability, tie_states(sample_gradients(logits, sequences, credit), rows)
        ).trace_var
        for credit in (
            reward_to_go(_prefix(logp, old_logp, mask) * log_ratio),
            prefix_coefficients(logp, ref_logp, old_logp, mask),
            importance_ratio(logp, old_logp, mask, level="sequence") * reward_to_go(log_ratio),
        )
    )
    return torch.stack([k3_loss, whole]) / baseline


def noise_counterexamples() -> dict[str, float]:
    """Where the k3 prefix loss is noisier than k1 in the reward though the policies are near.

    ``shared_two`` and ``shared_four``: times the variance for answers of at most two and four
    tokens, one row for all states (go on or end), a ten thousandth of a nat per logit apart.
    ``small_kl_times``: a row for every prefix, two tokens, ``small_kl`` nats in all.
    """
    found = {}
    row = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    ref_row = row - 1e-4 * torch.tensor([1.0, 0.0])
    for name, longest in (("shared_two", 2), ("shared_four", 4)):
        sequences = enumerate_sequences(2, longest, eos=1)
        tables = (x.expand(sequences.num_states, 2) for x in (row, ref_row, row))
        one = torch.zeros(sequences.num_states, dtype=torch.long)
        found[name] = relative_noise(*tables, sequences, one)[0].item()
    two = enumerate_sequences(2, 2)
    first = torch.tensor([[0.1, 0.105], [0.99, 0.94], [0.99, 0.99]], dtype=torch.float64)
    logits, ref_logits = torch.stack([first, 1 - first], dim=-1).log().unbind(1)
    found["small_kl"] = sequence_kl(logits, ref_logits, two).item()
    found["small_kl_times"] = relative_noise(logits, ref_logits, logits, two)[0].item()
    return found


def cap_table(
    tables: Policies, samplers: Tensor, sequences: Sequences, caps: Iterable[float]
) -> pd.DataFrame:
    """Bias and noise of k3 under a capped prefix ratio, attached, by the way it is capped.

    ``clamp`` differentiates the cap, so that a capped token's ratio is a constant; ``rescaled``
    caps the value and keeps the gradient of the ratio's logarithm. ``capped`` is the mean share of
    tokens over the cap. Medians over the pairs, in norms of the exact gradient; ``kept_is_closer``
    is the share of pairs on which ``rescaled`` has the smaller bias.
    """
    rows = []
    for cap in caps:
        found = measured(partial(_cap_errors, cap=cap, sequences=sequences), *tables, samplers)
        closer = (found.bias_rescaled < found.bias_clamp).mean()
        rows.append({"cap": cap, **found.median(), "kept_is_closer": closer})
    return pd.DataFrame(rows)


def _cap_errors(
    logits: Tensor, ref_logits: Tensor, old_logits: Tensor, *, cap: float, sequences: Sequences
) -> dict[str, float | Tensor]:
    pair, mask = Policies(logits, ref_logits), sequences.mask
    exact = sequence_kl_gradient(*pair, sequences)
    probability = sequence_probability(old_logits, sequences)
    over = _prefix(token_logp(logits, sequences), token_logp(old_logits, sequences), mask) > cap
    found = {"capped": probability @ (over & mask).sum(-1).double()}
    found["capped"] /= probability @ mask.sum(-1).double()
    losses: dict[str, TokenLoss] = {
        "clamp": lambda p, r, o, m, _: _prefix(p, o, m).clamp(max=cap) * k3(p, r),
        "rescaled": lambda p, r, o, m, _: _capped(p, o, m, cap) * k3(p, r),
    }
    for kind, loss in losses.items():
        mean, spread = loss_moments(pair, old_logits, sequences, loss)
        found[f"bias_{kind}"] = flat_error(mean, exact)
        found[f"noise_{kind}"] = spread.sqrt() / exact.norm()
    return found


def _capped(logp: Tensor, old_logp: Tensor, mask: Tensor, cap: float) -> Tensor:
    """The prefix ratio's value, capped, with the whole gradient of its logarithm; never NaN."""
    return _prefix(logp, old_logp, mask).detach().clamp(max=cap) * _prefix(
        logp, logp.detach(), mask
    )


# --- What it computes along chains -------------------------------------------------------------


class Chains(NamedTuple):
    """Policies that see the last token only, [N, V + 1, V]; the last row starts a sequence."""

    logits: Tensor
    ref_logits: Tensor
    old_logits: Tensor


#: Ways to the gradient of the sequence KL, and one more that needs stale samples to differ.
WAYS = ("k1 reward to go", "k1 prefix", "k3 prefix", "full vocabulary prefix")

PRODUCT = "k1 reward to go, whole product"


def random_chains(
    vocab_size: int, count: int, *, drift: float, staleness: float, seed: int
) -> Chains:
    """References of unit-variance logits, policies ``drift`` away, samplers ``staleness`` away."""
    ref_logits, moved, behind = normal_draws((3, count, vocab_size + 1, vocab_size), seed=seed)
    logits = ref_logits + drift * moved
    return Chains(logits, ref_logits, logits + staleness * behind)


def chain_samples(
    chains: Chains, lengths: Sequence[int], *, baseline: bool = False
) -> dict[str, Tensor]:
    """[lengths, N] sequences at which noise equals the exact gradient, for each way to get it.

    With ``baseline`` the mean KL to go at its position is taken off each token's coefficient, as
    the other answers of a group estimate it; that needs the length, so only the largest is done.
    """
    logits, ref_logits, old_logits = chains
    longest = max(lengths)
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    score = torch.eye(policy.shape[-1], dtype=policy.dtype) - policy.unsqueeze(-2)
    ratio = policy / old_logits.softmax(-1)
    state_kl = reverse_kl(logits, ref_logits).unsqueeze(-1)
    k3_cost = torch.expm1(-log_ratio) + log_ratio
    k1_own = log_ratio.unsqueeze(-1) * score
    full_own = reverse_kl_gradient(logits, ref_logits).unsqueeze(-2) / ratio.unsqueeze(-1)
    own = torch.stack([k1_own, k1_own + score, k1_own, full_own])
    future = torch.stack([log_ratio, log_ratio, k3_cost, state_kl / ratio])
    pairs = list(zip(logits, ref_logits, strict=True))
    wide = (x.expand(len(future), *x.shape) for x in (logits, old_logits))
    off = product_off = None
    if baseline:
        lengths = [longest]
        owed, own_kl = _mean_kls(policy, state_kl.squeeze(-1), longest)
        off = torch.stack([owed, owed, owed, owed - own_kl], dim=1)  # the vocabulary's own is known
        off = off.unsqueeze(-1).expand(*off.shape, policy.shape[-2])
        product_off = off[:, 0]
    second = markov_second_moments(*wide, own, future, longest, baseline=off)
    moments = dict(zip(WAYS, second.unbind(1), strict=True))
    moments[PRODUCT] = markov_second_moments(
        logits, old_logits, k1_own, log_ratio, longest, weight="sequence", baseline=product_off
    )
    signal = torch.stack(
        [
            torch.stack([grad(markov_kl)(*pair, length).square().sum() for pair in pairs])
            for length in lengths
        ]
    )
    return {way: x[torch.tensor(lengths) - 1] / signal - 1 for way, x in moments.items()}


def _mean_kls(policy: Tensor, state_kl: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """[length, N] each: the mean KL to go at a position, and the mean KL of its own token."""
    to_go = [torch.zeros_like(state_kl)]
    for _ in range(length):
        to_go.append(state_kl + (policy @ to_go[-1][..., :-1, None]).squeeze(-1))
    visits = torch.zeros_like(state_kl)
    visits[..., -1] = 1.0
    owed, own = [], []
    for left in reversed(to_go[1:]):
        owed.append((visits * left).sum(-1))
        own.append((visits * state_kl).sum(-1))
        visits = functional.pad((visits.unsqueeze(-1) * policy).sum(-2), (0, 1))
    return torch.stack(owed), torch.stack(own)


def noise_curves(
    lengths: Sequence[int],
    vocab_size: int,
    count: int,
    *,
    drift: float,
    staleness: Iterable[float],
    seed: int,
) -> pd.DataFrame:
    """Noise of each way to the sequence KL's gradient against the length: medians over chains."""
    rows = []
    for behind in staleness:
        chains = random_chains(vocab_size, count, drift=drift, staleness=behind, seed=seed)
        for way, samples in chain_samples(chains, lengths).items():
            middle = samples.median(-1).values.tolist()
            rows += [
                {"staleness": behind, "way": way, "length": length, "samples": value}
                for length, value in zip(lengths, middle, strict=True)
            ]
    return pd.DataFrame(rows)


def baseline_table(
    length: int, vocab_size: int, count: int, *, drifts: Iterable[float], seed: int
) -> pd.DataFrame:
    """Noise on-policy without and with the mean KL to go at a position as baseline.

    Medians over chains; ``kl`` is that of a whole sequence (nats), by dynamic programming.
    """
    rows = []
    for drift in drifts:
        chains = random_chains(vocab_size, count, drift=drift, staleness=0.0, seed=seed)
        kl = torch.stack([markov_kl(*pair, length) for pair in zip(*chains[:2], strict=True)])
        bare, centred = (chain_samples(chains, [length], baseline=x) for x in (False, True))
        for way in WAYS:
            middle = (x.median().item() for x in (kl, bare[way], centred[way]))
            rows.append((way, *middle))
    table = pd.DataFrame(rows, columns=["way", "kl", "bare", "baseline"])
    return table.sort_values("kl", kind="stable")


# --- What it draws -----------------------------------------------------------------------------

#: Estimator that colours each way to the sequence KL's gradient, its line style and its label.
WAY_LOOKS: dict[str, tuple[str, str, str]] = {
    "k1 prefix": ("k1", "-", "$k_1$ prefix loss"),
    "k1 reward to go, whole product": ("none", ":", "reward, product"),
    "k1 reward to go": ("k1", "--", "$k_1$ reward"),
    "k3 prefix": ("k3", "-", "$k_3$ prefix loss"),
    "full vocabulary prefix": ("exact", "-", "full vocabulary"),
}


def draw_noise(curves: pd.DataFrame) -> Figure:
    """Sequences until signal equals noise against their length, fresh and stale."""
    panels = {0.0: "fresh samples", max(curves.staleness): "stale samples"}
    figure, axes = style.subplots(1, len(panels), sharey=True, height=4.6)
    for panel, (staleness, title) in zip(axes, panels.items(), strict=True):
        shown = curves[(curves.staleness == staleness) & (curves.length > 1)]
        for way, (colour, dashes, label) in WAY_LOOKS.items():
            if not staleness and "product" in way:
                continue  # on-policy the product is one
            curve = shown[shown.way == way]
            look = {"color": style.COLOURS[colour], "linestyle": dashes, "label": label}
            panel.plot(curve.length, curve.samples, **look)
        binary_scale(panel, (2, 16, 128, 512))
        panel.set(yscale="log", title=title)
    style.label_line_ends(axes[-1])
    axes[0].set_ylabel("sequences until signal\nequals noise (log scale)")
    figure.supxlabel("tokens in a sequence (log scale)", fontsize="medium")
    return figure
