"""A pool of questions as token ids, whose completions are verified, and a frozen model on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.records.language import PretrainedConfig
from analysis.training.environment import Environment, Scores, Task
from analysis.training.precision import dtype_of
from analysis.training.pretrained.llama import PAD, LlamaPolicy
from analysis.training.pretrained.weights import Llama

#: Score of an answer: (place of the question in the pool, tokens before the end) -> 1.0 if right.
Verify = Callable[[int, Sequence[int]], float]


class Examples(NamedTuple):
    """Prompts with right completions, to learn from."""

    prompts: Tensor  #: [N, L]
    completions: Tensor  #: [N, T]; what stands behind the end is not counted


class TextTask:
    """Questions of any length; a completion is right if it ends and its score is exactly 1.

    Args:
        questions: token ids of each, the same last token in all: it opens the completion. First
            those that runs are asked, then what is held out, then those that come with answers.
        verify: scores a completion; anything below 1, such as partial credit, counts as 0.
        end_tokens: any of these ends a completion.
        completion_length: tokens of the longest completion that is sampled, the end included.
        held_out: how many questions final policies are asked, and runs are not.
        answers: right completions of the last questions, which are examples and asked of nobody.

    Raises:
        ValueError: no questions, an empty one, different last tokens, or an answer that is longer
            than the longest completion.
    """

    def __init__(
        self,
        questions: Sequence[Sequence[int]],
        verify: Verify,
        *,
        end_tokens: Sequence[int],
        completion_length: int,
        held_out: int = 0,
        answers: Sequence[Sequence[int]] = (),
    ) -> None:
        if not questions or not all(questions):
            raise ValueError("questions must be a list of non-empty lists of token ids")
        bos_tokens = {question[-1] for question in questions}
        if len(bos_tokens) > 1:
            raise ValueError(f"questions must end with one and the same token, not {bos_tokens}")
        if not end_tokens:
            raise ValueError("end_tokens is empty: no completion would ever be right")
        refuse_cut(answers, completion_length)
        asked = len(questions) - held_out - len(answers)
        if asked < 1:
            raise ValueError(f"of {len(questions)} questions none is left for runs to be asked")
        self._asked, self._held_out = range(asked), range(asked, asked + held_out)
        self._answers = answers
        self.bos_token = bos_tokens.pop()
        self.draws_per_prompt = 1
        self.completion_length = completion_length
        self._verify = verify
        self._end_tokens = torch.tensor(list(end_tokens))
        length = max(len(question) for question in questions) - 1
        rows = [[PAD] * (length - len(q) + 1) + list(q[:-1]) for q in questions]
        self._prompts = torch.tensor(rows, dtype=torch.long).view(-1, length)
        #: Tokens with which all questions begin alike; each has at least two more.
        self.shared = _common([question[:-2] for question in questions])
        self._places = {tuple(row): place for place, row in enumerate(rows)}

    def prompts(self, uniforms: Tensor) -> Tensor:
        """Questions [M, P, L], left-padded, without the bos_token token; uniforms [M, P, 1]."""
        return self._drawn(self._asked, uniforms)

    def final_prompts(self, uniforms: Tensor) -> Tensor:
        """As :meth:`prompts`, of the questions that are held out, if there are any."""
        return self._drawn(self._held_out or self._asked, uniforms)

    def examples(self) -> Examples:
        """The questions that come with answers; behind these the end is repeated."""
        longest, end = max(map(len, self._answers)), self._end_tokens[0].item()
        rows = [[*answer, *[end] * (longest - len(answer))] for answer in self._answers]
        first = len(self._prompts) - len(rows)
        return Examples(self._prompts[first:], torch.tensor(rows, device=self._prompts.device))

    def _drawn(self, places: range, uniforms: Tensor) -> Tensor:
        size = len(places)
        drawn = (uniforms.squeeze(-1) * size).long().clamp(max=size - 1) + places.start
        self._move_to(uniforms.device)
        return self._prompts[drawn]

    def completion_mask(self, completions: Tensor) -> Tensor:
        """[..., T], True up to and including the first end token."""
        ended = self._ends(completions).long()
        return (ended.cumsum(dim=-1) - ended) == 0

    def score(self, prompts: Tensor, completions: Tensor, starts: Tensor | None = None) -> Scores:
        """Verify completions [M, P, G, T] of prompts [M, P, L]; rewards are accuracy."""
        lengths = self.completion_mask(completions).sum(dim=-1).flatten().tolist()
        finished = self._ends(completions).any(dim=-1).flatten().tolist()
        answers = completions.flatten(0, 2).tolist()
        group = completions.shape[2]
        places = [self._places[tuple(row)] for row in prompts.flatten(0, 1).tolist()]
        scores = [
            float(done and self._verify(places[index // group], answer[: length - 1]) == 1.0)
            for index, (answer, length, done) in enumerate(
                zip(answers, lengths, finished, strict=True)
            )
        ]
        right = torch.tensor(scores, device=completions.device).view(completions.shape[:3])
        return Scores(right, right, finished=self._ends(completions).any(dim=-1))

    def _ends(self, completions: Tensor) -> Tensor:
        self._move_to(completions.device)
        return torch.isin(completions, self._end_tokens)

    def _move_to(self, device: torch.device) -> None:
        """Once, not at every call: a copy from the CPU cannot be part of a graph."""
        if self._prompts.device != device:
            self._prompts = self._prompts.to(device)
            self._end_tokens = self._end_tokens.to(device)


def refuse_cut(answers: Iterable[Sequence[int]], completion_length: int) -> None:
    """Refuse, by a ValueError, right answers that are longer than the longest completion."""
    longest = max(map(len, answers), default=0)
    if longest > completion_length:
        raise ValueError(
            f"completion_length={completion_length} cuts a right answer of {longest} tokens"
        )


def _common(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest beginning that all rows have in common."""
    first, last = min(rows), max(rows)  # in the order of words, those that differ earliest
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


def pretrained_environment(config: PretrainedConfig, model: Llama, task: Task) -> Environment:
    """Adapters on ``model``, on the model's device; all runs start as the model itself.

    Raises:
        ValueError: if the model has not the precision of the run.
    """
    dtype = model.embedding.dtype
    wanted = dtype_of(config)
    if dtype != wanted:
        raise ValueError(f"model is {dtype}: load it as {wanted}, the run's precision")
    shared = task.shared if isinstance(task, TextTask) else 0
    policy = LlamaPolicy(model, config.lora, config.forward, shared)
    return Environment(task, policy, policy.start())
