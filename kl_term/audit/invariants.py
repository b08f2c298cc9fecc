"""What a loss must not do: read padding or another answer, depend on order, width or the cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kl_term.audit.alignment import moves_elsewhere, other_logits
from kl_term.audit.batches import Batch, random_batch
from kl_term.audit.layouts import HIGH
from kl_term.audit.readings import Part, Reading
from kl_term.audit.trees import expected_gradient, state


@dataclass(frozen=True)
class Invariants:
    """What was found of the structure of a loss; a part that cannot be tried is None."""

    reads_padding: str | None  #: ``KL`` or ``loss``, whatever masked positions hold changes it
    poisoned_by: str | None  #: ``NaN`` or ``infinity`` at a masked position reaches it
    needs_mask: bool  #: it returns one number and takes no mask
    leaks: dict[str, float]  #: roles of constants that get a gradient
    depends_on_order: bool
    moves_with_advantage: str | None  #: ``sign`` or ``size``: what another advantage changes of it
    reads_others: bool  #: the KL's gradient of an answer moves with the numbers of another
    shifted: bool  #: the reference of a token moves the gradient of others and not its own
    left_out: tuple[int, ...]  #: positions of an answer, from 1, without a gradient of the KL
    sampler_shifted: bool  #: the same of the sampler, in the policy part
    fails_on_empty: bool  #: an answer without a counted token makes it NaN
    depends_on_width: str | None  #: ``KL`` or ``loss``
    depends_on_cut: bool  #: the mean of two halves is not the whole
    doubled: float  #: the KL of a batch given twice, over that of the batch
    reads_reference: bool
    reads_sampler: bool  #: the sampler changes the gradient of the whole loss
    reads_constant_logit: bool  #: adding a number to all logits of a position changes it
    zero_at_reference: bool  #: no expected gradient where policy and reference agree
    linear_in_beta: bool
    acts: bool  #: the coefficient changes value or gradient


def invariants(reading: Reading) -> Invariants:
    """Try each on batches with answers of several lengths."""
    batch = _batch(reading)
    kl, loss = _parts(reading)
    padded = reading.takes_mask and not reading.foreign.layout.packed
    parts = {"KL": kl, "loss": loss}
    return Invariants(
        reads_padding=_first(parts, lambda p: padded and _reads_padding(reading, p, batch)),
        poisoned_by=_poison(reading, loss, batch) if padded else None,
        needs_mask=not reading.ragged,
        leaks=_leaks(reading, batch),
        depends_on_order=not _same_rows(reading, kl, loss, batch),
        moves_with_advantage=_moves_with_advantage(reading, kl, batch),
        reads_others=reading.kind == "loss" and _reads_others(kl, batch),
        shifted=moves_elsewhere(lambda b: kl(b).gradient, batch, "ref_logits"),
        left_out=_left_out(kl) if reading.kind == "loss" else (),
        sampler_shifted=reading.has_policy_part
        and moves_elsewhere(lambda b: reading.policy(b).gradient, batch, "old_logits"),
        fails_on_empty=padded and _fails_on_empty(loss, batch),
        depends_on_width=_first(parts, lambda p: padded and _reads_width(reading, p, batch)),
        depends_on_cut=reading.shape == "number" and _depends_on_cut(kl, batch),
        doubled=_doubled(kl, batch),
        reads_reference=_reads_reference(kl, batch),
        reads_sampler=_reads_sampler(loss, batch),
        reads_constant_logit=reading.by_logits and _reads_shift(kl, batch),
        zero_at_reference=_zero_at_reference(reading),
        linear_in_beta=_linear(reading, batch),
        acts=_acts(reading, batch),
    )


def _batch(reading: Reading) -> Batch:
    return random_batch(
        rows=4, width=5, vocab_size=4, distance=0.4, staleness=0.06, ragged=reading.ragged, seed=31
    )


def _parts(reading: Reading) -> tuple[Callable[[Batch], Part], Callable[[Batch], Part]]:
    return reading.kl, lambda batch: reading.whole(batch, HIGH)


def _first(
    parts: dict[str, Callable[[Batch], Part]], holds: Callable[[Callable[[Batch], Part]], bool]
) -> str | None:
    return next((name for name, part in parts.items() if holds(part)), None)


def close(one: Tensor, other: Tensor, tolerance: float = 1e-6) -> bool:
    """Equal up to rounding, relative to the largest entry; NaN is equal to nothing."""
    if one.shape != other.shape:
        return False
    size = max(one.abs().max().item(), other.abs().max().item(), 1e-12) if one.numel() else 1.0
    return bool((one - other).abs().max() <= tolerance * size) if one.numel() else True


def _alike(one: Part, other: Part, rows: Tensor | None = None) -> bool:
    value, gradient = one
    if rows is not None:
        gradient = gradient[rows]
        value = value[rows] if value.ndim else value
    return close(value, other.value, 2e-5) and close(gradient, other.gradient, 2e-5)


def filled(batch: Batch, numbers: Tensor) -> Batch:
    """Other numbers at the masked positions of policy, reference and sampler."""

    def fill(x: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return torch.where(batch.mask.unsqueeze(-1), x, noise * numbers)

    worth = batch.advantages.unsqueeze(-1).expand(batch.mask.shape)
    return replace(
        batch,
        advantages=torch.where(batch.mask, worth, 7.0 * numbers),
        logits=fill(batch.logits, 1),
        ref_logits=fill(batch.ref_logits, 2),
        old_logits=fill(batch.old_logits, 3),
    )


def _reads_padding(reading: Reading, part: Callable[[Batch], Part], batch: Batch) -> bool:
    before, after = part(batch), part(filled(batch, torch.tensor(1.5)))
    return not _alike(before, after) or bool((before.gradient[~batch.mask] != 0).any())


def _poison(reading: Reading, loss: Callable[[Batch], Part], batch: Batch) -> str | None:
    """Poison at masked positions only counts where what is counted, or the sum, changes."""
    before = loss(batch)
    for name, number in (("infinity", -torch.inf), ("NaN", torch.nan)):
        chosen = torch.zeros_like(batch.logits).scatter(-1, batch.tokens.unsqueeze(-1), 1.0)
        put = torch.where((chosen > 0) & ~batch.mask.unsqueeze(-1), number, 0.0)
        poisoned = replace(
            batch,
            logits=batch.logits + put,
            ref_logits=batch.ref_logits + put,
            old_logits=batch.old_logits + put,
        )
        try:
            after = loss(poisoned)
        except Exception:
            return name
        kept = batch.mask
        if not close(before.value, after.value, 2e-5) or not close(
            before.gradient[kept], after.gradient[kept], 2e-5
        ):
            return name
        if not reading.foreign.by_logits and not close(
            before.gradient[~kept], after.gradient[~kept], 2e-5
        ):
            return name
    return None


def _leaks(reading: Reading, batch: Batch) -> dict[str, float]:
    if reading.kind == "reward":
        return {}
    return reading.foreign.call(batch, HIGH, watch=True).leaks


def _same_rows(
    reading: Reading, kl: Callable[[Batch], Part], loss: Callable[[Batch], Part], batch: Batch
) -> bool:
    order = torch.tensor([2, 0, 3, 1])
    if reading.foreign.layout.packed:
        return True  # another order packs other rows: compared by the enumeration
    return all(_alike(p(batch), p(batch.only(order)), order) for p in (kl, loss))


def _reads_others(kl: Callable[[Batch], Part], batch: Batch) -> bool:
    """Other numbers in the first answer, of the same length."""
    first = torch.zeros_like(batch.logits)
    first[0] = 1.0
    changed = replace(
        batch,
        logits=torch.where(first > 0, other_logits(batch.logits), batch.logits),
        ref_logits=torch.where(first > 0, batch.logits, batch.ref_logits),
    )
    before, after = kl(batch), kl(changed)
    return not close(before.gradient[1:], after.gradient[1:], 2e-5)


def _moves_with_advantage(
    reading: Reading, kl: Callable[[Batch], Part], batch: Batch
) -> str | None:
    """Whether the gradient of the KL turns with the sign of the advantages, or moves at all."""
    if not (reading.has_policy_part and reading.foreign.has_beta):
        return None
    if not reading.foreign.roles & {"advantages", "inputs"}:
        return None
    before, turned = (kl(b).gradient for b in (batch, replace(batch, advantages=-batch.advantages)))
    if close(before, turned, 1e-3 if reading.narrow else 2e-5):
        return None
    return "sign" if close(before, -turned, 1e-3 if reading.narrow else 2e-5) else "size"


def _left_out(kl: Callable[[Batch], Part]) -> tuple[int, ...]:
    """Whatever the numbers are: on full answers, where other positions have a gradient."""
    moved = torch.zeros(4, dtype=torch.bool)
    for seed in (41, 42, 43):
        gradient = kl(
            random_batch(
                rows=4, width=4, vocab_size=4, distance=0.4, staleness=0.06, ragged=False, seed=seed
            )
        ).gradient
        of_token = (gradient != 0).any(-1) if gradient.ndim == 3 else gradient != 0
        moved |= of_token.any(0)
    return tuple((~moved).nonzero().flatten().add(1).tolist()) if bool(moved.any()) else ()


def _fails_on_empty(loss: Callable[[Batch], Part], batch: Batch) -> bool:
    mask = batch.mask.clone()
    mask[0] = False
    try:
        found = loss(replace(batch, mask=mask))
    except Exception:
        return True
    return not all(bool(x.isfinite().all()) for x in found)


def _reads_width(reading: Reading, part: Callable[[Batch], Part], batch: Batch) -> bool:
    """More padding, the longest completion allowed as it was."""
    width = batch.mask.shape[1]
    reading.foreign.allowed = width
    before, after = part(batch), part(batch.wider(3))
    reading.foreign.allowed = None
    value = after.value[:, :width] if after.value.ndim == 2 else after.value
    return not _alike(before, Part(value, after.gradient[:, :width]))


def _depends_on_cut(kl: Callable[[Batch], Part], batch: Batch) -> bool:
    halves = [kl(batch.only([0, 1])).value, kl(batch.only([2, 3])).value]
    return not close(kl(batch).value, sum(halves, torch.tensor(0.0)) / 2, 2e-5)


def _doubled(kl: Callable[[Batch], Part], batch: Batch) -> float:
    once, twice = kl(batch), kl(batch.only([0, 1, 2, 3, 0, 1, 2, 3]))
    before, after = once.gradient.flatten(), (twice.gradient[:4] + twice.gradient[4:]).flatten()
    size = before @ before
    return ((after @ before) / size).item() if size > 0 else 1.0


def _reads_reference(kl: Callable[[Batch], Part], batch: Batch) -> bool:
    other = replace(batch, ref_logits=batch.ref_logits.flip(-1) * 0.7 + 0.1)
    return not _alike(kl(batch), kl(other))


def _reads_sampler(loss: Callable[[Batch], Part], batch: Batch) -> bool:
    other = replace(batch, old_logits=other_logits(batch.old_logits))
    return not close(loss(batch).gradient, loss(other).gradient, 2e-5)


def _reads_shift(kl: Callable[[Batch], Part], batch: Batch) -> bool:
    """Logits are known up to a constant at each position."""
    generator = torch.Generator().manual_seed(5)
    shift = torch.randn(*batch.mask.shape, 1, generator=generator, dtype=torch.float64)
    return not _alike(kl(batch), kl(replace(batch, logits=batch.logits + shift)))


def _zero_at_reference(reading: Reading) -> bool:
    at = state(3, seed=3).fresh()
    there = replace(at, ref_logits=at.logits)
    rows = reading.fewest
    gradients = [expected_gradient(reading.kl, place, rows=rows).norm() for place in (there, at)]
    return bool(gradients[0] <= max(gradients[1] * 1e-3, 1e-9))


#: Coefficients at which the KL is compared, among them those of usual defaults.
_COEFFICIENTS = ((1e-3, 2e-3), (0.05, 0.1), (0.25, 0.5), (0.5, 1.0))


def _linear(reading: Reading, batch: Batch) -> bool:
    """Whether twice the coefficient is twice the KL."""
    if not reading.foreign.has_beta:
        return True
    slopes = []
    for low, high in _COEFFICIENTS:
        a, b = (reading.whole(batch, beta).gradient for beta in (low, high))
        slopes.append((b - a) / (high - low))
    rounding = 3e-2 if reading.narrow else 1e-4  # a difference of two losses has few digits
    usual = 0.1 if reading.coarse else 1e-4
    return all(
        close(slope, slopes[-1], usual if index else max(usual, rounding))
        for index, slope in enumerate(slopes[:-1])
    )


def _acts(reading: Reading, batch: Batch) -> bool:
    if not reading.foreign.has_beta:
        return True
    for betas in _COEFFICIENTS:
        low, high = (reading.whole(batch, beta) for beta in betas)
        if not (torch.equal(low.value, high.value) and torch.equal(low.gradient, high.gradient)):
            return True
    return False
