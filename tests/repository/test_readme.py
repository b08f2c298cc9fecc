"""The README keeps its promises: its code runs, its names import."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_on_a_batch_with_padding():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    generator = torch.Generator().manual_seed(0)
    logp, ref_logp, old_logp = -2 * torch.rand(3, 4, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1], [0]])
    names = {
        "logp": logp.requires_grad_(),
        "ref_logp": ref_logp,
        "old_logp": old_logp,
        "mask": mask,
    }
    exec(example, names)
    assert names["loss"].shape == (4, 5)
    assert (names["loss"][~mask] == 0).all()
    names["loss"].sum().backward()
    assert (logp.grad[mask] != 0).all()


def test_every_name_of_the_table_imports():
    rows = re.findall(r"^\| [^|]+ \| (`kl_term\.[^|]+) \|$", README, re.MULTILINE)
    assert len(rows) == 7
    for row in rows:
        first, *others = re.findall(r"`([\w.]+)`", row)
        module, _, name = first.rpartition(".")
        for function in (name, *others):
            assert callable(getattr(importlib.import_module(module), function)), function


def test_every_link_into_the_repository_resolves():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


@pytest.mark.parametrize("package", ["kl_term", "kl_term.kl", "kl_term.objectives"])
def test_the_public_names_import_from_their_package(package):
    names = importlib.import_module(package).__all__
    space: dict = {}
    exec(f"from {package} import {', '.join(names)}", space)
    assert all(callable(space[name]) for name in names if name != "__version__")
    with pytest.raises(ImportError):
        exec(f"from {package} import nothing", {})
