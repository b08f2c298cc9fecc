"""Other ways to call a function that cannot be called as its arguments say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

from kl_term.audit.batches import Batch
from kl_term.audit.calling import Foreign
from kl_term.audit.holding import numbers_in
from kl_term.audit.spellings import role_of

#: Changes how a function is called, and returns what takes the change back.
Way = Callable[[Foreign], Callable[[], None]]
#: What a batch says that cannot be cut into groups of a fixed size.
_UNEVEN = re.compile(r"invalid for input|divi|multiply up|AssertionError|group", re.IGNORECASE)
#: Sizes of groups that a function may insist on.
_SIZES = (2, 4, 8, 3, 6, 16)


def ways(foreign: Foreign, error: str) -> Iterator[Way]:
    """What else to try, given what it said."""
    if "config" in foreign.roles and not foreign.nests:
        yield _nested
    for name in reversed(_optional(foreign)):
        yield _without(name)
    if not _UNEVEN.search(error):
        return
    if _sizes_in(foreign):
        yield _sized
    for size in _SIZES:
        yield _in_multiples(size)


def _nested(foreign: Foreign) -> Callable[[], None]:
    """Configurations lie in its configuration."""
    foreign.nests = True
    return lambda: setattr(foreign, "nests", False)


def _optional(foreign: Foreign) -> list[str]:
    """Arguments with a default that were only guessed; a mask where there is another one."""
    try:
        parameters = inspect.signature(
            getattr(foreign.function, "forward", foreign.function)
        ).parameters
    except (TypeError, ValueError):
        return []
    masks = [n for n, role in foreign.plan.roles.items() if role == "mask"]
    keep = {"beta"} if len(masks) > 1 else {"beta", "mask"}
    empty = inspect.Parameter.empty
    needed = {n for n, p in parameters.items() if p.default is empty}
    return [n for n, role in foreign.plan.guessed.items() if n not in needed and role not in keep]


def _without(name: str) -> Way:
    """An argument is left at its default."""

    def way(foreign: Foreign) -> Callable[[], None]:
        plan = foreign.plan
        roles, guessed = (
            {n: role for n, role in of.items() if n != name} for of in (plan.roles, plan.guessed)
        )
        foreign.plan = plan._replace(roles=roles, guessed=guessed)
        return lambda: setattr(foreign, "plan", plan)

    return way


def settle_guesses(foreign: Foreign, probe: Batch, beta: float) -> None:
    """An argument with a default that was guessed, and makes numbers NaN, keeps its default."""
    if _is_finite(foreign, probe, beta):
        return
    for name in reversed(_optional(foreign)):
        take_back = _without(name)(foreign)
        if _is_finite(foreign, probe, beta):
            return
        take_back()


def _is_finite(foreign: Foreign, probe: Batch, beta: float) -> bool:
    try:
        output = foreign.call(probe, beta)
    except Exception:
        return False
    gradient = output.value if output.gradient is None else output.gradient
    return bool(output.value.isfinite().all() and gradient.isfinite().all())


def _sizes_in(foreign: Foreign) -> dict[str, list[str]]:
    """Argument -> paths to the size of a group in the configuration that it is."""
    found = {
        name: [".".join(path) for path, _ in numbers_in(value) if role_of(path[-1]) == "group_size"]
        for name, value in foreign.plan.fixed.items()
        if not name.startswith("*")
    }
    return {name: paths for name, paths in found.items() if paths}


def _sized(foreign: Foreign) -> Callable[[], None]:
    """A batch is a group, whatever size its configuration says."""
    foreign.group_paths = _sizes_in(foreign)
    return lambda: setattr(foreign, "group_paths", {})


def _in_multiples(size: int) -> Way:
    """A batch whose answers cannot be cut into groups of this size holds that many copies."""

    def way(foreign: Foreign) -> Callable[[], None]:
        foreign.multiple = size
        return lambda: setattr(foreign, "multiple", 1)

    return way
