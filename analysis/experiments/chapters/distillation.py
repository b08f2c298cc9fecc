"""What members of the distillation populations write, and what a teacher saves."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch

from analysis.experiments.ablations.costs import cost_ratio, crossings
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.recording import Recorded
from analysis.training.config import Member
from analysis.training.tasks import END, FILLER, NUM_DIGIT_TOKENS
from analysis.training.trainer import PopulationTrainer


def completions_after(
    preset: Preset, arms: Iterable[str], *, updates: int, seed: int = 0, prompts: int = 3
) -> pd.DataFrame:
    """What members of some arms write after so many updates, on the same prompts.

    Returns:
        One row per arm and prompt: ``arm``, ``prompt``, ``sorted`` and ``completion``, as text.
    """
    names = list(arms)
    chosen = [arm for name in names for arm in preset.arms if arm.name == name]
    config = preset.config.model_copy(update={"updates": updates, "log_every": updates})
    trainer = PopulationTrainer(config, [Member(arm=arm, seed=seed) for arm in chosen])
    trainer.run()
    rollout = trainer.rollout(updates).rollout
    answers = config.task.targets(rollout.prompts)
    return pd.DataFrame(
        {
            "arm": name,
            "prompt": as_text(rollout.prompts[member, prompt]),
            "sorted": as_text(answers[member, prompt]),
            "completion": as_text(rollout.completions[member, prompt, 0]),
        }
        for member, name in enumerate(names)
        for prompt in range(prompts)
    )


def as_text(tokens: torch.Tensor) -> str:
    """Tokens [T] of the sorting task as characters; ``?`` for those that mean nothing."""
    signs = {END: ".", FILLER: "_"} | {digit: str(digit) for digit in range(NUM_DIGIT_TOKENS)}
    return "".join(signs.get(token, "?") for token in tokens.tolist())


def cost_table(
    recorded: Recorded, arm: str, others: Iterable[str], thresholds: Iterable[float]
) -> pd.DataFrame:
    """How many times more an arm spends than others until the policy reaches an accuracy.

    Returns:
        One row per threshold, other arm and unit (``updates``, ``tokens``, ``flops``): the
        geometric mean of the ratio over seeds ``mean``, its interval ``low`` to ``high``, and in
        how many seeds the arm (``missed``) and the other (``other_missed``) never got there.
    """
    others, rows = list(others), []
    for threshold in thresholds:
        spent = crossings(recorded.curves, recorded.preset, "own_accuracy", threshold)
        for other in others:
            for unit in ("updates", "tokens", "flops"):
                ratio = cost_ratio(spent, arm, other, unit)
                rows.append(
                    {"threshold": threshold, "other": other, "unit": unit, **ratio._asdict()}
                )
    return pd.DataFrame(rows)
