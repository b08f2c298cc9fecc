from __future__ import annotations

import pytest
import torch

from kl_term.objectives.rejection import shortest_right


def test_the_shortest_of_the_right_is_chosen_and_the_first_of_equals():
    correct = torch.tensor(
        [[True, True, False], [True, True, True], [False, False, False], [False, True, True]]
    )
    lengths = torch.tensor([[5, 4, 2], [3, 3, 3], [1, 2, 3], [1, 9, 4]])
    assert shortest_right(correct, lengths).tolist() == [
        [False, True, False],  # not the shorter wrong one
        [True, False, False],
        [False, False, False],
        [False, False, True],
    ]


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [
        (torch.uint8, [10, 255]),
        (torch.int8, [10, 127]),
        (torch.float16, [2048, 2048]),
        (torch.bfloat16, [256, 256]),
    ],
)
def test_lengths_at_the_end_of_their_type(dtype, lengths):
    chosen = shortest_right(torch.tensor([False, True]), torch.tensor(lengths, dtype=dtype))
    assert chosen.tolist() == [False, True]
