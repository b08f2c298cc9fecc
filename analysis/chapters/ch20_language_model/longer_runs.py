"""Two hundred updates: three seeds of eight variants on a GPU, and a design that asks again."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.evidence.names.kl_terms import NAMES
from analysis.evidence.recorded import recorded
from analysis.evidence.training_figures import KL_TERMS
from analysis.records import designs, statistics, summaries
from analysis.records.preset import Expected
from analysis.records.summaries import pairs_of
from kl_term import style

#: The design that asks of new seeds what k3 in the reward costs.
AGAIN = "smollm2_reward_long"
#: The recording on a GPU, and the two variants whose runs end low in it.
ON_GPU, LOW = "smollm2", ("k3_reward", "k2_reward")


def cost_on_gpu() -> dict[str, float]:
    """What k3 in the reward costs after 200 updates: a comparison chosen after the runs.

    Three seeds are fewer than an interval takes.

    Returns:
        ``mean``: its accuracy less that without a KL term, over seeds; ``least`` and ``most`` of
        one seed; ``best``: its best run's accuracy; ``worst_other``: the worst of the six variants
        not in :data:`LOW`; ``rank_p``: the chance that three runs drawn from these are the three
        lowest, as they are; ``detected``: the difference that three seeds of this spread show with
        a power of 0.8.
    """
    finals = recorded(ON_GPU).finals
    wide = finals.pivot(index="seed", columns="variant", values="accuracy")
    gap = (wide["k3_reward"] - wide["none"]).to_numpy()
    others = wide.drop(columns=list(LOW)).to_numpy().ravel()
    lowest = wide["k3_reward"].max() < others.min()
    return {
        "mean": gap.mean(),
        "least": gap.max(),
        "most": gap.min(),
        "best": wide["k3_reward"].max(),
        "worst_other": others.min(),
        "rank_p": 1.0 / math.comb(len(gap) + len(others), len(gap)) if lowest else math.nan,
        "detected": statistics.detectable(gap.std(ddof=1), len(gap)),
    }


def predicted_on_gpu() -> pd.DataFrame:
    """The four predictions of that recording, in their order: ``prediction``, ``found`` and
    ``outcome``. They are sentences, so how each is asked was chosen after the runs."""
    run = recorded(ON_GPU)
    asked = pairs_of("k1_loss/none k2_loss/exact_loss k3_loss/k2_loss", "reverse_kl")
    rows = summaries.paired(run.finals, asked).to_dict("records")
    wide = run.finals.pivot(index="seed", columns="variant", values="reverse_kl")
    found = [
        f"{row['mean']:+.2f} nats, seeds from {gap.min():+.2f} to {gap.max():+.2f}"
        for row in rows
        for gap in [wide[row["variant"]] - wide[row["other"]]]
    ]
    ways: tuple[Expected, ...] = ("equivalent", "equivalent", "above")
    margin = math.log(statistics.KL_RATIO_MARGIN)
    outcomes = [designs.outcome(row, how, margin) for row, how in zip(rows, ways, strict=True)]
    start = run.curves.query("update == 0").set_index(["variant", "seed"])["accuracy"]
    gained = run.finals.set_index(["variant", "seed"])["accuracy"] - start
    least = gained.groupby("variant").min()
    others = least.drop("k3_reward").min()
    found.append(
        f"least gain {least['k3_reward']:+.2f} with k₃ in the reward, {others:+.2f} without"
    )
    rises = "open" if others <= 0.0 else "refuted" if least["k3_reward"] > 0.0 else "holds"
    said = zip(run.preset.predictions, found, [*outcomes, rises], strict=True)
    return pd.DataFrame(said, columns=["prediction", "found", "outcome"])


def draw_on_gpu() -> Figure:
    """Accuracy at the end of the longest runs: a point a run, a row a variant."""
    finals = recorded(ON_GPU).finals
    variants = list(dict.fromkeys(finals["variant"]))
    figure, axes = style.subplots(height=1.0 + 0.3 * len(variants))
    for place, name in enumerate(variants):
        values = finals.loc[finals["variant"] == name, "accuracy"]
        look = style.line(*KL_TERMS[name]) | {"linestyle": "none", "label": ""}
        axes.plot(values, [place] * len(values), **look)
    style.guide(axes, x=cost_on_gpu()["worst_other"])
    axes.set_yticks(range(len(variants)), [NAMES[name] for name in variants])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy in the last tenth of 200 updates")
    return figure


def ends_again() -> dict[str, float]:
    """Accuracies of the design's final policies.

    Returns:
        Of ``none`` and of ``k3_reward`` the mean, and ``low`` and ``high`` over the runs; of
        ``k3_reward`` ``second``, the lowest but one; ``detected``: the difference that so many
        seeds of this spread show with a power of 0.8.
    """
    wide = recorded(AGAIN).finals.pivot(index="seed", columns="variant", values="final_accuracy")
    gap = wide["k3_reward"] - wide["none"]
    found = {name: wide[name].mean() for name in wide}
    found |= {f"{name}_{end}": wide[name].agg(of) for name in wide for end, of in _ENDS.items()}
    second = wide["k3_reward"].nsmallest(2).iloc[-1]
    detected = statistics.detectable(gap.std(ddof=1), len(gap))
    return found | {"k3_reward_second": second, "detected": detected}


_ENDS = {"low": "min", "high": "max"}


def by_last_tenth() -> dict[str, dict[str, Any]]:
    """k3 in the reward less no KL term by what both recordings have, the accuracy of the training
    answers in the last tenth: a reading chosen after the runs.

    Returns:
        ``new``: over the design's seeds, and ``all``: over those of both, the rows of
        :func:`analysis.records.summaries.paired`.
    """
    new, on_gpu = (recorded(name).finals for name in (AGAIN, ON_GPU))
    asked = [("k3_reward", "none", "accuracy")]
    of = {"new": new, "all": pd.concat([new, on_gpu], ignore_index=True)}
    return {name: summaries.paired(runs, asked).to_dict("records")[0] for name, runs in of.items()}


def draw_again() -> Figure:
    """Accuracy over training of new seeds: a thin line a run, a thick one the mean."""
    recording = recorded(AGAIN)
    figure, axes = style.subplots(height=3.6)
    for name in (variant.name for variant in recording.preset.variants):
        look = style.line(*KL_TERMS[name], label=NAMES[name])
        own = recording.curves[recording.curves["variant"] == name]
        wide = own.pivot(index="update", columns="seed", values="accuracy")
        axes.plot(wide.index, wide, color=look["color"], alpha=0.4, linewidth=0.9)
        axes.plot(wide.index, wide.mean(axis=1), **look, markevery=8)
    axes.set(xlabel="update", ylabel="accuracy")
    axes.legend()
    return figure
