"""Samples that are not the policy's own: weights, clips, masks and budgets, and what they cost.

Settings were found by search on seeds 0 to 2, at the step sizes given here.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat

from analysis.records.config import SortTask
from analysis.records.preset import Pilot, Preset
from analysis.records.variants import Correction, Objective, Sampler, Variant
from analysis.studies.presets.designed import (
    AT_END_OF_TRAINING,
    AT_EQUAL_BETA,
    AT_EQUAL_KL,
    EXTENDED,
    NUM_SEEDS,
    design,
    designed,
    on_ten_starts,
)
from analysis.studies.presets.registry import fresh_seeds, preset
from analysis.studies.presets.three_ways import WIDE
from kl_term.kl.choice import KLChoice

#: KL loss -> estimator and off-policy weight.
KL_LOSSES = {
    "k2": ("k2", "none"),
    "k2_detached": ("k2", "detached"),
    "k3": ("k3", "none"),
    "k3_attached": ("k3", "attached"),
    "exact": ("exact", "none"),
}


@preset
def staleness(*, lags: tuple[int, ...] = (0, 4, 16), beta: NonNegativeFloat = 0.3) -> Preset:
    """Age of the samples x off-policy weight of the KL loss, at one beta."""
    variants = [
        variant
        for lag in lags
        for variant in (_stale("none", lag), *(_stale(name, lag, beta) for name in KL_LOSSES))
    ]
    return designed(
        _AGES.at(beta),
        variants,
        fresh_seeds(7500, 20),
        updates=200,
        log_every=10,
    )


_AGES = on_ten_starts(
    180,
    "Samples 16 updates old cost accuracy under every sampled KL loss; there the full vocabulary "
    "ended above plain k2, weighted k2 farther from the reference than plain k2, and the "
    "largest gradient norm of k3 was a multiple of that of k2.",
    question="What does the age of the samples cost, by off-policy weight of the KL loss?",
    outcome=f"Accuracy of the policy's own answers. {AT_END_OF_TRAINING}",
    at=(0.3,),
    predictions={
        "k2_detached_lag_0 = k2_lag_0: reverse_kl": "on fresh samples every weight is one",
        **{
            f"{name}_lag_16 < {name}_lag_0: own_accuracy": "the clip silences old samples"
            for name in ("none", *KL_LOSSES)
        },
        "exact_lag_16 > k2_lag_16: own_accuracy": "it needs no weight",
        "exact_lag_16 > k2_detached_lag_16: own_accuracy": "it has no noise of a sampled token",
        "k2_lag_16 > none_lag_16: own_accuracy": "a KL steadies training on old samples",
        "k2_detached_lag_16 > k2_lag_16: reverse_kl": "so it was in the pilot",
        "k2_detached_lag_16 = k2_lag_16: own_accuracy": (
            "the weight corrects little and costs variance"
        ),
        "k3_attached_lag_16 = k2_detached_lag_16: reverse_kl": (
            "sample by sample they have one gradient"
        ),
        "k3_attached_lag_16 > k3_lag_16: own_accuracy": "so it was in the pilot",
        "k3_lag_16 > k2_lag_16: log_peak_gradient": (
            "its coefficient is exponential where the policy has fallen below the reference"
        ),
    },
)


@preset
def stale_coefficients(
    *, lag: int = 16, betas: tuple[NonNegativeFloat, ...] = (0.1, 0.3, 1.0)
) -> Preset:
    """The weights at one age of the samples over several betas, to compare them at equal KL."""
    names = ("k2", "k2_detached", "k3", "exact")
    variants = [_stale(name, lag, beta, label=f"{name}_loss") for beta in betas for name in names]
    return designed(
        _EQUAL_KL,
        (_stale("none", lag), *variants),
        fresh_seeds(7600, 20),
        updates=200,
        log_every=20,
    )


_EQUAL_KL = on_ten_starts(
    130,
    "At equal KL the full vocabulary was the most accurate; plain and weighted k2 reached a "
    "common KL in few seeds.",
    question="On samples 16 updates old, what does each KL loss cost at equal KL?",
    outcome=f"Accuracy of the policy's own answers. {AT_EQUAL_KL}",
    at=(),
    predictions={
        "exact_loss > k2_loss: own_accuracy": "it needs no weight",
        "exact_loss > k2_detached_loss: own_accuracy": "it has no noise of a sampled token",
        "exact_loss > k3_loss: own_accuracy": "unweighted, k3 has the gradient of no KL here",
        "k2_detached_loss = k2_loss: own_accuracy": "the weight corrects little",
    },
)


@preset
def stale_masking(*, lag: int = 16) -> Preset:
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
    return designed(
        _MASKS,
        (
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
        fresh_seeds(7700, 20),
        updates=150,
        learning_rate=1e-3,
        log_every=15,
    )


_MASKS = on_ten_starts(
    160,
    "Without a weight, or with CISPO's, the policy lost the task; the mask at 0.1 brought it back, "
    "above the clipped token ratio, to near fresh samples; beside the clip it did nothing seen. "
    "GSPO in a tight range ended above the token ratio.",
    question="Without a KL term, which objective and mask train on samples 16 updates old?",
    outcome=f"Accuracy of the policy's own answers. {AT_END_OF_TRAINING}",
    predictions={
        "token < fresh: own_accuracy": "the clip silences old samples",
        "reinforce cispo < token: own_accuracy": "nothing stops their gradient",
        "reinforce_mask_0.1 > reinforce: own_accuracy": "the mask leaves out what ruins it",
        "cispo_mask_0.1 > cispo: own_accuracy": "the mask leaves out what ruins it",
        "reinforce_mask_0.1 cispo_mask_0.1 > token: own_accuracy": (
            "what is left has its gradient whole"
        ),
        "reinforce_mask_0.1 = fresh: own_accuracy": "so it nearly was in the pilot",
        "reinforce_mask_0.3 < reinforce_mask_0.1: own_accuracy": "it leaves out too little",
        "token_mask_0.1 = token: own_accuracy": "the clip has silenced the same tokens",
        "gspo_tight > token: own_accuracy": "one ratio an answer is less noisy than one a token",
        "gspo < token: own_accuracy": "in that range it hardly clips",
        "sequence = token: own_accuracy": "so it was in the pilot",
    },
)


@preset
def stale_starts() -> Preset:
    """Corrections for samples 16 updates old, each with and against what it corrects."""

    def objective(label: str, kind: str, delta: float | None = None) -> Variant:
        return Variant(
            label=label,
            sampler=Sampler(staleness=16),
            objective=Objective(kind=kind),
            correction=Correction(sequence_mask_delta=delta),
        )

    terms = ("exact", "k2", "k2_detached", "k3_attached")
    variants = (
        objective("clipped", "grpo"),
        objective("clipped_masked", "grpo", 0.1),
        objective("unclipped", "reinforce"),
        objective("unclipped_masked", "reinforce", 0.1),
        *(_stale(name, 16, 0.3, label=name) for name in terms),
    )
    return designed(_STALE, variants, fresh_seeds(5500, NUM_SEEDS), updates=150, learning_rate=1e-3)


_STALE = design(
    question="Which correction for samples 16 updates old is worth its variance?",
    outcome=f"Mean reward. {AT_EQUAL_BETA}",
    margin=0.03,
    predictions={
        "unclipped < clipped: reward at 0.3": "nothing stops its gradient",
        "unclipped_masked > unclipped: reward at 0.3": "the mask leaves out what ruins it",
        "unclipped_masked > clipped: reward at 0.3": "what is left has its gradient whole",
        "clipped_masked = clipped: reward at 0.3": "the clip has silenced the same tokens",
        "exact > k2_detached: reward at 0.3": "it has no noise of a sampled token",
        "k2 = k2_detached: reward at 0.3": "the weight corrects little and costs variance",
        "k3_attached = k2_detached: reverse_kl at 0.3": "sample by sample they have one gradient",
    },
    pilots=(
        Pilot(
            tried=(
                "Seeds 0 and 1, starts 901 to 903: all of them but k3_attached; the older presets "
                "staleness and stale_masking, on one start, were known too."
            ),
            runs=14,
            seen=(
                "Reward 0.08 unclipped, 0.65 unclipped and masked, 0.54 and 0.57 clipped; with a "
                "KL term 0.59 (k2), 0.63 (k2_detached) and 0.64 (exact)."
            ),
            chosen="The configuration as it was tried; 1.2 s of a core a run.",
        ),
    ),
)


@preset
def mismatch(*, cold: float = 0.7, hot: float = 1.3, top_p: float = 0.8) -> Preset:
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
    return designed(
        _MISMATCH,
        (Variant(label="same"), *variants),
        fresh_seeds(7800, 20),
        updates=150,
        learning_rate=1e-3,
        log_every=15,
    )


_MISMATCH = on_ten_starts(
    150,
    "A colder sampler and top-p cost accuracy, a hotter one none; truncated token weights and the "
    "sampling mask were equivalent to no correction; entropy ended higher under the colder "
    "sampler, lower under the hotter one, and weights brought it back there.",
    question="What does a sampler of another distribution cost, and which correction pays?",
    outcome=f"Accuracy of the policy's own answers. {AT_END_OF_TRAINING}",
    predictions={
        "cold_uncorrected top_p_uncorrected < same: own_accuracy": "what it never draws is lost",
        "hot_uncorrected = same: own_accuracy": "it draws everything",
        "cold_truncated_token = cold_uncorrected: own_accuracy": "cut where it counts",
        "cold_truncated_sequence < cold_uncorrected: own_accuracy": "its weights are the noisiest",
        "hot_truncated_token = hot_uncorrected: own_accuracy": "there is nothing to bring back",
        "hot_masked_token < hot_uncorrected: own_accuracy": "it leaves samples out",
        "top_p_truncated_sequence top_p_keep_mask = top_p_uncorrected: own_accuracy": (
            "they cannot draw the tail either"
        ),
        "cold_uncorrected top_p_uncorrected > same: entropy": "it leans against its sampler",
        "hot_uncorrected < same: entropy": "it leans against its sampler",
        "hot_truncated_token > hot_uncorrected: entropy": "the weights are right there",
    },
)


@preset
def partial_rollouts(*, budgets: tuple[int, ...] = (4, 8)) -> Preset:
    """Completions cut at a budget of new tokens and continued at the next update."""
    continued = [
        Variant(
            label=f"budget_{budget}_{train_on}", sampler=Sampler(budget=budget, train_on=train_on)
        )
        for budget in budgets
        for train_on in ("all", "current")
    ]
    return designed(
        _BUDGETS,
        (Variant(label="whole"), *continued),
        fresh_seeds(7900, NUM_SEEDS),
        updates=200,
        learning_rate=1e-3,
        task=SortTask(num_digits=6, end_token=True, max_fillers=8),
        log_every=10,
    )


_BUDGETS = on_ten_starts(
    50,
    "A budget cost accuracy at equal updates, and none was seen at equal decoding steps; training "
    "on the last segment alone ended below training on all.",
    stopping=EXTENDED,
    question="May one answer be sampled over several updates?",
    outcome=f"Accuracy of the policy's own answers. {AT_END_OF_TRAINING}",
    predictions={
        "budget_8_all budget_4_all < whole: own_accuracy": "fewer groups finish",
        "budget_8_all > budget_8_current: own_accuracy": "the last segments are of slow answers",
        "budget_4_all > budget_4_current: own_accuracy": "the last segments are of slow answers",
    },
)


def _stale(name: str, lag: int, beta: float = 0.0, *, label: str = "") -> Variant:
    """A KL loss of :data:`KL_LOSSES`, or ``none``, on samples of an age."""
    estimator, weighting = KL_LOSSES.get(name, ("none", "none"))
    return Variant(
        label=label or f"{name}_lag_{lag}",
        kl=KLChoice(estimator=estimator, weighting=weighting),
        beta=beta,
        sampler=Sampler(staleness=lag),
    )
