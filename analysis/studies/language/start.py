"""How well a supervised start answers, by how long it has learned: read before any run is trained.

The rule that chooses a start is part of the designs that use one
(:mod:`analysis.studies.presets.worked_sums`). What is asked are questions of the pool: those that
are held out stay unseen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import pandas as pd
import torch

from analysis.records.language import LanguageConfig
from analysis.studies.language.proxy_answers import Text
from analysis.studies.presets.worked_sums import START_ACCURACY, START_BETWEEN
from analysis.training.environment import Environment, Weights
from analysis.training.environment_of import before_start
from analysis.training.population import run_uniforms, uploaded
from analysis.training.precision import dtype_of
from analysis.training.pretrained.llama import PAD
from analysis.training.pretrained.supervised import trajectory
from analysis.training.rollout import sample
from kl_term.errors import UserError

#: Of the questions that are asked, and of the noise; no run has it.
SEED = 11_900
#: Answers that are kept as they were said.
SAID = 12


class Reading(NamedTuple):
    """Of a start."""

    row: dict[str, float]  #: updates, accuracy, finished (shares of the answers), length
    said: pd.DataFrame  #: updates, question, answer, right


def readings(
    config: LanguageConfig, after: Collection[int], text: Text, device: str = "cpu"
) -> Iterator[Reading]:
    """The start of a configuration, read after so many of its updates."""
    environment, _ = before_start(config, device)
    policy = environment.policy
    learned = trajectory(policy, environment.task, config)
    for updates, weights in enumerate(learned, 1):
        if updates in after:
            yield read(config, environment, policy.unflatten(weights), updates, text)


@torch.no_grad()
def read(
    config: LanguageConfig, environment: Environment, weights: Weights, updates: int, text: Text
) -> Reading:
    """``config.final_answers`` answers, each to a question of its own."""
    task, device = environment.task, environment.start.device
    shape = (config.final_answers, task.draws_per_prompt)
    drawn = run_uniforms([SEED], "prompts", 0, shape, torch.float64)
    prompts = task.prompts(uploaded(drawn, device))
    shape = (config.final_answers, 1, task.completion_length)
    noise = uploaded(run_uniforms([SEED], "sampling", 0, shape, dtype_of(config)), device)
    policy, temperature = environment.policy, config.temperature
    rollout = sample(policy, weights, task, prompts, noise, temperature)
    scores = task.score(prompts, rollout.completions)
    finished = torch.ones_like(scores.accuracy) if scores.finished is None else scores.finished
    lengths = rollout.mask.sum(dim=-1)
    rows = zip(
        prompts[0].tolist(),
        rollout.completions[0, :, 0].tolist(),
        lengths[0, :, 0].tolist(),
        scores.accuracy[0, :, 0].tolist(),
        strict=True,
    )
    said = [
        {
            "updates": updates,
            "question": text([token for token in asked if token != PAD] + [task.bos_token]),
            "answer": text(answer[:length]),
            "right": right,
        }
        for asked, answer, length, right in rows
    ]
    row = {
        "updates": updates,
        "accuracy": scores.accuracy.mean().item(),
        "finished": finished.float().mean().item(),
        "length": lengths.float().mean().item(),
    }
    return Reading(row, pd.DataFrame(said[:SAID]))


def chosen(table: pd.DataFrame) -> int:
    """Updates of the start whose accuracy is nearest to the wanted one, the shorter of two.

    Args:
        table: ``updates`` and ``accuracy``, in the order of training.

    Raises:
        UserError: none has an accuracy at which the design trains runs.
    """
    low, high = START_BETWEEN
    if not table["accuracy"].between(low, high).any():
        pairs = zip(table["accuracy"], table["updates"], strict=True)
        found = ", ".join(f"{accuracy:.2f} after {updates}" for accuracy, updates in pairs)
        raise UserError(
            f"no start has an accuracy of {low:g} to {high:g} ({found}): design another"
        )
    nearest = (table["accuracy"] - START_ACCURACY).abs().round(6).idxmin()
    return int(table["updates"][nearest])
