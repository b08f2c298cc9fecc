"""Every preset on the CPU and on the far device: what differs, and what is waited for.

Run as a program, it prints one JSON object a preset.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from analysis.experiments.environment import environment_of
from analysis.experiments.preset import Preset
from analysis.experiments.presets import make_preset
from analysis.experiments.presets.language import llama_smoke
from analysis.training.environment import Environment
from analysis.training.graphs import RECORDERS, WARM_UP
from analysis.training.pretrained.config import ForwardConfig
from analysis.training.pretrained.tasks import TextTask, pretrained_environment
from analysis.training.pretrained.weights import random_llama
from analysis.training.trainer import PopulationTrainer
from benchmarks.agreement import differences, presets, shortened
from tests.training import far_device
from tests.training.far_graphs import FarRecorder

#: As it is, recorded (the cosine an update later: it is not measured at the first), and replayed.
UPDATES = WARM_UP + 3
LENGTH = {"updates": UPDATES, "window": 1, "digits": 8}


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
        config, random_llama(config.model.llama, 0, config.dtype, device), task
    )


class Watch:
    """How many operations the far device is given, and which of them read from it."""

    def __init__(self) -> None:
        self.operations = 0
        self.waits: Counter[str] = Counter()

    def __call__(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.operations += 1
        if far_device.reads(operation, args, kwargs):
            self.waits[str(operation)] += 1


def compared(
    name: str, preset: Preset, near: Environment, far: Environment, device: Any
) -> dict[str, Any]:
    on_cpu = PopulationTrainer(preset.config, preset.runs, near)
    start = on_cpu.weights.detach().clone()
    on_cpu.run()
    with device:
        there = PopulationTrainer(preset.config, preset.runs, far, graphs=True)
        watches = [watched(there.advance) for _ in range(UPDATES)]
        there.restore(there.state())
        found = differences(start, on_cpu, there)
    direct, replayed = watches[WARM_UP - 1], watches[-1]
    return {
        "preset": name,
        "device": there.weights.device.type,
        "runs": len(preset.runs),
        "steps": preset.config.num_minibatches * preset.config.num_iterations,
        **found,
        "operations": direct.operations,
        "replayed": replayed.operations,
        "waits": [dict(watch.waits) for watch in (direct, replayed)],
    }


def watched(advance: Callable[[], None]) -> Watch:
    watch = Watch()
    far_device.WATCHERS.append(watch)
    advance()
    far_device.WATCHERS.remove(watch)
    return watch


def main() -> None:
    torch.set_num_threads(1)
    device = far_device.install()
    RECORDERS[far_device.NAME] = FarRecorder
    chosen = {name: shortened(preset, **LENGTH) for name, preset in presets().items()}
    chosen["more seeds"] = shortened(make_preset("quick", {}), seeds=3, **LENGTH)
    for name, preset in chosen.items():
        near = environment_of(preset.config, "cpu")
        with device:
            far = environment_of(preset.config, far_device.NAME)
        print(json.dumps(compared(name, preset, near, far, device)), flush=True)
    preset, near = shortened(llama_smoke(), **LENGTH), questions("cpu")
    with device:
        far = questions(far_device.NAME)
    print(json.dumps(compared("questions", preset, near, far, device)), flush=True)


if __name__ == "__main__":
    main()
