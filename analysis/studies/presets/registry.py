"""Every preset by its name, and what a command changes of it.

``@preset`` puts a function in :data:`PRESETS` under its own name. ``analysis sweep NAME -o
parameter=value`` changes a parameter of the function, a field of what its runs share, or seeds.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, validate_call

from analysis.records.preset import Preset
from kl_term.errors import first_problem
from kl_term.plain_checks import check_choice

#: Name -> a function from parameters to the preset.
PRESETS: dict[str, Callable[..., Preset]] = {}

#: A parameter that every preset has: the first of its seeds, which follow each other. A range that
#: no other preset uses makes a second, independent sample of the same runs.
FIRST_SEED = "first_seed"
#: Of one population; more is a slip of the keyboard, and its list of runs alone takes minutes.
MOST_SEEDS = 10_000


def preset(function: Callable[..., Preset]) -> Callable[..., Preset]:
    """Register a function from parameters to a population: its name is that of the preset."""
    checked = validate_call(function, config=ConfigDict(allow_inf_nan=False, strict=True))

    @functools.wraps(function)
    def named(**parameters: Any) -> Preset:
        return checked(**parameters).model_copy(update={"name": function.__name__})

    PRESETS[function.__name__] = named
    return named


def make_preset(name: str, overrides: Mapping[str, Any]) -> Preset:
    """The preset of that name, some of its parameters replaced.

    Args:
        name: one of :data:`PRESETS`.
        overrides: of the preset's function; of any preset ``first_seed``, ``num_seeds`` and the
            fields of its configuration, such as ``updates``.

    Raises:
        ValueError: an unknown preset or parameter, or a value that does not fit.
    """
    check_choice("preset", name, PRESETS)
    own = inspect.signature(PRESETS[name]).parameters
    given = {parameter: value for parameter, value in overrides.items() if parameter in own}
    others = {parameter: value for parameter, value in overrides.items() if parameter not in own}
    try:
        made = PRESETS[name](**{parameter: _frozen(value) for parameter, value in given.items()})
        shared = type(made.config).model_fields
        for parameter in others:
            known = dict.fromkeys((*own, FIRST_SEED, "num_seeds", *shared))
            check_choice(f"parameter of preset {name!r}", parameter, known)
        fields = made.config.model_dump() | {n: v for n, v in others.items() if n in shared}
        config = type(made.config).model_validate_json(json.dumps(fields), strict=True)
        return made.model_copy(update={"config": config, "seeds": _seeds(made.seeds, **others)})
    except ValidationError as error:
        raise ValueError(f"preset {name!r}: {first_problem(error)}") from None


def _frozen(value: Any) -> Any:
    """A list as it was typed, as the tuple that it stands for."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@validate_call(config=ConfigDict(strict=True))
def _seeds(
    usual: tuple[int, ...],
    *,
    first_seed: Annotated[int, Field(ge=0)] | None = None,
    num_seeds: Annotated[int, Field(ge=1)] | None = None,
    **_: Any,
) -> tuple[int, ...]:
    first = usual[0] if first_seed is None else first_seed
    return fresh_seeds(first, len(usual) if num_seeds is None else num_seeds)


def fresh_seeds(first: int, count: int) -> tuple[int, ...]:
    """Seeds from ``first`` on; each preset has its own range, which no search has seen.

    Runs that are compared with another preset's seed by seed take theirs: ``other().seeds``.

    Raises:
        ValueError: none, or more than ``MOST_SEEDS``.
    """
    if count < 1:
        raise ValueError(f"num_seeds must be at least 1, not {count}")
    if count > MOST_SEEDS:
        raise ValueError(f"num_seeds must be at most {MOST_SEEDS:,}, not {count:,}")
    return tuple(range(first, first + count))
