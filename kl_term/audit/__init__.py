"""What any loss of RL on a language model minimises, exactly, and what is wrong with it.

A foreign function is called on enumerated states, answers and batches, and compared with every KL
term and aggregation of the package. Nothing is sampled where a sum is possible.
"""

from __future__ import annotations

from kl_term.lazy import lookup

#: The public names and their modules; loaded when asked for.
_HOMES = {
    "Audit": "report",
    "Finding": "findings",
    "assert_minimises": "assertions",
    "assert_term": "assertions",
    "audit": "auditing",
}
__all__ = list(_HOMES)
__getattr__ = lookup(__name__, _HOMES)
