"""What tables call the variants of objectives, advantages and lengths."""

from __future__ import annotations

#: How tokens are averaged -> what figures call it.
AVERAGES = {"mean": "$1/|o|$", "batch_mean": "one mean over the batch", "sum": "sum over tokens"}


#: Variant under an average -> what tables call it.
OF_AVERAGES = {
    f"{name}_{how}": f"{called}, {average.replace('$', '')}"
    for name, called in (
        ("only_k1", "k₁ alone"),
        ("none", "no KL term"),
        ("k1", "k₁ as a loss"),
        ("k2", "k₂ as a loss"),
    )
    for how, average in AVERAGES.items()
}


CLIPS = {
    "symmetric": "upper clip 0.2",
    "higher": "upper clip 0.28",
    "wide": "upper clip 0.4",
    "unclipped": "no upper clip",
}


ADVANTAGES = {
    "group_std": "over std",
    "std_min": "std at least 0.1",
    "group_centre": "centred",
    "leave_one_out": "leave one out",
    "drop_uniform": "equal groups out",
}


CREDITS = {
    "outcome": "outcome",
    "process": "process",
    "marginal": "marginal",
    "outcome_centre": "outcome, centred",
    "marginal_centre": "marginal, centred",
}


#: The rows of DAPO's table, each beside those above.
DAPO = {
    "grpo": "GRPO",
    "overlong_filtering": "+ overlong filtering",
    "clip_higher": "+ Clip-Higher",
    "soft_overlong": "+ soft overlong",
    "token_mean": "+ token mean",
    "dynamic_sampling": "+ dynamic sampling",
}


#: Variant of any of the runs -> what tables call it.
NAMES = {
    **CLIPS,
    **ADVANTAGES,
    **{f"{name}_noisy": f"{called}, noisy" for name, called in (CLIPS | ADVANTAGES).items()},
    **CREDITS,
    **{f"graded_{name}": f"{called}, graded" for name, called in CREDITS.items()},
    **DAPO,
    **OF_AVERAGES,
    "grpo_token_mean": "GRPO, token mean",
    "grpo_token_sum": "GRPO, token sum",
    "token_mean": "token mean",
    "token_sum": "token sum",
    "dr_grpo": "Dr. GRPO",
    "gspo": "GSPO, GRPO's clip",
    "gspo_narrow": "GSPO, narrow clip",
    "sequence": "sequence ratio",
    "mirror_descent": "mirror descent",
    "cispo": "CISPO",
    "reinforce": "REINFORCE",
    "rloo": "RLOO",
    "dpo": "DPO",
    "linear_price": "price",
    "relative_reward": "relative",
    "soft_overlong": "soft overlong",
    "stop_loops": "loops stopped",
}
