"""Every public function means the same under whatever torch runs it: a value, or a refusal.

The calls are those of ``tests/kl/calls.py``. What cannot be had is listed here, function by
function: a list that is too long fails as one that is too short.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kl_term.checks import checked
from kl_term.kl.surrogates import kl_loss
from kl_term.objectives.losses import policy_loss
from kl_term.shapes import LogProbs, Mask
from tests.kl.calls import ALL, CALLS, each_choice, tensors, tensors_of, with_floats

pytestmark = pytest.mark.slow

#: Not in one graph: what reads values of tensors, or differentiates.
IN_PARTS: set[str] = {
    "kl.ascent.expected_ascent",
    "kl.ascent.token_advantage",
    "kl.chunked.divergences_from_hidden",
    "kl.chunked.entropy_from_hidden",
    "kl.chunked.reverse_kl_from_hidden",
    "kl.chunked_top_k.top_k_divergence_from_hidden",
    "kl.enumeration.expected_gradient",
    "kl.enumeration.gradient_moments",
    "kl.enumeration.sample_coefficient",
    "kl.fixed_points.forward_kl_multiplier",
    "kl.fixed_points.forward_kl_optimum",
    "kl.fixed_points.penalty_equilibrium",
    "kl.gaussians.moments",
    "kl.packing.sequence_ids",
    "kl.products.markov_product_growth",
    "kl.ratio_objectives.ratio_objective_gradient",
    "kl.sequences.expected_sequence_gradient",
    "kl.sequences.sequence_kl_gradient",
    "objectives.credit.process_supervision",
    "objectives.difficulty.difficulty_weight",
    "objectives.difficulty.normalised_objective",
    "objectives.filtering.kept_fraction",
    "objectives.gae.gae_kl_gradient",
    "objectives.gae.generalised_advantage",
    "objectives.process.best_of_n",
    "objectives.process.path_score",
    "objectives.routing.routed_logp",
}
#: In parts too, but a bisection is unrolled while it is traced, which takes minutes.
UNROLLED = {"kl.fixed_points.penalty_equilibrium"}
#: Their refusal of a shape reads values, which a traced guard does not: torch refuses, by an index.
REFUSED_BY_TORCH = {
    "kl.sequences.can_draw",
    "kl.sequences.sequence_probability",
    "kl.sequences.token_logp",
}
#: Refused by name under vmap: what reads values of tensors, or differentiates by itself.
NOT_MAPPED = [
    "kl.ascent.expected_ascent",
    "kl.ascent.token_advantage",
    "kl.chunked.divergences_from_hidden",
    "kl.chunked.entropy_from_hidden",
    "kl.chunked.reverse_kl_from_hidden",
    "kl.chunked_top_k.log_probs_from_hidden",
    "kl.chunked_top_k.top_k_divergence_from_hidden",
    "kl.control.control_sums",
    "kl.control.control_variance",
    "kl.control.fitted_control",
    "kl.control.fitted_control_of_gradients",
    "kl.control.weight_of",
    "kl.credit.advantage_table",
    "kl.credit.credit_moments",
    "kl.credit.sample_gradients",
    "kl.credit.state_average",
    "kl.credit.tie_states",
    "kl.enumeration.expected_gradient",
    "kl.enumeration.gradient_moments",
    "kl.enumeration.sample_coefficient",
    "kl.fixed_points.chi_square_optimum",
    "kl.fixed_points.euclidean_optimum",
    "kl.fixed_points.forward_kl_multiplier",
    "kl.fixed_points.forward_kl_optimum",
    "kl.fixed_points.penalty_equilibrium",
    "kl.full_vocabulary.full_vocabulary_gradients",
    "kl.full_vocabulary.markov_kl",
    "kl.full_vocabulary.markov_visits",
    "kl.gaussians.moments",
    "kl.moving_reference.coefficient_of_kl",
    "kl.packing.sequence_ids",
    "kl.prefix.k3_noise_gap",
    "kl.products.markov_product_growth",
    "kl.products.sequence_ratio_spread",
    "kl.ratio_objectives.performance_difference",
    "kl.ratio_objectives.ratio_objective",
    "kl.ratio_objectives.ratio_objective_gradient",
    "kl.ratio_objectives.token_surrogate",
    "kl.sequences.can_draw",
    "kl.sequences.expected_sequence_gradient",
    "kl.sequences.sequence_kl",
    "kl.sequences.sequence_kl_gradient",
    "kl.top_k.top_k_tokens",
    "kl.truncation.keep_top",
    "objectives.aggregation.seq_mean_token_mean",
    "objectives.aggregation.seq_mean_token_sum",
    "objectives.aggregation.seq_mean_token_sum_norm",
    "objectives.aggregation.token_mean",
    "objectives.credit.process_supervision",
    "objectives.difficulty.difficulty_weight",
    "objectives.difficulty.normalised_objective",
    "objectives.filtering.informative_groups",
    "objectives.filtering.kept_fraction",
    "objectives.gae.gae_kl_gradient",
    "objectives.gae.generalised_advantage",
    "objectives.guidance.low_reward_mask",
    "objectives.masking.off_policy_sequence_mask",
    "objectives.merged.kl_coefficient_kept",
    "objectives.merged.merged_loss",
    "objectives.merged.merged_reward",
    "objectives.mismatch.mismatch_weight",
    "objectives.process.best_of_n",
    "objectives.process.early_stop",
    "objectives.process.falls_in_a_row",
    "objectives.process.path_score",
    "objectives.routing.choose_experts",
    "objectives.routing.routed_logp",
]
#: Refused under torch.func.grad and jvp: what differentiates by itself, or goes in blocks.
NOT_TRANSFORMED = [
    "kl.ascent.expected_ascent",
    "kl.ascent.token_advantage",
    "kl.chunked.divergences_from_hidden",
    "kl.chunked.entropy_from_hidden",
    "kl.chunked.reverse_kl_from_hidden",
    "kl.chunked_top_k.log_probs_from_hidden",
    "kl.chunked_top_k.top_k_divergence_from_hidden",
    "kl.enumeration.expected_gradient",
    "kl.enumeration.gradient_moments",
]
#: Refused in inference mode: what differentiates by itself.
DIFFERENTIATES = [
    "kl.ascent.expected_ascent",
    "kl.ascent.token_advantage",
    "kl.enumeration.expected_gradient",
    "kl.enumeration.gradient_moments",
    "kl.enumeration.sample_coefficient",
    "kl.ratio_objectives.ratio_objective_gradient",
    "kl.sequences.expected_sequence_gradient",
    "kl.sequences.sequence_kl_gradient",
]


def given_to(name: str) -> dict:
    return CALLS[name].valid[0]


def assert_equal(result, expected, tolerance: float = 1e-12) -> None:
    for one, other in zip(tensors_of(result), tensors_of(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def refusal_of(function, given: dict) -> str | None:
    try:
        function(**given)
    except ValueError as error:
        return str(error)
    return None


def of_another_shape(value: Tensor) -> list[Tensor]:
    return [value[..., :1], value[:1], value[None]] if value.ndim else []


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@ALL
def test_compiled_it_gives_the_same_values(name):
    """In half precision where that is taken, which the guard must widen while it is traced."""
    function, given = CALLS[name].function, given_to(name)
    low = with_floats(given, torch.Tensor.bfloat16)
    given = given if refusal_of(function, low) else low
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    if name in IN_PARTS:
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            compiled(**given)
        if name in UNROLLED:
            return
        compiled = torch.compile(function, backend="eager")
    assert_equal(compiled(**given), function(**given), 1e-6)


@ALL
def test_compiled_it_refuses_the_same_shapes(name):
    function, given = CALLS[name].function, given_to(name)
    compiled = torch.compile(function, backend="eager")
    for argument, value in tensors(given).items():
        for other in of_another_shape(value):
            wrong = given | {argument: other}
            expected = refusal_of(function, wrong)
            if expected is None:
                continue
            by_torch = "cannot take" in expected or name in REFUSED_BY_TORCH
            errors = (RuntimeError, IndexError, ValueError) if by_torch else ValueError
            with pytest.raises(errors) as refused:
                compiled(**wrong)
            assert by_torch or str(refused.value) == expected
            return


@ALL
def test_mapped_it_gives_the_same_values_or_refuses(name):
    function, given = CALLS[name].function, given_to(name)
    if not tensors(given):
        return
    names = list(tensors(given))

    def of_tensors(*values: Tensor):
        return tuple(tensors_of(function(**given | dict(zip(names, values, strict=True)))))

    pairs = [torch.stack([value, value]) for value in tensors(given).values()]
    try:
        result = torch.func.vmap(of_tensors)(*pairs)
    except ValueError:  # of the guard, which names the function and its arguments
        assert name in NOT_MAPPED
        return
    assert name not in NOT_MAPPED
    for part in result:
        assert part.shape[0] == 2
    assert_equal(tuple(part[1] for part in result), function(**given))


def total_of(result) -> Tensor | None:
    """Of what may be differentiated: a log of zero would make every gradient NaN."""
    floats = [part for part in tensors_of(result) if part.is_floating_point()]
    sums = [part[part.detach().isfinite()].sum() for part in floats if part.requires_grad]
    return sum(sums) if sums else None


@ALL
def test_transformed_it_has_the_same_gradient_or_refuses(name):
    """torch.func.grad and jvp, against reverse mode."""
    function, given = CALLS[name].function, given_to(name)
    floats = {n: value for n, value in tensors(given).items() if value.is_floating_point()}
    leaves = {n: value.clone().requires_grad_() for n, value in floats.items()}
    result = function(**given | leaves)
    total = total_of(result)
    if total is None:
        return
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    expected = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves.values(), found, strict=True)
    ]
    kept = [part.requires_grad for part in tensors_of(result)]
    finite = [part.detach().isfinite() for part in tensors_of(result)]

    def total_at(*values: Tensor) -> Tensor:
        parts = tensors_of(function(**given | dict(zip(floats, values, strict=True))))
        chosen = zip(parts, kept, finite, strict=True)
        return sum(torch.where(where, part, 0.0).sum() for part, keep, where in chosen if keep)

    places = tuple(range(len(floats)))
    generator = torch.Generator().manual_seed(1)
    directions = tuple(
        torch.randn(v.shape, dtype=v.dtype, generator=generator) for v in floats.values()
    )
    try:
        gradients = torch.func.grad(total_at, argnums=places)(*floats.values())
        _, slope = torch.func.jvp(total_at, tuple(floats.values()), directions)
    except ValueError:
        assert name in NOT_TRANSFORMED
        return
    assert name not in NOT_TRANSFORMED
    assert_equal(tuple(gradients), tuple(expected), 1e-10)
    along = sum((g * d).sum() for g, d in zip(expected, directions, strict=True))
    assert_equal(slope, along, 1e-9)


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference": torch.inference_mode,
    "deterministic": deterministic,
}


def in_single_precision(given: dict) -> dict:
    """With the fields of named tuples."""
    return {
        name: type(value)(*in_single_precision(value._asdict()).values())
        if hasattr(value, "_fields")
        else value
        for name, value in with_floats(given, torch.Tensor.float).items()
    }


@ALL
@pytest.mark.parametrize("mode", MODES)
def test_around_it_the_mode_changes_no_value(mode, name):
    for calls, given in each_choice(name):
        low = in_single_precision(given)
        expected = tensors_of(calls.function(**low))
        try:
            with MODES[mode]():
                result = tensors_of(calls.function(**low))
        except ValueError:
            assert mode == "inference" and name in DIFFERENTIATES
            return
        assert not (mode == "inference" and name in DIFFERENTIATES)
        for one, other in zip(result, expected, strict=True):
            assert one.dtype not in (torch.bfloat16, torch.float16)
            assert mode.startswith("default") or one.dtype == other.dtype
            torch.testing.assert_close(
                one.double(), other.double(), rtol=1e-6, atol=1e-6, equal_nan=True
            )


@checked
def scaled(logp: LogProbs, mask: Mask, *, weight: float = 1.0) -> Tensor:
    return torch.where(mask, weight * logp, 0.0)


LOGP = torch.linspace(-2, -1, 6).reshape(2, 3)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_a_compiled_mask_may_be_of_numbers(kind):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    assert_equal(compiled(LOGP, mask.to(kind)), scaled(LOGP, mask.bool()))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mask": torch.ones(2, 1, dtype=torch.bool)}, "mask has shape"),
        ({"logp": LOGP.long()}, "logp must be a floating-point tensor"),
        ({"weight": "1"}, "weight must be a number"),
        ({"mask": None}, "mask is None"),
    ],
)
def test_what_is_compiled_refuses_in_the_same_words(wrong, said):
    given = {"logp": LOGP, "mask": torch.ones(2, 3, dtype=torch.bool)} | wrong
    with pytest.raises(ValueError, match=said):
        torch.compile(scaled, backend="eager")(**given)
    torch._dynamo.reset()  # after a refusal torch leaves that frame to Python
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        torch.compile(scaled, backend="eager", fullgraph=True)(**given)
    assert said in f"{refused.value} {refused.value.__cause__}"


@pytest.mark.parametrize("trap", ["advantages [B, 1]", "advantages [T]", "old_logp[:1]"])
def test_a_loss_that_would_broadcast_is_refused_inside_a_compiled_step(trap):
    """As a trainer has it: both terms in one function of its own, which is compiled."""
    shapes = {
        "advantages [B, 1]": {"advantages": torch.ones(2, 1)},
        "advantages [T]": {"advantages": torch.ones(3)},
        "old_logp[:1]": {"old_logp": LOGP[:1]},
    }

    def loss(logp, ref_logp, old_logp, advantages, mask):
        policy = policy_loss(logp, old_logp=old_logp, advantages=advantages, mask=mask)
        return policy.loss + 0.1 * kl_loss(logp, ref_logp, mask=mask).sum()

    sound = {"old_logp": LOGP, "advantages": torch.ones(2), "mask": LOGP < 0}
    step = torch.compile(loss, backend="eager")
    logp = LOGP.clone().requires_grad_()
    (found,) = torch.autograd.grad(step(logp, LOGP - 1, **sound), logp)
    (expected,) = torch.autograd.grad(loss(logp, LOGP - 1, **sound), logp)
    assert_equal(found, expected)
    with pytest.raises(ValueError, match=trap.partition("[")[0].strip()):
        step(logp, LOGP - 1, **sound | shapes[trap])
