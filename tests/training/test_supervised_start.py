"""A model that learns right answers before any run: what it learns, and who is held to it."""

from __future__ import annotations

import itertools

import pytest
import torch
from pydantic import ValidationError

from analysis.records.language import (
    ArithmeticTask,
    LanguageConfig,
    LoraConfig,
    PackagedModel,
    SupervisedStart,
)
from analysis.records.variants import Variant
from analysis.studies.presets.language import llama_smoke
from analysis.sweeps.provenance import sources_of
from analysis.sweeps.store import run_key
from analysis.training.environment_of import environment_of
from analysis.training.pretrained.llama import PAD
from analysis.training.pretrained.supervised import batch_rows, trajectory
from analysis.training.pretrained.tasks import TextTask
from analysis.training.rollout import completion_inputs
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.packaged import needs_packaged_weights
from tests.training.conftest import runs_of

START = SupervisedStart(examples=200, updates=20, batch_size=50, learning_rate=3e-2)
CONFIG = llama_smoke().config.model_copy(
    update={
        "start": START,
        "lora": LoraConfig(rank=8, alpha=16.0),
        "updates": 2,
        "num_prompts": 8,
        "log_every": 1,
        "final_answers": 48,
    }
)
PLAIN = CONFIG.model_copy(update={"start": None})
K2 = Variant(kl=KLTerm(estimator="k2"), beta=0.5)
END, OPENING = 0, 9
ASKED, HELD_OUT, SOLVED = [[5, 6, OPENING], [7, OPENING]], [[8, 8, 8, OPENING]], [[4, OPENING]]


def texts(**changes) -> TextTask:
    """Two questions that are asked, one held out, one with its answer."""
    sections = {"held_out": 1, "answers": [[3, END]]} | changes
    return TextTask(
        [*ASKED, *HELD_OUT, *SOLVED],
        lambda place, tokens: float(list(tokens) == [place]),
        end_tokens=[END],
        completion_length=3,
        **sections,
    )


class Characters:
    """A tokenizer."""

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_the_start_answers_better_and_is_what_runs_begin_at_and_are_held_to():
    """At the first update the KL to the reference is zero, to the bit."""
    plain, started = (
        PopulationTrainer(config, runs_of([Variant(), K2], (0, 1)), environment_of(config)).run()
        for config in (PLAIN, CONFIG)
    )
    before, after = (record.metrics["reward"][0] for record in (plain, started))
    assert (after > before + 0.1).all(), (before, after)
    for metric in ("reverse_kl", "forward_kl", "k1", "k2", "k3"):
        assert (started.metrics[metric][0] == 0).all(), metric
    assert (started.metrics["reverse_kl"][1] > 0).all()
    assert (started.final["final_reverse_kl"] > 0).all()


def test_the_model_with_its_start_added_says_what_the_adapters_say():
    config = CONFIG.model_copy(update={"precision": "float64"})
    plain = environment_of(config.model_copy(update={"start": None}))
    *_, weights = trajectory(plain.policy, plain.task, config)
    environment = environment_of(config)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(1, 4, plain.task.draws_per_prompt, generator=generator).double()
    prompts = plain.task.prompts(drawn)
    inputs = torch.randint(0, 12, (1, 4, 2, 3), generator=generator)
    wanted = plain.policy.logits(plain.policy.unflatten(weights), prompts, inputs)
    for adapters in ({}, environment.policy.unflatten(environment.start)):
        found = environment.policy.logits(adapters, prompts, inputs)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert (wanted - plain.policy.logits({}, prompts, inputs)).abs().max() > 0.1
    assert environment.policy.reference(environment.start, 3) == {}


def test_an_epoch_shows_each_example_once_and_the_next_in_another_order():
    start = SupervisedStart(examples=6, batch_size=2)
    epochs = [
        [batch_rows(start, 3 * epoch + batch, 6).tolist() for batch in range(3)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(6))
    assert epochs[0] != epochs[1]
    assert len(batch_rows(start, 5, 1)) == 1, "one example is all there is"


def test_what_is_asked_held_out_and_solved_are_different_questions():
    task = texts()
    grid = ((torch.arange(40, dtype=torch.float64) + 0.5) / 40).view(1, -1, 1)
    asked, final = (
        {tuple(t for t in row if t != PAD) for row in draw(grid)[0].tolist()}
        for draw in (task.prompts, task.final_prompts)
    )
    assert (asked, final) == ({(5, 6), (7,)}, {(8, 8, 8)})
    examples = task.examples()
    assert examples.prompts.tolist() == [[PAD, PAD, 4]]
    assert examples.completions.tolist() == [[3, END]]
    answers = torch.tensor([[[[2, END, 0], [0, END, 0]]]])
    assert task.score(task.final_prompts(grid[:, :1]), answers).rewards.tolist() == [[[1.0, 0.0]]]
    everywhere = texts(held_out=0, answers=[])
    assert torch.equal(everywhere.final_prompts(grid), everywhere.prompts(grid))
    for changes, said in (
        ({"held_out": 3}, "none is left"),
        ({"answers": [[3, 3, 3, END]]}, "completion_length=3 cuts a right answer of 4 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            texts(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": ArithmeticTask(held_out=5)}, "held_out=5 questions are for final policies"),
        ({"start": {"examples": 10}}, "batch_size=32 exceeds examples=10"),
        ({"start": {"updates": 0}}, "start.updates"),
        ({"task": {"name": "products", "worked": True}}, "running totals: products has none"),
    ],
)
def test_a_start_or_a_task_that_means_nothing_is_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        LanguageConfig(**{"model": PackagedModel(), **changes})


def test_runs_without_a_start_keep_their_names_and_a_start_is_part_of_one():
    assert "start" not in PLAIN.model_dump()
    task = LanguageConfig(model=PackagedModel()).model_dump()["task"]
    assert not {"held_out", "worked"} & task.keys()
    run = runs_of([K2])[0]
    other = CONFIG.model_copy(update={"start": START.model_copy(update={"updates": 41})})
    assert len({run_key(config, run) for config in (PLAIN, CONFIG, other)}) == 3
    assert LanguageConfig.model_validate_json(CONFIG.model_dump_json()) == CONFIG
    assert any(name.endswith("pretrained/supervised.py") for name in sources_of(CONFIG))


@pytest.mark.peers
def test_a_worked_sum_is_verified_by_its_last_number(monkeypatch):
    pytest.importorskip("reasoning_gym", reason="the extra lm is not installed")
    from analysis.training.pretrained import questions

    assert questions.worked("4 - 1 + 7") == "4 - 1 = 3; 3 + 7 = 10; 10"
    assert questions.worked("2 - 9 - 1") == "2 - 9 = -7; -7 - 1 = -8; -8"
    monkeypatch.setattr(questions, "tokenizer_of", lambda folder: Characters())
    sizes = {"terms": 7, "pool": 20, "held_out": 10, "shots": 0, "completion_length": 110}
    config = ArithmeticTask(worked=True, **sizes)
    parts = questions.drawn_questions(config, examples=15)
    lefts = [[question.text for question in part] for part in parts]
    assert [len(part) for part in lefts] == [20, 10, 15] and len({*itertools.chain(*lefts)}) == 45
    task = questions.arithmetic_task(config, None, examples=15)
    drawn = task.final_prompts(torch.tensor([[[0.0]]]))
    question = "".join(map(chr, drawn[0, 0].tolist())) + "="
    assert question == lefts[1][0]
    total = eval(question[:-1])
    answer = parts.held_out[0].answer
    assert answer.endswith(f" = {total}; {total}")
    tries = {
        f" {answer}\n": 1.0,
        f" 1 + 1 = 3; {total}\n": 1.0,  # steps are not verified
        f" {total}\n": 1.0,
        f" {total}; {total + 1}\n": 0.0,
        f" {answer}": 0.0,  # not ended
        f" {answer};\n": 0.0,
    }
    rows = [[ord(c) for c in attempt.ljust(110)] for attempt in tries]
    scores = task.score(drawn, torch.tensor(rows)[None, None])
    assert scores.rewards.flatten().tolist() == list(tries.values())
    for row, example in zip(task.examples().completions, parts.examples, strict=True):
        assert "".join(map(chr, row.tolist())).rstrip("\n") == f" {example.answer}"
    with pytest.raises(ValueError, match="completion_length=50 cuts a right answer of"):
        questions.arithmetic_task(config.model_copy(update={"completion_length": 50}), None)
    with pytest.raises(ValueError, match="held_out=300: chain_sum of 2 terms of 1 digits has no"):
        questions.drawn_questions(ArithmeticTask(pool=20_000, held_out=300))


@needs_packaged_weights
@pytest.mark.slow
def test_few_updates_on_worked_answers_make_them_likelier_under_the_packaged_model():
    task = ArithmeticTask(terms=7, pool=4, shots=0, worked=True, completion_length=80)
    start = SupervisedStart(examples=4, updates=3, batch_size=2)
    config = LanguageConfig(model=PackagedModel(), task=task, start=start, updates=1)
    plain, started = (
        environment_of(one) for one in (config.model_copy(update={"start": None}), config)
    )
    examples = started.task.examples()
    prompts, targets = examples.prompts[None, :2], examples.completions[None, :2, None]
    assert 57 <= targets.shape[-1] <= 69, "running totals of seven terms fit into 80 tokens"

    def logp(environment) -> float:
        inputs = completion_inputs(targets, started.task.bos_token)
        found = environment.policy.logits({}, prompts, inputs).log_softmax(dim=-1)
        counted = started.task.completion_mask(targets)
        return found.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[counted].mean().item()

    before, after = logp(plain), logp(started)
    assert after > before + 0.3, (before, after)


@pytest.mark.peers
def test_nothing_held_out_or_learned_is_solved_in_the_prompt():
    """A pool smaller than the solved questions does not hold all of these."""
    pytest.importorskip("reasoning_gym", reason="the extra lm is not installed")
    from analysis.training.pretrained.questions import drawn_questions

    few = {"terms": 7, "pool": 2, "shots": 4}
    for sizes, examples in (({"held_out": 30}, 20), ({}, 20)):
        parts = drawn_questions(ArithmeticTask(**few, **sizes), examples)
        for question in (*parts.held_out, *parts.examples):
            *solved, asked = question.text.split("\n")
            assert len(solved) == 4 and not any(line.startswith(asked) for line in solved)


def test_a_tokenizer_that_joins_the_end_of_the_line_to_an_answer_is_refused():
    """What is learned would never end, and so never be right."""
    from analysis.training.pretrained.questions import answer_tokens

    class Joining(Characters):
        def __call__(self, text):
            joined = [256 + int(text[-2])] if text.endswith("\n") else []
            ids = super().__call__(text[:-2] if joined else text)["input_ids"]
            return {"input_ids": ids + joined}

    assert answer_tokens(Characters(), "1 + 1 =", "2") == [ord(c) for c in " 2\n"]
    with pytest.raises(ValueError, match="joins the end of the line to '3'"):
        answer_tokens(Joining(), "1 + 2 =", "3")
