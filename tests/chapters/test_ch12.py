"""Chapter 12: recorded benchmarks, the plain trainer, and arithmetic."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.chapters import ch12_performance as chapter
from analysis.chapters.ch12_performance import Benchmark
from analysis.chapters.plain_grpo import PlainTrainer
from analysis.records.config import SEPARATOR, PolicyConfig, SortTask, StartConfig, TrainConfig
from analysis.training.counting import generated_tokens, run_update
from analysis.training.rollout import completion_inputs
from analysis.training.tiny.policy import make_policy


def tiny() -> TrainConfig:
    return TrainConfig(
        task=SortTask(num_digits=3, end_token=True, reward="graded"),
        policy=PolicyConfig(width=12, num_layers=2, num_heads=3),
        start=StartConfig(updates=0),
        num_prompts=2,
        group_size=3,
        learning_rate=1e-2,
    )


def timings(seconds: dict[str, list[float]]) -> Benchmark:
    rounds = [
        {
            "round": number,
            "width": 64,
            "trainer": name,
            "kind": "trl" if name.startswith("TRL") else "population",
            "runs": 12 if "2 processes" in name else 24,
            "processes": 2 if "2 processes" in name else 1,
            "threads": 1,
            "seconds": value,
        }
        for name, values in seconds.items()
        for number, value in enumerate(values)
    ]
    machine = [
        {
            "round": number,
            "width": 64,
            "processes": processes,
            "flops_per_second": 1e11 * processes,
            "bytes_per_second": 1e10,
        }
        for processes in (1, 2)
        for number in range(3)
    ]
    phases = pd.DataFrame({"width": [64], "runs": [24], "phase": ["rollout"], "share": [1.0]})
    return Benchmark(pd.DataFrame(rounds), pd.DataFrame(machine), phases)


@pytest.fixture
def three_rounds() -> Benchmark:
    return timings(
        {
            "population of 24": [0.010, 0.020, 0.012],
            chapter.POPULATION: [0.005, 0.010, 0.006],
            "TRL": [0.050, 0.120, 0.054],
        }
    )


def test_the_plain_model_is_the_policy_of_the_population():
    config = tiny()
    trainer, policy = PlainTrainer(config, seed=0), make_policy(config)
    model = trainer.model
    weights = {
        "token_embedding": model.tokens.weight,
        "position_embedding": model.positions.weight,
        "head": model.head.weight.T,
    }
    for layer, block in enumerate(model.blocks):
        for name in ("attention_in", "attention_out", "mlp_in", "mlp_out"):
            weights[f"block{layer}.{name}"] = getattr(block, name).weight.T
    assert sum(part.numel() for part in weights.values()) == policy.num_parameters
    stacked = {name: part.detach().unsqueeze(0) for name, part in weights.items()}
    prompts = torch.randint(10, (1, 2, 3))
    inputs = completion_inputs(torch.randint(10, (1, 2, 3, 4)), SEPARATOR)
    together = policy.logits(stacked, prompts, inputs)
    rows = torch.cat([prompts[0].repeat_interleave(3, dim=0), inputs[0].flatten(0, 1)], dim=1)
    alone = model(rows)[0][:, 3:].view(together.shape)
    assert torch.allclose(together, alone, rtol=0, atol=1e-5)


def test_the_plain_trainer_samples_with_its_cache_and_learns():
    trainer = PlainTrainer(tiny(), seed=0)
    prompts = torch.randint(10, (4, 3))
    completions, kept = trainer.sample(prompts)
    full = trainer.logp(trainer.model, prompts, completions)
    assert torch.allclose(kept, full, rtol=0, atol=1e-5)
    before = trainer.model.head.weight.clone()
    for _ in range(10):  # a group of equal rewards has no gradient
        trainer.update()
    assert (trainer.model.head.weight - before).abs().max() > 1e-4


def test_the_arithmetic_is_that_of_the_products_counted_one_by_one():
    config = tiny()
    length, steps, groups, width, inner, vocab_size = 3, 4, 3, 12, 24, 16
    flops = 0
    for row in [*range(length), *(length + t for t in range(steps) for _ in range(groups))]:
        flops += 2 * 2 * (width * 3 * width + width * width + 2 * width * inner)
        flops += 2 * 2 * 2 * width * (row + 1)  # two layers, scores and mixture
        flops += 2 * width * vocab_size * (row >= length)
    assert run_update(config).flops == 4 * 2 * flops  # passes, prompts
    assert generated_tokens(config) == 2 * 3 * 4


def test_ratios_are_taken_within_a_round(three_rounds):
    table = chapter.ratios(three_rounds).set_index("trainer")
    assert table.loc["population of 24", "ratio"] == pytest.approx(2.0)
    assert table.loc["population of 24", ["low", "high"]].tolist() == pytest.approx([2.0, 2.0])
    assert table.loc["TRL", "ratio"] == pytest.approx(10.0)
    assert chapter.best(table.reset_index(), "trl", 64)["ratio"] == pytest.approx(10.0)
    with pytest.raises(ValueError, match="no trainer of kind 'plain'"):
        chapter.best(table.reset_index(), "plain", 64)


def test_the_floor_is_the_arithmetic_at_the_measured_rate(three_rounds):
    table = chapter.floors(three_rounds).set_index("processes")
    flops = run_update(chapter.LARGEST).flops
    assert table.loc[1, "flops_ms"] == pytest.approx(1e3 * flops / 1e11)
    assert table.loc[2, "flops_ms"] == pytest.approx(1e3 * flops / 2e11)
    assert table.loc[1, "ratio"] == pytest.approx(12.0 / table.loc[1, "flops_ms"])


def test_the_median_and_its_interval():
    found = chapter.median_interval(pd.Series(np.arange(101.0)), "middle")
    assert found["middle"] == 50.0
    assert 30 < found["low"] < 48 and 52 < found["high"] < 70


def test_tokens_per_second_count_what_is_sampled(three_rounds):
    row = chapter.best(chapter.medians(three_rounds), "trl", 64)
    assert row["ms"] == pytest.approx(54.0)
    assert row["tokens"] == pytest.approx(12 * 6 * 9 / 0.054)


def test_a_language_model_is_compared_round_by_round():
    seconds = {(chapter.TRANSFORMERS, 1): [6.0, 12.0, 9.0], ("population", 4): [2.0, 3.0, 6.0]}
    rounds = pd.DataFrame(
        [
            {"round": number, "trainer": name, "runs": count, "seconds": value}
            for (name, count), values in seconds.items()
            for number, value in enumerate(values)
        ]
    )
    table = chapter.language_summary(rounds).set_index(["trainer", "runs"])
    assert table.loc[(chapter.TRANSFORMERS, 1), "ratio"] == 1.0
    row = table.loc[("population", 4)]
    assert [row["seconds"], row["ratio"], row["low"], row["high"]] == [3.0, 3.0, 1.5, 4.0]


def test_the_times_drawn_are_the_medians():
    benchmark = chapter.load()
    figure = chapter.time_over_runs(benchmark)
    table = chapter.medians(benchmark)
    assert len(figure.axes) == len((32, 64))
    for panel, width in zip(figure.axes, (32, 64), strict=True):
        alone = table[(table["width"] == width) & (table["processes"] == 1)]
        expected = alone[alone["kind"] == "population"].sort_values("runs")
        lines = [line for line in panel.lines if list(line.get_xdata()) == list(expected["runs"])]
        assert list(lines[0].get_ydata()) == list(expected["ms"])
        fastest = chapter.best(table, "plain", width)["ms"]
        assert any(set(line.get_ydata()) == {fastest} for line in panel.lines)


def test_measured_updates_take_longer_than_their_count_at_full_rate() -> None:
    """Where the count can be checked: the recorded CPU benchmark of the tiny policy."""
    least = chapter.floors(chapter.load())
    shares = 1.0 / least["ratio"]
    assert ((shares > 0.05) & (shares < 1.0)).all()
