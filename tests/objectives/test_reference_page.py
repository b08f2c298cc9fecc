"""The reference page: its example runs, and it names every option and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kl_term.objectives import advantages
from kl_term.objectives.aggregation import MODES
from kl_term.objectives.losses import KINDS

PAGE = Path(__file__).parents[2] / "book" / "objectives.md"


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_example_runs(text):
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(2 * 3, 5, generator=generator)
    names = {
        "rewards": torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
        "logp": logp.requires_grad_(),
        "old_logp": logp.detach(),
        "mask": torch.ones(2 * 3, 5, dtype=torch.bool),
    }
    exec(example, names)
    assert torch.equal(
        names["logp"].grad < 0, names["advantages"].flatten()[:, None].expand(6, 5) > 0
    )


def test_every_recipe_is_made_of_existing_options(text):
    rows = re.findall(r"^\|(.+)\|(.+)\|(.+)\|(.+)\|$", text, flags=re.MULTILINE)[2:]
    assert len(rows) >= 8
    for _, advantage, kind, aggregation in rows:
        assert set(re.findall(r"`(\w+)`", advantage)) <= set(advantages.__all__)
        assert re.findall(r"`(\w+)`", kind)[0] in KINDS
        assert re.findall(r"`(\w+)`", aggregation)[0] in MODES


def test_every_option_has_a_labelled_equation(text):
    labels = re.findall(r"^:label: (\S+)$", text, flags=re.MULTILINE)
    assert {*KINDS, *MODES, *advantages.__all__} <= set(labels)
