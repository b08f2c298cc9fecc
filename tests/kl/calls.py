"""Valid calls of every public function of kl and objectives, found by its annotations.

The functions, their arguments and the names of their options are found by looking: a new function
is called without being named here.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable
from functools import cache, cached_property
from importlib import import_module
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

import kl_term.kl
import kl_term.objectives
from kl_term.kl.sequences import Sequences, enumerate_sequences
from kl_term.kl.term import KLTerm
from kl_term.kl.vocabulary_blocks import Chunks, Head
from kl_term.objectives.losses import ClipRange
from kl_term.objectives.routing import ExpertHead
from kl_term.shapes import Axes

#: Walks through blocks for another module, which has checked what it gives.
INTERNAL = {"statistics", "blocks", "widened", "block_logits", "per_token_advantages"}
INTERNAL |= {"log_normaliser", "largest_logits", "as_declared", "compute_dtype", "scattered"}
INTERNAL |= {"counted_tokens", "check_chunks", "check_pair", "check_head"}
INTERNAL |= {"through_head", "correction_of", "check_top_k"}
INTERNAL |= {"by_sequence", "packing_of", "no_overflow", "default_float"}
#: Left out of the calls here: tests/kl/test_packing.py has them.
OF_PACKED_ROWS = {"sequence_ids"}
#: What stands for an argument that is no tensor of the annotated shapes.
OTHERS = {
    Head: Head(torch.rand(5, 4, dtype=torch.float64)),
    Chunks: Chunks(),
    ClipRange: ClipRange(0.8, 1.2),
    ExpertHead: ExpertHead(*(torch.rand(*s, dtype=torch.float64) for s in ((3, 4), (3, 5, 4)))),
    Sequences: enumerate_sequences(3, 3),
}
#: Of classes with guarded methods: a choice of each way through them.
INSTANCES = {
    KLTerm: [
        KLTerm(estimator="k3"),
        KLTerm(estimator="k1", level="sequence", weighting="detached"),
        KLTerm(estimator="exact"),
        KLTerm(estimator="cross_entropy"),
        KLTerm(weighting="attached", ratio="prefix"),
        KLTerm(level="sequence", weighting="attached"),
        KLTerm(estimator="k1", placement="reward"),
        KLTerm(estimator="k2", placement="reward", level="sequence"),
    ]
}
#: Arguments that cannot be found: padded steps, and moments of sequences of the last token.
EXAMPLES = {
    "merged_coefficient": {"betas": [0.5, 1.5]},
    "averaged_coefficient": {"beta": 0.5, "rate": 0.5, "updates": 2},
    "partial_coefficient": {"beta": 0.5, "step_size": 0.5, "steps": [2, 1]},
    "sequence_ids": {"cu_seqlens": torch.tensor([0, 2, 5])},
    "process_supervision": {
        "step_rewards": torch.rand(2, 3, dtype=torch.float64),
        "step_ends": torch.tensor([[0, 2, 4], [1, 3, -1]]),
        "lengths": torch.tensor([5, 4]),
    },
    "markov_second_moments": {
        "logits": torch.rand(4, 3, dtype=torch.float64),
        "old_logits": torch.rand(4, 3, dtype=torch.float64),
        "own": torch.rand(4, 3, 3, dtype=torch.float64),
        "future": torch.rand(4, 3, dtype=torch.float64),
        "length": 2,
        "baseline": torch.rand(2, 4, dtype=torch.float64),
    },
    "markov_kl_moments": {
        "logits": torch.rand(4, 3, dtype=torch.float64),
        "ref_logits": torch.rand(4, 3, dtype=torch.float64),
        "old_logits": torch.rand(4, 3, dtype=torch.float64),
        "length": 2,
    },
}


def functions() -> dict[str, object]:
    found = {}
    for package in (kl_term.kl, kl_term.objectives):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for name, value in vars(import_module(module.name)).items():
                public = inspect.isfunction(value) and not name.startswith("_")
                where = f"{module.name.removeprefix('kl_term.')}.{name}"
                if public and value.__module__ == module.name and name not in INTERNAL:
                    found[where] = value
                if inspect.isclass(value) and value.__module__ == module.name:
                    for instance in INSTANCES.get(value, []):
                        found |= {f"{where}.{instance.name}.{m}": f for m, f in methods(instance)}
    return found


def methods(instance) -> list[tuple[str, object]]:
    """The guarded ones that the choices of this instance allow."""
    named = [(name, getattr(type(instance), name, None)) for name in dir(type(instance))]
    guarded = [n for n, m in named if inspect.isfunction(m) and hasattr(m, "__wrapped__")]
    allowed = [n for n in guarded if ("penalty" in n) == (instance.placement == "reward")]
    return [(name, getattr(instance, name)) for name in allowed if not name.startswith("_")]


FUNCTIONS = functions()


def axes_of(hint) -> Axes | None:
    options = (hint, *get_args(hint))
    return next((o.__metadata__[0] for o in options if get_origin(o) is Annotated), None)


def is_a(kind, hint) -> bool:
    return hint is kind or kind in get_args(hint)


class Calls:
    """Valid calls of a function, one for every choice of its options."""

    def __init__(self, function) -> None:
        self.function = function
        self.hints = get_type_hints(function, include_extras=True)
        self.hints.pop("return", None)
        has_sequences = any(is_a(Sequences, hint) for hint in self.hints.values())
        self.sizes = {"V": 3, "S": 13, "N": 27, "T": 3, "G": 4, "D": 4, "...": (2, 3)}
        if not has_sequences:
            self.sizes |= {"S": 4}
        self.quick = {"steps": 2} if "steps" in self.hints else {}  # what is refused is at once
        self.generator = torch.Generator().manual_seed(0)

    def floats(self, shape) -> Tensor:
        drawn = torch.rand(*shape, generator=self.generator, dtype=torch.float64)
        return 0.1 + 0.8 * drawn

    def shape(self, axes: Axes) -> tuple[int, ...]:
        sizes = (self.sizes[name] for name in axes.names.split())
        return tuple(itertools.chain(*(s if isinstance(s, tuple) else (s,) for s in sizes)))

    def candidates(self, name: str, hint) -> list:
        axes = axes_of(hint)
        if axes is not None and axes.names != "*":
            floats = self.floats(self.shape(axes))
            if axes.holds in ("mask", "booleans", "zeros and ones"):
                mask = floats > 0.3
                mask[..., 0] = True
                if axes.holds == "mask":  # a completion's tokens come first
                    mask = mask.cumprod(-1).bool()
                return [mask.double() if axes.holds == "zeros and ones" else mask]
            return [floats if axes.holds == "floats" else (3 * floats).long()]
        if is_a(Tensor, hint) or axes is not None:
            lead = self.sizes["..."]
            shapes = [lead, lead[:-1], (27, 13, 3), (2, 13, 3), (4, 3, 3), (13,), (2, 4), (5,)]
            shapes = [*shapes, (2, 3, 4), (*lead, 5)]
            ids = [torch.arange(13) % 4, torch.randint(3, (2, 3, 1), generator=self.generator)]
            of_shapes = [self.floats(shape) for shape in shapes]
            extra = [torch.ones(2, 4).long(), torch.ones(2).long()]
            return [*of_shapes, *ids, *extra]
        for kind, candidates in ((str, ["?"]), (float, [0.5, 1.5]), (int, [2, 1, 3])):
            if is_a(kind, hint):
                return candidates
        return [value for kind, value in OTHERS.items() if is_a(kind, hint)] or [True]

    @cached_property
    def valid(self) -> list[dict]:
        """Arguments that are accepted, one set for every option of a required name."""
        wanted = {
            name: self.candidates(name, self.hints[name])
            for name, parameter in inspect.signature(self.function).parameters.items()
            if name not in OF_PACKED_ROWS
            if parameter.default is inspect.Parameter.empty
            or is_a(Tensor, self.hints[name])
            or axes_of(self.hints[name])
        }
        if self.function.__name__ in EXAMPLES:
            return [EXAMPLES[self.function.__name__]]
        found: list[dict] = []
        pending = [{}]
        while pending:
            names = pending.pop()
            lists = [names.get(name, values) for name, values in wanted.items()]
            for values in itertools.product(*lists):
                given = dict(zip(wanted, values, strict=True)) | self.quick
                try:
                    self.function(**given)
                except ValueError as error:
                    said = re.match(r"(\w+) must be one of \[(.*?)\], got '\?'", str(error))
                    if said:
                        argument = next(
                            n for n, v in given.items() if isinstance(v, str) and v == "?"
                        )
                        options = re.findall(r"'(\w+)'", said[2])
                        pending += [names | {argument: [option]} for option in options]
                        break
                    unread = re.match(r"(\w+) would go unread", str(error))
                    if unread:
                        wanted.pop(unread[1])
                        pending.append(names)
                        break
                except (RuntimeError, TypeError, IndexError):
                    continue
                else:
                    found.append(given)
                    break
        return found


CALLS = {name: Calls(function) for name, function in FUNCTIONS.items()}


def tensors_of(result) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in tensors_of(part)]
    return [torch.tensor(result, dtype=torch.float64)]


def tensors(given: dict) -> dict[str, Tensor]:
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def each(name: str):
    calls = CALLS[name]
    found = calls.valid
    assert found, "no valid call was found"
    for given in found:
        for argument in tensors(given):
            yield calls, given, argument


def with_floats(given: dict, change) -> dict:
    """The same call with every tensor of floats changed."""
    floats = {name: value for name, value in tensors(given).items() if value.is_floating_point()}
    return given | {name: change(value) for name, value in floats.items()}


def options_of(calls: Calls, given: dict, name: str) -> list[str]:
    """What a choice with a default may be, as its refusal lists it."""
    try:
        calls.function(**given | {name: "?"})
    except ValueError as error:
        return re.findall(r"'(\w+)'", str(error).rpartition(", got")[0])
    return []


@cache
def each_choice(name: str) -> list[tuple[Calls, dict]]:
    """Valid calls with every combination of the options that have a default."""
    calls, found = CALLS[name], []
    signature = inspect.signature(calls.function).parameters
    for given in calls.valid:
        choices = {
            option: options
            for option, hint in calls.hints.items()
            if option not in given and is_a(str, hint) and signature[option].default is not None
            if (options := options_of(calls, given, option))
        }
        for values in itertools.product(*choices.values()):
            call = given | dict(zip(choices, values, strict=True))
            try:
                calls.function(**call)
            except ValueError as error:
                needed = re.match(r"(\w+) is needed", str(error))
                if not needed:  # a combination that is refused
                    continue
                call[needed[1]] = calls.candidates(needed[1], calls.hints[needed[1]])[0]
            found.append((calls, call))
    return found


ALL = pytest.mark.parametrize("name", FUNCTIONS)


def having(wanted: Callable[[object], bool]) -> pytest.MarkDecorator:
    """The functions that have an argument of such an annotation."""
    names = [name for name, calls in CALLS.items() if any(map(wanted, calls.hints.values()))]
    assert names, "an empty parametrisation would pass"
    return pytest.mark.parametrize("name", names)
