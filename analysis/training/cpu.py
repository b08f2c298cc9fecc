"""What makes PyTorch fast on a CPU: the library that multiplies, and freed memory that is kept.

**Products.** PyTorch calls MKL for float32 products, and MKL runs at half the rate of oneDNN on
processors that are not Intel's. PyTorch's switch to oneDNN is named after a precision ("medium")
that also allows bfloat16 where the hardware multiplies it fast. So the switch is tried once: it is
used only where products keep the error of float32, and only where PyTorch takes oneDNN whatever the
number of runs, so that a run's numbers do not depend on who is trained beside it.

**Memory.** An update allocates and frees tensors of some megabytes by the hundred. By default glibc
hands such blocks back to the kernel and asks for them again: every tensor then begins with page
faults, which double the time of a forward pass.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache

import torch

#: Of a product of [M, rows, inner] and [M, inner, columns]: kernels are chosen by size.
PROBES = (
    (2, 744, 64, 256),
    (2, 744, 256, 64),
    (2, 64, 744, 192),
    (96, 62, 16, 62),
    (96, 6, 62, 16),
)
#: Multiplications below which PyTorch does not call oneDNN.
SMALLEST = 16**3
#: Relative to the largest element; bfloat16 is at about 3e-3.
LARGEST_ERROR = 3e-6


@contextlib.contextmanager
def fast_products(device: torch.device, smallest: int) -> Iterator[None]:
    """Multiply with oneDNN inside the context, if ``device`` is a CPU and that is exact there.

    Args:
        smallest: multiplications of one run in the smallest of its batched products.
    """
    if device.type != "cpu" or smallest <= SMALLEST or not onednn_is_exact():
        yield
        return
    with _onednn():
        yield


@cache
def onednn_is_exact() -> bool:
    """Do oneDNN's products keep the error of float32 on this machine?"""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    with _onednn():
        return all(_error(probe, generator) <= LARGEST_ERROR for probe in PROBES)


def _error(probe: tuple[int, int, int, int], generator: torch.Generator) -> float:
    runs, rows, inner, columns = probe
    left = torch.randn(runs, rows, inner, generator=generator)
    right = torch.randn(runs, inner, columns, generator=generator)
    exact = torch.bmm(left.double(), right.double())
    return ((torch.bmm(left, right) - exact).abs().max() / exact.abs().max()).item()


@contextlib.contextmanager
def _onednn() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


#: Parameters of ``mallopt(3)``, from ``malloc.h``.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: The largest block that glibc accepts to take from its heap.
_LARGEST = 32 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Let freed blocks of up to 32 MiB serve the next tensors; True where the C library can."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
