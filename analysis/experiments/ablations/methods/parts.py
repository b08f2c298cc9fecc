"""What the arms of several chapters are made of."""

from __future__ import annotations

from typing import Any

from analysis.training.arms import Advantage, Arm

#: The group's mean taken off, over its standard deviation.
GROUP_STD = Advantage()
#: The group's mean taken off, and nothing divided.
CENTRED = Advantage(baseline="group_centre")


def plain(label: str, **parts: Any) -> Arm:
    """An arm without a KL term, made of these parts.

    >>> plain("centred", advantage=CENTRED).name
    'centred'
    """
    return Arm(label=label, **parts)
