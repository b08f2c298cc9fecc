"""Policies far from their reference and far from symmetric: flipped signs cannot pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trees import draw


def random_logits(*shape: int, seed: int, scale: float = 1.5) -> torch.Tensor:
    return draw(*shape, seed=seed, scale=scale)


def softmax(logits: torch.Tensor) -> np.ndarray:
    """An independent softmax, in numpy."""
    raw = np.exp(logits.numpy() - logits.numpy().max(-1, keepdims=True))
    return raw / raw.sum(-1, keepdims=True)


@pytest.fixture
def logits() -> torch.Tensor:
    return random_logits(20, 6, seed=1)


@pytest.fixture
def ref_logits() -> torch.Tensor:
    return random_logits(20, 6, seed=2)


@pytest.fixture
def old_logits() -> torch.Tensor:
    return random_logits(20, 6, seed=3)


@pytest.fixture
def policy(logits) -> np.ndarray:
    return softmax(logits)


@pytest.fixture
def reference(ref_logits) -> np.ndarray:
    return softmax(ref_logits)


@pytest.fixture
def sampler(old_logits) -> np.ndarray:
    return softmax(old_logits)
