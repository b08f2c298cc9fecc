r"""Arithmetic of reasoning-gym as token ids: some solved lines, then one to be completed.

A question is the lines ``4 - 1 = 3\n7 + 5 =``; the answer is what follows up to the end of the
line. A model that was trained on text goes on like that without a chat template.

A worked answer to ``4 - 1 + 7 =`` is `` 4 - 1 = 3; 3 + 7 = 10; 10``: what stands behind the last
semicolon is verified, whatever the steps say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from analysis.records.language import ArithmeticTask
from analysis.training.pretrained.folders import Unavailable, needed
from analysis.training.pretrained.tasks import TextTask, refuse_cut

#: What ends an answer.
LINE = "\n"
#: What ends a step of a worked answer.
STEP = ";"


class Question(NamedTuple):
    """A question of the pool."""

    text: str  #: solved ones first, up to the equals sign
    answer: str  #: the right one, as the task wants it
    entry: dict[str, Any]  #: as reasoning-gym made it


class Questions(NamedTuple):
    """All questions of a task, each in one place alone."""

    pool: list[Question]  #: those that runs are asked
    held_out: list[Question]  #: those that final policies are asked
    examples: list[Question]  #: those whose answers a supervised start learns


def questions_of(config: ArithmeticTask) -> list[Question]:
    """The pool, no question twice.

    Raises:
        Unavailable: the extra ``lm`` is not installed.
    """
    return drawn_questions(config).pool


def drawn_questions(config: ArithmeticTask, examples: int = 0) -> Questions:
    """Questions in the order in which they are drawn: the pool, what is held out, the examples.

    The solved ones shown before each question may be of the pool, and are of neither other part.

    Raises:
        Unavailable: the extra ``lm`` is not installed.
        ValueError: all that were drawn for one of them had been drawn before.
    """
    shots = _dataset(config, config.shots, config.seed + 1) if config.shots else []
    solved = "".join(f"{_left_side(shot)} {_answer(config, shot)}{LINE}" for shot in shots)
    counts = {"pool": config.pool, "held_out": config.held_out, "examples": examples}
    entries = list(_dataset(config, sum(counts.values()), config.seed))
    seen: set[str] = set()
    shown = {_left_side(shot) for shot in shots}
    parts = []
    for name, count in counts.items():
        drawn, entries = entries[:count], entries[count:]
        fresh = {_left_side(entry): entry for entry in drawn}
        fresh = {left: entry for left, entry in fresh.items() if left not in seen}
        if count and not fresh:
            raise ValueError(
                f"{name}={count}: {config.name} of {config.terms} terms of {config.digits} digits "
                "has no question left that was not drawn before"
            )
        seen |= fresh.keys() | shown
        parts.append([Question(solved + left, _answer(config, e), e) for left, e in fresh.items()])
    return Questions(*parts)


def worked(expression: str) -> str:
    """A sum with its running totals.

    >>> worked("4 - 1 + 7")
    '4 - 1 = 3; 3 + 7 = 10; 10'
    """
    first, *rest = expression.split()
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total} {sign} {term} = {after}{STEP} ")
        total = after
    return "".join(steps) + str(total)


def arithmetic_task(config: ArithmeticTask, folder: Path, examples: int = 0) -> TextTask:
    """The task for the model in ``folder``, with so many questions for a supervised start.

    An answer is right if reasoning-gym scores it exactly 1: it gives partial credit to any text
    that holds the answer, which would reward listing numbers.

    Raises:
        Unavailable: the extra ``lm`` is not installed, or the folder holds no tokenizer.
        ValueError: there are too few questions, a right answer that is worked or learned is longer
            than the longest completion, or the tokenizer has no token boundary before an answer or
            before the end of its line.
    """
    tokenizer = tokenizer_of(folder)
    dataset, parts = _dataset(config, config.pool, config.seed), drawn_questions(config, examples)
    every = [question for part in parts for question in part]

    @cache
    def score(place: int, text: str) -> float:
        return float(dataset.score_answer(text, every[place].entry))

    def verify(place: int, tokens: Sequence[int]) -> float:
        text = tokenizer.decode(tokens)
        return score(place, (text.rpartition(STEP)[2] if config.worked else text).strip())

    if config.worked:
        asked = (*parts.pool, *parts.held_out)
        right = (answer_tokens(tokenizer, q.text, q.answer) for q in asked)
        refuse_cut(right, config.completion_length)
    return TextTask(
        [tokenizer(question.text)["input_ids"] for question in every],
        verify,
        end_tokens=[end_of_line(tokenizer)],
        completion_length=config.completion_length,
        held_out=len(parts.held_out),
        answers=[answer_tokens(tokenizer, q.text, q.answer) for q in parts.examples],
    )


def answer_tokens(tokenizer: Any, question: str, answer: str) -> list[int]:
    """Token ids of an answer behind its question, the end included.

    Raises:
        ValueError: the tokenizer has no token boundary between the two, or before the end.
    """
    asked = tokenizer(question)["input_ids"]
    whole = tokenizer(f"{question} {answer}{LINE}")["input_ids"]
    if whole[: len(asked)] != asked:
        raise ValueError(f"the tokenizer joins {answer!r} to the end of {question!r}")
    if whole[-1] != end_of_line(tokenizer):
        raise ValueError(f"the tokenizer joins the end of the line to {answer!r}: it would not end")
    return list(whole[len(asked) :])


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


def _answer(config: ArithmeticTask, entry: dict[str, Any]) -> str:
    """The right answer of an entry, worked where the task wants that."""
    return worked(entry["metadata"]["expression"]) if config.worked else str(entry["answer"])


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
