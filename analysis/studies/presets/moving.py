"""A reference that moves, and a coefficient that does: beside what they should amount to.

What is predicted follows from chapter 24. Under the reverse KL, K periods at a coefficient, with
the reference reset between them, are one run at a K-th of it, whether or not a period arrives: so
many natural steps are a tilt that is linear in both as long as a step is small. Under the forward
KL they end elsewhere. All designs were committed before their first run::

    analysis sweep resets --record results/resets_cpu
    analysis sweep polyak --record results/polyak_cpu
    analysis sweep adaptive_beta --record results/adaptive_beta_cpu
"""

from __future__ import annotations

from typing import Any

from analysis.records.preset import AT_END, Pilot, Preset
from analysis.records.variants import Controller, MovingReference, Variant
from analysis.studies.presets.designed import (
    AT_END_OF_TRAINING,
    AT_EQUAL_BETA,
    AT_EQUAL_KL,
    NUM_SEEDS,
    STOPPING,
    beside,
    design,
    designed,
)
from analysis.studies.presets.parts import CENTRED
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice

#: Coefficient of every run whose reference moves.
STRONG = 2.0
PERIODS = 4
PERIOD = 30
_TEN_MORE = (
    "Ten seeds, one a start, were trained and read before ten more were ordered: for the three "
    "designs of moving references and controllers alike, whatever they had shown, and with their "
    f"predictions as they were. {STOPPING}"
)
#: Nothing is divided by the spread of rewards, or beta would mean another thing as it shrinks.
SHARED: dict[str, Any] = {
    "updates": PERIODS * PERIOD,
    "learning_rate": 5e-4,
    "log_every": 5,
    "final_answers": 1000,
}
#: Has the gradient of the reverse KL of whole answers.
REVERSE = KLChoice(estimator="k3", weighting="attached", ratio="prefix")
#: Of each visited state; that of whole answers has no loss of fresh samples.
FORWARD = KLChoice(estimator="forward")


def of(label: str, kl: KLChoice, beta: float, **reference: Any) -> Variant:
    """A KL term at a coefficient, its reference fixed unless it is said how it moves."""
    moves = MovingReference(**reference) if reference else None
    return Variant(label=label, kl=kl, beta=beta, advantage=CENTRED, reference=moves)


@preset
def resets() -> Preset:
    """Four periods, a reset between them, beside one run at their coefficient and at a quarter."""
    variants = (
        Variant(label="none", advantage=CENTRED),
        of("reverse_strong", REVERSE, STRONG),
        of("reverse_weak", REVERSE, STRONG / PERIODS),
        of("reverse_resets", REVERSE, STRONG, every=PERIOD),
        of("reverse_often", REVERSE, STRONG, every=5),
        of("forward_strong", FORWARD, STRONG),
        of("forward_weak", FORWARD, STRONG / PERIODS),
        of("forward_resets", FORWARD, STRONG, every=PERIOD),
    )
    return designed(_RESETS, variants, fresh_seeds(9500, NUM_SEEDS), **SHARED)


_OUTCOME = (
    "Reward and exact reverse KL from the first reference, of the final policy's own answers, a "
    "thousand fresh ones a run. k3 is what a log shows: from the reference that the run has, over "
    f"its own samples. {AT_END_OF_TRAINING}"
)
_PILOT = Pilot(
    tried=(
        "Starts 901 to 903, one seed each: no term; the reverse KL at 2 and at 0.5, at 2 with a "
        "reset every 60 and every 5 updates and half an average every 60; the forward KL at 2, at "
        "0.5, and at 2 with a reset every 60. 240 updates."
    ),
    runs=27,
    seen=(
        "Final reward 0.67 without a term, 0.56 and 0.63 at 2 and 0.5 under the reverse KL, 0.61 "
        "with three resets, 0.66 with many, 0.60 with halves; 0.57, 0.62 and 0.61 under the "
        "forward KL. Reverse KL in the same order 0.032, 0.0054, 0.0133, 0.0141, 0.029, 0.0096; "
        "0.0036, 0.0111, 0.0137. At 2 the KL is level from the 20th update on. 4.4 s of a core a "
        "run. Rewards spread by 0.15 to 0.17 from start to start."
    ),
    chosen=(
        "Half the updates, and periods of 30: at the coefficient of the periods a run has arrived "
        "by then. One seed on each of ten starts: log KLs differ by 0.2 from run to run, so ten "
        "differences bound their mean to within 0.15, and the margin is 0.22."
    ),
)
_RESETS = design(
    question="Are K periods at beta, the reference reset between them, one run at beta over K?",
    outcome=_OUTCOME,
    margin=0.03,
    at=AT_END,
    predictions={
        "reverse_resets = reverse_weak: final_reward": "resets are one run at beta over K",
        "reverse_resets = reverse_weak: final_reverse_kl": "and it ends at the same place",
        "reverse_resets > reverse_strong: final_reverse_kl": "each period adds its tilt",
        "reverse_resets < reverse_weak: k3": "a log reads from the last reset alone",
        "reverse_often > reverse_resets: final_reverse_kl": "a short period leaves little of beta",
        "reverse_often = none: final_reward": "and a very short one leaves nothing",
        "forward_resets > forward_strong: final_reverse_kl": "each period adds to the one before",
        "forward_resets > forward_weak: final_reverse_kl": (
            "a chain under the forward KL is no single run; of two answers, the better one with "
            "half of the reference, four runs lead further than one at a quarter"
        ),
    },
    stopping=_TEN_MORE,
    pilots=(_PILOT,),
)


@preset
def polyak() -> Preset:
    """A reference that is averaged with the policy, in steps or always, beside ``resets``."""
    variants = (
        of("reverse_half", REVERSE, STRONG, every=PERIOD, weight=0.5),
        of("reverse_between", REVERSE, STRONG / (1 + 0.5 * (PERIODS - 1))),
        of("reverse_ema", REVERSE, STRONG, every=1, weight=1 / PERIOD),
    )
    return beside(resets(), _POLYAK, variants)


_POLYAK = design(
    question="Is a reference that is averaged with the policy one run at beta over 1 + alpha K?",
    outcome=_OUTCOME,
    margin=0.03,
    at=AT_END,
    predictions={
        "reverse_half = reverse_between: final_reward": (
            "near the reference a mean of weights is a geometric mean: one run at 2 over 2.5"
        ),
        "reverse_half = reverse_between: final_reverse_kl": "and it ends at the same place",
        "reverse_half > reverse_strong: final_reverse_kl": "each average adds half a tilt",
        "reverse_half < reverse_resets: final_reverse_kl": "and a reset adds a whole one",
        "reverse_ema = reverse_resets: final_reward": (
            "a reference that follows at one over the period is as fast as resets"
        ),
        "reverse_ema > reverse_strong: final_reverse_kl": "it only slows the policy",
        "reverse_ema < reverse_strong: k3": "while its log reads the lead, which is shorter",
    },
    stopping=_TEN_MORE,
    pilots=(_PILOT,),
)


#: Where a coefficient begins -> the KL that its controller is to hold, nats a token: at the other
#: end of the scale from the KL that the coefficient has if it stays.
TARGETS = {2.0: 0.02, 0.6: 0.01, 0.2: 0.005}
K1, K2 = KLChoice(estimator="k1"), KLChoice(estimator="k2")


@preset
def adaptive_beta() -> Preset:
    """Controllers of the coefficient, beside fixed ones at equal KL."""

    def led(label: str, kl: KLChoice, beta: float, **rule: Any) -> Variant:
        controller = Controller(target=TARGETS[beta], **rule)
        return Variant(label=label, kl=kl, beta=beta, advantage=CENTRED, controller=controller)

    fixed = (of("fixed", K2, beta) for beta in TARGETS)
    slow = {"horizon": 5.0}
    read = (
        led(f"reads_{name}", K2, beta, reads=name, **slow)
        for name in ("k1", "k3")
        for beta in TARGETS
    )
    others = (
        led("doubling", K2, 0.6, rule="doubling", reads="k3"),
        led("descends_nothing", K1, 0.6, reads="k1", **slow),
    )
    seeds = fresh_seeds(9600, NUM_SEEDS)
    return designed(_ADAPTIVE, (*fixed, *read, *others), seeds, log_coefficient=True, **SHARED)


_ADAPTIVE = design(
    question="Does a controller hold its target, and does holding it cost or bring reward?",
    outcome=(
        "Reward and exact reverse KL of the final policy's own answers, a thousand fresh ones a "
        "run, one beside the other at equal KL, "
        + AT_EQUAL_KL.removeprefix(
            "Mean reward of the last tenth of a run at equal exact reverse KL of those updates, "
        )
        + f" At equal first coefficients: {AT_EQUAL_BETA}"
    ),
    margin=0.03,
    equal="final_reverse_kl",
    predictions={
        "reads_k1 reads_k3 = fixed: final_reward": "a coefficient is a way to a KL, and no more",
        "reads_k1 reads_k3 > fixed: final_reverse_kl at 2": (
            "the target, not where the coefficient began, says where it ends"
        ),
        "reads_k1 reads_k3 < fixed: final_reverse_kl at 0.2": "the same from the other side",
        "reads_k3 = reads_k1: final_reverse_kl at 0.2 0.6 2": (
            "near the reference both read one KL, whichever the loss descends"
        ),
        "doubling = reads_k3: final_reward at 0.6": "it swings around the same target",
        "descends_nothing > fixed: final_reverse_kl at 0.6": (
            "k1 as a loss has no gradient of its own, and a coefficient multiplies its noise"
        ),
        "descends_nothing > reads_k1: coefficient at 0.6": (
            "what is read does not answer, so the coefficient climbs at its limit"
        ),
    },
    stopping=_TEN_MORE,
    pilots=(
        Pilot(
            tried=(
                "This preset's configuration on starts 901 to 903, one seed each: all variants."
            ),
            runs=33,
            seen=(
                "Final reverse KL 0.0037, 0.0078 and 0.0163 at 2, 0.6 and 0.2; with a controller "
                "0.020, 0.012 and 0.007 from there reading k1, 0.019, 0.012 and 0.006 reading k3, "
                "for targets of 0.02, 0.01 and 0.005. Reward 0.57 to 0.60, rising with the KL. "
                "Doubling 0.011. k1 as a loss 0.48, reward 0.12, coefficient from 0.6 to 29. "
                "2.4 s of a core a run."
            ),
            chosen=(
                "The configuration as it was, on ten starts. A horizon of 5 is too short for a "
                "loop that does not swing, and long enough for one that settles: a longer one "
                "would not cross the scale in 120 updates."
            ),
        ),
    ),
)
