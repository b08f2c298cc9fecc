"""Samples that are not the policy's own: weights, clips, masks and budgets, and what they cost.

Settings were found by search on seeds 0 to 2, at the step sizes given here.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat

from analysis.experiments.preset import Preset, fresh_seeds, population, preset
from analysis.experiments.presets.three_ways import WIDE
from analysis.kl.term import KLTerm
from analysis.training.tiny.tasks import SortTask
from analysis.training.variants import Correction, Objective, Sampler, Variant

#: KL loss -> estimator and off-policy weight.
KL_LOSSES = {
    "k2": ("k2", "none"),
    "k2_detached": ("k2", "detached"),
    "k3": ("k3", "none"),
    "k3_attached": ("k3", "attached"),
    "exact": ("exact", "none"),
}


@preset
def staleness(
    *,
    lags: tuple[int, ...] = (0, 4, 16),
    beta: NonNegativeFloat = 0.3,
    num_seeds: int = 10,
    updates: int = 200,
) -> Preset:
    """Age of the samples x off-policy weight of the KL loss, at one beta."""
    variants = [
        variant
        for lag in lags
        for variant in (_stale("none", lag), *(_stale(name, lag, beta) for name in KL_LOSSES))
    ]
    return population(
        updates=updates,
        log_every=10,
        variants=variants,
        seeds=fresh_seeds(2000, num_seeds),
        predictions=(
            "On fresh samples the weight changes nothing: k2 with and without it is one run.",
            "Samples 4 updates old cost little accuracy, samples 16 updates old much, in every "
            "variant.",
            "k2 with a detached weight and k3 with an attached one end alike at every age: sample "
            "by sample they have one gradient.",
            "At 16 updates the unweighted k2 ends no farther from the reference than the weighted "
            "one: the exact weight buys no tighter leash.",
            "At 16 updates the weighted losses have the largest spikes of the gradient norm, and "
            "the full vocabulary the smallest among the KL losses.",
            "At 16 updates the full-vocabulary KL ends most accurate.",
        ),
    )


@preset
def stale_front(
    *,
    lag: int = 16,
    betas: tuple[NonNegativeFloat, ...] = (0.1, 0.3, 1.0),
    num_seeds: int = 10,
    updates: int = 200,
) -> Preset:
    """The weights at one age of the samples over several betas, to compare them at equal KL."""
    names = ("k2", "k2_detached", "k3", "exact")
    variants = [_stale(name, lag, beta, label=f"{name}_loss") for beta in betas for name in names]
    return population(
        updates=updates,
        log_every=20,
        variants=(_stale("none", lag), *variants),
        seeds=fresh_seeds(2100, num_seeds),
        predictions=(
            "At equal exact reverse KL the full-vocabulary KL is the most accurate.",
            "At equal exact reverse KL, k2 with and without the weight do not differ in accuracy.",
            "At equal exact reverse KL, unweighted k3 is the least accurate.",
        ),
    )


@preset
def stale_masking(*, lag: int = 16, num_seeds: int = 10, updates: int = 150) -> Preset:
    """What to do with stale samples when there is no KL term: ratios, clips and the mask."""
    stale = Sampler(staleness=lag)

    def variant(label: str, delta: float | None = None, **objective: object) -> Variant:
        return Variant(
            label=label if delta is None else f"{label}_mask_{delta:g}",
            sampler=stale,
            objective=Objective(**objective),
            correction=Correction(sequence_mask_delta=delta),
        )

    cispo, reinforce = {"kind": "cispo"}, {"kind": "reinforce"}
    return population(
        updates=updates,
        learning_rate=1e-3,
        log_every=15,
        variants=(
            Variant(label="fresh"),
            variant("token"),
            *(variant("token", delta) for delta in (0.1, 0.3)),
            variant("token_wide", **WIDE),
            variant("gspo", kind="gspo"),
            variant("gspo_tight", kind="gspo", epsilon_low=0.03, epsilon_high=0.03),
            variant("sequence", kind="sequence"),
            variant("cispo", **cispo),
            *(variant("cispo", delta, **cispo) for delta in (0.1, 0.3)),
            variant("cispo_upper", **cispo, epsilon_low=1.0, epsilon_high=4.0),
            variant("reinforce", **reinforce),
            *(variant("reinforce", delta, **reinforce) for delta in (0.03, 0.1, 0.3)),
        ),
        seeds=fresh_seeds(2300, num_seeds),
        predictions=(
            "Without the mask, the plain policy gradient and CISPO lose the task; the clipped "
            "token ratio does not.",
            "With the mask at 0.1 nats both keep it, and end above the clipped token ratio.",
            "On the clipped token ratio the mask changes nothing: the clip has silenced the same "
            "tokens.",
            "GSPO in a tight range ends above the token ratio.",
            "The ratio of the whole sequence has the largest gradient norms and ends below the "
            "token ratio.",
        ),
    )


@preset
def mismatch(
    *,
    cold: float = 0.7,
    hot: float = 1.3,
    top_p: float = 0.8,
    num_seeds: int = 10,
    updates: int = 150,
) -> Preset:
    """A sampler at another temperature or with its tail cut off, and what corrects for it."""
    samplers = {
        "cold": Sampler(temperature=cold),
        "hot": Sampler(temperature=hot),
        "top_p": Sampler(top_p=top_p),
    }
    whole = (("truncated", "sequence"), ("masked", "sequence"))
    corrections = {
        f"{kind}_{level}": Correction(mismatch=kind, mismatch_level=level)
        for kind, level in (("truncated", "token"), ("masked", "token"), *whole)
    }
    #: Under top-p no weight exceeds one: the bound of single tokens is never met.
    of_top_p = {f"{kind}_{level}": corrections[f"{kind}_{level}"] for kind, level in whole}
    of_top_p["keep_mask"] = Correction(keep_sampling_mask=True)
    variants = [
        Variant(label=f"{name}_{how}", sampler=sampler, correction=correction)
        for name, sampler in samplers.items()
        for how, correction in {
            "uncorrected": Correction(),
            **(of_top_p if name == "top_p" else corrections),
        }.items()
    ]
    return population(
        updates=updates,
        learning_rate=1e-3,
        log_every=15,
        variants=(Variant(label="same"), *variants),
        seeds=fresh_seeds(2400, num_seeds),
        predictions=(
            "By its own accuracy the policy loses where its sampler is colder or cuts the tail, "
            "and does not where the sampler is hotter.",
            "Uncorrected, the policy leans against its sampler: its entropy ends higher under a "
            "colder sampler and under top-p, lower under a hotter one.",
            "Token weights bring the entropy under the hotter sampler back to that of a sampler "
            "that agrees.",
            "No correction brings own accuracy back under the colder sampler or under top-p.",
            "Keeping the sampling mask ends with the own accuracy of no correction.",
        ),
    )


@preset
def partial_rollouts(
    *, budgets: tuple[int, ...] = (4, 8), num_seeds: int = 10, updates: int = 200
) -> Preset:
    """Completions cut at a budget of new tokens and continued at the next update."""
    continued = [
        Variant(
            label=f"budget_{budget}_{train_on}", sampler=Sampler(budget=budget, train_on=train_on)
        )
        for budget in budgets
        for train_on in ("all", "current")
    ]
    return population(
        updates=updates,
        learning_rate=1e-3,
        task=SortTask(num_digits=6, end_token=True, max_fillers=8),
        log_every=10,
        variants=(Variant(label="whole"), *continued),
        seeds=fresh_seeds(2500, num_seeds),
        predictions=(
            "At equal updates a budget is less accurate than whole rollouts: fewer groups finish.",
            "At equal sequential decoding steps the larger budget is the more accurate.",
            "Training on the last segment alone loses the task; training on all segments, each "
            "with the log-probs it was sampled under, does not.",
            "The ratios of continued completions stay near one: their effective sample size does "
            "not fall below 0.99.",
        ),
    )


def _stale(name: str, lag: int, beta: float = 0.0, *, label: str = "") -> Variant:
    """A KL loss of :data:`KL_LOSSES`, or ``none``, on samples of an age."""
    estimator, weighting = KL_LOSSES.get(name, ("none", "none"))
    return Variant(
        label=label or f"{name}_lag_{lag}",
        kl=KLTerm(estimator=estimator, weighting=weighting),
        beta=beta,
        sampler=Sampler(staleness=lag),
    )
