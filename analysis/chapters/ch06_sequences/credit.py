"""How one credits the KL that comes later: critics, prefix ratios, their noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad, jacrev

from analysis.evidence.claims import band
from analysis.evidence.policies import (
    Chains,
    Policies,
    flat_error,
    measured,
    random_chains,
)
from kl_term.kl.credit import (
    weighted_moments,
)
from kl_term.kl.enumeration import (
    GradientMoments,
    cosine,
    relative_error,
)
from kl_term.kl.estimators import k1, k2, k3
from kl_term.kl.full_vocabulary import markov_kl, visited_kl
from kl_term.kl.importance import importance_ratio
from kl_term.kl.prefix import markov_kl_moments
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import (
    Sequences,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from kl_term.kl.term import KLTerm
from kl_term.objectives.gae import CRITICS, gae_kl_gradient


def gae_curves(
    tables: Policies, sequences: Sequences, lams: Iterable[float], gammas: Iterable[float]
) -> pd.DataFrame:
    """Error of k1 in the reward through GAE against the sequence KL's gradient, as quantiles; no
    row where there is no scaled critic."""
    exact = [sequence_kl_gradient(*pair, sequences) for pair in zip(*tables, strict=True)]
    rows = []
    for gamma, critic, lam in itertools.product(gammas, CRITICS, lams):
        if critic == "scaled" and (gamma == 0.0 or lam == 1.0):
            continue
        options = {"gamma": gamma, "critic": critic, "lam": lam}
        errors = [
            flat_error(gae_kl_gradient(*pair, sequences, **options), kl_gradient)
            for *pair, kl_gradient in zip(*tables, exact, strict=True)
        ]
        rows.append(options | band(torch.tensor(errors)))
    return pd.DataFrame(rows)


def length_curves(chains: Chains, lengths: Iterable[int]) -> pd.DataFrame:
    """Error and cosine of the best token-weighted loss by length, with dynamic programming."""
    pairs = list(zip(*chains[:2], strict=True))
    rows = []
    for length in lengths:
        per_token, exact = (
            torch.stack([grad(markov_kl)(*pair, length, fixed_states=x) for pair in pairs])
            for x in (True, False)
        )
        per_token, exact = per_token.flatten(1), exact.flatten(1)
        row = {"length": length} | band(relative_error(per_token, exact))
        rows.append(row | {"cosine": cosine(per_token, exact).quantile(0.5).item()})
    return pd.DataFrame(rows)


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
        _prefix(p, o, m).detach()
        * k2(p.cumsum(-1), r.cumsum(-1)).diff(prepend=torch.zeros_like(p[:, :1]))
    ),
    ("k2", "prefix, detached"): _term(estimator="k2", weighting="detached", ratio="prefix"),
    ("k3", "token, attached"): _term(estimator="k3", weighting="attached"),
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


def loss_moments(
    logits: Tensor, ref_logits: Tensor, old_logits: Tensor, sequences: Sequences, loss: TokenLoss
) -> GradientMoments:
    """Mean and variance of one sequence's gradient of a loss summed over tokens, by autograd."""

    def per_sequence(at: Tensor) -> Tensor:
        logps = (token_logp(x, sequences) for x in (at, ref_logits, old_logits))
        state_kl = visited_kl(at, ref_logits, sequences)
        per_token = loss(*logps, sequences.mask, state_kl)
        return torch.where(sequences.mask, per_token, 0.0).sum(-1)

    probability = sequence_probability(old_logits, sequences)
    return weighted_moments(probability, jacrev(per_sequence)(logits))


def prefix_table(tables: Policies, samplers: Tensor, sequences: Sequences) -> pd.DataFrame:
    """What the mean of each loss misses of the sequence KL's gradient, and its noise.

    On-policy (``fresh``) and under the given samplers (``stale``). ``error`` is a median over the
    pairs; ``noise``, ``low`` and ``high`` are the median, the smallest and the largest variance of
    one sequence's gradient over that of ``BASELINE``.
    """
    rows = []
    for age, olds in (("fresh", tables.logits), ("stale", samplers)):
        for *pair, old in zip(*tables, olds, strict=True):
            exact = sequence_kl_gradient(*pair, sequences)
            moments = {key: loss_moments(*pair, old, sequences, x) for key, x in LOSSES.items()}
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


def cap_medians(
    tables: Policies, samplers: Tensor, sequences: Sequences, cap: float
) -> dict[str, float]:
    """Bias and noise of k3 under a capped prefix ratio, attached: medians over the pairs.

    ``clamp`` differentiates the cap, so that a capped token's ratio is a constant; ``rescaled``
    caps the value and keeps the gradient of the ratio's logarithm. In norms of the exact gradient;
    ``capped`` is the mean share of tokens over the cap, ``kept_is_closer`` the share of pairs on
    which ``rescaled`` has the smaller bias.
    """
    losses: dict[str, TokenLoss] = {
        "clamp": lambda p, r, o, m, _: _prefix(p, o, m).clamp(max=cap) * k3(p, r),
        "rescaled": lambda p, r, o, m, _: (
            _prefix(p, o, m).detach().clamp(max=cap) * _prefix(p, p.detach(), m) * k3(p, r)
        ),
    }

    def errors(logits: Tensor, ref_logits: Tensor, old_logits: Tensor) -> dict[str, Any]:
        mask, exact = sequences.mask, sequence_kl_gradient(logits, ref_logits, sequences)
        chance = sequence_probability(old_logits, sequences)
        over = _prefix(*(token_logp(x, sequences) for x in (logits, old_logits)), mask) > cap
        counts = (chance @ x.sum(-1).double() for x in (over & mask, mask))
        found: dict[str, Any] = {"capped": torch.div(*counts)}
        for kind, loss in losses.items():
            mean, spread = loss_moments(logits, ref_logits, old_logits, sequences, loss)
            found[f"bias_{kind}"] = flat_error(mean, exact)
            found[f"noise_{kind}"] = spread.sqrt() / exact.norm()
        return found

    found = measured(errors, *tables, samplers)
    closer = (found.bias_rescaled < found.bias_clamp).mean()
    return {**found.median(), "kept_is_closer": closer}


def noise_curves(chains: Chains, lengths: Sequence[int], *, baseline: bool = False) -> pd.DataFrame:
    """Sequences at which noise equals the exact gradient, for each way to get it, against their
    length: medians over chains. With ``baseline``, of one length."""
    moments = markov_kl_moments(*chains, max(lengths), baseline=baseline)
    pairs = list(zip(*chains[:2], strict=True))
    rows = []
    for length in lengths:
        signal = torch.stack([grad(markov_kl)(*pair, length).square().sum() for pair in pairs])
        for way, of_lengths in moments.items():
            samples = (of_lengths[length - 1] / signal - 1).median().item()
            rows.append({"length": length, "way": way, "samples": samples})
    return pd.DataFrame(rows)


def baseline_table(length: int, drifts: Iterable[float], **chain: int) -> pd.DataFrame:
    """Noise on-policy without and with the mean KL to go at a position as baseline: medians over
    chains; ``kl`` is that of a whole sequence (nats)."""
    tables = []
    for drift in drifts:
        chains = random_chains(drift=drift, **chain)
        kl = torch.stack([markov_kl(*pair, length) for pair in zip(*chains[:2], strict=True)])
        bare, centred = (noise_curves(chains, [length], baseline=x) for x in (False, True))
        tables.append(bare.assign(kl=kl.median().item(), baseline=centred.samples))
    return pd.concat(tables).sort_values("kl", kind="stable")
