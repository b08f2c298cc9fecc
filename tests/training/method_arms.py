"""Arms along every axis of the methods, each with a label."""

from __future__ import annotations

from analysis.kl.term import KLTerm
from analysis.training.arms import (
    Advantage,
    Arm,
    Correction,
    Distillation,
    Objective,
    Sampler,
    Shaping,
)

#: Each token its own k1, as the merged objective and on-policy distillation have it.
OPD = Distillation().kl
K1_REWARD = {"kl": KLTerm(estimator="k1", placement="reward"), "beta": 0.3}
NONE = {"kl": KLTerm(estimator="none")}


def make_arm(label, **fields):
    return Arm(label=label, **fields)


OBJECTIVES = [
    make_arm(
        f"{kind}_{low}_{high}", objective=Objective(kind=kind, epsilon_low=low, epsilon_high=high)
    )
    for kind in ("grpo", "gspo", "cispo", "reinforce", "sequence", "grpo_off_policy")
    for low, high in ((0.2, 0.2), (0.1, 0.28))
]
OBJECTIVES += [
    make_arm("gspo_tight", objective=Objective(kind="gspo", epsilon_low=0.01, epsilon_high=0.02))
]
OBJECTIVES += [
    make_arm(
        f"merged_{reading}",
        objective=Objective(kind="grpo_off_policy", reading=reading),
        kl=OPD,
        beta=0.3,
    )
    for reading in ("old", "detached", "attached")
]
OBJECTIVES += [
    make_arm(f"{kind}_{tau}", objective=Objective(kind=kind, tau=tau))
    for kind in ("mirror_descent", "dpo")
    for tau in (1.0, 0.25)
]
OBJECTIVES += [
    make_arm("dpo_k2", objective=Objective(kind="dpo"), kl=KLTerm(estimator="k2"), beta=0.4),
    make_arm(
        "mirror_descent_before",
        objective=Objective(kind="mirror_descent"),
        advantage=Advantage(kl_order="before"),
        **K1_REWARD,
    ),
    make_arm(
        "gspo_marginal", objective=Objective(kind="gspo"), advantage=Advantage(level="marginal")
    ),
]

AGGREGATIONS = [
    make_arm(
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
        make_arm(
            f"{name}_sequence_{weighting}",
            kl=KLTerm(estimator=name, level="sequence", weighting=weighting),
            beta=0.1,
        )
        for name in ("k1", "k2", "k3", "k3_clip", "k4")
        for weighting in ("none", "attached", "detached")
    ),
    *(
        make_arm(f"{name}_{weighting}", kl=KLTerm(estimator=name, weighting=weighting), beta=0.5)
        for name in ("k3_clip", "k4")
        for weighting in ("none", "attached", "detached")
    ),
    *(
        make_arm(
            f"{name}_{weighting}_{ratio}",
            kl=KLTerm(estimator=name, weighting=weighting, ratio=ratio),
            beta=0.1,
        )
        for name in ("k1", "k2", "k3")
        for weighting in ("attached", "detached")
        for ratio in ("prefix", "sequence", "geometric")
    ),
    make_arm("minimax01", kl=KLTerm(estimator="minimax01"), beta=2.0),
    make_arm(
        "minimax01_detached", kl=KLTerm(estimator="minimax01", weighting="detached"), beta=2.0
    ),
    make_arm("exact", kl=KLTerm(estimator="exact"), beta=0.5),
    make_arm("forward", kl=KLTerm(estimator="forward"), beta=0.5),
    make_arm("k2_shows_k3", kl=KLTerm(estimator="k2", value="k3"), beta=0.5),
    make_arm("k1_shows_k2", kl=KLTerm(estimator="k1", value="k2", weighting="detached"), beta=0.5),
    make_arm(
        "k2_shows_k1_sequence", kl=KLTerm(estimator="k2", value="k1", level="sequence"), beta=0.1
    ),
    make_arm(
        "k3_shows_k2_attached",
        kl=KLTerm(estimator="k3", value="k2", weighting="attached"),
        beta=0.5,
    ),
]

KL_REWARD = [
    make_arm(
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
    make_arm(
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
    make_arm("ddof0", advantage=Advantage(ddof=0)),
    make_arm("eps", advantage=Advantage(eps=0.5)),
    make_arm("eps0", advantage=Advantage(eps=0.0)),
    make_arm("std_min", advantage=Advantage(std_min=0.35)),
    make_arm("std_max", advantage=Advantage(std_max=0.2)),
    make_arm("std_both", advantage=Advantage(std_min=0.25, std_max=0.3, ddof=0)),
    make_arm("centre", advantage=Advantage(baseline="group_centre")),
    make_arm("leave_one_out", advantage=Advantage(baseline="leave_one_out")),
    make_arm("zero_k2", advantage=Advantage(baseline="zero"), kl=KLTerm(estimator="k2"), beta=0.5),
    make_arm("shortest_right", advantage=Advantage(baseline="shortest_right")),
    make_arm(
        "shortest_right_cloned",
        advantage=Advantage(baseline="shortest_right"),
        objective=Objective(kind="reinforce"),
    ),
    make_arm("zero_k1_reward", advantage=Advantage(baseline="zero"), **K1_REWARD),
    *(
        make_arm(f"{level}_{baseline}", advantage=Advantage(level=level, baseline=baseline))
        for level in ("process", "marginal")
        for baseline in ("group_normalise", "group_centre")
    ),
    make_arm("process_ddof0_eps", advantage=Advantage(level="process", ddof=0, eps=0.3)),
    make_arm("process_std", advantage=Advantage(level="process", std_min=0.6)),
    make_arm("marginal_std", advantage=Advantage(level="marginal", std_min=0.3)),
    make_arm("process_k1_reward", advantage=Advantage(level="process"), **K1_REWARD),
    *(
        make_arm(
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
    make_arm("linear", shaping=Shaping(length="linear", weight=0.05)),
    make_arm("relative", shaping=Shaping(length="relative", weight=0.5)),
    make_arm("overlong", shaping=Shaping(length="soft_overlong", weight=0.5, buffer=2)),
    make_arm("noise", shaping=Shaping(noise=0.4)),
    make_arm(
        "noise_linear_before",
        shaping=Shaping(length="linear", weight=0.05, noise=0.2),
        advantage=Advantage(kl_order="before"),
        **K1_REWARD,
    ),
    make_arm(
        "relative_dpo",
        shaping=Shaping(length="relative", weight=2.0),
        objective=Objective(kind="dpo"),
    ),
]

SAMPLERS = [
    make_arm("fresh"),
    make_arm("stale1", sampler=Sampler(staleness=1)),
    make_arm(
        "stale2",
        sampler=Sampler(staleness=2),
        kl=KLTerm(estimator="k2", weighting="detached"),
        beta=0.5,
    ),
    make_arm("stale_reward", sampler=Sampler(staleness=2), **K1_REWARD),
    make_arm("hot", sampler=Sampler(temperature=1.3)),
    make_arm("nucleus", sampler=Sampler(top_p=0.9)),
    make_arm("stale_nucleus", sampler=Sampler(staleness=1, top_p=0.8, temperature=1.1)),
    make_arm("teacher", sampler=Sampler(by="teacher")),
    make_arm("teacher_nucleus", sampler=Sampler(by="teacher", top_p=0.9)),
    make_arm("repeats", sampler=Sampler(repeat_times=2)),
    make_arm("repeats_period", sampler=Sampler(repeat_times=2, repeat_period=2), **K1_REWARD),
    make_arm(
        "repeats_masked",
        sampler=Sampler(repeat_times=2),
        correction=Correction(mask_truncated=True),
    ),
]

HOT = Sampler(temperature=1.4, top_p=0.95)
CORRECTIONS = [
    *(
        make_arm(
            f"{kind}_{level}",
            sampler=HOT,
            correction=Correction(
                mismatch=kind, mismatch_level=level, bound=1.5 if level == "sequence" else 1.25
            ),
        )
        for kind in ("truncated", "masked")
        for level in ("token", "sequence")
    ),
    make_arm(
        "truncated_stale_cispo",
        sampler=Sampler(temperature=0.7, staleness=1),
        objective=Objective(kind="cispo"),
        kl=KLTerm(estimator="k3"),
        beta=0.5,
        correction=Correction(mismatch="truncated", bound=1.1),
    ),
    make_arm("sequence_mask", correction=Correction(sequence_mask_delta=0.05)),
    make_arm(
        "sequence_mask_stale",
        sampler=Sampler(staleness=2),
        correction=Correction(sequence_mask_delta=0.1),
        **K1_REWARD,
    ),
    make_arm("mask_truncated", correction=Correction(mask_truncated=True)),
    make_arm(
        "mask_truncated_k2",
        correction=Correction(mask_truncated=True),
        kl=KLTerm(estimator="k2"),
        beta=0.5,
    ),
    *(
        make_arm(
            f"keep_{kind}",
            sampler=Sampler(top_p=0.8),
            objective=Objective(kind=kind),
            correction=Correction(keep_sampling_mask=True),
        )
        for kind in ("grpo", "gspo", "cispo", "reinforce", "sequence", "mirror_descent")
    ),
    make_arm(
        "keep_stale",
        sampler=Sampler(top_p=0.8, staleness=2),
        kl=KLTerm(estimator="k2"),
        beta=0.5,
        correction=Correction(keep_sampling_mask=True),
    ),
    make_arm(
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
        make_arm(
            f"k1_reward_{credit}",
            advantage=ZERO,
            distillation=Distillation(kl=KLTerm(estimator="k1", placement="reward", credit=credit)),
        )
        for credit in ("immediate", "to_go")
    ),
    *(
        make_arm(
            f"{name}_{weighting}",
            distillation=Distillation(kl=KLTerm(estimator=name, weighting=weighting), weight=0.5),
        )
        for name in ("k1", "k2", "k3", "k3_clip")
        for weighting in ("none", "attached", "detached")
    ),
    *(
        make_arm(name, advantage=ZERO, distillation=Distillation(kl=KLTerm(estimator=name)))
        for name in ("exact", "forward", "cross_entropy", "minimax01")
    ),
    make_arm(
        "supervised",
        advantage=ZERO,
        sampler=Sampler(by="teacher"),
        distillation=Distillation(kl=KLTerm(estimator="cross_entropy")),
    ),
    make_arm("annealed", distillation=Distillation(weight=2.0, weight_end=0.5, anneal_updates=10)),
    make_arm(
        "anneal_done", distillation=Distillation(weight=2.0, weight_end=0.5, anneal_updates=2)
    ),
    make_arm("only_below", distillation=Distillation(only_below=0.5)),
    make_arm(
        "only_below_loss",
        kl=KLTerm(estimator="k3"),
        beta=0.5,
        distillation=Distillation(
            kl=KLTerm(estimator="k2"), only_below=0.5, weight=3.0, weight_end=0.0, anneal_updates=7
        ),
    ),
    make_arm(
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
