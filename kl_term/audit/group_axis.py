"""Whether a loss that is told the size of a group compares an answer with its own group."""

from __future__ import annotations

from kl_term.audit.batches import Batch, random_batch
from kl_term.audit.readings import Reading


def across_groups(reading: Reading) -> bool:
    """One group has no gradient of the rewards, and each of two has: of the other's.

    Whether a group's answers stand side by side or a prompt apart, those of the only prompt are
    compared with each other.
    """
    foreign = reading.foreign
    sized = "group_size" in foreign.reads or bool(foreign.group_paths) or foreign.multiple > 1
    if not sized or not foreign.reads & {"rewards", "token_rewards"}:
        return False
    size = max(2, foreign.multiple)
    try:
        alone = _moves(reading, _batch(reading, size))
        foreign.groups = 2
        return not alone and _moves(reading, _batch(reading, 2 * size))
    except Exception:
        return False
    finally:
        foreign.groups = 1


def _batch(reading: Reading, rows: int) -> Batch:
    return random_batch(
        rows=rows,
        width=4,
        vocab_size=5,
        distance=0.2,
        staleness=0.06,
        ragged=reading.ragged,
        seed=61,
    )


def _moves(reading: Reading, batch: Batch) -> bool:
    return bool((reading.policy(batch).gradient.abs() > 1e-9).any())
