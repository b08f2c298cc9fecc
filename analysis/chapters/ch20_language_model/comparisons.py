"""What the page compares at one coefficient, judged together, and what its prose says of it."""

from __future__ import annotations

import pandas as pd

from analysis.evidence.recorded import recorded
from analysis.evidence.training_figures import KL_TERMS
from analysis.records import designs, summaries, tidy
from analysis.records.summaries import pairs_of

BETA = 0.3
#: What is compared at one coefficient, in KL and in accuracy.
PAIRS = " ".join(f"{name}/none" for name in KL_TERMS if name != "none")
PAIRS += " k2_loss/exact_loss k3_loss/k2_loss k1_reward/exact_loss"
#: k3 under the attached ratio of the prefix, compared at that coefficient too.
PREFIX = "k3_loss_attached_prefix"
#: Part of the page, in keys of numbers -> in the table of all comparisons.
PARTS = {
    "one": "at one coefficient",
    "jumps": "fluctuation",
    "prefix": "with the prefix ratio",
}


def averaged_over_training() -> dict[str, float]:
    """k3 in the reward less no KL term in accuracy averaged over training, at one coefficient."""
    runs = designs.with_derived(recorded("smollm2_short"))
    return summaries.paired(runs, [("k3_reward", "none", "average")]).to_dict("records")[0]


def ends() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Last quarter of each run: at one coefficient, and at the others."""
    return _ends_of("smollm2_short"), _ends_of("smollm2_coefficients")


def _ends_of(preset: str) -> pd.DataFrame:
    return tidy.final(recorded(preset).curves, share=0.25)


def compared() -> pd.DataFrame:
    """Every comparison of the page, seed by seed, judged together: a page that asks many questions
    finds some differences by chance.

    Returns:
        Rows of :func:`analysis.records.summaries.judged`, with their ``part`` of the page,
        ``key`` within it, and ``spec``, a number format.
    """
    finals = ends()[0]
    jumping = ("gradient_norm", "reverse_kl")
    jumps = summaries.fluctuation(recorded("smollm2_short").curves, jumping)
    parts = {
        "one": summaries.paired(finals, pairs_of(PAIRS, "reverse_kl", "accuracy")),
        "jumps": summaries.paired(jumps, pairs_of("k3_loss/k2_loss", *jumping)),
        "prefix": summaries.paired(
            pd.concat([finals, _ends_of("smollm2_prefix_short")], ignore_index=True),
            pairs_of(f"{PREFIX}/k1_reward {PREFIX}/none", "reverse_kl", "accuracy"),
        ),
    }
    table = pd.concat([rows.assign(part=name) for name, rows in parts.items()], ignore_index=True)
    key = table["variant"] + "_" + table["other"] + "_" + table["metric"]
    return summaries.judged(table.assign(key=key, spec="+.2f"), len(table))


#: Verdict -> the part and key of the comparisons of which the prose states it.
SAYS = {
    "differs": {
        "one": ["k3_loss_none_reverse_kl", "k3_loss_none_accuracy"],
    },
    "equivalent": {
        "one": [
            "k1_loss_none_reverse_kl",
            "k2_loss_exact_loss_reverse_kl",
            "k1_reward_exact_loss_reverse_kl",
            "k2_reward_none_reverse_kl",
            "k3_reward_none_reverse_kl",
        ],
        "prefix": [f"{PREFIX}_k1_reward_reverse_kl", f"{PREFIX}_k1_reward_accuracy"],
    },
    "suggestive": {
        "one": ["k2_loss_none_reverse_kl", "k2_loss_none_accuracy"],
        "prefix": [f"{PREFIX}_none_reverse_kl"],
    },
    "unresolved": {
        "prefix": [f"{PREFIX}_none_accuracy"],
        "one": [
            "exact_loss_none_accuracy",
            "k1_reward_none_accuracy",
            "k3_reward_none_accuracy",
        ],
        "jumps": ["k3_loss_k2_loss_gradient_norm", "k3_loss_k2_loss_reverse_kl"],
    },
}


def check_verdicts(table: pd.DataFrame) -> None:
    """Refuse, by a ValueError, comparisons whose verdicts are not those that the prose states."""
    found = table.set_index(["part", "key"])["verdict"].to_dict()
    wrong = [
        f"{part}: {key}: the text says {word}, the runs {found.get((part, key), 'nothing')}"
        for word, parts in SAYS.items()
        for part, keys in parts.items()
        for key in keys
        if found.get((part, key)) != word
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
