"""Populations whose design was written, and committed, before their runs.

Each has 20 seeds on 10 starts, and a pilot on other seeds and starts than its own. In order of
value; what is not recorded is an open question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from analysis.records.config import PolicyConfig, SortTask, StartConfig
from analysis.records.preset import AT_END, Design, Pilot, Preset, predict
from analysis.records.variants import Advantage, Objective, Variant
from analysis.studies.presets.parts import NO_KL, kl_variants, train_config
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice

NUM_SEEDS = 20
NUM_STARTS = 10
#: First seed of the starts; those of the pilots begin at 901.
FIRST_START = 40
#: Coefficients of a curve of reward over KL.
BETAS = (0.03, 0.1, 0.3, 1.0, 3.0)
#: Sampled terms that descend a KL, whose reward at equal KL is compared with the exact KL's.
COMPARED = ("k2_loss", "k3_loss", "k1_reward", "k3_loss_attached_prefix")

OF_COMPLETIONS = "both have the gradient of the KL of whole completions"

AT_EQUAL_KL = (
    "Mean reward of the last tenth of a run at equal exact reverse KL of those updates, by one "
    "hierarchical fit a comparison: reward is quadratic in log KL with coefficients of each "
    "variant's own; starts, seeds and what a start does to the difference are random effects. The "
    "difference is averaged over the log KL between the 10th and the 90th percentile of both "
    "variants' runs, where these overlap. The interval is t with one degree of freedom fewer than "
    "there are starts. Equivalent: two one-sided tests at 0.05."
)
_OVER_STARTS = (
    "over the seeds of a start: a t interval over the means of the starts. KLs are compared by "
    "their logarithm, with a margin of log 1.25. Equivalent: two one-sided tests at 0.05."
)
AT_EQUAL_BETA = (
    "A seed's difference in the last tenth of a run, averaged over the coefficients named, then "
    f"{_OVER_STARTS}"
)
AT_END_OF_TRAINING = f"A seed's difference in the last tenth of a run, averaged {_OVER_STARTS}"
STOPPING = (
    "All runs of the preset, once; none is left out or added. A run that is not finite counts at "
    "the worst value of its comparison. A prediction holds where its test says so at 0.05, is "
    "refuted where the interval excludes it, and is open otherwise; none is corrected for the "
    "number of predictions, which is stated beside them."
)
EXTENDED = (
    "The first ten seeds, one a start, were trained and read before the second ten were ordered: "
    "for every design that had ten, whatever it had shown, and with its predictions as they were. "
    f"{STOPPING}"
)


def prefix_ratio(beta: float) -> Variant:
    """k3 under the attached ratio of the prefix: the gradient of the KL of whole completions."""
    return Variant(kl=KLChoice(estimator="k3", weighting="attached", ratio="prefix"), beta=beta)


def design(
    *,
    predictions: Mapping[str, str],
    at: tuple[float, ...] = (),
    stopping: str = STOPPING,
    **said: Any,
) -> Design:
    """A design that ends as these presets do, its predictions in their shortest spelling."""
    return Design(predictions=predict(predictions, at=at), stopping=stopping, **said)


def on_ten_starts(runs: int, seen: str, *, chosen: str = "", **said: Any) -> Design:
    """A design whose pilot is the same configuration on one start and ten other seeds.

    Args:
        runs, seen: of the pilot.
        chosen: what else it decided.
        said: the rest of :func:`design`; by default accuracies at the end of training are
            compared, with a margin of 0.03.
    """
    tried = "The same configuration on one start (seed 0), ten seeds, recorded before."
    kept = f"{NUM_STARTS} other starts, {NUM_SEEDS} other seeds, the configuration as it was."
    pilot = Pilot(tried=tried, runs=runs, seen=seen, chosen=f"{kept} {chosen}".strip())
    ends = {"outcome": f"Accuracy. {AT_END_OF_TRAINING}", "margin": 0.03, "at": AT_END}
    return design(pilots=(pilot,), **ends | said)


def designed(
    written: Design,
    variants: Iterable[Variant],
    seeds: tuple[int, ...],
    *,
    start: Mapping[str, Any] | None = None,
    **config: Any,
) -> Preset:
    """Runs of a design, each variant on every seed.

    Args:
        start: what differs from starts of 150 updates.
        config: what differs from ``CONFIG``; cosines are measured only where it says so.
    """
    of_start = {"updates": 150, "seed": FIRST_START, "count": NUM_STARTS} | dict(start or {})
    shared = {"log_every": 10, "cosine_every": 0, "start": StartConfig(**of_start)}
    return Preset(
        config=train_config(**shared | config),
        variants=tuple(variants),
        seeds=seeds,
        predictions=written.sentences,
        design=written,
    )


def beside(others: Preset, written: Design, variants: Iterable[Variant]) -> Preset:
    """Runs of a design on the seeds and the configuration of a preset that was recorded before,
    which has the runs without a KL term."""
    return Preset(
        config=others.config,
        variants=tuple(variant for variant in variants if variant != NO_KL),
        seeds=others.seeds,
        predictions=written.sentences,
        design=written,
        beside=others,
    )


@preset
def equal_kl() -> Preset:
    """Which terms keep the policy near the reference, and what they cost in reward at equal KL."""
    terms = [v for beta in BETAS for v in (*kl_variants(beta), prefix_ratio(beta))]
    seeds = fresh_seeds(5000, NUM_SEEDS)
    return designed(_EQUAL_KL, (NO_KL, *terms), seeds, updates=150)


_EQUAL_KL = design(
    question=(
        "Which KL terms keep the policy near the reference, and what does each cost in reward "
        "against the exact KL at equal KL?"
    ),
    outcome=f"{AT_EQUAL_KL} Whether a term keeps the policy near: {AT_EQUAL_BETA}",
    margin=0.03,
    predictions={
        f"{' '.join(COMPARED)} = exact_loss: reward": "it descends a KL too",
        "k1_loss = none: reverse_kl at 0.03 0.1 0.3": (
            "its expected gradient is zero, and its noise is small at these coefficients"
        ),
        "k1_loss < none: reward at 1 3": "its noise stays, and it buys nothing",
        f"{' '.join(COMPARED)} exact_loss < none: reverse_kl at 0.3 1 3": "it descends a KL",
        "k2_reward > k1_reward: reverse_kl at 0.3 1 3": "in the reward it is no gradient of a KL",
        "k3_reward > none: reverse_kl at 0.3 1 3": (
            "a small ratio is paid for, so probability flows to one token"
        ),
        "k2_loss = exact_loss: reverse_kl at 0.03 0.1 0.3 1": (
            "on fresh samples it has the exact KL's expected gradient"
        ),
        "k3_loss_attached_prefix = k1_reward: reverse_kl at 0.03 0.1 0.3 1": OF_COMPLETIONS,
        "k3_loss_attached_prefix = k1_reward: reward": OF_COMPLETIONS,
    },
    pilots=(
        Pilot(
            tried=(
                "This preset's configuration on seeds 0 to 2 and starts 901 to 903: no KL term, "
                "and k2 as a loss, the prefix ratio, k1 in the reward and the exact KL at beta "
                "0.03, 0.3 and 3; 150 updates."
            ),
            runs=39,
            seen=(
                "Reward 0.45 without a KL term, 0.50 to 0.58 with one; reverse KL 0.20 without "
                "one, 0.03 to 0.16 with one, falling with beta in each; 0.8 s of a core a run."
            ),
            chosen=(
                "150 updates, the step size of the older presets, and these five coefficients: "
                "they span the KLs, and the reward has its top inside."
            ),
        ),
    ),
)


#: Of figure 2 of "Rethinking KL Divergence in RLHF" (Liu et al., 2025), read off the runs of
#: :func:`equal_kl`; written while they were trained and none had been read.
FIGURE2 = design(
    question="At equal KL, does k3 as a loss fluctuate more than k2 as a loss?",
    outcome=(
        "Logarithm of the fluctuation over the second half of a run, of the gradient norm and of "
        "the exact reverse KL (the root mean square of jumps from window to window, over the "
        "mean), in place of the reward, otherwise as in equal_kl: one hierarchical fit each on "
        "the log KL of the last tenth."
    ),
    margin=0.223,
    predictions={
        f"k3_loss = k2_loss: {metric}": (
            "near the reference the two gradients are equal to first order"
        )
        for metric in ("gradient_norm", "reverse_kl")
    },
    pilots=(
        Pilot(
            tried="The figure's setting: coefficient 0.04, one start, ten seeds; no longer kept.",
            runs=80,
            seen="Unresolved for both.",
            chosen="Equal KL in place of an equal coefficient; a margin of log 1.25.",
        ),
    ),
)


#: Name in labels -> how tokens are averaged.
AGGREGATIONS = {
    "mean": "seq_mean_token_mean",
    "batch_mean": "token_mean",
    "sum": "seq_mean_token_sum",
}


def averaged(name: str, how: str, beta: float, *, reward: bool = True) -> Variant:
    """A KL loss under one of the ways to average tokens, with or without a reward."""
    return Variant(
        label=f"{name}_{how}",
        kl=KLChoice(estimator=name.removeprefix("only_") if beta else "none"),
        beta=beta,
        objective=Objective(aggregation=AGGREGATIONS[how]),
        advantage=Advantage() if reward else Advantage(baseline="zero"),
    )


def averages(*betas: float) -> list[Variant]:
    """Under each average: no KL term, k2, k1 without a reward, and k1 beside it at each beta."""
    return [
        variant
        for how in AGGREGATIONS
        for variant in (
            averaged("none", how, 0.0),
            averaged("k2", how, 0.3),
            averaged("only_k1", how, 1.0, reward=False),
            *(averaged("k1", how, beta) for beta in betas),
        )
    ]


@preset
def aggregation_length() -> Preset:
    """What averaging tokens does to a KL loss and to the length of answers."""
    return designed(
        _AGGREGATION,
        averages(0.1, 0.3, 1.0),
        fresh_seeds(5100, NUM_SEEDS),
        updates=80,
        learning_rate=1e-3,
        task=SortTask(num_digits=6, end_token=True, max_fillers=8),
        start={"updates": 90, "fillers": (2, 4)},
    )


_AGGREGATION = design(
    question=(
        "Does k1 as a loss make answers longer under 1/|o| and not under sums, as its expected "
        "gradient there, that of E[1/|o|], says, and is it felt beside a reward?"
    ),
    outcome=f"Mean length of answers, in tokens. {AT_EQUAL_BETA}",
    margin=0.25,
    predictions={
        "only_k1_mean > only_k1_sum: length at 1": (
            "without a reward it descends E[1/|o|] under the one, and nothing under the other"
        ),
        "only_k1_batch_mean = only_k1_sum: length at 1": (
            "over a batch the weight of a token hardly depends on its own completion"
        ),
        "k1_mean > none_mean: length at 0.1 0.3 1": "beside a reward it descends E[1/|o|] too",
        "k1_sum = none_sum: length at 0.1 0.3 1": "its expected gradient is zero",
        "k1_batch_mean = none_batch_mean: length at 0.1 0.3 1": (
            "its expected gradient is nearly zero"
        ),
        "k2_mean = k2_sum: length at 0.3": "what k2 descends is zero at the reference",
        **{
            f"k2_{how} < none_{how}: reverse_kl at 0.3": (
                "under every weight it is smallest at the reference"
            )
            for how in AGGREGATIONS
        },
        "k2_mean = k2_sum: reverse_kl at 0.3": (
            "reward and KL have the same weights, and the optimizer takes out the scale"
        ),
    },
    pilots=(
        Pilot(
            tried=(
                "Seeds 0 to 2, starts 901 to 903, 100 updates: the three averages, each without a "
                "KL term, with k1 and with k2 at 0.3, and k1 at 1 without a reward."
            ),
            runs=36,
            seen=(
                "From a start of 10.0 tokens, k1 alone ended at 15.0 of at most 15 under 1/|o|, at "
                "10.8 and 10.9 under the others; beside a reward at 11.1, 9.7 and 9.7 against "
                "10.2, 9.6 and 9.6 without it."
            ),
            chosen=(
                "80 updates, before the answers of k1 alone have all reached the limit; three "
                "coefficients beside the reward. The predictions of k1_mean follow this pilot."
            ),
        ),
    ),
)


@preset
def long_completions() -> Preset:
    """The prefix ratio beside k1 in the reward and per-token terms, on answers of 32 tokens."""
    return designed(
        _LONG,
        with_terms(LONG_BETAS, LONG_TERMS),
        fresh_seeds(5200, NUM_SEEDS),
        updates=60,
        num_prompts=4,
        learning_rate=4e-3,
        task=SortTask(num_digits=32, reward="graded"),
        start={"updates": 80, "batch_size": 64},
    )


#: Of answers of 32 tokens and more.
LONG_BETAS = (0.03, 0.1, 0.3)
LONG_TERMS = ("exact_loss", "k2_loss", "k1_reward", "k3_loss_attached_prefix")


def long_answers(how_long: str, at_coefficients: Mapping[str, str], *pilots: Pilot) -> Design:
    """The design of long answers.

    Args:
        how_long: they are.
        at_coefficients: what is predicted of KLs beside the prefix ratio and k1 in the reward.
        pilots: made before.
    """
    return design(
        question=(
            "Does the attached prefix ratio train as k1 in the reward does when answers "
            f"{how_long}, and do terms that see one token at a time end elsewhere?"
        ),
        outcome=(
            f"Exact reverse KL per token at equal coefficients. {AT_EQUAL_BETA} The reward, the "
            f"share of right positions: {AT_EQUAL_KL}"
        ),
        margin=0.01,
        predictions={
            "k3_loss_attached_prefix = k1_reward: reverse_kl at 0.03 0.1 0.3": OF_COMPLETIONS,
            "k3_loss_attached_prefix = k1_reward: reward": OF_COMPLETIONS,
            **at_coefficients,
            "k2_loss k1_reward k3_loss_attached_prefix = exact_loss: reward": "each descends a KL",
            "k1_reward k3_loss_attached_prefix > exact_loss: gradient_norm at 0.3": (
                "the noise of all later tokens is in each token's weight"
            ),
        },
        pilots=pilots,
    )


_LONG = long_answers(
    "are 32 tokens long",
    {
        "k2_loss = exact_loss: reverse_kl at 0.03 0.1 0.3": (
            "on fresh samples it has the exact KL's expected gradient"
        ),
        "k1_reward = exact_loss: reverse_kl at 0.03 0.1 0.3": (
            "what a token does to later states is little in this task"
        ),
        "k3_loss_attached_prefix = exact_loss: reverse_kl at 0.03 0.1 0.3": (
            "what a token does to later states is little here"
        ),
    },
    Pilot(
        tried=(
            "Seeds 0 to 2, starts 901 to 903, 60 updates at step size 2e-3: no KL term, and k2 "
            "as a loss, the prefix ratio and k1 in the reward at 0.3 and 3."
        ),
        runs=21,
        seen="Reward from 0.43 to 0.46 at best; at beta 3 the policy hardly moves (0.005).",
        chosen="A larger step size and smaller coefficients.",
    ),
    Pilot(
        tried=(
            "Seeds 0 and 1, 80 updates at step size 4e-3, coefficient 0.1: reverse KL 0.50 "
            "without a KL term, 0.12 to 0.16 with one; reward 0.39 to 0.47."
        ),
        runs=8,
        seen="The terms restrain alike; 1.7 s of a core a run.",
        chosen="60 updates at 4e-3, three coefficients, a margin of 0.01 of the reward.",
    ),
)


@preset
def equal_kl_ended() -> Preset:
    """Reward at equal KL on a second task: answers that end, some fillers, a graded reward."""
    return designed(
        _ENDED,
        with_terms((0.1, 0.3, 1.0), ("exact_loss", *SAMPLED), sums=True),
        fresh_seeds(5300, NUM_SEEDS),
        updates=100,
        task=SortTask(num_digits=6, end_token=True, max_fillers=2, reward="graded"),
        start={"updates": 110},
    )


@preset
def equal_kl_wide() -> Preset:
    """Reward at equal KL in a policy twice as wide."""
    return designed(
        _WIDE,
        with_terms((0.1, 0.3, 1.0), ("exact_loss", *SAMPLED)),
        fresh_seeds(5400, NUM_SEEDS),
        updates=100,
        learning_rate=1e-3,
        policy=PolicyConfig(width=64),
        start={"updates": 110},
    )


#: Sampled terms that are compared on other tasks and policies.
SAMPLED = ("k2_loss", "k3_loss", "k1_reward")


def _elsewhere(where: str, pilot: Pilot) -> Design:
    terms = " ".join(SAMPLED)
    return design(
        question=f"Do the terms cost the same reward at equal KL {where}?",
        outcome=AT_EQUAL_KL,
        margin=0.03,
        predictions={
            f"{terms} = exact_loss: reward": "it descends a KL too",
            f"{terms} exact_loss < none: reverse_kl at 0.1 0.3 1": "it descends a KL",
        },
        pilots=(pilot,),
    )


_ENDED = _elsewhere(
    "on a second task, whose answers end",
    Pilot(
        tried=(
            "Seeds 0 and 1, starts 901 to 903: no KL term, the exact KL and k1 in the reward at "
            "0.1 and 1, tokens summed."
        ),
        runs=10,
        seen="Reward 0.75 at the start, 0.79 to 0.84 at the end; reverse KL 0.02 to 0.29.",
        chosen="The configuration as it was tried; 0.6 s of a core a run.",
    ),
)

_WIDE = _elsewhere(
    "in a policy twice as wide",
    Pilot(
        tried=(
            "Seeds 0 and 1, starts 901 to 903 of 90 updates, step size 2e-3: no KL term, the exact "
            "KL and k1 in the reward at 0.1 and 1."
        ),
        runs=10,
        seen=(
            "Reward fell from 0.23 to 0.03 without a KL term, and rose to 0.34 and 0.41 at beta 1: "
            "the step is too large for this width."
        ),
        chosen="Half the step size and starts of 110 updates, not tried beforehand.",
    ),
)


def with_terms(
    betas: tuple[float, ...], names: tuple[str, ...], *, sums: bool = False
) -> tuple[Variant, ...]:
    """No KL term, and these terms at each coefficient; tokens averaged or summed."""
    of_beta = [v for beta in betas for v in (*kl_variants(beta), prefix_ratio(beta))]
    objective = Objective(aggregation=AGGREGATIONS["sum" if sums else "mean"])
    chosen = (NO_KL, *(variant for variant in of_beta if variant.name in names))
    return tuple(variant.model_copy(update={"objective": objective}) for variant in chosen)
