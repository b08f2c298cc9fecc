"""Every preset on a device whose tensors have a shape, a type and a place, but no numbers.

PyTorch's fake tensors take a whole update, gradients included, through a device that is not the
CPU, and refuse an operation on both. :class:`Watch` sees every operation on the way: what waits for
the device, and what CUDA would refuse while it records a graph. It needs no GPU and no CUDA build,
and says nothing of CUDA's own kernels: their numbers are in ``results/agreement_cuda``.

PyTorch lets a process have one device of its own: install it in a process of its own. As a program
this prints one JSON object a preset, of all or of those named, or ``planted`` for ``PLANTED``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from analysis.records.preset import Preset
from analysis.training import graphs
from analysis.training.environment import Scores
from analysis.training.pretrained.tasks import TextTask
from analysis.training.trainer import PopulationTrainer
from tests.training.short_presets import UPDATES, Make, short_presets

NAME = "fake"
aten = torch.ops.aten
#: The program goes on when it knows a number, or how large a tensor is.
READS = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
}
#: With a mask among the indices, how much it chooses.
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
#: Beginnings of the names of what launches nothing, beside views.
NO_KERNEL = ("prim.", "aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.sym_")


class Mode(FakeTensorMode):
    """``torch.tensor`` makes its numbers on the CPU and copies them there, as for CUDA."""

    avoid_device_init = True


class Watch(TorchDispatchMode):
    """Counts operations on the device, and notes where it and the CPU meet."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.kernels: Counter[bool] = Counter()  #: apart those in recordings
        self.meetings: Counter[str] = Counter()  #: outside of recordings: reads and uploads
        self.refused: Counter[str] = Counter()  #: in recordings, with what caused them

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if operation in READS or _has_mask(operation, args):
            self._note("read", operation, given, given)
        if operation is aten._local_scalar_dense.default:
            return 0  # as False: no run has failed
        result = operation(*args, **kwargs)
        made = _tensors(result)
        if any(map(_near, made)):
            self._note("read", operation, given, made)
        elif any(map(_near, given)):
            self._note("upload", operation, given, made)
        launches = not operation.is_view and not str(operation).startswith(NO_KERNEL)
        self.kernels[self.recording] += launches and any(not _near(tensor) for tensor in made)
        return result

    def _note(self, what: str, operation: Any, given: list[Tensor], made: list[Tensor]) -> None:
        if all(map(_near, given + made)):
            return
        if self.recording:
            self.refused[f"{what} by {operation}, {_lines()}"] += 1
        else:
            self.meetings[what] += 1


class FakeRecorder:
    """Stands in for :class:`analysis.training.graphs.CudaRecorder`; a replay launches nothing."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def record(
        self, function: Callable[[], Any], *, passing: bool
    ) -> tuple[Any, Callable[[], None]]:
        self.watch.recording = True
        try:
            return function(), lambda: None
        except Exception as error:
            self.watch.refused[f"{error!r:.200}, {_lines(error)}"] += 1
            raise
        finally:
            self.watch.recording = False

    def address(self, tensor: Tensor) -> Hashable:
        return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _near(tensor: Tensor) -> bool:
    return tensor.device.type != NAME


def _has_mask(operation: Any, args: Any) -> bool:
    if operation not in INDEXING:
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _lines(error: Exception | None = None) -> str:
    """Where in the package: the innermost lines first."""
    stack = (
        traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    )
    ours = [
        f"{f.filename.split('/analysis/')[1]}:{f.lineno}"
        for f in stack
        if "/analysis/" in f.filename
    ]
    return " < ".join(ours[:-4:-1])


def _zeros(tensor: FakeTensor) -> Any:
    """``tensor.tolist()``: one copy, of numbers that nobody knows."""
    tensor.cpu()
    return np.zeros(tuple(tensor.shape), dtype=int).tolist()


def _unread(
    task: TextTask, prompts: Tensor, completions: Tensor, starts: Tensor | None = None
) -> Scores:
    """``TextTask.score`` looks its prompts up, and these have no numbers."""
    scores = torch.tensor(completions[..., 0].tolist(), device=completions.device)
    return Scores(scores, scores, finished=task._ends(completions).any(dim=-1))


def install(watch: Watch) -> Mode:
    """Register the device; enter what is returned, then ``watch``, to make tensors on it."""
    _setup_privateuseone_for_python_backend(NAME)
    FakeTensor.tolist = _zeros
    TextTask.score = _unread
    graphs.RECORDERS[NAME] = lambda: FakeRecorder(watch)
    graphs.WARM_UP = 0  # one to record, one to replay
    return Mode(allow_non_fake_inputs=True)


def trained(preset: Preset, make: Make, watch: Watch) -> dict[str, Any]:
    """What a few updates with graphs ask of the device; the last replays all of them."""
    trainer = PopulationTrainer(preset.config, preset.runs, make(NAME), graphs=True)
    watch.kernels.clear()
    for _ in range(UPDATES):
        watch.kernels[False] = 0
        watch.meetings.clear()
        trainer.advance()
    row = {
        "runs": len(preset.runs),
        "steps": preset.config.num_minibatches * preset.config.num_iterations,
        "device": trainer.weights.device.type,
        "recorded": watch.kernels[True],
        "launched": watch.kernels[False],
        "meetings": dict(watch.meetings),
    }
    trainer.restore(trainer.state())
    trainer.advance()
    return row | {"refused": list(watch.refused)}


NUMBER = torch.tensor(2.0)
#: What no graph can be recorded of; it ends with what one can.
PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "a number read": lambda x: x * x.sum().item(),
    "a list read": lambda x: x.tolist(),
    "a copy to the CPU": lambda x: x.cpu(),
    "a scalar of the host": lambda x: x - torch.as_tensor(0.0, dtype=x.dtype, device=x.device),
    "a list of the host": lambda x: x + torch.tensor([1.0, 2.0], device=x.device),
    "a tensor of the CPU": lambda x: x + NUMBER,
    "tensors on two devices": lambda x: x + NUMBER.expand(2),
    "indices on the CPU": lambda x: x[torch.tensor([0])],
    "a mask as index": lambda x: x[x > 1.0],
    "a mask assigned": lambda x: x.clone().index_put_((x > 1.0,), x[0]),
    "nonzero": lambda x: x.nonzero(),
    "none of these": lambda x: torch.where(x > 1.0, 2.0 * x, x.new_full((), 0.5)),
}


def planted(watch: Watch) -> dict[str, list[str]]:
    """What is refused of each."""
    found = {}
    for name, function in PLANTED.items():
        watch.refused.clear()
        given = torch.ones(2, device=NAME)
        with suppress(Exception):
            FakeRecorder(watch).record(partial(function, given), passing=False)
        found[name] = list(watch.refused)
    return found


def main() -> None:
    torch.set_num_threads(1)
    watch = Watch()
    mode = install(watch)
    chosen = sys.argv[1:]
    if "planted" in chosen:
        with mode, watch:
            print(json.dumps(planted(watch)))
    for name, preset, make in short_presets():
        if chosen and name not in chosen:
            continue
        watch.refused.clear()
        with mode, watch:
            row = trained(preset, make, watch)
        print(json.dumps({"preset": name} | row), flush=True)


if __name__ == "__main__":
    main()
