"""What this machine does at best: float32 products and copies, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from analysis.training.products import fast_products

#: [batch, rows, inner, columns] of the products tried; the best counts.
PRODUCTS = ((1, 512, 512, 512), (1, 1024, 1024, 1024), (8, 744, 64, 256))
COPIED_BYTES = 128 * 2**20


class Rates(NamedTuple):
    """Of one process."""

    flops_per_second: float
    bytes_per_second: float  #: read and written


def measure_rates(seconds: float = 0.05) -> Rates:
    """The best of some products, with either library, and copies larger than any cache.

    Each is repeated for ``seconds`` and counts with its mean, so that a machine shared with others
    is measured as it is.
    """
    products = []
    for batch, rows, inner, columns in PRODUCTS:
        left, right = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
        out = torch.bmm(left, right)
        work = 2 * out.numel() * inner
        product = partial(torch.bmm, left, right, out=out)
        products.append(work / _mean_seconds(product, seconds))
        with fast_products(torch.device("cpu"), work):
            products.append(work / _mean_seconds(product, seconds))
    source = torch.ones(COPIED_BYTES // 4)
    copy = partial(torch.empty_like(source).copy_, source)
    return Rates(max(products), 2 * COPIED_BYTES / _mean_seconds(copy, seconds))


def _mean_seconds(call: Callable[[], object], at_least: float) -> float:
    """A call, as a mean over so many that they take a while; one more before warms up."""
    call()
    started, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < at_least:
        call()
        calls += 1
    return passed / calls
