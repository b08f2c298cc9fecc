"""Child processes that never outlive their parent.

This file is also their program, started by its path, since the ``analysis`` that they import may be
another one than this: ``python -P children.py SCRATCH MODULE:FUNCTION ARGUMENT...``.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn


@contextlib.contextmanager
def child(
    program: str, *arguments: str, scratch: Path | None = None, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A process that ends, with all that it started, no later than the block and than we do.

    Args:
        program: what it runs, as ``module:function``, with ``arguments`` as its command line.
        scratch: a folder of its own, which it deletes if we end before it.
        options: of ``subprocess.Popen``.
    """
    command = [sys.executable, "-P", __file__, str(scratch or ""), program, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, **options
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                stop_tree(process.pid)


def stop_tree(pid: int, *, itself: bool = True) -> None:
    """Kill all descendants of process ``pid``, whatever sessions they moved to, and then it."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        if itself:
            with contextlib.suppress(psutil.Error):
                root.suspend()  # a stopped parent starts no further children
        family = [*root.children(recursive=True), *([root] if itself else [])]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=1)


def _end_with_parent(stream: int, scratch: str) -> NoReturn:
    """Wait until standard input closes, then take down what was started and ourselves."""
    os.read(stream, 1)
    stop_tree(os.getpid(), itself=False)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def _main() -> None:
    _, scratch, program, *arguments = sys.argv
    sys.argv[1:] = arguments
    stream = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with_parent, args=[stream, scratch], daemon=True).start()
    pkgutil.resolve_name(program)()


if __name__ == "__main__":
    _main()
