"""When copies of completions are a fault, and when a shared beginning is the prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from kl_term.diagnosis import groups
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.generate import Run, simulate
from kl_term.diagnosis.schema import Settings


def found(of, **numbers: float):
    return of(SimpleNamespace(numbers=numbers))


@pytest.mark.parametrize(
    ("share", "count", "shown"),
    [(0.01, 3, True), (0.02, 3, True), (0.0099, 3, False), (0.9, 2, False), (0.0, 0, False)],
)
def test_copies_are_told_from_a_hundredth_and_three_on(share, count, shown):
    numbers = {"copied_share": share, "copied_sequences": count}
    assert (found(groups.duplicates, **numbers) is not None) == shown


@pytest.mark.parametrize(
    ("share", "start", "copies", "prompt"),
    [
        (0.2, 0.0, True, False),
        (0.2, 2.9, True, False),
        (0.2, 3.0, False, True),
        (0.49, 9.0, False, True),
        (0.5, 9.0, True, False),  # whole copies begin alike too
        (0.0, 9.0, False, True),
    ],
)
def test_completions_that_begin_alike_hold_the_prompt(share, start, copies, prompt):
    numbers = {"copied_share": share, "copied_sequences": 40, "shared_start": start}
    assert (found(groups.duplicates, **numbers) is not None) == copies
    assert (found(groups.counted_prompt, **numbers) is not None) == prompt


@pytest.mark.parametrize(
    ("copied", "moved", "case"),
    [(0.5, 0.5, "copies"), (0.5, 0.51, "updates"), (0.49, 1.0, "copies"), (1.0, 1.0, "updates")],
)
def test_copies_that_were_scored_once_and_have_moved_are_of_several_updates(copied, moved, case):
    numbers = {"copied_share": copied, "copied_sequences": 40, "copies_moved": moved}
    shown = found(groups.duplicates, **numbers)
    assert (shown.case, shown.severity) == (case, "warning" if case == "updates" else None)


@pytest.mark.parametrize(("moved", "share"), [(0.0, 0.0), (1e-6, 0.0), (1e-3, 1.0)])
def test_how_many_copies_have_moved_is_measured(moved, share):
    frame = simulate(Run(sequences=40), 3)[["sequence", "logp", "old_logp", "ref_logp"]]
    later = frame.assign(sequence=frame.sequence + 40, logp=frame.logp - moved)
    numbers = groups.measure_groups(assemble(pd.concat([frame, later]), "x"), Settings())
    assert numbers["copied_share"] == 1.0 and numbers["copies_moved"] == share
