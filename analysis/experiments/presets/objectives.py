"""What the policy term does: kinds of objective, the clip, DAPO's changes one on another.

Several optimizer steps are taken on each rollout, so that ratios leave 1 and the objectives differ.
Settings were found by search on seeds 0 to 2.
"""

from __future__ import annotations

from analysis.experiments.preset import (
    CENTRED,
    GROUP_STD,
    Preset,
    fresh_seeds,
    population,
    preset,
)
from analysis.training.config import StartConfig
from analysis.training.tiny.tasks import SortTask
from analysis.training.variants import Advantage, Correction, Objective, Shaping, Variant

#: Upper clips by name; no ratio of these runs comes near the last.
UPPER_CLIPS = {"symmetric": 0.2, "higher": 0.28, "wide": 0.4, "unclipped": 1e6}


@preset
def objectives(
    *,
    learning_rate: float = 5e-4,
    tau: float = 1.0,
    num_iterations: int = 4,
    num_seeds: int = 10,
    updates: int = 120,
) -> Preset:
    """Twelve policy terms, four steps on each rollout."""

    def variant(label: str, advantage: Advantage = GROUP_STD, **objective: object) -> Variant:
        return Variant(label=label, advantage=advantage, objective=Objective(**objective))

    return population(
        updates=updates,
        learning_rate=learning_rate,
        num_iterations=num_iterations,
        task=SortTask(num_digits=6, end_token=True, max_fillers=2),
        log_every=15,
        variants=(
            variant("grpo"),
            variant("grpo_token_mean", aggregation="token_mean"),
            variant("grpo_token_sum", aggregation="seq_mean_token_sum"),
            variant("dr_grpo", CENTRED, aggregation="seq_mean_token_sum_norm"),
            variant("gspo", kind="gspo"),
            variant("gspo_narrow", kind="gspo", epsilon_low=0.03, epsilon_high=0.04),
            variant("sequence", kind="sequence"),
            variant("cispo", kind="cispo"),
            variant("reinforce", kind="reinforce"),
            variant("rloo", Advantage(baseline="leave_one_out"), kind="reinforce"),
            variant("mirror_descent", kind="mirror_descent", tau=tau),
            variant("dpo", kind="dpo", tau=tau),
        ),
        seeds=fresh_seeds(1000, num_seeds),
        predictions=(
            "With four steps on a rollout, objectives whose gradient stops where the policy has "
            "moved far (grpo, gspo_narrow, sequence, mirror_descent) end more accurate than those "
            "whose gradient does not (reinforce, rloo, cispo, dpo).",
            "GSPO with GRPO's clip range of 0.2 hardly clips and ends below GRPO; with a range "
            "five times narrower it ends with GRPO.",
            "CISPO, which clips the weight and keeps the gradient, ends between GRPO and REINFORCE "
            "or with REINFORCE, not above GRPO.",
            "Neither dropping 1/|o| nor Dr. GRPO changes the accuracy visibly: lengths vary little "
            "here and the optimizer takes out scale.",
            "DPO on the best and worst of each group ends least accurate.",
        ),
    )


@preset
def clip_higher(
    *,
    learning_rate: float = 5e-4,
    noise: float = 0.01,
    num_iterations: int = 4,
    num_seeds: int = 10,
    updates: int = 120,
) -> Preset:
    """Upper clip 0.2, 0.28, 0.4 and none above 0.8, with and without noise on the reward."""
    return population(
        updates=updates,
        learning_rate=learning_rate,
        num_iterations=num_iterations,
        start=StartConfig(updates=110),
        log_every=15,
        variants=(
            Variant(
                label=f"{name}{suffix}",
                objective=Objective(epsilon_high=high),
                shaping=Shaping(noise=width),
            )
            for suffix, width in (("", 0.0), ("_noisy", noise))
            for name, high in UPPER_CLIPS.items()
        ),
        seeds=fresh_seeds(1020, num_seeds),
        predictions=(
            "Entropy falls in every variant while accuracy rises: it falls below two thirds of "
            "that of the start with the symmetric clip.",
            "The higher the upper clip, the more entropy is left; 0.28 against 0.2 is too small a "
            "step to see in ten seeds.",
            "No higher upper clip ends more accurate than 0.2; without one, accuracy is lower.",
            "Noise of a hundredth of the reward, divided by the group's standard deviation, costs "
            "accuracy at every upper clip, most without one.",
        ),
    )


@preset
def dapo(
    *, learning_rate: float = 5e-4, num_iterations: int = 4, num_seeds: int = 10, updates: int = 120
) -> Preset:
    """GRPO, then DAPO's five changes, each variant with all of those before it."""
    filtered = Correction(mask_truncated=True)
    higher = Objective(epsilon_high=0.28)
    overlong = Shaping(length="soft_overlong", weight=0.5, buffer=1)
    tokens = Objective(epsilon_high=0.28, aggregation="token_mean")
    dynamic = Advantage(drop_uniform_groups=True)
    shaped = {"correction": filtered, "shaping": overlong}
    return population(
        updates=updates,
        learning_rate=learning_rate,
        num_iterations=num_iterations,
        task=SortTask(num_digits=6, end_token=True, max_fillers=3),
        start=StartConfig(updates=110, fillers=(1, 3)),
        log_every=15,
        variants=(
            Variant(label="grpo"),
            Variant(label="overlong_filtering", correction=filtered),
            Variant(label="clip_higher", correction=filtered, objective=higher),
            Variant(label="soft_overlong", objective=higher, **shaped),
            Variant(label="token_mean", objective=tokens, **shaped),
            Variant(label="dynamic_sampling", objective=tokens, advantage=dynamic, **shaped),
        ),
        seeds=fresh_seeds(1040, num_seeds),
        predictions=(
            "No row of the table ends at another accuracy than the row above it: few answers are "
            "cut here, and nothing else is scarce that the five changes save.",
            "Overlong filtering makes answers longer, and more of them are cut: cut answers are no "
            "longer punished.",
            "The soft overlong penalty makes them shorter again, and ends the cutting.",
            "Dynamic sampling leaves out more than a third of the tokens, at no cost in accuracy.",
        ),
    )
