"""What tables call the variants that are trained on samples of another policy."""

from __future__ import annotations

#: What the on-policy k2 of a large batch is called beside the other ways.
LARGE_BATCH = "large_batch"


#: KL loss on stale samples -> what it is called.
LOSSES = {
    "none": "no KL term",
    "k2": "k₂",
    "k2_detached": "k₂, weighted",
    "k3": "k₃",
    "k3_attached": "k₃, weighted",
    "exact": "full vocabulary",
}


OBJECTIVES = {
    "fresh": "fresh samples, token ratio",
    "token": "token ratio, clipped",
    "token_wide": "token ratio, no clip",
    "gspo": "GSPO, 0.2",
    "gspo_tight": "GSPO, 0.03",
    "sequence": "sequence ratio, clipped",
    "cispo": "CISPO",
    "cispo_upper": "CISPO, upper bound only",
    "reinforce": "no weight",
}


SAMPLERS = {"cold": "temperature 0.7", "hot": "temperature 1.3", "top_p": "top-p 0.8"}


CORRECTIONS = {
    "uncorrected": "uncorrected",
    "truncated_token": "truncated, token",
    "masked_token": "masked, token",
    "truncated_sequence": "truncated, sequence",
    "masked_sequence": "masked, sequence",
    "keep_mask": "sampling mask kept",
}


#: Variant of any of the runs -> what tables call it.
NAMES = {
    **LOSSES,
    "none_wide": "no KL term, no clip",
    **{f"{name}_loss": called for name, called in LOSSES.items()},
    "k2_loss_detached": "k₂, weighted",
    "k3_loss_attached": "k₃, weighted",
    "merged_old": "merged, old log-ratio",
    "merged_detached": "merged, present log-ratio",
    "merged_attached": "merged, log-ratio differentiated",
    "merged_old_wide": "merged, old, no clip",
    "merged_detached_wide": "merged, present, no clip",
    LARGE_BATCH: "large fresh batches",
    **OBJECTIVES,
    **{
        f"{name}_mask_{delta}": f"{OBJECTIVES[name]}, masked at {delta}"
        for name in ("token", "cispo", "reinforce")
        for delta in ("0.03", "0.1", "0.3")
    },
    "clipped": "clipped",
    "unclipped": "unclipped",
    "clipped_masked": "clipped, masked",
    "unclipped_masked": "unclipped, masked",
    "same": "sampler agrees",
    **{
        f"{sampler}_{how}": f"{name}, {correction}"
        for sampler, name in SAMPLERS.items()
        for how, correction in CORRECTIONS.items()
    },
    "replayed": "experts replayed",
    "recomputed": "experts chosen again",
    "whole": "whole rollouts",
    "budget_8_all": "8 tokens an update",
    "budget_4_all": "4 tokens an update",
    "budget_8_current": "8 tokens, last segment only",
    "budget_4_current": "4 tokens, last segment only",
}


NAMES |= {f"{name}_lag_{lag}": f"{NAMES[name]}, age {lag}" for name in LOSSES for lag in (0, 4, 16)}
