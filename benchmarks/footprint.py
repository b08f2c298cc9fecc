"""``python -m benchmarks.footprint PRESET [RUNS]``: what an update takes, without a GPU.

An update of adapters on fake tensors, which have a shape and no numbers: what is alive at once, and
how many operations make something. It says 2.3 GB for a run of ``smollm2``, of which an H100 had 24
in 49; it knows nothing of the space between a GPU's blocks.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from analysis.records.language import LanguageConfig, LlamaConfig, RandomModel
from analysis.records.preset import Preset
from analysis.studies.presets import make_preset
from analysis.training.environment import Scores, Task
from analysis.training.pretrained.folders import folder_of, read_config
from analysis.training.pretrained.tasks import TextTask, pretrained_environment
from analysis.training.pretrained.weights import empty_llama
from analysis.training.trainer import PopulationTrainer

#: Tokens of a solved line of two terms of a digit; a question has three a term, less one.
SHOT, TERM = 8, 3
#: Beginnings of the names of what launches nothing, beside views.
NO_KERNEL = ("prim.", "aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.sym_")


class Footprint(NamedTuple):
    """Of an update, all metrics included."""

    gigabytes: float  #: alive at once, without the frozen weights
    operations: int


class Unread:
    """A task whose answers have no numbers to be scored by.

    Args:
        task: says all but what an answer is worth.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.bos_token, self.draws_per_prompt = task.bos_token, task.draws_per_prompt
        self.completion_length = task.completion_length
        self.prompts, self.completion_mask = task.prompts, task.completion_mask

    def score(self, prompts: Tensor, completions: Tensor, starts: Tensor | None = None) -> Scores:
        """Zeros."""
        zeros = torch.zeros(completions.shape[:-1], device=completions.device)
        return Scores(zeros, zeros)


class Live(TorchDispatchMode):
    """Counts operations, and the bytes of what they made that is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = self.operations = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            return 0  # as False: no run has failed
        made = operation(*args, **(kwargs or {}))
        silent = operation.is_view or str(operation).startswith(NO_KERNEL)
        self.operations += not silent
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.bytes += storage.nbytes()
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.bytes -= size


def update_of(preset: Preset, llama: LlamaConfig) -> Footprint:
    """The first update of all runs of a preset at once, on a model of this size."""
    config: LanguageConfig = preset.config
    begin, own = SHOT * config.task.shots, TERM * config.task.terms - 2
    task = TextTask(
        [[*[1] * begin, *[token] * own, 1] for token in (2, 3)],
        lambda place, tokens: 0.0,
        end_tokens=[0],
        completion_length=config.task.completion_length,
    )
    live = Live()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = empty_llama(llama)
        environment = pretrained_environment(config, model, task)._replace(task=Unread(task))
        with live:
            trainer = PopulationTrainer(config, preset.runs, environment)
            live.operations = 0
            trainer.advance()
    return Footprint(live.most / 1e9, live.operations)


def main() -> None:
    name, runs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    torch.set_num_threads(1)
    preset = make_preset(name, {"num_seeds": runs})
    source = preset.config.model
    llama = source.llama if isinstance(source, RandomModel) else read_config(folder_of(source))
    for variant in preset.variants:
        found = update_of(preset.model_copy(update={"variants": (variant,)}), llama)
        print(f"{variant.name} {variant.beta:g}: {found.gigabytes:.2f} GB, {found.operations}")


if __name__ == "__main__":
    main()
