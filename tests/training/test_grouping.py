"""Runs grouped by what they compute, and put back in their order."""

from __future__ import annotations

import itertools

import pytest
import torch

from analysis.training.population import Groups

CPU = torch.device("cpu")


def test_one_group_is_a_slice_and_copies_nothing():
    groups = Groups(["a"] * 4, CPU)
    values = torch.arange(8.0).view(4, 2)
    ((key, rows, size),) = groups
    assert (key, size, len(groups)) == ("a", 4, 1) and isinstance(rows, slice)
    assert groups.join([values]) is values
    assert values[rows].data_ptr() == values.data_ptr()


def test_groups_come_in_the_order_of_their_first_runs():
    groups = Groups(["b", "a", "b", None, "a"], CPU)
    found = [(key, rows.tolist(), size) for key, rows, size in groups]
    assert found == [("b", [0, 2], 2), ("a", [1, 4], 2), (None, [3], 1)]


@pytest.mark.parametrize("keys", list(itertools.product("abc", repeat=4)))
def test_what_is_joined_is_in_the_order_of_the_runs(keys):
    groups = Groups(keys, CPU)
    values = torch.arange(12.0).view(4, 3)
    assert torch.equal(groups.join([values[group.rows] for group in groups]), values)
    factors = {"a": 1.0, "b": 10.0, "c": 100.0}
    expected = values * torch.tensor([factors[key] for key in keys]).unsqueeze(1)
    assert torch.equal(groups.map(lambda key, rows: factors[key] * values[rows]), expected)


def test_gradients_find_their_runs():
    values = torch.ones(3, requires_grad=True)
    groups = Groups(["b", "a", "b"], CPU)
    groups.map(lambda key, rows: {"a": 2.0, "b": 5.0}[key] * values[rows]).sum().backward()
    assert values.grad.tolist() == [5.0, 2.0, 5.0]
