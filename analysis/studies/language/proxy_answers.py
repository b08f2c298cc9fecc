"""What the runs of ``smollm2_proxy`` say once they have been trained on a reward model.

All runs of one seed are trained again as they were recorded, and each final policy answers the same
questions with the same noise; so does the frozen model, which all of them were. The recorded table
of the book is made, once the design is recorded, in as long as its runs of one seed take::

    python -c "from analysis.studies.language import proxy_answers; proxy_answers.record()"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch

from analysis.records import recording
from analysis.records.config import Run
from analysis.records.language import LanguageConfig, RandomModel
from analysis.records.manifests import RESULTS, as_written
from analysis.records.proxy_answers import RECORDED, REFERENCE, as_recorded
from analysis.records.recording import Recording
from analysis.sweeps.record import record_tables, tidy
from analysis.sweeps.reproduction import mismatches
from analysis.training.environment import Environment, starts_of
from analysis.training.environment_of import environment_of
from analysis.training.population import run_uniforms, uploaded
from analysis.training.precision import dtype_of
from analysis.training.pretrained.folders import folder_of
from analysis.training.pretrained.llama import PAD
from analysis.training.pretrained.lora import Adapters
from analysis.training.pretrained.questions import tokenizer_of
from analysis.training.pretrained.reward_head import FROZEN
from analysis.training.rollout import sample
from analysis.training.trainer import PopulationTrainer

#: The recorded runs.
RUNS = RESULTS / "smollm2_proxy_cpu"
#: Questions that are asked, spread evenly over the pool.
ASKED = 24
#: Of the noise; no run has it.
NOISE_SEED = 10_100

#: From tokens to what they say.
Text = Callable[[Sequence[int]], str]


@torch.no_grad()
def answers_of(
    adapters: Adapters, seed: int, environment: Environment, config: LanguageConfig, text: Text
) -> pd.DataFrame:
    """A row per question: ``question``, ``answer``, ``ended``, ``gold`` and ``proxy``.

    Args:
        adapters: of one run, or none.
        seed: of the run, by whose reward model the answers are scored.
    """
    task, policy, device = environment.task, environment.policy, environment.start.device
    places = (torch.arange(ASKED, dtype=torch.float64) + 0.5) / ASKED
    drawn = places.view(1, -1, 1).expand(-1, -1, task.draws_per_prompt).contiguous()
    prompts = task.prompts(uploaded(drawn, device))
    shape = (ASKED, 1, task.completion_length)
    noise = run_uniforms([NOISE_SEED], "final sampling", 0, shape, dtype_of(config))
    said = sample(policy, adapters, task, prompts, uploaded(noise, device), config.temperature)
    scores = task.score(prompts, said.completions, starts_of([seed], environment))
    ended = torch.ones_like(scores.gold) if scores.finished is None else scores.finished
    rows = zip(
        prompts[0].tolist(),
        said.completions[0, :, 0].tolist(),
        said.mask[0, :, 0].sum(dim=-1).tolist(),
        *(part[0, :, 0].tolist() for part in (ended, scores.gold, scores.rewards)),
        strict=True,
    )
    return pd.DataFrame(
        {
            "question": _last_line(text([t for t in prompt if t != PAD] + [task.bos_token])),
            "answer": text(answer[:length]),
            "ended": bool(done),
            "gold": gold,
            "proxy": proxy,
        }
        for prompt, answer, length, done, gold, proxy in rows
    )


def _last_line(text: str) -> str:
    return text.rpartition("\n")[2]


def trained_and_asked(
    recorded: Recording, seed: int, environment: Environment, text: Text
) -> Iterator[tuple[pd.DataFrame, int]]:
    """The answers of :func:`analysis.records.proxy_answers.recorded`, those of the reference first
    and then of one run after the other, and how many numbers of their curves differ from the
    recorded ones."""
    config = recorded.preset.config

    def asked(adapters: Adapters, variant: str, beta: float) -> pd.DataFrame:
        of_run = {"variant": variant, "beta": beta, "seed": seed}
        table = answers_of(adapters, seed, environment, config, text)
        return pd.DataFrame(of_run, index=table.index).join(table)

    tables, differing = [asked(FROZEN, REFERENCE, 0.0)], 0
    yield tables[0], differing
    for variant in recorded.preset.variants:
        trainer = PopulationTrainer(config, [Run(variant=variant, seed=seed)], environment)
        curves = as_written(tidy(trainer.run()))
        differing += len(mismatches(recording.compared(recorded.curves, curves)))
        adapters = trainer.policy.unflatten(trainer.weights.detach())
        tables.append(asked(adapters, variant.name, variant.beta))
        yield pd.concat(tables, ignore_index=True), differing


def text_of(config: LanguageConfig) -> Text:
    """What the model of a configuration means by tokens; of a random one, their numbers.

    Raises:
        Unavailable: the model or an optional package cannot be had.
    """
    if isinstance(config.model, RandomModel):
        return lambda tokens: " ".join(map(str, tokens))
    tokenizer = tokenizer_of(folder_of(config.model))
    return lambda tokens: str(tokenizer.decode(tokens))


def record(of: Path = RUNS, to: Path = RECORDED, *, device: str = "cpu") -> None:
    """Train and ask the runs of the first seed of a recording, and record the table after each run,
    so that a record that is stopped leaves what it has asked.

    Raises:
        Unavailable: the model or an optional package cannot be had.
        ValueError: the recording is missing or damaged.
    """
    torch.set_num_threads(1)
    recorded = recording.load(of)
    config, seed = recorded.preset.config, recorded.preset.seeds[0]
    environment = environment_of(config, device)
    for table, differing in trained_and_asked(recorded, seed, environment, text_of(config)):
        print(table.tail(4).to_string(), file=sys.stderr, flush=True)
        record_tables(
            to,
            {"answers.csv": as_recorded(table)},
            config,
            preset="smollm2_proxy_answers",
            seeds=[seed],
            differing=differing,
            configuration=recorded.preset.model_dump(mode="json"),
        )
