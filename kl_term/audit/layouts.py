"""In which layout a foreign function can be called, and which number is its coefficient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kl_term.audit.alignment import BY_LOGITS, SHORTER, is_aligned
from kl_term.audit.arguments import numbers_of
from kl_term.audit.batches import Batch, random_batch
from kl_term.audit.calling import Foreign, one_line
from kl_term.audit.layout import LAYOUTS, Alignment, Layout
from kl_term.audit.spellings import AMBIGUOUS, OF_TOP_K, Role, words_of
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
    for layout in _layouts(foreign):
        relevant = _relevant(layout, foreign.roles)
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
    raise UserError(f"{foreign.name}: cannot be called: {one_line(first)}") from None


def _takes_one_token(foreign: Foreign, probe: Batch) -> bool:
    """Whether a pack of one answer of one token has the axes of a longer one."""
    try:
        foreign.call(probe.only([int(probe.mask.sum(-1).argmin())]), HIGH)
    except Exception:
        return False
    return True


def _layouts(foreign: Foreign) -> Iterator[Layout]:
    """In the order in which they are tried."""
    packed = bool(foreign.roles & {"cu_seqlens", "sequence_ids"})
    masked = bool(foreign.roles & {"mask", "padding"})
    packs: tuple[bool, ...] = (packed,)
    if "position_ids" in foreign.roles and not packed:
        packs = (False, True) if masked else (True,)
    before: tuple[Alignment, ...] = ()
    if not any(packs):
        before = BY_LOGITS if foreign.by_logits else SHORTER
    shapes = [Layout(packed=p) for p in packs]
    shapes += [Layout(prompted=alignment) for alignment in before]
    shapes += [Layout(packed=True, one_row=True)] if any(packs) else []
    shapes.append(Layout(packed=True, listed=True))
    for shape in shapes:  # packed, one advantage an answer fits nothing else
        for layout in sorted(LAYOUTS, key=lambda of: shape.packed and of.advantages != "column"):
            types = {name: getattr(layout, name) for name in ("advantages", "mask", "floats")}
            yield shape._replace(**types)


def guess_coefficient(foreign: Foreign) -> None:
    """A number with a default that multiplies what reads the reference is the coefficient."""
    if foreign.has_beta:
        return
    found = [
        name for name, default in foreign.untold().items() if _multiplies(foreign, name, default)
    ]
    if len(found) == 1:
        foreign.plan.roles[found[0]] = foreign.plan.guessed[found[0]] = "beta"


def _multiplies(foreign: Foreign, name: str, default: float) -> bool:
    """Whether steps of a number change a loss evenly, by what depends on the reference."""
    probe = probe_of(foreign)
    other = replace(probe, ref_logits=probe.ref_logits.flip(-1))

    def at(batch: Batch, times: float) -> Tensor:
        plan = foreign.plan._replace(fixed=foreign.plan.fixed | {name: times * default})
        output = replace(foreign, plan=plan).call(batch, HIGH)
        return output.value if output.gradient is None else output.gradient

    try:
        first, second, third = (at(probe, times) for times in (1.0, 2.0, 3.0))
        elsewhere = at(other, 2.0) - at(other, 1.0)
    except Exception:
        return False
    step = second - first
    even = torch.allclose(third - second, step, rtol=1e-3, atol=1e-7 * float(step.abs().max()))
    return even and bool(step.abs().max() > 0) and not torch.allclose(elsewhere, step, rtol=1e-3)


def settle_copies(foreign: Foreign) -> None:
    """Of copies of a batch, which a function gets that insists on a size, it may be the sum."""
    if foreign.multiple == 1:
        return
    batch = probe_of(foreign).only([i % 3 for i in range(foreign.multiple)])
    once = foreign.call(batch, HIGH).value
    twice = foreign.call(batch.only([*range(batch.rows)] * 2), HIGH).value
    foreign.summed = once.ndim == 0 and torch.allclose(twice, 2 * once, rtol=1e-4, atol=1e-9)


def settle_padding(foreign: Foreign) -> None:
    """Under the name of a padding mask some mark the padding, and some what is counted."""
    marked = [name for name, role in foreign.plan.roles.items() if role == "padding"]
    if not marked:
        return
    probe = probe_of(foreign)
    if not _reads_the_rest(foreign, probe):
        return
    for name in marked:
        foreign.plan.roles[name] = "mask"
    if _reads_the_rest(foreign, probe):  # it reads all: as it says
        for name in marked:
            foreign.plan.roles[name] = "padding"


def _reads_the_rest(foreign: Foreign, probe: Batch) -> bool:
    """Whether masked tokens have a gradient, or, where nothing has, counted ones move nothing."""
    output = foreign.call(probe, HIGH)
    if output.gradient is not None and bool((output.gradient != 0).any()):
        return bool((output.gradient[~probe.mask] != 0).any())
    other = torch.where(probe.mask.unsqueeze(-1), probe.logits.flip(-1) * 0.7, probe.logits)
    moved = foreign.call(replace(probe, logits=other, old_logits=other), HIGH)
    return torch.equal(output.value, moved.value)


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


def settle_labels(foreign: Foreign) -> None:
    """Labels without a mask beside them may say themselves what is counted: not what is -100."""
    tokens = [name for name, role in foreign.plan.roles.items() if role == "tokens"]
    labels = any(words_of(name) & {"labels", "targets"} for name in tokens)
    first, probe = foreign.layout, probe_of(foreign)
    if not labels or first.packed or foreign.roles & {"mask", "padding"}:
        return
    foreign.layout = first._replace(marked=True)
    try:
        gradient = foreign.call(probe, HIGH).gradient
    except Exception:
        gradient = None
    if gradient is None or bool((gradient[~probe.mask] != 0).any()):
        foreign.layout = first


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


def _relevant(layout: Layout, held: set[str]) -> Layout:
    """What of a layout a function with these arguments can see."""
    if not held & {"mask", "padding", "inputs"}:
        layout = layout._replace(mask=torch.bool)
    if not held & {"advantages", "inputs"}:
        layout = layout._replace(advantages="row")
    return layout


def _fits(foreign: Foreign, value: Tensor, probe: Batch) -> bool:
    counted = (int(probe.mask.sum()),)
    return value.shape in ((), (1,), (probe.rows,), tuple(probe.mask.shape), counted)
