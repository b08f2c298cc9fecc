"""The policy part of a loss: gradient, sign, ratio and clip, and what it ascends in expectation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kl_term.audit.alignment import other_logits
from kl_term.audit.batches import Batch
from kl_term.audit.candidates import SUM, fit, weights_of
from kl_term.audit.group_axis import across_groups
from kl_term.audit.identity import NEAR, probe_batches
from kl_term.audit.idle_clips import idle_clips
from kl_term.audit.layouts import mixes_advantages
from kl_term.audit.numerics import dead_zone
from kl_term.audit.one_token import policy_of_token
from kl_term.audit.policy_weights import PolicyWeights, policy_weights
from kl_term.audit.readings import Reading
from kl_term.audit.trees import Tree, expected_gradient, tree
from kl_term.kl.sequences import token_logp
from kl_term.objectives.aggregation import MODES
from kl_term.objectives.losses import KINDS, ClipRange

#: Wide enough that no clip binds where kinds are told apart.
_OPEN = ClipRange(0.2, 5.0)


#: The kind of a loss whose ratio is not to the sampler.
TO_REFERENCE = "ratio to the reference"
#: Standard deviation of the log-ratio to the reference, inside every clip.
_CLOSE = 0.04
_SIGNS = {"positive": 1.0, "negative": -1.0}
#: Below and above which ratio a sign of the advantage has no gradient, if it has none anywhere.
NOWHERE = (1.0, 1.0)


@dataclass(frozen=True)
class PolicyPart:
    """What was found; ``kind`` is None for none of ours."""

    has_gradient: bool
    kind: str | None = (
        None  #: of :data:`kl_term.objectives.losses.KINDS`, or ``ratio to the reference``
    )
    aggregation: str | None = None
    scale: float = math.nan
    right_signs: float = (
        math.nan
    )  #: share of tokens whose gradient has the sign of minus the advantage
    reads_other_advantages: bool = False
    reads_other_answers: bool = False  #: the log-probs of another answer move a token's gradient
    live_ratio: bool = False  #: the gradient reads the sampler
    constant: bool = False  #: the value reads no policy, as that of a ratio to itself
    idle_clips: tuple[str, ...] = ()  #: limits that change nothing, wherever they lie
    across_groups: bool = False  #: rewards are compared with those of other groups alone
    #: Ratios beyond which a gradient is zero, by the sign of the advantage: (below, above).
    clips: dict[str, tuple[float, float]] | None = None
    sized_clip: bool = False  #: another size of the advantage is clipped at other ratios
    weights: PolicyWeights = field(default_factory=PolicyWeights)
    ascends_reward: bool | None = None  #: the mean gradient over answers is that of the reward


def policy_part(reading: Reading) -> PolicyPart | None:
    """None for a loss that takes neither advantages nor rewards."""
    if not reading.has_policy_part or reading.kind == "reward":
        return None
    batches = _around(reading, NEAR, count=4)
    wanted = [reading.policy(batch).gradient for batch in batches]
    if not any(bool((g.abs() > 1e-12).any()) for g in wanted):
        if across_groups(reading):
            return PolicyPart(False, across_groups=True)
        reads = _values_move(reading, batches[0])
        return PolicyPart(False) if reads else None
    kind, aggregation, scale = _kind(reading, batches, wanted)
    if kind is None:  # a clip around the reference binds where that is not close
        close = _around(reading, _CLOSE, count=2)
        found = _kind(reading, close, [reading.policy(batch).gradient for batch in close])
        if found[0] == TO_REFERENCE:
            kind, aggregation, scale = found
    clips = _clips(reading)
    return PolicyPart(
        True,
        kind,
        aggregation,
        scale,
        right_signs=_right_signs(reading, batches, wanted),
        reads_other_advantages="advantages" in reading.foreign.roles
        and mixes_advantages(lambda batch: reading.policy(batch).gradient, batches[0]),
        reads_other_answers=kind is None and _reads_other_answers(reading, batches[0]),
        live_ratio=_live(reading, batches[0]),
        constant=_is_constant(reading, batches[0]),
        idle_clips=idle_clips(reading),
        clips=clips,
        sized_clip=clips is not None and _sized(reading, clips),
        weights=PolicyWeights() if kind else policy_weights(reading),
        ascends_reward=_ascends(reading),
    )


def _values_move(reading: Reading, batch: Batch) -> bool:
    more = replace(batch, advantages=2 * batch.advantages, rewards=2 * batch.rewards)
    before, after = reading.policy(batch).value, reading.policy(more).value
    return not torch.equal(before, after) or "advantages" in reading.foreign.roles


def _worth(reading: Reading, batch: Batch) -> Tensor:
    held = reading.foreign.roles
    worth = batch.advantages if held & {"advantages", "inputs"} else batch.rewards
    return worth.unsqueeze(-1).expand(batch.mask.shape)


def _kind(
    reading: Reading, batches: list[Batch], wanted: list[Tensor]
) -> tuple[str | None, str | None, float]:
    """The kind of loss and the aggregation with this gradient where no clip binds."""
    flat = torch.cat([g.flatten() for g in wanted])
    aggregations = (None,) if reading.shape == "tokens" else (*MODES, SUM)
    for name, per_token in _kinds().items():
        for aggregation in aggregations:
            gradients = []
            for batch in batches:
                weights = weights_of(batch.mask.double(), aggregation)
                start = batch.logits if reading.by_logits else batch.logp
                leaf = start.detach().clone().requires_grad_(True)
                logp = replace(batch, logits=leaf).logp if reading.by_logits else leaf
                with torch.enable_grad():
                    terms = per_token(reading, batch, torch.where(batch.mask, logp, 0.0))
                    total = (torch.where(batch.mask, terms, 0.0) * weights).sum()
                    gradients.append(torch.autograd.grad(total, leaf)[0].flatten())
            scale, error = fit(flat, torch.cat(gradients))
            if error <= reading.tolerance:
                return name, aggregation, scale
    return None, None, math.nan


def _around(reading: Reading, apart: float, *, count: int) -> list[Batch]:
    """Batches at a distance from the reference, and a larger one."""
    larger = probe_batches(reading, apart, count=1, rows=5, width=6)
    return [*probe_batches(reading, apart, count=count), *larger]


def _kinds() -> dict[str, Callable[[Reading, Batch, Tensor], Tensor]]:
    def of(name: str) -> Callable[[Reading, Batch, Tensor], Tensor]:
        def per_token(reading: Reading, batch: Batch, logp: Tensor) -> Tensor:
            old = torch.where(batch.mask, batch.old_logp, 0.0)
            worth = torch.where(batch.mask, _worth(reading, batch), 0.0)
            return KINDS[name](logp, old, worth, batch.mask, _OPEN).per_token

        return per_token

    found = {name: of(name) for name in ("grpo", "reinforce", "gspo", "sequence")}

    def to_reference(reading: Reading, batch: Batch, logp: Tensor) -> Tensor:
        ratio = (logp - torch.where(batch.mask, batch.ref_logp, 0.0)).exp()
        return -ratio * _worth(reading, batch)

    found[TO_REFERENCE] = to_reference
    return found


def _right_signs(reading: Reading, batches: list[Batch], wanted: list[Tensor]) -> float:
    if reading.by_logits:
        return math.nan
    right, counted = 0.0, 0
    for batch, gradient in zip(batches, wanted, strict=True):
        of = batch.mask & (gradient != 0)
        right += float(((gradient * _worth(reading, batch)) < 0)[of].sum())
        counted += int(of.sum())
    return right / max(counted, 1)


def _reads_other_answers(reading: Reading, batch: Batch) -> bool:
    """Whether a small step of the policy in one answer moves the gradient of another."""
    step = 0.02 * torch.ones_like(batch.logits).cumsum(-1).flip(-1)
    step[1:] = 0.0
    before = reading.policy(batch).gradient[1:]
    for names in (("logits",), ("logits", "old_logits")):
        moved = {name: getattr(batch, name) + step for name in names}
        after = reading.policy(replace(batch, **moved)).gradient[1:]
        if bool((after - before).abs().max() > 1e-3 * before.abs().max()):
            return True
    return False


def _live(reading: Reading, batch: Batch) -> bool:
    before, after = (reading.policy(b).gradient for b in (batch, batch.fresh()))
    return not torch.allclose(before, after, rtol=1e-4, atol=1e-9)


def _is_constant(reading: Reading, batch: Batch) -> bool:
    other = replace(batch, logits=other_logits(batch.logits))
    one, two = (reading.policy(b).value for b in (batch, other))
    return torch.allclose(one, two, rtol=1e-6, atol=1e-9)


def _clips(reading: Reading) -> dict[str, tuple[float, float]] | None:
    """Ratios of one token beyond which it has no gradient though it has a value.

    What is filtered out, value and all, is not clipped.
    """
    if reading.by_logits:
        return None
    found = {}
    for sign, advantage in _SIGNS.items():
        below, above = dead_zone(partial(_slopes, reading, advantage), furthest=2.5)
        found[sign] = (
            0.0 if math.isnan(below) else math.exp(below),
            math.inf if math.isnan(above) else math.exp(above),
        )
    return None if all(found[sign] == NOWHERE for sign in _SIGNS) else found


def _slopes(reading: Reading, advantage: float, log_ratio: Tensor) -> Tensor:
    parts = [policy_of_token(reading, -3.0, -3.1, x, advantage) for x in log_ratio.tolist()]
    return torch.stack([p.gradient.abs().max() + (p.value == 0).all().double() for p in parts])


def _sized(reading: Reading, clips: dict[str, tuple[float, float]]) -> bool:
    """Whether twice the advantage is alive where the advantage is not, or the other way round."""
    for sign, (below, above) in clips.items():
        if (below, above) == NOWHERE:
            continue
        at = [0.6, 0.9, 1.0, 1.1, 1.9]
        at += [
            edge * step for edge in (below, above) if 0 < edge < math.inf for step in (0.97, 1.03)
        ]
        apart = [x for x in at if min(abs(x - below), abs(x - above)) > 0.01]  # what is told apart
        ratios = torch.tensor(apart, dtype=torch.float64)
        alive = _slopes(reading, 2 * _SIGNS[sign], ratios.log()) != 0
        if bool((alive != ((ratios > below) & (ratios < above))).any()):
            return True
    return False


def reward_gradient(at: Tree) -> Tensor:
    """[states, V]: minus the gradient of the mean reward of an answer."""
    with torch.enable_grad():
        leaf = at.logits.detach().clone().requires_grad_(True)
        value = -(token_logp(leaf, at.sequences).sum(-1).exp() * at.rewards).sum()
        (gradient,) = torch.autograd.grad(value, leaf)
    return gradient


def _ascends(reading: Reading) -> bool | None:
    at = tree(3, 2, ragged=reading.ragged, seed=7).fresh()
    rows = max(2, reading.fewest)
    mean = expected_gradient(reading.policy, at, rows=1 if reading.separable else rows,
                             separable=reading.separable)  # fmt: skip
    scale, error = fit(mean.flatten(), reward_gradient(at).flatten())
    return error <= 1e-3 and scale > 0
