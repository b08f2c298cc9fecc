r"""What a model could do before it was trained on sums: questions far from them and near.

Four skills are lines with one right answer behind solved lines, as in
:mod:`analysis.training.pretrained.questions`; the fifth are instructions in the model's own
chat format, which have no right answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from analysis.records.language import ArithmeticTask
from analysis.training.pretrained.questions import LINE, answer_tokens, end_of_line, questions_of

#: Solved lines before each question, as many as the task shows.
SHOTS = 4
#: Questions of each arithmetic skill.
SUMS = 40
#: Tokens of the longest answer, and of the longest reply to an instruction.
ANSWER, REPLY = 6, 32

CAPITALS = """
France: Paris, Japan: Tokyo, Italy: Rome, Egypt: Cairo, Germany: Berlin, Spain: Madrid,
Russia: Moscow, China: Beijing, England: London, Greece: Athens, Portugal: Lisbon, Norway: Oslo,
Sweden: Stockholm, Finland: Helsinki, Denmark: Copenhagen, Poland: Warsaw, Austria: Vienna,
Hungary: Budapest, Ireland: Dublin, Belgium: Brussels, Turkey: Ankara, Iran: Tehran,
Iraq: Baghdad, Syria: Damascus, Lebanon: Beirut, Kenya: Nairobi, Cuba: Havana, Peru: Lima,
Chile: Santiago, Canada: Ottawa, Thailand: Bangkok, Vietnam: Hanoi, Philippines: Manila,
Afghanistan: Kabul, Pakistan: Islamabad, Nepal: Kathmandu, Bangladesh: Dhaka,
Romania: Bucharest, Bulgaria: Sofia, Croatia: Zagreb, Serbia: Belgrade, Scotland: Edinburgh,
Libya: Tripoli, Algeria: Algiers
"""

OPPOSITES = """
hot: cold, big: small, up: down, black: white, fast: slow, high: low, day: night, rich: poor,
hard: soft, wet: dry, full: empty, light: dark, open: closed, happy: sad, early: late,
strong: weak, long: short, left: right, love: hate, win: lose, buy: sell, push: pull,
true: false, good: bad, near: far, clean: dirty, thick: thin, wide: narrow, loud: quiet,
first: last, war: peace, life: death, male: female, north: south, east: west, inside: outside,
always: never, yes: no, old: young, more: less, before: after, above: below, begin: end,
hello: goodbye
"""

INSTRUCTIONS = """
Describe the sea in one sentence.
Name three animals that live on a farm.
What is the water cycle?
Write a short greeting for a friend.
Explain why the sky is blue.
Give me a simple recipe with eggs.
What does a carpenter do?
Tell me a short story about a fox.
How can I sleep better?
What is photosynthesis?
Write a sentence with the word "lantern".
List two ways to save energy at home.
Who wrote Romeo and Juliet?
Why do leaves fall in autumn?
Suggest a name for a small cat.
What is the difference between a lake and a river?
Describe your favourite season.
How do I plant a tomato?
What is a noun?
Write a thank-you note to a teacher.
Why is exercise good for the heart?
Name a musical instrument with strings.
What should I pack for a day at the beach?
Explain what a bridge is to a child.
"""


class Skill(NamedTuple):
    """Questions of one kind, as token ids."""

    name: str
    prompts: list[list[int]]  #: all with the same last token
    answers: list[list[int]] | None  #: the right ones, end included
    end: int  #: the token that ends a completion
    longest: int  #: tokens of the longest completion that is sampled, the end included
    group_size: int  #: completions of the reference for each question


def skills_of(task: ArithmeticTask, tokenizer: Any) -> list[Skill]:
    """From the task itself to what is furthest from it.

    Raises:
        Unavailable: the extra ``lm`` is not installed.
        ValueError: the tokenizer has no token boundary between a question and its answer.
    """
    products = task.model_copy(update={"name": "products"})
    lines = {
        "the task": _asked(task),
        "products": _asked(products),
        "capitals": _pairs(CAPITALS),
        "opposites": _pairs(OPPOSITES),
    }
    chat = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": instruction}], add_generation_prompt=True, tokenize=False
        )
        for instruction in INSTRUCTIONS.strip().split(LINE)
    ]
    replies = Skill(
        "instructions",
        [tokenizer(text)["input_ids"] for text in chat],
        None,
        end=tokenizer.eos_token_id,
        longest=REPLY,
        group_size=2,
    )
    return [*(_of_lines(name, pairs, tokenizer) for name, pairs in lines.items()), replies]


def _asked(config: ArithmeticTask) -> list[tuple[str, str]]:
    return [(question.text, question.answer) for question in questions_of(config)[:SUMS]]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Each pair, a line behind the first ones, which are solved."""
    given = re.split(r",\s+", text.strip())
    solved = "".join(line + LINE for line in given[:SHOTS])
    asked = (line.split(": ") for line in given[SHOTS:])
    return [(f"{solved}{left}:", right) for left, right in asked]


def _of_lines(name: str, pairs: Sequence[tuple[str, str]], tokenizer: Any) -> Skill:
    prompts = [tokenizer(text)["input_ids"] for text, _ in pairs]
    answers = [answer_tokens(tokenizer, text, answer) for text, answer in pairs]
    return Skill(name, prompts, answers, end_of_line(tokenizer), ANSWER, group_size=4)
