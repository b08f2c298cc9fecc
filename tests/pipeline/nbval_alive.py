"""A pytest plugin: nbval notices within a second that a kernel died, not at its limit.

A kernel that never answers is started once more, as the book's own runs do: two that start at once
can draw the same port.

Used as ``pytest --nbval -p tests.pipeline.nbval_alive``.
"""

from __future__ import annotations

import time
from queue import Empty
from typing import Any

import nbval.kernel
from nbval.kernel import RunningKernel

POLL_SECONDS = 1.0
_get_message = RunningKernel.get_message
_start_new_kernel = nbval.kernel.start_new_kernel


def start_new_kernel(*args: Any, **options: Any) -> Any:
    """Manager and client of a kernel that answers."""
    try:
        return _start_new_kernel(*args, **options)
    except RuntimeError:
        return _start_new_kernel(*args, **options)


def get_message(self: RunningKernel, stream: str, timeout: float | None = None) -> Any:
    """The next message; raises RuntimeError once there can be none."""
    deadline = float("inf") if timeout is None else time.monotonic() + float(timeout)
    while True:
        remaining = deadline - time.monotonic()
        try:
            return _get_message(self, stream, timeout=max(0.0, min(POLL_SECONDS, remaining)))
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died in this cell") from None
            if remaining <= POLL_SECONDS:
                raise


RunningKernel.get_message = get_message
nbval.kernel.start_new_kernel = start_new_kernel
