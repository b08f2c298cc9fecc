"""In which layout a foreign function can be called, and which number is its coefficient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kl_term.audit.alignment import SHORTER, is_aligned
from kl_term.audit.arguments import numbers_of
from kl_term.audit.batches import Batch, random_batch
from kl_term.audit.calling import Foreign, Output, one_line
from kl_term.audit.layout import Layout
from kl_term.audit.shapes import layouts_to_try, relevant_of
from kl_term.audit.spellings import AMBIGUOUS, OF_TOP_K, Role
from kl_term.audit.ways import ways
from kl_term.errors import UserError

#: Coefficients between which a KL is isolated; small, so that no clip of the policy part decides.
LOW, HIGH = 0.25, 0.5


def probe_of(foreign: Foreign) -> Batch:
    return random_batch(
        rows=3, width=4, vocab_size=5, distance=0.5, staleness=0.08, ragged=True, seed=11
    )


def layout_of(foreign: Foreign) -> Layout:
    """The first layout that a function can be called with, as it is or in another way."""
    try:
        return _layout_of(foreign)
    except UserError as error:
        first = error
    for way in ways(foreign, str(first)):
        undo = way(foreign)
        try:
            return _layout_of(foreign)
        except UserError as error:
            if foreign.nests and "reads" in str(error):
                raise
            undo()
    raise first from None


def _layout_of(foreign: Foreign) -> Layout:
    probe = probe_of(foreign)
    first: Exception | None = None
    tried = set()
    fallback: Layout | None = None
    for layout in layouts_to_try(foreign):
        relevant = relevant_of(layout, foreign.roles)
        if relevant in tried:
            continue
        tried.add(relevant)
        foreign.layout = layout
        try:
            output = foreign.call(probe, HIGH)
            shorter = layout.prompted in SHORTER
            if shorter and not is_aligned(foreign, probe, HIGH):
                continue
        except UserError as error:
            first = first or error
            continue
        except Exception as error:
            first = first or error
            if _is_cuda(error):
                break
            continue
        if _fits(foreign, output.value, probe):
            if not layout.packed or _takes_one_token(foreign, probe):
                return layout
            fallback = fallback or layout
    if fallback is not None:
        foreign.layout = fallback
        return fallback
    if first is None:
        raise UserError(f"{foreign.name}: returns {tuple(output.value.shape)} for answers [3, 4]")
    if isinstance(first, UserError):
        raise first
    if _is_cuda(first):
        raise UserError(f"{foreign.name}: needs CUDA: {one_line(first)}") from None
    if "'Tensor' object is not callable" in str(first):
        raise UserError(
            f"{foreign.name}: calls an argument as one calls a model, and an audit gives log-probs "
            "or logits: pass the part that works on those, or a stub by given={ARGUMENT: STUB}"
        ) from None
    raise UserError(f"{foreign.name}: cannot be called: {one_line(first)}") from None


def _takes_one_token(foreign: Foreign, probe: Batch) -> bool:
    """Whether a pack of one answer of one token has the axes of a longer one."""
    try:
        foreign.call(probe.only([int(probe.mask.sum(-1).argmin())]), HIGH)
    except Exception:
        return False
    return True


def guess_coefficient(foreign: Foreign) -> None:
    """A number with a default that multiplies what reads the reference is the coefficient."""
    if foreign.has_beta:
        return
    numbers = foreign.untold() | dict.fromkeys(foreign.switched_off(), 1.0)
    found = [name for name, default in numbers.items() if _multiplies(foreign, name, default)]
    if len(found) == 1:
        foreign.plan.roles[found[0]] = foreign.plan.guessed[found[0]] = "beta"


def _multiplies(foreign: Foreign, name: str, default: float) -> bool:
    """Whether steps of a number change a loss evenly, by what depends on the reference."""
    probe = probe_of(foreign)
    other = replace(probe, ref_logits=probe.ref_logits.flip(-1))

    def at(batch: Batch, times: float) -> Output:
        plan = foreign.plan._replace(fixed=foreign.plan.fixed | {name: times * default})
        return replace(foreign, plan=plan).call(batch, HIGH)

    try:
        first, second, third, *elsewhere = (
            at(batch, times) for batch in (probe, other) for times in (1.0, 2.0, 3.0)
        )
    except Exception:
        return False
    # of a log-ratio the gradient is the same everywhere, and the value tells
    told = _reads(first.gradient, elsewhere[0].gradient)

    def step(low: Output, high: Output) -> Tensor:
        if told and high.gradient is not None and low.gradient is not None:
            return high.gradient - low.gradient
        return high.value - low.value

    once, again, there = step(first, second), step(second, third), step(*elsewhere[:2])
    even = torch.allclose(again, once, rtol=1e-3, atol=1e-7 * float(once.abs().max()))
    return even and bool(once.abs().max() > 0) and not torch.allclose(there, once, rtol=1e-3)


def _reads(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and not torch.equal(one, other)


def settle_copies(foreign: Foreign) -> None:
    """Of copies of a batch, which a function gets that insists on a size, it may be the sum."""
    if foreign.multiple == 1:
        return
    batch = probe_of(foreign).only([i % 3 for i in range(foreign.multiple)])
    once = foreign.call(batch, HIGH).value
    twice = foreign.call(batch.only([*range(batch.rows)] * 2), HIGH).value
    foreign.summed = once.ndim == 0 and torch.allclose(twice, 2 * once, rtol=1e-4, atol=1e-9)


def settle_weights(foreign: Foreign) -> None:
    """Under the name of weights some pass the advantages, and some what is counted."""
    held = {**foreign.plan.guessed, **foreign.bag_roles}
    named = [name for name, role in held.items() if name in AMBIGUOUS and role == "advantages"]
    every = {**foreign.plan.roles, **foreign.bag_roles}
    others = {role for name, role in every.items() if name not in named}
    if not named or not ("advantages" in others or _weighs_all(foreign, others)):
        return
    first, plan, inside = foreign.layout, foreign.plan, foreign.bag_roles
    weighed: dict[str, Role] = dict.fromkeys(named, "mask")
    given = {n: role for n, role in weighed.items() if n in plan.roles}
    foreign.plan = plan._replace(
        roles=plan.roles | given,
        guessed=plan.guessed | given,
        fixed=plan.fixed | {f"*{n}": role for n, role in weighed.items() if n not in given},
    )
    foreign.bag_roles = {n: role for n, role in inside.items() if n not in named}
    try:
        foreign.layout = layout_of(foreign)
    except UserError:
        foreign.layout, foreign.plan, foreign.bag_roles = first, plan, inside


def _weighs_all(foreign: Foreign, others: set[str]) -> bool:
    """Whether the KL turns with the weights too, and not the policy loss alone."""
    probe = probe_of(foreign)
    negated = replace(probe, advantages=-probe.advantages)
    if not others & {"mask", "padding"}:
        gradients = [foreign.call(batch, 0.0).gradient for batch in (probe, negated)]
        # else they have a gradient of their own, without the KL
        return not any(g is not None and bool((g != 0).any()) for g in gradients)
    if foreign.has_beta:
        return False
    other = replace(probe, ref_logits=probe.ref_logits.flip(-1))
    here, turned, elsewhere = (foreign.call(b, HIGH).gradient for b in (probe, negated, other))
    if here is None or turned is None or elsewhere is None:
        return False
    return torch.allclose(here, -turned, rtol=1e-4) and not torch.allclose(here, elsewhere)


def settle_advantages(foreign: Foreign) -> None:
    """One an answer can be broadcast along the wrong axis of a loss that wants one a token."""
    first, probe = foreign.layout, probe_of(foreign)
    if "advantages" not in foreign.roles or first.advantages != "row" or first.packed:
        return

    def gradient(batch: Batch) -> Tensor | None:
        return foreign.call(batch, 0.0).gradient

    if not mixes_advantages(gradient, probe):
        return
    foreign.layout = first._replace(advantages="token")
    try:
        if not mixes_advantages(gradient, probe):
            return
    except Exception:
        foreign.notes.discard("modifies its arguments")
    foreign.layout = first


def settle_mixture(foreign: Foreign) -> None:
    """Of two policies' logits alone, a guessed coefficient that changes the loss and does not
    scale it mixes two divergences: it keeps its default."""
    guessed = [name for name, role in foreign.plan.guessed.items() if role == "beta"]
    alone = not foreign.roles & {"advantages", "rewards", "token_rewards", "inputs"}
    both = {"logits", "ref_logits"} <= foreign.roles
    if not (guessed and alone and both) or foreign.factory or foreign.beta_path:
        return
    probe = probe_of(foreign)
    low, high = (foreign.call(probe, beta).value.double() for beta in (LOW, HIGH))
    if torch.equal(low, high) or torch.allclose(high * LOW, low * HIGH, rtol=1e-4, atol=1e-9):
        return
    if guessed[0] in numbers_of(foreign.function):
        del foreign.plan.roles[guessed[0]], foreign.plan.guessed[guessed[0]]


def settle_top_k(foreign: Foreign) -> None:
    """Of all tokens nothing is left over: a class for the rest can then be NaN."""
    if not foreign.roles & {*OF_TOP_K}:
        return
    output = foreign.call(probe_of(foreign), HIGH)
    found = (x for x in (output.value, output.gradient) if x is not None)
    if not all(bool(x.isfinite().all()) for x in found):
        foreign.kept = -1  # all but the least likely


def mixes_advantages(gradient: Callable[[Batch], Tensor | None], batch: Batch) -> bool:
    """Whether an answer's gradient moves with the advantage of another.

    A mean taken off, or a spread divided by, reads them too, and is right: what is added to all
    advantages then changes nothing.
    """
    other = torch.cat([-2.0 * batch.advantages[:1], batch.advantages[1:]])
    here, moved, shifted = (
        gradient(replace(batch, advantages=advantages))
        for advantages in (batch.advantages, other, batch.advantages + 3.0)
    )
    if here is None or moved is None or shifted is None:
        return False
    alone = torch.allclose(here[1:], moved[1:], rtol=1e-4, atol=1e-9)
    return not alone and not torch.allclose(here, shifted, rtol=1e-4, atol=1e-9)


def _is_cuda(error: Exception) -> bool:
    return "cuda" in str(error).lower() or "nvidia" in str(error).lower()


def _fits(foreign: Foreign, value: Tensor, probe: Batch) -> bool:
    counted = (int(probe.mask.sum()),)
    return value.shape in ((), (1,), (probe.rows,), tuple(probe.mask.shape), counted)
