"""The presets by name, and how their parameters are overridden."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from analysis.checks import check_choice
from analysis.experiments.ablations.presets import (
    CONFIG,
    FULL,
    HALF_STEP,
    NO_KL,
    Preset,
    kl_arms,
    quick,
)
from analysis.experiments.language_models.presets import SMOKE, SMOLLM2
from analysis.training.config import TrainConfig


def full(*, num_seeds: int = len(FULL.seeds), updates: int = FULL.config.updates) -> Preset:
    """Eight arms at three betas, the recorded ablation."""
    return _resized(FULL, num_seeds, updates)


def half_step(
    *, num_seeds: int = len(HALF_STEP.seeds), updates: int = HALF_STEP.config.updates
) -> Preset:
    """The recorded ablation at half the step size."""
    return _resized(HALF_STEP, num_seeds, updates)


def figure2(*, beta: float = 0.04, num_seeds: int = 10, updates: int = CONFIG.updates) -> Preset:
    """Figure 2 of "Rethinking KL Divergence in RLHF": 12 prompts, groups of 6, beta 0.04."""
    return Preset(
        name="figure2",
        config=_config(updates=updates, num_prompts=12, group_size=6, log_every=10),
        arms=(NO_KL, *kl_arms(beta)),
        seeds=_fresh_seeds(200, num_seeds),
        predictions=(
            "At this beta no arm differs from that without a KL term in accuracy.",
            "k3 as a loss fluctuates no more than k2 as a loss, in gradient norm and in KL.",
        ),
    )


def beta_front(
    *,
    betas: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0),
    num_seeds: int = 10,
    updates: int = CONFIG.updates,
) -> Preset:
    """Every arm over a range of betas: reward against KL, so that arms compare at equal KL."""
    return Preset(
        name="beta_front",
        config=_config(updates=updates, log_every=10),
        arms=(NO_KL, *(arm for beta in betas for arm in kl_arms(beta))),
        seeds=_fresh_seeds(300, num_seeds),
        predictions=(
            "At equal exact reverse KL, k2 as a loss, k1 in the reward and the exact KL agree "
            "in accuracy.",
            "At no beta does k1 as a loss end nearer to the reference than no KL term.",
        ),
    )


def smollm2(
    *, num_seeds: int = len(SMOLLM2.seeds), updates: int = SMOLLM2.config.updates
) -> Preset:
    """Eight arms of adapters on SmolLM2-135M-Instruct, for a GPU."""
    return _resized(SMOLLM2, num_seeds, updates)


def llama_smoke(
    *, num_seeds: int = len(SMOKE.seeds), updates: int = SMOKE.config.updates
) -> Preset:
    """The same on an untrained model of a few thousand weights, to try out a machine."""
    return _resized(SMOKE, num_seeds, updates)


#: Name -> a function from parameters to the preset.
CATALOGUE: dict[str, Callable[..., Preset]] = {
    factory.__name__: factory
    for factory in (quick, full, half_step, figure2, beta_front, smollm2, llama_smoke)
}


def make_preset(name: str, overrides: Mapping[str, Any]) -> Preset:
    """The preset of that name, some of its parameters replaced.

    Raises:
        ValueError: an unknown preset or parameter, or a value that does not fit.
    """
    check_choice("preset", name, CATALOGUE)
    factory = CATALOGUE[name]
    known = inspect.signature(factory).parameters
    for parameter in overrides:
        check_choice(f"parameter of preset {name!r}", parameter, known)
    try:
        return validate_call(factory, config=ConfigDict(allow_inf_nan=False))(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"preset {name!r}: {place}: {first['msg']}") from None


def _config(**changes: Any) -> TrainConfig:
    return TrainConfig(**(CONFIG.model_dump() | changes))


def _resized(preset: Preset, num_seeds: int, updates: int) -> Preset:
    """The same with other numbers of seeds and updates, validated."""
    fields = preset.model_dump()
    fields["config"]["updates"] = updates
    fields["seeds"] = _fresh_seeds(preset.seeds[0], num_seeds)
    return Preset.model_validate(fields)


def _fresh_seeds(first: int, count: int) -> tuple[int, ...]:
    """Seeds from ``first`` on; each preset has its own range, which no search has seen."""
    return tuple(range(first, first + count))
