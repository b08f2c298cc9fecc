"""The shapes that cross function boundaries, by name.

An annotation says what a tensor holds and how its axes are called. Within one call an axis has one
size: ``...`` is the same leading shape wherever it stands, and nothing broadcasts unless a function
says so. :func:`kl_term.checks.checked` reads the annotations and refuses what contradicts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from torch import Tensor

Holds = Literal["floats", "numbers", "integers", "booleans", "mask", "zeros and ones"]


@dataclass(frozen=True)
class Axes:
    """What a tensor must be.

    Args:
        names: of the axes, such as ``"... V"``; ``...`` stands for any leading ones.
        holds: ``floats``; ``numbers``, real ones of any type; ``integers``; ``booleans``;
            a ``mask``, booleans or numbers that are all 0 or 1; or ``zeros and ones``, as floats.
    """

    names: str
    holds: Holds = "floats"


Logits: TypeAlias = Annotated[Tensor, Axes("... V")]
Values: TypeAlias = Annotated[Tensor, Axes("...")]
LogProbs: TypeAlias = Annotated[Tensor, Axes("...")]
Mask: TypeAlias = Annotated[Tensor, Axes("...", "mask")]
ZerosOnes: TypeAlias = Annotated[Tensor, Axes("...", "zeros and ones")]
Numbers: TypeAlias = Annotated[Tensor, Axes("...", "numbers")]
Tokens: TypeAlias = Annotated[Tensor, Axes("...", "integers")]
Rewards: TypeAlias = Annotated[Tensor, Axes("... G")]
Correct: TypeAlias = Annotated[Tensor, Axes("... G", "booleans")]
Lengths: TypeAlias = Annotated[Tensor, Axes("... G", "numbers")]
Kept: TypeAlias = Annotated[Tensor, Axes("... V", "mask")]
#: One row of logits a state, and what belongs to the tokens of enumerated sequences.
Table: TypeAlias = Annotated[Tensor, Axes("S V")]
PerToken: TypeAlias = Annotated[Tensor, Axes("N T")]
PerSequence: TypeAlias = Annotated[Tensor, Axes("N")]
#: Floats of any shape, which the function checks itself or broadcasts as it says.
AnyFloats: TypeAlias = Annotated[Tensor, Axes("*")]
