"""Variants along every axis of the methods, each with a label."""

from __future__ import annotations

from analysis.kl.term import KLTerm
from analysis.training.variants import (
    Advantage,
    Correction,
    Distillation,
    Objective,
    Sampler,
    Shaping,
    Variant,
)

#: Each token its own k1, as the merged objective and on-policy distillation have it.
OPD = Distillation().kl
K1_REWARD = {"kl": KLTerm(estimator="k1", placement="reward"), "beta": 0.3}
NONE = {"kl": KLTerm(estimator="none")}


def make_variant(label, **fields):
    return Variant(label=label, **fields)


OBJECTIVES = [
    make_variant(
        f"{kind}_{low}_{high}", objective=Objective(kind=kind, epsilon_low=low, epsilon_high=high)
    )
    for kind in ("grpo", "gspo", "cispo", "reinforce", "sequence", "grpo_off_policy")
    for low, high in ((0.2, 0.2), (0.1, 0.28))
]
OBJECTIVES += [
    make_variant(
        "gspo_tight", objective=Objective(kind="gspo", epsilon_low=0.01, epsilon_high=0.02)
    )
]
OBJECTIVES += [
    make_variant(
        f"merged_{reading}",
        objective=Objective(kind="grpo_off_policy", reading=reading),
        kl=OPD,
        beta=0.3,
    )
    for reading in ("old", "detached", "attached")
]
OBJECTIVES += [
    make_variant(f"{kind}_{tau}", objective=Objective(kind=kind, tau=tau))
    for kind in ("mirror_descent", "dpo")
    for tau in (1.0, 0.25)
]
OBJECTIVES += [
    make_variant("dpo_k2", objective=Objective(kind="dpo"), kl=KLTerm(estimator="k2"), beta=0.4),
    make_variant(
        "mirror_descent_before",
        objective=Objective(kind="mirror_descent"),
        advantage=Advantage(kl_order="before"),
        **K1_REWARD,
    ),
    make_variant(
        "gspo_marginal", objective=Objective(kind="gspo"), advantage=Advantage(level="marginal")
    ),
]

AGGREGATIONS = [
    make_variant(
        f"{kind}_{mode}",
        objective=Objective(kind=kind, aggregation=mode),
        kl=KLTerm(estimator="k3"),
        beta=0.5,
    )
    for kind in ("grpo", "gspo", "sequence", "mirror_descent")
    for mode in (
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
    )
]

KL = [
    *(
        make_variant(
            f"{name}_sequence_{weighting}",
            kl=KLTerm(estimator=name, level="sequence", weighting=weighting),
            beta=0.1,
        )
        for name in ("k1", "k2", "k3", "k3_clip", "k4")
        for weighting in ("none", "attached", "detached")
    ),
    *(
        make_variant(
            f"{name}_{weighting}", kl=KLTerm(estimator=name, weighting=weighting), beta=0.5
        )
        for name in ("k3_clip", "k4")
        for weighting in ("none", "attached", "detached")
    ),
    *(
        make_variant(
            f"{name}_{weighting}_{ratio}",
            kl=KLTerm(estimator=name, weighting=weighting, ratio=ratio),
            beta=0.1,
        )
        for name in ("k1", "k2", "k3")
        for weighting in ("attached", "detached")
        for ratio in ("prefix", "sequence", "geometric")
    ),
    make_variant("minimax01", kl=KLTerm(estimator="minimax01"), beta=2.0),
    make_variant(
        "minimax01_detached", kl=KLTerm(estimator="minimax01", weighting="detached"), beta=2.0
    ),
    make_variant("exact", kl=KLTerm(estimator="exact"), beta=0.5),
    make_variant("forward", kl=KLTerm(estimator="forward"), beta=0.5),
    make_variant("k2_shows_k3", kl=KLTerm(estimator="k2", value="k3"), beta=0.5),
    make_variant(
        "k1_shows_k2", kl=KLTerm(estimator="k1", value="k2", weighting="detached"), beta=0.5
    ),
    make_variant(
        "k2_shows_k1_sequence", kl=KLTerm(estimator="k2", value="k1", level="sequence"), beta=0.1
    ),
    make_variant(
        "k3_shows_k2_attached",
        kl=KLTerm(estimator="k3", value="k2", weighting="attached"),
        beta=0.5,
    ),
]

KL_REWARD = [
    make_variant(
        f"{name}_reward_{credit}_{level}",
        kl=KLTerm(estimator=name, placement="reward", credit=credit, level=level),
        beta=0.2,
    )
    for name in ("k1", "k2", "k3", "k3_clip", "k4")
    for credit, level in (
        ("to_go", "token"),
        ("immediate", "token"),
        ("whole", "token"),
        ("to_go", "sequence"),
    )
]
KL_REWARD += [
    make_variant(
        f"{name}_before_{baseline}_{level}",
        kl=KLTerm(estimator=name, placement="reward", level=level),
        beta=0.2,
        advantage=Advantage(kl_order="before", baseline=baseline),
    )
    for name in ("k1", "k3")
    for baseline in ("group_normalise", "group_centre", "leave_one_out")
    for level in ("token", "sequence")
]

ADVANTAGES = [
    make_variant("ddof0", advantage=Advantage(ddof=0)),
    make_variant("eps", advantage=Advantage(eps=0.5)),
    make_variant("eps0", advantage=Advantage(eps=0.0)),
    make_variant("std_min", advantage=Advantage(std_min=0.35)),
    make_variant("std_max", advantage=Advantage(std_max=0.2)),
    make_variant("std_both", advantage=Advantage(std_min=0.25, std_max=0.3, ddof=0)),
    make_variant("centre", advantage=Advantage(baseline="group_centre")),
    make_variant("leave_one_out", advantage=Advantage(baseline="leave_one_out")),
    make_variant(
        "zero_k2", advantage=Advantage(baseline="zero"), kl=KLTerm(estimator="k2"), beta=0.5
    ),
    make_variant("shortest_right", advantage=Advantage(baseline="shortest_right")),
    make_variant(
        "shortest_right_cloned",
        advantage=Advantage(baseline="shortest_right"),
        objective=Objective(kind="reinforce"),
    ),
    make_variant("zero_k1_reward", advantage=Advantage(baseline="zero"), **K1_REWARD),
    *(
        make_variant(f"{level}_{baseline}", advantage=Advantage(level=level, baseline=baseline))
        for level in ("process", "marginal")
        for baseline in ("group_normalise", "group_centre")
    ),
    make_variant("process_ddof0_eps", advantage=Advantage(level="process", ddof=0, eps=0.3)),
    make_variant("process_std", advantage=Advantage(level="process", std_min=0.6)),
    make_variant("marginal_std", advantage=Advantage(level="marginal", std_min=0.3)),
    make_variant("process_k1_reward", advantage=Advantage(level="process"), **K1_REWARD),
    *(
        make_variant(
            f"drop_{kind}_{mode}",
            advantage=Advantage(drop_uniform_groups=True),
            kl=KLTerm(estimator="k2"),
            beta=0.5,
            objective=Objective(kind=kind, aggregation=mode),
        )
        for kind, mode in (
            ("grpo", "seq_mean_token_mean"),
            ("grpo", "token_mean"),
            ("grpo", "seq_mean_token_sum"),
            ("mirror_descent", "seq_mean_token_mean"),
            ("dpo", "token_mean"),
        )
    ),
]

SHAPINGS = [
    make_variant("linear", shaping=Shaping(length="linear", weight=0.05)),
    make_variant("relative", shaping=Shaping(length="relative", weight=0.5)),
    make_variant("overlong", shaping=Shaping(length="soft_overlong", weight=0.5, buffer=2)),
    make_variant("noise", shaping=Shaping(noise=0.4)),
    make_variant(
        "noise_linear_before",
        shaping=Shaping(length="linear", weight=0.05, noise=0.2),
        advantage=Advantage(kl_order="before"),
        **K1_REWARD,
    ),
    make_variant(
        "relative_dpo",
        shaping=Shaping(length="relative", weight=2.0),
        objective=Objective(kind="dpo"),
    ),
]

SAMPLERS = [
    make_variant("fresh"),
    make_variant("stale1", sampler=Sampler(staleness=1)),
    make_variant(
        "stale2",
        sampler=Sampler(staleness=2),
        kl=KLTerm(estimator="k2", weighting="detached"),
        beta=0.5,
    ),
    make_variant("stale_reward", sampler=Sampler(staleness=2), **K1_REWARD),
    make_variant("hot", sampler=Sampler(temperature=1.3)),
    make_variant("nucleus", sampler=Sampler(top_p=0.9)),
    make_variant("stale_nucleus", sampler=Sampler(staleness=1, top_p=0.8, temperature=1.1)),
    make_variant("teacher", sampler=Sampler(by="teacher")),
    make_variant("teacher_nucleus", sampler=Sampler(by="teacher", top_p=0.9)),
    make_variant("repeats", sampler=Sampler(repeat_times=2)),
    make_variant("repeats_period", sampler=Sampler(repeat_times=2, repeat_period=2), **K1_REWARD),
    make_variant(
        "repeats_masked",
        sampler=Sampler(repeat_times=2),
        correction=Correction(mask_truncated=True),
    ),
]

HOT = Sampler(temperature=1.4, top_p=0.95)
CORRECTIONS = [
    *(
        make_variant(
            f"{kind}_{level}",
            sampler=HOT,
            correction=Correction(
                mismatch=kind, mismatch_level=level, bound=1.5 if level == "sequence" else 1.25
            ),
        )
        for kind in ("truncated", "masked")
        for level in ("token", "sequence")
    ),
    make_variant(
        "truncated_stale_cispo",
        sampler=Sampler(temperature=0.7, staleness=1),
        objective=Objective(kind="cispo"),
        kl=KLTerm(estimator="k3"),
        beta=0.5,
        correction=Correction(mismatch="truncated", bound=1.1),
    ),
    make_variant("sequence_mask", correction=Correction(sequence_mask_delta=0.05)),
    make_variant(
        "sequence_mask_stale",
        sampler=Sampler(staleness=2),
        correction=Correction(sequence_mask_delta=0.1),
        **K1_REWARD,
    ),
    make_variant("mask_truncated", correction=Correction(mask_truncated=True)),
    make_variant(
        "mask_truncated_k2",
        correction=Correction(mask_truncated=True),
        kl=KLTerm(estimator="k2"),
        beta=0.5,
    ),
    *(
        make_variant(
            f"keep_{kind}",
            sampler=Sampler(top_p=0.8),
            objective=Objective(kind=kind),
            correction=Correction(keep_sampling_mask=True),
        )
        for kind in ("grpo", "gspo", "cispo", "reinforce", "sequence", "mirror_descent")
    ),
    make_variant(
        "keep_stale",
        sampler=Sampler(top_p=0.8, staleness=2),
        kl=KLTerm(estimator="k2"),
        beta=0.5,
        correction=Correction(keep_sampling_mask=True),
    ),
    make_variant(
        "all_masks",
        sampler=Sampler(top_p=0.9, temperature=1.2),
        correction=Correction(
            mask_truncated=True, sequence_mask_delta=0.02, mismatch="masked", bound=1.5
        ),
    ),
]

ZERO = Advantage(baseline="zero")
DISTILLATIONS = [
    *(
        make_variant(
            f"k1_reward_{credit}",
            advantage=ZERO,
            distillation=Distillation(kl=KLTerm(estimator="k1", placement="reward", credit=credit)),
        )
        for credit in ("immediate", "to_go")
    ),
    *(
        make_variant(
            f"{name}_{weighting}",
            distillation=Distillation(kl=KLTerm(estimator=name, weighting=weighting), weight=0.5),
        )
        for name in ("k1", "k2", "k3", "k3_clip")
        for weighting in ("none", "attached", "detached")
    ),
    *(
        make_variant(name, advantage=ZERO, distillation=Distillation(kl=KLTerm(estimator=name)))
        for name in ("exact", "forward", "cross_entropy", "minimax01")
    ),
    make_variant(
        "supervised",
        advantage=ZERO,
        sampler=Sampler(by="teacher"),
        distillation=Distillation(kl=KLTerm(estimator="cross_entropy")),
    ),
    make_variant(
        "annealed", distillation=Distillation(weight=2.0, weight_end=0.5, anneal_updates=10)
    ),
    make_variant(
        "anneal_done", distillation=Distillation(weight=2.0, weight_end=0.5, anneal_updates=2)
    ),
    make_variant("only_below", distillation=Distillation(only_below=0.5)),
    make_variant(
        "only_below_loss",
        kl=KLTerm(estimator="k3"),
        beta=0.5,
        distillation=Distillation(
            kl=KLTerm(estimator="k2"), only_below=0.5, weight=3.0, weight_end=0.0, anneal_updates=7
        ),
    ),
    make_variant(
        "kdrl",
        distillation=Distillation(kl=KLTerm(estimator="k2"), weight=0.3),
        kl=KLTerm(estimator="k1", placement="reward"),
        beta=0.2,
    ),
]

AXES = {
    "objective": OBJECTIVES,
    "aggregation": AGGREGATIONS,
    "kl": KL,
    "kl_reward": KL_REWARD,
    "advantage": ADVANTAGES,
    "shaping": SHAPINGS,
    "sampler": SAMPLERS,
    "correction": CORRECTIONS,
    "distillation": DISTILLATIONS,
}
