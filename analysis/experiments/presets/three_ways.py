"""Three ways to have a KL while taking several optimizer steps on a rollout.

Sum over the vocabulary, merge the KL with the reward under ratio and clip, or stay on-policy with
large batches. Settings were found by search on seeds 0 to 2.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat

from analysis.experiments.preset import NO_KL, Preset, fresh_seeds, population, preset
from analysis.kl.term import KLTerm
from analysis.training.variants import Objective, Variant

#: Bounds that no ratio of these runs reaches often: the clip is off in all but name.
WIDE = {"epsilon_low": 1.0, "epsilon_high": 9.0}

#: Of all three presets: their runs are compared seed by seed.
FIRST_SEED = 2200


@preset
def three_ways(
    *,
    betas: tuple[float, ...] = (0.1, 0.3, 1.0),
    learning_rate: float = 1e-3,
    num_iterations: int = 4,
    num_seeds: int = 10,
    updates: int = 60,
) -> Preset:
    """Several optimizer steps a rollout: full vocabulary, k2, and the KL merged with the reward."""
    middle = betas[len(betas) // 2]
    fronts = [
        variant
        for beta in betas
        for variant in (
            Variant(kl=KLTerm(estimator="exact"), beta=beta),
            merged("old", beta),
            merged("detached", beta),
        )
    ]
    others = (
        Variant(kl=KLTerm(estimator="k2"), beta=middle),
        Variant(kl=KLTerm(estimator="k2", weighting="detached"), beta=middle),
        merged("attached", middle),
        merged("old", middle, wide=True),
        merged("detached", middle, wide=True),
        Variant(label="none_wide", objective=Objective(**WIDE)),
    )
    return population(
        updates=updates,
        num_iterations=num_iterations,
        learning_rate=learning_rate,
        log_every=5,
        variants=(NO_KL, *fronts, *others),
        seeds=fresh_seeds(FIRST_SEED, num_seeds),
        predictions=(
            "Every KL term in the loss, and both merged readings under the clip, end nearer to the "
            "reference than no KL term.",
            "At equal exact reverse KL, the merged KL under the clip and the full-vocabulary KL do "
            "not differ in accuracy.",
            "The attached reading ends less accurate than the detached one.",
            "Without the clip the merged KL ends less accurate than with it, and so does no KL "
            "term: what is missed is the clip on the reward.",
            "k2 as a loss ends alike with and without the weight.",
        ),
    )


@preset
def three_ways_half_step(
    *,
    beta: NonNegativeFloat = 0.3,
    learning_rate: float = 5e-4,
    num_iterations: int = 4,
    num_seeds: int = 10,
    updates: int = 60,
) -> Preset:
    """The ways of several steps at half the step size, the best of those searched.

    Written after ``three_ways`` was recorded, on its seeds, so that neither side of the comparison
    with large batches is held to a poor step size.
    """
    variants = (
        Variant(kl=KLTerm(estimator="exact"), beta=beta),
        merged("old", beta),
        merged("detached", beta),
    )
    return population(
        updates=updates,
        num_iterations=num_iterations,
        learning_rate=learning_rate,
        log_every=5,
        variants=(NO_KL, *variants),
        seeds=fresh_seeds(FIRST_SEED, num_seeds),
        predictions=(
            "Every variant ends more accurate than at the full step of three_ways.",
            "The merged KL and the full-vocabulary KL do not differ in accuracy.",
            "At equal completions the merged KL is more accurate than k2 on large batches, at "
            "equal passes less.",
        ),
    )


@preset
def three_ways_on_policy(
    *,
    betas: tuple[float, ...] = (0.1, 0.3, 1.0),
    learning_rate: float = 2e-3,
    num_prompts: int = 48,
    num_seeds: int = 10,
    updates: int = 60,
) -> Preset:
    """The second of the three ways: k2 as a loss, one step on a large batch of fresh samples.

    With four times the prompts of ``three_ways``, one of these updates draws as many samples as
    four of those, and takes one step where they take sixteen.
    """
    return population(
        updates=updates,
        num_prompts=num_prompts,
        learning_rate=learning_rate,
        log_every=5,
        variants=(NO_KL, *(Variant(kl=KLTerm(estimator="k2"), beta=beta) for beta in betas)),
        seeds=fresh_seeds(FIRST_SEED, num_seeds),
        predictions=(
            "At equal samples, after a quarter of these updates, it is less accurate than the "
            "clipped merged KL after all of those of three_ways.",
            "At equal passes through the model it is at least as accurate.",
        ),
    )


def merged(reading: str, beta: float, *, wide: bool = False) -> Variant:
    """GRPO_off-policy: k1 in the reward, under the ratio and the clip of the reward."""
    bounds = WIDE if wide else {}
    return Variant(
        label=f"merged_{reading}{'_wide' if wide else ''}",
        kl=KLTerm(estimator="k1", placement="reward", credit="immediate"),
        beta=beta,
        objective=Objective(kind="grpo_off_policy", reading=reading, **bounds),
    )
