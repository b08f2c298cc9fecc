"""What all tests share: strict numerics are each test's own business, so it stays nearly empty."""

from __future__ import annotations

import os

# Before torch is imported anywhere: one thread, as in the runs.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
