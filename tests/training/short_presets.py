"""Every preset at a size that tests can afford, and a task of texts, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from analysis.records.language import ForwardConfig
from analysis.records.preset import Preset
from analysis.records.variants import PREFIX_RATIO, Truncation, Variant
from analysis.studies.presets import make_preset
from analysis.studies.presets.language import llama_smoke
from analysis.training.environment import Environment
from analysis.training.environment_of import environment_of
from analysis.training.precision import dtype_of
from analysis.training.pretrained.tasks import TextTask, pretrained_environment
from analysis.training.pretrained.weights import random_llama
from benchmarks.agreement import presets, shortened

#: One to record (the cosine an update later: it is not measured at the first), one to replay all.
UPDATES = 3
SHORT = {"updates": UPDATES, "window": 1, "digits": 8}

#: What a preset trains on, on a device.
Make = Callable[[str], Environment]


def short_presets() -> Iterator[tuple[str, Preset, Make]]:
    """Name, preset and environment: all presets, one with more seeds, one of a language model with
    a supervised start and a reward model, and ``questions``, one of whose terms is truncated."""
    chosen = {name: shortened(preset, **SHORT) for name, preset in presets().items()}
    chosen["more seeds"] = shortened(make_preset("quick", {}), seeds=3, **SHORT)
    learned = {"start": {"examples": 40}, "reward_model": {"labels": 40, "count": 2}}
    proxied = make_preset("llama_smoke", {"num_seeds": 2, **learned})
    chosen["reward head"] = shortened(proxied, seeds=2, **SHORT)
    for name, preset in chosen.items():
        yield name, preset, lambda device, config=preset.config: environment_of(config, device)
    smoke = shortened(llama_smoke(), **SHORT)
    bounded = Variant(kl=PREFIX_RATIO, beta=0.1, truncation=Truncation(cap=4.0, window=2))
    yield "questions", smoke.model_copy(update={"variants": (*smoke.variants, bounded)}), questions


def questions(device: str) -> Environment:
    """A task of texts that begin alike, on a random Llama with fused attention."""
    config = llama_smoke().config.model_copy(
        update={"precision": "float64", "forward": ForwardConfig(attention="sdpa")}
    )
    task = TextTask(
        [[5, 6, 7, 9], [5, 6, 8, 3, 9], [5, 6, 4, 9]],
        lambda place, tokens: float(list(tokens[:1]) == [place]),
        end_tokens=[0, 1],
        completion_length=3,
    )
    assert task.shared == 2
    return pretrained_environment(
        config, random_llama(config.model.llama, 0, dtype_of(config), device), task
    )
