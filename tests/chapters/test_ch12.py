"""Chapter 12: recorded benchmarks, the plain trainer, arithmetic, and derived costs by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.chapters import ch12_performance as chapter
from analysis.chapters.ch12_performance import Benchmark, Phase, Workload
from analysis.chapters.plain_grpo import PlainTrainer
from analysis.experiments.environment import environment_of
from analysis.experiments.presets.language import llama_smoke
from analysis.report.generated_pages import GENERATORS, costs_page
from analysis.training.config import StartConfig, TrainConfig
from analysis.training.counting import forward_flops, generated_tokens, run_update
from analysis.training.pretrained.config import LoraConfig
from analysis.training.pretrained.weights import random_llama
from analysis.training.rollout import completion_inputs
from analysis.training.tiny.policy import PolicyConfig
from analysis.training.tiny.start import make_policy
from analysis.training.tiny.tasks import SortTask


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
    inputs = completion_inputs(torch.randint(10, (1, 2, 3, 4)), config.task.bos_token)
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


NONE = LoraConfig(rank=1, targets=("q_proj",))
SMALL = chapter.llama(2, 3, 1, 1, 1, 5).model_copy(update={"num_heads": 2})


def test_a_small_case_by_hand() -> None:
    """q 4x2, k and v 2x2, o 2x4, three of 3x2: 42 weights. One prompt of 3 tokens, two completions
    of 2: 7 rows, and 6 + 2 * (4 + 5) = 24 pairs. An adapter of rank 1 on q: 6 weights."""
    model, load = SMALL, Workload(1, 1, 2, 3, 2)
    assert (chapter.block_weights(model), chapter.adapter_weights(model, NONE)) == (42, 6)
    found = chapter.phases(model, load, NONE, "bfloat16")
    blocks, attention, logits = 2 * 42 * 7, 4 * 4 * 24, 2 * 10 * 4
    assert found["reference"] == Phase(blocks + attention, logits, 2 * 42 + 4 * 10, 2 * 4 * 5 * 4)
    assert found["training"][:2] == (2 * blocks + 3 * attention, 2 * logits + 3 * 2 * 6 * 7)
    seen = 2 * ((3 + 1) + (3 + 2))
    assert found["sampling"] == Phase(
        blocks + attention,
        logits + 2 * 6 * 7,
        3 * (2 * 42 + 4 * 10 + 4 * 6) + 2 * 2 * 2 * seen,
        3 * 4 * 5 * 4,
    )
    assert found["optimizer"] == Phase(0, 0, 7 * 4 * 6, 0)


def test_runs_share_the_frozen_weights_that_sampling_reads() -> None:
    one, many = (chapter.phases(SMALL, Workload(m, 1, 2, 3, 2), NONE)["sampling"] for m in (1, 10))
    assert many.product_flops == 10 * one.product_flops
    assert many.bytes - one.bytes == 9 * (3 * 4 * 6 + 2 * 2 * 2 * 18)


def test_a_phase_takes_the_longer_of_its_arithmetic_and_its_traffic() -> None:
    gpu = chapter.H100._replace(
        bfloat16_flops=100.0,
        float32_flops=10.0,
        bandwidth=10.0,
        flops_share=0.5,
        bandwidth_share=0.5,
    )
    assert Phase(100, 10, 5, 0).seconds(gpu, "bfloat16") == pytest.approx(4.0)
    assert Phase(100, 10, 5, 0).seconds(gpu, "float32") == pytest.approx(22.0)
    assert Phase(100, 10, 50, 0).seconds(gpu, "bfloat16") == pytest.approx(10.0)
    assert Phase(100, 10, 50, 5).seconds(gpu, "bfloat16") == pytest.approx(11.0)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("SmolLM2-135M", 134.5),
        ("SmolLM2-360M", 361.8),
        ("SmolLM2-1.7B", 1711.4),
        ("Qwen2.5-0.5B", 494.0),
        ("Qwen2.5-1.5B", 1543.7),
        ("Qwen2.5-7B", 7615.5),
    ],
)
def test_the_shapes_have_as_many_weights_as_the_published_models(
    name: str, millions: float
) -> None:
    """Qwen2.5 counts its biases too, a few hundred thousand."""
    assert chapter.parameters(chapter.MODELS[name]) / 1e6 == pytest.approx(millions, abs=0.2)


def test_weights_are_those_of_the_model_and_of_the_adapters_that_are_trained() -> None:
    model = random_llama(llama_smoke().config.model.llama, 0, torch.float32, "cpu")
    held = [*model.layers, model.norm, model.embedding, model.head]
    count = 0
    for part in held:
        tensors = [part] if isinstance(part, torch.Tensor) else _tensors(part)
        count += sum(tensor.numel() for tensor in tensors)
    assert chapter.parameters(model.config) == count
    setting = environment_of(llama_smoke().config)
    assert (
        chapter.adapter_weights(model.config, llama_smoke().config.lora) == setting.start.shape[1]
    )


def _tensors(layer: object) -> list[torch.Tensor]:
    found = []
    for value in layer:
        found += list(value.values()) if isinstance(value, dict) else [value]
    return found


def test_a_llama_of_the_tiny_policy_s_shape_counts_as_the_tiny_policy() -> None:
    """A gated MLP has three matrices for two: at two thirds of the inner width it costs as much."""
    config = TrainConfig(
        task=SortTask(num_digits=8),
        policy=PolicyConfig(width=48, num_layers=2, num_heads=4),
        num_prompts=3,
        group_size=5,
    )
    width, task = config.policy.width, config.task
    same = chapter.llama(width, 2 * config.policy.mlp_factor * width // 3, 2, 4, 4, 16, tied=False)
    load = Workload(1, 3, 5, task.prompt_length, task.completion_length)
    reference = chapter.phases(same, load, NONE)["reference"]
    assert reference.product_flops + reference.exact_flops == forward_flops(config)


def test_measured_updates_take_longer_than_their_count_at_full_rate() -> None:
    """Where the count can be checked: the recorded CPU benchmark of the tiny policy."""
    least = chapter.floors(chapter.load())
    shares = 1.0 / least["ratio"]
    assert ((shares > 0.05) & (shares < 1.0)).all()


def test_larger_models_are_slower_and_float32_more_so() -> None:
    for load in (chapter.ABLATION, chapter.REASONING):
        costs = chapter.model_costs(load, LoraConfig()).sort_values("parameters")
        assert costs["teraflops"].is_monotonic_increasing
        assert (costs["per_hour"] > 2 * costs["per_hour_float32"]).all()
        assert costs["per_hour"].iloc[0] > 10 * costs["per_hour"].iloc[-1]


def test_the_page_shows_every_model_twice_and_says_that_it_is_derived() -> None:
    page = costs_page()
    assert "**derived**" in page and "Nothing on this page was measured on a GPU" in page
    assert all(page.count(f"| {name} |") == 2 for name in chapter.MODELS)
    assert "costs.md" in GENERATORS
