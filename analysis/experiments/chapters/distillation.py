"""What the distillation populations start from, what one of them ends on, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch

from analysis.experiments.ablations.costs import cost_ratio, crossings
from analysis.experiments.ablations.presets import NO_KL, Preset
from analysis.experiments.ablations.recording import Recorded
from analysis.experiments.ablations.untrained import untrained
from analysis.training.arms import Arm, Sampler
from analysis.training.config import Member
from analysis.training.tasks import END, FILLER, NUM_DIGIT_TOKENS
from analysis.training.trainer import PopulationTrainer

#: The teacher samples: its rollout says how good it is.
BY_TEACHER = Arm(label="teacher", kl_estimator="none", sampler=Sampler(by="teacher"))


def skills(preset: Preset, *, num_prompts: int = 400, seed: int = 0) -> pd.DataFrame:
    """Accuracy and length of the start and of the teacher of a preset, on prompts of their own.

    Returns:
        One row each, ``who``: ``start`` and ``teacher``; with ``accuracy`` and ``length``.
    """
    members = [Member(arm=arm, seed=seed) for arm in (NO_KL, BY_TEACHER)]
    table = untrained(preset, members, num_prompts=num_prompts).assign(who=["start", "teacher"])
    return table[["who", "accuracy", "length"]]


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
        interquartile mean of the ratio over seeds ``iqm``, its band ``low`` to ``high``, and in how
        many seeds the arm (``missed``) and the other (``other_missed``) never got there.
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
