r"""Arithmetic of reasoning-gym as token ids: some solved lines, then one to be completed.

A question is the lines ``4 - 1 = 3\n7 + 5 =``; the answer is what follows up to the end of the
line. A model that was trained on text goes on like that without a chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from analysis.records.language import ArithmeticTask
from analysis.training.pretrained.folders import Unavailable, needed
from analysis.training.pretrained.tasks import TextTask

#: What ends an answer.
LINE = "\n"


class Question(NamedTuple):
    """A question of the pool."""

    text: str  #: solved ones first, up to the equals sign
    answer: str
    entry: dict[str, Any]  #: as reasoning-gym made it


def questions_of(config: ArithmeticTask) -> list[Question]:
    """The pool, no question twice.

    Raises:
        Unavailable: the extra ``lm`` is not installed.
    """
    shots = _dataset(config, config.shots, config.seed + 1) if config.shots else []
    solved = "".join(f"{_left_side(shot)} {shot['answer']}{LINE}" for shot in shots)
    pool = {_left_side(entry): entry for entry in _dataset(config, config.pool, config.seed)}
    return [Question(solved + left, entry["answer"], entry) for left, entry in pool.items()]


def arithmetic_task(config: ArithmeticTask, folder: Path) -> TextTask:
    """The task for the model in ``folder``.

    An answer is right if reasoning-gym scores it exactly 1: it gives partial credit to any text
    that holds the answer, which would reward listing numbers.

    Raises:
        Unavailable: the extra ``lm`` is not installed, or the folder holds no tokenizer.
    """
    tokenizer = tokenizer_of(folder)
    dataset, pool = _dataset(config, config.pool, config.seed), questions_of(config)

    @cache
    def score(place: int, text: str) -> float:
        return float(dataset.score_answer(text, pool[place].entry))

    def verify(place: int, tokens: Sequence[int]) -> float:
        return score(place, tokenizer.decode(tokens).strip())

    return TextTask(
        [tokenizer(question.text)["input_ids"] for question in pool],
        verify,
        end_tokens=[end_of_line(tokenizer)],
        completion_length=config.completion_length,
    )


def end_of_line(tokenizer: Any) -> int:
    """The token that ends an answer."""
    return tokenizer(f"1 + 1 = 2{LINE}")["input_ids"][-1]


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of the model in ``folder``.

    Raises:
        Unavailable: the extra ``lm`` is not installed, or the folder holds none.
    """
    transformers = needed("transformers", "lm")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise Unavailable(f"{folder} holds no tokenizer ({reason})") from None


def _left_side(entry: dict[str, Any]) -> str:
    return f"{entry['metadata']['expression']} ="


def _dataset(config: ArithmeticTask, size: int, seed: int) -> Any:
    gym = needed("reasoning_gym", "lm")
    return gym.create_dataset(
        config.name,
        size=size,
        seed=seed,
        min_terms=config.terms,
        max_terms=config.terms,
        min_digits=config.digits,
        max_digits=config.digits,
    )
