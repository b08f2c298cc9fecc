"""Every public function of kl and objectives, with arguments that are wrong in one place.

The calls are those of ``tests/kl/calls.py``. A wrong one must raise an error that names the
argument, or, for NaN, show it in the result; it must not broadcast, and not end in an error of
torch.
"""

from __future__ import annotations

import itertools
import re
import sys
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import kl_term.kl
import kl_term.objectives
from kl_term.checks import checked, trusted
from kl_term.kl.divergences import log_softmaxes
from kl_term.kl.estimators import k3_clip
from kl_term.kl.fixed_points import chi_square_optimum, euclidean_optimum
from kl_term.kl.full_vocabulary import markov_kl
from kl_term.kl.importance import effective_sample_size, importance_ratio
from kl_term.kl.sequences import Sequences
from kl_term.kl.surrogates import kl_loss, kl_penalty
from kl_term.objectives.filtering import informative_groups
from kl_term.objectives.lengths import relative_length_reward
from kl_term.objectives.losses import policy_loss
from kl_term.objectives.rejection import shortest_right
from kl_term.shapes import LogProbs, Mask
from tests.kl.calls import (
    ALL,
    CALLS,
    FUNCTIONS,
    OTHERS,
    axes_of,
    each,
    each_choice,
    having,
    is_a,
    options_of,
    tensors,
    tensors_of,
    with_floats,
)


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


def holds_zeros_and_ones(hint) -> bool:
    axes = axes_of(hint)
    return axes is not None and axes.holds in ("mask", "zeros and ones")


@having(holds_zeros_and_ones)
def test_masks_hold_zeros_and_ones(name):
    for calls, given, argument in each(name):
        axes = axes_of(calls.hints[argument])
        if not holds_zeros_and_ones(calls.hints[argument]):
            continue
        expected = tensors_of(calls.function(**given))
        for dtype in (torch.float32, torch.int64, torch.uint8) if axes.holds == "mask" else ():
            same = calls.function(**given | {argument: given[argument].to(dtype)})
            for one, other in zip(expected, tensors_of(same), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        for value in (0.5, 2.0, -1.0, torch.nan):
            broken = given[argument].double().clone()
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


@WIDENED
def test_half_precision_is_computed_in_float32(name):
    halves = (torch.bfloat16, torch.float16)
    for (calls, given), half in itertools.product(each_choice(name), halves):
        low = with_floats(given, partial(Tensor.to, dtype=half))
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


@having(partial(is_a, str))
def test_an_unknown_option_is_refused_with_the_nearest_one(name):
    calls = CALLS[name]
    for given in calls.valid:
        for argument in (n for n, hint in calls.hints.items() if is_a(str, hint)):
            options = options_of(calls, given, argument)
            said = f"must be one of.*did you mean '{options[0]}'" if options else "Input should be"
            wrong = given | {argument: f"{options[0]}_" if options else "?"}
            with pytest.raises(ValueError, match=said):
                calls.function(**wrong)


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


@pytest.mark.parametrize("name", MASKED)
def test_masked_positions_leave_no_trace(name):
    for calls, given in each_choice(name):
        shape = calls.shape(axes_of(calls.hints["mask"]))
        mask = torch.ones(shape, dtype=torch.bool)
        mask[..., -1] = mask[0, 1:] = False
        given = given | {"mask": mask}
        clean, clean_gradients = with_gradients(calls.function, given)
        for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
            spoilt = {
                argument: torch.where(mask, value, garbage)
                for argument, value in tensors(given).items()
                if value.is_floating_point() and value.shape == shape
            }
            assert spoilt, "nothing was tried"
            dirty, gradients = with_gradients(calls.function, given | spoilt)
            for one, other in zip(clean, dirty, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
                ratio = name.startswith(("kl.importance", "kl.truncated_prefix.windowed"))  # is one
                assert ratio or other.shape != shape or torch.count_nonzero(other[~mask]) == 0
            assert gradients.keys() == clean_gradients.keys()
            for argument, gradient in gradients.items():
                torch.testing.assert_close(gradient, clean_gradients[argument], rtol=0, atol=0)
                assert argument not in spoilt or torch.count_nonzero(gradient[~mask]) == 0


def kinds_of(hint) -> set[type]:
    """What an argument that is no tensor may be."""
    return set() if is_a(Tensor, hint) else {k for k in (float, int, str, bool) if is_a(k, hint)}


@having(kinds_of)
def test_numbers_are_numbers(name):
    calls = CALLS[name]
    given = calls.valid[0]
    for argument, hint in calls.hints.items():
        kinds = kinds_of(hint)
        if not kinds:
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


def named_tuple(hint) -> tuple:
    """What is given for an argument that has fields; empty for any other."""
    return next((v for k, v in OTHERS.items() if is_a(k, hint) and k is not Sequences), ())


@having(named_tuple)
def test_the_fields_of_named_tuples_are_arguments(name):
    calls = CALLS[name]
    for argument, hint in calls.hints.items():
        value = named_tuple(hint)
        for field, part in zip(getattr(value, "_fields", ()), value, strict=True):
            tensor = isinstance(part, Tensor)
            wrong = ["x", 1j, part.to("meta") if tensor else torch.nan]
            for given, other in itertools.product(calls.valid, wrong):
                broken = value._replace(**{field: other})
                result = outcome(calls.function, given | {argument: broken}, argument)
                assert result is None, f"{argument}.{field}: {other!r} was taken"
            for given in calls.valid if tensor else ():
                broken = value._replace(**{field: part * torch.nan})
                result = outcome(calls.function, given | {argument: broken}, argument)
                assert result is None or shows_nan(result), f"{argument}.{field}: NaN vanished"


def test_out_of_memory_stays_what_it_is():
    @checked
    def full(logp: LogProbs) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        full(torch.zeros(3))


@pytest.mark.parametrize("state", range(4))
def test_a_broken_row_of_a_chain_is_shown_wherever_it_is_met(state):
    """A comparison with NaN is false: it once left out the very rows that had become NaN."""
    table = torch.rand(4, 3, dtype=torch.float64)
    broken = table.clone()
    broken[state, state % 3] = torch.nan
    assert markov_kl(broken, table, length=3).isnan()


def test_an_engine_s_overflow_is_shown_and_drops_no_token():
    logp = torch.full((2, 3), -1.0)
    old_logp = torch.tensor([[-1.0, torch.inf, -1.0], [-1.0, -1.0, -1.0]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    result = policy_loss(logp, old_logp=old_logp, advantages=torch.ones(2), mask=mask)
    assert result.loss.isnan()
    assert importance_ratio(logp, old_logp, mask)[0, 1].isnan()
    assert effective_sample_size(logp, old_logp, mask).isnan().tolist() == [True, False]


@pytest.mark.parametrize("optimum", [euclidean_optimum, chi_square_optimum])
def test_a_token_that_is_given_up_has_no_slope_in_either_mode(optimum):
    rewards = torch.tensor([3.0, 1.0, -4.0], dtype=torch.float64)
    ref_logits = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64)

    def share(values):
        return optimum(values, ref_logits, beta=1.0).exp()

    assert share(rewards)[-1] == 0
    reverse = torch.autograd.functional.jacobian(share, rewards)
    _, forward = torch.func.jvp(share, (rewards,), (torch.ones_like(rewards),))
    torch.testing.assert_close(forward, reverse.sum(-1), rtol=0, atol=1e-12)
