"""Peak memory of a KL over the likeliest tokens against the full sum, at Qwen's vocabulary.

``python -m benchmarks.top_k`` measures and records; chapter 23 reads what is recorded.
"""

from __future__ import annotations

import pandas as pd

from analysis.chapters.ch23_top_k.sums import RECORDED, TABLE
from analysis.freshness import code_sha256, import_closure
from analysis.records.manifests import write_folder
from analysis.sweeps.provenance import provenance_here
from benchmarks.full_vocabulary import TOKENS, TOP_K, VOCABULARIES, WIDTH, measure

#: Each with logits stored and in blocks.
METHODS = ("naive", "chunked", "top_k_naive", "top_k_chunked")


def record(repeats: int = 1) -> None:
    """Measure every method at the largest vocabulary, and write the table."""
    rows = [measure(method, VOCABULARIES[-1], TOKENS, WIDTH, repeats) for method in METHODS]
    source = code_sha256(import_closure(["benchmarks/top_k.py"]))
    fields = provenance_here(source, threads=1).model_dump()
    fields |= {"preset": "top k memory", "seeds": [0], "repeats": repeats}
    write_folder(RECORDED, {TABLE: pd.DataFrame(rows).assign(top_k=TOP_K)}, fields)


if __name__ == "__main__":
    record()
