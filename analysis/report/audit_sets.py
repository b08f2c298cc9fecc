"""The sets of losses that the audit is measured on: where each is recorded, and what it is."""

from __future__ import annotations

from typing import NamedTuple


class LossSet(NamedTuple):
    """Losses that were audited together."""

    name: str  #: as ``python -m tests.audit.scoring --set`` takes it
    sections: tuple[str, ...]  #: of ``tests/audit/index.yaml``
    folder: str  #: of ``results``
    title: str
    what: str  #: who wrote it and when, with places for how many losses are broken and right
    blind: bool = False  #: by somebody who had not seen the audit: each miss is shown


SEEN = LossSet(
    name="seen",
    sections=("broken", "right"),
    folder="audit_corpus",
    title="Seen",
    what="The rules were written while the other {broken} broken and {right} right losses were "
    "looked at, so that they say less:",
)
#: Losses that no rule of the audit was written by, in the order in which they were written.
HELD_OUT = (
    LossSet(
        name="held out",
        sections=("held_out_broken", "held_out_right"),
        folder="audit_held_out",
        title="Held out",
        what="{broken} broken and {right} right losses were written down, with what should be "
        "found, before the audit had seen any of them, and audited once.",
    ),
    LossSet(
        name="held out again",
        sections=("held_out_again_broken", "held_out_again_right"),
        folder="audit_held_out_again",
        title="Held out again",
        what="{broken} broken and {right} right ones more were written by the author of the later "
        "corrections, after the first set was measured and before those corrections, and audited "
        "once after them.",
    ),
    LossSet(
        name="held out third",
        sections=("held_out_third_broken", "held_out_third_right"),
        folder="audit_held_out_third",
        title="Held out a third time",
        what="Somebody who had not seen the audit wrote {broken} broken and {right} right losses "
        "more, after the corrections that the second set led to. What should be found was decided "
        "before they were audited, once.",
        blind=True,
    ),
    LossSet(
        name="held out fourth",
        sections=("held_out_fourth_broken", "held_out_fourth_right"),
        folder="audit_held_out_fourth",
        title="Held out a fourth time",
        what="Somebody who had not seen the audit wrote {broken} broken and {right} right losses "
        "more, after the third set was measured. Some take a dictionary, an object or lists, as "
        "trainers do. What should be found was decided before they were audited, once.",
        blind=True,
    ),
    LossSet(
        name="held out fifth",
        sections=("held_out_fifth_broken", "held_out_fifth_right"),
        folder="audit_held_out_fifth",
        title="Held out a fifth time",
        what="Somebody who had not seen the audit wrote {broken} broken and {right} right losses "
        "more, after the fourth set was measured. Most of the broken ones are after no report: "
        "they have faults that their author expects. What should be found was decided before they "
        "were audited, once; so was a second code that names some of the faults as well: `scale` "
        "for a loss or a price that is doubled, `policy-axis` for the advantage of another answer.",
        blind=True,
    ),
)
SETS = {each.name: each for each in (SEEN, *HELD_OUT)}
