r"""What a KL of so many nats a token reads like: answers along one run that games its reward.

SmolLM2 answers instructions in its own chat format. Its reward is the number of letters per word,
on which readability indices such as the ARI are built: a proxy for elaborate prose that no writer
of nonsense finds hard. There is no KL term. On the way the policy answers the same questions with
the same noise, again and again, and each time the exact KL of these answers is summed over the
vocabulary, at every state they visit. The recorded table of the book is made on one core in a
quarter of an hour by the following; stopped earlier, it keeps what was read::

    python -c "from analysis.studies.language import nats; nats.record()"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from analysis.records.config import Run
from analysis.records.language import ArithmeticTask, LanguageConfig, PackagedModel
from analysis.records.nats import RECORDED
from analysis.records.variants import Variant
from analysis.studies.language.retention import STATES
from analysis.studies.language.skills import Skill, skills_of
from analysis.studies.presets.language import LORA
from analysis.sweeps.record import record_tables
from analysis.training.environment import Scores
from analysis.training.population import uniforms
from analysis.training.precision import dtype_of
from analysis.training.pretrained.folders import folder_of
from analysis.training.pretrained.questions import tokenizer_of
from analysis.training.pretrained.tasks import TextTask, pretrained_environment
from analysis.training.pretrained.weights import load_llama
from analysis.training.rollout import sample
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.divergences import forward_kl, reverse_kl

#: Of the run. Its task is not used: the questions are instructions.
CONFIG = LanguageConfig(
    model=PackagedModel(),
    lora=LORA,
    updates=40,
    num_prompts=3,
    group_size=4,
    learning_rate=2e-3,
    log_every=2,
)
SEED = 9500
#: Tokens of the longest answer.
LONGEST = 16
#: Updates between readings. The last one is read too.
EVERY = 2
#: Questions that are read, the first of the instructions; all of them are trained on.
READ = 6
#: Letters per word that give a reward of 1.
ENOUGH = 20.0


def letters_per_word(text: str) -> float:
    """Mean number of letters of the words of a text, which are what white space parts; 0 of none.

    Signs and digits are no letters.
    """
    words = text.split()
    return sum(map(str.isalpha, "".join(words))) / len(words) if words else 0.0


class Replies(TextTask):
    """Instructions, and answers whose reward is a function of their text in [0, 1].

    Nothing is right or wrong, so accuracy is the reward.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], reward: Callable[[Sequence[int]], float], end: int
    ) -> None:
        super().__init__(
            prompts,
            lambda place, tokens: reward(tokens),
            end_tokens=[end],
            completion_length=LONGEST,
        )
        self._reward = reward

    def score(self, prompts: Tensor, completions: Tensor, starts: Tensor | None = None) -> Scores:
        """Rewards [M, P, G] of completions [M, P, G, T], read up to their end."""
        mask = self.completion_mask(completions)
        rows = zip(completions.flatten(0, 2).tolist(), mask.sum(-1).flatten().tolist(), strict=True)
        rewards = torch.tensor([self._reward(tokens[:length]) for tokens, length in rows])
        rewards = rewards.view(completions.shape[:3])
        return Scores(rewards, rewards)


class Reader:
    """The same questions with the same noise for every policy.

    Args:
        trainer: whose policy is read.
        task: its first questions are asked once each.
        text: of tokens.
        count: of the questions of the task.
    """

    def __init__(
        self, trainer: PopulationTrainer, task: Replies, text: Callable[[Any], str], count: int
    ) -> None:
        self.trainer, self.task, self.text = trainer, task, text
        places = (torch.arange(READ, dtype=torch.float64) + 0.5) / count
        self.prompts = task.prompts(places.view(1, -1, 1))
        shape = (1, READ, 1, LONGEST)
        noise = uniforms(SEED, "final sampling", 0, shape)
        self.noise = torch.from_numpy(noise).to(dtype_of(trainer.config))

    @torch.no_grad()
    def read(self) -> tuple[dict[str, float], list[str]]:
        """The numbers of a row of the path, and an answer to each question."""
        policy, config = self.trainer.policy, self.trainer.config
        adapters = policy.unflatten(self.trainer.weights.detach())
        said = sample(policy, adapters, self.task, self.prompts, self.noise, config.temperature)
        both = [
            policy.logits(of, self.prompts, said.inputs)[said.mask].split(STATES)
            for of in (adapters, self.trainer.reference)
        ]
        kls = {
            kl.__name__: torch.cat([kl(p.double(), q.double()) for p, q in zip(*both, strict=True)])
            for kl in (reverse_kl, forward_kl)
        }
        lengths = said.mask.sum(-1).flatten().tolist()
        rows = said.completions.flatten(0, 2).tolist()
        answers = [self.text(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        letters = sum(map(letters_per_word, answers)) / len(answers)
        means = {name: values.mean().item() for name, values in kls.items()}
        return {**means, "letters": letters}, answers


def train_and_read(config: LanguageConfig = CONFIG) -> Iterator[dict[str, pd.DataFrame]]:
    """The tables of :class:`analysis.records.nats.Nats`, by their names, after each reading.

    Raises:
        Unavailable: the model or an optional package cannot be had.
    """
    folder = folder_of(config.model)
    tokenizer, model = tokenizer_of(folder), load_llama(folder, dtype_of(config), "cpu")
    skills = {skill.name: skill for skill in skills_of(ArithmeticTask(), tokenizer)}
    asked: Skill = skills["instructions"]

    def text(tokens: Sequence[int]) -> str:
        return " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())

    def reward(tokens: Sequence[int]) -> float:
        return min(1.0, letters_per_word(text(tokens)) / ENOUGH)

    task = Replies(asked.prompts, reward, asked.end)
    environment = pretrained_environment(config, model, task)
    trainer = PopulationTrainer(config, [Run(variant=Variant(), seed=SEED)], environment)
    reader = Reader(trainer, task, text, len(asked.prompts))
    questions = [_question(tokenizer.decode(prompt)) for prompt in asked.prompts[:READ]]
    path, answers = [], []
    while True:
        if trainer.done % EVERY == 0 or trainer.done == config.updates:
            numbers, said = reader.read()
            path.append({"update": trainer.done, **numbers})
            print(path[-1], *said[:4], sep="\n  ", file=sys.stderr, flush=True)
            rows = zip(questions, said, strict=True)
            answers += [{"update": trainer.done, "question": q, "answer": a} for q, a in rows]
            yield {"path": pd.DataFrame(path), "answers": pd.DataFrame(answers)}
        if trainer.done == config.updates:
            return
        trainer.advance()


def _question(prompt: str) -> str:
    """What the user asks in the last turn of a chat."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def record() -> None:
    """Train and read on one thread, and record the tables after each reading, so that a run that
    is stopped leaves what it has read."""
    torch.set_num_threads(1)
    for tables in train_and_read():
        record_tables(
            RECORDED,
            {f"{name}.csv": table for name, table in tables.items()},
            CONFIG,
            preset="smollm2_nats",
            seeds=[SEED],
            configuration=CONFIG.model_dump(mode="json"),
            reward=f"letters per word over {ENOUGH:g}, at most 1; no KL term",
        )
