"""Every public function of kl and objectives, with arguments that are wrong in one place.

The functions, their arguments and the names of their options are found by looking: a new function
is tried without being named here. A wrong call must raise an error that names the argument, or,
for NaN, show it in the result; it must not broadcast, and not end in an error of torch.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import re
import sys
from functools import partial
from importlib import import_module
from typing import Annotated, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

import kl_term.kl
import kl_term.objectives
from kl_term.checks import checked, trusted
from kl_term.kl.divergences import log_softmaxes
from kl_term.kl.estimators import k3_clip
from kl_term.kl.sequences import Sequences, enumerate_sequences
from kl_term.kl.surrogates import kl_loss, kl_penalty
from kl_term.kl.term import KLTerm
from kl_term.kl.vocabulary_blocks import Chunks, Head
from kl_term.objectives.filtering import informative_groups
from kl_term.objectives.lengths import relative_length_reward
from kl_term.objectives.losses import ClipRange, policy_loss
from kl_term.objectives.rejection import shortest_right
from kl_term.objectives.routing import ExpertHead
from kl_term.shapes import Axes, LogProbs, Mask

#: Walks through blocks for another module, which has checked what it gives.
INTERNAL = {"statistics", "blocks", "widened", "block_logits", "per_token_advantages"}
INTERNAL |= {"log_normaliser", "largest_logits", "as_declared", "compute_dtype", "scattered"}
INTERNAL |= {"counted_tokens", "check_chunks", "check_pair", "check_head"}
INTERNAL |= {"through_head", "correction_of", "check_top_k"}
INTERNAL |= {"by_sequence", "packing_of"}
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


def shows_nan(result) -> bool:
    return any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors_of(result))


def outcome(function, given: dict, argument: str):
    """The result, or a message that names the argument; anything else fails."""
    try:
        return function(**given)
    except Exception as error:
        named = isinstance(error, (ValueError, TypeError)) and re.search(
            rf"\b{argument}\b", str(error)
        )
        if not named:
            pytest.fail(f"{argument}: {type(error).__name__}: {error}")
        return None


def tensors(given: dict) -> dict[str, Tensor]:
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def each(name: str):
    calls = CALLS[name]
    found = calls.valid()
    assert found, "no valid call was found"
    for given in found:
        for argument in tensors(given):
            yield calls, given, argument


def is_read(function, argument: str) -> bool:
    """A KL term says that it takes what it does not read."""
    term = getattr(function, "__self__", None)
    if term is None or argument == "mask":
        return True
    if term.reads_logits:
        return argument in ("logits", "ref_logits")
    if term.estimator == "cross_entropy":
        return argument == "logp"
    return argument in ("logp", "ref_logp") or (argument == "old_logp" and term.weighting != "none")


ALL = pytest.mark.parametrize("name", FUNCTIONS)


def test_every_public_function_is_guarded():
    bare = [n for n, f in FUNCTIONS.items() if not hasattr(f, "__wrapped__")]
    takes = [n for n in bare if any(is_a(Tensor, h) for h in CALLS[n].hints.values())]
    assert not takes
    assert len(FUNCTIONS) > 110


@ALL
def test_nan_is_refused_or_shown(name):
    for calls, given, argument in each(name):
        value = given[argument]
        if not (value.is_floating_point() and is_read(calls.function, argument)):
            continue
        counted = given.get("mask", given.get("counted"))
        places = [(0,) * value.ndim]
        assert counted is None or bool(counted[(0,) * counted.ndim])
        if counted is not None and counted.shape == value.shape:
            places.append(tuple(counted.nonzero()[-1].tolist()))
        for place in places:
            broken = value.clone()
            broken[place] = torch.nan
            result = outcome(calls.function, given | {argument: broken}, argument)
            assert result is None or shows_nan(result), f"{argument}{place}: NaN became finite"


@ALL
def test_other_types_and_devices_are_refused(name):
    for calls, given, argument in each(name):
        value = given[argument]
        wrong = {
            "complex": value.to(torch.complex128),
            "list": value.tolist(),
            "array": value.numpy(),
            "meta": value.to("meta"),
            "none": None,
        }
        if value.is_floating_point() and axes_of(calls.hints[argument]):
            wrong["integers"] = value.long()
            wrong["booleans"] = value > 0.5
        open_to = str(get_args(calls.hints[argument]))
        for kind, other in wrong.items():
            taken = {"none": "None", "list": "Sequence[", "array": "Sequence["}
            if taken.get(kind, "never") in open_to:
                continue
            result = outcome(calls.function, given | {argument: other}, argument)
            assert result is None, f"{argument}: {kind} was taken"


@ALL
def test_nothing_broadcasts(name):
    for calls, given, argument in each(name):
        axes = axes_of(calls.hints[argument])
        if axes is None or axes.names == "*":
            continue
        shared = [
            other
            for other in given
            if other != argument
            and (is_a(Sequences, calls.hints[other]) or axes_of(calls.hints[other]) == axes)
        ]
        value = given[argument]
        shapes = {"scalar": value.flatten()[0]}
        if shared:
            shapes |= {"one more": torch.cat([value, value[:1]]), "ones": value[:1]}
            shapes |= {"last": value[..., :1]} if value.shape[-1] > 1 else {}
            if axes.names.startswith("..."):
                shapes["leading"] = value.unsqueeze(0)
        elif len(axes.names.split()) == 1:
            continue
        for kind, other in shapes.items():
            result = outcome(calls.function, given | {argument: other}, argument)
            assert result is None, f"{argument}: {kind} was taken, {other.shape}"


@ALL
def test_masks_hold_zeros_and_ones(name):
    for calls, given, argument in each(name):
        axes = axes_of(calls.hints[argument])
        if axes is None or axes.holds not in ("mask", "zeros and ones"):
            continue
        expected = tensors_of(calls.function(**given))
        for dtype in (torch.float32, torch.int64, torch.uint8) if axes.holds == "mask" else ():
            same = calls.function(**given | {argument: given[argument].to(dtype)})
            for one, other in zip(expected, tensors_of(same), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        for value in (0.5, 2.0, -1.0, torch.nan):
            broken = given[argument].double()
            broken[(-1,) * broken.ndim] = value
            result = outcome(calls.function, given | {argument: broken}, argument)
            assert result is None, f"{argument}: a mask of {value} was taken"


@pytest.mark.slow
@ALL
def test_mixed_precision_is_computed_or_refused(name):
    for calls, given, argument in each(name):
        if not given[argument].is_floating_point():
            continue
        expected = tensors_of(calls.function(**given))
        result = outcome(calls.function, given | {argument: given[argument].float()}, argument)
        if result is None:
            continue
        for one, other in zip(expected, tensors_of(result), strict=True):
            torch.testing.assert_close(
                one.double(), other.double(), rtol=1e-4, atol=1e-4, equal_nan=True
            )


def with_floats(given: dict, change) -> dict:
    """The same call with every tensor of floats changed."""
    floats = {name: value for name, value in tensors(given).items() if value.is_floating_point()}
    return given | {name: change(value) for name, value in floats.items()}


#: What a package exports: computed in float32 at least, over any leading axes.
EXPORTED = pytest.mark.parametrize(
    "name",
    [
        name
        for name in FUNCTIONS
        if {*kl_term.kl.__all__, *kl_term.objectives.__all__} & {*name.split(".")}
        and name != "objectives.credit.process_supervision"  # whose steps need not be tensors
    ],
)


#: Those that only mask, scale or choose a gradient, and return the type that they are given.
AS_GIVEN = (
    "kl.surrogates.straight_through",
    "kl.truncation.masked_logits",
    "kl.truncation.tempered",
)
#: Those whose steps need not be tensors, and whose head has the type of its inputs.
NOT_WIDENED = (
    "objectives.credit.process_supervision",
    "objectives.routing.choose_experts",
    "objectives.routing.routed_logp",
)
WIDENED = pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if name not in (*AS_GIVEN, *NOT_WIDENED)]
)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@WIDENED
def test_half_precision_is_computed_in_float32(name, half):
    for calls, given in each_choice(name):
        low = with_floats(given, lambda value: value.to(half))
        exact = calls.function(**with_floats(low, torch.Tensor.double))
        for one, other in zip(tensors_of(calls.function(**low)), tensors_of(exact), strict=True):
            assert one.dtype not in (torch.bfloat16, torch.float16)
            torch.testing.assert_close(
                one.double(), other.double(), rtol=1e-4, atol=1e-4, equal_nan=True
            )


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", AS_GIVEN)
def test_what_only_masks_or_scales_keeps_its_type(name, half):
    for calls, given in each_choice(name):
        low = with_floats(given, lambda value: value.to(half))
        assert {one.dtype for one in tensors_of(calls.function(**low))} == {half}


@EXPORTED
def test_leading_axes_are_free(name):
    for calls, given in each_choice(name):
        axes = [axes_of(calls.hints[argument]) for argument in tensors(given)]
        if not all(one is not None and one.names[0] in ".*" for one in axes):
            return
        deep = given | {n: value.unsqueeze(1) for n, value in tensors(given).items()}
        for one, other in zip(
            tensors_of(calls.function(**given)), tensors_of(calls.function(**deep)), strict=True
        ):
            torch.testing.assert_close(other.flatten(), one.flatten(), rtol=1e-12, atol=1e-12)


def options_of(calls: Calls, given: dict, name: str) -> list[str]:
    """What a choice with a default may be, as its refusal lists it."""
    try:
        calls.function(**given | {name: "?"})
    except ValueError as error:
        return re.findall(r"'(\w+)'", str(error).rpartition(", got")[0])
    return []


@ALL
def test_an_unknown_option_is_refused_with_the_nearest_one(name):
    calls = CALLS[name]
    for given in calls.valid():
        for argument in (n for n, hint in calls.hints.items() if is_a(str, hint)):
            options = options_of(calls, given, argument)
            said = f"must be one of.*did you mean '{options[0]}'" if options else "Input should be"
            wrong = given | {argument: f"{options[0]}_" if options else "?"}
            with pytest.raises(ValueError, match=said):
                calls.function(**wrong)


def each_choice(name: str):
    """Valid calls with every combination of the options that have a default."""
    calls = CALLS[name]
    signature = inspect.signature(calls.function).parameters
    for given in calls.valid():
        choices = {
            option: found
            for option, hint in calls.hints.items()
            if option not in given and is_a(str, hint) and signature[option].default is not None
            if (found := options_of(calls, given, option))
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
            yield calls, call


def with_gradients(function, given: dict) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results, and the gradient of the sum of what is differentiable by every float."""
    leaves = {
        name: value.clone().requires_grad_() if value.is_floating_point() else value
        for name, value in tensors(given).items()
    }
    results = tensors_of(function(**given | leaves))
    total = [result.sum() for result in results if result.requires_grad]
    wanted = {name: value for name, value in leaves.items() if value.requires_grad}
    if not total or not wanted:
        return results, {}
    found = torch.autograd.grad(sum(total), list(wanted.values()), allow_unused=True)
    return results, {n: g for n, g in zip(wanted, found, strict=True) if g is not None}


#: With floats beside their mask; hidden states have an axis more and a test of their own.
MASKED = [
    name
    for name, calls in CALLS.items()
    if "mask" in calls.hints
    and not name.startswith("kl.chunked")
    and name not in ("objectives.aggregation.token_weights", "objectives.guidance.current_segment")
]


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("name", MASKED)
def test_masked_positions_leave_no_trace(name, garbage):
    for calls, given in each_choice(name):
        shape = calls.shape(axes_of(calls.hints["mask"]))
        mask = torch.ones(shape, dtype=torch.bool)
        mask[..., -1] = mask[0, 1:] = False
        given = given | {"mask": mask}
        spoilt = {
            argument: torch.where(mask, value, garbage)
            for argument, value in tensors(given).items()
            if value.is_floating_point() and value.shape == shape
        }
        assert spoilt, "nothing was tried"
        clean, clean_gradients = with_gradients(calls.function, given)
        dirty, gradients = with_gradients(calls.function, given | spoilt)
        for one, other in zip(clean, dirty, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
            ratio = name.startswith(("kl.importance", "kl.truncated_prefix.windowed"))  # is one
            assert ratio or other.shape != shape or torch.count_nonzero(other[~mask]) == 0
        assert gradients.keys() == clean_gradients.keys()
        for argument, gradient in gradients.items():
            torch.testing.assert_close(gradient, clean_gradients[argument], rtol=0, atol=0)
            assert argument not in spoilt or torch.count_nonzero(gradient[~mask]) == 0


@ALL
def test_numbers_are_numbers(name):
    calls = CALLS[name]
    given = calls.valid()[0]
    for argument, hint in calls.hints.items():
        kinds = {kind for kind in (float, int, str, bool) if is_a(kind, hint)}
        if not kinds or is_a(Tensor, hint):
            continue
        wrong = [1j, object(), torch.ones(2, 3)] + ([] if str in kinds else ["0.5"])
        wrong += [1.5, 1.0, True] if kinds == {int} else []
        wrong += [True, 10**400] if kinds == {float} else []
        wrong += [2, 0.5] if kinds == {bool} else []
        for value in wrong:
            result = outcome(calls.function, given | {argument: value}, argument)
            assert result is None, f"{argument}: {value!r} was taken"
        if float in kinds:
            result = outcome(calls.function, given | {argument: float("nan")}, argument)
            assert result is None or shows_nan(result), argument


@checked
def doubled(logp: LogProbs, mask: Mask) -> Tensor:
    return logp * mask


def test_a_trainer_that_made_the_tensors_is_trusted():
    broken = torch.tensor([0.5])
    with pytest.raises(ValueError, match="mask must hold 0 or 1"):
        doubled(broken, broken)
    with trusted():
        assert doubled(broken, broken).item() == 0.25
    with pytest.raises(ValueError, match="mask"):
        doubled(broken, broken)


VALUE = torch.tensor(1.0)
GROUP = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: log_softmaxes(VALUE, VALUE), "logits needs a vocabulary axis"),
        (lambda: informative_groups(VALUE), "rewards must have a group axis"),
        (lambda: relative_length_reward(GROUP, GROUP), "correct must be a boolean"),
        (lambda: shortest_right(GROUP, GROUP), "correct must be a boolean"),
    ],
)
def test_what_a_function_needs_it_checks_itself_where_the_guard_is_off(call, named):
    with trusted(), pytest.raises(ValueError, match=named):
        call()
    with pytest.raises(ValueError, match=named.split()[0]):
        call()


def test_what_passed_once_is_still_refused_when_it_changes():
    mask = np.ones(3, dtype=bool)
    logp = torch.zeros(3)
    for _ in range(3):
        doubled(logp, torch.from_numpy(mask))
    with pytest.raises(ValueError, match="mask has shape"):
        doubled(logp, torch.ones(2, dtype=torch.bool))
    number = torch.ones(3)
    for value in (1.0, 2.0):
        number[0] = value
        if value == 2.0:
            with pytest.raises(ValueError, match="mask must hold"):
                doubled(logp, number)
        else:
            doubled(logp, number)


def test_every_number_is_looked_at_after_another_has_passed():
    logp = torch.zeros(3)
    for max_ratio in (10.0, 2.0, 3):
        k3_clip(logp, logp, max_ratio)
    for max_ratio in (torch.nan, np.float64("nan"), "3", True, None):
        with pytest.raises(ValueError, match="max_ratio"):
            k3_clip(logp, logp, max_ratio)
    for length in range(1, 300):  # more shapes than are remembered
        assert k3_clip(torch.zeros(length), torch.zeros(length)).shape == (length,)
    with pytest.raises(ValueError, match="ref_logp has shape"):
        k3_clip(torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n.startswith("kl.gaussians.gaussian")])
def test_gaussians_in_low_precision_are_those_of_float64_rounded(name, dtype):
    """At the ends of the range, where the squares of single precision are 0 or infinite."""
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    numbers = torch.tensor([smallest, 1e-2, 1.0, 1.25, largest / 4], dtype=dtype)
    means = torch.cat([-numbers, numbers])
    given = torch.cartesian_prod(means, numbers, means, numbers).unbind(-1)
    expected = FUNCTIONS[name](*(value.double() for value in given))
    assert not expected.isnan().any()
    result = FUNCTIONS[name](*given)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected.float(), rtol=1e-6, atol=0)


def test_a_call_like_one_that_passed_costs_a_few_look_ups():
    """``python -m benchmarks.guard`` times it; here, what Python calls beyond the function's own.

    A function calls others of the package: only the first of them is checked.
    """
    logp, mask = torch.zeros(4, 5), torch.ones(4, 5, dtype=torch.bool)
    weighted = {"old_logp": logp, "mask": mask, "weighting": "attached"}
    for call in (
        partial(k3_clip, logp, logp),
        partial(kl_penalty, logp, logp, mask=mask),
        partial(kl_loss, logp, logp, **weighted),
        partial(policy_loss, logp, old_logp=logp, advantages=logp[:, 0], mask=mask),
    ):
        call()
        bare = partial(call.func.__wrapped__, *call.args, **call.keywords)
        guarded = calls_inside(call)
        with trusted():
            assert guarded - calls_inside(bare) <= 14, call.func.__name__


def calls_inside(call) -> int:
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted


@ALL
def test_what_torch_refuses_is_said_with_the_name_of_the_argument(name):
    """Shapes that do not broadcast, no batch at all, tensors that are not dense."""
    for calls, given, argument in each(name):
        value = given[argument]
        others = {"empty": value[:0], "one more axis": value[..., None]} if value.ndim else {}
        others |= {"no elements": value[..., :0]} if value.ndim else {}
        others |= {"sparse": value.to_sparse()} if value.ndim else {}
        for other in others.values():
            outcome(calls.function, given | {argument: other}, argument)


@ALL
def test_the_fields_of_named_tuples_are_arguments(name):
    calls = CALLS[name]
    for argument, hint in calls.hints.items():
        value = next((v for k, v in OTHERS.items() if is_a(k, hint) and k is not Sequences), ())
        for field, part in zip(getattr(value, "_fields", ()), value, strict=True):
            tensor = isinstance(part, Tensor)
            wrong = ["x", 1j, part.to("meta") if tensor else torch.nan]
            for given, other in itertools.product(calls.valid(), wrong):
                broken = value._replace(**{field: other})
                result = outcome(calls.function, given | {argument: broken}, argument)
                assert result is None, f"{argument}.{field}: {other!r} was taken"
            for given in calls.valid() if tensor else ():
                broken = value._replace(**{field: part * torch.nan})
                result = outcome(calls.function, given | {argument: broken}, argument)
                assert result is None or shows_nan(result), f"{argument}.{field}: NaN vanished"


def test_out_of_memory_stays_what_it_is():
    @checked
    def full(logp: LogProbs) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        full(torch.zeros(3))
