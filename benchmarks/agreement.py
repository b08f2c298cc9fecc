"""Does another device compute what the CPU does? Presets, shortened, in double precision.

``python -m benchmarks.agreement DEVICE PRESET`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from analysis.records.language import LanguageConfig, RandomModel
from analysis.records.preset import Preset
from analysis.records.run_record import RunRecord
from analysis.studies.presets import PRESETS, make_preset
from analysis.training.environment_of import environment_of
from analysis.training.graphs import RECORDERS
from analysis.training.trainer import PopulationTrainer

#: Windows of two: updates that measure and updates that do not are both recorded and replayed.
UPDATES, WINDOW = 10, 2
#: More of them, and answers of twice as many fillers, take minutes of a CPU.
DIGITS = 16
#: Largest difference that is rounding. Adam divides small gradients by their own size and makes it
#: larger: 1e-7 on an H100, where a defect moves weights by whole steps of 1e-2.
TOLERANCE = 1e-6


def needs_weights(preset: Preset) -> bool:
    """Of a pretrained model, which may not be at hand."""
    config = preset.config
    return isinstance(config, LanguageConfig) and not isinstance(config.model, RandomModel)


def presets() -> dict[str, Preset]:
    """By name all that need no weights, as they are recorded."""
    made = {name: make_preset(name, {}) for name in PRESETS}
    return {name: preset for name, preset in made.items() if not needs_weights(preset)}


def shortened(
    preset: Preset,
    seeds: int = 1,
    *,
    updates: int = UPDATES,
    window: int = WINDOW,
    digits: int = DIGITS,
) -> Preset:
    """A few updates in double precision, with every metric, of rewards that a start may earn.

    A teacher learns longer than the start: if they were the same, distillation would have no
    gradient but rounding, which Adam turns into whole steps.
    """
    fields = preset.model_dump()
    config = fields["config"]
    task = config["task"]
    task |= {"num_digits": min(task["num_digits"], digits), "reward": "graded"}
    task["max_fillers"] = min(task["max_fillers"], 2 * digits)
    config |= {"precision": "float64", "updates": updates}
    config |= {"log_every": window, "cosine_every": window}
    config |= {"num_prompts": 4, "num_minibatches": min(config["num_minibatches"], 2)}
    config["final_answers"] = min(config["final_answers"], 2 * 4 * config["group_size"])
    teacher = config.get("teacher") or {}
    for start, learned in ((config.get("start"), 3), (teacher.get("start"), 6)):
        if start:
            start["updates"] = learned
    few = {"labels": 40, "updates": 3}  # a head on a language model is fitted without updates
    model = config.get("reward_model") or {}
    model |= {name: count for name, count in few.items() if name in model}
    return Preset.model_validate(fields | {"seeds": preset.seeds[:seeds]})


def differences(
    start: torch.Tensor, near: PopulationTrainer, far: PopulationTrainer
) -> dict[str, float]:
    """Of two populations trained from ``start``: largest difference of metrics and of weights.

    ``moved`` is how far training has taken the weights.

    Raises:
        AssertionError: a metric is NaN in other places.
    """
    expected, found = near.weights.detach(), far.weights.detach().cpu()
    return {
        "metrics": largest_difference(near.record(), far.record()),
        "weights": (expected - found).abs().max().item(),
        "moved": (found - start).abs().max().item(),
    }


def largest_difference(one: RunRecord, other: RunRecord) -> float:
    """Over all metrics; NaN must stand in the same places."""
    worst = 0.0
    for name, values in one.metrics.items():
        np.testing.assert_array_equal(np.isnan(values), np.isnan(other.metrics[name]), name)
        gap = np.abs(values - other.metrics[name])
        worst = max(worst, float(np.nanmax(gap, initial=0.0)))
    return worst


def compared(preset: Preset, device: str) -> dict[str, dict[str, float]]:
    """:func:`differences` from the CPU of a preset trained there ``directly`` and by ``graphs``."""
    near = PopulationTrainer(preset.config, preset.runs, environment_of(preset.config, "cpu"))
    start = near.weights.detach().clone()
    near.run()
    ways = {"directly": False, "graphs": True}
    if torch.device(device).type not in RECORDERS:
        del ways["graphs"]
    found = {}
    for way, graphs in ways.items():
        setting = environment_of(preset.config, device)
        far = PopulationTrainer(preset.config, preset.runs, setting, graphs=graphs)
        far.run()
        found[way] = differences(start, near, far)
    return found


def main() -> None:
    device, name = sys.argv[1:]
    torch.set_num_threads(1)
    print(json.dumps(compared(shortened(make_preset(name, {})), device)))


if __name__ == "__main__":
    main()
