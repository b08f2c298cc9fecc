"""Keeping freed memory in the process.

An update allocates and frees tensors of some megabytes by the hundred. By default glibc hands such
blocks back to the kernel and asks for them again: every tensor then begins with page faults, which
double the time of a forward pass on the CPU.
"""

from __future__ import annotations

import ctypes
from functools import cache

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
