"""Several learned rewards for one run: what their disagreement is good for.

Committed before its first run; other starts than :mod:`analysis.studies.presets.proxies`, and its
step size, updates and number of labels::

    analysis sweep proxy_ensemble --record results/proxy_ensemble_cpu
"""

from __future__ import annotations

from analysis.records.config import RewardModel, SortTask
from analysis.records.preset import AT_END, KL_BUDGET, SPREAD_BUDGET, Pilot, Preset
from analysis.records.variants import Ensemble, Variant
from analysis.studies.presets.designed import AT_EQUAL_BETA, AT_EQUAL_KL, design, designed
from analysis.studies.presets.parts import CONFIG
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice

EXACT = KLChoice(estimator="exact")
#: Reward models of each start.
MEMBERS = 4
KINDS: tuple[Ensemble, ...] = ("first", "mean", "worst", "penalised")
BETAS = (0.1, 0.2)
#: Of terms that act on some answers only.
STRONG = 1.0


@preset
def proxy_ensemble() -> Preset:
    """One of four reward models, their mean, least, or mean less spreads; with a KL or without."""
    alone = (Variant(label=f"none_{kind}", ensemble=kind) for kind in KINDS)
    held = (Variant(label=k, ensemble=k, kl=EXACT, beta=beta) for beta in BETAS for k in KINDS)
    some = (
        Variant(label=place, ensemble="mean", kl=EXACT, beta=STRONG, kl_on=place)
        for place in ("growing", "beyond")
    )
    return designed(
        _ENSEMBLE,
        (*alone, *held, *some),
        fresh_seeds(9900, 10),
        updates=300,
        learning_rate=CONFIG.learning_rate / 5,
        task=SortTask(reward="graded"),
        start={"seed": 90},
        reward_model=RewardModel(labels=5_000, members=MEMBERS),
        final_answers=1000,
    )


_ENSEMBLE = design(
    question=(
        "Of four reward models that differ in their first weights and in the order of their "
        "labels, does rewarding by all keep more of the truth than by one, at equal coefficients "
        "and at equal KL; and does their disagreement say where to hold a run, or when to stop it?"
    ),
    outcome=(
        "Gold is the task's own reward, which no run sees, of the final policy on 1,008 fresh "
        "answers, at its own exact reverse KL there: "
        + AT_EQUAL_KL.removeprefix(
            "Mean reward of the last tenth of a run at equal exact reverse KL of those updates, "
        ).replace("reward is", "gold is", 1)
        + f" At equal coefficients: {AT_EQUAL_BETA} Stopping, in the runs without a term on the "
        "first model, whose rewards the three others do not touch: gold of the last logging window "
        f"before the mean spread exceeds {SPREAD_BUDGET:g} times the first window's; of the one "
        f"before the exact reverse KL exceeds {KL_BUDGET} nats a token; of the window where the "
        "other members' mean is highest, and where the mean of all less two spreads is; each less "
        "the highest of the run. No prediction can name two rules, so it is said here: the KL "
        "budget is expected to keep at least 0.1 more than the spread does."
    ),
    margin=0.03,
    at=AT_END,
    equal="final_reverse_kl",
    predictions={
        "none_mean none_worst none_penalised > none_first: final_gold": (
            "an error that one model makes alone counts less"
        ),
        "mean worst penalised > first: final_gold at 0.1 0.2": "the same beside a KL term",
        "mean worst penalised = first: final_gold at equal KL": (
            "errors that all make are what is left, and of those each nat buys as much"
        ),
        "none_mean none_worst < none_first: spread": (
            "what several models reward is found where they agree, wrong or right"
        ),
        "growing beyond > none_mean: final_gold": (
            "a term that acts now and then is one, though the members agree on most that is lost"
        ),
        "none_mean < none_first: spread_gold": (
            "their spread does not grow while truth is lost, so it never stops a run"
        ),
    },
    pilots=(
        Pilot(
            tried=(
                "Starts 901 and 902, one seed each, four members on 5,000 labels, 300 updates: "
                "without a term and with the exact KL at 0.1 and 0.4, each on the first, the mean, "
                "the worst and the penalised; on the mean at 0.4 and 1, where the spread has grown "
                "and where it lies beyond the start's."
            ),
            runs=32,
            seen=(
                "Final gold without a term 0.38 and 0.18 on the first, 0.25 and 0.29 on the mean, "
                "0.31 and 0.33 on the worst, 0.39 and 0.34 penalised; at 0.1 0.53 and 0.42 against "
                "0.52 to 0.68 on the three, at 0.4 0.86 to 0.90 on all. Spread, last window over "
                "first, 1.8 and 4.6 on the first, 0.4 to 0.8 on the three. Without a term on the "
                "first, gold was 0.89 at the KL budget, 0.46 before the spread had grown by half, "
                "0.40 and 0.41 before it had doubled, 0.66 and 0.64 where the others' mean was "
                "highest. At 1 a term on some answers ended at 0.48 and 0.44 (growing), 0.46 and "
                "0.37 (beyond), at 0.4 at 0.42 and 0.34, 0.31 and 0.31. 6 s of a core a run."
            ),
            chosen=(
                "The configuration as it was, on ten other starts. 0.2 in place of 0.4, where "
                "little is lost and nothing differs; 1 for the terms on some answers; a spread "
                "grown by half as the place to stop."
            ),
        ),
    ),
)
