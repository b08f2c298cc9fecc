"""Derived costs by hand, against published sizes, the tiny policy's count and its times."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters.ch12_model_costs import (
    ABLATION,
    H100,
    MODELS,
    REASONING,
    Phase,
    Workload,
    adapter_weights,
    block_weights,
    llama,
    parameters,
    phases,
    table,
)
from analysis.chapters.ch12_performance import floors
from analysis.chapters.ch12_performance import load as recorded
from analysis.experiments.environment import environment_of
from analysis.experiments.presets.language import llama_smoke
from analysis.report.generated_pages import GENERATORS, costs_page
from analysis.training.config import TrainConfig
from analysis.training.counting import forward_flops
from analysis.training.pretrained.config import LoraConfig
from analysis.training.pretrained.weights import random_llama
from analysis.training.tiny.policy import PolicyConfig
from analysis.training.tiny.tasks import SortTask

NONE = LoraConfig(rank=1, targets=("q_proj",))
SMALL = llama(2, 3, 1, 1, 1, 5).model_copy(update={"num_heads": 2})


def test_a_small_case_by_hand() -> None:
    """q 4x2, k and v 2x2, o 2x4, three of 3x2: 42 weights. One prompt of 3 tokens, two completions
    of 2: 7 rows, and 6 + 2 * (4 + 5) = 24 pairs. An adapter of rank 1 on q: 6 weights."""
    model, load = SMALL, Workload(1, 1, 2, 3, 2)
    assert (block_weights(model), adapter_weights(model, NONE)) == (42, 6)
    found = phases(model, load, NONE, "bfloat16")
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
    one, many = (phases(SMALL, Workload(m, 1, 2, 3, 2), NONE)["sampling"] for m in (1, 10))
    assert many.product_flops == 10 * one.product_flops
    assert many.bytes - one.bytes == 9 * (3 * 4 * 6 + 2 * 2 * 2 * 18)


def test_a_phase_takes_the_longer_of_its_arithmetic_and_its_traffic() -> None:
    gpu = H100._replace(
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
    assert parameters(MODELS[name]) / 1e6 == pytest.approx(millions, abs=0.2)


def test_weights_are_those_of_the_model_and_of_the_adapters_that_are_trained() -> None:
    model = random_llama(llama_smoke().config.model.llama, 0, torch.float32, "cpu")
    held = [*model.layers, model.norm, model.embedding, model.head]
    count = 0
    for part in held:
        tensors = [part] if isinstance(part, torch.Tensor) else _tensors(part)
        count += sum(tensor.numel() for tensor in tensors)
    assert parameters(model.config) == count
    setting = environment_of(llama_smoke().config)
    assert adapter_weights(model.config, llama_smoke().config.lora) == setting.start.shape[1]


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
    same = llama(width, 2 * config.policy.mlp_factor * width // 3, 2, 4, 4, 16, tied=False)
    load = Workload(1, 3, 5, task.prompt_length, task.completion_length)
    reference = phases(same, load, NONE)["reference"]
    assert reference.product_flops + reference.exact_flops == forward_flops(config)


def test_measured_updates_take_longer_than_their_count_at_full_rate() -> None:
    """Where the count can be checked: the recorded CPU benchmark of the tiny policy."""
    least = floors(recorded())
    shares = 1.0 / least["ratio"]
    assert ((shares > 0.05) & (shares < 1.0)).all()


def test_larger_models_are_slower_and_float32_more_so() -> None:
    for load in (ABLATION, REASONING):
        costs = table(load).sort_values("parameters")
        assert costs["teraflops"].is_monotonic_increasing
        assert (costs["per_hour"] > 2 * costs["per_hour_float32"]).all()
        assert costs["per_hour"].iloc[0] > 10 * costs["per_hour"].iloc[-1]


def test_the_page_shows_every_model_twice_and_says_that_it_is_derived() -> None:
    page = costs_page()
    assert "**derived**" in page and "Nothing on this page was measured on a GPU" in page
    assert all(page.count(f"| {name} |") == 2 for name in MODELS)
    assert "costs.md" in GENERATORS
