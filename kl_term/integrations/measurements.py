r"""What a trainer logs about its KL term at every step, over the tokens of all its processes.

Means are ratios of sums, so that processes and micro-batches with more tokens count for more: the
sums of a micro-batch are added up over processes in one reduction, and then over micro-batches. The
mean of the micro-batches' own ratios would be another number, for where answers are ragged it
weighs a token by one over the tokens beside it, and lengths depend on what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.diagnosis.statistics import tail_index
from kl_term.kl.estimators import k1, k2, k3

#: Every measurement that may be logged. Means are over counted tokens, KLs in nats per token.
MEASUREMENTS: dict[str, str] = {
    "tokens": "counted tokens since the last log: what a mean of logs must be weighed with",
    "k1": "mean of k1: the reverse KL to the reference; on fresh samples right up to a bias of one "
    "over the number of completions, since answers are ragged",
    "k2": "mean of k2",
    "k3": "mean of k3: as k1 where the ratio to the reference has a light tail, and less noisy "
    "near the reference",
    "term": "mean of the term in the loss, off-policy weight included and beta not: what TRL logs "
    "as kl, up to its mean over micro-batches, and the KL itself if the term is exact",
    "max_abs_log_ratio": "largest absolute log-ratio of policy to reference at a token, in nats",
    "tail_index": "Pareto-smoothed tail index of the ratio reference/policy, mean over the "
    "micro-batches of a hundred tokens or more; too large, and no mean of k3 can be trusted",
    "k3_gradient_gap": "spread of k3 over that of k1: how far k3's gradient coefficients are from "
    "those of the reverse KL",
    "capped": "share of tokens at which k3_clip caps the ratio, and pushes away",
    "ess": "effective share of tokens under the ratio of the policy to what sampled them",
    "surprise_gap": "mean of -log policy less its entropy, weighed with the same ratio: zero, "
    "unless the sampler is hotter (above) or colder or truncated (below)",
    "loss": "what the term adds to the loss, beta included",
    "penalty": "what the term takes from the advantage of a token, beta included",
}

#: Those that are a mean over tokens of all processes.
MEANS = ("k1", "k2", "k3", "term", "penalty", "capped")

Reduce = Callable[[Tensor], Tensor]


class Sampled(NamedTuple):
    """Log-probs of sampled tokens, without gradient. All [B, T]."""

    logp: Tensor  #: under the trained policy
    old_logp: Tensor  #: under the policy as the trainer knew it when sampling
    mask: Tensor  #: True = counted
    ref_logp: Tensor | None = None  #: under the reference
    sampler_logp: Tensor | None = None  #: as reported by the inference engine
    entropy: Tensor | None = None  #: of the trained policy at each token's state


class Totals(NamedTuple):
    """Sums over the counted tokens of some micro-batches, of all processes."""

    sums: Mapping[str, float] = MappingProxyType({})
    largest: float | None = None  #: absolute log-ratio

    def plus(self, other: Totals) -> Totals:
        """Of both: a sum that one lacks counts as zero there."""
        names = [*self.sums, *(name for name in other.sums if name not in self.sums)]
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        both = [x for x in (self.largest, other.largest) if x is not None]
        return Totals(sums, max(both, default=None))

    def measured(self) -> dict[str, float]:
        """Measurements by name; none of no tokens."""
        found = _ratios(self.sums) if self.sums.get("tokens") else {}
        return found if self.largest is None else found | {"max_abs_log_ratio": self.largest}


def totals(
    sampled: Sampled,
    *,
    max_ratio: float | None = None,
    terms: Tensor | None = None,
    penalties: Tensor | None = None,
    total: Reduce = lambda x: x,
    gather: Reduce = lambda x: x,
) -> Totals:
    """The sums of one micro-batch, equal on every process.

    Args:
        sampled: the tokens of this process.
        max_ratio: cap of ``k3_clip``, where that is the term.
        terms: [B, T], the term in the loss.
        penalties: [B, T], what the term takes from the advantages.
        total: sums a tensor over processes.
        gather: concatenates [N] over processes, padded with NaN where they differ in length.
    """
    counted = sampled.mask.bool()
    wide = torch.float32 if sampled.logp.device.type == "mps" else torch.float64
    logp = sampled.logp.detach()[counted].to(wide)
    old_logp = sampled.old_logp.detach()[counted].to(wide)
    weight = torch.exp(logp - _behaviour(sampled, counted, old_logp))
    sums = {"tokens": torch.ones_like(logp), "weight": weight, "weight_square": weight.square()}
    if sampled.entropy is not None:
        entropy = sampled.entropy.detach()[counted].to(wide)
        sums["surprise_weighted"] = weight * (-logp - entropy)
    if sampled.ref_logp is not None:
        ref_logp = sampled.ref_logp[counted].to(wide)
        sums |= _of_reference(logp, ref_logp, weight)
        if max_ratio is not None:
            sums["capped"] = (ref_logp - logp > math.log(max_ratio)).to(wide)
    for name, values in (("term", terms), ("penalty", penalties)):
        if values is not None:
            sums[name] = values[counted].to(wide)
    summed = total(torch.stack([column.sum() for column in sums.values()])).tolist()
    found, largest = dict(zip(sums, summed, strict=True)), None
    if sampled.ref_logp is not None:
        log_ratio = gather(ref_logp - logp)
        log_ratio = log_ratio[~log_ratio.isnan()].double().cpu().numpy()
        if len(log_ratio):
            largest = float(abs(log_ratio).max())
            tail = tail_index("reference/policy", log_ratio).k
            found |= {} if tail is None else {"tail_index": tail, "tails": 1.0}
    return Totals(found, largest)


def _behaviour(sampled: Sampled, counted: Tensor, old_logp: Tensor) -> Tensor:
    """What drew the tokens; an engine that could not score one says NaN."""
    if sampled.sampler_logp is None:
        return old_logp
    sampler_logp = sampled.sampler_logp[counted].to(old_logp.dtype)
    return torch.where(sampler_logp.isnan(), old_logp, sampler_logp)


def _of_reference(logp: Tensor, ref_logp: Tensor, weight: Tensor) -> dict[str, Tensor]:
    values = {"k1": k1(logp, ref_logp), "k2": k2(logp, ref_logp), "k3": k3(logp, ref_logp)}
    weighted = {f"{name}_weighted": weight * values[name] for name in ("k1", "k3")}
    squares = {f"{name}_square": weight * values[name].square() for name in ("k1", "k3")}
    return values | weighted | squares


def _ratios(sums: Mapping[str, float]) -> dict[str, float]:
    tokens = sums["tokens"]
    found = {"tokens": tokens} | {name: sums[name] / tokens for name in MEANS if name in sums}
    found["ess"] = sums["weight"] ** 2 / (tokens * sums["weight_square"])
    if "surprise_weighted" in sums:
        found["surprise_gap"] = sums["surprise_weighted"] / sums["weight"]
    if "k1" in sums:
        spread = {name: _variance(sums, name) for name in ("k1", "k3")}
        if spread["k1"] > 0:
            found["k3_gradient_gap"] = math.sqrt(max(0.0, spread["k3"]) / spread["k1"])
    if "tails" in sums:
        found["tail_index"] = sums["tail_index"] / sums["tails"]
    return found


def _variance(sums: Mapping[str, float], name: str) -> float:
    mean = sums[f"{name}_weighted"] / sums["weight"]
    return sums[f"{name}_square"] / sums["weight"] - mean**2
