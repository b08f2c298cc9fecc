"""The control variate of the prefix loss: the bias of its own batch, and what was recorded."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from analysis.evidence.policies import Policies
from analysis.evidence.prefix_controls import same_batch_bias
from kl_term.kl.sequences import Sequences

#: Variant -> what tables call it.
NAMES = {
    f"{name}{age}": f"{said}{old}"
    for age, old in (("", ""), ("_stale", ", stale"))
    for name, said in {
        "none": "no KL term",
        "k1": "weight 0",
        "k3": "weight 1",
        "fitted": "fitted weight",
        "exact": "exact KL",
    }.items()
}
#: Columns of the table of recorded noise: what they are called, and how they are written.
NOISE = {
    "tokens_of_answer": ("tokens", ""),
    "update": ("update", ""),
    "lag": ("updates old", ""),
    "reverse_kl": ("KL per token", ".2f"),
    "k3": ("weight 1", ".2f"),
    "best": ("best weight", ".2f"),
    "tokens": ("fitted on log-probs", ".2f"),
    "tokens_weight": ("that weight", ".2f"),
    "gradients": ("fitted on gradients", ".2f"),
    "exact": ("exact KL", ".2f"),
}


def own_batch(policies: Policies, sequences: Sequences, answers: Iterable[int]) -> pd.DataFrame:
    """Medians over pairs, by the number of answers, fresh samples: see
    :func:`~analysis.evidence.prefix_controls.same_batch_bias`."""
    rows = {}
    for number in answers:
        pairs = zip(policies.logits, policies.ref_logits, strict=True)
        found = [same_batch_bias(*pair, sequences, answers=number) for pair in pairs]
        table = pd.DataFrame([[each.item() for each in one] for one in found])
        rows[number] = table.median()
    return pd.DataFrame(rows, index=range(2)).T.set_axis(["bias", "bound"], axis=1)
