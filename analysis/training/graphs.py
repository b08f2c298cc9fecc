"""Thousands of launches as one: functions of tensors, recorded on a GPU and replayed there.

A small policy leaves a GPU waiting for the launches of its operations. A CUDA graph is a recording
of them that is launched as a whole. It repeats the same operations on the same memory, so whatever
changes from call to call must come in as a tensor, and nothing may be read back in between.

The first call runs as it is; the second is recorded. On the CPU, and unless graphs are asked for,
every call runs as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

LOG = logging.getLogger(__name__)

#: Calls before a function is recorded: libraries set themselves up in the first. There are no more,
#: for a call that runs as it is needs its memory beside that of the recordings.
WARM_UP = 1


class Launch(Protocol):
    """How the functions of an update are called."""

    def __call__(
        self, name: Hashable, function: Callable[..., Any], *inputs: Any, passing: bool = False
    ) -> Any:
        """``function(*inputs)``.

        Args:
            name: stands for the function and all it reads beside its inputs; those must not change.
            inputs: tensors, None, and nested tuples of them; other objects must be those that a
                function called here has returned.
            passing: the results are done with before anything else is called here.
        """


class Recorder(Protocol):
    """A device's way to record operations."""

    def record(
        self, function: Callable[[], Any], *, passing: bool
    ) -> tuple[Any, Callable[[], None]]:
        """The outputs of a function, whose memory stays, and what computes them anew.

        Those that are ``passing`` may share memory, so that one overwrites what another returned.
        """

    def address(self, tensor: Tensor) -> Hashable:
        """Where in the device's memory a tensor begins."""


class CudaRecorder:
    """CUDA graphs, each with memory of its own, or with that of all passing ones."""

    def __init__(self) -> None:
        self._shared = torch.cuda.graph_pool_handle()

    def record(
        self, function: Callable[[], Any], *, passing: bool
    ) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        stream, first = torch.cuda.current_stream(), None
        try:
            with torch.cuda.graph(graph, pool=self._shared if passing else None):
                try:
                    outputs = function()
                except Exception as error:
                    first = error
                    raise
        except Exception as error:  # ending a broken capture raises too, and leaves no stream
            torch.cuda.set_stream(stream)
            raise first or error from None
        return outputs, graph.replay

    def address(self, tensor: Tensor) -> Hashable:
        return tensor.data_ptr()


#: Type of device -> what records there.
RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": CudaRecorder}


def launcher(device: torch.device, *, graphs: bool, fixed: Iterable[Tensor] = ()) -> Launch:
    """Direct calls, or graphs.

    Args:
        fixed: tensors that stay where they are, with whatever values: not copied as inputs.

    Raises:
        ValueError: graphs are asked for on a device that has none.
    """
    if not graphs:
        return _direct
    if device.type not in RECORDERS:
        raise ValueError(f"graphs are for {', '.join(RECORDERS)}: on {device.type} leave them off")
    return Graphs(RECORDERS[device.type](), fixed)


def _direct(
    name: Hashable, function: Callable[..., Any], *inputs: Any, passing: bool = False
) -> Any:
    return function(*inputs)


class Graphs:
    """Records each function at its second call with inputs of the same shapes, then replays it.

    A replay writes into the outputs of the recording: results hold until the next call under the
    same name, and of passing ones until any other call. Clone what must live longer. A function
    that cannot be recorded, for want of memory or otherwise, is reported; from then on its calls
    run as they are.
    """

    def __init__(self, recorder: Recorder, fixed: Iterable[Tensor] = ()) -> None:
        self._recorder = recorder
        self._fixed = {_place(recorder, tensor) for tensor in fixed}
        self.refused: set[Hashable] = set()  #: what could not be recorded
        self._calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(
        self, name: Hashable, function: Callable[..., Any], *inputs: Any, passing: bool = False
    ) -> Any:
        key = (name, *map(_signature, leaves(inputs)))
        self._calls[key] += 1
        if key in self.refused or self._calls[key] <= WARM_UP:
            return function(*inputs)
        if key not in self._graphs:
            try:
                graph = _Graph(name, self._recorder, function, inputs, self._fixed, passing=passing)
            except Exception:
                LOG.exception("graph %r cannot be recorded: going on without it", name)
                self.refused.add(key)
                return function(*inputs)
            self._graphs[key] = graph
            outputs = [leaf for leaf in leaves(graph.outputs) if isinstance(leaf, Tensor)]
            self._fixed.update(_place(self._recorder, tensor) for tensor in outputs)
        return self._graphs[key](inputs)


class _Graph:
    """One recorded function.

    Inputs that stand in ``fixed`` places are read there; for the others, a part of such a place
    among them, it keeps tensors of its own, into which they are copied.
    """

    def __init__(
        self,
        name: Hashable,
        recorder: Recorder,
        function: Callable[..., Any],
        inputs: Any,
        fixed: set[Hashable],
        *,
        passing: bool,
    ) -> None:
        self._name, self._recorder = name, recorder
        self._moves = [
            isinstance(leaf, Tensor) and _place(recorder, leaf) not in fixed
            for leaf in leaves(inputs)
        ]
        moves = iter(self._moves)
        inputs = _mapped(lambda leaf: leaf.clone() if next(moves) else leaf, inputs)
        self._held = list(leaves(inputs))
        self.outputs, self._replay = recorder.record(lambda: function(*inputs), passing=passing)

    def __call__(self, inputs: Any) -> Any:
        for held, given, moves in zip(self._held, leaves(inputs), self._moves, strict=True):
            if moves:
                held.copy_(given)
            elif not self._same(held, given):
                raise RuntimeError(f"graph {self._name!r}: an input is not the one recorded")
        self._replay()
        return self.outputs

    def _same(self, held: Any, given: Any) -> bool:
        if not isinstance(held, Tensor):
            return held is given
        return _place(self._recorder, held) == _place(self._recorder, given)


def _place(recorder: Recorder, tensor: Tensor) -> Hashable:
    return recorder.address(tensor), tuple(tensor.shape), tensor.stride()


def leaves(tree: Any) -> Iterator[Any]:
    """What nested tuples hold, in order."""
    if isinstance(tree, tuple):
        for part in tree:
            yield from leaves(part)
    else:
        yield tree


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Nested tuples with a function applied to their leaves, in order."""
    if not isinstance(tree, tuple):
        return function(tree)
    parts = [_mapped(function, part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def _signature(leaf: Any) -> Hashable:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
