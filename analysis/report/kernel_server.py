"""A process that has imported what notebooks import, and forks their kernels, on Linux.

A kernel needs four seconds of a processor for torch, pandas, matplotlib and scipy alone. The
server imports them once; nothing of this project, which each kernel imports itself, watched by
`analysis.report.kernel`. This file is also two programs, started by its path:
``python -P kernel_server.py --serve SOCKET``, with a listening socket's number, and what Jupyter
starts as the kernel, ``python -P kernel_server.py ADDRESS LOG ROOT -f CONNECTION``. That one asks
the server at ADDRESS for a kernel and lives as long as it; if none answers, it becomes the kernel.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: What most notebooks import. None starts a thread, which would not survive a fork.
PRELOADED = (
    "ipykernel.kernelapp",
    "matplotlib.backends.backend_agg",
    "myst_nb",
    "pandas",
    "pydantic.main",
    "scipy.optimize",
    "scipy.stats",
    "seaborn",
    "torch._dynamo",  # of torch.func: a second of its own
    "tqdm.notebook",
    "yaml",
)
KERNEL = Path(__file__).with_name("kernel.py")
POLL_SECONDS = 0.05
#: What pandas has in a notebook; it asks while it is imported, and here there is none.
MAX_COLUMNS = 20


@contextlib.contextmanager
def kernel_server(environment: Mapping[str, str]) -> Iterator[str | None]:
    """Serve kernels while the block runs: the server's address, or None where it cannot be.

    Args:
        environment: of the server, whose ``PYTHONPATH`` and hash seed its kernels share.
    """
    if sys.platform != "linux":  # elsewhere a fork behind system libraries may crash
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        address = f"{folder}/server"
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(address)
            except OSError:  # such as a path that is too long for a socket
                yield None
                return
            listening.listen()
            server = subprocess.Popen(
                [sys.executable, "-P", __file__, "--serve", str(listening.fileno())],
                stdin=subprocess.PIPE,
                env=environment,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
        try:
            yield address
        finally:
            server.communicate()  # closes its standard input


def asking(address: str) -> list[str]:
    """The program that is a kernel of the server, before the arguments of a kernel."""
    return [__file__, address]


def _serve(listening: socket.socket) -> None:
    """Fork a kernel for each that asks, until standard input closes."""
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as ipykernel
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "pandas" in sys.modules:
        sys.modules["pandas"].set_option("display.max_columns", MAX_COLUMNS)
    stop_tree = runpy.run_path(str(KERNEL.with_name("children.py")))["stop_tree"]
    gc.freeze()
    kernels: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listening, *kernels.values()], [], [], POLL_SECONDS)
        if 0 in ready:
            break
        for pid, asker in list(kernels.items()):
            if asker in ready and _has_ended(asker):
                stop_tree(pid)
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            kernels.pop(pid).close()
        if listening in ready:
            asker, _ = listening.accept()
            pid = os.fork()
            if pid == 0:
                for other in (listening, *kernels.values()):
                    other.close()
                return _become_kernel(asker)
            kernels[pid] = asker
    for pid in kernels:
        stop_tree(pid)


def _has_ended(asker: socket.socket) -> bool:
    """Whether the other side is closed; what it said may be read by its kernel at any moment."""
    try:
        return not asker.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _become_kernel(asker: socket.socket) -> None:
    """Take over the asker's streams, folder, environment and arguments, and run the kernel."""
    os.setsid()
    with asker:
        size, streams, _, _ = socket.recv_fds(asker, 8, 3)
        with asker.makefile("rb") as text:
            said = json.loads(text.read(int.from_bytes(size)))
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(said["environment"])
        os.chdir(said["folder"])
        asker.sendall(b"+")
    _run_kernel(said["arguments"])


def _run_kernel(arguments: Sequence[str]) -> None:
    sys.argv = [str(KERNEL), *arguments]
    runpy.run_path(str(KERNEL), run_name="__main__")


def _ask(address: str, arguments: Sequence[str]) -> None:
    """Live as long as the kernel that the server forks; without a server, be the kernel."""
    said = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(said).encode()
    with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
        server.connect(address)
        socket.send_fds(server, [len(text).to_bytes(8)], [0, 1, 2])
        server.sendall(text)
        if server.recv(1):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            server.recv(1)
            sys.exit()
    _run_kernel(arguments)


def _main() -> None:
    _, first, *rest = sys.argv
    if first == "--serve":
        _serve(socket.socket(fileno=int(rest[0])))
    else:
        _ask(first, rest)


if __name__ == "__main__":
    _main()
