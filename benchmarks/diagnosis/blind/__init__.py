"""Sixty dumps of a small GRPO run, forty faulty and twenty sound but odd, to hold a diagnosis to.

They come from the help of ``kl-term diagnose``, from public threads and from what frameworks do.
They were made without the code that judges them, before any was measured, and not changed for it.
``python -m benchmarks.diagnosis.blind FOLDER`` writes the dumps and ``index.json``.
"""

from pathlib import Path

#: What is wrong with, or odd about, each dump, and what a user should be told.
WORDS = Path(__file__).with_name("words.toml")
