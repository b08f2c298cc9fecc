"""A language model on a learned reward: what it keeps of the truth, and what its answers say.

The design of :mod:`analysis.studies.presets.language_proxy`; gold is the verifier's reward, which
no run sees.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.chapters.ch22_proxy import runs
from analysis.chapters.ch22_proxy.answers import cell, lines_of
from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.recorded import recorded
from analysis.evidence.training_figures import KL_TERMS
from analysis.records.proxy_answers import REFERENCE
from kl_term import style

PROXY = "smollm2_proxy"
#: The two coefficients.
WEAK, STRONG = 0.1, 0.4
#: The runs whose answers are shown, beside the reference's.
SHOWN = (("exact_loss", STRONG), ("k3_loss", STRONG), ("exact_loss", WEAK), ("none", 0.0))


def numbers() -> dict[str, float]:
    """What the prose says of the means over seeds.

    ``none`` and each term at the larger coefficient, by ``gold``, ``proxy`` and ``kl`` at the end;
    ``first_gold``, of the first window without a term; the lowest and the highest gold of a term at
    either coefficient, and the mean KL at the smaller.
    """
    gold, proxy, kl = (
        runs.ends(PROXY)[f"final_{name}"] for name in ("gold", "proxy", "reverse_kl")
    )
    found = {"first_gold": runs.without_term(PROXY)["gold"].iloc[0]}
    for name in ("none", *_terms()):
        at = (name, 0.0 if name == "none" else STRONG)
        found |= {f"{name}_gold": gold[at], f"{name}_proxy": proxy[at], f"{name}_kl": kl[at]}
    for called, beta in (("weak", WEAK), ("strong", STRONG)):
        at_beta = gold.xs(beta, level="beta")
        found |= {f"{called}_low": at_beta.min(), f"{called}_high": at_beta.max()}
    found["weak_kl"] = kl.xs(WEAK, level="beta").mean()
    return {key: float(value) for key, value in found.items()}


def _terms() -> list[str]:
    return [v.name for v in recorded(PROXY).preset.variants if v.beta == STRONG]


def draw() -> Figure:
    """Gold over training on the left; on the right gold and KL of each final policy."""
    recording = recorded(PROXY)
    looks = {name: style.line(*KL_TERMS[name], label=NAMES[name]) for name in ("none", *_terms())}
    figure, (left, right) = style.subplots(1, 2, height=4.2)
    for name, look in looks.items():
        curves, finals = (
            table[table["variant"] == name] for table in (recording.curves, recording.finals)
        )
        line = curves[curves["beta"].isin((0.0, STRONG))].groupby("update")["gold"].mean()
        left.plot(line.index, line, **look)
        points = look | {"linestyle": "none", "alpha": 0.8}
        right.plot(finals["final_reverse_kl"], finals["final_gold"], **points)
    left.set(title="over training", xlabel="update", ylabel="share of right answers")
    right.set(title="each run at its end", xlabel="exact KL (nats a token), log", xscale="log")
    start = runs.without_term(PROXY)["gold"].iloc[0]
    for axes in (left, right):
        axes.axhline(start, color=style.QUIET, linestyle=":")
        axes.set_ylim(0, 0.6)
    style.plain_numbers(right.xaxis)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="outside upper center")
    return figure


def said(answers: pd.DataFrame, questions: int) -> pd.DataFrame:
    """The answers of the reference and of :data:`SHOWN`, in the order of ``questions``.

    Of the questions that the reference answers rightly and the run without a term wrongly, the
    first so many; a row per answer: ``question``, ``called``, ``kl`` of the run's final policy,
    ``answer``, ``gold``, ``proxy``.
    """
    by_run = {place: rows.set_index("question") for place, rows in answers.groupby(_RUN)}
    start, lost = by_run[REFERENCE, 0.0], by_run["none", 0.0]
    differs = start.index[(start["gold"] == 1) & (lost["gold"].reindex(start.index) == 0)]
    called = {(REFERENCE, 0.0): "the start"} | {
        (name, beta): NAMES[name] + (f", β = {beta:g}" if beta else "") for name, beta in SHOWN
    }
    finals = recorded(PROXY).finals
    own = finals[finals["seed"] == answers["seed"].iloc[0]]
    kls = own.set_index(_RUN)["final_reverse_kl"].to_dict() | {(REFERENCE, 0.0): 0.0}
    rows = (
        {"question": question, "called": what, "kl": kls[place]}
        | dict(by_run[place].loc[question, _OF_ANSWER])
        for question in differs[:questions]
        for place, what in called.items()
    )
    return pd.DataFrame(rows)


_RUN, _OF_ANSWER = ["variant", "beta"], ["answer", "gold", "proxy"]


def as_lines(table: pd.DataFrame) -> str:
    """A table of :func:`said` in Markdown, a row per policy and a column per question.

    Each answer is whole, with its spaces and line ends, then whether it is right, and its proxy.
    """
    shown = table.assign(
        nats=table["kl"].map("{:.1f}".format),
        cell=table["answer"].str.replace("\n", "⏎").str.replace(" ", "␣").map(cell)
        + table["gold"].map({1: " ✓ ", 0: " ✗ "})
        + table["proxy"].map("{:.2f}".format),
    )
    wide = shown.pivot(index=["called", "nats"], columns="question", values="cell")
    ordered = wide.loc[shown["called"].unique(), shown["question"].unique()]
    heads = ("policy", "nats", *map(cell, ordered.columns))
    return lines_of(heads, ((*place, *cells) for place, *cells in ordered.itertuples()))
