"""Every preset on the CPU and on the far device: what differs, and what is waited for.

Run as a program, it prints one JSON object a preset.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from analysis.experiments.environment import environment_of
from analysis.experiments.preset import Preset
from analysis.experiments.presets import PRESETS, make_preset
from analysis.experiments.presets.language import llama_smoke
from analysis.training.environment import Environment
from analysis.training.graphs import RECORDERS, WARM_UP
from analysis.training.pretrained.config import ForwardConfig
from analysis.training.pretrained.tasks import TextTask, pretrained_environment
from analysis.training.pretrained.weights import random_llama
from analysis.training.trainer import PopulationTrainer, RunRecord
from tests.training import far_device
from tests.training.far_graphs import FarRecorder

#: As it is, recorded (the cosine an update later: it is not measured at the first), and replayed.
UPDATES = WARM_UP + 3
NEEDS_WEIGHTS = ("smollm2", "smollm2_short", "smollm2_front")


def shortened(preset: Preset, seeds: int = 1) -> Preset:
    """A few updates in double precision, with every metric, of rewards that a start may earn."""
    fields = preset.model_dump()
    config = fields["config"]
    config["task"]["reward"] = "graded"
    config |= {"precision": "float64", "updates": UPDATES, "log_every": 1, "cosine_every": 1}
    config |= {"num_prompts": 4, "num_minibatches": min(config["num_minibatches"], 2)}
    for start in (config.get("start"), (config.get("teacher") or {}).get("start")):
        if start:
            start["updates"] = 3
    return Preset.model_validate(fields | {"seeds": preset.seeds[:seeds]})


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
    expected = on_cpu.run()
    with device:
        there = PopulationTrainer(preset.config, preset.runs, far, graphs=True)
        watches = [watched(there.advance) for _ in range(UPDATES)]
        found = there.record()
        there.restore(there.state())
        weights = there.weights.detach().cpu()
    direct, replayed = watches[WARM_UP - 1], watches[-1]
    return {
        "preset": name,
        "device": there.weights.device.type,
        "runs": len(preset.runs),
        "steps": preset.config.num_minibatches * preset.config.num_iterations,
        "metrics": largest_difference(expected, found),
        "weights": (on_cpu.weights.detach() - weights).abs().max().item(),
        "moved": (weights - start).abs().max().item(),
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


def largest_difference(one: RunRecord, other: RunRecord) -> float:
    """Over all metrics; NaN must stand in the same places."""
    worst = 0.0
    for name, values in one.metrics.items():
        np.testing.assert_array_equal(np.isnan(values), np.isnan(other.metrics[name]), name)
        gap = np.abs(values - other.metrics[name])
        worst = max(worst, float(np.nanmax(gap, initial=0.0)))
    return worst


def main() -> None:
    torch.set_num_threads(1)
    device = far_device.install()
    RECORDERS[far_device.NAME] = FarRecorder
    presets = {n: shortened(make_preset(n, {})) for n in PRESETS if n not in NEEDS_WEIGHTS}
    presets["more seeds"] = shortened(make_preset("quick", {}), seeds=3)
    for name, preset in presets.items():
        near = environment_of(preset.config, "cpu")
        with device:
            far = environment_of(preset.config, far_device.NAME)
        print(json.dumps(compared(name, preset, near, far, device)), flush=True)
    preset, near = shortened(llama_smoke()), questions("cpu")
    with device:
        far = questions(far_device.NAME)
    print(json.dumps(compared("questions", preset, near, far, device)), flush=True)


if __name__ == "__main__":
    main()
