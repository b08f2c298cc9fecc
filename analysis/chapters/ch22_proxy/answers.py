"""What recorded runs say where the reward is the truth, and what their answers read like."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pandas as pd

from analysis.evidence.recorded import recorded
from analysis.records import nats, summaries

#: Key -> a recording in which the reward is the truth, and a term against none at one coefficient.
REWARD_IS_THE_TRUTH = {
    "drifting": ("equal_kl", "k2_loss", 0.3),
    "half_step": ("half_step", "k2_loss", 0.3),
    "language": ("smollm2_short", "exact_loss", 0.3),
}


def against_none() -> dict[str, dict[str, float]]:
    """What a KL term changes in accuracy where nothing can be gamed: ``mean``, ``low``, ``high``,
    seed by seed, for each of :data:`REWARD_IS_THE_TRUTH`."""
    return {
        key: summaries.paired(
            recorded(preset).finals, [(variant, "none", "accuracy")], beta=beta
        ).to_dict("records")[0]
        for key, (preset, variant, beta) in REWARD_IS_THE_TRUTH.items()
    }


#: KLs at which answers are shown, in nats a token.
LEVELS = (0.05, 0.3, 1.0)


def shown_readings(path: pd.DataFrame, levels: Iterable[float] = LEVELS) -> list[int]:
    """The updates of the readings that are shown: the reference, on the way up the first that has
    three quarters of each level, and the last."""
    found = [int(path["update"].iloc[0])]
    for level in levels:
        reached = path[path["reverse_kl"] >= 0.75 * level]["update"]
        found += [int(reached.iloc[0])] if len(reached) else []
    return list(dict.fromkeys([*found, int(path["update"].iloc[-1])]))


def beside_the_reference(tables: nats.Nats, questions: Iterable[int]) -> pd.DataFrame:
    """A row per question and reading: ``question``, ``kl``, ``letters`` per word, ``answer``."""
    path = tables.path.set_index("update")
    every = list(dict.fromkeys(tables.answers["question"]))
    answers = tables.answers.set_index(["update", "question"])["answer"]
    return pd.DataFrame(
        {
            "question": every[place],
            "kl": path.loc[update, "reverse_kl"],
            "letters": path.loc[update, "letters"],
            "answer": answers[update, every[place]],
        }
        for place in questions
        for update in shown_readings(tables.path)
    )


def as_lines(table: pd.DataFrame) -> str:
    """A table of :func:`beside_the_reference` in Markdown; each question stands once."""
    again = table["question"].duplicated()
    rows = (
        ("" if written else row["question"], f"{row['kl']:.2f}", cell(row["answer"]))
        for written, row in zip(again, table.to_dict("records"), strict=True)
    )
    return lines_of(("question", "nats a token", "answer"), rows)


def lines_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = (heads, ["---"] * len(heads), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(text: str) -> str:
    """What a model said as a cell of a Markdown table that shows it as it is."""
    return re.sub(r"([\\|*_$<`\[{])", r"\\\1", text)
