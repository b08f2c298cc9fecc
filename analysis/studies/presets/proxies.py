"""Runs on a learned proxy of their reward: which KL terms keep the truth, and can one stop in time?

Three designs that differ in the number of labels alone, each committed before its first run; what
is predicted follows from chapter 22::

    analysis sweep proxy_1k --record results/proxy_1k_cpu
    analysis sweep proxy_5k --record results/proxy_5k_cpu
    analysis sweep proxy_20k --record results/proxy_20k_cpu
"""

from __future__ import annotations

from collections.abc import Mapping

from analysis.records.config import RewardModel, SortTask
from analysis.records.preset import KL_BUDGET, Design, Pilot, Preset
from analysis.records.variants import Variant
from analysis.studies.presets.designed import (
    AT_EQUAL_BETA,
    AT_EQUAL_KL,
    design,
    designed,
    with_terms,
)
from analysis.studies.presets.parts import CONFIG
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice

BETAS = (0.1, 0.2, 0.4, 1.0)
#: One seed a start: what a reward model of other labels would do is what varies.
NUM_SEEDS = 10
SAMPLED = ("k1_loss", "k2_loss", "k3_loss", "k1_reward", "k3_loss_attached_prefix")
#: Terms that descend the reverse KL, sampled.
REVERSE = "k2_loss k1_reward k3_loss_attached_prefix"


@preset
def proxy_1k() -> Preset:
    """Seven KL terms and none on a reward model of 1,000 labels."""
    return _on(1_000, _FEW, fresh_seeds(9400, NUM_SEEDS))


@preset
def proxy_5k() -> Preset:
    """The same on a reward model of 5,000 labels."""
    return _on(5_000, _SOME, proxy_1k().seeds)


@preset
def proxy_20k() -> Preset:
    """The same on a reward model of 20,000 labels."""
    return _on(20_000, _MANY, proxy_1k().seeds)


def _on(labels: int, written: Design, seeds: tuple[int, ...]) -> Preset:
    forward = (Variant(kl=KLChoice(estimator="forward"), beta=beta) for beta in BETAS)
    return designed(
        written,
        (*with_terms(BETAS, ("exact_loss", *SAMPLED)), *forward),
        seeds,
        updates=300,
        learning_rate=CONFIG.learning_rate / 5,
        task=SortTask(reward="graded"),
        start={"seed": 80},
        reward_model=RewardModel(labels=labels),
        final_answers=1000,
    )


_OUTCOME = (
    "Gold is the task's own reward, the share of right positions, which no run sees. It is read in "
    "three ways. (1) Of the final policy at its own exact reverse KL, both on 1,008 fresh answers: "
    + AT_EQUAL_KL.removeprefix(
        "Mean reward of the last tenth of a run at equal exact reverse KL of those updates, "
    ).replace("reward is", "gold is")
    + " (2) The highest of a run's logging windows, 720 answers each: the peak that somebody who "
    "saw gold would stop at. (3) Of the last window whose exact reverse KL is at most "
    f"{KL_BUDGET} nats a token: what stopping by a KL budget keeps, and without a KL term early "
    f"stopping. At equal coefficients: {AT_EQUAL_BETA}"
)
_EQUAL_KL = {
    f"{REVERSE} = exact_loss: final_gold": "each descends the reverse KL",
    "k3_loss forward_loss < exact_loss: final_gold": (
        "a rare exploit costs the forward KL next to nothing: its share is paid for by the log of "
        "what is left to the others, not by how rare it was"
    ),
}
_RESTRAINED = {
    f"{REVERSE} exact_loss < none: final_reverse_kl at 0.1 0.2 0.4 1": "it descends a KL",
    "k1_loss = none: final_gold at 0.1": "its expected gradient is zero",
}
_EXPLOITED = {
    "exact_loss > none: final_gold at 0.1 0.2 0.4 1": (
        "what the proxy rates highest beyond its labels is error, and a run without a term goes "
        "there"
    ),
    f"{REVERSE} > none: final_gold at 0.2 0.4 1": "the same by samples",
    "exact_loss > none: budget_gold at 0.4 1": (
        "so it was with another reward model, stopped at four times this budget"
    ),
    "none = exact_loss: peak_gold at 0.1 0.2": (
        "the peak lies near the start, where the proxy is right, and there a term holds little back"
    ),
}
_ON_TWO_STARTS = Pilot(
    tried=(
        "Starts 901 and 902, seeds 0 and 1: no KL term, and the exact KL at 0.03, 0.1, 0.3 and 1, "
        "on a reward model of 1,000 labels, 300 updates; and models of 5,000 labels alone."
    ),
    runs=10,
    seen=(
        "Correlation of proxy and gold over 500 fresh answers of a start: 0.07 and 0.17 with "
        "1,000 labels, 0.25 and 0.22 with 5,000; gold of the starts 0.91 and 0.92. At the end 0.32 "
        "and 0.34 without a term at 4.0 and 3.4 nats a token, while the proxy rose to 1.9 and 1.3; "
        "with the exact KL 0.36 and 0.30, 0.50 and 0.51, 0.85 and 0.87, 0.88 and 0.92 by "
        "coefficient, at 4.0, 2.1, 0.12 and 0.02 nats. 5.5 s of a core a run."
    ),
    chosen=(
        "The reward model as it was tried, and other starts. 0.2 and 0.4 in place of 0.03 and "
        "0.3: between 0.1 and 0.3 the KL falls by a factor of 17. Two starts differ by 0.01 to "
        "0.04: if differences have a standard deviation of the margin, 0.03, ten starts show one "
        "of that size with a power of 0.8."
    ),
)
_EARLIER = Pilot(
    tried=(
        "Another reward model, of 30,000 weights, outside of this package: one start, two or three "
        "seeds, graded reward, step size 4e-4, 300 to 400 updates, 1,000, 5,000 and 20,000 labels."
    ),
    runs=51,
    seen=(
        "Gold from 0.86 to 0.11 at 4.5 nats a token without a KL term and to 0.49, 0.79, 0.86 with "
        "the exact KL at 0.1, 0.3, 1 (1,000 labels); to 0.43, 0.72, 0.85, 0.88 (5,000); 0.90 or "
        "0.91 with any (20,000). k2 and k1 in the reward beside the exact KL, k3 as a loss 0.02 to "
        "0.06 below it at 0.1. Stopped at 0.39 nats a run without a term had 0.72, the exact KL "
        "0.76 at 0.35 nats."
    ),
    chosen="Step size, updates and the numbers of labels.",
)


def _with_labels(question: str, predictions: Mapping[str, str]) -> Design:
    return design(
        question=question,
        outcome=_OUTCOME,
        margin=0.03,
        equal="final_reverse_kl",
        predictions={**_EQUAL_KL, **_RESTRAINED, **predictions},
        pilots=(_EARLIER, _ON_TWO_STARTS),
    )


_FEW = _with_labels(
    "With a proxy that hardly knows the truth, which KL term keeps how much of it?", _EXPLOITED
)
_SOME = _with_labels(
    "With a proxy that knows some of the truth, which KL term keeps how much of it?",
    _EXPLOITED,
)
_MANY = _with_labels(
    "With a proxy of many labels, does a KL term still keep anything?",
    {
        "exact_loss > none: final_gold at 0.1 0.2 0.4 1": (
            "few answers teach what the start never says"
        )
    },
)
