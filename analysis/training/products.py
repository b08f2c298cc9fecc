"""Which library multiplies float32 matrices on the CPU.

PyTorch calls MKL for float32 products, and MKL runs at half the rate of oneDNN on processors that
are not Intel's. PyTorch's switch to oneDNN is named after a precision ("medium") that also allows
bfloat16 where the hardware multiplies it fast. So the switch is tried once: it is used only where
products keep the error of float32, and only where PyTorch takes oneDNN whatever the number of
members, so that a member's numbers do not depend on who is trained beside it.
"""

from __future__ import annotations

import contextlib
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
        smallest: multiplications of one member in the smallest of its batched products.
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
    members, rows, inner, columns = probe
    left = torch.randn(members, rows, inner, generator=generator)
    right = torch.randn(members, inner, columns, generator=generator)
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
