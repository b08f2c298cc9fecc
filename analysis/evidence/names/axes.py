"""What tables call the choices along the axes of a KL term."""

from __future__ import annotations

#: How the options of a KL term are written in the tables of the page.
NAMES: dict[str, dict[str, str]] = {
    "estimator": {"k3_clip": "k3, clipped", "minimax01": "MiniMax-01"},
    "weighting": {"none": "–"},
    "ratio": {"none": "–"},
    "level": {"token": "each token", "sequence": "the sequence"},
    "credit": {"to_go": "to go"},
}
