"""A pytest plugin: nbval notices within a second that a kernel died, not at its limit.

Used as ``pytest --nbval -p tests.pipeline.nbval_alive``.
"""

from __future__ import annotations

import time
from queue import Empty
from typing import Any

from nbval.kernel import RunningKernel

POLL_SECONDS = 1.0
_get_message = RunningKernel.get_message


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
