"""Variants along every axis of the methods, each with a label."""

from __future__ import annotations

from typing import Any

from analysis.records.variants import (
    Advantage,
    Correction,
    Distillation,
    Objective,
    Sampler,
    Shaping,
    Variant,
)
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import MODES

WEIGHTINGS = ("none", "attached", "detached")
VALUES = ("k1", "k2", "k3", "k3_clip", "k4")


def labelled(parts: dict[str, dict[str, Any]]) -> list[Variant]:
    return [Variant(label=label, **fields) for label, fields in parts.items()]


def kl(estimator: str, beta: float, **term: Any) -> dict[str, Any]:
    return {"kl": KLTerm(estimator=estimator, **term), "beta": beta}


def objective(kind: str, **fields: Any) -> dict[str, Any]:
    return {"objective": Objective(kind=kind, **fields)}


def advantage(**fields: Any) -> dict[str, Any]:
    return {"advantage": Advantage(**fields)}


def shaping(**fields: Any) -> dict[str, Any]:
    return {"shaping": Shaping(**fields)}


def sampler(**fields: Any) -> dict[str, Any]:
    return {"sampler": Sampler(**fields)}


def correction(**fields: Any) -> dict[str, Any]:
    return {"correction": Correction(**fields)}


def distilled(estimator: str, *, of: dict[str, Any] | None = None, **term: Any) -> dict[str, Any]:
    return {"distillation": Distillation(kl=KLTerm(estimator=estimator, **term), **of or {})}


K1_REWARD = kl("k1", 0.3, placement="reward")
ZERO = advantage(baseline="zero")
TRUNCATED = correction(mask_truncated=True)

OBJECTIVES = labelled(
    {
        f"{kind}_{low}_{high}": objective(kind, epsilon_low=low, epsilon_high=high)
        for kind in ("grpo", "gspo", "cispo", "reinforce", "sequence", "grpo_off_policy")
        for low, high in ((0.2, 0.2), (0.1, 0.28))
    }
    | {"gspo_tight": objective("gspo", epsilon_low=0.01, epsilon_high=0.02)}
    | {  # each token its own k1, as on-policy distillation has it
        f"merged_{reading}": objective("grpo_off_policy", reading=reading)
        | {"kl": Distillation().kl, "beta": 0.3}
        for reading in ("old", "detached", "attached")
    }
    | {
        f"{kind}_{tau}": objective(kind, tau=tau)
        for kind in ("mirror_descent", "dpo")
        for tau in (1.0, 0.25)
    }
    | {
        "dpo_k2": objective("dpo") | kl("k2", 0.4),
        "mirror_descent_before": objective("mirror_descent")
        | advantage(kl_order="before")
        | K1_REWARD,
        "gspo_marginal": objective("gspo") | advantage(level="marginal"),
    }
)

AGGREGATIONS = labelled(
    {
        f"{kind}_{mode}": objective(kind, aggregation=mode) | kl("k3", 0.5)
        for kind in ("grpo", "gspo", "sequence", "mirror_descent")
        for mode in MODES
    }
)

KL = labelled(
    {
        f"{name}{level}_{weighting}": kl(name, beta, weighting=weighting, **fields)
        for level, beta, fields in (("_sequence", 0.1, {"level": "sequence"}), ("", 0.5, {}))
        for name in VALUES
        for weighting in WEIGHTINGS
    }
    | {
        f"{name}_{weighting}_{ratio}": kl(name, 0.1, weighting=weighting, ratio=ratio)
        for name in ("k1", "k2", "k3")
        for weighting in ("attached", "detached")
        for ratio in ("prefix", "sequence", "geometric")
    }
    | {
        "minimax01": kl("minimax01", 2.0),
        "minimax01_detached": kl("minimax01", 2.0, weighting="detached"),
        "exact": kl("exact", 0.5),
        "forward": kl("forward", 0.5),
        "k2_shows_k3": kl("k2", 0.5, value="k3"),
        "k1_shows_k2": kl("k1", 0.5, value="k2", weighting="detached"),
        "k2_shows_k1_sequence": kl("k2", 0.1, value="k1", level="sequence"),
        "k3_shows_k2_attached": kl("k3", 0.5, value="k2", weighting="attached"),
    }
)

CREDITS = (("to_go", "token"), ("immediate", "token"), ("whole", "token"), ("to_go", "sequence"))
KL_REWARD = labelled(
    {
        f"{name}_reward_{credit}_{level}": kl(
            name, 0.2, placement="reward", credit=credit, level=level
        )
        for name in VALUES
        for credit, level in CREDITS
    }
    | {
        f"{name}_before_{baseline}_{level}": kl(name, 0.2, placement="reward", level=level)
        | advantage(kl_order="before", baseline=baseline)
        for name in ("k1", "k3")
        for baseline in ("group_normalise", "group_centre", "leave_one_out")
        for level in ("token", "sequence")
    }
)

DROPPED = [("grpo", mode) for mode in list(MODES)[:3]]
DROPPED += [("mirror_descent", "seq_mean_token_mean"), ("dpo", "token_mean")]
ADVANTAGES = labelled(
    {
        "ddof0": advantage(ddof=0),
        "eps": advantage(eps=0.5),
        "eps0": advantage(eps=0.0),
        "std_min": advantage(std_min=0.35),
        "std_max": advantage(std_max=0.2),
        "std_both": advantage(std_min=0.25, std_max=0.3, ddof=0),
        "centre": advantage(baseline="group_centre"),
        "leave_one_out": advantage(baseline="leave_one_out"),
        "shortest_right": advantage(baseline="shortest_right"),
        "process_ddof0_eps": advantage(level="process", ddof=0, eps=0.3),
        "process_std": advantage(level="process", std_min=0.6),
        "marginal_std": advantage(level="marginal", std_min=0.3),
    }
    | {
        f"{level}_{baseline}": advantage(level=level, baseline=baseline)
        for level in ("process", "marginal")
        for baseline in ("group_normalise", "group_centre")
    }
    | {
        "zero_k2": ZERO | kl("k2", 0.5),
        "zero_k1_reward": ZERO | K1_REWARD,
        "process_k1_reward": advantage(level="process") | K1_REWARD,
        "shortest_right_cloned": objective("reinforce") | advantage(baseline="shortest_right"),
    }
    | {
        f"drop_{kind}_{mode}": objective(kind, aggregation=mode)
        | advantage(drop_uniform_groups=True)
        | kl("k2", 0.5)
        for kind, mode in DROPPED
    }
)

SHAPINGS = labelled(
    {
        "linear": shaping(length="linear", weight=0.05),
        "relative": shaping(length="relative", weight=0.5),
        "overlong": shaping(length="soft_overlong", weight=0.5, buffer=2),
        "noise": shaping(noise=0.4),
        "noise_linear_before": shaping(length="linear", weight=0.05, noise=0.2)
        | advantage(kl_order="before")
        | K1_REWARD,
        "relative_dpo": shaping(length="relative", weight=2.0) | objective("dpo"),
    }
)

SAMPLERS = labelled(
    {
        "fresh": {},
        "stale1": sampler(staleness=1),
        "stale2": sampler(staleness=2) | kl("k2", 0.5, weighting="detached"),
        "stale_reward": sampler(staleness=2) | K1_REWARD,
        "hot": sampler(temperature=1.3),
        "nucleus": sampler(top_p=0.9),
        "stale_nucleus": sampler(staleness=1, top_p=0.8, temperature=1.1),
        "teacher": sampler(by="teacher"),
        "teacher_nucleus": sampler(by="teacher", top_p=0.9),
        "repeats": sampler(repeat_times=2),
        "repeats_period": sampler(repeat_times=2, repeat_period=2) | K1_REWARD,
        "repeats_masked": sampler(repeat_times=2) | TRUNCATED,
    }
)

KEPT = correction(keep_sampling_mask=True)
CORRECTIONS = labelled(
    {
        f"{kind}_{level}": sampler(temperature=1.4, top_p=0.95)
        | correction(mismatch=kind, mismatch_level=level, bound=bound)
        for kind in ("truncated", "masked")
        for level, bound in (("token", 1.25), ("sequence", 1.5))
    }
    | {
        "truncated_stale_cispo": objective("cispo")
        | kl("k3", 0.5)
        | sampler(temperature=0.7, staleness=1)
        | correction(mismatch="truncated", bound=1.1),
        "sequence_mask": correction(sequence_mask_delta=0.05),
        "sequence_mask_stale": K1_REWARD
        | sampler(staleness=2)
        | correction(sequence_mask_delta=0.1),
        "mask_truncated": TRUNCATED,
        "mask_truncated_k2": TRUNCATED | kl("k2", 0.5),
    }
    | {
        f"keep_{kind}": objective(kind) | sampler(top_p=0.8) | KEPT
        for kind in ("grpo", "gspo", "cispo", "reinforce", "sequence", "mirror_descent")
    }
    | {
        "keep_stale": kl("k2", 0.5) | sampler(top_p=0.8, staleness=2) | KEPT,
        "all_masks": sampler(top_p=0.9, temperature=1.2)
        | correction(mask_truncated=True, sequence_mask_delta=0.02, mismatch="masked", bound=1.5),
    }
)

FADING = {"only_below": 0.5, "weight": 3.0, "weight_end": 0.0, "anneal_updates": 7}
DISTILLATIONS = labelled(
    {
        f"k1_reward_{credit}": ZERO | distilled("k1", placement="reward", credit=credit)
        for credit in ("immediate", "to_go")
    }
    | {
        f"{name}_{weighting}": distilled(name, weighting=weighting, of={"weight": 0.5})
        for name in ("k1", "k2", "k3", "k3_clip")
        for weighting in WEIGHTINGS
    }
    | {name: ZERO | distilled(name) for name in ("exact", "forward", "cross_entropy", "minimax01")}
    | {
        "supervised": ZERO | sampler(by="teacher") | distilled("cross_entropy"),
        "only_below": {"distillation": Distillation(only_below=0.5)},
        "only_below_loss": kl("k3", 0.5) | distilled("k2", of=FADING),
        "kdrl": distilled("k2", of={"weight": 0.3}) | kl("k1", 0.2, placement="reward"),
    }
    | {
        name: {"distillation": Distillation(weight=2.0, weight_end=0.5, anneal_updates=updates)}
        for name, updates in (("annealed", 10), ("anneal_done", 2))
    }
)

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
