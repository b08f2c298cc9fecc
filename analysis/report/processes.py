"""Child processes that never outlive their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from analysis.errors import Stopped

if TYPE_CHECKING:
    import psutil

# Reductions in another order give other last digits: one thread makes runs repeatable.
THREADS = 1
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def pinned_environment(**extra: str) -> dict[str, str]:
    """This process's environment with the numerical libraries pinned to `THREADS` threads."""
    return os.environ | dict.fromkeys(_THREAD_VARIABLES, str(THREADS)) | extra


def available_cores() -> int:
    """The cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stop_tree(pid: int) -> None:
    """Kill process ``pid`` and all its descendants, whatever sessions they moved to."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        with contextlib.suppress(psutil.Error):
            root.suspend()  # a stopped parent starts no further children
        _kill([*root.children(recursive=True), root])


def stop_descendants() -> None:
    """Kill everything this process has started."""
    import psutil

    _kill(psutil.Process().children(recursive=True))


def _kill(family: list[psutil.Process]) -> None:
    import psutil

    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=1)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn the signals that ask for an end into `Stopped`, so that ``finally`` blocks run."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)  # one request is enough; let cleaning finish
        raise Stopped(signum)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
